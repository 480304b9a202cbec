"""Can the axes of a mesh share this batch? Checked before anything is mapped over them."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from optax_accum import _fits, _split
from optax_accum._program import Settings


def check_axes(mesh: Any, axes: tuple[str, ...]) -> None:
    missing = [axis for axis in axes if axis not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"batch_axes is {axes!r}, but the mesh has the axes {tuple(mesh.axis_names)}; type "
            "batch_axes= for those over which the batch is sharded."
        )
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    mapped = jax.sharding.get_abstract_mesh().manual_axes
    manual = [axis for axis in axes if kinds[axis] == AxisType.Manual or axis in mapped]
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


def check_examples(
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
    try:
        _split.sizes(
            jax.tree.map(lambda leaf: _share(leaf, axis, replicas), batch),
            settings.k,
            settings.micro_batch_size,
            settings.batch_layout,
            settings.remainder,
        )
    except ValueError as error:
        raise ValueError(
            f"of the batch, each of {replicas} replicas has its share: {error}"
        ) from None


def _share(leaf: Any, axis: int, replicas: int) -> Any:
    """A leaf's shape as one replica has it."""
    shape = list(np.shape(leaf))
    shape[axis : axis + 1] = [size // replicas for size in shape[axis : axis + 1]]
    return jax.ShapeDtypeStruct(tuple(shape), np.float32)
