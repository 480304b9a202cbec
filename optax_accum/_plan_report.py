"""What the planning commands show: tables by rich, a picture by matplotlib."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from rich import box
from rich.table import Table

from optax_accum import _units
from optax_accum._memory import Memory
from optax_accum._plan import Plan, Size, remedy_table, table

FAR = 2.5  # budgets: what a picture shows
TICKS = 12


def pairs(rows: Sequence[tuple[str, str]]) -> Table:
    """Names and values."""
    shown = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column()
    for name, value in rows:
        shown.add_row(name, value)
    return shown


def memory_table(found: Memory) -> Table:
    """Each part with what it assumes, and the total."""
    shown = Table("on a device", box=box.SIMPLE, pad_edge=False)
    shown.add_column("bytes", justify="right", no_wrap=True)
    shown.add_column("assumes")
    shown.add_column("source")
    for part in found.parts:
        shown.add_row(part.name, _units.show(part.bytes), part.assumption, part.source)
    shown.add_section()
    shown.add_row("total", _units.show(found.total))
    return shown


def plan_tables(plan: Plan) -> list[Table]:
    """The sizes, and where nothing fits what would help."""
    sizes = _grid(table(plan), (0, 1, 2, 3, 5))
    return [sizes, _grid(remedy_table(plan), (1,))] if plan.remedies else [sizes]


def _grid(rows: list[tuple[str, ...]], right: tuple[int, ...]) -> Table:
    shown = Table(box=box.SIMPLE, pad_edge=False)
    for i, name in enumerate(rows[0]):
        shown.add_column(name, justify="right" if i in right else "left", no_wrap=i in right)
    for row in rows[1:]:
        shown.add_row(*row)
    return shown


def draw(plan: Plan, path: str) -> None:
    """Memory against the micro-batch size, with the budget; sizes far above it are left out."""
    rows = [row for row in plan.sizes if 0 < _needed(row) <= FAR * plan.budget] or plan.sizes[:1]
    seen = [row for row in rows if row.compiled is not None]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*_points(rows), label="predicted", color="#8a93a3", marker=".")
    axes.scatter(*_points(seen), label="compiled", color="#1f5fbf", zorder=3)
    limit = f"budget, {_units.show_budget(plan.budget)}"
    axes.axhline(plan.budget, color="#8c1d40", linestyle="--", label=limit)
    if plan.micro_batch is not None:
        at, text = (
            (plan.micro_batch, plan.verified or 0),
            f"micro-batch {plan.micro_batch}, k {plan.k}",
        )
        axes.annotate(text, at, xytext=(8, -14), textcoords="offset points")
    axes.set_xscale("log", base=2)
    axes.set_xticks(_points(rows)[0][:: -(-len(rows) // TICKS)])
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_major_formatter(lambda size, _: _units.show(size))
    axes.set_ylim(bottom=0)
    axes.margins(x=0.12)
    axes.set(xlabel="micro-batch (examples)", ylabel="memory of a device")
    axes.set_title(f"global batch {plan.global_batch}, compiled for {plan.platform}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=150)


def _needed(row: Size) -> int:
    return row.compiled or row.predicted or 0


def _points(rows: Sequence[Size]) -> tuple[list[int], list[int]]:
    return [row.micro_batch for row in rows], [_needed(row) for row in rows]
