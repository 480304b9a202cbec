"""`micro_step` is value_and_grad and apply_gradients in one, whichever engine adds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import count_inner

import optax_accum as oa

K = 3


def params_of(rng, dtype=jnp.float64):
    return {
        "in": jnp.asarray(rng.normal(size=(4, 5)) / 2, dtype),
        "layers": jnp.asarray(rng.normal(size=(2, 5, 5)) / 3, dtype),
    }


def batches_of(rng, count, dtype=jnp.float64):
    sizes = rng.integers(0, 4, count)
    for i in range(count):
        x = jnp.asarray(rng.normal(size=(3, 4)), dtype)
        yield {"x": x, "mask": jnp.asarray(np.arange(3) < sizes[i], dtype)}


def loss_sum(params, batch):
    h = jnp.tanh(batch["x"] @ params["in"])
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["layers"])
    return jnp.sum(batch["mask"] * (h**2).sum(-1))


def tokens(batch):
    return batch["mask"].sum()


def loss_fn(params, batch):
    return loss_sum(params, batch) / tokens(batch)


def by_hand(loss, tx, weight):
    def micro_step(params, state, batch, **keywords):
        value, grads = jax.value_and_grad(loss)(params, batch)
        how_much = None if weight is None else weight(batch)
        params, state = oa.apply_gradients(
            tx, grads, state, params, weight=how_much, value=value, **keywords
        )
        return value, params, state

    return micro_step


def same(got, want, tolerance=1e-12):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


CASES = {
    "mean": ({}, loss_fn, tokens),
    "no weights": ({}, loss_sum, None),
    "sum": ({"loss_reduction": "sum"}, loss_sum, None),
    "sum_over_weight": ({"loss_reduction": "sum_over_weight"}, loss_sum, tokens),
    "skip_window": ({"nonfinite": "skip_window"}, loss_fn, tokens),
    "skip_micro_step": ({"nonfinite": "skip_micro_step"}, loss_fn, tokens),
    "bfloat16": ({"accumulator_dtype": jnp.bfloat16}, loss_fn, tokens),
    "float32": ({"accumulator_dtype": jnp.float32}, loss_fn, tokens),
}
CARRIED = {"skip_micro_step", "bfloat16", "float32"}  # where refs cannot be used
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-6}


@pytest.mark.parametrize("engine", ["carry", "refs"])
@pytest.mark.parametrize("case", CASES)
def test_several_windows_equal_those_two_calls(x64, case, engine):
    keywords, loss, weight = CASES[case]
    if case in CARRIED and engine == "refs":
        engine = "auto"
    rng = np.random.default_rng(0)
    inner = optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.3, momentum=0.9))
    tx = oa.accumulate(inner, lambda update_step: K + update_step % 2, **keywords)
    params = params_of(rng)
    ours = jax.jit(oa.micro_step(loss, tx, weight=weight, engine=engine))
    theirs = jax.jit(by_hand(loss, tx, weight))
    carry = want = (params, tx.init(params))
    updates = 0
    for i, batch in enumerate(batches_of(rng, 17)):
        last = jnp.asarray(i in (5, 16))
        value, *carry = ours(*carry, batch, last=last)
        right, *want = theirs(*want, batch, last=last)
        counts = weight is None or float(weight(batch)) > 0
        assert float(value) == pytest.approx(float(right) if counts else 0.0, abs=1e-12)
        states = [carry[1], want[1]]
        if int(states[0].kept) == 0:  # what is left over of a window is no part of the next one
            states = [state._replace(grad_sum=None) for state in states]
        tolerance = TOLERANCE.get(case, 1e-12)
        same((carry[0], states[0]), (want[0], states[1]), tolerance)
        updates += int(carry[1].updated)
    assert updates == 6 == int(carry[1].update_step)


@pytest.mark.parametrize("engine", ["carry", "refs"])
@pytest.mark.parametrize("k", [1, 2])
def test_a_micro_batch_without_weight_is_not_computed(engine, k):
    if (engine, k) == ("refs", 1):
        engine = "auto"
    calls = []

    def loss(w, batch):
        jax.debug.callback(lambda: calls.append(None))
        return jnp.sum(batch * w) / jnp.sum(batch > 0)

    tx = oa.accumulate(optax.sgd(1.0), k)
    one = jax.jit(oa.micro_step(loss, tx, weight=lambda b: jnp.sum(b > 0), engine=engine))
    w, state = jnp.float32(1), tx.init(jnp.float32(1))
    for batch in ([1.0, 3.0], [0.0, 0.0]) * 2:
        value, w, state = one(w, state, jnp.array(batch))
    jax.effects_barrier()
    assert len(calls) == 2 and float(value) == 0
    assert float(w) == 1 - 2 - 2 and int(state.update_step) == 2


@pytest.mark.parametrize("bad", [float("nan"), -1.0, float("inf")])
@pytest.mark.parametrize("engine", ["carry", "refs"])
def test_a_weight_that_is_none_reaches_inner_once(bad, engine):
    tx = oa.accumulate(optax.sgd(1.0), 2)
    loss = lambda w, batch: w * batch[0]  # noqa: E731
    one = jax.jit(oa.micro_step(loss, tx, weight=lambda batch: batch[1], engine=engine))
    w, state = jnp.float32(1), tx.init(jnp.float32(1))
    _, w, state = one(w, state, jnp.array([1.0, 1.0]))
    _, w, state = one(w, state, jnp.array([1.0, bad]))
    assert np.isnan(w) and int(state.update_step) == 1
    for _ in range(2):
        _, w, state = one(jnp.float32(1), state, jnp.array([1.0, 1.0]))
    assert float(w) == 0.0


def test_inner_that_takes_a_value_gets_the_windows_and_one_that_takes_none_does_not():
    def loss(w, x):
        return jnp.mean((w - x) ** 2)

    seen = []

    def spy(updates, state, params=None, *, value, grad):
        del params
        jax.debug.callback(lambda v, g: seen.append((float(v), float(g))), value, grad)
        return updates, state

    def strict(updates, state, params=None, *, flag):
        del params
        return jax.tree.map(lambda u: u * flag, updates), state

    for update, extra in ((spy, {}), (strict, {"flag": 2.0})):
        inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
        tx = oa.accumulate(inner, 2)
        one = oa.micro_step(loss, tx, weight=lambda x: len(x))
        w = jnp.zeros([])
        state = tx.init(w)
        for x in (jnp.array([1.0, 3.0]), jnp.array([5.0])):
            _, w, state = one(w, state, x, **extra)
        assert float(w) == pytest.approx(-6.0 * extra.get("flag", 1.0))
    assert seen == [(pytest.approx(35 / 3), pytest.approx(-6.0))]


def test_line_search_by_lbfgs():
    """It asks for value, grad and value_fn, and the first two are the window's."""
    inner = optax.lbfgs()
    x = jnp.array([1.0, 2.0, 3.0, 6.0])
    loss = lambda w, x: jnp.mean((w - x) ** 2 + (w - 1) ** 4)  # noqa: E731
    tx = oa.accumulate(inner, 2)
    one, w = oa.micro_step(loss, tx), jnp.zeros([])
    state, right, plain = tx.init(w), w, inner.init(w)
    for _ in range(2):
        value_fn = lambda w: loss(w, x)  # noqa: E731
        for half in (x[:2], x[2:]):
            _, w, state = one(w, state, half, value_fn=value_fn)
        value, grad = jax.value_and_grad(value_fn)(right)
        updates, plain = inner.update(grad, plain, right, value=value, grad=grad, value_fn=value_fn)
        right = optax.apply_updates(right, updates)
    np.testing.assert_allclose(w, right, rtol=1e-5)
    assert abs(float(w)) > 0.5


def test_accumulate_around_lookahead_differentiates_the_fast_parameters():
    inner = optax.lookahead(optax.sgd(0.5), sync_period=2, slow_step_size=0.5)
    tx = oa.accumulate(inner, 2)
    loss = lambda w, x: jnp.mean((w - x) ** 2)  # noqa: E731
    start = optax.LookaheadParams.init_synced(jnp.zeros([]))
    ours, theirs = (start, tx.init(start)), (start, tx.init(start))
    one = oa.micro_step(loss, tx, engine="refs")
    for x in np.arange(8.0):
        batch = jnp.full(2, x, jnp.float32)
        _, *ours = one(*ours, batch)
        grads = jax.grad(loss)(theirs[0].fast, batch)
        theirs = oa.apply_gradients(tx, grads, theirs[1], theirs[0])
    same(ours[0], theirs[0], 1e-6)
    assert float(ours[0].slow) != float(start.slow)


@pytest.mark.parametrize("nonfinite", ["propagate", "skip_window", "skip_micro_step"])
@pytest.mark.parametrize("k", [1, 2])
def test_one_key_serves_a_whole_run_and_aux_is_given_back(k, nonfinite):
    """Dropped windows included, after which update_step is what it was."""

    def loss(w, x, key):
        return w * x, {"noise": jax.random.normal(key)}

    tx = oa.accumulate(optax.sgd(1.0), k, nonfinite=nonfinite)
    one = jax.jit(oa.micro_step(loss, tx, has_aux=True, rng_argnums=(2,)))
    key, w, got = jax.random.key(3), jnp.float32(0), []
    state = tx.init(w)
    for x in (1, np.nan, np.nan, 1, np.nan, 1, 1, 1):
        (_, aux), w, state = one(w, state, jnp.float32(x), key)
        got.append(float(aux["noise"]))
    assert len(set(got)) == 8
    right = key
    for clock in (0, 0, 0):
        right = jax.random.fold_in(right, clock)
    assert got[0] == float(jax.random.normal(right))


@pytest.mark.parametrize("engine", ["carry", "refs"])
def test_inner_runs_once_a_window(engine):
    counter = [0]
    tx = oa.accumulate(optax.chain(count_inner(counter), optax.adam(1e-3)), 4)
    one = oa.micro_step(lambda w, x: jnp.mean(w * x), tx, engine=engine)
    w = jnp.ones(3)
    carry = (w, tx.init(w))
    body = lambda carry, x: (one(*carry, x)[1:], None)  # noqa: E731
    carry, _ = jax.jit(lambda c: jax.lax.scan(body, c, jnp.ones((8, 3))))(carry)
    jax.block_until_ready(carry)
    jax.effects_barrier()
    assert counter == [2] and int(carry[1].update_step) == 2


@pytest.mark.parametrize("engine", ["auto", pytest.param("carry", marks=pytest.mark.full)])
def test_under_vmap_and_outer_differentiation(x64, engine):
    rng = np.random.default_rng(1)
    tx = oa.accumulate(optax.sgd(0.5), 2)
    one = oa.micro_step(loss_fn, tx, weight=tokens, engine=engine)
    lanes = [params_of(rng), params_of(rng)]
    batches = [list(batches_of(rng, 4)) for _ in lanes]

    def window(params, batches):
        state = tx.init(params)
        for batch in batches:
            _, params, state = one(params, state, batch)
        return params

    right = [jax.jit(window)(params, some) for params, some in zip(lanes, batches, strict=True)]
    stack = functools.partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
    got = jax.jit(jax.vmap(window))(stack(*lanes), stack(*batches))
    same(got, stack(*right))

    def unrolled(params, batches):
        for pair in (batches[:2], batches[2:]):
            total = sum(tokens(batch) for batch in pair)
            for grads in [jax.grad(loss_sum)(params, batch) for batch in pair]:
                params = optax.tree.add_scale(params, -0.5 / total, grads)
        return params

    full = [{**batch, "mask": jnp.ones(3)} for batch in batches[0]]
    of = lambda f: jax.grad(lambda p: optax.tree.norm(f(p, full)))(lanes[0])  # noqa: E731
    same(of(window), of(unrolled), 1e-9)


@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("engine", ["refs", "auto", "carry"])
def test_memory_at_the_floor(engine, with_weight):
    layers, width = 8, 128
    params = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
    tx = oa.accumulate(optax.adamw(1e-3), 4)

    def loss(w, x):
        h, _ = jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), x, w)
        return jnp.mean(h**2)

    weight = (lambda x: jnp.sum(x[:, 0] > 0)) if with_weight else None
    one = oa.micro_step(loss, tx, weight=weight, engine=engine)
    x = jax.ShapeDtypeStruct((2, width), jnp.float32)
    compiled = jax.jit(one, donate_argnums=(0, 1)).lower(params, jax.eval_shape(tx.init, params), x)
    memory = compiled.compile().memory_analysis()
    size = layers * width * width * 4
    assert memory.alias_size_in_bytes > 3.9 * size
    assert memory.temp_size_in_bytes < (1.3 if engine == "carry" else 0.4) * size


SGD = optax.sgd(1.0)
TWO = oa.accumulate(SGD, 2)


@pytest.mark.parametrize(
    "tx, keywords, shown",
    [
        (SGD, {}, "put the links of a chain inside"),
        (optax.chain(TWO), {}, "expected accumulate(inner, k) itself"),
        (TWO, {"engine": "fast"}, "engine='refs'"),
        (TWO, {"weight": 3.0}, "expected a function of a micro-batch"),
        (TWO, {"rng_argnums": 0}, "expected 1 or more"),
        (oa.accumulate(SGD, 2, loss_reduction="sum_over_weight"), {}, "weight is missing"),
    ],
)
def test_errors_of_arguments(tx, keywords, shown):
    with pytest.raises((TypeError, ValueError)) as caught:
        oa.micro_step(lambda w, x: jnp.mean(w * x), tx, **keywords)
    assert shown in str(caught.value)


@pytest.mark.parametrize(
    "keywords, accumulate, params, shown",
    [
        ({}, {"nonfinite": "skip_micro_step"}, jnp.float32(1), "with refs there is none"),
        ({}, {"accumulator_dtype": jnp.bfloat16}, jnp.float32(1), "in the parameter's dtype"),
        ({}, {}, jnp.bfloat16(1), "in the parameter's dtype"),
        ({}, {"k": 1}, jnp.float32(1), "a static k=1 holds no window"),
        ({"weight": lambda x: x[0]}, {}, {"w": jnp.float32(1)}, "narrower than float32"),
    ],
)
def test_refs_where_they_cannot_be_used(keywords, accumulate, params, shown):
    def loss(w, x):
        if isinstance(w, dict):
            return jnp.mean(w["w"] * x).astype(jnp.bfloat16)
        return jnp.mean(w * x)

    tx = oa.accumulate(SGD, **{"k": 2, **accumulate})
    state = tx.init(params)
    with pytest.raises(ValueError, match="engine='refs' cannot be used here") as caught:
        oa.micro_step(loss, tx, engine="refs", **keywords)(params, state, jnp.ones(2))
    assert shown in str(caught.value)
    value, params, state = oa.micro_step(loss, tx, **keywords)(params, state, jnp.ones(2))
    assert float(value) == 1


@pytest.mark.parametrize(
    "call, shown",
    [
        (lambda f, w, s: f(w, SGD.init(w), 1.0, 2.0), "expected the AccumulateState"),
        (lambda f, w, s: f(w, s, 1.0), "expected at least 2"),
        (lambda f, w, s: f(w, s, 1.0, jax.random.key(0), value=1.0), "computes loss and gradient"),
        (lambda f, w, s: f({"a": w}, s, 1.0, jax.random.key(0)), "gradients' structure"),
        (
            lambda f, w, s: f(w, s, jnp.ones(3), jax.random.key(0)),
            "expected a real floating scalar",
        ),
    ],
)
def test_errors_of_calls(call, shown):
    tx = oa.accumulate(SGD, 2)
    w = jnp.float32(1)
    one = oa.micro_step(lambda w, x, key: w * x, tx, rng_argnums=2)
    with pytest.raises((TypeError, ValueError)) as caught:
        call(one, w, tx.init(w))
    assert shown in str(caught.value)
