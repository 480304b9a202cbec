"""What a window costs in traffic and memory, by the scheme that shares it among devices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum import _checks, _fits


class Traffic(NamedTuple):
    """What one way to share a window among devices costs each of them."""

    scheme: str
    how: str  # what to type
    traffic: int  # bytes that a device sends in a window, which is also what it receives
    window: int  # bytes of the window that a device holds
    weights: int  # bytes of the parameters that a device holds while it computes


def traffic(
    params: optax.Params,
    k: int,
    replicas: int,
    *,
    accumulator_dtype: Any = None,
) -> list[Traffic]:
    """Bytes a device sends in a window, and holds of it, for each way to share the gradients.

    With N replicas in a ring, a reduce-scatter or an all-gather of X bytes sends f X a device, an
    all-reduce 2 f X, where f = (N - 1) / N (Patarasuk and Yuan, 2009). W are the parameters' bytes,
    and a micro-gradient's; G are a window's, which is reduced in float32 or wider::

        a reduction a micro-batch       2 k f W             what plain jit does
        one a window                    2 f G               axis_name=, mesh=
        one a window, to shards         f G + f W           grad_specs=; ZeRO-1
        to shards, a micro-batch        k f W + f W         ZeRO-2
        FSDP in plain jit               2 k f W + k f W     ZeRO-3
        FSDP, gathered a micro-batch    k f W + f G         the next, gather="micro_batch"
        FSDP, gathered once             f W + f G           mesh= and grad_specs=

    What the compiler reduces to shards is counted as a reduce-scatter, which it becomes on GPU and
    TPU; XLA on CPU leaves the all-reduce, twice as much.

    Args:
      params: the parameters, arrays or `jax.ShapeDtypeStruct`s.
      k: micro-steps in a window, each replica's.
      replicas: devices that share the batch.
      accumulator_dtype: as in `accumulate`: of the window that a device holds.

    Returns:
      One :class:`Traffic` a scheme. Several of them fit a device: take the one with the least
      traffic whose window and weights you have room for.

    Raises:
      ValueError, TypeError: for a k or a number of replicas below 1, and for a number as params.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax_accum as oa
      >>> params = jax.ShapeDtypeStruct((1_000_000,), jnp.float32)
      >>> for row in oa.planning.traffic(params, k=8, replicas=4):
      ...     print(f"{row.scheme:40} {row.traffic / 1e6:6.1f} MB {row.window / 1e6:4.1f} MB")
      a reduction a micro-batch                  48.0 MB  4.0 MB
      one reduction a window                      6.0 MB  4.0 MB
      one a window, to shards (ZeRO-1)            6.0 MB  4.0 MB
      to shards, a micro-batch (ZeRO-2)          27.0 MB  1.0 MB
      FSDP, a micro-batch (ZeRO-3)               72.0 MB  1.0 MB
      FSDP, gathered a micro-batch               27.0 MB  4.0 MB
      FSDP, gathered once                         6.0 MB  4.0 MB
    """
    k = _checks.integer_k(k)
    if not isinstance(replicas, (int, np.integer)) or replicas < 1:
        raise ValueError(f"replicas is {replicas!r}, expected an integer of 1 or more.")
    if isinstance(params, (int, float)):
        raise TypeError(
            f"params is the number {params}, expected a tree of arrays or shapes; for that many "
            f"float32 parameters type jax.ShapeDtypeStruct(({int(params)},), jnp.float32)."
        )
    dtype = _checks.accumulator_dtype(accumulator_dtype)
    shapes = [
        jax.eval_shape(jnp.asarray, x) for x in jax.tree.leaves(params) if _checks.is_array(x)
    ]
    held = [_fits.window_dtype(x.dtype, dtype) for x in shapes]
    weights = sum(x.size * x.dtype.itemsize for x in shapes)
    window = sum(x.size * d.itemsize for x, d in zip(shapes, held, strict=True))
    wide = [_fits.promoted(d, jnp.float32) for d in held]
    reduced = sum(x.size * d.itemsize for x, d in zip(shapes, wide, strict=True))
    n = int(replicas)
    return [
        Traffic(name, how, total(k, weights, reduced) * (n - 1) // n, *holds(n, window, weights))
        for name, how, total, holds in _SCHEMES
    ]


def _whole(n: int, window: int, weights: int) -> tuple[int, int]:
    return window, weights


def _window_in_shards(n: int, window: int, weights: int) -> tuple[int, int]:
    return -(-window // n), weights


def _in_shards(n: int, window: int, weights: int) -> tuple[int, int]:
    return -(-window // n), -(-weights // n)


# Name, what to type, bytes in units of (N - 1) / N from (k, W, G), what a device holds.
_SCHEMES: tuple[tuple[str, str, Callable[..., int], Callable[..., tuple[int, int]]], ...] = (
    (
        "a reduction a micro-batch",
        "value_and_grad or accumulate in plain jit, parameters replicated",
        lambda k, w, g: 2 * k * w,
        _whole,
    ),
    (
        "one reduction a window",
        "axis_name= in shard_map, or value_and_grad(mesh=...)",
        lambda k, w, g: 2 * g,
        _whole,
    ),
    (
        "one a window, to shards (ZeRO-1)",
        "value_and_grad(mesh=..., grad_specs=...), optimizer state in those shards",
        lambda k, w, g: g + w,
        _whole,
    ),
    (
        "to shards, a micro-batch (ZeRO-2)",
        "plain jit, the state in shards and the parameters whole",
        lambda k, w, g: k * w + w,
        _window_in_shards,
    ),
    (
        "FSDP, a micro-batch (ZeRO-3)",
        "plain jit, parameters and state in shards",
        lambda k, w, g: 3 * k * w,
        _in_shards,
    ),
    (
        "FSDP, gathered a micro-batch",
        "value_and_grad(mesh=..., grad_specs=..., gather='micro_batch'), parameters in shards",
        lambda k, w, g: k * w + g,
        _whole,
    ),
    (
        "FSDP, gathered once",
        "value_and_grad(mesh=..., grad_specs=...), parameters in shards",
        lambda k, w, g: w + g,
        _whole,
    ),
)
