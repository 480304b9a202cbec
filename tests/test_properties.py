"""Properties that hold for any micro-batches, by Hypothesis: jitted once, fixed shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import optax_accum as oa

K = 6
PARAMS = {"w": jnp.zeros(3), "b": jnp.zeros([])}
SIZE = 4  # numbers a micro-gradient has
finite = st.floats(-1e3, 1e3, width=32)
gradients = hnp.arrays(np.float32, (K, SIZE), elements=finite)
weights = hnp.arrays(np.float32, (K,), elements=st.floats(0.0625, 64, width=32))
few = settings(max_examples=25, deadline=None)


def tree(row):
    row = jnp.asarray(row)  # a NumPy scalar is squared by NumPy, an ulp from what jax makes of it
    return {"w": row[:3], "b": row[3]}


def scanned(tx):
    @jax.jit
    def run(state, grads, weights):
        def micro_step(state, row):
            updates, state = tx.update(tree(row[0]), state, PARAMS, weight=row[1])
            return state, updates

        state, updates = jax.lax.scan(micro_step, state, (grads, weights))
        return jax.tree.map(lambda u: u.sum(0), updates), state

    return run


WHOLE = oa.accumulate(optax.sgd(1.0), K)
GROUPED = {
    (2, 3): oa.accumulate(oa.accumulate(optax.sgd(1.0), 3), 2),
    (3, 2): oa.accumulate(oa.accumulate(optax.sgd(1.0), 2), 3),
    (6, 1): oa.accumulate(oa.accumulate(optax.sgd(1.0), 1), 6),
    (1, 6): oa.accumulate(oa.accumulate(optax.sgd(1.0), 6), 1),
}
RUN_WHOLE = scanned(WHOLE)
RUN_GROUPED = {k: scanned(tx) for k, tx in GROUPED.items()}
LONG = oa.accumulate(optax.sgd(1.0), 100)
RUN_LONG = scanned(LONG)
FLUSH = jax.jit(lambda state: oa.flush(LONG, state, PARAMS))
ADAM = oa.accumulate(optax.adam(0.1), 4)
RUN_ADAM = jax.jit(ADAM.update)


def mean(grads, weights):
    return np.average(grads.astype(np.float64), axis=0, weights=weights.astype(np.float64))


def assert_descended(updates, grads, weights):
    right = mean(grads, weights)
    scale = np.abs(grads).max() + 1e-30
    got = np.append(np.asarray(updates["w"]), updates["b"])
    np.testing.assert_allclose(-got, right, rtol=0, atol=2e-6 * scale)


@few
@given(gradients, weights, st.permutations(range(K)))
def test_any_order_of_micro_batches(grads, weights, order):
    order = list(order)
    updates, _ = RUN_WHOLE(WHOLE.init(PARAMS), grads[order], weights[order])
    assert_descended(updates, grads, weights)


@pytest.mark.parametrize("grouping", GROUPED)
@few
@given(gradients, weights)
def test_any_grouping(grouping, grads, weights):
    updates, state = RUN_GROUPED[grouping](GROUPED[grouping].init(PARAMS), grads, weights)
    assert_descended(updates, grads, weights)
    assert bool(oa.has_updated(state))


@few
@given(gradients)
def test_k_of_one_is_the_identity(grads):
    inner = optax.adam(0.1)
    tx = oa.accumulate(inner, 1)
    plain, state = inner.init(PARAMS), tx.init(PARAMS)
    for row in grads[:2]:
        right, plain = inner.update(tree(row), plain, PARAMS)
        got, state = tx.update(tree(row), state, PARAMS)
        assert_same_bits(got, right)
    assert_same_bits(state.inner_state, plain)


@few
@given(gradients, st.integers(0, K))
def test_saved_and_restored_after_any_micro_step(grads, where):
    def run(save):
        state = ADAM.init(PARAMS)
        for i, row in enumerate(grads):
            if i == where and save:
                state = jax.tree.map(lambda x: jnp.asarray(np.array(x)), state)
            _, state = RUN_ADAM(tree(row), state, PARAMS)
        return state

    assert_same_bits(run(False), run(True))


@few
@given(gradients, weights, st.integers(0, K))
def test_flush_conserves_the_weight(grads, weights, there):
    """Micro-steps left out by weight 0 change nothing; flush divides by what is there."""
    kept = np.where(np.arange(K) < there, weights, 0).astype(np.float32)
    _, state = RUN_LONG(LONG.init(PARAMS), grads, kept)
    np.testing.assert_allclose(state.weight_sum, kept.astype(np.float64).sum(), rtol=1e-6)
    updates, state = FLUSH(state)
    assert float(state.weight_sum) == 0
    assert bool(oa.has_updated(state)) == (there > 0)
    if there:
        assert_descended(updates, grads[:there], kept[:there])
    else:
        assert not np.asarray(updates["w"]).any()
