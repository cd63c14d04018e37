"""Reductions: which dtypes have them, by numpy's own operations, and what an all-reduce receives."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pytest

from reshard.types.reductions import REDUCTIONS, UFUNCS, all_reduce_elements, has_reduction

NUMPY = ("bool", "int8", "int64", "uint16", "float16", "float32", "complex64", "complex128")
BY_HAND = {"sum": sum, "mean": sum, "max": max, "min": min, "product": lambda values: int(np.prod(values))}


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_named_ufunc_combines_the_summands(reduction: str):
    values = [3, -2, 7, 5]
    assert getattr(np, UFUNCS[reduction]).reduce(values) == BY_HAND[reduction](values)


@pytest.mark.fast(20)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", NUMPY)
def test_a_supported_reduction_keeps_the_dtype_and_an_order_needs_one(dtype: str, reduction: str):
    """Numpy orders complex numbers lexicographically and adds booleans as an "or"; both are refused here."""
    one = np.ones(2, dtype)
    combined = getattr(np, UFUNCS[reduction])(one, one)
    if reduction == "mean":
        combined = combined / one
    exact = combined.dtype == one.dtype
    odd = (dtype.startswith("complex") and reduction in ("max", "min")) or (dtype == "bool" and reduction == "sum")
    assert has_reduction(dtype, reduction) == (exact and not odd)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_floats_of_other_libraries_have_all(dtype: str):
    assert all(has_reduction(dtype, reduction) for reduction in REDUCTIONS)


@pytest.mark.parametrize("members", [1, 2, 3, 5, 7, 8])
def test_an_all_reduce_is_two_rings(members: int):
    """A ring reduce-scatter and all-gather: each of 2 (f - 1) steps brings one block of tile / f."""
    for elements in (0, 1, 2, 7, 24, 1001):
        steps = 2 * (members - 1)
        assert all_reduce_elements(elements, members) == ceil(steps * Fraction(elements, members))
