"""A batch into micro-batches, and per-example results back into the batch's order."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

from optax_accum import _checks

LAYOUTS = ("strided", "contiguous", "stacked")


class Sizes(NamedTuple):
    """A batch as k micro-batches of m examples, and one of r < m after them."""

    k: int
    m: int
    r: int


def sizes(
    batch: Any, k: int | None, micro_batch_size: int | None, layout: str, remainder: str
) -> Sizes:
    """How a batch will be cut, or an error that names the leaf or the sizes that would fit."""
    axes = 2 if layout == "stacked" else 1
    shape = _leading(batch, axes, layout)
    if layout == "stacked":
        if k not in (None, shape[0]) or micro_batch_size not in (None, shape[1]):
            raise ValueError(
                f"the stacked batch has leading axes {shape}, expected (k, micro-batch size) = "
                f"({k if k else shape[0]}, {micro_batch_size or shape[1]}); type k={shape[0]}."
            )
        if 0 in shape:
            raise ValueError(f"the stacked batch has leading axes {shape}, so no examples.")
        return Sizes(shape[0], shape[1], 0)
    (examples,) = shape
    m = micro_batch_size if k is None else -(-examples // k)
    assert m is not None  # exactly one of k and micro_batch_size is given
    full, rest = divmod(examples, m) if m else (0, 0)
    fits = rest == 0 and (k is None or full == k)
    if examples == 0 or not (fits or remainder == "exact"):
        raise ValueError(_misfit(examples, k, micro_batch_size))
    return Sizes(full, m, rest)


def axis_of(layout: str) -> int:
    """The axis of a cut batch along which its micro-batches lie."""
    return 1 if layout == "strided" else 0


def take(cut_batch: Any, index: Any, layout: str) -> Any:
    """One micro-batch. Taken in the loop, so that no second copy of the batch is made."""
    axis = axis_of(layout)
    return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, index, axis, keepdims=False), cut_batch
    )


def cut(batch: Any, into: Sizes, layout: str) -> tuple[Any, Any]:
    """The micro-batches, along `axis_of(layout)` of leaves, and the r examples left, or None.

    Strided, example j goes to micro-batch j mod k, leaves become (m, k, ...), and with the batch
    sharded over its examples every device keeps its own. Contiguous, leaves become (k, m, ...),
    neighbours stay together, and sharded data moves.
    """
    if layout == "stacked":
        return batch, None
    k, m, r = into
    head = batch if r == 0 else jax.tree.map(lambda x: x[: k * m], batch)
    rest = None if r == 0 else jax.tree.map(lambda x: x[k * m :], batch)
    one = _strided if layout == "strided" else _contiguous
    return jax.tree.map(lambda x: one(x, k, m), head), rest


def join(stacked: Any, rest: Any, layout: str) -> Any:
    """Per-example results (k, m, ...) and (r, ...) in the batch's own order."""

    def flat(x: jax.Array) -> jax.Array:
        x = jnp.swapaxes(x, 0, 1) if layout == "strided" else x
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    if stacked is None:
        return rest
    joined = jax.tree.map(flat, stacked)
    if rest is None:
        return joined
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), joined, rest)


def _strided(x: Any, k: int, m: int) -> jax.Array:
    shape, sharding = (m, k, *jnp.shape(x)[1:]), _explicit(x)
    if sharding is None:
        return jnp.reshape(x, shape)
    first, *others = sharding.spec
    _check_shards(m, sharding, first)
    spec = Spec(first, None, *others)
    return jnp.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, spec))


def _contiguous(x: Any, k: int, m: int) -> jax.Array:
    shape, sharding = (k, m, *jnp.shape(x)[1:]), _explicit(x)
    if sharding is None:
        return jnp.reshape(x, shape)
    first, *others = sharding.spec
    _check_shards(m, sharding, first)
    whole = jax.sharding.reshard(x, NamedSharding(sharding.mesh, Spec(None, *others)))
    spec = Spec(None, first, *others)
    return jax.sharding.reshard(jnp.reshape(whole, shape), NamedSharding(sharding.mesh, spec))


def _check_shards(m: int, sharding: NamedSharding, names: Any) -> None:
    names = names if isinstance(names, tuple) else (names,)
    shards = math.prod(sharding.mesh.shape[name] for name in names)
    if m % shards:
        raise ValueError(
            f"micro-batches of {m} examples do not split into the {shards} shards of the batch "
            f"over {names}; use a micro-batch size that is a multiple of {shards}."
        )


def _explicit(x: Any) -> NamedSharding | None:
    """The sharding of the examples, where it is part of the type."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or not sharding.spec or sharding.spec[0] is None:
        return None
    names = sharding.spec[0] if isinstance(sharding.spec[0], tuple) else (sharding.spec[0],)
    types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    return sharding if all(types[name] == AxisType.Explicit for name in names) else None


def _leading(batch: Any, axes: int, layout: str) -> tuple[int, ...]:
    """The leading axes that all leaves share."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise ValueError(
            "the batch has no arrays, expected leaves with a leading axis of examples; type "
            "batch_argnums= for the arguments that hold the batch."
        )
    shapes = {jax.tree_util.keystr(path) or "the batch": jnp.shape(leaf) for path, leaf in leaves}
    wanted = None
    for name, shape in shapes.items():
        if len(shape) < axes:
            kind = "axes (k, micro-batch size)" if axes == 2 else "axis of examples"
            raise ValueError(
                f"{name} of the batch has shape {shape}, expected a leading {kind}; give one "
                "number for the whole batch as another argument, or repeat it for every example."
            )
        wanted = wanted or (name, shape[:axes])
        if shape[:axes] != wanted[1]:
            raise ValueError(
                f"{name} of the batch has leading axes {shape[:axes]}, expected {wanted[1]} as in "
                f"{wanted[0]}; every leaf is cut along the same examples (layout {layout!r})."
            )
    assert wanted is not None
    return wanted[1]


def _misfit(examples: int, k: int | None, micro_batch_size: int | None) -> str:
    name, got = ("k", k) if k is not None else ("micro_batch_size", micro_batch_size)
    what = f"{k} micro-batches" if k is not None else f"micro-batches of {micro_batch_size}"
    assert got is not None
    divisors = _checks.divisors(examples)
    near = [d for d in divisors if d < got][-1:] + [d for d in divisors if d > got][:2]
    if not near:
        return "the batch has no examples, expected one or more; skip it in the loader."
    listed = ", ".join(f"{name}={d}" for d in near[:-1])
    listed = f"{listed} or {name}={near[-1]}" if listed else f"{name}={near[-1]}"
    return f"batch of {examples} does not split into {what}; use {listed}, or remainder='exact'."
