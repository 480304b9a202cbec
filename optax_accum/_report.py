"""What the demo shows of its runs: a table, and a picture."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

# Of each update, of each run: loss, seconds, calls of inner, largest difference of parameters.
History = list[list[tuple[float, float, int, float]]]


class Result(NamedTuple):
    """What one run comes to: a row of the table, an object of the JSON. Bytes may be unknown."""

    name: str
    loss: float  # at the end
    max_loss_difference: float  # from the big batch's, over all updates; the next one likewise
    max_param_difference: float
    argument_bytes: int | None  # of a compiled call, as the other bytes
    temp_bytes: int | None
    total_bytes: int | None
    time_ratio: float  # median time of an update, relative to the big batch's
    inner_calls: int
    first_loss: float


def megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.{1 if size < 1e8 else 0}f}"


CAPTION = (
    "Δ: largest difference from the big batch at any update. MB: 10⁶ bytes, as compiled for one "
    "call, which is an update of the big batches and value_and_grad, a micro-step of the others; "
    "total = arguments + outputs - aliased + temporaries. Time: median of an update, relative to "
    "the big batch. Inner calls: how often AdamW ran. A character-level transformer on Python's "
    "documentation, 1 to 64 counted tokens a sequence; eps=1e-3 keeps AdamW from magnifying "
    "rounding, whose size 'big batch shuffled' shows."
)
COLUMNS: tuple[tuple[str, Callable[[Any], str]], ...] = (  # of a Result's first fields
    ("run", str),
    ("loss\nat end", "{:.4f}".format),
    ("Δ loss", "{:.1e}".format),
    ("Δ para-\nmeters", "{:.1e}".format),
    ("args\nMB", megabytes),
    ("temps\nMB", megabytes),
    ("total\nMB", megabytes),
    ("time\nratio", "{:.2f}".format),
    ("inner\ncalls", str),
)


def table(results: list[Result], title: str) -> Table:
    shown = Table(
        title=title, caption=CAPTION, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False
    )
    for header, _ in COLUMNS:
        shown.add_column(header, justify="left" if header == "run" else "right", no_wrap=True)
    for row in results:
        shown.add_row(*(text(field) for field, (_, text) in zip(row, COLUMNS, strict=False)))
    return shown


# From wide to narrow and bottom to top, so that curves which coincide can all be seen.
LINES: tuple[dict[str, Any], ...] = (
    {"color": "#c8ccd4", "linewidth": 8, "zorder": 1},
    {"color": "#1f5fbf", "linewidth": 2, "zorder": 4},
    {"color": "#3fd08c", "linewidth": 2, "zorder": 5, "linestyle": (0, (3, 3))},
    {"color": "#f2a33c", "linewidth": 5, "zorder": 2},
    {"color": "#8c1d40", "linewidth": 4, "zorder": 3, "linestyle": (0, (1.5, 1.5))},
    {"color": "#111111", "linewidth": 1.5, "zorder": 6, "linestyle": (0, (1, 3))},
)


def draw(results: list[Result], history: History, title: str, path: str) -> None:
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    draw_losses(left, [row.name for row in results], np.array(history)[:, :, 0].T)
    figure.legend(loc="outside lower center", ncols=len(results), frameon=False, handlelength=3)
    draw_memory(right, [row for row in results if row.total_bytes is not None])
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def draw_losses(axes: Axes, names: list[str], losses: np.ndarray) -> None:
    updates = np.arange(1, losses.shape[1] + 1)
    inset = axes.inset_axes((0.4, 0.45, 0.6, 0.45))
    for name, own, style in zip(names, losses, LINES, strict=True):
        axes.plot(updates, own, label=name, marker="o", markersize=2, **style)
        inset.plot(updates, abs(own - losses[0]), marker="o", markersize=2, **style)
    axes.set(xlabel="update", ylabel="loss (nats per counted token)")
    inset.set_yscale("symlog", linthresh=1e-7)
    inset.set_ylim(bottom=0)
    inset.set_title("distance from the big batch (nats), by update", fontsize="medium")
    inset.annotate("rounding", (0.98, 0.36), xycoords="axes fraction", ha="right", color="#555555")


def draw_memory(axes: Axes, rows: list[Result]) -> None:
    if not rows:
        axes.set(xticks=[], yticks=[], xlabel="this backend tells nothing of its memory")
        return
    names = [row.name for row in rows]
    totals = np.array([row.total_bytes for row in rows]) / 1e6
    temporaries = np.array([row.temp_bytes for row in rows]) / 1e6
    rest = totals - temporaries
    axes.barh(names, rest, color="#8a93a3", label="weights, optimizer, window, batch")
    bars = axes.barh(names, temporaries, left=rest, color="#1f5fbf", label="temporaries")
    axes.bar_label(bars, [f"{total:.1f} MB" for total in totals], padding=4)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=2, frameon=False)
    axes.set_xlabel("memory of one call, as compiled (MB, 10⁶ bytes)")
    axes.margins(x=0.2)
    axes.invert_yaxis()
