"""What the examples share: a bar that counts updates, checkpoints, Ctrl-C, the proof at the end.

Nothing here is about accumulation: the loops that are stand in the examples.
"""

import argparse
import hashlib
import pathlib
import signal
import sys
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress


def arguments(description: str | None, updates: int) -> argparse.ArgumentParser:
    """A parser with the options of a `Run`; add an example's own to it."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]   (all: %(prog)s --help)",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options = (
        ("--updates", positive, updates, "updates to make (default: %(default)s)"),
        ("--checkpoint-dir", directory, None, "keep checkpoints here, go on from the newest"),
        ("--checkpoint-every", positive, 3, "calls between checkpoints (default: %(default)s)"),
        ("--stop-after", positive, None, "stop after so many calls, as Ctrl-C would"),
    )
    for name, kind, default, text in options:
        parser.add_argument(name, type=kind, default=default, help=text)
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of 1 or more")
    return int(text)


def directory(text: str) -> pathlib.Path:
    path = pathlib.Path(text).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        message = f"{text} cannot be made a directory ({reason.strerror}); use another"
        raise argparse.ArgumentTypeError(message) from None
    return path


class Run:
    """A run of `updates` times `calls_an_update` calls, which may be cut short and gone on with.

    with Run(parsed, calls_an_update=4) as run:
        state = run.resumed(state)
        while run.goes_on:
            state, loss = call(state, batch_of(run.call))
            run.made(state, loss)
    """

    def __init__(self, parsed: argparse.Namespace, calls_an_update: int = 1):
        self.calls_an_update, self.every = calls_an_update, parsed.checkpoint_every
        self.calls, self.stop_after = parsed.updates * calls_an_update, parsed.stop_after
        self.call, self.signals = 0, []
        self.all_losses = np.full((parsed.updates, calls_an_update), np.nan)
        self.manager = None
        if parsed.checkpoint_dir is not None:
            options = ocp.CheckpointManagerOptions(max_to_keep=2)
            self._claim(parsed.checkpoint_dir, parsed.updates)
            self.manager = ocp.CheckpointManager(parsed.checkpoint_dir, options=options)
        shown = "{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[now]}"
        self.bar = Progress(*shown, console=Console(stderr=True))
        self.task = self.bar.add_task("updates", total=parsed.updates, now="compiling")

    def _claim(self, where: pathlib.Path, updates: int) -> None:
        """The directory belongs to the first run in it: this program, with as many updates."""
        own = f"{pathlib.Path(sys.argv[0]).stem} --updates {updates}"
        owner = where / "run.txt"
        if not any(path.name.isdigit() for path in where.iterdir()):  # no checkpoint yet
            owner.write_text(own)
        kept = owner.read_text() if owner.exists() else "another program"
        if kept != own:
            sys.exit(f"--checkpoint-dir: {where} holds a run of {kept}, not of {own}; use another")

    def __enter__(self) -> Self:
        """Ctrl-C, or a polite kill, waits for the call that is running; a second one does not."""
        numbers = signal.SIGINT, signal.SIGTERM
        self.previous = {number: signal.signal(number, self._note) for number in numbers}
        self.bar.start()
        return self

    def _note(self, number: int, frame: object) -> None:
        self.signals.append(number)
        signal.signal(number, self.previous[signal.Signals(number)])

    def __exit__(self, *error: object) -> None:
        self.bar.stop()
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        if self.manager is not None:
            self.manager.close()
        if error[0] is None and self.call < self.calls:
            kept = "type the same again to go on" if self.manager else "no --checkpoint-dir: lost"
            print(f"stopped after call {self.call} of {self.calls} ({kept})")
            sys.exit(130 if self.signals else 0)

    def resumed(self, state: Any) -> Any:
        """The newest checkpoint's state, or this one where there is none."""
        if self.manager is None or (newest := self.manager.latest_step()) is None:
            return state
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, self._kept(state))
        kept = self.manager.restore(newest, args=ocp.args.StandardRestore(like))
        self.call, self.all_losses = newest, np.array(kept["losses"])
        self.bar.update(self.task, completed=newest // self.calls_an_update)
        inside = newest % self.calls_an_update
        print(f"went on after call {newest}, {inside} micro-steps into a window")
        return kept["state"]

    @property
    def goes_on(self) -> bool:
        end = self.calls if self.stop_after is None else min(self.calls, self.stop_after)
        return self.call < end and not self.signals

    @property
    def losses(self) -> np.ndarray:
        """Of the windows that are full: means, without the NaN given for a dropped micro-step."""
        return np.nanmean(self.all_losses[: self.call // self.calls_an_update], axis=1)

    def made(self, state: Any, loss: Any) -> None:
        """Counts a call with its loss, shows updates, and keeps the state when that is due."""
        self.all_losses[divmod(self.call, self.calls_an_update)] = loss
        self.call += 1
        if self.call % self.calls_an_update == 0:
            done, now = self.call // self.calls_an_update, f"loss {self.losses[-1]:.3f}"
            self.bar.update(self.task, completed=done, now=now)
        if self.manager and (self.call % self.every == 0 or not self.goes_on):
            self.manager.save(self.call, args=ocp.args.StandardSave(self._kept(state)))
            self.manager.wait_until_finished()

    def _kept(self, state: Any) -> Any:
        return {"state": state, "losses": self.all_losses}


def prove(losses: np.ndarray, weights: Any, twin: Any, tolerance: float) -> None:
    """The loss fell, and the weights are those of the twin."""
    pairs = zip(jax.tree.leaves(weights), jax.tree.leaves(twin), strict=True)
    apart = np.max([np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in pairs])
    bits = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(weights)))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"weights apart from the twin's by {apart:.1e}, allowed {tolerance:.0e}")
    print(f"fingerprint of the weights: {bits.hexdigest()[:16]}")
    assert losses[-1] < 0.7 * losses[0]
    assert apart < tolerance
