"""Digits and dims: what the numerals of a layout are made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

from reshard.errors import LayoutError
from reshard.types.mesh import SubAxis


class Digit(NamedTuple):
    """One digit of a numeral: its radix, and the sub-axis that holds it (None: local)."""

    radix: int
    axis: SubAxis | None


class Dim(NamedTuple):
    """One dimension: digits, most significant first, and the true size they cover."""

    digits: tuple[Digit, ...]
    size: int

    @property
    def padded(self) -> int:
        """The product of the radices: the true size, rounded up to whole pieces."""
        return math.prod(d.radix for d in self.digits)

    @property
    def tile(self) -> int:
        """Elements of this dim in one tile, padding included."""
        return math.prod(d.radix for d in self.digits if d.axis is None)


def fitted(digits: Iterable[Digit], size: int) -> Dim:
    """The dim whose digits, perhaps more than enough rounds of them, cover `size`.

    A leading local digit shrinks to the rounds that hold elements; a numeral that starts with a
    held digit keeps its padding, as one round.
    """
    kept = tuple(itertools.dropwhile(lambda d: d.axis is None, digits))
    unit = math.prod(d.radix for d in kept)
    return Dim((Digit(-(-size // unit), None), *kept), size)


def checked_size(size: object) -> int:
    """A size, if it is one."""
    if isinstance(size, bool) or not hasattr(size, "__index__") or int(size) < 0:  # pyright: ignore
        raise LayoutError(f"dim size {size!r}: a size is a whole number of at least 0")
    return int(size)  # pyright: ignore
