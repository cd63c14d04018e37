"""Boxes cut into pieces: they cover the box once, none is too large, and the counts are those of the cut."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.geometry.pieces import count, cut, largest

EXTENTS = st.lists(st.integers(1, 7), max_size=4)


@given(EXTENTS, st.integers(1, 400))
def test_pieces_cover_the_box_once_and_fit(extents: list[int], cap: int):
    listed = list(cut(extents, cap))
    seen = [index for piece in listed for index in product(*(range(start, start + extent) for start, extent in piece))]
    assert sorted(seen) == list(product(*(range(extent) for extent in extents)))
    sizes = [prod(extent for _, extent in piece) for piece in listed]
    assert max(sizes) <= cap
    assert (len(sizes), max(sizes)) == (count(extents, cap), largest(extents, cap))


@given(EXTENTS, st.integers(1, 400))
def test_pieces_are_contiguous_in_the_box(extents: list[int], cap: int):
    strides = [prod(extents[at + 1 :]) for at in range(len(extents))]
    for piece in cut(extents, cap):
        offsets = sorted(
            sum(i * s for i, s in zip(index, strides, strict=True))
            for index in product(*(range(start, start + extent) for start, extent in piece))
        )
        assert offsets == list(range(offsets[0], offsets[0] + len(offsets)))


@pytest.mark.parametrize(
    ("extents", "cap", "number", "most"),
    [
        ((), 1, 1, 1),
        ((5,), 5, 1, 5),
        ((5,), 4, 2, 3),  # three and two rather than four and one
        ((5,), 1, 5, 1),
        ((3, 4), 8, 2, 8),
        ((3, 4), 7, 3, 4),
        ((3, 4), 3, 6, 2),
        ((2, 3, 4), 12, 2, 12),
        ((2, 3, 4), 11, 4, 8),
        ((0, 4), 1, 1, 0),
    ],
)
def test_hand_counts(extents: tuple[int, ...], cap: int, number: int, most: int):
    assert (count(extents, cap), largest(extents, cap), len(list(cut(extents, cap)))) == (number, most, number)
