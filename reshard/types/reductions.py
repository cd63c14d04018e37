"""Reductions: how the summands of a partial array combine, and for which dtypes.

A mean is a sum that is divided by the number of summands at the end.
"""

from __future__ import annotations

REDUCTIONS = ("sum", "max", "min", "product", "mean")

UFUNCS = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum", "product": "multiply"}
"""The numpy ufunc that combines two summands, by name: this package does not need numpy."""


def supports(dtype: str, reduction: str) -> bool:
    """Whether the elements of a dtype can be combined by a reduction.

    >>> supports("float32", "mean"), supports("int32", "mean"), supports("bool", "sum")
    (True, False, False)
    """
    if dtype == "bool":
        return reduction in ("max", "min", "product")
    if dtype.startswith("complex"):
        return reduction in ("sum", "mean", "product")
    return reduction != "mean" or not dtype.startswith(("int", "uint"))


def all_reduce_elements(elements: int, members: int) -> int:
    """Elements that each of `members` devices receives in an all-reduce, rounded up.

    An all-reduce is a reduce-scatter and an all-gather, and each brings a device (f - 1) / f of its tile.

    >>> all_reduce_elements(16, 4), all_reduce_elements(5, 3)
    (24, 7)
    """
    return -(-2 * (members - 1) * elements // members)
