"""Shared by the benchmarks: interleaved times, ratios of pairs, equality, compiled memory, rows.

All methods of a case run in one process, in turn, so that what disturbs the machine disturbs them
alike; a ratio is the median of the ratios of one round's pairs.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tree = Any
Row = dict[str, Any]
Times = dict[str, list[float]]  # seconds by method, a number a round
Order = Callable[[list[str], int], list[str]]  # (methods, round) -> methods


def as_given(names: list[str], round_: int) -> list[str]:
    """The same order in every round."""
    del round_
    return names


def alternated(names: list[str], round_: int) -> list[str]:
    """Another method first in every round, and every second round backwards."""
    turn = (round_ // 2) % len(names)
    turned = names[turn:] + names[:turn]
    return turned[::-1] if round_ % 2 else turned


def interleaved(
    calls: dict[str, Callable[[], float]],
    rounds: int,
    order: Order = alternated,
    after_round: Callable[[], None] = lambda: None,
) -> Times:
    """What each call returns (its seconds), round by round."""
    times: Times = {name: [] for name in calls}
    for round_ in range(rounds):
        for name in order(list(calls), round_):
            times[name].append(calls[name]())
        after_round()
    return times


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """(the seconds until all results of a call are there, the results)."""
    start = time.perf_counter()
    out = jax.block_until_ready(call())
    return time.perf_counter() - start, out


def quartiles(numbers: Iterable[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile); of one number, that number."""
    numbers = list(numbers)
    if len(numbers) == 1:
        return numbers[0], numbers[0], numbers[0]
    low, median, high = statistics.quantiles(numbers, n=4)
    return low, median, high


def paired_ratios(times: list[float], floor: list[float]) -> list[float]:
    """The ratio of each round."""
    return [one / other for one, other in zip(times, floor, strict=True)]


def better(times: Times, left: str, right: str) -> str:
    """The faster of two methods, by the median of their rounds' ratios."""
    return left if statistics.median(paired_ratios(times[left], times[right])) <= 1 else right


def assert_equal(trees: dict[str, Tree], reference: str, allowed: Iterable[float]) -> None:
    """A method that computes something else has no time; `allowed` differences, one a leaf."""
    allowed = list(allowed)
    for name, tree in trees.items():
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(trees[reference]), strict=True)
        for (leaf, right), bound in zip(pairs, allowed, strict=True):
            off = float(jnp.max(jnp.abs(leaf - right)))
            if not off <= bound:  # a NaN is not
                raise AssertionError(f"{name} differs from the {reference} by {off:g}")


class Memory(NamedTuple):
    """Bytes of a compiled program."""

    total: int  # arguments + outputs - aliased + temporaries
    temporaries: int


def memory(compiled: Any) -> Memory | None:
    """What a compiled program holds; None on a backend that does not say."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    kept = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return Memory(kept + found.temp_size_in_bytes, found.temp_size_in_bytes)


def tree_bytes(tree: Tree) -> int:
    """Bytes of all arrays of a tree: with parameters, P."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def show(rows: list[Row], as_json: bool, line: Callable[[Row], str]) -> None:
    """All rows as JSON; or a line a row, under a heading a case."""
    if as_json:
        json.dump(rows, sys.stdout, indent=1)
        return
    case = None
    for row in rows:
        if row["case"] != case:
            case = row["case"]
            print(case, "on", jax.devices()[0].device_kind)
        print(line(row), flush=True)


def parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Options that all benchmarks share."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{prog}", description=description)
    parser.add_argument("--json", action="store_true")
    return parser


def paired_row(case: str, method: str, times: Times, floor: str, unit: str) -> Row:
    """A method's median and quartiles; its ratio to the floor, of each round's pair."""
    low, median, high = quartiles(times[method])
    ratio_low, ratio, ratio_high = quartiles(paired_ratios(times[method], times[floor]))
    return {
        "case": case,
        "method": method,
        "value": median,
        "spread": [low, high],
        "unit": unit,
        "ratio_to_floor": ratio,
        "ratio_spread": [ratio_low, ratio_high],
        "floor": floor,
        "rounds": len(times[method]),
    }


def memory_in_p(compiled: Any, params: Tree) -> Row:
    """Of a compiled program, in the parameters' bytes; None where the backend does not say."""
    found, size = memory(compiled), tree_bytes(params)
    return {
        "total_in_P": found and found.total / size,
        "temporaries_in_P": found and found.temporaries / size,
    }
