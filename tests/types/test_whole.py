"""Whole numbers: what counts as one, in which range, and that digits are counted before they are read."""

from __future__ import annotations

import numpy as np
import pytest

from reshard.types.whole import MOST, whole, written


class Index:
    """A number that is not an int, as numpy's are."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __index__(self) -> object:
        return self.value


@pytest.mark.parametrize("value", [0, 1, 7, MOST, np.int8(3), np.uint64(5), np.array(6), Index(2)])
def test_whole_numbers_become_ints(value: object):
    number = whole(value)
    assert number == int(value.__index__()) and type(number) is int  # type: ignore[attr-defined]


NUMBERS = [-1, MOST + 1, 10**5000, 2.0, 1j, np.float32(2), np.nan, np.array([1, 2]), np.array([3])]
OTHERS = [True, False, np.True_, "8", b"8", None, [1], int, Index("x"), Index(None), Index(-1)]


@pytest.mark.parametrize("value", [*NUMBERS, *OTHERS], ids=lambda value: type(value).__name__)
def test_what_is_not_a_whole_number(value: object):
    assert whole(value) is None


def test_bounds_belong_to_the_range():
    assert [whole(value, 2, 4) for value in range(1, 6)] == [None, 2, 3, 4, None]


@pytest.mark.parametrize(
    ("digits", "number"), [("0", 0), ("007", 7), ("0" * 5000 + "8", 8), (str(MOST), MOST)], ids=range(4)
)
def test_digits_are_read(digits: str, number: int):
    assert written(digits) == number


@pytest.mark.parametrize("digits", [str(MOST + 1), "9" * 19, "1" * 4301, "1" * 100_000], ids=len)
def test_too_many_digits_are_not_read(digits: str):
    assert written(digits) is None
