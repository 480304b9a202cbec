"""How a window's cost grows: with k, with the parameters, with the number of leaves.

The windows are those of the case optimizer. The leaves share the same bytes among them, so that
what each leaf costs by itself shows: `per_byte_of_16` is a window's time a byte, over that of 16
leaves. 512 MB are a small model of 2,000 leaves; with less in each, jax's microsecond for every
array is most of what is measured (`known.md`). SGD, whose program for 2,000 leaves compiles in
seconds.
"""

from benchmarks import _measure, _peers, optimizer_bound

CASE = "growth"
METHODS = (_measure.FLOOR, _peers.APPLY, optimizer_bound.IN_ONE_CALL, _peers.MULTI_STEPS)
MOST_LEAVES = 200  # of MultiSteps: twice the program to compile, and no news


def of_k(ks: tuple[int, ...], side: int) -> list[optimizer_bound.Size]:
    return [optimizer_bound.Size(16, (side, side), k, "sgd") for k in ks]


def of_parameters(sides: tuple[int, ...]) -> list[optimizer_bound.Size]:
    return [optimizer_bound.Size(16, (side, side), 4, "sgd") for side in sides]


def of_leaves(numbers: tuple[int, ...], total: int) -> list[optimizer_bound.Size]:
    return [optimizer_bound.Size(n, (total // n,), 4, "sgd") for n in numbers]


SIZES = {  # by what grows
    "tiny": {
        "k": of_k((1, 2), 4),
        "parameters": of_parameters((4,)),
        "leaves": of_leaves((1, 16), 64),
    },
    "quick": {
        "k": of_k((1, 16, 256), 128),
        "parameters": of_parameters((64, 1024)),
        "leaves": of_leaves((16, 2000), 128_000_000),
    },
    "full": {
        "k": of_k((1, 2, 4, 16, 64, 256), 256),
        "parameters": of_parameters((16, 64, 256, 1024, 2048)),
        "leaves": of_leaves((1, 4, 16, 64, 200, 500, 2000), 128_000_000),
    },
}
SECONDS = {"tiny": 0.0, "quick": 1.0, "full": 10.0}  # of timing, a size
FEWEST = {"tiny": 2, "quick": 4, "full": 10}  # rounds


def rows(scale: str) -> list[_measure.Row]:
    """The case, by scale: for what grows and each size, a row a method."""
    found = []
    for grows, sizes in SIZES[scale].items():
        for size in sizes:
            only = METHODS if size.leaves <= MOST_LEAVES else METHODS[:-1]
            measured = optimizer_bound.measure(size, SECONDS[scale], FEWEST[scale], only)
            found += [row | {"case": CASE, "grows": grows} for row in measured]
    return [row | per_byte(row, found) for row in found]


def per_byte(row: _measure.Row, rows: list[_measure.Row]) -> _measure.Row:
    """A window's time a byte, over that of the same method with 16 leaves of the same bytes."""
    if row["grows"] != "leaves":
        return {}
    base = [
        one["value"]
        for one in rows
        if one["grows"] == "leaves" and one["method"] == row["method"] and one["leaves"] == 16
    ]
    return {"per_byte_of_16": row["value"] / base[0] if base else None}
