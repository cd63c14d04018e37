"""Whole numbers: the one check behind *whole sizes*, and how long a list of devices may be.

Every size, radix and count of the package passes `whole` once, where it enters. From there on it is an int of Python,
so that nothing downstream divides by zero, rounds, or allocates what no machine holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sized
from typing import Any, cast

MOST = (1 << 63) - 1
"""The largest size, radix or count: what an index of 64 bits can say."""

MOST_DEVICES = 1 << 24
"""The most devices that are listed one by one. A mesh without `device_ids` may be larger: it is never listed."""

MOST_LISTED = 1 << 12
"""The most dims of an array, axes of a mesh, or entries of a spec."""

_DIGITS = len(str(MOST))


def whole(value: object, least: int = 0, most: int = MOST) -> int | None:
    """The value as an int, or None unless it is a whole number from `least` to `most`; True and False are not.

    >>> whole(8), whole(True), whole(2.0), whole(-1), whole(0, least=1)
    (8, None, None, None, None)
    """
    if type(value) is int:
        return value if least <= value <= most else None
    kind = type(value)
    if kind is bool or "bool" in kind.__name__ or not hasattr(kind, "__index__"):
        return None
    try:
        return whole(int(cast("Any", value).__index__()), least, most)
    except (TypeError, ValueError, OverflowError):  # An array of several numbers has __index__, too.
        return None


def listed(given: object, any_order: bool = False) -> tuple[Any, ...] | None:
    """What a list, or anything else with an order, holds; with `any_order`, also what a set holds.

    None for text and dicts, and beyond `MOST_LISTED` items.

    >>> listed([4, 2]), listed("x"), listed({4: 2}), listed(range(10**12))
    ((4, 2), None, None, None)
    >>> listed({4}), listed({4}, any_order=True)
    (None, (4,))
    """
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        return None
    if isinstance(given, set | frozenset) and not any_order:
        return None
    try:
        items = tuple(itertools.islice(cast("Iterable[Any]", given), MOST_LISTED + 1))
    except Exception:  # An array without dims has __iter__, too, and an iterator is the caller's code.
        return None
    return items if len(items) <= MOST_LISTED else None


def counted(given: Sized) -> int | None:
    """How many items something has, or None if it cannot say: an array without dims, a range beyond an index.

    >>> counted([4, 2]), counted(range(10**30))
    (2, None)
    """
    try:
        return len(given)
    except Exception:  # `__len__` may be the caller's code.
        return None


def written(digits: str) -> int | None:
    """The number that these decimal digits write, or None if it is above `MOST`.

    Python itself refuses to read more than 4300 digits, by a `ValueError`.

    >>> written("0012"), written("9" * 5000)
    (12, None)
    """
    significant = digits.lstrip("0") or "0"
    return whole(int(significant)) if len(significant) <= _DIGITS else None
