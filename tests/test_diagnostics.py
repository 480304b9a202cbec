"""What people log of a window, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum as oa

PARAMS = {
    "w": jnp.zeros((3, 2)),
    "b": jnp.zeros(2, jnp.bfloat16),
    "c": jnp.zeros([], jnp.complex64),
}
NAN = float("nan")


def gradient(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), PARAMS)


def mean_norm(grads, weights):
    leaves = [[np.asarray(x, np.complex128).ravel() for x in jax.tree.leaves(g)] for g in grads]
    flat = np.array([np.concatenate(g) for g in leaves])
    return np.linalg.norm(np.average(flat, axis=0, weights=weights))


def run(tx, grads, weights):
    update, state = jax.jit(tx.update), tx.init(PARAMS)
    for grad, weight in zip(grads, weights, strict=True):
        _, state = update(grad, state, PARAMS, weight=jnp.float32(weight))
    return state


@pytest.mark.parametrize("jit", [False, True])
def test_window_of_a_real_tree(jit):
    grads, weights = [gradient(i) for i in range(3)], [2.0, 5.0, 1.0]
    state = run(oa.accumulate(optax.adam(0.1), 4), grads, weights)
    log = (jax.jit(oa.diagnostics.window) if jit else oa.diagnostics.window)(state)
    counts = {name: int(log[name]) for name in ("micro_step", "k", "update_step", "skipped")}
    assert counts == {"micro_step": 3, "k": 4, "update_step": 0, "skipped": 0}
    assert float(log["weight_sum"]) == 8.0
    np.testing.assert_allclose(log["grad_norm"], mean_norm(grads, weights), rtol=1e-5)


def test_dropped_micro_steps_are_counted_and_left_out():
    grads = [gradient(0), jax.tree.map(lambda g: g * NAN, gradient(1)), gradient(2)]
    state = run(oa.accumulate(optax.sgd(1.0), 4, nonfinite="skip_micro_step"), grads, [1, 1, 3])
    log = oa.diagnostics.window(state)
    assert int(log["skipped"]) == 1 and float(log["weight_sum"]) == 4.0
    np.testing.assert_allclose(log["grad_norm"], mean_norm(grads[::2], [1, 3]), rtol=1e-5)


@pytest.mark.parametrize("k", [1, 2])
def test_a_window_just_closed_is_empty(k):
    log = oa.diagnostics.window(run(oa.accumulate(optax.sgd(1.0), k), [gradient(0)] * 2, [1, 1]))
    assert float(log["grad_norm"]) == 0.0 and int(log["micro_step"]) == 0
    assert int(log["update_step"]) == 2 // k


def test_lane_by_lane_of_a_vmapped_state():
    tx = oa.accumulate(optax.sgd(1.0), 4)
    params = jnp.zeros((3, 2))
    grads = jnp.array([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0]])
    _, state = jax.vmap(tx.update)(grads, jax.vmap(tx.init)(params), params)
    np.testing.assert_allclose(oa.diagnostics.window(state)["grad_norm"], [5.0, 0.0, 10.0])
