"""Reductions: the operations that combine the summands of a partial array, and the dtypes that have them.

A mean is a sum that is divided by the number of summands at the end.
"""

from __future__ import annotations

import math

from reshard.types import dtypes

REDUCTIONS = ("sum", "max", "min", "product", "mean")

UFUNCS = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum", "product": "multiply"}
"""The name of the numpy ufunc that combines two summands; a name, since `types` does not import numpy."""


def has_reduction(dtype: str, reduction: str) -> bool:
    """Whether a dtype has a reduction; booleans have no sum and integers no mean.

    >>> has_reduction("float32", "mean"), has_reduction("int32", "mean"), has_reduction("bool", "sum")
    (True, False, False)
    """
    if dtype == "bool":
        return reduction in ("max", "min", "product")
    if dtype.startswith("complex"):
        return reduction in ("sum", "mean", "product")
    return reduction != "mean" or not dtype.startswith(("int", "uint"))


_LARGEST = {
    "float4_e2m1fn": 6.0,
    "float8_e4m3b11fnuz": 30.0,
    "float8_e4m3fn": 448.0,
    "float8_e4m3fnuz": 240.0,
    "float8_e5m2fnuz": 57344.0,
    "float8_e8m0fnu": 2.0**127,
}
"""The largest value of the floating-point types that have no infinity."""


def identity(dtype: str, reduction: str) -> float | None:
    """The value that leaves every other as it is, for a dtype that has the reduction.

    None for a mean, and for a sum of a type without a zero: no array can be written as one of these.

    >>> identity("float32", "sum"), identity("int8", "max"), identity("bfloat16", "min"), identity("float32", "mean")
    (0, -128, inf, None)
    """
    match reduction:
        case "sum":
            return None if dtype == "float8_e8m0fnu" else 0
        case "product":
            return 1
        case "max":
            return _extreme_values(dtype)[0]
        case "min":
            return _extreme_values(dtype)[1]
        case _:
            return None


def _extreme_values(dtype: str) -> tuple[float, float]:
    """The least and the greatest value of a real dtype."""
    bits = dtypes.bits(dtype)
    if dtype == "bool":
        return False, True
    if dtype.startswith("uint"):
        return 0, (1 << bits) - 1
    if dtype.startswith("int"):
        return -(1 << bits - 1), (1 << bits - 1) - 1
    if dtype == "float8_e8m0fnu":
        return 2.0**-127, _LARGEST[dtype]
    largest = _LARGEST.get(dtype, math.inf)
    return -largest, largest


def all_reduce_elements(elements: int, members: int) -> int:
    """Elements that each of `members` devices receives in an all-reduce, rounded up.

    An all-reduce is a reduce-scatter followed by an all-gather. In each of them, every one of f devices receives
    (f - 1) / f of its tile.

    >>> all_reduce_elements(16, 4), all_reduce_elements(5, 3)
    (24, 7)
    """
    return -(-2 * (members - 1) * elements // members)
