"""The space driver gives what jax.value_and_grad gives for the whole batch."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum as oa

B, T = 24, 6


def batch_of(rng, examples=B):
    lengths = rng.integers(1, T + 1, (examples, 1))
    lengths[::5] = 0
    return {
        "tokens": jnp.asarray(rng.integers(0, 7, (examples, T))),
        "targets": jnp.asarray(rng.normal(size=(examples, T, 3))),
        "mask": jnp.asarray((np.arange(T) < lengths) * 1.0),
    }


def params_of(rng):
    return {"w": jnp.asarray(rng.normal(size=(5, 3))), "e": jnp.asarray(rng.normal(size=(7, 5)))}


def loss_fn(params, batch):
    h = jnp.tanh(params["e"][batch["tokens"]]) @ params["w"]
    losses = ((h - batch["targets"]) ** 2).sum(-1)
    mean = (losses * batch["mask"]).sum() / batch["mask"].sum()
    return mean, {"losses": losses.sum(-1), "tokens": batch["mask"].sum(), "largest": losses.max()}


AUX = {"losses": "concat", "tokens": "sum", "largest": "max"}


def tokens(batch):
    return batch["mask"].sum()


def assert_close(got, want, tolerance=1e-12):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("k", [1, 2, 3, 8])
@pytest.mark.parametrize("engine", ["carry", "refs", "auto"])
@pytest.mark.parametrize("layout", ["strided", "contiguous", "stacked"])
def test_ragged_masks_in_float64(x64, k, engine, layout):
    rng = np.random.default_rng(k)
    params, batch = params_of(rng), batch_of(rng)
    want = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
    if layout == "stacked":
        batch = jax.tree.map(lambda x: x.reshape(k, B // k, *x.shape[1:]), batch)
    grad_fn = oa.value_and_grad(
        loss_fn, k, has_aux=True, weight=tokens, engine=engine, batch_layout=layout, aux=AUX
    )
    assert_close(jax.jit(grad_fn)(params, batch), want)
    if k == 2:
        assert_close(grad_fn(params, batch), want)


@pytest.mark.parametrize("examples, k", [(10, 4), (5, 8), (1, 3)])
@pytest.mark.parametrize("layout", ["strided", "contiguous"])
def test_any_size_with_an_exact_remainder(x64, examples, k, layout):
    rng = np.random.default_rng(0)
    params, batch = params_of(rng), batch_of(rng, examples)
    batch["mask"] = jnp.ones_like(batch["mask"])
    want = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
    for engine, weight in (("carry", tokens), ("refs", None)):
        grad_fn = oa.value_and_grad(
            loss_fn,
            k,
            has_aux=True,
            engine=engine,
            weight=weight,
            aux=AUX,
            batch_layout=layout,
            remainder="exact",
        )
        assert_close(jax.jit(grad_fn)(params, batch), want)


# What follows is small: a scalar parameter, examples x.


def square(w, x):
    return jnp.mean((w - x) ** 2)


@pytest.mark.parametrize("k", [1, 4])
def test_micro_batch_without_weight_is_not_computed(k):
    """Its loss is 0/0, and its work is not done."""
    calls = []
    mask = jnp.ones(8).at[::4].set(0.0).at[1::4].set(0.0)  # micro-batches 0 and 1 of 4

    def loss(w, batch):
        jax.debug.callback(lambda: calls.append(None))
        return jnp.sum(batch["m"] * (w - batch["x"]) ** 2) / jnp.sum(batch["m"])

    batch = {"x": jnp.arange(8.0), "m": mask if k == 4 else jnp.zeros(8)}
    grad_fn = jax.jit(oa.value_and_grad(loss, k, weight=lambda b: b["m"].sum(), has_stats=True))
    (value, stats), grad = jax.block_until_ready(grad_fn(jnp.zeros([]), batch))
    jax.effects_barrier()
    kept = np.arange(8.0)[np.asarray(batch["m"]) > 0]
    assert len(calls) == (2 if k == 4 else 0)
    np.testing.assert_allclose(value, np.mean(kept**2) if len(kept) else 0)
    np.testing.assert_allclose(grad, -2 * kept.mean() if len(kept) else 0)
    assert (float(stats.weight), int(stats.skipped)) == (len(kept), 0)


@pytest.mark.parametrize("k", [1, 4])
def test_a_micro_batch_that_is_not_finite_leaves_nothing_behind(k):
    def loss(w, state, x):
        value = jnp.mean((w - x) ** 2)
        return value, (state + 1, {"mean": value, "top": x.max()})

    x = jnp.arange(8.0).at[2].set(jnp.nan)  # micro-batch 2 of 4
    grad_fn = oa.value_and_grad(
        loss,
        k,
        batch_argnums=2,
        state_argnum=1,
        has_aux=True,
        nonfinite="skip_micro_step",
        aux={"mean": "mean", "top": "max"},
        has_stats=True,
    )
    (value, (state, aux), stats), grad = jax.jit(grad_fn)(jnp.zeros([]), jnp.zeros([]), x)
    kept = np.array([0.0, 4, 1, 5, 3, 7]) if k == 4 else np.array([])
    assert (float(stats.weight), int(stats.skipped)) == (len(kept), 1)
    assert float(state) == (3 if k == 4 else 0)
    if k == 4:
        np.testing.assert_allclose([value, aux["mean"]], np.mean(kept**2), rtol=1e-6)
        np.testing.assert_allclose(grad, -2 * kept.mean(), rtol=1e-6)
        assert float(aux["top"]) == 7
    else:
        assert float(grad) == float(value) == 0


@pytest.mark.parametrize("reduction, value, grad", [("mean", 17.5, -7.0), ("sum", 140.0, -56.0)])
@pytest.mark.parametrize("engine", ["carry", "refs"])
def test_reductions(reduction, value, grad, engine):
    loss = square if reduction == "mean" else lambda w, x: jnp.sum((w - x) ** 2)
    got = oa.value_and_grad(loss, 4, loss_reduction=reduction, engine=engine)(
        jnp.zeros([]), jnp.arange(8.0)
    )
    np.testing.assert_allclose(got, (value, grad))


def test_sum_over_weight():
    mask = jnp.arange(8) % 3 > 0
    loss = lambda w, b: jnp.sum(b[1] * (w - b[0]) ** 2)  # noqa: E731
    grad_fn = oa.value_and_grad(
        loss, 4, weight=lambda b: b[1].sum(), loss_reduction="sum_over_weight"
    )
    got = grad_fn(jnp.zeros([]), (jnp.arange(8.0), mask))
    kept = np.arange(8.0)[np.asarray(mask)]
    np.testing.assert_allclose(got, (np.mean(kept**2), -2 * kept.mean()), rtol=1e-6)


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)])
def test_keys_differ_between_micro_steps(key):
    loss = lambda w, x, key: (w * x.sum(), jax.random.normal(key, (3,)))  # noqa: E731
    grad_fn = oa.value_and_grad(loss, 4, has_aux=True, rng_argnums=2, aux="stack")
    (_, noise), _ = grad_fn(jnp.ones([]), jnp.ones(8), key)
    right = [jax.random.normal(jax.random.fold_in(key, i), (3,)) for i in range(4)]
    np.testing.assert_array_equal(noise, right)
    assert len({row.tobytes() for row in np.asarray(noise)}) == 4


def test_state_is_threaded_or_merged():
    loss = lambda w, s, x: (jnp.mean((w - x) ** 2), 0.5 * s + x.mean())  # noqa: E731
    x = jnp.arange(8.0)
    keywords = {"batch_argnums": 2, "state_argnum": 1, "batch_layout": "contiguous"}
    (_, state), _ = oa.value_and_grad(loss, 4, **keywords)(jnp.zeros([]), jnp.ones([]), x)
    right = 1.0
    for mean in (0.5, 2.5, 4.5, 6.5):
        right = 0.5 * right + mean
    assert float(state) == right
    seen = []

    def merge(initial, stacked, weights):
        seen.extend((initial, stacked, weights))
        return initial + stacked.sum()

    (_, state), _ = oa.value_and_grad(loss, 3, merge_state=merge, remainder="exact", **keywords)(
        jnp.zeros([]), jnp.ones([]), x
    )
    initial, stacked, weights = seen
    assert float(initial) == 1 and float(state) == 14
    np.testing.assert_allclose(stacked, [1.5, 4.5, 7.0])
    np.testing.assert_allclose(weights, [3, 3, 2])


REDUCED = {
    "mean": [3.5, 8.0],
    "sum": [14.0, 32.0],
    "max": [6.5, 14.0],
    "min": [0.5, 2.0],
    "last": [6.5, 14.0],
    "stack": [[0.5, 2.0], [2.5, 6.0], [4.5, 10.0], [6.5, 14.0]],
}


@pytest.mark.parametrize("reducer", REDUCED)
def test_aux_reducers(reducer):
    loss = lambda w, x: (jnp.mean(w * x), {"a": jnp.array([x.mean(), 2 * x.max()])})  # noqa: E731
    grad_fn = oa.value_and_grad(loss, 4, has_aux=True, aux=reducer, batch_layout="contiguous")
    (_, aux), _ = grad_fn(jnp.ones([]), jnp.arange(8.0))
    np.testing.assert_allclose(aux["a"], REDUCED[reducer])


def test_several_argnums_keywords_and_a_narrow_loss():
    def loss(w, x, b, *, scale):
        return (scale * jnp.mean((w * x - b) ** 2)).astype(jnp.bfloat16)

    x = jnp.ones(257 * 2)
    grad_fn = oa.value_and_grad(loss, 257, argnums=(0, 2), engine="auto")
    value, grads = grad_fn(jnp.float32(3), x, jnp.float32(1), scale=1.0)
    assert value.dtype == jnp.bfloat16 and float(value) == 4.0
    np.testing.assert_allclose(grads, (4.0, -4.0), rtol=1e-5)  # a bfloat16 1/257 would be 0.2% off


def test_calls_are_weighted_micro_steps_of_the_time_driver():
    tx = oa.accumulate(optax.sgd(1.0), 2)
    grad_fn = oa.value_and_grad(square, 2, has_stats=True)
    params, state = jnp.zeros([]), tx.init(jnp.zeros([]))
    for x in (jnp.array([1.0, 3.0]), jnp.array([5.0, 7.0, 9.0, 11.0])):
        (_, stats), grad = grad_fn(params, x)
        updates, state = tx.update(grad, state, params, weight=stats.weight)
    np.testing.assert_allclose(updates, 2 * np.mean([1, 3, 5, 7, 9, 11]))


@pytest.mark.parametrize("engine", ["carry", "refs", "auto"])
def test_outer_differentiation_and_vmap(engine):
    grad_fn = oa.value_and_grad(lambda w, x: jnp.mean(jnp.sin(w * x)), 4, engine=engine)
    whole = jax.grad(lambda w, x: jnp.mean(jnp.sin(w * x)))
    x, w = jnp.arange(8.0), jnp.float32(0.3)
    second = jax.grad(lambda w: grad_fn(w, x)[1])(w)
    np.testing.assert_allclose(second, jax.grad(whole)(w, x), rtol=1e-5)
    batch = jnp.stack([x, 2 * x])
    if engine == "refs":
        with pytest.raises(ValueError, match="type engine='carry'"):
            jax.vmap(grad_fn, (None, 0))(w, batch)
        return
    lanes = jax.vmap(grad_fn, (None, 0))(w, batch)[1]
    np.testing.assert_allclose(lanes, [whole(w, row) for row in batch], rtol=1e-5)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("engine", ["carry", "refs"])
def test_a_sharded_batch_is_cut_where_it_lies(explicit, engine):
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x = jax.device_put(jnp.arange(64.0 * 4).reshape(64, 4) / 99, NamedSharding(mesh, P("data")))
    w = jax.device_put(jnp.ones((4, 4)) / 9, NamedSharding(mesh, P()))
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)  # noqa: E731
    with jax.set_mesh(mesh):
        grad_fn = jax.jit(oa.value_and_grad(loss, 4, engine=engine))
        compiled = grad_fn.lower(w, x).compile()
        got = grad_fn(w, x)
    moved = [c for c in oa.verify.collectives(compiled) if c.kind != "all-reduce"]
    assert not moved
    want = jax.value_and_grad(loss)(jnp.asarray(np.asarray(w)), jnp.asarray(np.asarray(x)))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5)


@pytest.mark.parametrize("engine", ["carry", "refs"])
def test_memory_at_the_floor_and_flat_in_k(engine):
    layers, width, rows = 8, 128, 2
    params = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
    size = layers * width * width * 4

    def loss(w, x):
        h, _ = jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), x, w)
        return jnp.mean(h**2)

    temporaries = []
    for k in (2, 64):
        x = jax.ShapeDtypeStruct((k * rows, width), jnp.float32)
        step = oa.value_and_grad(loss, k, engine=engine)
        memory = jax.jit(step).lower(params, x).compile().memory_analysis()
        temporaries.append(memory.temp_size_in_bytes / size)
    assert abs(temporaries[1] / temporaries[0] - 1) < 0.01 or temporaries[1] < 0.4
    assert temporaries[0] < (0.4 if engine == "refs" else 1.4)


FINE = {"w": jnp.zeros([]), "x": jnp.arange(10.0)}


@pytest.mark.parametrize(
    "keywords, shown",
    [
        ({}, "expected one of them"),
        ({"k": 4}, "batch of 10 does not split into 4 micro-batches; use k=2, k=5 or k=10"),
        ({"micro_batch_size": 3}, "use micro_batch_size=2, micro_batch_size=5"),
        ({"k": 2, "engine": "fast"}, "engine='refs'"),
        ({"k": 2, "weight": 3.0}, "expected a function of a micro-batch"),
        ({"k": 2, "weight": len, "loss_reduction": "sum"}, "drop weight="),
        ({"k": 2, "loss_reduction": "sum_over_weight"}, "weight is missing"),
        ({"k": 2, "batch_argnums": 0}, "argument 0 is in argnums and in batch_argnums"),
        ({"k": 2, "nonfinite": "skip_window"}, "nonfinite='skip_micro_step'"),
        ({"k": 2, "merge_state": max}, "state_argnum="),
        ({"k": 2, "nonfinite": "skip_micro_step", "engine": "refs"}, "with refs there is none"),
        ({"k": 2, "accumulator_dtype": jnp.bfloat16, "engine": "refs"}, "in the parameter's dtype"),
    ],
)
def test_errors(keywords, shown):
    with pytest.raises((ValueError, TypeError)) as caught:
        oa.value_and_grad(square, **keywords)(FINE["w"], FINE["x"])
    assert shown in str(caught.value)


def test_errors_of_leaves():
    loss = lambda w, b: jnp.mean(w * b["x"])  # noqa: E731
    grad_fn = oa.value_and_grad(loss, 2)
    for batch, shown in (
        ({"x": jnp.ones(4), "n": 3.0}, "'n'] of the batch has shape ()"),
        ({"x": jnp.ones(4), "y": jnp.ones(6)}, "'y'] of the batch has leading axes (6,)"),
        ({}, "the batch has no arrays"),
    ):
        with pytest.raises(ValueError) as caught:
            grad_fn(jnp.ones([]), batch)
        assert shown in str(caught.value)
    for aux, shown in ((None, "only floating scalars"), ({"a": "mean"}, "tree prefix")):
        with pytest.raises(ValueError) as caught:
            oa.value_and_grad(lambda w, x: (w, x), 2, has_aux=True, aux=aux)(FINE["w"], FINE["x"])
        assert shown in str(caught.value)
    with pytest.raises(TypeError, match="expected a real floating scalar"):
        oa.value_and_grad(lambda w, x: w * x, 2)(FINE["w"], FINE["x"])


@pytest.mark.parametrize("bad", [float("nan"), -1.0, float("inf")])
def test_a_traced_weight_that_is_none_drops_its_own_micro_batch_alone(bad):
    grad_fn = oa.value_and_grad(
        lambda w, b: square(w, b["x"]),
        4,
        weight=lambda b: b["w"].sum(),
        nonfinite="skip_micro_step",
        has_stats=True,
    )
    batch = {"x": jnp.arange(8.0), "w": jnp.ones(8).at[1].set(bad).at[5].set(0.0)}
    (value, stats), grad = jax.jit(grad_fn)(jnp.zeros([]), batch)
    kept = np.array([0.0, 4, 2, 6, 3, 7])
    np.testing.assert_allclose((value, grad), (np.mean(kept**2), -2 * kept.mean()), rtol=1e-6)
    assert (float(stats.weight), int(stats.skipped)) == (6.0, 1)


def test_an_argument_as_long_as_the_batch_is_asked_after():
    """One example a micro-batch broadcasts against it silently; else jax's error gets a note."""
    loss = lambda w, x, y: jnp.mean((w * x - y) ** 2)  # noqa: E731
    x, y = jnp.arange(8.0), jnp.arange(8.0) + 1
    with pytest.warns(UserWarning, match=r"argument 2 of loss_fn.*batch_argnums=\(1, 2\)"):
        oa.value_and_grad(loss, 8)(jnp.ones([]), x, y)
    with pytest.raises(TypeError, match="incompatible shapes") as caught:
        oa.value_and_grad(loss, 4)(jnp.ones([]), x, y)
    assert any("batch_argnums=(1, 2)" in note for note in caught.value.__notes__)
    value, _ = oa.value_and_grad(loss, 8, batch_argnums=(1, 2))(jnp.ones([]), x, y)
    assert float(value) == 1.0


def test_a_key_that_all_micro_steps_share_is_asked_after():
    def loss(w, x, key=None, y=None):
        del key, y
        return jnp.mean(w * x)

    w, x, key = jnp.ones([]), jnp.arange(8.0), jax.random.key(0)
    match = r"argument 2 of loss_fn, a PRNG key.*type rng_argnums=2 and each"
    with pytest.warns(UserWarning, match=match):
        oa.value_and_grad(loss, 4)(w, x, key)
    with pytest.warns(UserWarning, match=r"key of loss_fn.*rng_argnums= .*pass key by position"):
        jax.jit(oa.value_and_grad(loss, 4))(w, x, key={"dropout": key})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        oa.value_and_grad(loss, 1)(w, x, key)
        oa.value_and_grad(loss, 4, rng_argnums=2)(w, x, key)
        oa.value_and_grad(loss, 4)(w, x, {"step": jnp.int32(0), "key": key})


@pytest.mark.parametrize("layout", ["strided", "contiguous"])
def test_concat_gives_the_batchs_order_or_an_error(layout):
    loss = lambda w, x: (jnp.mean((x * w) ** 2), x.reshape(-1))  # noqa: E731
    x = jnp.arange(24.0).reshape(8, 3)
    grad_fn = oa.value_and_grad(loss, 4, has_aux=True, aux="concat", batch_layout=layout)
    if layout == "strided":
        with pytest.raises(ValueError, match=r"shape \(6,\), expected a row for each of the 2"):
            grad_fn(jnp.ones([]), x)
    else:
        np.testing.assert_array_equal(grad_fn(jnp.ones([]), x)[0][1], x.reshape(-1))
    alone = oa.value_and_grad(
        lambda w, x: (jnp.mean((x * w) ** 2), x),
        micro_batch_size=16,
        remainder="exact",
        has_aux=True,
        aux="concat",
        batch_layout=layout,
    )
    np.testing.assert_array_equal(alone(jnp.ones([]), x)[0][1], x)


def test_a_smaller_micro_batch_is_not_broadcast_into_the_others_outputs():
    loss = lambda w, x: (jnp.mean(x * w), x)  # noqa: E731
    for aux in ("sum", "mean", "max", "min", "last", "stack"):
        grad_fn = oa.value_and_grad(
            loss, micro_batch_size=2, remainder="exact", has_aux=True, aux=aux
        )
        with pytest.raises(ValueError, match=r"shape \(2,\) in a micro-batch and \(1,\)"):
            grad_fn(jnp.ones([]), jnp.arange(5.0))


def test_fractional_weights_in_float64(x64):
    rng = np.random.default_rng(0)
    batch = {"x": jnp.asarray(rng.normal(size=(8, 3))), "m": jnp.asarray(rng.uniform(size=8))}
    w = jnp.asarray(rng.normal(size=3))

    def loss(w, b):
        return (b["m"] * jnp.tanh(b["x"] @ w)).sum() / b["m"].sum()

    want = jax.value_and_grad(loss)(w, batch)
    for k in (1, 4):
        for engine in ("carry", "refs"):
            got = oa.value_and_grad(loss, k, weight=lambda b: b["m"].sum(), engine=engine)(w, batch)
            assert_close(got, want, 1e-13)


@pytest.mark.parametrize("dtype, right", [(jnp.bfloat16, 512), (jnp.int8, 512), (bool, 512)])
def test_sums_of_narrow_outputs_neither_stagnate_nor_wrap(dtype, right):
    loss = lambda w, x: (jnp.mean(w * x), jnp.ones([], dtype))  # noqa: E731
    (_, total), _ = oa.value_and_grad(loss, 512, has_aux=True, aux="sum")(
        jnp.ones([]), jnp.ones(512)
    )
    assert int(total) == right


def test_a_merged_state_keeps_its_shape():
    loss = lambda w, s, x: (jnp.mean(w * x), s + x.sum())  # noqa: E731
    keywords = {"batch_argnums": 2, "state_argnum": 1}
    for merge, shown in ((lambda i, s, w: s, "shape"), (lambda i, s, w: None, "structure")):
        with pytest.raises((ValueError, TypeError), match=f"what merge_state returned.*{shown}"):
            oa.value_and_grad(loss, 4, merge_state=merge, **keywords)(
                jnp.ones([]), jnp.zeros([]), jnp.arange(8.0)
            )


@pytest.mark.parametrize(
    "keywords, shown",
    [
        ({"k": 2, "argnums": 1.0}, "argnums is 1.0, expected the number of an argument"),
        ({"k": 2, "argnums": (0, 0)}, "argnums holds argument 0 twice"),
        ({"k": 0}, "k is 0 (int), expected an integer of 1 or more"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0 (int)"),
        ({"k": 2, "weight": lambda x: x}, "what weight returned is float32[5]"),
        ({"k": 2, "merge_state": 3}, "merge_state is int"),
    ],
)
def test_more_errors(keywords, shown):
    with pytest.raises((ValueError, TypeError)) as caught:
        oa.value_and_grad(square, **keywords)(FINE["w"], FINE["x"])
    assert shown in str(caught.value)
    with pytest.raises(TypeError, match="loss_fn is float32"):
        oa.value_and_grad(FINE["w"], 2)
    assert oa.value_and_grad(square, 2, argnums=np.int64(0))(FINE["w"], FINE["x"])[1].shape == ()
