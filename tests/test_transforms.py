"""`accumulate` under jax's own transformations, and its state as data: saved, donated, sharded."""

import copy
import pickle
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum as oa

PARAMS = {"b": np.float32([0.5, -1, 2]), "w": np.float32([[1, 2, -3], [0.1, 0, -0.7]])}
RATE = 0.5


def device_params(dtype=jnp.float32):
    """Copies: on CPU an aligned NumPy array may be shared, and could not be donated then."""
    return jax.tree.map(lambda p: jnp.array(p, dtype, copy=True), PARAMS)


class Feed(NamedTuple):
    """Micro-batches, stacked: what one micro-step of `scan` takes apart."""

    grads: Any
    weight: Any
    last: Any


def feed(count, seed=0):
    """Random gradients; weights with a zero among them; a window closed early."""
    rng = np.random.default_rng(seed)
    grads = jax.tree.map(lambda p: rng.normal(size=(count, *p.shape)).astype(np.float32), PARAMS)
    weight = rng.uniform(0.5, 4, size=count).astype(np.float32)
    weight[1] = 0
    last = np.arange(count) == 4
    return Feed(grads, weight, last)


def pick(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def oracle(feed, k, rate=RATE, skip=False):
    """SGD on windows of k, in NumPy and float64: (parameters after each micro-step, updated)."""
    params = jax.tree.map(np.float64, PARAMS)
    trail, updated, window = [], [], []
    for i in range(len(feed.weight)):
        grads, weight, last = pick(feed, i)
        window.append((jax.tree.map(np.float64, grads), float(weight)))
        full = len(window) == k or bool(last)
        updated.append(False)
        if full:
            kept = [(g, w) for g, w in window if w > 0 and not (skip and poisoned(g))]
            total = sum(w for _, w in kept)
            if kept:
                params = {
                    name: p - rate * sum(w * g[name] for g, w in kept) / total
                    for name, p in params.items()
                }
                updated[-1] = True
            window = []
        trail.append(params)
    return trail, updated


def poisoned(grads):
    return any(not np.isfinite(g).all() for g in jax.tree.leaves(grads))


def close(got, want, rtol=2e-5, atol=2e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, want)


def micro_step(tx):
    def run(carry, batch):
        params, state = carry
        updates, state = tx.update(batch.grads, state, params, weight=batch.weight, last=batch.last)
        params = optax.apply_updates(params, updates)
        return (params, state), (params, oa.has_updated(state))

    return run


def micro_step_in_place(tx):
    def run(carry, batch):
        params, state = carry
        params, state = oa.apply_gradients(
            tx, batch.grads, state, params, weight=batch.weight, last=batch.last
        )
        return (params, state), (params, oa.has_updated(state))

    return run


def drive(how, step, tx, batches):
    """(params, updated) after every micro-step, stacked; and the final state."""
    carry = device_params(), tx.init(device_params())
    if how == "scan":
        (_, state), trail = jax.jit(lambda c, b: jax.lax.scan(step, c, b))(carry, batches)
        return trail, state
    step = jax.jit(step) if how == "jit" else step
    trail = []
    for i in range(len(batches.weight)):
        carry, out = step(carry, pick(batches, i))
        trail.append(out)
    return jax.tree.map(lambda *xs: np.stack(xs), *trail), carry[1]


def stacked(trail):
    return jax.tree.map(lambda *xs: np.stack(xs), *trail)


# --- eager, jit, scan ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [micro_step, micro_step_in_place])
@pytest.mark.parametrize("how", ["eager", "jit", "scan"])
@pytest.mark.parametrize("k", [1, 3])
def test_eager_jit_and_scan_give_the_right_windows(how, make, k):
    batches = feed(9)
    want, want_updated = oracle(batches, k)
    tx = oa.accumulate(optax.sgd(RATE), k)
    (got, updated), state = drive(how, make(tx), tx, batches)
    close(got, stacked(want))
    np.testing.assert_array_equal(updated, want_updated)
    assert int(state.update_step) == sum(want_updated)


@pytest.mark.parametrize("how", ["eager", "jit", "scan"])
@pytest.mark.parametrize("k", [1, 3])
def test_poisoned_micro_steps_are_skipped_alike(how, k):
    batches = feed(9)
    batches.grads["w"][[0, 6, 7, 8], 1, 1] = [np.nan, np.inf, -np.inf, np.nan]
    want, want_updated = oracle(batches, k, skip=True)
    tx = oa.accumulate(optax.sgd(RATE), k, nonfinite="skip_micro_step")
    (got, updated), state = drive(how, micro_step(tx), tx, batches)
    close(got, stacked(want))
    np.testing.assert_array_equal(updated, want_updated)
    assert int(state.skipped) == 4


def test_a_static_last_inside_jit():
    batches = feed(2)
    tx = oa.accumulate(optax.sgd(RATE), 8)
    update = jax.jit(tx.update, static_argnames="last")
    state = tx.init(device_params())
    _, state = update(pick(batches.grads, 0), state, device_params(), last=False)
    updates, state = update(pick(batches.grads, 1), state, device_params(), last=True)
    close(updates, jax.tree.map(lambda g: -RATE * np.float64(g).mean(0), batches.grads))


def test_one_compilation_serves_every_k_of_a_schedule():
    traces = []
    tx = oa.accumulate(optax.sgd(1.0), lambda update_step: update_step + 1)

    @jax.jit
    def update(grads, state, params, weight, last):
        traces.append(1)
        return tx.update(grads, state, params, weight=weight, last=last)

    params = jnp.zeros(2)
    state, closed = tx.init(params), []
    for i in range(10):
        grads = jnp.full(2, float(i))
        updates, state = update(grads, state, params, jnp.float32(1 + i), jnp.asarray(False))
        if oa.has_updated(state):
            closed.append(i)
            size = len(closed)
            part = np.arange(i + 1 - size, i + 1, dtype=np.float64)
            np.testing.assert_allclose(updates, -np.average(part, weights=1 + part), rtol=1e-6)
    assert closed == [0, 2, 5, 9]
    assert len(traces) == 1


def test_inner_is_traced_once_into_a_compiled_micro_step():
    """Once for its branch, once for the shapes of the zeros: compile time must not multiply."""
    runs = []

    def update(grads, state, params=None):
        runs.append(1)
        return grads, state

    tx = oa.accumulate(optax.GradientTransformation(optax.init_empty_state, update), 4)
    params = jnp.zeros(2)
    jax.jit(tx.update).lower(params, tx.init(params), params)
    assert len(runs) <= 2


# --- types --------------------------------------------------------------------------------------

INNERS = {
    "sgd": lambda: optax.sgd(RATE),
    "momentum": lambda: optax.sgd(RATE, momentum=0.9),
    "adamw": lambda: optax.adamw(RATE),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(RATE),
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(RATE),
}


def types(tree):
    """Structure, and of each leaf shape, dtype and weak type."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(x), jnp.result_type(x), weak(x)) for x in leaves]


def weak(leaf):
    return getattr(leaf, "weak_type", not hasattr(leaf, "dtype"))


TYPED = [(name, jnp.bfloat16, jnp.float32) for name in INNERS] + [
    ("adamw", jnp.float32, jnp.float32),
    ("adamw", jnp.float32, jnp.bfloat16),
    ("adamw", jnp.bfloat16, jnp.bfloat16),
    ("momentum", jnp.float16, jnp.float16),
]


@pytest.mark.parametrize("name, param_dtype, grad_dtype", TYPED)
def test_the_state_has_one_type_for_ever(name, param_dtype, grad_dtype):
    tx = oa.accumulate(INNERS[name](), 2)
    params = device_params(param_dtype)
    grads = jax.tree.map(lambda p: p.astype(grad_dtype), params)
    state = tx.init(params)
    first = types(state)
    assert not any(weak for *_, weak in first[1])
    assert types(jax.eval_shape(tx.init, params)) == first
    assert types(jax.jit(tx.init)(params)) == first
    for last in (False, True):
        shapes = jax.eval_shape(tx.update, grads, state, params, last=jnp.asarray(last))
        updates, state = tx.update(grads, state, params, last=last)
        assert types(state) == first
        assert types(shapes[1]) == first
        assert types(shapes[0]) == types(updates)
    plain = INNERS[name]()
    want = jax.eval_shape(plain.update, grads, plain.init(params), params)[0]
    dtypes = [u.dtype for u in jax.tree.leaves(updates)]
    wider = jnp.promote_types(param_dtype, grad_dtype)
    if wider == grad_dtype:
        assert dtypes == [u.dtype for u in jax.tree.leaves(want)]


@pytest.mark.parametrize("name", INNERS)
def test_a_scan_accepts_the_state_as_its_carry(name):
    tx = oa.accumulate(INNERS[name](), 2)
    params = device_params(jnp.bfloat16)
    grads = jax.tree.map(lambda p: jnp.ones((4, *p.shape)), params)

    def run(state, grads):
        updates, state = tx.update(grads, state, params)
        return state, updates

    state, _ = jax.eval_shape(lambda s, g: jax.lax.scan(run, s, g), tx.init(params), grads)
    assert types(state) == types(tx.init(params))


@pytest.mark.parametrize("k", [1, 4])
def test_every_field_is_found_by_its_name(k):
    tx = optax.chain(optax.clip(1.0), oa.accumulate(optax.adam(RATE), k), optax.scale(1.0))
    state = tx.init(device_params())
    for name in oa.AccumulateState._fields:
        found = optax.tree.get_all_with_path(state, name)
        assert len(found) == 1, name
    state = optax.tree.set(state, update_step=jnp.int32(7))
    assert int(optax.tree.get(state, "update_step")) == 7


@pytest.mark.parametrize("k", [1, 4])
def test_eval_shape_takes_shapes_for_arrays(k):
    tx = oa.accumulate(optax.adam(RATE), k)
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), PARAMS)
    state = jax.eval_shape(tx.init, shapes)
    assert types(state) == types(tx.init(device_params(jnp.bfloat16)))
    updates, state = jax.eval_shape(tx.update, shapes, state, shapes)
    assert types(updates) == types(shapes)
    jax.jit(tx.update).lower(shapes, state, shapes)


# --- vmap ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [micro_step, micro_step_in_place])
@pytest.mark.parametrize("k", [1, 3])
def test_vmap_over_states_whose_windows_close_at_different_times(k, make):
    lanes = [feed(7, seed) for seed in range(4)]
    for i, lane in enumerate(lanes):
        lane.last[:] = False
        lane.last[i::3] = True
        lane.grads["b"][5 - i] = np.nan
    batches = jax.tree.map(lambda *xs: np.stack(xs, 1), *lanes)  # (time, lane, ...)
    tx = oa.accumulate(optax.sgd(RATE), k, nonfinite="skip_micro_step")
    params = jax.tree.map(lambda p: jnp.broadcast_to(p, (4, *p.shape)), device_params())
    carry = params, jax.vmap(tx.init)(params)
    run = jax.vmap(make(tx))
    (_, state), (got, updated) = jax.jit(lambda c, b: jax.lax.scan(run, c, b))(carry, batches)
    for i, lane in enumerate(lanes):
        want, want_updated = oracle(lane, k, skip=True)
        close(pick(jax.tree.map(lambda x: np.moveaxis(x, 1, 0), got), i), stacked(want))
        np.testing.assert_array_equal(updated[:, i], want_updated)
        assert int(state.update_step[i]) == sum(want_updated)
    assert oa.has_updated(state).shape == (4,)


def test_flush_under_vmap_closes_each_window_where_it_stands():
    tx = oa.accumulate(optax.sgd(1.0), 3)
    params = jnp.zeros((3, 2))
    state = jax.vmap(tx.init)(params)
    last = jnp.asarray([[False, False, True], [True, False, False]])
    for i in range(2):
        grads = jnp.full((3, 2), 1.0 + 2 * i)
        update = jax.vmap(lambda g, s, p, last: tx.update(g, s, p, last=last))
        _, state = update(grads, state, params, last[i])
    updates, state = jax.vmap(lambda s, p: oa.flush(tx, s, p))(state, params)
    np.testing.assert_array_equal(updates, np.repeat([[0.0], [-2.0], [-3.0]], 2, 1))
    np.testing.assert_array_equal(oa.has_updated(state), [False, True, True])


def test_vmap_over_gradients_and_weights_alone():
    batches = feed(4)
    tx = oa.accumulate(optax.sgd(RATE), 2)
    params = device_params()
    first = jax.tree.map(jnp.ones_like, params)
    _, state = tx.update(first, tx.init(params), params, weight=2.0)
    update = jax.vmap(lambda g, s, p, w: tx.update(g, s, p, weight=w), in_axes=(0, None, None, 0))
    updates, states = update(batches.grads, state, params, batches.weight)
    weight = np.float64(batches.weight)

    def right(g):
        w = weight.reshape(-1, *[1] * (g.ndim - 1))
        return -RATE * (2.0 + w * g) / (2.0 + w)

    close(updates, jax.tree.map(right, batches.grads))
    assert states.update_step.shape == (4,) and oa.has_updated(states).all()


def test_vmap_over_gradients_inside_a_window_gives_zeros():
    batches = feed(4)
    tx = oa.accumulate(optax.adam(RATE), 2)
    params = device_params()
    update = jax.vmap(tx.update, in_axes=(0, None, None))
    updates, states = update(batches.grads, tx.init(params), params)
    assert updates["w"].shape == (4, 2, 3) and not np.any(updates["w"])
    assert not oa.has_updated(states).any()


def test_a_poisoned_lane_of_inner_reaches_no_other_and_no_open_window():
    """Under vmap a `cond` is a select: inner runs in every lane, on sums that may be anything."""
    inner = optax.GradientTransformation(
        optax.init_empty_state,
        lambda g, s, p=None: (jax.tree.map(lambda x: x / jnp.linalg.norm(x), g), s),
    )
    tx = oa.accumulate(inner, 2)
    params = jnp.zeros((3, 2))
    state = jax.vmap(tx.init)(params)
    grads = jnp.asarray([[0.0, 0.0], [3.0, 4.0], [jnp.nan, 1.0]])
    updates, state = jax.vmap(tx.update)(grads, state, params)
    np.testing.assert_array_equal(updates, np.zeros((3, 2)))
    updates, state = jax.vmap(tx.update)(jnp.asarray([[3.0, 4], [3, 4], [3, 4]]), state, params)
    np.testing.assert_allclose(updates[:2], [[0.6, 0.8]] * 2, rtol=1e-6)


# --- grad ---------------------------------------------------------------------------------------


def unrolled(k, weights, jit=True, **settings):
    """loss(rate, grads, weights): a fixed linear function of the parameters after one window."""
    direction = np.float32([1.0, -2.0, 0.5])

    def loss(rate, grads, weights):
        tx = oa.accumulate(optax.sgd(rate), k, **settings)
        params = jnp.zeros(3)
        state = tx.init(params)
        for i in range(k):
            extra = {} if weights is None else {"weight": weights[i]}
            updates, state = tx.update(grads[i], state, params, **extra)
            params = optax.apply_updates(params, updates)
        return jnp.dot(params, direction)

    argnums = (0, 1) if weights is None else (0, 1, 2)
    gradient = jax.grad(loss, argnums)
    return direction, jax.jit(gradient) if jit else gradient


WEIGHTS = {
    "none": None,
    "unequal": np.float32([1, 3, 0.5]),
    "one zero": np.float32([1, 0, 0.5]),
    "all zero": np.float32([0, 0, 0]),
}


@pytest.mark.parametrize("name, jit", [*((name, True) for name in WEIGHTS), ("one zero", False)])
def test_derivatives_of_an_update(name, jit):
    """With respect to the learning rate, the gradients and the weights, in closed form."""
    weights = WEIGHTS[name]
    grads = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    direction, gradient = unrolled(3, weights, jit)
    got = gradient(jnp.float32(RATE), grads, weights)
    w = np.ones(3) if weights is None else np.float64(weights)
    total = w.sum()
    share = w / total if total else np.zeros(3)
    mean = share @ grads
    np.testing.assert_allclose(got[0], -direction @ mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1], -RATE * share[:, None] * direction, rtol=1e-5, atol=1e-7)
    if weights is not None:
        assert np.isfinite(got[2]).all()
        inside = np.where(w > 0, -RATE * (grads - mean) @ direction / (total or 1), 0)
        np.testing.assert_allclose(got[2], inside, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name, k", [("one zero", 3), ("all zero", 3), ("all zero", 1)])
@pytest.mark.parametrize("reduction", ["mean", "sum_over_weight"])
def test_derivatives_are_finite_under_vmap(name, reduction, k):
    """There the branch of a weightless window is computed, too, and selected away."""
    weights = WEIGHTS[name][:k]
    grads = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)[:k]
    _, gradient = unrolled(k, weights, jit=False, loss_reduction=reduction)
    rates, many = jnp.full(2, RATE), lambda x: jnp.stack([x, x])
    got = jax.jit(jax.vmap(gradient))(rates, many(grads), many(weights))
    assert all(np.isfinite(leaf).all() for leaf in got)


@pytest.mark.parametrize("policy", ["skip_micro_step", "skip_window"])
def test_derivatives_of_a_skipping_window(policy):
    grads = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    direction, gradient = unrolled(3, None, nonfinite=policy)
    got = gradient(jnp.float32(RATE), grads, None)
    np.testing.assert_allclose(got[0], -direction @ grads.mean(0), rtol=1e-5)
    np.testing.assert_allclose(got[1], np.tile(-RATE * direction / 3, (3, 1)), rtol=1e-5)


def test_derivatives_go_straight_through_stochastic_rounding():
    """As through any cast; the bits that are cut have none of their own."""
    grads = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    direction, gradient = unrolled(3, None, accumulator_dtype=jnp.bfloat16)
    got = gradient(jnp.float32(RATE), grads, None)
    np.testing.assert_allclose(got[0], -direction @ grads.mean(0), rtol=0.03)
    np.testing.assert_allclose(got[1], np.tile(-RATE * direction / 3, (3, 1)), rtol=0.01)


@pytest.mark.parametrize("k", [1, 3])
def test_a_skipped_micro_gradient_has_a_derivative_of_zero(k):
    grads = np.ones((3, 3), np.float32)[:k]
    grads[0, 1] = np.nan
    direction, gradient = unrolled(k, None, nonfinite="skip_micro_step")
    _, got = gradient(jnp.float32(RATE), grads, None)
    np.testing.assert_array_equal(got[0], np.zeros(3))
    for row in got[1:]:
        np.testing.assert_allclose(row, -RATE * direction / 2, rtol=1e-5)


def test_an_unfinished_window_has_derivatives_of_zero():
    tx = oa.accumulate(optax.adam(RATE), 4)
    params = jnp.zeros(3)

    def loss(grads, weight):
        updates, state = tx.update(grads, tx.init(params), params, weight=weight)
        return updates.sum() + 0 * state.weight_sum

    for value in (1.0, 0.0):
        got = jax.grad(loss, (0, 1))(jnp.ones(3), jnp.float32(value))
        jax.tree.map(lambda g: np.testing.assert_array_equal(g, np.zeros_like(g)), got)


def test_meta_learning_through_a_scan():
    """d(loss after training)/d(rate) by reverse mode, against central differences in float64."""
    batches = feed(6)
    batches.last[:] = False

    def loss(rate):
        tx = oa.accumulate(optax.sgd(rate), 3)
        carry = device_params(), tx.init(device_params())
        (params, _), _ = jax.lax.scan(micro_step(tx), carry, batches)
        return sum((p**2).sum() for p in jax.tree.leaves(params))

    def reference(rate):
        final = oracle(batches, 3, rate)[0][-1]
        return sum((p**2).sum() for p in jax.tree.leaves(final))

    slope = (reference(RATE + 1e-5) - reference(RATE - 1e-5)) / 2e-5
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(RATE), slope, rtol=1e-4)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(loss))(RATE), slope, rtol=1e-4)


# --- donation -----------------------------------------------------------------------------------


def keeps_params(init):
    """An inner whose state is made of the parameters by `init`, as schedule_free's nearly is."""

    def update(grads, state, params=None):
        return jax.tree.map(lambda g: -RATE * g, grads), state

    return optax.GradientTransformation(init, update)


DONATED = {
    "adam": lambda: optax.adam(RATE),
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(RATE),
    "the parameters": lambda: keeps_params(lambda p: p),
    "the parameters, twice": lambda: keeps_params(lambda p: (p, p)),
    "the parameters, placed": lambda: keeps_params(
        lambda p: jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), p)
    ),
    "the parameters, jitted": lambda: keeps_params(jax.jit(lambda p: (p, p))),
    "a key": lambda: noisy(jax.random.key(0)),
    "one key twice": lambda: optax.chain(*[noisy(jax.random.key(0))] * 2),
    "one array twice": lambda: keeps_params(lambda p: [jnp.ones(3)] * 2),
}


def noisy(key):
    return optax.chain(optax.add_noise(0.0, 0.55, key), optax.sgd(RATE))


def buffers(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    leaves = [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(tree)]
    return [x.unsafe_buffer_pointer() for x in leaves if x.size]


@pytest.mark.parametrize("k, jit_init", [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("name", DONATED)
def test_params_and_state_are_donated_from_the_first_call_on(name, k, jit_init):
    tx = oa.accumulate(DONATED[name](), k)
    params = device_params()
    state = (jax.jit(tx.init) if jit_init else tx.init)(params)
    pointers = buffers((params, state))
    assert len(set(pointers)) == len(pointers)
    run = jax.jit(lambda p, s, g: oa.apply_gradients(tx, g, s, p), donate_argnums=(0, 1))
    grads = device_params()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            old = params, state.grad_sum
            params, state = run(params, state, grads)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert int(state.update_step) == 3 // k


ENCLOSED = {
    "a key": lambda: noisy(jax.random.key(0)),
    "a learning rate": lambda: optax.inject_hyperparams(optax.sgd)(jnp.float32(RATE)),
}


@pytest.mark.parametrize("name", ENCLOSED)
def test_what_the_transformation_encloses_is_not_donated_with_a_state(name):
    """A second run may start from the same transformation."""
    tx = oa.accumulate(ENCLOSED[name](), 2)
    update = jax.jit(tx.update, donate_argnums=1)
    for _ in range(2):
        params = device_params()
        _, state = update(params, tx.init(params), params)
        updates, state = update(params, state, params)
        close(updates, jax.tree.map(lambda p: -RATE * p, PARAMS))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("k", [1, 2])
def test_what_an_eager_call_returns_can_be_donated_too(k, last):
    tx = oa.accumulate(optax.adam(RATE), k)
    params, grads = device_params(), device_params()
    _, state = tx.update(grads, tx.init(params), params, last=last)
    pointers = buffers((params, grads, state))
    assert len(set(pointers)) == len(pointers)
    update = jax.jit(tx.update, donate_argnums=(1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update(grads, state, params)


def test_a_scan_over_donated_state_and_params():
    batches = feed(6)
    tx = oa.accumulate(optax.sgd(RATE), 3)
    train = jax.jit(
        lambda p, s, b: jax.lax.scan(micro_step(tx), (p, s), b)[0], donate_argnums=(0, 1)
    )
    params = device_params()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params, _ = train(params, tx.init(params), batches)
    close(params, oracle(batches, 3)[0][-1])


# --- pickling and copying -----------------------------------------------------------------------

COPIES = {
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "deepcopy": copy.deepcopy,
    "NumPy": lambda state: jax.tree.map(np.asarray, state),
    "leaves": lambda state: jax.tree.unflatten(
        jax.tree.structure(state), jax.tree.leaves(jax.device_get(state))
    ),
}


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("jit", [False, True])
def test_a_state_copied_after_any_micro_step_goes_on_bit_equal(jit, dtype):
    batches = feed(7)
    tx = oa.accumulate(optax.adam(RATE), 3, accumulator_dtype=dtype)
    run = jax.jit(micro_step(tx)) if jit else micro_step(tx)
    carry, trail = (device_params(), tx.init(device_params())), []
    for i in range(7):
        trail.append(carry)
        carry, _ = run(carry, pick(batches, i))
    for name, duplicate in COPIES.items():
        for start in range(7) if jit else (0, 4):
            other = duplicate(trail[start])
            assert isinstance(other[1], oa.AccumulateState), name
            for i in range(start, 7):
                other, _ = run(other, pick(batches, i))
            jax.tree.map(np.testing.assert_array_equal, other, carry)
            assert jax.tree.structure(other) == jax.tree.structure(carry)


# --- shardings ----------------------------------------------------------------------------------


def mesh_of(kind):
    if kind == "explicit":
        return jax.make_mesh((4, 2), ("x", "y"))
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


SPECS = {"w": P("x", "y"), "b": P(("x", "y")), "c": P()}


def sharded(mesh):
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 2), "b": (8,), "c": (3,)}
    host = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    grads = {name: rng.normal(size=(2, *x.shape)).astype(np.float32) for name, x in host.items()}
    place = lambda x, name: jax.device_put(x, NamedSharding(mesh, SPECS[name]))  # noqa: E731
    params = {name: place(x, name) for name, x in host.items()}
    micro = [{name: place(x[i], name) for name, x in grads.items()} for i in range(2)]
    return grads, params, micro


def assert_sharded(tree, like):
    def check(got, want):
        assert got.sharding.is_equivalent_to(want.sharding, want.ndim), (
            got.sharding,
            want.sharding,
        )

    jax.tree.map(check, tree, like)


@pytest.mark.parametrize(
    "kind, jit, dtype",
    [
        ("automatic", False, None),
        ("automatic", True, None),
        ("explicit", False, None),
        ("explicit", True, None),
        ("explicit", False, jnp.bfloat16),
        ("explicit", True, jnp.bfloat16),
    ],
)
def test_window_and_zeros_keep_the_sharding_of_the_parameters(kind, jit, dtype):
    mesh = mesh_of(kind)
    grads, params, micro = sharded(mesh)
    with jax.set_mesh(mesh):
        inner = optax.sgd(RATE, momentum=0.9)
        tx = oa.accumulate(inner, 2, accumulator_dtype=dtype, nonfinite="skip_micro_step")
        # a jitted init on an automatic mesh replicates, whatever it computes
        state = (jax.jit(tx.init) if jit and kind == "explicit" else tx.init)(params)
        update = jax.jit(tx.update) if jit else tx.update
        for i in range(3):
            assert_sharded(state.grad_sum, params)
            assert_sharded(state.inner_state[0].trace, params)
            if i < 2:
                updates, state = update(micro[i], state, params, weight=jnp.float32(1 + 2 * i))
                assert_sharded(updates, params)
                assert bool(oa.has_updated(state)) == (i == 1)
        new, state = oa.apply_gradients(tx, micro[0], state, params, last=True)
        assert_sharded(new, params)
    tolerance = {"rtol": 2e-5, "atol": 2e-6} if dtype is None else {"atol": 0.05}
    for name, g in grads.items():
        first = (g[0] + 3 * np.float64(g[1])) / 4
        np.testing.assert_allclose(updates[name], -RATE * first, **tolerance)
        want = np.asarray(params[name]) - RATE * (0.9 * first + g[0])
        np.testing.assert_allclose(new[name], want, **tolerance)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", ["automatic", "explicit"])
def test_sharded_parameters_without_a_mesh_in_scope(kind, jit):
    grads, params, micro = sharded(mesh_of(kind))
    tx = oa.accumulate(optax.sgd(1.0), 2)
    state = tx.init(params)
    update = jax.jit(tx.update) if jit else tx.update
    for i in range(2):
        updates, state = update(micro[i], state, params)
        assert_sharded(state.grad_sum, params)
        assert_sharded(updates, params)
    close(jax.device_get(updates), {name: -g.mean(0) for name, g in grads.items()})


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", ["automatic", "explicit"])
def test_sharded_parameters_and_a_static_k_of_1(kind, jit):
    mesh = mesh_of(kind)
    _, params, micro = sharded(mesh)
    with jax.set_mesh(mesh):
        tx = oa.accumulate(optax.sgd(RATE), 1, nonfinite="skip_window")
        state = tx.init(params)
        update = jax.jit(tx.update) if jit else tx.update
        updates, state = update(micro[0], state, params, weight=jnp.float32(2))
        assert_sharded(updates, params)
        assert oa.has_updated(state)
        poison = jax.tree.map(lambda g: g * jnp.nan, micro[1])
        updates, state = update(poison, state, params, weight=jnp.float32(2))
        assert not oa.has_updated(state)
        assert all(not np.any(u) for u in jax.tree.leaves(jax.device_get(updates)))
        # the compiler may choose where constant zeros of a window that holds none live
        if kind == "explicit" or not jit:
            assert_sharded(updates, params)


@pytest.mark.parametrize("kind", ["automatic", "explicit"])
def test_lookahead_zeros_are_sharded_like_its_updates(kind):
    """Updates of another structure than the window's."""
    mesh = mesh_of(kind)
    _, fast, micro = sharded(mesh)
    with jax.set_mesh(mesh):
        params = optax.LookaheadParams(fast=fast, slow=jax.tree.map(jnp.copy, fast))
        tx = oa.accumulate(optax.lookahead(optax.sgd(1.0), 1, 0.5), 2)
        state = tx.init(params)
        for grads in micro:
            updates, state = tx.update(grads, state, params)
            assert_sharded(updates, params)


@pytest.mark.parametrize("kind", ["automatic", "explicit"])
def test_a_sharded_scan(kind):
    mesh = mesh_of(kind)
    grads, params, _ = sharded(mesh)
    with jax.set_mesh(mesh):
        tx = oa.accumulate(optax.sgd(1.0, momentum=0.9), 2)

        def run(carry, micro):
            params, state = carry
            params, state = oa.apply_gradients(tx, micro, state, params)
            return (params, state), None

        place = lambda x, name: jax.device_put(  # noqa: E731
            x, NamedSharding(mesh, P(None, *SPECS[name]))
        )
        xs = {name: place(g, name) for name, g in grads.items()}
        (got, _), _ = jax.jit(lambda c, x: jax.lax.scan(run, c, x))((params, tx.init(params)), xs)
        assert_sharded(got, params)
    host = jax.device_get(params)
    close(jax.device_get(got), {name: host[name] - g.mean(0) for name, g in grads.items()})


# --- shard_map ----------------------------------------------------------------------------------


def replica_grads(mesh, count):
    """(replica, micro-step, 3), sharded over the replicas."""
    grads = np.random.default_rng(0).normal(size=(8, count, 3)).astype(np.float32)
    return grads, jax.device_put(grads, NamedSharding(mesh, P("r")))


def replicas(kind):
    axis_types = {} if kind == "explicit" else {"axis_types": (AxisType.Auto,)}
    return jax.make_mesh((8,), ("r",), **axis_types)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("kind", ["automatic", "explicit"])
def test_every_replica_may_train_its_own_parameters(kind, check_vma, in_place):
    """State made and used inside `shard_map`; the windows close at different micro-steps."""
    mesh = replicas(kind)
    grads, placed = replica_grads(mesh, 4)
    weights = np.random.default_rng(1).uniform(1, 3, size=(8, 4)).astype(np.float32)
    last = np.arange(8)[:, None] == 2 * np.arange(4)
    tx = oa.accumulate(optax.sgd(1.0, momentum=0.5), 2, nonfinite="skip_micro_step")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("r"), out_specs=P("r"), check_vma=check_vma)
    def train(params, grads, weights, last):
        params, grads = params[0], grads[0]
        state = tx.init(params)
        for i in range(4):
            extra = {"weight": weights[0, i], "last": last[0, i]}
            if in_place:
                params, state = oa.apply_gradients(tx, grads[i], state, params, **extra)
            else:
                updates, state = tx.update(grads[i], state, params, **extra)
                params = optax.apply_updates(params, updates)
        return params[None]

    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("r"))
        start = jax.device_put(np.zeros((8, 3), np.float32), sharding)
        got = train(start, placed, *(jax.device_put(x, sharding) for x in (weights, last)))
    got = np.asarray(got)
    for replica in range(8):
        params, trace, window = np.zeros(3), np.zeros(3), []
        for i in range(4):
            window.append((np.float64(grads[replica, i]), weights[replica, i]))
            if len(window) == 2 or last[replica, i]:
                parts, w = zip(*window, strict=True)
                trace = 0.5 * trace + np.average(parts, axis=0, weights=w)
                params, window = params - trace, []
        np.testing.assert_allclose(got[replica], params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("kind", ["automatic", "explicit"])
def test_states_that_enter_and_leave_a_shard_map(kind, check_vma):
    """A leading replica axis on every leaf, as a loop around one compiled micro-step has it."""
    mesh = replicas(kind)
    grads, placed = replica_grads(mesh, 3)
    tx = oa.accumulate(optax.adam(1.0), 2)
    one = lambda tree: jax.tree.map(lambda x: x[0], tree)  # noqa: E731
    lead = lambda tree: jax.tree.map(lambda x: x[None], tree)  # noqa: E731
    split = dict(mesh=mesh, in_specs=P("r"), out_specs=P("r"), check_vma=check_vma)
    init = jax.jit(jax.shard_map(lambda p: lead(tx.init(one(p))), **split))

    @jax.jit
    @jax.shard_map(**split)
    def update(grads, state, params):
        updates, state = tx.update(one(grads), one(state), one(params))
        return lead(optax.apply_updates(one(params), updates)), lead(state)

    with jax.set_mesh(mesh):
        params = jax.device_put(np.zeros((8, 3), np.float32), NamedSharding(mesh, P("r")))
        state = init(params)
        first = types(state)
        for i in range(3):
            params, state = update(placed[:, i], state, params)
            assert types(state) == first
    assert np.array_equal(state.micro_step, [1] * 8) and np.array_equal(state.update_step, [1] * 8)
    np.testing.assert_allclose(params, -np.sign(grads[:, :2].mean(1)), rtol=1e-4)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("momentum", [None, 0.0])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("reduce", ["micro-gradients", "parameters"])
def test_replicated_parameters_without_an_axis_name(reduce, in_place, momentum, check_vma):
    """Gradients that differ between replicas meet parameters and a state that do not, yet."""
    mesh = replicas("automatic")
    grads, placed = replica_grads(mesh, 2)
    tx = oa.accumulate(optax.sgd(1.0, momentum=momentum), 2)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("r")), out_specs=P(), check_vma=check_vma)
    def train(params, grads):
        state = tx.init(params)
        for i in range(2):
            micro = grads[0, i]
            if reduce == "micro-gradients":
                micro = jax.lax.pmean(micro, "r")
            if in_place:
                params, state = oa.apply_gradients(tx, micro, state, params)
            else:
                updates, state = tx.update(micro, state, params)
                params = optax.apply_updates(params, updates)
        return jax.lax.pmean(params, "r") if reduce == "parameters" else params

    got = train(jnp.zeros(3), placed)
    np.testing.assert_allclose(got, -grads.mean((0, 1)), rtol=1e-5, atol=1e-6)


# --- modes of jax -------------------------------------------------------------------------------


def check_training(**settings):
    batches = feed(7)
    tx = oa.accumulate(optax.sgd(RATE), 3, **settings)
    want, want_updated = oracle(batches, 3, skip=True)
    for how in ("eager", "jit"):
        (got, updated), _ = drive(how, micro_step(tx), tx, batches)
        close(got, stacked(want))
        np.testing.assert_array_equal(updated, want_updated)


def test_with_jit_disabled():
    with jax.disable_jit():
        check_training()
        check_training(nonfinite="skip_micro_step")


def test_no_tracer_leaks():
    with jax.checking_leaks():
        tx = oa.accumulate(oa.accumulate(optax.sgd(RATE), 2), 2, nonfinite="skip_window")
        params = device_params()
        state = tx.init(params)
        flush = jax.jit(lambda state: oa.flush(tx, state, params))
        run = jax.jit(lambda g, s, p, last: tx.update(g, s, p, last=last))
        _, state = run(params, state, params, jnp.asarray(False))
        _, state = flush(state)
        assert oa.has_updated(state)


@pytest.mark.parametrize("debug", [jax.debug_nans, jax.debug_infs])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum_over_weight"])
def test_debug_nans_and_infs_find_nothing_of_our_making(reduction, k, debug):
    """Finite gradients, a weight of zero among them, then windows that close empty."""
    params = jnp.zeros(2)
    for policy in ("propagate", "skip_micro_step", "skip_window"):
        tx = oa.accumulate(optax.sgd(1.0), k, nonfinite=policy, loss_reduction=reduction)
        for update in (tx.update, jax.jit(tx.update)):
            state = tx.init(params)
            with debug(True):
                for weight in (2.0, 0.0, 0.0, 0.0, 1.0, 3.0):
                    updates, state = update(params + 1, state, params, weight=jnp.float32(weight))
                _, state = oa.flush(tx, state, params)
            assert not oa.has_updated(state) and np.any(updates)


@pytest.mark.parametrize("k", [1, 2])
def test_our_own_arithmetic_promotes_nothing_silently(k, strict):
    params = {"a": jnp.zeros((2, 2), jnp.bfloat16), "b": jnp.zeros(2)}
    grads = jax.tree.map(lambda p: jnp.ones(p.shape, p.dtype), params)
    weight, value = jnp.float32(2), jnp.float32(1)
    for policy in ("propagate", "skip_micro_step", "skip_window"):
        tx = oa.accumulate(optax.stateless(lambda g, _: g), k, nonfinite=policy)
        for update in (tx.update, jax.jit(tx.update)):
            state = tx.init(params)
            for _ in range(k):
                updates, state = update(grads, state, params, weight=weight, value=value)
            assert oa.has_updated(state)
            jax.tree.map(np.testing.assert_array_equal, updates, grads)
            oa.flush(tx, state, params)


@pytest.mark.parametrize("jit", [False, True])
def test_replicated_gradients_of_sharded_parameters_on_an_explicit_mesh(jit):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec
    with jax.set_mesh(mesh):
        params = jax.device_put(jnp.zeros(8), jax.sharding.NamedSharding(mesh, spec("d")))
        tx = oa.accumulate(optax.sgd(1.0), 2)
        update = jax.jit(tx.update) if jit else tx.update
        state, updates = tx.init(params), None
        for number in (1.0, 3.0):
            grads = jax.device_put(jnp.full(8, number), jax.sharding.NamedSharding(mesh, spec()))
            updates, state = update(grads, state, params)
    np.testing.assert_array_equal(np.asarray(updates), -2.0)
    assert state.grad_sum.sharding.spec == spec("d")
