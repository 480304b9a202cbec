"""The space driver in global view: manual over the batch axes of a mesh, one reduction a window."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from optax_accum import _batch_axes, _checks, _fits, _scan
from optax_accum._program import Settings
from optax_accum._scan import Outcome, Stats

GATHERS = ("window", "micro_batch")
_PER_EXAMPLE = ("stack", "concat")


class Across(NamedTuple):
    """Where the replicas are, checked as far as it can be without arguments."""

    mesh: Any  # a Mesh, an AbstractMesh, or True: the arguments'
    batch_axes: tuple[str, ...]
    grad_specs: Any  # a prefix of the tuple of gradients, or None
    gather: str


def across(mesh: Any, batch_axes: str | Sequence[str], grad_specs: Any, gather: str) -> Across:
    axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
    if mesh is not True and not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}, expected a jax.sharding.Mesh, or True for the mesh "
            "of the arguments."
        )
    if not axes or not all(isinstance(axis, str) for axis in axes) or len(set(axes)) < len(axes):
        raise TypeError(
            f"batch_axes is {batch_axes!r}, expected different names of mesh axes; type "
            'batch_axes="data" or batch_axes=("data", "fsdp").'
        )
    _checks.choice("gather", gather, GATHERS)
    if mesh is not True:
        _batch_axes.check_axes(mesh, axes)
    return Across(mesh, axes, grad_specs, gather)


def evaluate(
    settings: Settings, where: Across, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Outcome:
    """The loss of a whole batch that lies over a mesh, and its gradients."""
    mesh = where.mesh if where.mesh is not True else _mesh_of((args, kwargs))
    _batch_axes.check_axes(mesh, where.batch_axes)
    replicas = int(np.prod([mesh.shape[axis] for axis in where.batch_axes]))
    _batch_axes.check_examples(settings, args, replicas, where.batch_axes)
    primals = tuple(args[i] for i in settings.argnums)
    shards = _shards(where, mesh, primals)
    settings = settings._replace(
        axis_name=where.batch_axes,
        scattered=[shard.plan for shard in shards],
        layout=[shard.beside for shard in shards],
        gather=where.gather == "micro_batch",
    )
    args = tuple(_as_arrays(arg) if i in settings.argnums else arg for i, arg in enumerate(args))
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_fits.is_none)
    arrays = [_is_mapped(leaf) for leaf in leaves]
    fixed = [None if is_array else leaf for leaf, is_array in zip(leaves, arrays, strict=True)]
    specs = jax.tree.leaves(_in_specs(settings, where, args, kwargs, shards), is_leaf=_is_spec)

    def local(*arrays_here: Any) -> Outcome:
        here = iter(arrays_here)
        merged = [
            next(here) if is_array else leaf for leaf, is_array in zip(fixed, arrays, strict=True)
        ]
        args, kwargs = treedef.unflatten(merged)
        return _scan.evaluate(settings, args, kwargs)

    chosen = [spec for spec, is_array in zip(specs, arrays, strict=True) if is_array]
    given = [leaf for leaf, is_array in zip(leaves, arrays, strict=True) if is_array]
    grads = jax.tree.unflatten(jax.tree.structure(primals), [shard.spec for shard in shards])
    everywhere: Any = Spec()
    stats = Stats(everywhere, everywhere)
    out = Outcome(everywhere, everywhere, _aux_specs(settings, where), grads, stats)
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(chosen),
        out_specs=out,
        axis_names=set(where.batch_axes),
        check_vma=False,  # or the user's loss would have to say what varies
    )

    def whole(*given: Any) -> Outcome:
        placed = [_placed(x, spec, mesh, where) for x, spec in zip(given, chosen, strict=True)]
        return mapped(*placed)

    if any(map(_checks.is_traced, given)):
        return whole(*given)
    return jax.jit(whole)(*(_moved(x, spec, mesh) for x, spec in zip(given, chosen, strict=True)))


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, Spec)


# The mesh.


def _mesh_of(tree: Any) -> Any:
    """The mesh that the arguments lie on, or the one that is set."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if sharding is None and _checks.is_array(leaf):
            sharding = jax.typeof(leaf).sharding
        mesh = getattr(sharding, "mesh", None)
        if mesh is not None and not mesh.empty:
            return mesh
    if not (mesh := jax.sharding.get_abstract_mesh()).empty:
        return mesh
    raise ValueError(
        "mesh=True found no mesh in the arguments' types, which only explicit axes show inside "
        "jit; type mesh=your_mesh, or call it inside `with jax.set_mesh(your_mesh):`."
    )


# Specs.


class Shard(NamedTuple):
    """How a leaf of the gradients lies on the mesh."""

    plan: dict[tuple[str, ...], int]  # the dimension that is left in shards over these batch axes
    spec: Spec  # the same, of batch axes alone
    beside: Spec  # over automatic axes


def _shards(where: Across, mesh: Any, primals: Any) -> list[Shard]:
    """How each leaf of the gradients is left in shards over the batch axes."""
    paths = jax.tree_util.tree_leaves_with_path(primals)
    if where.grad_specs is None:
        specs = [_spec_of(leaf) for _, leaf in paths]
    else:
        try:
            full = jax.tree.broadcast(where.grad_specs, primals, is_leaf=_is_spec)
        except ValueError as error:
            raise ValueError(
                f"grad_specs is {where.grad_specs!r}, expected a tree prefix of the gradients with "
                "a PartitionSpec for each; type grad_specs=P('data') or a tree of them."
            ) from error
        specs = jax.tree.leaves(full, is_leaf=_is_spec)
    shards = [
        _shard(path, leaf, spec or Spec(), where, mesh)
        for (path, leaf), spec in zip(paths, specs, strict=True)
    ]
    if where.gather == "micro_batch" and not any(shard.plan for shard in shards):
        raise ValueError(
            "gather='micro_batch' was given, but no parameter is in shards over "
            f"{where.batch_axes!r}; type grad_specs=P('data'), or a tree of the parameters' specs."
        )
    return shards


def _spec_of(leaf: Any) -> Spec:
    """What the type of a leaf says, which is nothing on automatic axes."""
    sharding = jax.typeof(leaf).sharding
    return Spec() if sharding is None or sharding.mesh.empty else sharding.spec


def _shard(path: Any, leaf: Any, spec: Spec, where: Across, mesh: Any) -> Shard:
    plan, dims, beside = {}, [], []
    automatic = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto and name not in where.batch_axes
    }
    known = isinstance(spec, Spec) and set(jax.tree.leaves(tuple(spec))) <= {*mesh.axis_names}
    if not known:
        raise ValueError(
            f"grad_specs{_fits.at(path[1:])} is {spec!r}, expected a PartitionSpec of the mesh's "
            f"axes {tuple(mesh.axis_names)}; type PartitionSpec({where.batch_axes[0]!r})."
        )
    for dimension, names in enumerate(spec):
        names = names if isinstance(names, tuple) else () if names is None else (names,)
        over = tuple(name for name in names if name in where.batch_axes)
        dims.append(over or None)
        beside.append(tuple(name for name in names if name in automatic) or None)
        if not over:
            continue
        size = int(np.prod([mesh.shape[name] for name in over]))
        if dimension >= np.ndim(leaf) or np.shape(leaf)[dimension] % size:
            raise ValueError(
                f"grad_specs{_fits.at(path[1:])} is {spec}, but a gradient of shape "
                f"{np.shape(leaf)} does not split into {size} along axis {dimension}; shard "
                "another axis, or type PartitionSpec() for this leaf."
            )
        plan[over] = dimension
    return Shard(plan, Spec(*dims), Spec(*beside))


def _in_specs(
    settings: Settings,
    where: Across,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shards: list[Shard],
) -> Any:
    """A spec for every leaf of the arguments."""
    axes = where.batch_axes
    cut = Spec(None, axes) if settings.batch_layout == "stacked" else Spec(axes)

    def everywhere(tree: Any, spec: Spec) -> Any:
        return jax.tree.map(lambda _: spec, tree, is_leaf=_fits.is_none)

    specs = [everywhere(arg, Spec()) for arg in args]
    for i in settings.batch_argnums:
        specs[i] = everywhere(args[i], cut)
    if where.gather == "micro_batch":
        left = iter(shards)
        for i in settings.argnums:
            specs[i] = jax.tree.map(
                lambda leaf: None if leaf is None else next(left).spec,
                args[i],
                is_leaf=_fits.is_none,
            )
    return tuple(specs), everywhere(kwargs, Spec())


def _aux_specs(settings: Settings, where: Across) -> Any:
    def spec(reducer: str) -> Spec:
        return Spec(where.batch_axes) if reducer in _PER_EXAMPLE else Spec()

    return jax.tree.map(spec, settings.aux) if settings.aux is not None else Spec()


# The arguments.


def _is_mapped(leaf: Any) -> bool:
    """Whether a leaf goes through the mapping; Python's numbers stay what they are, for `if`."""
    if isinstance(leaf, (bool, int, float, complex)):
        return False
    return _checks.is_array(leaf) or _checks.is_key(leaf)


def _as_arrays(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.numpy.asarray(x) if _checks.is_array(x) else x, tree)


def _placed(x: jax.Array, spec: Spec, mesh: Any, where: Across) -> jax.Array:
    """An argument as the mapped function takes it, where shardings are part of the types."""
    if AxisType.Explicit not in mesh.axis_types:
        if any(_spec_of(x)):
            raise ValueError(
                f"an argument is {jax.typeof(x)}, on a mesh of explicit axes, and mesh= has "
                "automatic ones; type mesh=True, or mesh= the one that it lies on."
            )
        return x
    if not jax.numpy.ndim(x):
        return x
    current = list(_spec_of(x)) + [None] * (jax.numpy.ndim(x) - len(_spec_of(x)))
    wanted = list(spec) + [None] * (jax.numpy.ndim(x) - len(spec))
    dims = []
    for now, manual in zip(current, wanted, strict=True):
        now = now if isinstance(now, tuple) else () if now is None else (now,)
        tensor = tuple(name for name in now if name not in where.batch_axes)
        manual = manual if isinstance(manual, tuple) else () if manual is None else (manual,)
        dims.append((*manual, *tensor) or None)
    return jax.sharding.reshard(x, NamedSharding(mesh, Spec(*dims)))


def _moved(x: Any, spec: Spec, mesh: Any) -> Any:
    """An array from elsewhere, brought to the mesh's devices."""
    if isinstance(mesh, AbstractMesh):
        return x
    there = getattr(x, "sharding", None)
    if getattr(there, "device_set", None) == set(mesh.devices.flat):
        of_types = getattr(getattr(there, "mesh", mesh), "axis_types", ())
        if of_types == mesh.axis_types or AxisType.Explicit not in (*of_types, *mesh.axis_types):
            return x
    if _checks.is_key(x):  # jax puts numbers on the devices of other processes, but no keys
        numbers = jax.device_put(jax.random.key_data(x), NamedSharding(mesh, spec))
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
    return jax.device_put(x, NamedSharding(mesh, spec))


def axis_sizes(options: dict[str, Any], tree: Any) -> list[tuple[str, int]]:
    """The axes that `value_and_grad(mesh=..., batch_axes=...)` maps, and their sizes."""
    if not (mesh := options.get("mesh")):
        return []
    mesh = _mesh_of(tree) if mesh is True else mesh
    axes = options.get("batch_axes", "data")
    return [(axis, mesh.shape[axis]) for axis in ([axes] if isinstance(axes, str) else axes)]
