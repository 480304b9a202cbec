"""The command `optax-accum`: its arguments, and what is wrong with them."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from optax_accum import _checks
from optax_accum._arguments import integer_from
from optax_accum._planning_commands import add_batch, add_memory, add_plan, make_writable

INTERRUPTED = 130  # what shells expect of a command that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (default: those of the process); return its status."""
    args = _parser().parse_args(argv)
    try:
        return args.command(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="optax-accum", description="Gradient accumulation for JAX and Optax."
    )
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    _add_demo(commands)
    for add in (add_batch, add_memory, add_plan):
        add(commands)
    return parser


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "train a small language model with and without accumulation, and compare"
    demo = commands.add_parser("demo", help=text, description=text.capitalize() + ".")
    positive = integer_from(1)
    for flag, kind, default, meaning in (
        ("--updates", positive, 60, "updates of each run"),
        ("--global-batch", positive, 64, "sequences of an update"),
        ("--k", positive, 8, "micro-batches that a global batch is split into"),
        ("--seed", integer_from(0, 2**32 - 1), 0, "of the weights and of the batches"),
    ):
        meaning += f" (default: {default})"
        demo.add_argument(flag, type=kind, default=default, metavar="N", help=meaning)
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("demo-out"),
        metavar="DIR",
        help="directory of the picture (default: demo-out)",
    )
    demo.add_argument("--json", action="store_true", help="print one JSON object instead")
    demo.set_defaults(command=_demo, error=demo.error)


def _demo(args: argparse.Namespace) -> int:
    if args.global_batch % args.k:
        args.error(_remedy(args.global_batch, args.k))
    try:
        from optax_accum import demo
    except ImportError as error:
        print(
            f"optax-accum demo needs flax, matplotlib and rich ({error}); type:\n"
            '    pip install "optax-accum[demo]"',
            file=sys.stderr,
        )
        return 1
    make_writable(args.out, args.error)
    finished = demo.main(
        updates=args.updates,
        global_batch=args.global_batch,
        k=args.k,
        seed=args.seed,
        out=args.out,
        as_json=args.json,
    )
    return 0 if finished else INTERRUPTED


def _remedy(global_batch: int, k: int) -> str:
    divisors = _checks.divisors(global_batch)
    below = [d for d in divisors if d < k][-1:]
    above = [d for d in divisors if d > k][:1]
    fits = " or ".join(f"--k {d}" for d in below + above)
    return f"global batch of {global_batch} does not split into k={k} micro-batches; use {fits}"
