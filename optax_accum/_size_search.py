"""The largest size within a budget, from few looks at what sizes need."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

SECOND = 4  # the second size looked at; sizes between 1, 4, 16 and 64 lie near a line
DOUBT = 1.25  # a line through two points errs by so much where activations are rematerialised


class Search(NamedTuple):
    """What was seen, and what had been expected of it before."""

    seen: dict[int, float]  # size -> bytes, in the order in which they were looked at
    expected: dict[int, float | None]  # None while a line had no two points


def predicted(seen: Mapping[int, float], size: int) -> float | None:
    """On the piecewise line through what was seen; past its ends the last piece goes on."""
    points = sorted((at, bytes_) for at, bytes_ in seen.items() if math.isfinite(bytes_))
    if len(points) < 2:
        return None
    pieces = list(itertools.pairwise(points))
    (x, y), (x2, y2) = next((piece for piece in pieces if size <= piece[1][0]), pieces[-1])
    return y + (size - x) * (y2 - y) / (x2 - x)


def search(
    sizes: Sequence[int],
    whole: int | None,
    needs: Callable[[int], float],
    budget: float,
    limit: int,
    window: float = 0,
) -> Search:
    """Look at up to `limit` sizes, so that the largest one within the budget is among them.

    The line starts with the smallest size and one 4 times as large, and is drawn on to the first
    size above the budget, or where all fit, to the last size and one in the middle. What is left
    verifies the largest size that the line lets fit;
    where that misses, the next best; and where the next size is over by less than the line may err,
    or lies past its end, that one.

    Args:
      sizes: that may be taken and lie on one line, in order.
      whole: the size of a whole global batch, if it is another one. It has no window and no loop,
        so it lies on no line with the others, and is looked at only if it may be the best.
      needs: bytes at a size; infinite where the compiler refuses.
      budget: bytes.
      limit: of looks.
      window: bytes by which the line may overstate the whole one.

    Returns:
      A :class:`Search`.
    """
    found = Search({}, {})

    def look(size: int) -> None:
        if size not in found.seen and len(found.seen) < limit:
            found.expected[size] = predicted(on_line(), size)
            found.seen[size] = needs(size)

    def on_line() -> dict[int, float]:
        return {size: n for size, n in found.seen.items() if size != whole}

    look(sizes[0])
    look(next((size for size in sizes if size >= SECOND * sizes[0]), sizes[-1]))
    if found.seen[sizes[0]] > budget:
        return found
    for _ in range(2):
        if len(found.seen) < limit - 1 and max(found.seen.values()) <= budget:
            look(_next_point(sizes, found.seen, budget))
    while len(found.seen) < limit:
        best = _better([*sizes, *([whole] if whole else [])], found.seen, on_line(), budget)
        if best is None:
            break
        look(best)
    if whole and _on_line(on_line(), whole) - window <= budget:
        look(whole)
    return found


def _next_point(sizes: Sequence[int], seen: Mapping[int, float], budget: float) -> int:
    """Where the line needs a point while all fits: above the budget, or in its longest piece."""
    top = max(seen)
    if top < sizes[-1]:
        above = (size for size in sizes if size > top and _on_line(seen, size) > budget)
        return next(above, sizes[-1])
    under = max((size for size in seen if size < top), default=top)
    between = [size for size in sizes if under < size < top]
    return _middle(between, under, top) if between else top


def _better(
    sizes: Sequence[int],
    seen: Mapping[int, float],
    line: Mapping[int, float],
    budget: float,
) -> int | None:
    """A size nobody has seen that may be better than all that fit, if there is one."""
    under, over = _bracket(seen, budget)
    between = [size for size in sizes if under < size < (over or math.inf)]
    if not between:
        return None
    if over is not None and math.isinf(seen[over]):  # of which the line knows nothing
        return _middle(between, under, over)
    fitting = [size for size in between if _on_line(line, size) <= budget]
    if fitting:
        return fitting[-1]
    guessed = over is None  # the line ends below it
    nearly = _on_line(line, between[0]) <= DOUBT * budget
    return between[0] if nearly or guessed else None


def _bracket(seen: Mapping[int, float], budget: float) -> tuple[int, int | None]:
    """The largest size that fits, and the smallest above it that does not."""
    under = max(size for size, n in seen.items() if n <= budget)
    return under, min((size for size in seen if size > under), default=None)


def _middle(between: Sequence[int], under: int, over: int) -> int:
    middle = math.sqrt(under * over)
    return min(between, key=lambda size: abs(math.log(size / middle)))


def _on_line(line: Mapping[int, float], size: int) -> float:
    found = predicted(line, size)
    return math.inf if found is None else found
