"""Arguments of the command line, read; a mistake is told with what was got and what expected."""

import argparse
from collections.abc import Callable

from optax_accum import _units


def integer_from(low: int, high: int | None = None) -> Callable[[str], int]:
    """Reads an integer from `low` to `high`, both included."""
    span = f"an integer of {low} or more" if high is None else f"an integer from {low} to {high}"

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {span}")
        return value

    return integer


def size(text: str) -> int:
    """Reads bytes: 16GiB, 80GB, 4096."""
    return _read(_units.parse_bytes, text)


def count(text: str) -> int:
    """Reads a count: 7B, 125M, 7e9."""
    return _read(_units.parse_count, text)


def share(text: str) -> float:
    """Reads a share above 0, up to 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a share above 0, up to 1: 0.01")
    return value


def _read(parse: Callable[[str, str], int], text: str) -> int:
    try:
        return parse("it", text)
    except ValueError as error:
        expected = str(error).split(", expected ", 1)[1].rstrip(".")
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}") from None
