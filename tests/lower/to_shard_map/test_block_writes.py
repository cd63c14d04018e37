"""Blocks of parts of an all-to-all, each written where it belongs, as on a TPU: on CPU devices, by the oracle.

Lanes are few here, so that small tiles have full ones.
"""

from __future__ import annotations

import numpy as np
import pytest

from reshard.lower import lower_plan
from reshard.lower.program import AllToAll, InParts
from reshard.lower.to_shard_map import block_writes, parts, run_program
from reshard.lower.to_shard_map.block_writes import Writes, blockwise, lanes_last, with_part_digit
from reshard.types.rules.cost import StepMode
from reshard.types.rules.parts import Cut
from reshard.types.rules.tile_view import TileView
from tests.lower.to_shard_map.on_xla import check_on_xla, one_step

WAYS = [
    # Written into the result: its minor dim is whole in a message.
    ("into", "f32[16, {x}4, 8]", "f32[{x}4, 16, 8]"),
    ("into", "f32[{x}4, 16, 8]", "f32[16, {x}4, 8]"),
    ("into", "f32[{x}{y}2, 16, 16]", "f32[16, {x}4, {y}8]"),
    ("into", "f32[{y}8, 16, 4]", "f32[16, {y}8, 4]"),
    # Put together with another dim last, since the result's minor dim is narrow in a message.
    ("staged", "f32[16, 16, {x}3]", "f32[16, {x}4, 12]"),
    ("staged", "f32[16, 16, {x}3]", "f32[{x}4, 16, 12]"),
    ("staged", "f32[16, 16, {x}2, 5]", "f32[{x}4, 16, 8, 5]"),
    # Too many blocks to write one by one.
    ("transposed", "f32[16, 16, {x}{y}3]", "f32[16, {x}{y}2, 24]"),
]


def looped_by_blocks(step, place, run, tile, shape):
    spelling = blockwise(step, shape)
    assert isinstance(step.each, AllToAll) and spelling is not None
    return parts._block_loop(step, step.each, spelling, place, tile, shape)


@pytest.mark.parametrize(("way", "source", "target"), WAYS)
def test_every_element_arrives(way: str, source: str, target: str, monkeypatch: pytest.MonkeyPatch):
    for name, value in (("LANES", 4), ("SUBLANES", 2), ("UNROLLED", 4 if way == "transposed" else 8)):
        monkeypatch.setattr(block_writes, name, value)
    monkeypatch.setattr(run_program, "run_in_parts", looped_by_blocks)
    plan = one_step("all_to_all", source, target, StepMode(parts=2))
    program = lower_plan(plan)
    (step,) = program.instructions
    assert isinstance(step, InParts)
    spelling = blockwise(step, program.tile_shapes[0])
    assert spelling is not None
    assert (spelling.into is not None, spelling.staged is not None) == (way == "into", way == "staged"), spelling
    check_on_xla(plan, program)


def test_a_block_of_narrow_lanes_is_left_to_xla():
    program = lower_plan(one_step("all_to_all", "f32[16, {x}4, 8]", "f32[{x}4, 16, 8]", StepMode(parts=2)))
    step = program.instructions[0]
    assert isinstance(step, InParts) and blockwise(step, program.tile_shapes[0]) is None


def test_blocks_of_a_whole_tile_lie_in_its_runs():
    """Blocks are numbered by the third digit and then by the first; written by themselves, they fill the tile."""
    view = TileView((6, 8), (6, 8), (2, 3, 4, 2), (0, 0, 1, 1), (2, 0))
    tile = np.arange(48).reshape(2, 3, 4, 2).transpose(2, 0, 1, 3).reshape(8, 3, 2)
    for order in ((0, 1), (1, 0)):
        writes = Writes.of(view, order)
        filled = np.zeros(writes.shape, int)
        for number, block in enumerate(tile):
            where = zip(writes.starts(writes.values(number)), writes.block, strict=True)
            placed = block if order == (0, 1) else block.T
            filled[tuple(slice(start, start + extent) for start, extent in where)] = placed.reshape(writes.block)
        dims = [view.tile[dim] for dim in order]
        assert np.array_equal(filled.reshape(dims).transpose(np.argsort(order)), np.arange(48).reshape(6, 8))


@pytest.mark.parametrize("cut", [Cut(1, 1, 3, 8), Cut(1, 4, 3, 2), Cut(0, 1, 5, 2)])
def test_the_number_of_a_part_is_a_digit_of_the_whole_tile(cut: Cut):
    view = TileView((2, 8), (2, 8), (2, 4, 2), (0, 1, 1), (1,))
    whole = with_part_digit(view, cut, [2 * (5 if cut.axis == 0 else 1), 8 * (3 if cut.axis == 1 else 1)])
    assert whole is not None and whole.digits[whole.blocks[-1]] == cut.parts
    of_axis = [radix for radix, dim in zip(whole.digits, whole.dims, strict=True) if dim == cut.axis]
    assert np.prod(of_axis) == whole.tile[cut.axis]
    before = whole.blocks[-1] - whole.dims.index(cut.axis)
    assert np.prod(of_axis[:before]) == cut.outer


def test_a_part_between_no_two_digits_has_none():
    assert with_part_digit(TileView((2, 8), (2, 8), (2, 4, 2), (0, 1, 1), (1,)), Cut(1, 2, 3, 4), (2, 24)) is None


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((8, 128), (0, 1)),
        ((128, 8), (1, 0)),  # whole lanes in dim 0: it becomes the minor one
        ((256, 128, 3), (0, 2, 1)),  # the minor one of those that have whole lanes
        ((7, 5), (0, 1)),  # none has
    ],
)
def test_a_dim_with_whole_lanes_is_carried_last(shape: tuple[int, ...], order: tuple[int, ...]):
    assert lanes_last(shape) == order
