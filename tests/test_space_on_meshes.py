"""The space driver in global view: a batch sharded over eight devices, plain jit and no keyword."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum as oa

K, B, D, LAYERS = 4, 64, 32, 16
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
REPLICATED = {"layers": P(), "head": P()}
SHARDED = {"layers": P(None, "data"), "head": P("data")}  # FSDP: along an axis, over "data"
P_BYTES = 4 * (LAYERS * D * D + D * 8)


def loss_fn(params, batch):
    body = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
    h, _ = jax.lax.scan(body, batch["x"], params["layers"])
    return jnp.mean(jnp.square(h @ params["head"] - batch["y"]))


def flat_loss_fn(params, batch):
    """Without a loop inside, so that every product of a micro-step is counted once."""
    return jnp.mean(jnp.square(jnp.tanh(batch["x"] @ params["w"]) @ params["w"].T - batch["x"]))


def host():
    rng = np.random.default_rng(0)
    params = {
        "layers": rng.normal(size=(LAYERS, D, D)) / D**0.5,
        "head": rng.normal(size=(D, 8)) / D**0.5,
    }
    batch = {"x": rng.normal(size=(B, D)), "y": rng.normal(size=(B, 8))}
    return jax.tree.map(np.float32, (params, batch))


def mesh_of(kind):
    return jax.make_mesh((8,), ("data",), axis_types=(KINDS[kind],))


def placed(mesh, specs):
    params, batch = host()
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    return (
        {name: put(x, specs[name]) for name, x in params.items()},
        {name: put(x, P("data")) for name, x in batch.items()},
    )


def compiled_on(mesh, f, args, **options):
    with jax.set_mesh(mesh):
        return jax.jit(f, **options).lower(*args).compile()


def moved(compiled):
    """Collectives that are no reductions."""
    return [c for c in oa.verify.collectives(compiled) if c.kind != "all-reduce"]


def assert_close(got, want, **tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), **tolerance)


# The cut.


def flat_args(mesh):
    x, w = (np.random.default_rng(i).normal(size=(16 * B, D)).astype(np.float32) for i in range(2))
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    return {"w": put(w[:D], P())}, {"x": put(x, P("data"))}


@pytest.mark.parametrize("engine", ["carry", "refs"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_batch_stays_where_it_is_and_each_device_does_its_share(kind, engine):
    """The work of all micro-steps is that of the whole batch, on every device."""
    mesh = mesh_of(kind)
    args = flat_args(mesh)
    driven = compiled_on(mesh, oa.value_and_grad(flat_loss_fn, K, engine=engine), args)
    whole = compiled_on(mesh, jax.value_and_grad(flat_loss_fn), args)
    assert not moved(driven)
    # A loop is counted once, whatever its length: this is the work of one micro-step, and the
    # little that is done once.
    ratio = K * driven.cost_analysis()["flops"] / whole.cost_analysis()["flops"]
    assert 1 <= ratio < 1.05, ratio


@pytest.mark.parametrize("kind", KINDS)
def test_the_contiguous_cut_moves_the_batch(kind):
    """So that the test above is seen to be able to fail."""
    mesh = mesh_of(kind)
    grad_fn = oa.value_and_grad(flat_loss_fn, K, batch_layout="contiguous")
    assert moved(compiled_on(mesh, grad_fn, flat_args(mesh)))


@pytest.mark.parametrize(
    "specs", [pytest.param(REPLICATED, marks=pytest.mark.full), SHARDED], ids=["whole", "sharded"]
)
@pytest.mark.parametrize("engine", ["carry", "refs"])
@pytest.mark.parametrize("kind", KINDS)
def test_eight_devices_give_what_one_gives(kind, engine, specs):
    mesh = mesh_of(kind)
    args = placed(mesh, specs)
    with jax.set_mesh(mesh):
        got = jax.jit(oa.value_and_grad(loss_fn, K, engine=engine))(*args)
    want = jax.jit(jax.value_and_grad(loss_fn))(*host())
    assert_close(got, want, rtol=1e-5, atol=1e-6)


def ragged():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3 * 8 * 2 + 8, 4)).astype(np.float32)  # three of 16, and a rest of 8
    mask = (np.arange(4) < rng.integers(1, 5, size=(len(x), 1))).astype(np.float32)
    return rng.normal(size=(4, 4)).astype(np.float32), {"x": x, "mask": mask}


def ragged_loss(w, b):
    each = jnp.square(jnp.tanh(b["x"] @ w) * b["mask"]).sum(-1)
    return each.sum() / b["mask"].sum(), {"each": each, "most": each.max()}


WAYS = {
    "plain": {},
    "weights, skipping": {"weight": lambda b: b["mask"].sum(), "nonfinite": "skip_micro_step"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_aux_of_every_example_and_a_remainder(kind, way):
    """Results an example in the batch's order, a rest of half a micro-batch."""
    w, batch = ragged()
    if way == "plain":
        batch["mask"][:] = 1
    want = jax.jit(jax.value_and_grad(ragged_loss, has_aux=True))(w, batch)
    mesh = mesh_of(kind)
    grad_fn = oa.value_and_grad(
        ragged_loss,
        micro_batch_size=16,
        has_aux=True,
        aux={"each": "concat", "most": "max"},
        remainder="exact",
        **WAYS[way],
    )
    with jax.set_mesh(mesh):
        sharded = jax.device_put(batch, NamedSharding(mesh, P("data")))
        got = jax.jit(grad_fn)(jax.device_put(w, NamedSharding(mesh, P())), sharded)
    assert_close(got, want, rtol=1e-5, atol=1e-6)


REDUCED = {
    "mean": lambda rows: rows.mean(0),
    "sum": lambda rows: rows.sum(0),
    "max": lambda rows: rows.max(0),
    "last": lambda rows: rows[-1],
    "stack": lambda rows: rows,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_aux_and_state_that_are_sharded(kind, way):
    """Both have an axis of examples, one of a micro-batch each."""

    def loss(w, state, b):
        each = b["x"] @ w
        aux = dict.fromkeys(REDUCED, each)
        return jnp.mean(jnp.square(each + state)), (0.5 * state + each, aux)

    rng = np.random.default_rng(2)
    w, x = rng.normal(size=4).astype(np.float32), rng.normal(size=(32, 4)).astype(np.float32)
    mesh = mesh_of(kind)
    grad_fn = oa.value_and_grad(
        loss,
        2,
        batch_argnums=2,
        state_argnum=1,
        has_aux=True,
        aux={name: name for name in REDUCED},
        **WAYS[way],
    )
    with jax.set_mesh(mesh):
        batch = {"x": x, "mask": np.ones_like(x)}
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        state = jax.device_put(np.zeros(16, np.float32), NamedSharding(mesh, P("data")))
        w_there = jax.device_put(w, NamedSharding(mesh, P()))
        (_, (state, aux)), _ = jax.jit(grad_fn)(w_there, state, batch)
    rows = np.stack([x[i::2] @ w for i in range(2)])
    np.testing.assert_allclose(state, 0.5 * rows[0] + rows[1], rtol=1e-5, atol=1e-6)
    for name, reduce in REDUCED.items():
        np.testing.assert_allclose(aux[name], reduce(rows), rtol=1e-5, atol=1e-6)


# The window, where the parameters are sharded.


def sharded_like(shardings, like):
    return all(
        got.is_equivalent_to(want.sharding, want.ndim)
        for got, want in zip(jax.tree.leaves(shardings), jax.tree.leaves(like), strict=True)
    )


def updated(grad_fn):
    """The gradient, and the parameters that it makes: what a training loop compiles."""

    def update(params, batch):
        value, grads = grad_fn(params, batch)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return update


def made(compiled):
    """Temporaries and results of a device, in bytes of all the parameters."""
    memory = compiled.memory_analysis()
    return (memory.temp_size_in_bytes + memory.output_size_in_bytes) / P_BYTES


@pytest.mark.parametrize("engine", ["carry", "refs"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_window_is_sharded_like_the_parameters(kind, engine):
    mesh = mesh_of(kind)
    grad_fn = oa.value_and_grad(loss_fn, K, engine=engine)
    whole, sharded = (
        compiled_on(mesh, updated(grad_fn), placed(mesh, specs)) for specs in (REPLICATED, SHARDED)
    )
    args = placed(mesh, SHARDED)
    assert sharded_like(sharded.output_shardings[1], args[0])
    # carry makes a micro-gradient beside the window; both are cut into eighths.
    buffers = {"carry": 2, "refs": 1}[engine]
    assert made(whole) - made(sharded) > 0.95 * buffers * 7 / 8, (made(whole), made(sharded))
    assert made(sharded) < 1


@pytest.mark.parametrize("engine", ["carry", "refs"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_come_back_sharded_like_the_parameters(kind, engine):
    """On an automatic mesh the compiler chooses, as for jax.value_and_grad; out_shardings tell."""
    mesh = mesh_of(kind)
    args = placed(mesh, SHARDED)
    grad_fn = oa.value_and_grad(loss_fn, K, engine=engine)
    shardings = jax.tree.map(lambda x: x.sharding, args[0])
    asked = compiled_on(mesh, grad_fn, args, out_shardings=(None, shardings))
    assert sharded_like(asked.output_shardings[1], args[0])
    if kind == "explicit":
        assert sharded_like(compiled_on(mesh, grad_fn, args).output_shardings[1], args[0])


@pytest.mark.parametrize("engine", ["carry", "refs"])
def test_each_micro_batch_reduces_into_the_sharded_window(engine):
    """The memory-lean default: the gradient's bytes k times, and nothing of the batch."""
    mesh = mesh_of("explicit")
    args = placed(mesh, SHARDED)
    compiled = compiled_on(mesh, oa.value_and_grad(loss_fn, K, engine=engine), args)
    found = oa.verify.collectives(compiled)
    reduced = [c for c in found if c.kind in ("all-reduce", "reduce-scatter") and c.bytes > 8]
    assert sum(c.bytes * c.runs for c in reduced) == pytest.approx(K * P_BYTES, rel=0.01)
    gathered = [c for c in found if c.kind not in ("all-reduce", "reduce-scatter")]
    assert {c.kind for c in gathered} == {"all-gather"}  # of parameters, layer by layer
    assert {c.bytes for c in gathered} <= {4 * D * D, 4 * D * 8}


# Keys.


def dropout_loss(w, batch, key):
    mask = jax.random.bernoulli(key, 0.5, batch.shape)
    return jnp.mean(jnp.square((batch * mask) @ w)), mask


def masks(mesh, layout, engine):
    """Dropout masks of one call, (B, D) in the batch's order."""
    w, x = np.eye(D, dtype=np.float32), host()[1]["x"]
    grad_fn = oa.value_and_grad(
        dropout_loss,
        K,
        has_aux=True,
        aux="concat",
        rng_argnums=2,
        batch_layout=layout,
        engine=engine,
    )
    if mesh is None:
        return np.asarray(jax.jit(grad_fn)(w, x, jax.random.key(0))[0][1])
    with jax.set_mesh(mesh):
        w = jax.device_put(w, NamedSharding(mesh, P()))
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        return np.asarray(jax.jit(grad_fn)(w, x, jax.random.key(0))[0][1])


@pytest.mark.parametrize("engine, layout", [("refs", "strided"), ("carry", "contiguous")])
def test_dropout_masks_differ_and_do_not_depend_on_the_number_of_devices(engine, layout):
    alone = masks(None, layout, engine)
    for kind in KINDS:
        np.testing.assert_array_equal(masks(mesh_of(kind), layout, engine), alone)
    assert 0.4 < alone.mean() < 0.6
    assert len({row.tobytes() for row in alone}) == B  # no two examples, so no two micro-batches
    keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(K)]
    for i, key in enumerate(keys):
        rows = alone[i::K] if layout == "strided" else alone[i * B // K : (i + 1) * B // K]
        np.testing.assert_array_equal(rows, jax.random.bernoulli(key, 0.5, (B // K, D)))


@pytest.mark.parametrize("engine", ["carry", "auto"])
def test_an_embedding_in_global_view_is_told_of_mesh(engine):
    """Explicit axes: jax asks the loss for an out_sharding; mapped by hand it needs none."""
    mesh = jax.make_mesh((8,), ("data",))
    loss = lambda w, tokens: jnp.mean(w[tokens] ** 2)  # noqa: E731
    w, tokens = jnp.arange(12.0).reshape(4, 3), np.arange(64) % 4
    with jax.set_mesh(mesh):
        spread = jax.device_put(tokens, NamedSharding(mesh, P("data")))
        w = jax.device_put(w, NamedSharding(mesh, P()))
        with pytest.raises(Exception, match="out_sharding") as caught:
            jax.jit(oa.value_and_grad(loss, 4, engine=engine))(w, spread)
        assert any("value_and_grad(mesh=...)" in note for note in caught.value.__notes__)
        got = jax.jit(oa.value_and_grad(loss, 4, engine=engine, mesh=mesh))(w, spread)
    want = jax.value_and_grad(loss)(jnp.asarray(np.asarray(w)), jnp.asarray(tokens))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-6)
