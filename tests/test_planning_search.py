"""The search for the largest size within a budget, on curves by hand: nothing is compiled."""

import math

import numpy as np
import pytest

from optax_accum import _size_search
from optax_accum._size_search import predicted, search

POWERS = [2**i for i in range(11)]
MANY = [d for d in range(1, 721) if 720 % d == 0]
CURVES = {
    "affine": lambda b: 100 + 7 * b,
    "no slope": lambda b: 100.0,
    "peak moves at 10": lambda b: max(200 + 3 * b, 130 + 10 * b),
    "peak moves at 40": lambda b: max(200 + 3 * b, 20 + 7.5 * b),
    "concave": lambda b: 100 + 30 * math.sqrt(b),
    "convex": lambda b: 100 + b**1.5,
    "rounded up": lambda b: 64 * math.ceil((100 + 7 * b) / 64),
}


BENDING = ("affine", "no slope", "peak moves at 10", "peak moves at 40")  # as compilers make them


def looked(curve, sizes, budget, limit=5, whole=None, window=0):
    calls = []

    def needs(size):
        calls.append(size)
        return curve(size)

    found = search(sizes, whole, needs, budget, limit, window)
    assert calls == list(found.seen) and len(calls) == len(set(calls)) <= limit
    assert found.seen == {size: curve(size) for size in calls}
    return found


def fitting(found, budget):
    return max((size for size, n in found.seen.items() if n <= budget), default=None)


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("sizes", [POWERS, MANY], ids=["powers", "many"])
def test_the_largest_that_fits_is_seen(name, sizes):
    curve = CURVES[name]
    for budget in np.geomspace(curve(1) * 1.01, curve(sizes[-1]) * 1.1, 40):
        best = max(size for size in sizes if curve(size) <= budget)
        got = fitting(looked(curve, sizes, budget), budget)
        assert got <= best
        if name == "affine":
            assert got == best
        elif sizes is POWERS or name in BENDING:
            assert got >= best / 2, (budget, got, best)
        if name in BENDING:
            assert fitting(looked(curve, sizes, budget, limit=12), budget) == best


def test_with_room_for_all_the_line_goes_through_1_4_16_64():
    found = looked(CURVES["affine"], POWERS[:7], 1e9)
    assert list(found.seen) == [1, 4, 64, 16]
    assert found.expected == {1: None, 4: None, 64: 100 + 7 * 64, 16: 100 + 7 * 16}


def test_nothing_fits_after_two_looks():
    assert list(looked(CURVES["affine"], POWERS, 106).seen) == [1, 4]
    assert list(looked(CURVES["affine"], [3], 106).seen) == [3]


def test_a_miss_goes_to_the_next_best():
    """The line through 1, 4, 16 and 64 says that 32 fits; it does not."""
    curve = {1: 10, 2: 20, 4: 40, 8: 80, 16: 160, 32: 500, 64: 640}.__getitem__
    found = looked(curve, POWERS[:7], 400)
    assert found.seen[32] == 500 and found.expected[32] == 320
    assert fitting(found, 400) == 16


@pytest.mark.parametrize("limit", range(1, 8))
def test_no_more_looks_than_allowed(limit):
    for curve in CURVES.values():
        for budget in (curve(1), curve(100), curve(5000)):
            found = looked(curve, POWERS, budget, limit)
            assert fitting(found, budget) is not None


def test_a_whole_batch_has_no_window_and_is_looked_at_last():
    curve = lambda size: 400 if size == 128 else CURVES["affine"](size)  # noqa: E731
    found = looked(curve, POWERS[:7], 600, whole=128)
    assert list(found.seen) == [1, 4, 64, 16, 128]  # 996 by the line, so it was tried as the next
    assert fitting(found, 600) == 128
    assert list(looked(curve, POWERS[:7], 500, whole=128).seen)[-1] == 32  # 64 does not fit
    assert list(looked(curve, [1], 450, whole=128).seen) == [1, 128]


def test_a_whole_batch_may_fit_where_half_of_it_does_not():
    """By its window: 996 by the line, 540 without a window of 456."""
    curve = lambda size: 540 if size == 128 else CURVES["affine"](size)  # noqa: E731
    for window, best in ((0, 32), (455, 32), (456, 128)):
        assert fitting(looked(curve, POWERS[:7], 540, whole=128, window=window), 540) == best


def test_a_size_that_the_compiler_refuses_is_on_no_line():
    curve = lambda size: math.inf if size > 20 else CURVES["affine"](size)  # noqa: E731
    found = looked(curve, POWERS, 1e9)
    assert fitting(found, 1e9) == 16
    assert list(looked(lambda size: math.inf, POWERS, 1e9).seen) == [1, 4]


def test_the_line():
    seen = {1: 10.0, 4: 40.0, 16: 100.0}
    sizes = [1, 2, 4, 10, 16, 32]
    assert [predicted(seen, size) for size in sizes] == [10, 20, 40, 70, 100, 180]
    assert predicted({4: 1.0}, 5) is predicted({}, 1) is None
    assert predicted(seen | {64: math.inf}, 32) == 180
    between = np.linspace(1, 16, 31)
    expected = np.interp(between, [1, 4, 16], [10, 40, 100])
    np.testing.assert_allclose([predicted(seen, size) for size in between], expected)


def test_second_size_is_four_times_the_first():
    assert _size_search.SECOND == 4
    assert list(looked(CURVES["affine"], [3, 6, 9, 15, 45], 1e9).seen)[:2] == [3, 15]
