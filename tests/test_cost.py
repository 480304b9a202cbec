"""What a micro-step costs, read from the compiled program and from counted callbacks."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import count_inner

import optax_accum as oa

PARAMS = {f"w{i}": jax.ShapeDtypeStruct((128, 128), jnp.float32) for i in range(8)}
P = 8 * 128 * 128 * 4


def temporaries(step, tx, *arguments):
    """Bytes of temporaries, in P, of a call whose parameters and state are donated."""
    state = jax.eval_shape(tx.init, PARAMS)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(PARAMS, state, *arguments).compile()
    memory = compiled.memory_analysis()
    if memory is None:
        pytest.skip("this backend does not analyse memory")
    assert memory.alias_size_in_bytes > 3 * P  # donation took hold
    return memory.temp_size_in_bytes / P


def apply_step(tx):
    def step(params, state, grads, **keywords):
        return oa.apply_gradients(tx, grads, state, params, **keywords)

    return step


def update_step(tx):
    def step(params, state, grads, **keywords):
        updates, state = tx.update(grads, state, params, **keywords)
        return optax.apply_updates(params, updates), state

    return step


CASES = {
    "plain": {},
    "skip_micro_step": {"nonfinite": "skip_micro_step"},
    "skip_window": {"nonfinite": "skip_window"},
    "sum": {"loss_reduction": "sum"},
    "bfloat16": {"accumulator_dtype": jnp.bfloat16},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("k", [4, "schedule"])
def test_apply_gradients_makes_no_parameter_sized_temporary(case, k):
    k = (lambda update_step: 4 + update_step) if k == "schedule" else k
    tx = oa.accumulate(optax.adamw(1e-3), k, **CASES[case])
    assert temporaries(apply_step(tx), tx, PARAMS) < 0.02


def test_apply_gradients_with_traced_weight_and_last():
    tx = oa.accumulate(optax.adamw(1e-3), 4)

    def step(params, state, grads, weight, last):
        return oa.apply_gradients(tx, grads, state, params, weight=weight, last=last)

    weight, last = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), bool)
    assert temporaries(step, tx, PARAMS, weight, last) < 0.02


@pytest.mark.parametrize("case", CASES)
def test_update_makes_at_most_the_zeros(case):
    tx = oa.accumulate(optax.adamw(1e-3), 4, **CASES[case])
    assert temporaries(update_step(tx), tx, PARAMS) < 1.02


def test_a_static_k_of_one_costs_what_inner_costs():
    inner = optax.adamw(1e-3)
    plain = jax.jit(update_step(inner), donate_argnums=(0, 1))
    ours = oa.accumulate(inner, 1)
    totals = []
    for tx in (inner, ours):
        state = jax.eval_shape(tx.init, PARAMS)
        step = plain if tx is inner else jax.jit(update_step(ours), donate_argnums=(0, 1))
        memory = step.lower(PARAMS, state, PARAMS).compile().memory_analysis()
        totals.append(
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )
    assert totals[1] <= totals[0] + 4096


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("run", ["update", "apply_gradients"])
@pytest.mark.parametrize("driver", ["jit", "scan"])
def test_inner_runs_once_a_window(case, run, driver):
    counter = [0]
    inner = optax.chain(count_inner(counter), optax.adam(1e-3))
    tx = oa.accumulate(inner, 4, **CASES[case])
    step = update_step(tx) if run == "update" else apply_step(tx)
    params = {"w": jnp.ones((3, 2))}
    carry = (params, tx.init(params))
    if driver == "jit":
        jitted = jax.jit(step)
        for _ in range(8):
            carry = jitted(*carry, params)
    else:
        carry, _ = jax.lax.scan(lambda c, _: (step(*c, params), None), carry, length=8)
    jax.block_until_ready(carry)
    jax.effects_barrier()
    assert counter == [2]


def test_one_compilation_serves_every_k_of_a_schedule():
    traces = []

    def schedule(update_step):
        traces.append(None)
        return 1 + update_step

    tx = oa.accumulate(optax.sgd(1.0), schedule)
    params = jnp.zeros([])
    update = jax.jit(tx.update)
    state, fired = tx.init(params), []
    traced = None
    for _ in range(10):
        _, state = update(params, state, params)
        traced = traced or len(traces)
        fired.append(bool(oa.has_updated(state)))
    assert fired == [i in (0, 2, 5, 9) for i in range(10)]
    assert len(traces) == traced


def test_static_last_leaves_no_conditional():
    tx = oa.accumulate(optax.sgd(1.0), 4)
    params = jnp.zeros(3)
    update = functools.partial(tx.update, last=True)
    text = str(jax.make_jaxpr(update)(params, tx.init(params), params))
    assert "cond[" not in text
