"""Compile time over k: tracing and lowering, then compiling, nothing cached.

In CPU seconds of the process, which other work on the machine disturbs less than wall time. The
floor is the hand-written scan. Each compiled program is run once and compared before its time is
told.
"""

import functools
import gc
from typing import Any

import jax

from benchmarks import _measure, _peers, transformer

CASE = "compile"
SIZES = {
    "tiny": [transformer.Size(transformer.model(1, 8, 4), 4, (2,), 0.0)],
    "quick": [transformer.Size(transformer.model(2, 32, 8), 64, (2, 64), 0.0)],
    "full": [transformer.Size(transformer.model(2, 128, 32), 64, (1, 2, 8, 64), 0.0)],
}
REPEATS = {"tiny": 1, "quick": 1, "full": 5}
# Those whose program holds k micro-steps; that of a single one knows no k.
METHODS = (_peers.SCAN, _peers.MICROBATCH, _peers.CARRY, _peers.REFS)


def measure(case: transformer.Case, repeats: int) -> list[_measure.Row]:
    """A row a method: CPU seconds of `lower` and `compile`, jax's caches cleared before each."""
    programs: dict[str, Any] = {}
    lowering: _measure.Times = {}
    methods = {name: case.methods()[name] for name in METHODS}

    def call(name: str) -> _measure.Sample:
        programs.pop(name, None)
        jax.clear_caches()
        gc.collect()
        lower = lambda: _peers.lowered(case.methods()[name], case.params, case.tokens)  # noqa: E731
        traced, lowered = _measure.clocked(lower)
        compiled, programs[name] = _measure.clocked(lowered.compile)
        lowering.setdefault(name, []).append(traced)
        return _measure.Sample(*map(sum, zip(traced, compiled, strict=True)))

    calls = {name: functools.partial(call, name) for name in methods}
    call(_peers.SCAN)  # imports, first use
    lowering.clear()
    times = _measure.interleaved(calls, repeats)
    found = {name: _peers.Compiled(programs[name], methods[name]) for name in methods}
    transformer.check(case, {name: transformer.Jax(one, case) for name, one in found.items()})
    rows = []
    for name in methods:
        row = _measure.paired_row(CASE, name, times, _peers.SCAN, "CPU s", "cpu")
        traced = _measure.paired_row(CASE, name, lowering, _peers.SCAN, "CPU s", "cpu")
        rows.append(row | case.size.fields(case.k) | {"lowering_value": traced["value"]})
    return rows


def rows(scale: str) -> list[_measure.Row]:
    """The case, by scale."""
    return [
        row
        for size in SIZES[scale]
        for k in size.ks
        for row in measure(transformer.make(size, k), REPEATS[scale])
    ]
