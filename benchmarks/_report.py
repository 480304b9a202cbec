"""What the benchmarks tell: JSON for scripts, tables for people."""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks._measure import Row

Column = tuple[str, Callable[[Row], str]]


def parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Options that all benchmarks share."""
    formatter = argparse.RawDescriptionHelpFormatter
    name = f"python -m {prog}" if prog == "benchmarks" else f"python -m benchmarks.{prog}"
    parser = argparse.ArgumentParser(name, description=description, formatter_class=formatter)
    parser.add_argument("--json", action="store_true", help="one list of rows, and nothing else")
    return parser


def show(rows: list[Row], as_json: bool) -> None:
    """All rows as one JSON list; or a table for each setting of a case."""
    if as_json:
        json.dump(rows, sys.stdout, indent=1)
        print()
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    measured = [row for row in rows if row["case"] != "peers"]
    for _, group in itertools.groupby(measured, lambda row: (row["case"], row.get("setting"))):
        console.print(table(list(group)))
    for row in rows[len(measured) :]:
        for peer, why in row["missing_peers"].items():
            console.print(f"missing peer: {peer}: {why}")


def table(rows: list[Row]) -> Table:
    """One setting of a case."""
    first = rows[0]
    title = f"{first['case']}: {first.get('setting', '')}"
    if first["case"] != "collectives":
        title += f", on {jax.devices()[0].device_kind}"
    shown = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", min_width=len(title))
    columns = [column for column in COLUMNS if any(column[1](row) for row in rows)]
    for header, _ in columns:
        shown.add_column(header, justify="left" if header == "method" else "right", no_wrap=True)
    for row in rows:
        if row.get("missing"):
            shown.add_row(row["method"], "-", *[""] * (len(columns) - 2), style="dim")
        else:
            shown.add_row(*(text(row) for _, text in columns))
    for row in rows:
        if row.get("missing"):
            shown.caption = f"{shown.caption or ''}{row['method']}: {row['missing']}. "
    return shown


def value(row: Row) -> str:
    number, unit = row["value"], row["unit"]
    if number is None:
        return "-"
    if unit.startswith("s/"):
        return f"{number * 1e3:.1f} ms"
    if unit.startswith("bytes"):
        return f"{number / 1e6:.2f} MB"
    return f"{number:.2e}" if unit == "relative error" else f"{number:.2f} {unit}"


def optional(name: str, text: str) -> Callable[[Row], str]:
    """A field that not every row has."""
    return lambda row: "" if row.get(name) is None else text.format(row[name])


def ratio(row: Row) -> str:
    found = row["ratio_to_floor"]
    if found is None:
        return ""
    low_high = row.get("ratio_spread")
    if not low_high or row["method"] == row["floor"]:
        return f"{found:.3g}"
    return f"{found:.2f} ({low_high[0]:.2f} to {low_high[1]:.2f})"


def moved(kind: str) -> Callable[[Row], str]:
    return lambda row: f"{row['in_P'][kind]:.2f}" if "in_P" in row else ""


COLUMNS: Iterable[Column] = (
    ("method", lambda row: row["method"]),
    ("", value),
    ("of the floor", ratio),
    ("by CPU time", optional("cpu_ratio_to_floor", "{:.2f}")),
    ("of MultiSteps", optional("ratio_to_MultiSteps", "{:.2f}")),
    ("a byte, of 16 leaves", optional("per_byte_of_16", "{:.2f}")),
    ("law", optional("law", "{:.2e}")),
    ("all-reduce P", moved("all-reduce")),
    ("reduce-scatter P", moved("reduce-scatter")),
    ("all-gather P", moved("all-gather")),
    ("in loops P", optional("in_loops_in_P", "{:.2f}")),
    ("total P", optional("total_in_P", "{:.2f}")),
    ("temporaries P", optional("temporaries_in_P", "{:.2f}")),
    ("held P", optional("held_in_P", "{:.2f}")),
    ("model FLOP/s", optional("model_flops_per_s", "{:.2e}")),
)


def peers_row(missing: dict[str, str], versions: dict[str, Any]) -> Row:
    """The last row of a run: which peers were not there, and the versions of those that were."""
    return {
        "case": "peers",
        "method": "missing",
        "value": len(missing),
        "unit": "peers",
        "ratio_to_floor": None,
        "missing_peers": missing,
        "versions": versions,
        "device": jax.devices()[0].device_kind,
    }
