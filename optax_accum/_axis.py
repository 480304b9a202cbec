"""Inside a mapped axis: what `shard_map` knows of a value, behind one small function each."""

from typing import Any

import jax
from jax import lax


def inside_manual_axes() -> bool:
    """Whether this is being traced inside a `shard_map`."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def varying(x: Any) -> frozenset[str]:
    """The mapped axes along which a value may differ; none where jax does not check."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def as_varying(x: Any, axes: frozenset[str]) -> Any:
    """The same value, free to differ along `axes` too."""
    more = tuple(axes - varying(x))
    return lax.pcast(x, more, to="varying") if more else x


def sharded_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """`x` with the sharding of `other`, where shardings are part of the types."""
    wanted = jax.typeof(other).sharding
    return x if jax.typeof(x).sharding == wanted else jax.sharding.reshard(x, wanted)
