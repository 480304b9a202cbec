"""Groups of devices, as compiled text spells them."""

import math
import re

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_WHOLE_REPLICAS = ("all-gather", "all-reduce", "reduce-scatter")
_AXIS = r"('[^']*'|[^\s\[\]{},:=]+)"


def device_groups(kind: str, attributes: dict[str, str], replicas: int, partitions: int) -> Groups:
    """The groups as positions in the order of devices: replica by replica, each its partitions.

    What the numbers in the text are follows from the attributes beside them (the process groups of
    StableHLO): positions already, replicas, replicas with all their partitions, or partitions.
    """
    if attributes.get("use_global_device_ids") == "true":
        return _spelled(attributes, replicas * partitions)
    of_replicas = "channel_id" not in attributes or kind in _WHOLE_REPLICAS
    members = replicas if of_replicas else partitions
    groups = _spelled(attributes, members)
    if any(member >= members for group in groups for member in group):
        return groups  # an excerpt, which does not say how many there are
    rows = np.arange(replicas * partitions).reshape(replicas, partitions).tolist()
    if not of_replicas:
        return tuple(tuple(row[p] for p in group) for row in rows for group in groups)
    if "channel_id" in attributes:
        return tuple(tuple(p for r in group for p in rows[r]) for group in groups)
    return tuple(tuple(rows[r][p] for r in group) for p in range(partitions) for group in groups)


def _spelled(attributes: dict[str, str], members: int) -> Groups:
    text = attributes.get("replica_groups") or attributes.get("source_target_pairs") or "{}"
    if text == "{}":
        return (tuple(range(members)),)
    if text.startswith("{"):  # {{0,1},{2,3}}
        return tuple(tuple(_integers(group)) for group in re.findall(r"\{([\d, ]*)\}", text[1:-1]))
    if text.startswith("["):  # [2,4]<=[4,2]T(1,0): two groups of four
        sizes, _, order = text.partition("<=")
        rows = _order(order).reshape(_integers(sizes)[0], -1)
        return tuple(tuple(row) for row in rows.tolist())
    if text.startswith("mesh["):  # mesh['data'=4,'model'=2] {'data'}
        return _mesh_groups(text, attributes.get("device_ids", ""))
    raise ValueError(f"replica_groups={text} is spelled in a way not known here; please report it.")


def _mesh_groups(text: str, device_ids: str) -> Groups:
    """Groups along axes of a mesh: devices that agree in all that is left of their coordinates.

    `'data':(2)4` is the factor 4 of an axis, after a factor 2. A mesh whose order is not the
    program's has it before the axes: `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}`.
    """
    order, _, axes = (device_ids or text).rpartition("{")
    sizes = {name: int(size) for name, size in re.findall(_AXIS + r"=(\d+)", text)}
    names, total = list(sizes), math.prod(sizes.values())
    left = np.indices(list(sizes.values())).reshape(len(names), total)
    for name, before, factor in re.findall(_AXIS + r"(?::\((\d+)\)(\d+))?", axes):
        size = int(factor or sizes[name])
        stride = sizes[name] // (int(before or 1) * size)
        coordinate = left[names.index(name)]
        coordinate -= coordinate // stride % size * stride
    devices = _order(order.strip()[1:-1]) if device_ids else np.arange(total)
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, key in zip(devices.tolist(), left.T.tolist(), strict=True):
        groups.setdefault(tuple(key), []).append(device)
    return tuple(tuple(group) for group in groups.values())


def _order(text: str) -> np.ndarray:
    """An order of devices: `[4,2]T(1,0)` is that of a transposed array, `3,0,1,2` is a list."""
    if not text.startswith("["):
        return np.array(_integers(text))
    shape, _, axes = text.partition("T")
    array = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return array.transpose(_integers(axes) or None).ravel()


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
