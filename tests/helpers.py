"""Shared by the tests: feeding micro-steps, and independent oracles."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_accum as oa


def feed(tx: Any, params: Any, micro_steps: Any, jit: bool = True) -> tuple[list[Any], Any, Any]:
    """All updates of a sequence of micro-steps, each `grads` or `(grads, keywords)`.

    Returns (updates, params after them, state).
    """
    update = jax.jit(tx.update, static_argnames=("last",)) if jit else tx.update
    state, emitted = tx.init(params), []
    for micro_step in micro_steps:
        grads, keywords = micro_step if isinstance(micro_step, tuple) else (micro_step, {})
        updates, state = update(jnp.asarray(grads), state, params, **keywords)
        params = optax.apply_updates(params, updates)
        emitted.append(updates)
    return emitted, params, state


def moves(emitted: list[Any]) -> list[float]:
    """Scalar updates as Python floats, the sign turned: what sgd(1) descended by."""
    return [-float(update) for update in emitted]


def sgd_window(
    loss_reduction: str, gradients: Any, weights: Any, dtype: Any = np.float64
) -> np.ndarray:
    """The window's gradient by NumPy."""
    gradients = [np.asarray(gradient, dtype) for gradient in gradients]
    total = sum(
        gradient * (weight if loss_reduction == "mean" else 1)
        for gradient, weight in zip(gradients, weights, strict=True)
    )
    return np.asarray(total if loss_reduction == "sum" else total / np.sum(weights))


def count_inner(counter: list[int]) -> optax.GradientTransformation:
    """A transformation that counts how often it really runs."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        jax.debug.callback(lambda: counter.__setitem__(0, counter[0] + 1))
        return updates, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def assert_same_bits(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def updated(state: Any) -> bool:
    return bool(oa.has_updated(state))
