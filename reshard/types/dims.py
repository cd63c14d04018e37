"""Digits and dims: the numerals of a layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from reshard.errors import LayoutError, quoted
from reshard.types.mesh import SubAxis
from reshard.types.whole import MOST, MOST_LISTED, listed, whole


class Digit(NamedTuple):
    """One digit of a numeral: its radix and the sub-axis that holds it, None for a local digit."""

    radix: int
    axis: SubAxis | None


class Dim(NamedTuple):
    """One dimension: its digits, most significant first, and its true size.

    >>> dim = Dim((Digit(4, SubAxis("x", 1, 4)), Digit(3, None)), 10)    # {x}3/10: pieces 0-2, 3-5, 6-8, 9
    >>> dim.padded, dim.tile
    (12, 3)
    """

    digits: tuple[Digit, ...]
    size: int

    @property
    def padded(self) -> int:
        """The product of the radices: the true size rounded up to whole pieces."""
        return math.prod(d.radix for d in self.digits)

    @property
    def tile(self) -> int:
        """Elements of this dim in one tile, padding included."""
        return math.prod(d.radix for d in self.digits if d.axis is None)


def true_extent(dim: Dim, coordinate: Callable[[SubAxis], int]) -> int:
    """How many local indices of a dim are elements, on a device with these coordinates; the rest is padding.

    Global indices grow with local ones, so the elements come first: this is ScaLAPACK's NUMROC.

    >>> dim = Dim((Digit(2, None), Digit(3, SubAxis("x", 1, 3)), Digit(2, None)), 9)    # 2{x}2/9
    >>> [true_extent(dim, lambda axis: x) for x in range(3)]
    [4, 3, 2]
    """
    if not dim.size:
        return 0
    count, left, place, tile = 0, dim.size, dim.padded, dim.tile
    for radix, axis in dim.digits:
        place //= radix
        if axis is None:  # Whole values of the digit, and at most one that is cut short.
            tile //= radix
            values = min(left // place, radix)
            count, left = count + values * tile, left - values * place
            left = left if values < radix else 0
        else:
            left = min(max(left - coordinate(axis) * place, 0), place)
    return count + left


def fit_digits(digits: Iterable[Digit], size: int) -> Dim:
    """The dim that covers `size` in as many rounds of these digits as it takes.

    Leading local digits count rounds, and are replaced by the number needed. Digits that start with a held one are
    one round, which gets a leading digit in front.

    >>> axis = SubAxis("x", 1, 4)
    >>> fit_digits([Digit(9, None), Digit(4, axis), Digit(2, None)], 20).digits[0]
    Digit(radix=3, axis=None)
    """
    kept = tuple(itertools.dropwhile(lambda d: d.axis is None, digits))
    unit = math.prod(d.radix for d in kept)
    return Dim((Digit(-(-size // unit), None), *kept), size)


def checked_size(size: object) -> int:
    """Returns a dim's size; raises `LayoutError` unless it is a whole number of at least 0 (*whole sizes*)."""
    checked = whole(size)
    if checked is None:
        raise LayoutError(
            f"dim size {quoted(size)}: a size is a whole number of at least 0, at most {MOST} (whole sizes)"
        )
    return checked


def checked_shape(shape: object) -> tuple[int, ...]:
    """Returns a global shape; raises `LayoutError` unless it lists whole numbers of at least 0 (*whole sizes*)."""
    sizes = listed(shape)
    if sizes is None:
        raise LayoutError(
            f"global shape {quoted(shape)}: give one size per dim, such as (16, 8), for at most {MOST_LISTED} dims"
        )
    return tuple(checked_size(size) for size in sizes)


# The coordinates of all positions of a mesh at once.


def numbers_along(positions: int, factors: Sequence[tuple[int, int]]) -> list[int]:
    """For each position below `positions`, its coordinates along (stride, size) factors as one number, major to minor.

    Lists are repeated instead of taking each position apart: a mesh may have millions.

    >>> numbers_along(6, [(1, 3), (3, 2)])
    [0, 2, 4, 1, 3, 5]
    """
    numbers = [0] * positions
    for at, (stride, size) in enumerate(factors):
        each = range(size)
        once = each if stride == 1 else itertools.chain.from_iterable(itertools.repeat(value, stride) for value in each)
        along = [*once] * (positions // (stride * size))
        numbers = [number * size + value for number, value in zip(numbers, along, strict=True)] if at else along
    return numbers
