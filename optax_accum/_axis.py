"""Inside a mapped axis: sums over replicas, agreement, keys; and what `shard_map` knows of a value.

A replica is one index along `axis_name`, which is a name or several. Every collective of this
package that stands inside a mapped axis stands here.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec

AxisName = str | tuple[str, ...]


def names(axis_name: AxisName | None) -> tuple[str, ...]:
    if axis_name is None:
        return ()
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def is_bound(axis_name: AxisName) -> bool:
    """Whether this is being traced inside the mapped axis."""
    try:
        lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def replica(axis_name: AxisName | None) -> Any:
    """The number of this replica."""
    return 0 if axis_name is None else lax.axis_index(axis_name)


def total(tree: Any, axis_name: AxisName | None) -> Any:
    """The sum over replicas: one collective for the whole tree."""
    return tree if axis_name is None else lax.psum(tree, axis_name)


def reduced(
    sums: Any, given: Any, scattered: Any, others: Any, axis_name: AxisName
) -> tuple[Any, Any]:
    """Sums of gradients over replicas, and the sums of some others with them.

    A leaf of `given` that varies already along an axis is this replica's own, and so is its
    gradient. `scattered` says for each leaf along which axes a dimension of it is left in shards.
    """
    leaves, treedef = jax.tree.flatten(sums)
    plans = [{}] * len(leaves) if scattered is None else scattered
    axes = [
        tuple(name for name in names(axis_name) if name not in varying(leaf))
        for leaf in jax.tree.leaves(given)
    ]
    whole = [i for i, plan in enumerate(plans) if not plan and axes[i] == names(axis_name)]
    together, others = lax.psum(([leaves[i] for i in whole], others), axis_name)
    for i, leaf in zip(whole, together, strict=True):
        leaves[i] = leaf
    for i in set(range(len(leaves))) - set(whole):
        leaves[i] = _scattered(leaves[i], axes[i], plans[i])
    return treedef.unflatten(leaves), others


def _scattered(x: jax.Array, axes: tuple[str, ...], plan: dict[tuple[str, ...], int]) -> jax.Array:
    for over, dimension in plan.items():
        x = lax.psum_scatter(x, over, scatter_dimension=dimension, tiled=True)
    rest = tuple(name for name in axes if not any(name in over for over in plan))
    return lax.psum(x, rest) if rest else x


def from_shards(primals: Any, batch: Any, scattered: Any) -> tuple[Any, Any]:
    """The parameters from their shards, pinned to this micro-step, and its batch.

    Without the barrier the compiler gathers once, before the loop.
    """
    primals, batch = lax.optimization_barrier((primals, batch))
    leaves, treedef = jax.tree.flatten(primals)
    for i, plan in enumerate(scattered):
        for over, dimension in plan.items():
            leaves[i] = lax.all_gather(leaves[i], over, axis=dimension, tiled=True)
    return treedef.unflatten(leaves), batch


def largest(x: Any, axis_name: AxisName | None) -> Any:
    return x if axis_name is None else lax.pmax(x, axis_name)


def smallest(x: Any, axis_name: AxisName | None) -> Any:
    return x if axis_name is None else lax.pmin(x, axis_name)


def anywhere(flag: Any, axes: AxisName | None) -> Any:
    """Whether it holds on any replica, agreed by all: 4 bytes."""
    if not axes:
        return flag
    return lax.psum(jnp.asarray(flag).astype(jnp.int32), axes) > 0


def gathered(tree: Any, axis_name: AxisName | None) -> Any:
    """Every replica's rows, one after another, the same on all."""
    if axis_name is None:
        return tree
    return jax.tree.map(
        lambda x: lax.all_gather(x, axis_name, axis=0, tiled=True, to="invarying"), tree
    )


def from_last_replica(x: Any, has_one: Any, axis_name: AxisName | None) -> Any:
    """The value of the last replica that has one; where none has, all hold zeros."""
    if axis_name is None:
        return x
    here = jnp.where(has_one, lax.axis_index(axis_name), -1)
    mine = here == lax.pmax(here, axis_name)
    return lax.psum(jnp.where(mine, x, jnp.zeros_like(x)), axis_name).astype(x.dtype)


def folded_key(key: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """A key of this replica's own."""
    return key if axis_name is None else jax.random.fold_in(key, lax.axis_index(axis_name))


def communicates(gradient: Any, axis_name: AxisName | None, *args: Any) -> bool:
    """Whether a function communicates (synchronised statistics, say), or the compiler may in it.

    A replica may then not leave it out by itself: the others would wait for ever. Collectives along
    other axes are no better: a permutation is one for all devices.
    """
    if axis_name is None and not inside_manual_axes():
        return False
    if axis_name is not None and beside_other_axes(axis_name):
        return True
    return _has_collectives(jax.make_jaxpr(gradient)(*args).jaxpr)


def mixes(gradient: Any, axis_name: AxisName | None, *args: Any) -> bool:
    """Whether what one replica's loss is worth reaches another's gradient inside a function."""
    return axis_name is not None and _has_collectives(jax.make_jaxpr(gradient)(*args).jaxpr)


def beside_other_axes(axis_name: AxisName) -> bool:
    """Whether this mesh has other axes, the compiler's or mapped ones."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = zip(mesh.axis_names, mesh.axis_sizes, strict=True)
    others = [name for name, size in sizes if size > 1 and name not in names(axis_name)]
    return bool(mesh.manual_axes and others)


def beside(axis_name: AxisName | None) -> tuple[str, ...]:
    """The other mapped axes: along them a replica holds shards, and has to agree with itself."""
    if axis_name is None:
        return ()
    mapped = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(name for name in mapped if name not in names(axis_name))


_SILENT = ("axis_index", "pcast", "pvary")


def _has_collectives(jaxpr: Any) -> bool:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in _SILENT:
            for key in ("axes", "axis_name"):
                if any(isinstance(name, str) for name in _flat(eqn.params.get(key, ()))):
                    return True
        if any(map(_has_collectives, jaxprs_in_params(eqn.params))):
            return True
    return False


def _flat(axes: Any) -> list[Any]:
    return list(axes) if isinstance(axes, (tuple, list, frozenset, set)) else [axes]


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


def checked(axis_name: AxisName | None) -> frozenset[str]:
    """Those of the axes along which jax keeps account of what varies (`check_vma=True`)."""
    if axis_name is None:
        return frozenset()
    return varying(lax.axis_index(axis_name))


def own(tree: Any, axis_name: AxisName | None) -> Any:
    """The tree as this replica's own, so that autodiff does not reduce its gradient by itself."""
    axes = checked(axis_name)
    return jax.tree.map(lambda x: as_varying(x, axes), tree) if axes else tree


def by_compiler(f: Any, x: jax.Array, *others: jax.Array, rows: int) -> Any:
    """`f(x, *others)`, whose result has so many rows in place of those of `x`.

    Explicit axes would have to be told how the rows in between are sharded: the compiler decides.
    """
    sharding = jax.typeof(x).sharding
    over = sharding.spec[0] if len(sharding.spec) else None
    if over is None:
        return f(x, *others)
    over = over if isinstance(over, tuple) else (over,)
    kept = over if rows % math.prod(sharding.mesh.shape[name] for name in over) == 0 else None
    out = NamedSharding(sharding.mesh, PartitionSpec(kept, *sharding.spec[1:]))
    return jax.sharding.auto_axes(f, out_sharding=out)(x, *others)


def laid_out(tree: Any, specs: Any) -> Any:
    """A tree with its leaves in shards over automatic axes; else the compiler decides."""
    if specs is None:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(
        [
            lax.with_sharding_constraint(leaf, spec) if any(spec) else leaf
            for leaf, spec in zip(leaves, specs, strict=True)
        ]
    )


def sharded_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """`x` with the sharding of `other`, where shardings are part of the types."""
    wanted = jax.typeof(other).sharding
    if wanted.mesh.empty or jax.typeof(x).sharding == wanted:
        return x
    return jax.sharding.reshard(x, wanted)
