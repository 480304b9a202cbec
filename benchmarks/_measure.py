"""Shared by the benchmarks: interleaved times, ratios of pairs, equality, compiled memory, rows.

All methods of a case run in one process, in turn, so that what disturbs the machine disturbs them
alike; a ratio is the median of the ratios of one round's pairs. Beside wall time stands the
process's CPU time: less true of waiting, more of a machine that others use.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

Tree = Any
Row = dict[str, Any]


class Sample(NamedTuple):
    """Seconds of one call."""

    wall: float
    cpu: float  # of all threads of the process


Times = dict[str, list[Sample]]  # by method, one a round

FLOOR = "floor"
# With this eps an update is nearly proportional to the gradient: a wrong scale shows.
ADAMW = {"learning_rate": 0.1, "eps": 1.0}


class WrongResult(AssertionError):
    """A method computes something else, and so has no time."""


def alternated(names: list[str], round_: int) -> list[str]:
    """Another method first in every round, and every second round backwards."""
    turn = (round_ // 2) % len(names)
    turned = names[turn:] + names[:turn]
    return turned[::-1] if round_ % 2 else turned


def interleaved(calls: dict[str, Callable[[], Sample]], rounds: int) -> Times:
    """What each call returns, round by round."""
    times: Times = {name: [] for name in calls}
    for round_ in range(rounds):
        for name in alternated(list(calls), round_):
            times[name].append(calls[name]())
    return times


def timed(
    calls: dict[str, Callable[[], Sample]], budget: float, fewest: int = 5, most: int = 200
) -> Times:
    """As many rounds as fit about `budget` seconds, after one that warms up."""
    warm = interleaved(calls, 1)
    rounds = int(budget / sum(times[-1].wall for times in warm.values()))
    return interleaved(calls, min(max(rounds, fewest), most))


def clocked(call: Callable[[], Any]) -> tuple[Sample, Any]:
    """(the seconds until all results of a call are there, the results)."""
    cpu, wall = time.process_time(), time.perf_counter()
    out = jax.block_until_ready(call())
    return Sample(time.perf_counter() - wall, time.process_time() - cpu), out


def quartiles(numbers: Iterable[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile); of one number, that number."""
    numbers = list(numbers)
    if len(numbers) == 1:
        return numbers[0], numbers[0], numbers[0]
    low, median, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return low, median, high


def paired_ratios(times: list[Sample], floor: list[Sample], clock: str = "wall") -> list[float]:
    """The ratio of each round; 0 where a clock was too coarse to tell."""
    pairs = zip(times, floor, strict=True)
    return [getattr(a, clock) / (getattr(b, clock) or float("inf")) for a, b in pairs]


def fastest(times: Times, names: Iterable[str]) -> str:
    """The fastest of some methods, by the median of their rounds' ratios."""
    best, *rest = names
    for name in rest:
        if statistics.median(paired_ratios(times[name], times[best])) < 1:
            best = name
    return best


def check_equal(after: dict[str, Tree], reference: str, start: Tree, relative: float) -> None:
    """Each method's parameters are the reference's, to `relative` of how far they moved.

    And to four ulp of their own size; a loss among them starts from 0.
    """
    right = jax.device_get(after[reference])
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(right)]
    starts = jax.tree.leaves(jax.device_get(start))
    for method, tree in after.items():
        leaves = jax.tree.leaves(jax.device_get(tree))
        for name, leaf, good, old in zip(
            names, leaves, jax.tree.leaves(right), starts, strict=True
        ):
            off = float(np.max(np.abs(leaf - good)))
            allowed = relative * np.max(np.abs(good - old)) + 4 * _ulp(good)
            if not off <= allowed:  # a NaN is not
                raise WrongResult(
                    f"{method} differs from {reference} by {off:g} in {name or 'the result'}, "
                    f"expected at most {allowed:g}; what computes something else is not timed."
                )


def _ulp(x: np.ndarray) -> float:
    return float(np.max(np.abs(x)) * np.finfo(x.dtype).eps)


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


def compiled_to_be_read(lowered: Any) -> Any:
    """A program of which only the structure counts, no time: on CPU its code is not optimised.

    Its operations and buffers are those that it has otherwise.
    """
    quickly = None if on_accelerator() else {"xla_backend_optimization_level": "0"}
    return lowered.compile(compiler_options=quickly)


def tree_bytes(tree: Tree) -> int:
    """Bytes of all arrays of a tree: with parameters, P."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def memory_in_p(compiled: Any, params: Tree) -> Row:
    """Of a compiled program, in the parameters' bytes; None where the backend does not say."""
    found, size = memory(compiled), tree_bytes(params)
    return {
        "total_in_P": found and found.total / size,
        "temporaries_in_P": found and found.temporaries / size,
    }


def row(case: str, method: str, value: float | None, unit: str, ratio: float | None) -> Row:
    """What every row has."""
    return {"case": case, "method": method, "value": value, "unit": unit, "ratio_to_floor": ratio}


def missing_row(case: str, method: str, why: str) -> Row:
    """A peer that the case cannot show, and why."""
    return row(case, method, None, "", None) | {"missing": why}


def paired_row(
    case: str, method: str, times: Times, floor: str, unit: str, clock: str = "wall"
) -> Row:
    """A method's median and quartiles; its ratio to the floor, of each round's pair."""
    low, median, high = quartiles(getattr(sample, clock) for sample in times[method])
    ratios = paired_ratios(times[method], times[floor], clock)
    ratio_low, ratio, ratio_high = quartiles(ratios)
    return row(case, method, median, unit, ratio) | {
        "spread": [low, high],
        "ratio_spread": [ratio_low, ratio_high],
        "cpu_ratio_to_floor": quartiles(paired_ratios(times[method], times[floor], "cpu"))[1],
        "floor": floor,
        "rounds": len(times[method]),
    }


def on_accelerator() -> bool:
    return jax.default_backend() != "cpu"
