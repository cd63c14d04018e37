"""Blocks against their elements, one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import PlanError
from reshard.geometry.blocks import Axis as FlatAxis
from reshard.geometry.blocks import Block as FlatBlock
from reshard.lower.to_mpi import Axis, Block
from reshard.lower.to_mpi.blocks import (
    block_of_part,
    block_of_spans,
    blocks_of_runs,
    cut_tile_block,
    fold_blocks,
    spans_inside,
    whole_tile,
)
from reshard.plans.rules.split_steps import Cut
from reshard.plans.rules.tile_view import TileView
from tests.lower.to_mpi.elements import places


def test_blocks_are_cut_and_folded_in_order():
    block = Block((0, 1), (2, 0), (Axis(0, 3, 2, 1), Axis(1, 4, 1, 3)))
    for cap in (1, 3, 4, 5, 12, 20):
        parts = list(cut_tile_block(block, cap))
        assert all(part.elements <= cap for part in parts)
        for end in ("src", "dst"):
            assert [at for part in parts for at in places(part, end)] == places(block, end)
            assert [at for part in fold_blocks(parts) for at in places(part, end)] == places(block, end)
    assert len(fold_blocks(cut_tile_block(block, 4))) == 1


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 20))
def test_what_lies_inside_is_all_but_padding(outer: int, inner: int, step: int, size: int):
    block = Block((1,), (0,), (Axis(0, outer, step * inner, 1), Axis(0, inner, 1, 1)))
    indices = [at for spans in spans_inside(block, "src", (size,)) for at in places(block.part(spans), "src")]
    assert indices == [at for at in places(block, "src") if at[0] < size]


def test_padding_of_two_dims_is_left_out():
    block = Block((0, 2), (0, 0), (Axis(1, 3, 2, 1), Axis(0, 5, 1, 1)))
    spans = list(spans_inside(block, "src", (3, 5)))
    indices = [at for each in spans for at in places(block.part(each), "src")]
    assert indices == [(row, column) for column in (2, 4) for row in range(3)]


def test_a_whole_tile():
    assert places(whole_tile((2, 3)), "src") == list(np.ndindex(2, 3))
    assert places(whole_tile(()), "dst") == [()]
    assert whole_tile((0, 4)).elements == 0


def straight(src: int, dst: int, length: int, *repeats: FlatAxis) -> FlatBlock:
    return FlatBlock(src, dst, (*repeats, FlatAxis(length, 1, 1)))


def test_runs_of_each_dim_multiply():
    rows = [straight(0, 1, 2), straight(3, 4, 2)]
    columns = [straight(5, 0, 3)]
    blocks = blocks_of_runs([rows, columns])
    for end, pick in (("src", lambda run: run.src), ("dst", lambda run: run.dst)):
        along = [[pick(run) + i for run in runs for i in range(run.axes[-1].extent)] for runs in (rows, columns)]
        assert [at for block in blocks for at in places(block, end)] == list(itertools.product(*along))
    assert len(blocks) == 1


def test_runs_of_other_lengths_or_steps_are_not_folded():
    uneven = [straight(0, 0, 2), straight(4, 2, 2), straight(9, 4, 2)]
    blocks = blocks_of_runs([uneven])
    assert [at[0] for block in blocks for at in places(block, "src")] == [0, 1, 4, 5, 9, 10]
    assert len(blocks) == 2
    assert len(blocks_of_runs([[straight(0, 0, 2), straight(4, 2, 3)]])) == 2


def test_a_progression_is_one_block():
    [block] = blocks_of_runs([[straight(1, 2, 2, FlatAxis(3, 10, 20), FlatAxis(2, 4, 3))], [straight(5, 0, 3)]])
    rows = [10 * a + 4 * b + c + 1 for a in range(3) for b in range(2) for c in range(2)]
    assert places(block, "src") == list(itertools.product(rows, range(5, 8)))
    rows = [20 * a + 3 * b + c + 2 for a in range(3) for b in range(2) for c in range(2)]
    assert places(block, "dst") == list(itertools.product(rows, range(3)))


def test_blocks_that_go_backwards_are_not_folded():
    backwards = [Block((at,), (8 - at,), (Axis(0, 2, 1, 1),)) for at in (8, 4, 0)]
    assert fold_blocks(backwards) == backwards


def _view(tile: tuple[int, ...], digits: tuple[int, ...], dims: tuple[int, ...]) -> TileView:
    return TileView(tile, tile, digits, dims, ())


def test_spans_of_other_digits_have_common_axes():
    """A digit of 6 at one end, digits of 2 and 3 at the other: the same six indices."""
    one, other = _view((6, 2), (6, 2), (0, 1)), _view((2, 6), (2, 2, 3), (0, 1, 1))
    block = block_of_spans(one, [(0, 6), (1, 1)], _view((6, 2), (2, 3, 2), (0, 0, 1)), [(0, 2), (0, 3), (0, 1)])
    assert places(block, "src") == [(at, 1) for at in range(6)]
    assert places(block, "dst") == [(at, 0) for at in range(6)]
    with pytest.raises(PlanError, match="6 indices of dim 0 at one end and 3 of dim 1"):
        block_of_spans(one, [(0, 6), (0, 1)], other, [(0, 1), (0, 2), (0, 3)])


@pytest.mark.parametrize(("outer", "parts", "inner"), [(1, 3, 2), (3, 2, 1), (2, 5, 3), (5, 1, 2)])
def test_a_block_of_a_part_is_one_of_the_whole_tile(outer: int, parts: int, inner: int):
    """Local index i of part c is index (i // inner, c, i % inner) of the tile."""
    cut_of = Cut(0, outer, parts, inner)
    block = whole_tile((outer * inner,))
    for number in range(parts):
        whole = block_of_part(block, cut_of, cut_of, number)
        wanted = [(i // inner * parts * inner + number * inner + i % inner,) for i in range(outer * inner)]
        assert places(whole, "src") == places(whole, "dst") == wanted
