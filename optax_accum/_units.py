"""Numbers as people write them: 16GiB, 0.5GB, 7B parameters; parsed, and printed plainly."""

import re
from typing import Any, NoReturn

DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
LEAST = 1024  # bytes; fewer are not meant
COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_BYTES = {name.lower(): size for name, size in (DECIMAL | BINARY | {"": 1}).items()}
_NUMBER = re.compile(
    r"\s*([0-9][0-9_]*(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE
)


def parse_bytes(name: str, given: Any) -> int:
    """Bytes from a number or a text: 16GiB is 16 * 2**30, 80GB is 80 * 10**9, 4096 is 4096.

    A text of a number below 1024, such as 16, has surely lost its unit.
    """
    expected = "bytes as a number or as text; type 16GiB (2**30 each), 80GB (10**9 each) or 512MB"
    found = _parsed(name, given, _BYTES, expected)
    lacks_unit = isinstance(given, str) and not given.strip()[-1].isalpha()
    if lacks_unit and 0 < float(given) < LEAST:
        _refuse_small(name, given)
    return found


def parse_large(name: str, given: Any) -> int:
    """As :func:`parse_bytes`, of a whole device: a small number has lost its unit, too."""
    found = parse_bytes(name, given)
    if not isinstance(given, str) and 0 < given < LEAST:
        _refuse_small(name, given)
    return found


def _refuse_small(name: str, given: Any) -> NoReturn:
    number = str(given).strip()
    raise ValueError(
        f"{name} is {given!r}, which is in bytes, expected a unit with it; type {number}GB, "
        f"{number}GiB or {number}MB."
    )


def parse_count(name: str, given: Any) -> int:
    """A count from a number or a text: 7e9, 7B, 125M."""
    return _parsed(name, given, COUNTS, "a count; type 7B, 125M, 7e9 or 7000000000")


def _parsed(name: str, given: Any, units: dict[str, int], expected: str) -> int:
    found = _NUMBER.fullmatch(str(given)) if not isinstance(given, bool) else None
    if found is None or found[2].lower() not in units:
        raise ValueError(f"{name} is {given!r}, expected {expected}.")
    digits, unit = found[1], units[found[2].lower()]
    number = int(digits.replace("_", "")) if digits.replace("_", "").isdigit() else float(digits)
    if number == float("inf"):
        raise ValueError(f"{name} is {given!r}, expected {expected}.")
    return round(number * unit)


def show(size: float) -> str:
    """Bytes for people, in powers of ten: 2 GB, 12.5 MB, 640 B."""
    unit = max((u for u in DECIMAL.items() if u[1] <= max(abs(size), 1)), key=lambda u: u[1])
    number = size / unit[1]
    digits = 0 if unit[1] == 1 or abs(number) >= 100 else 1 if abs(number) >= 10 else 2
    text = f"{number:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit[0]}"


def show_budget(size: int) -> str:
    """Bytes as a budget is given: 16 GiB (17.2 GB) where it is a whole number of those."""
    for name, unit in reversed(BINARY.items()):
        if unit >= BINARY["MiB"] and size >= unit and size % unit == 0 and size % 10**6:
            return f"{size // unit} {name} ({show(size)})"
    return show(size)


def columns(rows: list[tuple[str, ...]], right: tuple[int, ...] = ()) -> str:
    """Rows of text as aligned columns; those listed in `right` stand at the right edge."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
