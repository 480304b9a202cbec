"""optax_accum beside its peers, as ratios to a floor measured in the same process.

python -m benchmarks                      all cases, on whatever devices jax finds
python -m benchmarks --quick              the same in a few minutes on 2 cores
python -m benchmarks optimizer memory     these cases alone
python -m benchmarks --quick --json       one list of rows, for scripts
python -m benchmarks --quick --out DIR    pictures of the cases

Peers: optax.MultiSteps, optax.apply_every, optax.microbatch, a hand-written scan, one big batch,
and PyTorch on CPU where torch is installed. A method that computes something else than the others
stops the run with an error instead of a time. The last row names the peers that were missing.
"""

import importlib
import importlib.util
import sys
import time
from collections.abc import Sequence

from benchmarks import _measure, _peers, _report

CASES = {  # each a module with `rows(scale)`
    "optimizer": "optimizer_bound",
    "memory": "memory",
    "transformer": "transformer",
    "collectives": "collectives",
    "compile": "compile_time",
    "growth": "growth",
    "precision": "precision",
}


def measured(cases: Sequence[str], scale: str) -> list[_measure.Row]:
    """The rows of these cases, and the one of the peers."""
    found: list[_measure.Row] = []
    for case in cases:
        wall, cpu = time.perf_counter(), time.process_time()
        found += importlib.import_module(f"benchmarks.{CASES[case]}").rows(scale)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(f"{case}: {wall:.0f} s, {cpu:.0f} CPU s", file=sys.stderr)
    return [*found, _report.peers_row(_peers.missing(), _peers.versions())]


def main(argv: Sequence[str] | None = None) -> int:
    parser = _report.parser("benchmarks", __doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"{', '.join(CASES)}; none is all")
    parser.add_argument("--quick", action="store_true", help="small sizes: minutes on 2 cores")
    parser.add_argument("--out", metavar="DIR", help="write pictures and rows.json there")
    options = parser.parse_args(argv)
    for case in options.cases:
        if case not in CASES:
            parser.error(f"no case {case!r}, expected one of {', '.join(CASES)}")
    if options.out and importlib.util.find_spec("matplotlib") is None:
        parser.error("--out draws with matplotlib; type pip install -e '.[benchmarks]'")
    try:
        rows = measured(options.cases or list(CASES), "quick" if options.quick else "full")
    except _measure.WrongResult as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _report.show(rows, options.json)
    if options.out:
        from benchmarks import _pictures

        _pictures.write(rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
