"""Pictures of the rows: a file a case, and all in one."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import _measure, _peers, optimizer_bound
from benchmarks._measure import Row

GREY = "#8a93a3"
COLORS = {  # a method has one colour everywhere
    _measure.FLOOR: "#c8ccd4",
    _peers.BIG: "#c8ccd4",
    optimizer_bound.BY_HAND: "#5c6573",
    _peers.SCAN: "#5c6573",
    _peers.MICROBATCH: "#f2a33c",
    _peers.MULTI_STEPS: "#d1495b",
    _peers.APPLY_EVERY: "#8c1d40",
    _peers.TORCH: "#9b5de5",
}
OURS = {
    _peers.APPLY: "#1f5fbf",
    optimizer_bound.IN_ONE_CALL: "#3fa7d6",
    _peers.UPDATE: "#0b3c7d",
    _peers.MICRO_STEP: "#12806a",
    _peers.CARRY: "#3fa7d6",
    _peers.REFS: "#1f5fbf",
}


def color(method: str) -> str:
    found = (COLORS | OURS).get(method.removesuffix(", k calls").removeprefix("FSDP: "))
    return found or ("#1f5fbf" if method.startswith("oa.") else GREY)


def shown(method: str) -> str:
    """A method's name on an axis."""
    return (
        method.removeprefix("oa.").replace("accumulate, update", "update")
        if (method.startswith("oa."))
        else method
    )


def bars(axes: Axes, rows: list[Row], key: str, text: str, longest: float = 1e9) -> None:
    """A bar a method; those past `longest` are cut, their labels are not."""
    names = [shown(row["method"]) for row in rows]
    lengths = [min(row[key], longest) for row in rows]
    drawn = axes.barh(names, lengths, color=[color(row["method"]) for row in rows])
    axes.bar_label(drawn, [text.format(row[key]) for row in rows], padding=3, fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.18)


def first_setting(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["setting"] == rows[0]["setting"]]


def optimizer(axes: Axes, rows: list[Row]) -> None:
    rows = first_setting(rows)
    bars(axes, rows, "ratio_to_floor", "{:.2f}")
    axes.set_xlabel("time of a window, of the floor")
    axes.set_title(f"Optimizer alone: {rows[0]['setting']}", fontsize="medium")


def memory(axes: Axes, rows: list[Row]) -> None:
    rows = first_setting(rows)
    bars(axes, rows, "value", "{:.2f}")
    axes.axvline(4, color="#111111", linewidth=0.8, linestyle=":")
    axes.set_xlabel("compiled memory, in parameters' bytes (4 = the floor)")
    axes.set_title(f"Memory: {rows[0]['setting']}", fontsize="medium")


def transformer(axes: Axes, rows: list[Row]) -> None:
    rows = [row for row in rows if row["k"] == max(one["k"] for one in rows)]
    bars(axes, rows, "ratio_to_floor", "{:.2f}", longest=3)
    first = rows[0]
    axes.set_xlabel("time of an update, of the fastest peer that accumulates")
    batch = f"{first['sequences']} sequences, k={first['k']}"
    model = f"{first['layers']} layers of width {first['width']}"
    axes.set_title(f"Transformer: {model}, {batch}", fontsize="medium")


def collectives(axes: Axes, rows: list[Row]) -> None:
    rows = [row for row in rows if not row["method"].startswith("FSDP")]
    bars(axes, rows, "ratio_to_floor", "{:.2f}")
    axes.set_xlabel("bytes sent in a window, of one reduction")
    axes.set_title(f"Many devices: {rows[0]['devices']}, k={rows[0]['k']}", fontsize="medium")


def compile_(axes: Axes, rows: list[Row]) -> None:
    lines(axes, rows, "k", "value")
    axes.set(xlabel="k", ylabel="CPU s", xscale="log", ylim=(0, None))
    axes.set_title("Compile time", fontsize="medium")


def growth(axes: Axes, rows: list[Row]) -> None:
    rows = [row for row in rows if row["grows"] == "leaves"]
    lines(axes, rows, "leaves", "value")
    axes.set(xlabel="leaves that share the same bytes", ylabel="s a window")
    axes.set(xscale="log", yscale="log")
    axes.set_title("Cost a leaf", fontsize="medium")


def precision(axes: Axes, rows: list[Row]) -> None:
    rows = [row for row in rows if row["drift"]]
    styles = {
        "hand-written sum, bfloat16": (GREY, "-"),
        f"{_peers.MULTI_STEPS}, bfloat16": (COLORS[_peers.MULTI_STEPS], "-"),
        "oa.accumulate, bfloat16": ("#3fa7d6", "-"),
        f"{_peers.MULTI_STEPS}, float32": (COLORS[_peers.MULTI_STEPS], ":"),
        "oa.accumulate, float32": ("#1f5fbf", "-"),
    }
    for method, (tint, style) in styles.items():
        own = [row for row in rows if row["method"] == method]
        ks, errors = [row["k"] for row in own], [row["value"] for row in own]
        axes.plot(ks, errors, color=tint, linestyle=style, marker="o", label=shown(method))
        if method.startswith("oa."):
            axes.plot(
                ks, [row["law"] for row in own], color="#111111", linewidth=0.7, dashes=(2, 2)
            )
    axes.set(xscale="log", yscale="log", xlabel="k (thin: the law)", ylabel="relative error")
    axes.legend(fontsize="small", frameon=False)
    axes.set_title("Precision of a window, gradients with a drift", fontsize="medium")


def lines(axes: Axes, rows: list[Row], x: str, y: str) -> None:
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        points = [row[x] for row in own], [row[y] for row in own]
        axes.plot(*points, marker="o", color=color(method), label=shown(method))
    axes.legend(fontsize="small", frameon=False)


PANELS: dict[str, Callable[[Axes, list[Row]], None]] = {
    "optimizer": optimizer,
    "memory": memory,
    "transformer": transformer,
    "collectives": collectives,
    "compile": compile_,
    "growth": growth,
    "precision": precision,
}
TOGETHER = ("optimizer", "memory", "transformer", "collectives", "growth", "precision")


def write(rows: list[Row], folder: str) -> None:
    """A picture a case, those of `TOGETHER` in one `benchmarks.png`, and the rows themselves."""
    where = pathlib.Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    (where / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        if row["case"] in PANELS and row["value"] is not None:
            by_case.setdefault(row["case"], []).append(row)
    for case in by_case:
        draw({case: by_case[case]}, str(where / f"{case}.png"))
    together = {case: by_case[case] for case in TOGETHER if case in by_case}
    if together:
        draw(together, str(where / "benchmarks.png"))


def draw(by_case: dict[str, list[Row]], path: str) -> None:
    columns = 1 if len(by_case) == 1 else 2
    height = -(-len(by_case) // columns)
    figure = Figure(figsize=(7 * columns, 3.6 * height), layout="constrained")
    axes: Any = figure.subplots(height, columns, squeeze=False).flat
    for panel, (case, rows) in zip(axes, by_case.items(), strict=False):
        PANELS[case](panel, rows)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(axes)[len(by_case) :]:
        panel.set_visible(False)
    figure.savefig(path, dpi=130)
