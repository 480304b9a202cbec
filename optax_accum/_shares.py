"""A window whose weights are all known before it opens: each micro-batch's share of it.

    gradient = sum(share_i * g_i),  share_i = w_i / sum(w)

The share starts the backward pass, so that nothing is left to divide afterwards.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum import _accumulator as acc
from optax_accum import _fits


def shares(
    loss_reduction: str, whole: jax.Array, dtype: Any, alone: bool
) -> Callable[[Any], tuple[Any, Any]]:
    """weights -> (their fractions of the whole weight, the seeds of their backward passes)."""
    per_weight = acc.reciprocal(whole, dtype)

    def of(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        fractions = weights.astype(dtype) * per_weight
        if alone:  # w * (1 / w) may be an ulp off; NaN stays
            fractions = jnp.where(weights == whole, (weights != 0).astype(dtype), fractions)
        if loss_reduction == "mean":
            return fractions, fractions
        one = per_weight if loss_reduction == "sum_over_weight" else jnp.ones([], dtype)
        return fractions, jnp.broadcast_to(one, weights.shape)

    return of


def correction(
    kept: jax.Array, whole: jax.Array, loss_reduction: str, nonfinite: str
) -> Callable[[Any], Any]:
    """From shares of the whole weight to shares of what was kept: one product at the end."""
    if nonfinite == "propagate" or loss_reduction == "sum":
        return lambda total: total

    def correct(total: jax.Array) -> jax.Array:
        wide = _fits.promoted(total.dtype, jnp.float32)
        ratio = whole.astype(_fits.real(wide)) * acc.reciprocal(kept, _fits.real(wide))
        return total * ratio.astype(total.dtype)

    return correct


def alone(part: acc.Contribution, grads: Any) -> Any:
    """The gradient of a window of one micro-batch."""
    scale = part.scale

    def one(grad: jax.Array) -> jax.Array:
        if scale is not None:
            grad = (grad.astype(_fits.promoted(grad.dtype, jnp.float32)) * scale).astype(grad.dtype)
        return grad if part.keep is True else jnp.where(part.keep, grad, 0)

    return jax.tree.map(one, grads)


def counted(part: acc.Contribution) -> jax.Array:
    """The weight that a micro-step really adds."""
    return part.weight if part.keep is True else jnp.where(part.keep, part.weight, 0)
