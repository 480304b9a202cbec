"""Precision: the error of a window's gradient against NumPy in float64, over k.

The micro-gradients are float32 numbers of mean zero, or with a drift as large as their spread. By
accumulator dtype, with the peers' own: `optax.MultiSteps` keeps a running mean, `optax.apply_every`
a sum in the dtype of the gradients. The error is that of the whole gradient, relative to it. The
law is that of sums rounded k times: d sqrt(k/2) without and d sqrt(k/3) with a drift, with d the
root mean square of a rounding's relative error, 1.66e-3 in bfloat16 and 2^-16 of it in float32;
sqrt(2) d under stochastic rounding. The floor is the hand-written float32 sum.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import optax_accum as oa
from benchmarks import _measure, _peers

CASE = "precision"
SIZE = 4096  # elements of a gradient
ROUNDING = {"bfloat16": 1.66e-3, "float32": 1.66e-3 * 2**-16}
KS = {"tiny": (2,), "quick": (4, 16, 64, 256, 1024), "full": (4, 16, 64, 256, 1024, 4096)}
SUM = "hand-written sum"
# The least error a method of this dtype may have and still be wrong: times the law, and a few ulp.
SLACK = 8.0


def micro_gradients(k: int, drift: float) -> np.ndarray:
    """(k, SIZE) in float32."""
    rng = np.random.default_rng(0)
    return (rng.standard_normal((k, SIZE)) + drift).astype(np.float32)


def by_calls(tx: Any, grads: jax.Array, dtype: Any) -> jax.Array:
    """The gradient that k calls come to: what an update by SGD of rate -1 adds."""
    state = tx.init(jnp.zeros(SIZE, dtype))

    def micro_step(state: Any, grad: jax.Array) -> tuple[Any, jax.Array]:
        updates, state = tx.update(grad.astype(dtype), state, jnp.zeros(SIZE, dtype))
        return state, updates

    _, updates = lax.scan(micro_step, state, grads)
    return updates[-1]


def time_driver(accumulator: Any, grads: jax.Array) -> jax.Array:
    tx = oa.accumulate(optax.sgd(-1.0), len(grads), accumulator_dtype=accumulator)
    return by_calls(tx, grads, jnp.float32)


def space_driver(accumulator: Any, grads: jax.Array) -> jax.Array:
    """The gradient of mean(w . g): g, in the space driver's window."""
    loss = lambda w, rows: jnp.mean(rows @ w)  # noqa: E731
    grad_fn = oa.value_and_grad(loss, len(grads), accumulator_dtype=accumulator, engine="carry")
    return grad_fn(jnp.zeros(SIZE), grads)[1]


def multi_steps(dtype: Any, grads: jax.Array) -> jax.Array:
    tx = optax.MultiSteps(optax.sgd(-1.0), len(grads), accumulator_dtype=dtype)
    return by_calls(tx.gradient_transformation(), grads, jnp.float32)


def apply_every(dtype: Any, grads: jax.Array) -> jax.Array:
    """The sum, divided afterwards, as exact as its sum can be."""
    k = len(grads)
    return by_calls(optax.chain(optax.sgd(-1.0), optax.apply_every(k)), grads, dtype) / k


def microbatch(grads: jax.Array) -> jax.Array:
    loss = lambda w, rows: jnp.mean(rows @ w)  # noqa: E731
    return _peers.microbatch(loss, 1)(jnp.zeros(SIZE), grads)[1]


def hand_written(dtype: Any, grads: jax.Array) -> jax.Array:
    add = lambda total, grad: (total + grad.astype(dtype), None)  # noqa: E731
    return lax.scan(add, jnp.zeros(SIZE, dtype), grads)[0].astype(jnp.float32) / len(grads)


def methods() -> dict[str, tuple[str, bool, Callable[[jax.Array], jax.Array]]]:
    """(dtype of the sums, rounded stochastically, the mean of these gradients)."""
    found = {}
    for name, dtype in (("float32", jnp.float32), ("bfloat16", jnp.bfloat16)):
        narrow = name == "bfloat16"
        ours = None if name == "float32" else dtype

        def given(method: Any, dtype: Any) -> Callable[[jax.Array], jax.Array]:
            return lambda grads: method(dtype, grads)

        found |= {
            f"{SUM}, {name}": (name, False, given(hand_written, dtype)),
            f"oa.accumulate, {name}": (name, narrow, given(time_driver, ours)),
            f"oa.value_and_grad, {name}": (name, narrow, given(space_driver, ours)),
            f"{_peers.MULTI_STEPS}, {name}": (name, False, given(multi_steps, dtype)),
            f"{_peers.APPLY_EVERY}, {name}": (name, False, given(apply_every, dtype)),
        }
    return found | {f"{_peers.MICROBATCH}, float32": ("float32", False, microbatch)}


def law(dtype: str, stochastic: bool, k: int, drift: float) -> float:
    """The expected relative error of a sum of k."""
    return ROUNDING[dtype] * (2**0.5 if stochastic else 1) * (k / (3 if drift else 2)) ** 0.5


def measure(k: int, drift: float, jitted: dict[str, Any]) -> list[_measure.Row]:
    """A row a method. What is far off in float32 is wrong, not imprecise, and stops."""
    grads = micro_gradients(k, drift)
    right = grads.astype(np.float64).mean(0)
    found, floor = [], None
    for name, (dtype, stochastic, method) in jitted.items():
        got = np.asarray(method(grads), np.float64)
        error = float(np.linalg.norm(got - right) / np.linalg.norm(right))
        expected = law(dtype, stochastic, k, drift)
        if not error <= SLACK * expected and (dtype == "float32" or k <= 64):
            raise _measure.WrongResult(
                f"{name} is off by {error:.1e} at k={k}, expected about {expected:.1e}; what "
                "computes something else has no precision."
            )
        floor = floor or error
        row = _measure.row(CASE, name, error, "relative error", error / floor if floor else None)
        kind = "drift" if drift else "mean zero"
        given = {"k": k, "dtype": dtype, "drift": drift, "setting": f"{kind}, k={k}"}
        found.append(row | {"law": expected} | given)
    return found


def rows(scale: str) -> list[_measure.Row]:
    """The case, by scale."""
    jitted = {name: (*about, jax.jit(method)) for name, (*about, method) in methods().items()}
    return [row for drift in (0.0, 1.0) for k in KS[scale] for row in measure(k, drift, jitted)]
