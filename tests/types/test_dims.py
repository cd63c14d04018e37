"""Digits and dims: padded sizes, tiles, and rounds fitted to a size."""

from __future__ import annotations

from itertools import product

import pytest

from reshard.errors import LayoutError
from reshard.types.dims import Digit, Dim, checked_size, fit_digits, true_extent
from reshard.types.mesh import SubAxis

X3 = Digit(3, SubAxis("x", 1, 3))


def test_padded_size_and_tile():
    dim = Dim((Digit(5, None), X3, Digit(7, None)), 101)
    assert (dim.padded, dim.tile) == (5 * 3 * 7, 5 * 7)
    assert (Dim((), 1).padded, Dim((), 1).tile) == (1, 1)
    assert Dim((Digit(0, None),), 0).tile == 0


def test_fitted_takes_the_fewest_rounds():
    for rounds, block, size in product((1, 4, 9), (1, 2, 5), range(1, 60, 7)):
        dim = fit_digits((Digit(rounds, None), X3, Digit(block, None)), size)
        assert dim.digits[1:] == (X3, Digit(block, None))
        assert dim.size == size
        assert dim.padded >= size > dim.padded - 3 * block


def test_fitted_gives_a_round_to_digits_that_start_with_a_held_one():
    assert fit_digits((X3, Digit(4, None)), 12) == Dim((Digit(1, None), X3, Digit(4, None)), 12)
    assert fit_digits((X3, Digit(4, None)), 13).digits[0] == Digit(2, None)


def test_fitted_without_held_digits_is_the_size():
    assert fit_digits((Digit(2, None), Digit(3, None)), 7) == Dim((Digit(7, None),), 7)


@pytest.mark.parametrize("order", ["2x3y2", "xy4", "4xy", "1x5y2", "x2y", "3x", "x", "6", ""])
def test_elements_come_before_padding(order: str):
    """By counting: every local index in order, and whether its global index is below the size."""
    axes = {"x": SubAxis("x", 1, 3), "y": SubAxis("y", 1, 2)}
    digits = tuple(Digit(axes[d].size, axes[d]) if d in axes else Digit(int(d), None) for d in order)
    for size in range(Dim(digits, 0).padded + 1):
        dim = Dim(digits, size)
        for x, y in product(range(3), range(2)):
            values = [range(d.radix) if d.axis is None else [x if d.axis == axes["x"] else y] for d in digits]
            real = []
            for local in product(*values):
                index = 0
                for digit, value in zip(digits, local, strict=True):
                    index = index * digit.radix + value
                real.append(index < size)
            assert real == sorted(real, reverse=True)
            assert true_extent(dim, lambda axis, at=(x, y): at["xy".index(axis.axis)]) == sum(real)


def test_the_extent_of_a_huge_dim_is_counted_at_once():
    dim = Dim((Digit(1 << 40, None), X3, Digit(1 << 20, None)), (3 << 60) - 5)
    assert true_extent(dim, lambda axis: 2) == dim.tile - 5
    assert true_extent(Dim((Digit(0, None),), 0), lambda axis: 0) == 0


@pytest.mark.parametrize("size", [0, 1, 7, (1 << 63) - 1])
def test_sizes(size: int):
    assert checked_size(size) == size


@pytest.mark.parametrize("size", [-1, 2.0, "8", True, None, [1], 1 << 63])
def test_what_is_not_a_size(size: object):
    with pytest.raises(LayoutError, match="a size is a whole number of at least 0"):
        checked_size(size)


def test_numpy_s_integers_are_sizes():
    np = pytest.importorskip("numpy")
    size = checked_size(np.int64(5))
    assert size == 5 and type(size) is int
