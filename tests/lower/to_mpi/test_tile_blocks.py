"""Blocks of tiles against their elements, one by one: of padded tiles, of spans of digits, of parts, of messages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import PlanError
from reshard.geometry.blocks import Axis, Block, list_strides
from reshard.lower.to_mpi.tile_blocks import (
    block_of_part,
    block_of_spans,
    block_of_tile,
    clip_block,
    clip_source,
    multiply_factors,
    pack_block,
)
from reshard.plans.rules.split_steps import Cut
from reshard.plans.rules.tile_view import TileView
from tests.lower.to_mpi.elements import places


@given(st.data())
def test_what_a_tile_has_of_a_padded_one(data: st.DataObject):
    """Blocks of a frame of three dims, each axis within one of them, between two tiles smaller or larger than that."""
    frame = tuple(data.draw(st.lists(st.integers(1, 6), min_size=3, max_size=3)))
    shapes = [tuple(data.draw(st.integers(1, 7)) for _ in frame) for _ in range(2)]
    start, axes = [], []
    for extent, stride in zip(frame, list_strides(frame), strict=True):
        low, step = data.draw(st.integers(0, extent - 1)), data.draw(st.integers(1, 3))
        count = data.draw(st.integers(1, max(1, (extent - low - 1) // step + 1)))
        start.append(low * stride)
        axes += [Axis(count, step * stride, step * stride)] if count > 1 else []
    block = Block(sum(start), sum(start), tuple(data.draw(st.permutations(axes))))
    index = np.array(np.unravel_index(places(block, "src"), frame)).T.reshape(-1, 3)
    inside = [[tuple(at) for at in index if all(at < shape)] for shape in shapes]
    clipped = list(clip_source(block, frame, shapes[0]))
    assert [at for b in clipped for at in places(b, "src")] == [np.ravel_multi_index(at, shapes[0]) for at in inside[0]]
    both = [at for at in inside[0] if at in inside[1]]
    clipped = list(clip_block(block, (frame, frame), (shapes[0], shapes[1])))
    pairs = [pair for b in clipped for pair in zip(places(b, "src"), places(b, "dst"), strict=True)]
    assert sorted(pairs) == sorted(tuple(int(np.ravel_multi_index(at, shape)) for shape in shapes) for at in both)


def test_a_whole_tile():
    assert places(block_of_tile((2, 3)), "src") == list(range(6))
    assert places(block_of_tile(()), "dst") == [0]
    assert block_of_tile((0, 4)).elements == 0


def test_evenly_spaced_blocks_of_a_factor_are_one():
    def rows(*starts: int, length: int = 2) -> tuple[Block, ...]:
        return tuple(
            Block(at * 10, to, (Axis(length, 10, 1),)) for to, at in zip(range(0, 99, 4), starts, strict=False)
        )

    for factor, count in ((rows(0, 3, 6), 1), (rows(0, 4, 9), 2), (rows(8, 4, 0), 3)):
        blocks = list(multiply_factors([factor, (Block(3, 0, (Axis(3, 1, 30),)),)]))
        assert len(blocks) == count
        for end in ("src", "dst"):
            columns = [3 + n if end == "src" else 30 * n for n in range(3)]
            along = [at for block in factor for at in places(block, end)]
            assert [at for block in blocks for at in places(block, end)] == [
                row + column for row, column in itertools.product(along, columns)
            ]


def _view(tile: tuple[int, ...], digits: tuple[int, ...], dims: tuple[int, ...]) -> TileView:
    return TileView(tile, tile, digits, dims, ())


def test_spans_of_other_digits_have_common_axes():
    """A digit of 6 at one end, digits of 2 and 3 at the other: the same six indices."""
    one, other = _view((6, 2), (6, 2), (0, 1)), _view((2, 6), (2, 2, 3), (0, 1, 1))
    block = block_of_spans(one, [(0, 6), (1, 1)], _view((6, 2), (2, 3, 2), (0, 0, 1)), [(0, 2), (0, 3), (0, 1)])
    assert places(block, "src") == [2 * at + 1 for at in range(6)]
    assert places(block, "dst") == [2 * at for at in range(6)]
    with pytest.raises(PlanError, match="6 indices of dim 0 at one end and 3 of dim 1"):
        block_of_spans(one, [(0, 6), (0, 1)], other, [(0, 1), (0, 2), (0, 3)])


@pytest.mark.parametrize("around", [(1, 1), (2, 3)])
@pytest.mark.parametrize(("outer", "parts", "inner"), [(1, 3, 2), (3, 2, 1), (2, 5, 3), (5, 1, 2)])
def test_a_block_of_a_part_is_one_of_the_whole_tile(outer: int, parts: int, inner: int, around: tuple[int, int]):
    """Local index i of part c is index (i // inner, c, i % inner) of the tile, whatever dims are around."""
    cut = Cut(1, outer, parts, inner)
    frame = (around[0], outer * inner, around[1])
    whole = np.arange(outer * inner * parts * around[0] * around[1]).reshape(around[0], outer, parts, inner, around[1])
    for number in range(parts):
        block = block_of_part(block_of_tile(frame), cut, cut, number, (frame, frame))
        assert places(block, "src") == places(block, "dst") == whole[:, :, number].reshape(-1).tolist()


def test_a_message_has_the_elements_of_its_blocks_one_after_another():
    block = Block(3, 50, (Axis(2, 10, 7), Axis(4, 2, 1)))
    for end in ("src", "dst"):
        packed = pack_block(block, end, 100)
        assert places(packed, "src") == places(block, end)
        assert places(packed, "dst") == list(range(100, 108))
