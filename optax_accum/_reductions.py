"""The reductions of a compiled program, held against a gradient."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum import _checks
from optax_accum._device_groups import Groups
from optax_accum._hlo import Operation, Part

_REDUCTIONS = ("all-reduce", "reduce-scatter")

# What a collective counts as, in the table of a failure.
_GRADIENT = "gradient"
_IN_LOOP = "REDUCED IN A LOOP"
_SOME = "over some of the batch's devices"
_EXEMPT = "exempt"
_SCALAR = "scalar"
_OTHER = "over other devices"
_MOVES = "no reduction"

_ONCE = (
    "type value_and_grad(..., mesh=mesh), or axis_name= of value_and_grad or accumulate inside "
    "shard_map; in a loop of your own sum on each device and psum once after it, with "
    'check_vma=True from jax.lax.pcast(params, axis, to="varying")'
)


class Collective(NamedTuple):
    """One collective operation of a compiled program, as one device takes part in it.

    Attributes:
      kind: `"all-reduce"`, `"reduce-scatter"`, `"all-gather"`, `"all-to-all"`,
        `"ragged-all-to-all"`, `"collective-permute"` or `"collective-broadcast"`. The two halves of
        an asynchronous pair are one collective.
      bytes: what one run of it handles on a device: its whole operands, so for a reduction the size
        of the unreduced value; for an all-gather the size of the gathered result. Several arrays in
        one operation are summed.
      groups: the devices that communicate with each other, as positions in the program's order
        of devices (that of `mesh.devices.flat`); for a collective-permute its (source, target)
        pairs.
      in_loop: whether a loop runs it.
      in_conditional: whether it stands in a branch, so that it may not run.
      runs: how often the loops around it run it in one call of the program, as if every branch were
        taken; None where a trip count is unknown.
    """

    kind: str
    bytes: int
    groups: tuple[tuple[int, ...], ...]
    in_loop: bool
    in_conditional: bool
    runs: int | None


class Size(NamedTuple):
    """Real numbers, which a promotion leaves as many, and bytes."""

    numbers: int
    bytes: int


class Row(NamedTuple):
    """A collective, judged."""

    collective: Collective
    branches: tuple[tuple[str, int], ...]
    verdict: str
    counted: Size
    exempt: Size  # what may be of the gradient all the same, having the size of a leaf


def public(operation: Operation) -> Collective:
    return Collective(
        operation.kind,
        sum(part.bytes for part in operation.parts),
        operation.groups,
        operation.in_loop,
        bool(operation.branches),
        operation.runs,
    )


def judged(
    operation: Operation,
    groups: list[list[int]],
    declared: Callable[[Collective, Part], bool],
) -> Row:
    """What a collective counts as for the groups of the batch and the user's exemptions."""
    collective = public(operation)
    large = [part for part in operation.parts if part.elements > 1]
    exempt = [part for part in large if declared(collective, part)]
    kept = [part for part in large if part not in exempt]
    whole, crossing = _meets(operation.groups, groups)
    verdicts = [  # the first that holds
        (_MOVES, operation.kind not in _REDUCTIONS),
        (_OTHER, not crossing),
        (_SCALAR, not large),
        (_EXEMPT, not kept),
        (_IN_LOOP, operation.in_loop),
        (_SOME, not whole),
        (_GRADIENT, True),
    ]
    verdict = next(verdict for verdict, holds in verdicts if holds)
    once = whole and not operation.in_loop and verdict in (_EXEMPT, _GRADIENT)
    return Row(collective, operation.branches, verdict, _size(kept), _size(exempt if once else []))


def _meets(groups: Groups, batch: list[list[int]]) -> tuple[bool, bool]:
    """Whether all devices of each batch meet in a group, and whether any two of them do."""
    group_of = {device: index for index, group in enumerate(groups) for device in group}
    met = [[group_of.get(device, -1 - device) for device in each] for each in batch]
    return all(len(set(m)) == 1 for m in met), any(len(set(m)) < len(m) for m in met)


def _size(parts: Iterable[Part]) -> Size:
    return _sum(Size(part.numbers, part.bytes) for part in parts)


def batch_groups(mesh: Any, axes: tuple[str, ...], devices: int) -> list[list[int]]:
    """The devices that share a batch, as positions in the program's order."""
    sizes = {"data": devices} if mesh is None else dict(mesh.shape)
    axes = ("data",) if mesh is None else axes
    if missing := [axis for axis in axes if axis not in sizes]:
        raise ValueError(f"batch_axes has {missing[0]!r}, the mesh has the axes {list(sizes)}.")
    if math.prod(sizes.values()) != devices:
        raise ValueError(
            f"the program runs on {devices} devices, the mesh has {math.prod(sizes.values())}; "
            "pass the mesh that it was compiled for."
        )
    positions = np.arange(devices).reshape(list(sizes.values()))
    last = [list(sizes).index(axis) for axis in axes]
    rest = [index for index in range(len(sizes)) if index not in last]
    together = math.prod(sizes[axis] for axis in axes)
    if together == 1:
        raise ValueError(
            "one device holds the whole batch, so nothing is reduced and nothing can be checked; "
            'type jax.config.update("jax_num_cpu_devices", 8) before the first array is made.'
        )
    return positions.transpose(rest + last).reshape(-1, together).tolist()


def gradient_size(grads: Any, batch_axes: tuple[str, ...] | None) -> Size:
    """Real numbers and bytes of a gradient on one device, before it is reduced; no scalars."""
    leaves = [leaf for leaf in jax.tree.leaves(grads) if _checks.is_array(leaf)]
    sizes = [(_elements(leaf, batch_axes), np.dtype(jnp.result_type(leaf))) for leaf in leaves]
    large = [(elements, dtype) for elements, dtype in sizes if elements > 1]
    if not large:
        raise ValueError("grads has no leaf larger than a scalar, so nothing can be checked.")
    return _sum(Size(n * (1 + (dtype.kind == "c")), n * dtype.itemsize) for n, dtype in large)


def _elements(leaf: Any, batch_axes: tuple[str, ...] | None) -> int:
    """Elements of a leaf's shard along all axes but those of the batch (None: any axis is one)."""
    shape, sharding = list(jnp.shape(leaf)), getattr(leaf, "sharding", None)
    if batch_axes is None or not isinstance(sharding, jax.sharding.NamedSharding):
        return math.prod(shape)
    for index, entry in enumerate(sharding.spec):
        names = entry if isinstance(entry, tuple) else (entry,)
        split = [
            sharding.mesh.shape[n] for n in names if isinstance(n, str) and n not in batch_axes
        ]
        shape[index] = -(-shape[index] // math.prod(split))
    return math.prod(shape)


def fault(rows: list[Row], expected: Size) -> str | None:
    """What is wrong, why probably, and what to type; None where the gradient is reduced once."""
    outside = [row for row in rows if row.verdict in (_EXEMPT, _GRADIENT)]
    least = _total([(row.branches, row.counted) for row in outside])
    most = _total([(row.branches, _sum([row.counted, row.exempt])) for row in outside])
    if looped := [row for row in rows if row.verdict == _IN_LOOP]:
        once = least.numbers <= expected.numbers <= most.numbers
        return _besides(looped, expected) if once else _in_loop(looped, least, expected)
    if least.numbers > expected.numbers:
        return _message(least, expected, *_too_much(least.numbers / expected.numbers))
    if most.numbers < expected.numbers:
        return _message(most, expected, *_too_little(most.numbers / expected.numbers))
    if most.bytes < expected.bytes:
        cause = "it is cast before the reduction, which loses digits of the sum"
        remedy = "cast after it; if it is meant, give the leaves of grads that dtype"
        return _message(most, expected, "in a narrower dtype than its own", cause, remedy)
    return None


def _sum(sizes: Iterable[Size]) -> Size:
    return Size(*map(sum, zip(Size(0, 0), *sizes, strict=True)))


def _total(sizes: list[tuple[tuple[tuple[str, int], ...], Size]]) -> Size:
    """The sum outside of conditionals and, of each conditional, in the branch that has most."""
    conditionals: dict[str, dict[int, list[Any]]] = {}
    for path, size in sizes:
        if path:
            (conditional, branch), *inside = path
            branches = conditionals.setdefault(conditional, {})
            branches.setdefault(branch, []).append((inside, size))
    most = [max(map(_total, branches.values())) for branches in conditionals.values()]
    return _sum([*most, *(size for path, size in sizes if not path)])


def _message(found: Size | str, expected: Size, how: str, cause: str, remedy: str) -> str:
    found = found if isinstance(found, str) else f"{found.bytes:,} bytes"
    return (
        f"the gradient is reduced {how}: {found} over the batch axes, expected "
        f"{expected.bytes:,} bytes.\nLikely cause: {cause}.\nRemedy: {remedy}."
    )


def _listed(rows: list[Row]) -> str:
    runs = [row.collective.runs for row in rows]
    times = ["an unknown number of" if each is None else str(each) for each in runs]
    sizes = [f"{row.counted.bytes:,} bytes" for row in rows]
    return " and ".join(f"{size} {n} times" for size, n in zip(sizes, times, strict=True))


def _besides(rows: list[Row], expected: Size) -> str:
    how, cause = "once, but more inside a loop", "statistics or metrics of each micro-batch"
    sizes = tuple(sorted({row.collective.bytes for row in rows}))
    remedy = (
        f"declare what is meant to be reduced there, exempt={sizes}, or reduce it after the loop"
    )
    return _message(_listed(rows), expected, how, cause, remedy)


def _in_loop(rows: list[Row], outside: Size, expected: Size) -> str:
    cause = "each micro-batch is reduced on its own, as plain jit does with a sharded batch"
    numbers = [row.counted.numbers * (row.collective.runs or 0) for row in rows]
    if sum(numbers) + outside.numbers == expected.numbers:
        cause = "a loop over the layers of the model, since in all it is the gradient once"
    return _message(_listed(rows), expected, "inside a loop", cause, _ONCE)


def _too_much(ratio: float) -> tuple[str, str, str]:
    how = f"{ratio:.4g} times"
    if ratio.is_integer():
        cause = "a loop was unrolled, and the compiler merged its reductions into one operation"
        return how, cause, _ONCE
    cause = "something besides the gradient is reduced, or leaves are missing in grads"
    return how, cause, "declare the bytes of what else is reduced, exempt=(64, 128)"


def _too_little(ratio: float) -> tuple[str, str, str]:
    causes = {
        True: "the batch is not sharded over the batch axes, or each device keeps its own sums",
        False: "some leaves have a constant gradient, or are sharded over other axes",
    }
    remedy = (
        "pass the mesh and the batch_axes that the batch is sharded over, give sharded leaves of "
        "grads their NamedSharding, and leave out what is not trained"
    )
    return f"{ratio:.4g} times", causes[ratio == 0], remedy


def table(rows: list[Row]) -> str:
    """The collectives, a line each."""
    if not rows:
        return "The program has no collectives."
    head = ("kind", "bytes", "runs", "in loop", "in branch", "counts as", "groups")
    lines = [head, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [map(str.ljust, line, widths) for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _cells(row: Row) -> tuple[str, ...]:
    kind, size, groups, in_loop, in_conditional, runs = row.collective
    flags = ("yes" if flag else "" for flag in (in_loop, in_conditional))
    listed = ",".join(f"{{{','.join(map(str, group))}}}" for group in groups)
    shown = listed if len(listed) <= 60 else f"{listed[:57]}..."
    return kind, f"{size:,}", "?" if runs is None else str(runs), *flags, row.verdict, shown
