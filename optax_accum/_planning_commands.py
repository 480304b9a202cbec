"""The commands `batch`, `memory` and `plan`: their arguments, what they run, what they print."""

import argparse
import contextlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from optax_accum import _arguments, _batch_arithmetic, _fit, _memory, _plan
from optax_accum._arguments import integer_from
from optax_accum._target import load

Commands = Any  # what argparse calls argparse._SubParsersAction
HERE = Path(__file__).parent
NOTHING_FITS = 1
FLAGS = (
    "global_batch",
    "micro_batch",
    "k",
    "replicas",
    "examples",
    "epochs",
    "zero",
    "devices",
    "trainable",
    "budget",
)


def add_batch(commands: Commands) -> None:
    text = "global batch = micro-batch x k x replicas, and what an epoch comes to"
    parser = _parser(commands, "batch", text, _batch)
    _add_numbers(
        parser,
        ("--global-batch", None, "examples of an update"),
        ("--micro-batch", None, "examples of one forward and backward pass, on each replica"),
        ("--k", None, "micro-steps of a window, on each replica"),
        ("--replicas", 1, "that share the global batch"),
        ("--examples", None, "of the data set"),
        ("--epochs", 1, "over the data set"),
    )
    parser.add_argument("--drop-tail", action="store_true", help="leave out the last, short window")
    _add_activations(parser)


def add_memory(commands: Commands) -> None:
    text = "memory of a device by a formula: weights, window, optimizer, activations"
    parser = _parser(commands, "memory", text, _show_memory, "--parameters N ")
    parser.add_argument(
        "--parameters",
        type=_arguments.count,
        required=True,
        metavar="N",
        help="of the model: 7B, 125M, 7e9",
    )
    for flag, choices, meaning in (
        ("--optimizer", tuple(_memory.OPTIMIZERS), "whose state is held"),
        ("--precision", tuple(_memory.PRECISIONS), "of weights and gradients"),
        ("--engine", ("carry", "refs"), "carry has a micro-gradient beside the window, refs none"),
        (
            "--reduction",
            ("micro_batch", "window"),
            "of gradients over devices: each micro-batch, or once",
        ),
    ):
        meaning += f" (default: {choices[0]})"
        parser.add_argument(flag, choices=choices, default=choices[0], help=meaning)
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--accumulator-dtype", choices=dtypes, help="of the window")
    _add_numbers(
        parser,
        ("--k", 1, "micro-steps of a window; 1 has none"),
        ("--devices", 1, "that share what is in shards"),
        ("--micro-batch", 1, "examples of one forward and backward pass"),
    )
    parser.add_argument(
        "--zero", type=integer_from(0, 3), default=0, metavar="N", help="ZeRO stage (default: 0)"
    )
    parser.add_argument(
        "--trainable",
        type=_arguments.share,
        default=1.0,
        metavar="SHARE",
        help="of the parameters, for adapters (default: 1)",
    )
    _add_activations(parser)


def add_plan(commands: Commands) -> None:
    text = "the largest micro-batch that fits, by compiling your own update"
    parser = _parser(commands, "plan", text, _show_plan, "module:function --global-batch N ")
    parser.add_argument(
        "target",
        metavar="module:function",
        help="a function without arguments that returns make_update and shapes, as "
        "optax_accum.planning.fit takes them",
    )
    parser.add_argument(
        "--budget",
        type=_arguments.size,
        metavar="BYTES",
        help="of a device: 16GiB, 80GB (default: what the device reports, less 5%%)",
    )
    parser.add_argument(
        "--global-batch",
        type=integer_from(1),
        required=True,
        metavar="N",
        help="examples of an update",
    )
    _add_numbers(
        parser,
        ("--replicas", 1, "that share the global batch"),
        ("--compilations", 5, "at most"),
    )
    parser.add_argument(
        "--time", action="store_true", help="run some sizes that fit, and recommend the fastest"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory for a picture, plan.png")


def make_writable(directory: Path, error: Callable[[str], object]) -> None:
    """Make the directory, or say that it cannot be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        error(f"--out: {directory} cannot be made a directory ({reason.strerror})")
    if not os.access(directory, os.W_OK):
        error(f"--out: {directory} cannot be written to; use another directory")


def _parser(
    commands: Commands, name: str, text: str, run: Callable[..., int], required: str = ""
) -> argparse.ArgumentParser:
    usage = f"optax-accum {name} {required}[options]   (all: optax-accum {name} --help)"
    description = text[0].upper() + text[1:] + "."
    parser = commands.add_parser(name, help=text, description=description, usage=usage)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(command=run, error=parser.error)
    return parser


def _add_numbers(parser: argparse.ArgumentParser, *rows: tuple[str, int | None, str]) -> None:
    for flag, default, meaning in rows:
        meaning += "" if default is None else f" (default: {default})"
        parser.add_argument(flag, type=integer_from(1), default=default, metavar="N", help=meaning)


def _add_activations(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--activation-per-sample",
        type=_arguments.size,
        metavar="BYTES",
        help="activations of one example: 0.5GB, 300MiB",
    )


def _batch(args: argparse.Namespace) -> int:
    given = {name: getattr(args, name) for name in (*FLAGS[:6], "drop_tail")}
    with _told(args):
        found = _batch_arithmetic.batch(**given, activation_per_sample=args.activation_per_sample)
    if args.json:
        return _print_json(found._asdict())
    return _print("batch", lambda report: [report.pairs(_batch_arithmetic.rows(found))])


def _show_memory(args: argparse.Namespace) -> int:
    names = ("optimizer", "precision", "k", "accumulator_dtype", "engine", "trainable", "zero")
    given = {name: getattr(args, name) for name in (*names, "devices", "reduction", "micro_batch")}
    with _told(args):
        found = _memory.memory(
            args.parameters, **given, activation_per_sample=args.activation_per_sample or 0
        )
    if args.json:
        return _print_json(found._asdict() | {"parts": [part._asdict() for part in found.parts]})
    return _print("memory", lambda report: [report.memory_table(found)])


def _show_plan(args: argparse.Namespace) -> int:
    if args.out is not None:
        make_writable(args.out, args.error)
    if (not args.json or args.out is not None) and _report("plan") is None:
        return 1
    make_update, shapes = load(args.target, args.error)
    with _told(args), _progress(args.compilations) as on_compile:
        plan = _fit.fit(
            make_update,
            shapes,
            args.budget,
            global_batch=args.global_batch,
            replicas=args.replicas,
            compilations=args.compilations,
            time=args.time,
            on_compile=on_compile,
        )
    if args.out is not None:
        _report("plan").draw(plan, str(args.out / "plan.png"))
    if args.json:
        rows = {
            name: [row._asdict() for row in getattr(plan, name)] for name in ("sizes", "remedies")
        }
        _print_json(plan._asdict() | rows)
    else:
        _print("plan", lambda report: [*_plan.summary(plan), *report.plan_tables(plan)])
    return 0 if plan.micro_batch is not None else NOTHING_FITS


@contextlib.contextmanager
def _told(args: argparse.Namespace) -> Iterator[None]:
    """A mistake that this package finds is one of the command line, told in its flags."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if Path(traceback.extract_tb(error.__traceback__)[-1].filename).parent != HERE:
            raise
        notes = getattr(error, "__notes__", ())
        args.error(_in_flags("\n".join([str(error), *notes])))


def _in_flags(message: str) -> str:
    message = message.replace("drop_tail=True", "--drop-tail")
    message = message.replace("drop_tail=False", "it without --drop-tail")
    for name in FLAGS:
        flag = "--" + name.replace("_", "-")
        message = re.sub(rf"\b{name}=(?=[\w'])", f"{flag} ", message)
        message = re.sub(rf"\b{name}=", flag, message)
    return message


@contextlib.contextmanager
def _progress(most: int) -> Iterator[Callable[[int, int], None]]:
    """Tells on stderr what is being compiled; in silence where rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        yield lambda micro_batch, k: None
        return
    console, done = Console(stderr=True), []
    with console.status("reading shapes") as status:

        def on_compile(micro_batch: int, k: int) -> None:
            done.append(micro_batch)
            text = f"compiling micro-batch {micro_batch}, k {k} ({len(done)} of at most {most})"
            status.update(text)
            if not console.is_terminal:
                console.print(text)

        yield on_compile


def _report(command: str) -> Any:
    """The room of tables and pictures; None, with what to type, where its extras are missing."""
    try:
        from optax_accum import _plan_report
    except ImportError as error:
        print(
            f"optax-accum {command} needs matplotlib and rich for its tables ({error}); type:\n"
            f'    pip install "optax-accum[cli]"\nor, without them:\n'
            f"    optax-accum {command} --json ...",
            file=sys.stderr,
        )
        return None
    return _plan_report


def _print(command: str, parts: Callable[[Any], list[Any]]) -> int:
    report = _report(command)
    if report is None:
        return 1
    from rich.console import Console

    console = Console(highlight=False)
    for part in parts(report):
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)
    return 0


def _print_json(found: dict[str, Any]) -> int:
    print(json.dumps(found, indent=2))
    return 0
