"""Before training: what a window costs in traffic and memory, by scheme."""

from typing import Any, NamedTuple

import jax
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
    all-reduce 2 f X, where f = (N - 1) / N (Patarasuk and Yuan, 2009). G are the gradient's bytes
    in the window's dtype, W the parameters'::

        a reduction a micro-batch       2 k f G             what plain jit does
        one a window                    2 f G               axis_name=, mesh=
        one a window, to shards         f G + f W           grad_specs=; ZeRO-1
        to shards, a micro-batch        k f G + f W         ZeRO-2
        FSDP in plain jit               2 k f W + k f G     ZeRO-3
        FSDP, gathered once             f W + f G           mesh= and grad_specs=

    Args:
      params: the parameters, arrays or `jax.ShapeDtypeStruct`s.
      k: micro-steps in a window, each replica's.
      replicas: devices that share the batch.
      accumulator_dtype: as in `accumulate`.

    Returns:
      One :class:`Traffic` a scheme. Several of them fit a device: take the one with the least
      traffic whose window and weights you have room for.

    Raises:
      ValueError: for a k or a number of replicas below 1.

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
      FSDP, gathered and reduced once             6.0 MB  4.0 MB
    """
    k = _checks.integer_k(k)
    if not isinstance(replicas, (int, np.integer)) or replicas < 1:
        raise ValueError(f"replicas is {replicas!r}, expected an integer of 1 or more.")
    dtype = _checks.accumulator_dtype(accumulator_dtype)
    arrays = [leaf for leaf in jax.tree.leaves(params) if _checks.is_array(leaf)]
    shapes = [jax.typeof(leaf) if not hasattr(leaf, "dtype") else leaf for leaf in arrays]
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in shapes)
    window = sum(leaf.size * _fits.window_dtype(leaf.dtype, dtype).itemsize for leaf in shapes)
    return _schemes(k, int(replicas), weights, window)


def _schemes(k: int, n: int, weights: int, window: int) -> list[Traffic]:
    def sent(size: int) -> int:
        return size * (n - 1) // n

    def share(size: int) -> int:
        return -(-size // n)

    gathered, reduced = sent(weights), sent(window)
    return [
        Traffic(
            "a reduction a micro-batch",
            "value_and_grad or accumulate in plain jit, parameters replicated",
            2 * k * reduced,
            window,
            weights,
        ),
        Traffic(
            "one reduction a window",
            "axis_name= in shard_map, or value_and_grad(mesh=...)",
            2 * reduced,
            window,
            weights,
        ),
        Traffic(
            "one a window, to shards (ZeRO-1)",
            "value_and_grad(mesh=..., grad_specs=...), optimizer state in those shards",
            reduced + gathered,
            window,
            weights,
        ),
        Traffic(
            "to shards, a micro-batch (ZeRO-2)",
            "plain jit, state placed by state_shardings of sharded parameters",
            k * reduced + gathered,
            share(window),
            weights,
        ),
        Traffic(
            "FSDP, a micro-batch (ZeRO-3)",
            "plain jit, parameters and state in shards",
            k * (2 * gathered + reduced),
            share(window),
            share(weights),
        ),
        Traffic(
            "FSDP, gathered and reduced once",
            "value_and_grad(mesh=..., grad_specs=...), parameters in shards",
            gathered + reduced,
            window,
            weights,
        ),
    ]
