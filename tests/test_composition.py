"""`accumulate` inside and around what Optax and Flax offer, against NumPy or one big batch."""

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optax_accum as oa

SHAPES = {"b": (3,), "w": (2, 3)}
PARAMS = {"b": np.float32([0.5, -1, 2]), "w": np.float32([[1, 2, -3], [0.1, 0, -0.7]])}


def gradients(count, seed=0):
    """A list of random gradients, the same for every optimizer of a table."""
    rng = np.random.default_rng(seed)
    return [
        {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
        for _ in range(count)
    ]


def mean(grads, weights=None):
    """The weighted mean of trees, in float64."""
    leaves = [jax.tree.leaves(g) for g in grads]
    means = [
        np.average(np.float64(parts), axis=0, weights=weights)
        for parts in zip(*leaves, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(grads[0]), means)


def single(tree):
    return jax.tree.map(np.float32, tree)


def close(got, want, rtol=2e-5, atol=2e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, want)


def zero(tree):
    return all(not np.any(leaf) for leaf in jax.tree.leaves(tree))


def train(tx, grads, params=None, k=None, jit=False, **per_call):
    """Parameters and state at the end. With k: updates are zeros exactly between windows."""
    params = jax.tree.map(jnp.asarray, PARAMS if params is None else params)
    update = jax.jit(tx.update) if jit else tx.update
    state = tx.init(params)
    for i, grad in enumerate(grads):
        extra = {name: values[i] for name, values in per_call.items()}
        updates, state = update(grad, state, params, **extra)
        if k is not None:
            assert zero(updates) == ((i + 1) % k != 0)
        params = optax.apply_updates(params, updates)
    return params, state


def windows(grads, k, weights=None):
    """One float32 gradient a window."""
    weights = [1.0] * len(grads) if weights is None else weights
    starts = range(0, len(grads), k)
    return [single(mean(grads[i : i + k], weights[i : i + k])) for i in starts]


def counted(inner, calls):
    """inner, noting the gradients that it is run on."""
    inner = optax.with_extra_args_support(inner)

    def update(grads, state, params=None, **extra):
        calls.append((grads, extra))
        return inner.update(grads, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


class Seen(NamedTuple):
    """State of `recorder`: what the last run got."""

    value: Any
    runs: Any


def recorder():
    """An inner that keeps the `value` of its last run; -1 where it got none."""

    def update(grads, state, params=None, *, value=None, **extra):
        del params, extra
        kept = jnp.asarray(-1.0 if value is None else value, jnp.float32)
        return grads, Seen(kept, state.runs + 1)

    init = lambda params: Seen(jnp.zeros([]), jnp.zeros([], jnp.int32))  # noqa: E731
    return optax.GradientTransformationExtraArgs(init, update)


# --- inside -------------------------------------------------------------------------------------

IS_MATRIX = {"b": False, "w": True}
INSIDE = {
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0)),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(1.0)),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.1),
    "weight decay, masked": lambda: optax.adamw(0.1, weight_decay=0.1, mask=IS_MATRIX),
    "ema": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.55, jax.random.key(3)), optax.sgd(0.1)),
    "schedule": lambda: optax.sgd(optax.linear_schedule(1.0, 0.0, 4)),
    "named_chain": lambda: optax.named_chain(("a", optax.trace(0.5)), ("b", optax.scale(-0.1))),
    "masked": lambda: optax.masked(optax.adam(0.1), IS_MATRIX),
    "multi_transform": lambda: optax.multi_transform(
        {"slow": optax.sgd(0.01), "fast": optax.adam(0.1)}, {"b": "slow", "w": "fast"}
    ),
    "frozen": lambda: optax.multi_transform(
        {"on": optax.adam(0.1), "off": optax.set_to_zero()}, {"b": "off", "w": "on"}
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(0.1),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "conditionally_transform": lambda: optax.conditionally_transform(
        optax.scale(-1.0), lambda count: count % 2 == 0
    ),
    "flatten": lambda: optax.flatten(optax.adam(0.1)),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
    "mechanize": lambda: optax.contrib.mechanize(optax.sgd(0.1)),
    "sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2),
    "split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(optax.adam(0.1)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "apply_every": lambda: optax.chain(optax.apply_every(2), optax.sgd(0.1)),
    "keep_params_nonnegative": lambda: optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
}


@pytest.mark.parametrize("name", INSIDE)
def test_inside_the_window_it_runs_as_on_one_big_batch(name):
    """Every clock, moment, clip and draw inside counts updates."""
    k, weights = 2, [1.0, 3.0, 2.0, 0.5, 1.0, 1.0, 4.0, 1.0]
    params = jax.tree.map(abs, PARAMS) if name == "keep_params_nonnegative" else PARAMS
    grads = gradients(8)
    want, want_state = train(INSIDE[name](), windows(grads, k, weights), params)
    got, state = train(
        oa.accumulate(INSIDE[name](), k), grads, params, jit=True, weight=np.float32(weights)
    )
    close(got, want)
    assert int(state.update_step) == 4
    close(without_keys(state.inner_state), without_keys(want_state), rtol=1e-4)


def without_keys(tree):
    """Typed keys as the numbers in them."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def test_inner_runs_once_a_window():
    calls = []
    grads = gradients(8)
    train(oa.accumulate(counted(optax.sgd(1.0), calls), 4), grads, k=4)
    eager = [grad for grad, _ in calls if not isinstance(grad["w"], jax.core.Tracer)]
    assert len(eager) == 2
    for got, want in zip(eager, windows(grads, 4), strict=True):
        close(got, want)


def test_clipping_inside_clips_the_window_and_before_it_every_micro_gradient():
    grads = [np.float32([2, 0]), np.float32([0, 2])]
    clip = optax.clip_by_global_norm(1.0)
    inside, _ = train(oa.accumulate(optax.chain(clip, optax.sgd(1.0)), 2), grads, np.zeros(2))
    before, _ = train(optax.chain(clip, oa.accumulate(optax.sgd(1.0), 2)), grads, np.zeros(2))
    np.testing.assert_allclose(inside, -np.sqrt([0.5, 0.5]), rtol=1e-6)
    np.testing.assert_allclose(before, [-0.5, -0.5], rtol=1e-6)


def test_a_learning_rate_schedule_counts_updates():
    rate = optax.linear_schedule(1.0, 0.0, 8)
    grads = [np.ones(1, np.float32)] * 32
    tx = oa.accumulate(optax.sgd(rate), 4)
    params, _ = train(tx, grads, np.zeros(1), jit=True)
    np.testing.assert_allclose(params, [-4.5], rtol=1e-6)


def test_weight_decay_and_moments_count_updates():
    """adamw in closed form: gradients of 1 give updates of -0.1 (1 + 0.1 w)."""
    w = 1.0
    for _ in range(3):
        w -= 0.1 * (1 / (1 + 1e-8) + 0.1 * w)
    tx = oa.accumulate(optax.adamw(0.1, weight_decay=0.1), 4)
    params, _ = train(tx, [np.ones(1, np.float32)] * 12, np.ones(1), jit=True)
    np.testing.assert_allclose(params, [w], rtol=1e-5)
    np.testing.assert_allclose(w, 0.673, atol=1e-3)


def test_an_ema_inside_moves_once_a_window():
    grads = gradients(6)
    tx = oa.accumulate(optax.ema(0.9, debias=False), 3)
    _, state = train(tx, grads)
    first, second = windows(grads, 3)
    want = jax.tree.map(lambda a, b: 0.9 * 0.1 * a + 0.1 * b, first, second)
    close(state.inner_state.ema, want)
    assert int(state.inner_state.count) == 2


def test_noise_is_drawn_once_a_window():
    """Variance eta, not eta k."""
    params = np.zeros(20_000, np.float32)
    tx = oa.accumulate(optax.add_noise(4.0, 0.0, jax.random.key(0)), 4)
    params, _ = train(tx, [params] * 4, params, jit=True)
    np.testing.assert_allclose(np.var(params), 4.0, rtol=0.05)


# --- chain --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["before", "inside", "after"])
def test_a_linear_link_gives_the_same_wherever_it_stands(place):
    link, sgd, k = optax.scale(0.25), optax.sgd(1.0), 3
    tx = {
        "before": optax.chain(link, oa.accumulate(sgd, k)),
        "inside": oa.accumulate(optax.chain(link, sgd), k),
        "after": optax.chain(oa.accumulate(sgd, k), link),
    }[place]
    grads = gradients(6)
    got, state = train(tx, grads, k=k, jit=True)
    total = mean(windows(grads, k))
    close(got, jax.tree.map(lambda p, g: p - 0.25 * 2 * g, PARAMS, total))
    assert oa.has_updated(state)


def test_a_stateful_link_before_sees_every_micro_gradient():
    grads = [g["w"] for g in gradients(4)]
    tx = optax.chain(optax.trace(0.9), oa.accumulate(optax.sgd(1.0), 2))
    got, _ = train(tx, grads, PARAMS["w"], k=2)
    want, trace, held = np.float64(PARAMS["w"]), 0.0, []
    for grad in np.asarray(grads, np.float64):
        trace = 0.9 * trace + grad
        held.append(trace)
        if len(held) == 2:
            want, held = want - np.mean(held, axis=0), []
    close(got, want)


def test_a_stateful_link_after_sees_the_zeros():
    grads = [g["w"] for g in gradients(4)]
    tx = optax.chain(oa.accumulate(optax.identity(), 2), optax.trace(0.5), optax.scale(-1.0))
    got, _ = train(tx, grads, PARAMS["w"])
    want, trace = np.float64(PARAMS["w"]), 0.0
    for i, grad in enumerate(np.asarray(grads, np.float64)):
        trace = 0.5 * trace + ((grads[i - 1] + grad) / 2 if i % 2 else 0)
        want = want - trace
    close(got, want)


def test_extra_arguments_go_through_a_chain():
    grads, weights = gradients(3), [1.0, 2.0, 5.0]
    tx = optax.chain(optax.clip(10.0), oa.accumulate(optax.sgd(1.0), 8), optax.scale(0.5))
    got, state = train(tx, grads, weight=weights, last=[False, False, True])
    close(got, jax.tree.map(lambda p, g: p - 0.5 * g, PARAMS, mean(grads, weights)))
    assert oa.has_updated(state) and int(optax.tree.get(state, "update_step")) == 1


def test_flush_goes_through_a_chain():
    grads = gradients(3)
    tx = optax.chain(optax.clip(10.0), oa.accumulate(optax.sgd(1.0), 8), optax.scale(0.5))
    params, state = train(tx, grads)
    updates, state = oa.flush(tx, state, params)
    close(updates, jax.tree.map(lambda g: -0.5 * g, mean(grads)))
    assert oa.has_updated(state)
    updates, state = oa.flush(tx, state, params)
    assert zero(updates) and not oa.has_updated(state)


def test_has_updated_finds_the_one_in_a_chain_and_refuses_none_or_two():
    params = jnp.ones(2)
    two = optax.chain(oa.accumulate(optax.identity(), 2), oa.accumulate(optax.sgd(1.0), 3))
    with pytest.raises(ValueError, match="2 AccumulateStates side by side"):
        oa.has_updated(two.init(params))
    with pytest.raises(ValueError, match="without an AccumulateState"):
        oa.has_updated(optax.adam(0.1).init(params))
    with pytest.raises(ValueError, match="without an AccumulateState"):
        oa.flush(optax.adam(0.1), optax.adam(0.1).init(params), params)


@pytest.mark.parametrize("name", ["chain", "masked", "accumulate"])
def test_apply_gradients_does_what_update_and_apply_updates_do(name):
    inner = optax.adam(0.1)
    tx = {
        "chain": optax.chain(oa.accumulate(inner, 2), optax.scale(2.0)),
        "masked": optax.masked(oa.accumulate(inner, 2), True),
        "accumulate": oa.accumulate(optax.chain(inner, optax.scale(2.0)), 2),
    }[name]
    factor = 1.0 if name == "masked" else 2.0
    grads, weights = gradients(4), [1.0, 3.0, 1.0, 1.0]
    want, _ = train(optax.chain(inner, optax.scale(factor)), windows(grads, 2, weights))
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = tx.init(params)
    for grad, weight in zip(grads, weights, strict=True):
        params, state = oa.apply_gradients(tx, grad, state, params, weight=weight)
    close(params, want)


def test_apply_gradients_passes_no_extra_arguments_to_what_takes_none():
    params = jnp.ones(2)
    tx = optax.sgd(1.0)
    got, _ = oa.apply_gradients(tx, jnp.ones(2), tx.init(params), params)
    np.testing.assert_array_equal(got, [0, 0])


# --- masked, multi_transform --------------------------------------------------------------------


@pytest.mark.parametrize("mask", [IS_MATRIX, lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)])
def test_masked_around_passes_the_rest_through(mask):
    grads = gradients(4)
    tx = optax.masked(oa.accumulate(optax.sgd(1.0), 2), mask)
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = tx.init(params)
    for i, grad in enumerate(grads):
        updates, state = tx.update(grad, state, params, weight=1.0 + i)
        np.testing.assert_array_equal(updates["b"], grad["b"])
        assert bool(oa.has_updated(state)) == (i % 2 == 1)
        if i % 2:
            right = mean(grads[i - 1 : i + 1], [i, 1.0 + i])["w"]
            np.testing.assert_allclose(updates["w"], -right, rtol=1e-5, atol=1e-6)
        else:
            assert zero(updates["w"])


def test_masked_around_with_extra_arguments_of_the_parameters_tree():
    grads = gradients(2)
    calls = []
    inner = counted(optax.sgd(1.0), calls)
    tx = optax.masked(oa.accumulate(inner, 2), IS_MATRIX, mask_compatible_extra_args=True)
    state = tx.init(PARAMS)
    for grad in grads:
        _, state = tx.update(grad, state, PARAMS, tags={"b": jnp.ones(3), "w": jnp.ones((2, 3))})
    _, extra = calls[-1]
    assert isinstance(extra["tags"]["b"], optax.MaskedNode)


def label(tree):
    return {name: "slow" if name == "b" else "fast" for name in tree}


def test_multi_transform_around_has_a_window_a_label():
    grads = gradients(6)
    tx = optax.multi_transform(
        {"slow": oa.accumulate(optax.sgd(1.0), 3), "fast": oa.accumulate(optax.sgd(0.5), 2)}, label
    )
    params = jax.tree.map(jnp.asarray, PARAMS)
    state, update = tx.init(params), jax.jit(tx.update)
    for i, grad in enumerate(grads):
        updates, state = update(grad, state, params)
        for name, leaf, k, rate in (("slow", "b", 3, 1.0), ("fast", "w", 2, 0.5)):
            closed = (i + 1) % k == 0
            assert bool(oa.has_updated(state.inner_states[name])) == closed
            right = -rate * mean(grads[i + 1 - k : i + 1])[leaf] if closed else np.zeros(())
            np.testing.assert_allclose(
                updates[leaf], np.broadcast_to(right, SHAPES[leaf]), rtol=1e-5, atol=1e-6
            )
    with pytest.raises(ValueError, match=r"2 AccumulateStates side by side.*inner_states"):
        oa.has_updated(state)


def test_flush_closes_every_window_of_a_multi_transform():
    grads = gradients(5)
    tx = optax.multi_transform(
        {"slow": oa.accumulate(optax.sgd(1.0), 4), "fast": oa.accumulate(optax.sgd(1.0), 3)}, label
    )
    params, state = train(tx, grads)
    updates, state = oa.flush(tx, state, params)
    np.testing.assert_allclose(updates["b"], -grads[4]["b"], rtol=1e-5)
    np.testing.assert_allclose(updates["w"], -mean(grads[3:])["w"], rtol=1e-5, atol=1e-6)
    assert all(oa.has_updated(inner) for inner in state.inner_states.values())


def test_multi_transform_with_one_window_beside_frozen_parameters():
    tx = optax.multi_transform(
        {"slow": optax.set_to_zero(), "fast": oa.accumulate(optax.sgd(1.0), 2)}, label
    )
    grads = gradients(2)
    params, state = train(tx, grads)
    np.testing.assert_array_equal(params["b"], PARAMS["b"])
    np.testing.assert_allclose(params["w"], PARAMS["w"] - mean(grads)["w"], rtol=1e-5, atol=1e-6)
    assert oa.has_updated(state)


def test_flatten_around():
    grads = gradients(4)
    got, state = train(optax.flatten(oa.accumulate(optax.adam(0.1), 2)), grads, jit=True)
    want, _ = train(optax.adam(0.1), windows(grads, 2))
    close(got, want)
    assert oa.has_updated(state)


def test_split_real_and_imaginary_around():
    rng = np.random.default_rng(0)
    grads = (rng.normal(size=(2, 3)) + 1j * rng.normal(size=(2, 3))).astype(np.complex64)
    tx = optax.contrib.split_real_and_imaginary(oa.accumulate(optax.sgd(1.0), 2))
    got, _ = train(tx, grads, np.zeros(3, np.complex64))
    close(got, -grads.mean(0))


# --- inject_hyperparams -------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_a_hyperparameter_is_changed_between_windows(outside, jit):
    if outside:
        tx = optax.inject_hyperparams(
            lambda learning_rate: oa.accumulate(optax.sgd(learning_rate), 4)
        )(0.1)
    else:
        tx = oa.accumulate(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), 4)
    grads = gradients(8)
    params = jax.tree.map(jnp.asarray, PARAMS)
    state, update = tx.init(params), jax.jit(tx.update) if jit else tx.update
    for i, grad in enumerate(grads):
        if i == 4:
            hyperparams = state.hyperparams if outside else state.inner_state.hyperparams
            hyperparams["learning_rate"] = jnp.float32(0.7)
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
        assert bool(oa.has_updated(state)) == (i % 4 == 3)
    first, second = windows(grads, 4)
    want = jax.tree.map(lambda p, a, b: p - 0.1 * a - 0.7 * b, PARAMS, first, second)
    close(params, want)
    assert float(optax.tree.get(state, "learning_rate")) == np.float32(0.7)


@pytest.mark.parametrize("jit", [False, True])
def test_a_hyperparameter_set_as_a_Python_float_inside_a_window_counts_when_it_closes(jit):
    tx = oa.accumulate(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), 2)
    params = jnp.zeros(2)
    state, update = tx.init(params), jax.jit(tx.update) if jit else tx.update
    _, state = update(jnp.ones(2), state, params)
    state.inner_state.hyperparams["learning_rate"] = 0.5
    updates, state = update(jnp.ones(2), state, params)
    np.testing.assert_allclose(updates, [-0.5, -0.5])


@pytest.mark.parametrize("outside", [False, True])
def test_a_scheduled_hyperparameter_counts_calls(outside):
    """Inside they are updates; outside they are micro-steps."""
    rate = lambda count: 1.0 + count  # noqa: E731
    if outside:
        tx = optax.inject_hyperparams(lambda lr: oa.accumulate(optax.sgd(lr), 2))(lr=rate)
    else:
        tx = oa.accumulate(optax.inject_hyperparams(optax.sgd)(learning_rate=rate), 2)
    params, _ = train(tx, [np.ones(1, np.float32)] * 4, np.zeros(1))
    np.testing.assert_allclose(params, [-(2.0 + 4.0)] if outside else [-(1.0 + 2.0)])


def test_k_as_an_injected_hyperparameter_says_what_to_type():
    make = lambda learning_rate, k: oa.accumulate(optax.sgd(learning_rate), k)  # noqa: E731
    tx = optax.inject_hyperparams(make)(learning_rate=0.1, k=2)
    params = jnp.zeros(2)
    state = tx.init(params)
    with pytest.raises(TypeError, match="static_args"):
        jax.jit(tx.update)(jnp.ones(2), state, params)
    tx = optax.inject_hyperparams(make, static_args=("k",))(learning_rate=0.1, k=2)
    params, state = train(tx, [np.ones(2, np.float32)] * 2, np.zeros(2), k=2, jit=True)
    np.testing.assert_allclose(params, [-0.1, -0.1])


# --- apply_if_finite ----------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True])
def test_apply_if_finite_inside_judges_the_window(jit):
    grads = np.float32([1, np.nan, 2, 4, 3, 5])
    tx = oa.accumulate(optax.apply_if_finite(optax.sgd(1.0), 3), 2)
    params, state = train(tx, grads, np.float32(0), jit=jit)
    np.testing.assert_allclose(params, -(3.0 + 4.0))
    assert int(state.update_step) == 3
    assert int(state.inner_state.total_notfinite) == 1


@pytest.mark.parametrize("jit", [False, True])
def test_apply_if_finite_around_takes_a_micro_step_as_never_made(jit):
    """It drops the call with its clock: the window then takes one micro-batch more."""
    grads = np.float32([1, np.nan, 3, np.inf, 2, 6])
    tx = optax.apply_if_finite(oa.accumulate(optax.sgd(1.0), 2), 5)
    params, state = train(tx, grads, np.float32(0), jit=jit)
    np.testing.assert_allclose(params, -(2.0 + 4.0))
    assert int(optax.tree.get(state, "update_step")) == 2
    assert oa.has_updated(state)


# --- value and grad -----------------------------------------------------------------------------

VALUES = {
    "equal": ([1.0, 3.0], None, 2.0),
    "weighted": ([1.0, 3.0], [1.0, 3.0], 2.5),
    "weight zero": ([np.nan, 3.0], [0.0, 2.0], 3.0),
    "integers": ([1, 4], None, 2.5),
    "bfloat16": (list(jnp.asarray([256, 257 + 1], jnp.bfloat16)), None, 257.0),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", VALUES)
def test_inner_sees_the_mean_value_of_the_window(name, jit):
    values, weights, right = VALUES[name]
    per_call = {"value": values} | ({} if weights is None else {"weight": weights})
    tx = oa.accumulate(recorder(), 2)
    _, state = train(tx, gradients(2), jit=jit, **per_call)
    np.testing.assert_allclose(state.inner_state.value, right, rtol=1e-6)
    assert int(state.inner_state.runs) == 1


@pytest.mark.parametrize("k", [1, 2])
def test_inner_is_given_no_value_where_no_call_had_one(k):
    """Plain inner would not see one either: zero would be a lie."""
    tx = oa.accumulate(recorder(), k)
    _, state = train(tx, gradients(k))
    assert float(state.inner_state.value) == -1.0


@pytest.mark.parametrize("k", [1, 2])
def test_a_missing_value_is_the_error_of_plain_inner(k):
    grads = gradients(k)
    with pytest.raises(TypeError, match="value"):
        train(optax.polyak_sgd(), grads[:1])
    with pytest.raises(TypeError, match="value"):
        train(oa.accumulate(optax.polyak_sgd(), k), grads)


def test_flush_gives_the_mean_value_of_what_was_added():
    tx = oa.accumulate(recorder(), 4)
    params, state = train(tx, gradients(2), value=[1.0, 5.0])
    _, state = oa.flush(tx, state, params, value=100.0)  # not counted: it has no weight
    assert float(state.inner_state.value) == 3.0


@pytest.mark.parametrize("jit", [False, True])
def test_flush_gives_a_value_to_an_inner_that_cannot_do_without(jit):
    def update(updates, state, params=None, *, value, **extra):
        return updates, value

    inner = optax.GradientTransformationExtraArgs(lambda params: jnp.zeros([]), update)
    tx = oa.accumulate(inner, 4)
    params, state = train(tx, gradients(2), value=[1.0, 5.0])
    flush = functools.partial(oa.flush, tx)
    _, state = (jax.jit(flush) if jit else flush)(state, params)
    assert float(state.inner_state) == 3.0


def test_reduce_on_plateau_inside():
    plateau = optax.contrib.reduce_on_plateau(patience=1, factor=0.5, accumulation_size=1)
    tx = oa.accumulate(optax.chain(optax.sgd(1.0), plateau), 2)
    grads = [np.ones(1, np.float32)] * 8
    values = [1.0, 3.0, 0.0, 3.8, 1.0, 3.0, 5.0, 5.0]  # means: 2, 1.9, 2, 5
    params, state = train(tx, grads, np.zeros(1), value=values)
    np.testing.assert_allclose(state.inner_state[1].best_value, 1.9)
    np.testing.assert_allclose(state.inner_state[1].scale, 0.25)
    np.testing.assert_allclose(params, [-(1 + 1 + 0.5 + 0.25)])


def quadratic(curvature):
    return lambda p: 0.5 * jnp.sum(curvature * p["x"] ** 2)


LINE_SEARCHES = {
    "lbfgs": lambda: optax.lbfgs(memory_size=3),
    "backtracking": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=10)
    ),
    "zoom": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(10)),
}


@pytest.mark.parametrize("name", LINE_SEARCHES)
def test_a_line_search_sees_the_gradient_and_value_of_the_window(name):
    """The batch is two curvatures; value_fn is the whole batch's, as its caller must give it."""
    parts = np.float32([[1, 6, 2], [3, 2, 8]])
    whole = quadratic(parts.mean(0))
    params = {"x": jnp.float32([1.0, -2.0, 3.0])}
    plain, tx = LINE_SEARCHES[name](), oa.accumulate(LINE_SEARCHES[name](), 2)
    want, want_state = params, plain.init(params)

    @jax.jit
    def micro_step(params, state, curvature):
        value, grad = jax.value_and_grad(quadratic(curvature))(params)
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=whole)
        return optax.apply_updates(params, updates), state

    got, state = params, tx.init(params)
    for _ in range(3):
        value, grad = jax.value_and_grad(whole)(want)
        updates, want_state = plain.update(
            grad, want_state, want, value=value, grad=grad, value_fn=whole
        )
        want = optax.apply_updates(want, updates)
        for curvature in list(parts):
            got, state = micro_step(got, state, curvature)
    np.testing.assert_allclose(got["x"], want["x"], rtol=1e-3, atol=1e-5)


def test_an_inner_that_takes_no_argument_but_the_callers():
    """As `optax.contrib.sam` and the line searches, which refuse what they do not know."""

    def update(grads, state, params=None, *, rate):
        return jax.tree.map(lambda g: -rate * g, grads), state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    grads = gradients(2)
    for last in (False, True):
        tx = oa.accumulate(inner, 2)
        got, _ = train(tx, grads, rate=[0.5, 0.25], weight=[1.0, 3.0], last=[False, last])
        close(got, jax.tree.map(lambda p, g: p - 0.25 * g, PARAMS, mean(grads, [1, 3])))


def test_every_other_extra_argument_is_the_closing_calls():
    calls = []
    inner = counted(optax.sgd(1.0), calls)
    train(oa.accumulate(inner, 2), gradients(2), tag=["first", "second"], grad=gradients(2, seed=9))
    assert len([extra for _, extra in calls if extra["tag"] == "first"]) <= 1  # shapes of zeros
    grads, extra = calls[-1]
    assert extra["tag"] == "second"
    close(grads, single(mean(gradients(2))))
    close(extra["grad"], grads, rtol=0, atol=0)


# --- gradients not shaped like the parameters ---------------------------------------------------


@pytest.mark.parametrize("jit", [False, True])
def test_lookahead_inside_counts_updates(jit):
    k, grads = 2, [g["w"] for g in gradients(8)]
    inner = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
    tx = oa.accumulate(inner, k)
    start = jnp.asarray(PARAMS["w"])
    params = optax.LookaheadParams(fast=start, slow=start + 1)
    state, update = tx.init(params), jax.jit(tx.update) if jit else tx.update
    assert state.grad_sum.shape == start.shape
    fast, slow = np.float64(start), np.float64(start) + 1
    for i, grad in enumerate(grads):
        updates, state = update(grad, state, params)
        assert isinstance(updates, optax.LookaheadParams)
        assert zero(updates) == (i % 2 == 0)
        params = optax.apply_updates(params, updates)
        if i % 2:
            fast = fast - 0.1 * (np.float64(grads[i - 1]) + grad) / 2
            if i % 4 == 3:
                slow = slow + 0.5 * (fast - slow)
                fast = slow
    np.testing.assert_allclose(params.fast, fast, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(params.slow, slow, rtol=1e-5, atol=1e-6)
    assert int(state.inner_state.steps_since_sync) == 0


def test_lookahead_inside_with_apply_gradients_and_flush():
    inner = optax.lookahead(optax.sgd(1.0), sync_period=1, slow_step_size=0.5)
    tx = oa.accumulate(inner, 4)
    params = optax.LookaheadParams.init_synced({"w": jnp.zeros(2), "b": None})
    state = tx.init(params)
    for grad in (1.0, 3.0):
        grads = {"w": jnp.full(2, grad), "b": None}
        params, state = oa.apply_gradients(tx, grads, state, params)
    assert zero(params)
    with pytest.raises(AttributeError):
        oa.flush(tx, state, params.fast)
    updates, state = oa.flush(tx, state, params)
    close(updates.slow["w"], np.float32([-1, -1]))
    close(updates.fast["w"], np.float32([-1, -1]))


def test_schedule_free_eval_params_are_found():
    inner = optax.contrib.schedule_free(optax.sgd(0.1), 0.1)
    grads = gradients(6)
    want, want_state = train(inner, windows(grads, 2))
    got, state = train(oa.accumulate(inner, 2), grads)
    close(
        optax.contrib.schedule_free_eval_params(state.inner_state, got),
        optax.contrib.schedule_free_eval_params(want_state, want),
    )


def private():
    return optax.contrib.differentially_private_aggregate(
        l2_norm_clip=1.0, noise_multiplier=0.0, key=jax.random.key(0)
    )


@pytest.mark.parametrize("jit", [False, True])
def test_differentially_private_aggregation_inside_says_where_to_put_it(jit):
    params = {"w": jnp.zeros(3)}
    tx = oa.accumulate(optax.chain(private(), optax.sgd(1.0)), 2)
    update = jax.jit(tx.update) if jit else tx.update
    with pytest.raises(ValueError, match="per-example") as error:
        update({"w": jnp.ones((4, 3))}, tx.init(params), params)
    assert "optax.chain(optax.contrib.differentially_private_aggregate" in str(error.value)
    assert "accumulate(inner, k))" in str(error.value)


def test_differentially_private_aggregation_before():
    examples = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    tx = optax.chain(private(), oa.accumulate(optax.sgd(1.0), 2))
    params, _ = train(tx, examples, np.zeros(3))
    norms = np.linalg.norm(np.float64(examples), axis=-1, keepdims=True)
    close(params, -(examples / np.maximum(norms, 1)).mean((0, 1)))


def test_differentially_private_aggregation_inside_a_window_of_one():
    """No window is held, so there is nothing that it does not fit."""
    examples = np.random.default_rng(0).normal(size=(1, 4, 3)).astype(np.float32)
    inner = optax.chain(private(), optax.sgd(1.0))
    want, _ = train(inner, examples, np.zeros(3))
    got, _ = train(oa.accumulate(inner, 1), examples, np.zeros(3))
    close(got, want)


# --- MultiSteps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_multi_steps(place):
    grads = gradients(12)
    if place == "inside":
        inner = optax.MultiSteps(optax.sgd(0.5), 2).gradient_transformation()
        tx = oa.accumulate(inner, 3)
    else:
        tx = optax.MultiSteps(oa.accumulate(optax.sgd(0.5), 2), 3).gradient_transformation()
    got, state = train(tx, grads, k=6, jit=True)
    first, second = windows(grads, 6)
    close(got, jax.tree.map(lambda p, a, b: p - 0.5 * (a + b), PARAMS, first, second))
    assert int(optax.tree.get(state, "update_step")) == (4 if place == "inside" else 2)


def test_multi_steps_that_skips_outside():
    grads = [np.float32(g) for g in (1, np.nan, 3, 2, 2, 4)]
    tx = optax.MultiSteps(
        oa.accumulate(optax.sgd(1.0), 1),
        2,
        should_skip_update_fn=optax.skip_not_finite,
    ).gradient_transformation()
    params, _ = train(tx, grads[:5], np.float32(0))
    np.testing.assert_allclose(params, -(2.0 + 2.0))


def test_multi_steps_itself_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"gradient_transformation\(\)"):
        oa.accumulate(optax.MultiSteps(optax.sgd(1.0), 2), 2)


# --- nested -------------------------------------------------------------------------------------

NESTED = {
    "means": ("mean", "mean", True),
    "sums": ("sum", "sum", False),
    "sum over weight in a mean": ("sum_over_weight", "mean", True),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", NESTED)
def test_nested_windows_are_one_window(name, jit):
    """k2 windows in each of which k1 micro-steps fall equal one window of k1 k2 of them."""
    outer, inner, weighted = NESTED[name]
    k1, k2 = 2, 3
    grads = gradients(12)
    weights = np.random.default_rng(1).uniform(0.2, 5, size=12).astype(np.float32)
    tx = oa.accumulate(
        oa.accumulate(optax.sgd(0.5), k2, loss_reduction=inner), k1, loss_reduction=outer
    )
    got, state = train(tx, grads, k=6, jit=jit, **({"weight": weights} if weighted else {}))
    want = PARAMS
    for i in (0, 6):
        total = mean(grads[i : i + 6], weights[i : i + 6] if outer == "mean" else None)
        factor = {"mean": 1.0, "sum": 6.0, "sum_over_weight": 6 / weights[i : i + 6].sum()}[outer]
        want = jax.tree.map(lambda p, g: p - 0.5 * factor * g, want, total)  # noqa: B023
    close(got, want)
    assert int(state.update_step) == 6 and int(state.inner_state.update_step) == 2


def test_three_floors():
    grads = gradients(8)
    weights = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    tx = oa.accumulate(oa.accumulate(oa.accumulate(optax.sgd(1.0), 2), 2), 2)
    got, _ = train(tx, grads, k=8, jit=True, weight=weights)
    close(got, jax.tree.map(lambda p, g: p - g, PARAMS, mean(grads, weights)))


def test_values_of_nested_windows():
    tx = oa.accumulate(oa.accumulate(recorder(), 2), 2)
    values, weights = [1.0, 2.0, 3.0, 10.0], [1.0, 3.0, 2.0, 2.0]
    _, state = train(tx, gradients(4), value=values, weight=weights)
    right = np.average(values, weights=weights)
    np.testing.assert_allclose(state.inner_state.inner_state.value, right, rtol=1e-6)


def test_of_nested_windows_the_outermost_speaks():
    tx = oa.accumulate(oa.accumulate(optax.sgd(1.0), 2), 2)
    params = jax.tree.map(jnp.asarray, PARAMS)
    state, spoken = tx.init(params), []
    for grad in gradients(4):
        _, state = tx.update(grad, state, params)
        spoken.append((bool(oa.has_updated(state)), bool(oa.has_updated(state.inner_state))))
    assert spoken == [(False, False), (True, False), (False, False), (True, True)]


def two_floors(through):
    inner = oa.accumulate(optax.sgd(1.0), 2)
    if through == "chain":
        inner = optax.chain(optax.scale(2.0), inner, optax.scale(0.5))
    return oa.accumulate(inner, 2)


def check_closing(tx, update, flush, calls, last):
    """After any number of micro-steps, whichever of the two windows is open, both close."""
    grads, weights = gradients(calls), np.float32(range(1, calls + 1))
    want = PARAMS
    for i in range(0, calls, 4):
        part = mean(grads[i : i + 4], weights[i : i + 4])
        want = jax.tree.map(np.subtract, want, part)
    for closing in ("flush", "last"):
        params = jax.tree.map(jnp.asarray, PARAMS)
        state = tx.init(params)
        for i, grad in enumerate(grads):
            end = closing == "last" and i == calls - 1
            updates, state = update(grad, state, params, weight=weights[i], last=last(end))
            params = optax.apply_updates(params, updates)
        if closing == "flush":
            updates, state = flush(state, params)
            params = optax.apply_updates(params, updates)
            assert bool(oa.has_updated(state)) == (calls % 4 != 0)
            again, state = flush(state, params)
            assert zero(again) and not oa.has_updated(state)
        else:
            assert oa.has_updated(state)
        close(params, want)


@pytest.mark.parametrize("through", ["accumulate", "chain"])
def test_flush_and_last_close_both_floors(through):
    tx = two_floors(through)
    for calls in (1, 2, 3, 4, 6):
        check_closing(tx, tx.update, lambda s, p: oa.flush(tx, s, p), calls, bool)


@pytest.mark.parametrize("through", ["accumulate", "chain"])
def test_flush_and_a_traced_last_close_both_floors(through):
    tx = two_floors(through)
    flush = jax.jit(lambda state, params: oa.flush(tx, state, params))
    update = jax.jit(tx.update)
    for calls in range(1, 9):
        check_closing(tx, update, flush, calls, lambda end: jnp.asarray(end))


@pytest.mark.parametrize("outer", ["mean", "sum", "sum_over_weight"])
@pytest.mark.parametrize("inner", ["mean", "sum", "sum_over_weight"])
def test_nested_windows_never_divide_twice(outer, inner):
    """What cannot be one window is refused: no nesting is silently another scale.

    Four micro-batches of gradient 6 and weight 2 (where one may be given).
    """
    tx = oa.accumulate(
        oa.accumulate(optax.sgd(1.0), 2, loss_reduction=inner), 2, loss_reduction=outer
    )
    extra = {} if outer == "sum" else {"weight": [2.0] * 4}
    grads = [np.full(1, 6, np.float32)] * 4
    right = {
        ("mean", "mean"): 6.0,
        ("sum", "sum"): 24.0,
        ("sum", "mean"): 12.0,  # as written: the mean of two sums
        ("sum_over_weight", "mean"): 3.0,
        ("mean", "sum_over_weight"): 6.0,
        ("sum_over_weight", "sum_over_weight"): 3.0,
    }
    try:
        got, _ = train(tx, grads, np.zeros(1), **extra)
    except ValueError:
        assert (outer, inner) not in list(right)[:4]
    else:
        np.testing.assert_allclose(got, [-right[outer, inner]])


def test_a_sum_in_a_mean_says_what_to_give_both():
    tx = oa.accumulate(oa.accumulate(optax.sgd(1.0), 2, loss_reduction="sum"), 2)
    with pytest.raises(ValueError, match="Nested"):
        train(tx, gradients(2))


# --- Flax ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True])
def test_train_state(jit):
    grads = gradients(8)
    state = TrainState.create(
        apply_fn=lambda p, x: x,
        params=jax.tree.map(jnp.asarray, PARAMS),
        tx=oa.accumulate(optax.adam(0.1), 4),
    )
    micro_step = lambda state, grads: state.apply_gradients(grads=grads)  # noqa: E731
    micro_step = jax.jit(micro_step) if jit else micro_step
    updated = []
    for grad in grads:
        state = micro_step(state, grad)
        updated.append(bool(oa.has_updated(state.opt_state)))
    want, _ = train(optax.adam(0.1), windows(grads, 4))
    close(state.params, want)
    assert updated == [False, False, False, True] * 2
    assert int(state.step) == 8 and int(state.opt_state.update_step) == 2


class Model(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros([], jnp.int32))

    def __call__(self, x):
        return self.linear(x)


def nnx_loss(model, x, y):
    return ((model(x) - y) ** 2).mean()


def nnx_batches():
    rng = np.random.default_rng(0)
    sizes = [4, 1, 2, 3, 2]
    return [(rng.normal(size=(n, 2)), rng.normal(size=(n, 3))) for n in sizes]


@pytest.mark.parametrize("place, jit", [("accumulate", True), ("chain", False)])
def test_nnx_optimizer(place, jit):
    """Unequal micro-batches: weight and last go through `update`."""
    batches = [tuple(map(jnp.float32, batch)) for batch in nnx_batches()]
    model, whole = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    tx = oa.accumulate(optax.adam(0.1), 3)
    if place == "chain":
        tx = optax.chain(optax.identity(), tx)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    assert not oa.has_updated(optimizer.opt_state)

    def micro_step(model, optimizer, x, y, last):
        value, grads = nnx.value_and_grad(nnx_loss)(model, x, y)
        weight = jnp.float32(len(x))
        optimizer.update(model, grads, weight=weight, last=last, value=value)

    micro_step = nnx.jit(micro_step) if jit else micro_step
    updated = []
    for i, (x, y) in enumerate(batches):
        micro_step(model, optimizer, x, y, jnp.asarray(i == 4))
        updated.append(bool(oa.has_updated(optimizer.opt_state)))
    assert updated == [False, False, True, False, True]

    reference = nnx.Optimizer(whole, optax.adam(0.1), wrt=nnx.Param)
    for part in (batches[:3], batches[3:]):
        x, y = (jnp.concatenate(arrays) for arrays in zip(*part, strict=True))
        reference.update(whole, nnx.grad(nnx_loss)(whole, x, y))
    np.testing.assert_allclose(model.linear.kernel[...], whole.linear.kernel[...], rtol=1e-4)
    np.testing.assert_allclose(model.linear.bias[...], whole.linear.bias[...], rtol=1e-4)


def test_nnx_optimizer_with_static_arguments_and_flush():
    model = Model(nnx.Rngs(0))
    tx = oa.accumulate(optax.sgd(1.0), 4)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    bias = np.asarray(model.linear.bias[...])
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    optimizer.update(model, grads, weight=2.0, last=False)
    assert not oa.has_updated(optimizer.opt_state)
    optimizer.update(model, grads, weight=0.0, last=True)
    assert oa.has_updated(optimizer.opt_state)
    np.testing.assert_allclose(model.linear.bias[...], bias - 1)


def test_nnx_state_as_params_without_the_optimizer_class():
    model = Model(nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    tx = oa.accumulate(optax.sgd(1.0), 2)
    state = tx.init(params)
    start = np.asarray(model.linear.bias[...])

    @jax.jit
    def micro_step(params, state, x, y):
        grads = jax.grad(lambda p: nnx_loss(nnx.merge(graph, p, rest), x, y))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    seen = []
    for x, y in nnx_batches()[:2]:
        params, state, grads = micro_step(params, state, x, y)
        seen.append(np.float64(grads["linear"]["bias"][...]))
    assert oa.has_updated(state)
    bias = params["linear"]["bias"][...]
    np.testing.assert_allclose(bias, start - np.mean(seen, axis=0), rtol=1e-5, atol=1e-6)


def test_composing_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tx = optax.chain(optax.clip(1.0), oa.accumulate(optax.adamw(0.1), 2))
        train(tx, gradients(2), jit=True, weight=[1.0, 2.0])
