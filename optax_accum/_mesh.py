"""The space driver in global view: manual over the batch axes of a mesh, one reduction a window."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from optax_accum import _checks, _fits, _scan
from optax_accum._program import Settings
from optax_accum._scan import Outcome, Stats

GATHERS = ("window", "micro_batch")
_PER_EXAMPLE = ("stack", "concat")


class Across(NamedTuple):
    """Where the replicas are, checked as far as it can be without arguments."""

    mesh: Any  # a Mesh, an AbstractMesh, or True: the arguments'
    batch_axes: tuple[str, ...]
    grad_specs: Any
    gather: str


def across(mesh: Any, batch_axes: str | Sequence[str], grad_specs: Any, gather: str) -> Across:
    axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
    if mesh is not True and not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}, expected a jax.sharding.Mesh, or True for the mesh "
            "of the arguments."
        )
    if not axes or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(f"batch_axes is {batch_axes!r}, expected names of mesh axes.")
    _checks.choice("gather", gather, GATHERS)
    if mesh is not True:
        _check_axes(mesh, axes)
    return Across(mesh, axes, grad_specs, gather)


def evaluate(
    settings: Settings, where: Across, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Outcome:
    """The loss of a whole batch that lies over a mesh, and its gradients."""
    mesh = where.mesh if where.mesh is not True else _mesh_of((args, kwargs))
    _check_axes(mesh, where.batch_axes)
    replicas = int(np.prod([mesh.shape[axis] for axis in where.batch_axes]))
    _check_examples(settings, args, replicas, where.batch_axes)
    primals = tuple(args[i] for i in settings.argnums)
    shards = _shards(where, mesh, primals)
    settings = settings._replace(
        axis_name=where.batch_axes,
        scattered=[plan for plan, _ in shards],
        gather=where.gather == "micro_batch",
    )
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_fits.is_none)
    arrays = [_checks.is_array(leaf) or _checks.is_key(leaf) for leaf in leaves]
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
    grads = jax.tree.unflatten(jax.tree.structure(primals), [spec for _, spec in shards])
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


def _check_axes(mesh: Any, axes: tuple[str, ...]) -> None:
    missing = [axis for axis in axes if axis not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"batch_axes is {axes!r}, but the mesh has the axes {tuple(mesh.axis_names)}; type "
            "batch_axes= for those over which the batch is sharded."
        )
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = [axis for axis in axes if kinds[axis] == AxisType.Manual]
    if manual:
        raise ValueError(
            f"the mesh axes {manual} are mapped already, this being inside a shard_map; type "
            "axis_name= instead of mesh=."
        )
    tensor = [
        axis
        for axis, kind in kinds.items()
        if axis not in axes and kind == AxisType.Explicit and mesh.shape[axis] > 1
    ]
    mixed = any(kinds[axis] != AxisType.Explicit for axis in axes)
    if tensor and (mixed or jax.__version_info__ < (0, 12)):
        why = (
            "beside automatic batch axes their gradients would be replicated"
            if mixed
            else f"jax {jax.__version__} gathers them around every micro-step"
        )
        raise ValueError(
            f"the mesh axes {tensor} are explicit and no batch axes, and {why}; make them "
            "automatic: jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))."
        )


def _check_examples(
    settings: Settings, args: tuple[Any, ...], replicas: int, axes: tuple[str, ...]
) -> None:
    axis = 1 if settings.batch_layout == "stacked" else 0
    batch = tuple(args[i] for i in settings.batch_argnums)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        shape = np.shape(leaf)
        if len(shape) > axis and shape[axis] % replicas:
            what = "micro-batches" if axis else "a batch"
            raise ValueError(
                f"{what} of {shape[axis]} (the batch{_fits.at(path)}) cannot be shared by "
                f"{replicas} replicas over {axes!r}; use a multiple of {replicas}"
                + (f", {replicas} x k for k micro-batches." if not axis else ".")
            )


# Specs.


def _shards(where: Across, mesh: Any, primals: Any) -> list[tuple[dict[Any, int], Spec]]:
    """How each leaf of the gradients is left in shards over the batch axes."""
    paths = jax.tree_util.tree_leaves_with_path(primals)
    if where.grad_specs is None:
        specs = [_spec_of(leaf) for _, leaf in paths]
    else:
        given = where.grad_specs if len(primals) > 1 else (where.grad_specs,)
        try:
            full = jax.tree.broadcast(given, primals, is_leaf=_is_spec)
        except ValueError as error:
            raise ValueError(
                f"grad_specs is {where.grad_specs!r}, expected a tree prefix of the gradients with "
                "a PartitionSpec for each; type grad_specs=P('data') or a tree of them."
            ) from error
        specs = jax.tree.leaves(full, is_leaf=_is_spec)
    return [
        _shard(path, leaf, spec or Spec(), where, mesh)
        for (path, leaf), spec in zip(paths, specs, strict=True)
    ]


def _spec_of(leaf: Any) -> Spec:
    """What the type of a leaf says, which is nothing on automatic axes."""
    sharding = jax.typeof(leaf).sharding
    return Spec() if sharding is None or sharding.mesh.empty else sharding.spec


def _shard(
    path: Any, leaf: Any, spec: Spec, where: Across, mesh: Any
) -> tuple[dict[Any, int], Spec]:
    plan, dims = {}, []
    for dimension, names in enumerate(spec):
        names = names if isinstance(names, tuple) else () if names is None else (names,)
        over = tuple(name for name in names if name in where.batch_axes)
        dims.append(over or None)
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
    return plan, Spec(*dims)


def _in_specs(
    settings: Settings,
    where: Across,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shards: list[tuple[dict[Any, int], Spec]],
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
                lambda leaf: None if leaf is None else next(left)[1], args[i], is_leaf=_fits.is_none
            )
    return tuple(specs), everywhere(kwargs, Spec())


def _aux_specs(settings: Settings, where: Across) -> Any:
    def spec(reducer: str) -> Spec:
        return Spec(where.batch_axes) if reducer in _PER_EXAMPLE else Spec()

    return jax.tree.map(spec, settings.aux) if settings.aux is not None else Spec()


# The arguments.


def _placed(x: jax.Array, spec: Spec, mesh: Any, where: Across) -> jax.Array:
    """An argument as the mapped function takes it, where shardings are part of the types."""
    if AxisType.Explicit not in mesh.axis_types or not jax.numpy.ndim(x):
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
    devices = getattr(getattr(x, "sharding", None), "device_set", None)
    if devices == set(mesh.devices.flat):
        return x
    return jax.device_put(x, NamedSharding(mesh, spec))
