"""float16: a loss scale inside each backward pass, and gone again before anything is added."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_accum import _checks
from optax_accum._fits import at

_LARGEST = 2.0**126  # whose reciprocal is a normal float32


def with_loss_scale(
    loss_fn: Callable[..., Any], scale: Any, *, argnums: int | Sequence[int] = 0
) -> Callable[..., Any]:
    """The same loss, whose backward pass runs scaled: for float16, in both drivers.

    Small gradients underflow in float16. Here the backward pass starts from `scale` times what it
    would start from, and each micro-gradient is divided by it where it leaves the loss::

        gradient(with_loss_scale(loss_fn, scale)) = gradient(scale * loss_fn) / scale

    So what is added to a window is never scaled: the scale may change inside a window, a weight
    counts as it should, and an overflow is a micro-gradient that is not finite, of which
    `nonfinite` says what happens. Values and auxiliary outputs are untouched. Scale and division
    are exact if the scale is a power of two.

    Args:
      loss_fn: returns a loss of float32 or wider, `return loss.astype(jnp.float32)`, or a tuple
        that begins with it.
      scale: a real scalar, or an object that has one as `scale` (`flax.training.dynamic_scale`) or
        `loss_scale` (`jmp`). With the space driver the backward pass of a micro-batch starts from
        its share of the whole weight besides, about `scale / k`.
      argnums: the arguments to be differentiated, of float32 or wider: cast them to float16 inside.

    Returns:
      A function of the same arguments.

    Raises:
      TypeError: for a loss or a differentiated leaf of float16, and for a scale that is no number.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_accum as oa
      >>> def loss_fn(w, x):  # in float16 its gradient, 1e-8, is 0
      ...     half = w.astype(jnp.float16) * x.astype(jnp.float16)
      ...     return half.astype(jnp.float32).mean() * 1e-8
      >>> w, x = jnp.ones([]), jnp.ones(8)
      >>> _, plain = oa.value_and_grad(loss_fn, k=4)(w, x)
      >>> _, scaled = oa.value_and_grad(oa.with_loss_scale(loss_fn, 2.0**15), k=4)(w, x)
      >>> float(plain), f"{float(scaled):.3g}"
      (0.0, '1e-08')
    """
    _checks.function("loss_fn", loss_fn)
    indices = _checks.indices("argnums", argnums)
    scale = _scale_of(scale)

    @functools.wraps(loss_fn)
    def scaled(*args: Any, **kwargs: Any) -> Any:
        full = list(args)
        for i in indices:
            full[i] = jax.tree_util.tree_map_with_path(
                lambda path, leaf, i=i: _unscaled(i, path, leaf, scale), args[i]
            )
        out = loss_fn(*full, **kwargs)
        if isinstance(out, tuple):
            return (_started(out[0], scale), *out[1:])
        return _started(out, scale)

    return scaled


def adjust_loss_scale(dynamic_scale: Any, finite: Any) -> Any:
    """The dynamic loss scale after gradients that were finite, or were not.

    For gradients that `dynamic_scale.value_and_grad` has not computed itself: it shrinks after an
    overflow, and grows after `growth_interval` calls without one.

    Args:
      dynamic_scale: a `flax.training.dynamic_scale.DynamicScale`.
      finite: a bool scalar; `stats.skipped == 0` after `value_and_grad(..., has_stats=True,
        nonfinite="skip_micro_step")`.

    Returns:
      A `DynamicScale` of its settings.

    Raises:
      TypeError: for what is no `DynamicScale` (`jmp`'s has `adjust` itself).

    Example:
      >>> from flax.training.dynamic_scale import DynamicScale
      >>> import optax_accum as oa
      >>> float(oa.adjust_loss_scale(DynamicScale(scale=1024.0), False).scale)
      512.0
    """
    if not callable(getattr(dynamic_scale, "value_and_grad", None)):
        raise TypeError(
            f"dynamic_scale is a {type(dynamic_scale).__name__}, expected a flax.training."
            "dynamic_scale.DynamicScale; of other kinds call their own method, "
            "loss_scale.adjust(finite) for jmp."
        )
    flag = jnp.where(_checks.scalar_flag("finite", finite), jnp.float32(1), jnp.nan)
    # Flax adjusts a scale only while it differentiates: here, one number that is NaN or is not.
    return dynamic_scale.value_and_grad(lambda one: one * flag)(jnp.float32(1)).dynamic_scale


def _scale_of(scale: Any) -> Any:
    for name in ("scale", "loss_scale"):
        scale = getattr(scale, name, scale)
    if not any(_checks.is_scalar(scale, kind) for kind in (jnp.integer, jnp.floating)):
        raise TypeError(
            f"scale is {_checks.described(scale)}, expected a real scalar or a DynamicScale; type "
            "with_loss_scale(loss_fn, 2.0**15)."
        )
    return lax.stop_gradient(jnp.clip(jnp.asarray(scale, jnp.float32), 1 / _LARGEST, _LARGEST))


def _started(loss: Any, scale: jax.Array) -> Any:
    if jnp.result_type(loss) == jnp.float16:
        raise TypeError(
            "the loss is float16, in which its backward pass would start from a scale that "
            "overflows; return loss.astype(jnp.float32)."
        )
    return _times_backwards(jnp.asarray(loss), scale)


def _unscaled(index: int, path: Any, leaf: Any, scale: jax.Array) -> Any:
    if not _checks.is_array(leaf) or not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
        return leaf
    if jnp.result_type(leaf) == jnp.float16:
        raise TypeError(
            f"argument {index}{at(path)} is float16, in which its gradient would underflow once it "
            "is not scaled any more; keep float32 parameters and cast them inside loss_fn."
        )
    return _times_backwards(jnp.asarray(leaf), 1 / scale)


@jax.custom_jvp
def _times_backwards(x: jax.Array, factor: jax.Array) -> jax.Array:
    """`x`, whose derivative is `factor` and not 1."""
    del factor
    return x


@_times_backwards.defjvp
def _times_backwards_jvp(primals: Any, tangents: Any) -> Any:
    x, factor = primals
    return x, tangents[0] * factor.astype(x.dtype)
