"""Stochastic rounding from float32 to bfloat16, without a key and without a buffer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def round_to(x: jax.Array, dtype: Any, clocks: tuple[Any, ...]) -> jax.Array:
    """`x` in `dtype`; a bfloat16 is rounded stochastically.

    Up with the probability that keeps the mean, so that small terms are not lost in large sums:
    16 random bits are added below the bits that stay, and what is below is cut.
    """
    if dtype != jnp.bfloat16:
        return x.astype(dtype)
    return _straight_through(x, _rounded(x, clocks))


def _rounded(x: jax.Array, clocks: tuple[Any, ...]) -> jax.Array:
    """Everything in whole numbers, which CPUs do in two thirds of the time.

    What is not finite gets no random bits: carried too far, they would make a NaN finite.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    random = bits + (_hash(x.shape, clocks) >> np.uint32(16))
    kept = jnp.where(jnp.isnan(x), np.uint32(0x7FC00000), bits)
    cut = jnp.where(jnp.isfinite(x), random, kept) >> np.uint32(16)
    return lax.bitcast_convert_type(cut.astype(jnp.uint16), jnp.bfloat16)


@jax.custom_jvp
def _straight_through(x: jax.Array, rounded: jax.Array) -> jax.Array:
    """`rounded`, with the derivative of `x`: bits have none."""
    del x
    return rounded


@_straight_through.defjvp
def _straight_through_jvp(primals: Any, tangents: Any) -> Any:
    return primals[1], tangents[0].astype(primals[1].dtype)


def _hash(shape: tuple[int, ...], clocks: tuple[Any, ...]) -> jax.Array:
    """32 random bits an element, from its index and the clocks.

    The index is scaled by the seed too: shifted alone, the streams of two clocks would be parts of
    one sequence.
    """
    seed = jnp.zeros([], jnp.uint32)
    for clock in clocks:
        seed = _mix(seed ^ jnp.asarray(clock).astype(jnp.uint32))
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * _uint32(size) + lax.broadcasted_iota(jnp.uint32, shape, axis)
    return _mix(index * (seed | np.uint32(1)) + _mix(seed))


def _uint32(size: Any) -> Any:
    """A size modulo 2**32; of a shape that is not known yet, a traced one."""
    return np.uint32(size & 0xFFFFFFFF) if isinstance(size, int) else jnp.asarray(size, jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """A uint32 into another, every bit depending on every bit.

    The constants are those of C. Wellons' search for 32-bit mixers of low bias (public domain).
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))
