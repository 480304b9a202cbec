"""A plan: the micro-batch that fits, what the other sizes need, and how it is shown."""

from typing import NamedTuple

from optax_accum import _units
from optax_accum._remedies import Remedy

SHOWN = 12  # sizes of a printed table


class Size(NamedTuple):
    """One micro-batch size that keeps the global batch."""

    micro_batch: int
    k: int
    predicted: int | None  # bytes on a device; of compiled sizes only the recommended one has it
    compiled: int | None  # bytes on a device, by the compiler; None where it was not asked
    fits: bool | None  # None where nothing is known of it
    seconds: float | None = None  # for an example, where it was timed


class Plan(NamedTuple):
    """What :func:`fit` found; printed, it is a table."""

    micro_batch: int | None  # recommended; None where nothing fits
    k: int | None
    global_batch: int
    replicas: int
    largest: int | None  # the largest size that was verified by compilation
    predicted: int | None  # bytes on a device of the recommended size, before it was compiled
    verified: int | None  # bytes on a device of the recommended size, as compiled
    budget: int
    sizes: tuple[Size, ...]
    compilations: int
    calls: int | None  # of the update in a window: k, or 1 where one call takes a global batch
    platform: str  # that it was compiled for
    remedies: tuple[Remedy, ...]  # where nothing fits
    notes: tuple[str, ...] = ()  # what may be amiss with the update or its shapes

    def __str__(self) -> str:
        lines = [*summary(self), "", _units.columns(table(self), right=(0, 1, 2, 3))]
        if self.remedies:
            lines += ["", _units.columns(remedy_table(self), right=(1,))]
        return "\n".join(lines)


def summary(plan: Plan) -> list[str]:
    """What was found, and for which platform."""
    cut = f"k {plan.k} x {plan.replicas} replica{'s' * (plan.replicas != 1)}"
    limit = _units.show_budget(plan.budget)
    if plan.micro_batch is None:
        first = f"nothing fits {limit}: the smallest micro-batch needs {_smallest(plan)} a device"
    else:
        verified = _units.show(plan.verified or 0)
        first = f"micro-batch {plan.micro_batch} x {cut} = global batch {plan.global_batch}: "
        first += f"{verified} a device{_expected(plan)}, within {limit}"
    times = f"{plan.compilations} time{'s' * (plan.compilations != 1)}"
    lines = [first, f"compiled {times}, for {plan.platform}{_caution(plan)}"]
    if plan.micro_batch is not None and plan.micro_batch != plan.largest:
        lines.append(f"the fastest for an example; the largest that fits is {plan.largest}")
    if any(row.fits is None for row in plan.sizes):
        lines.append("?: not tried; type --compilations 5, or compilations=5")
    return [*lines, *plan.notes]


def table(plan: Plan) -> list[tuple[str, ...]]:
    """Sizes, what they need and whether they fit; a long list is thinned out."""
    timed = any(row.seconds is not None for row in plan.sizes)
    header = ("micro-batch", "k", "predicted", "compiled", "fits")
    body = [
        (
            str(row.micro_batch),
            str(row.k),
            "-" if row.predicted is None else _units.show(row.predicted),
            "-" if row.compiled is None else _units.show(row.compiled),
            "?" if row.fits is None else _verdict(row.fits),
            *([_speed(row)] if timed else []),
        )
        for row in shown(plan)
    ]
    return [(*header, *(["examples/s"] if timed else [])), *body]


def shown(plan: Plan) -> list[Size]:
    """The sizes compiled, those around the one recommended, and some of the others."""
    rows = plan.sizes
    at = next((i for i, row in enumerate(rows) if row.micro_batch == plan.micro_batch), 0)
    stride = -(-len(rows) // SHOWN)
    return [
        row
        for i, row in enumerate(rows)
        if row.compiled is not None or abs(i - at) <= 1 or i % stride == 0
    ]


def remedy_table(plan: Plan) -> list[tuple[str, ...]]:
    """What would help, what would then be needed, and whether that is enough."""
    header = ("what would help", "then needs", "fits", "how")
    rows = [(r.what, _units.show(r.total), _verdict(r.fits), r.how) for r in plan.remedies]
    return [header, *rows]


def _verdict(fits: bool) -> str:
    return "yes" if fits else "no"


def _smallest(plan: Plan) -> str:
    needed = plan.sizes[0].compiled
    return "more than the compiler allows" if needed is None else _units.show(needed)


def _expected(plan: Plan) -> str:
    return "" if plan.predicted is None else f" ({_units.show(plan.predicted)} predicted)"


def _caution(plan: Plan) -> str:
    return "; a CPU figure is not a GPU plan" if plan.platform.startswith("cpu") else ""


def _speed(row: Size) -> str:
    return "-" if not row.seconds else f"{1 / row.seconds:.0f}"
