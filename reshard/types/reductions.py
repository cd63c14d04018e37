"""Reductions: the operations that combine the summands of a partial array, and the dtypes that have them.

A mean is a sum that is divided by the number of summands at the end.
"""

from __future__ import annotations

REDUCTIONS = ("sum", "max", "min", "product", "mean")

UFUNCS = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum", "product": "multiply"}
"""The name of the numpy ufunc that combines two summands; a name, since `types` does not import numpy."""


def supports(dtype: str, reduction: str) -> bool:
    """Whether a dtype has a reduction; booleans have no sum and integers no mean.

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

    An all-reduce is a reduce-scatter followed by an all-gather. In each of them, every one of f devices receives
    (f - 1) / f of its tile.

    >>> all_reduce_elements(16, 4), all_reduce_elements(5, 3)
    (24, 7)
    """
    return -(-2 * (members - 1) * elements // members)
