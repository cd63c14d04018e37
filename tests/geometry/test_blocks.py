"""Blocks against the elements that they list: cut, scaled, fused and merged; and extents cut into pieces."""

from __future__ import annotations

from itertools import combinations_with_replacement, product
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from reshard.geometry.blocks import (
    Axis,
    Block,
    cut_block,
    cut_range,
    fuse_axes,
    measure_pieces,
    merge_blocks,
    multiply_blocks,
    scale_blocks,
    split_box,
)
from tests.geometry.brute import offsets

EXTENTS = st.lists(st.integers(1, 7), max_size=4)
AXES = st.lists(st.builds(Axis, st.integers(0, 4), st.integers(1, 30), st.integers(1, 30)), max_size=4)
BLOCKS = st.builds(lambda src, dst, axes: Block(src, dst, tuple(axes)), st.integers(0, 9), st.integers(0, 9), AXES)


@given(BLOCKS, st.integers(1, 30))
def test_parts_have_the_elements_of_a_block_in_order(block: Block, cap: int):
    every = offsets(block)
    assert block.elements == prod(block.extents) == len(every)
    parts = list(cut_block(block, cap))
    assert [pair for part in parts for pair in offsets(part)] == every
    assert all(part.elements <= cap for part in parts)
    assert len(parts) == (measure_pieces(block.extents, cap)[0] if every else 1)
    marks = range(0, len(every) + 1, max(1, len(every) // 6))
    for low, high in combinations_with_replacement(marks, 2):
        assert [pair for part in cut_range(block, low, high) for pair in offsets(part)] == every[low:high]


@given(BLOCKS, BLOCKS)
def test_other_forms_of_a_block_have_its_elements(block: Block, other: Block):
    every = offsets(block)
    assert offsets(block.reversed) == [(dst, src) for src, dst in every]
    (scaled,) = scale_blocks((block,), 3, 5)
    assert offsets(scaled) == [(3 * src, 5 * dst) for src, dst in every]
    fused = fuse_axes(block)
    assert offsets(fused) == every and len(fused.axes) <= len(block.axes)
    both = [(a + c, b + d) for (a, b), (c, d) in product(every, offsets(other))]
    assert offsets(multiply_blocks([block, other])) == both
    first = every[0] if every else (0, 0)
    in_row = [(first[0] + n, first[1] + n) for n in range(len(every))]
    assert not every or block.is_run == (every == in_row)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=9), st.integers(1, 3))
def test_merged_blocks_have_the_same_elements_in_order(gaps: list[tuple[int, int]], length: int):
    blocks, src, dst = [], 0, 0
    for more, far in gaps:
        src, dst = src + more, dst + far
        blocks.append(Block(src, dst, (Axis(length, 1, 1),)))
    merged = merge_blocks(blocks)
    assert [pair for each in merged for pair in offsets(each)] == [pair for each in blocks for pair in offsets(each)]


def test_rows_become_planes_and_planes_a_volume():
    rows = [Block(100 * a + 10 * b, 30 * a + 3 * b, (Axis(2, 1, 1),)) for a in range(3) for b in range(4)]
    assert merge_blocks(rows) == [Block(0, 0, (Axis(3, 100, 30), Axis(4, 10, 3), Axis(2, 1, 1)))]
    # Blocks that go back, or that differ, stay apart.
    back = [Block(at, 0, (Axis(2, 1, 1),)) for at in (4, 0)]
    assert merge_blocks(back) == back
    assert fuse_axes(Block(0, 0, (Axis(3, 8, 4), Axis(2, 4, 2), Axis(4, 1, 1)))).axes == (Axis(6, 4, 2), Axis(4, 1, 1))


# ---- extents cut into pieces ------------------------------------------------------------------------


@given(EXTENTS, st.integers(1, 400))
def test_pieces_cover_the_box_once_and_are_contiguous_in_it(extents: list[int], cap: int):
    listed = list(split_box(extents, cap))
    strides = [prod(extents[at + 1 :]) for at in range(len(extents))]
    seen = []
    for piece in listed:
        indices = list(product(*(range(start, start + extent) for start, extent in piece)))
        at = [sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in indices]
        assert sorted(at) == list(range(min(at), min(at) + len(at)))
        seen += indices
    assert sorted(seen) == list(product(*(range(extent) for extent in extents)))
    sizes = [prod(extent for _, extent in piece) for piece in listed]
    assert max(sizes) <= cap
    assert (len(sizes), max(sizes)) == measure_pieces(extents, cap)
