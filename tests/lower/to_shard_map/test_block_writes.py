"""Blocks of parts of an all-to-all or a gather, each written where it belongs, as on a TPU: by the oracle.

Lanes are few here, so that small tiles have full ones.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from reshard.lower import lower_plan
from reshard.lower.program import InParts
from reshard.lower.to_shard_map import block_writes, tpu_layout
from reshard.lower.to_shard_map.block_writes import Writes, blockwise, message_order, with_part_digit
from reshard.lower.to_shard_map.parts import PartLoop
from reshard.lower.to_shard_map.tpu_layout import memory_order
from reshard.plans.rules.cost import StepMode
from reshard.plans.rules.parts import Cut
from reshard.plans.rules.tile_view import TileView
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


GATHERS = [
    # Of two dims: each tile is written into the result.
    ("into", "f32[16, {x}4, {y}8]", "f32[16, 16, 16]"),
    # Along the minor dim, narrow in a message.
    ("along", "f32[16, 16, {x}3]", "f32[16, 16, 12]"),
    # Of two dims, one of which is narrow in a message.
    ("staged", "f32[16, {y}8, 4, {x}3]", "f32[16, 16, 4, 12]"),
    ("transposed", "f32[16, {y}8, 4, {x}3]", "f32[16, 16, 4, 12]"),
]


def narrow_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes of 4 elements in 2 rows, so that small arrays have some."""
    monkeypatch.setattr(tpu_layout, "LANES", 4)
    monkeypatch.setattr(tpu_layout, "SUBLANES", 2)
    monkeypatch.setattr(tpu_layout, "_memory_order", getattr(tpu_layout, "_memory_order").__wrapped__)  # noqa: B009


def by_blocks(loop: PartLoop, tile: jax.Array) -> jax.Array:
    spelling = blockwise(loop.steps[-1], loop.shapes[-1], tile.dtype.name)
    assert spelling is not None
    return loop.by_blocks(spelling, tile)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("kind", "way", "source", "target"),
    [*(("all_to_all", *each) for each in WAYS), *(("all_gather", *each) for each in GATHERS)],
)
def test_every_element_arrives(kind: str, way: str, source: str, target: str, monkeypatch: pytest.MonkeyPatch):
    narrow_lanes(monkeypatch)
    monkeypatch.setattr(block_writes, "UNROLLED", 4 if way == "transposed" else 8)
    monkeypatch.setattr(PartLoop, "on", by_blocks)
    plan = one_step(kind, source, target, StepMode(parts=2))
    program = lower_plan(plan)
    (step,) = program.instructions
    assert isinstance(step, InParts)
    spelling = blockwise(step, program.tile_shapes[0], program.dtype)
    assert spelling is not None
    ways = {"into": spelling.into, "staged": spelling.staged, "along": spelling.along}
    assert [name for name, how in ways.items() if how is not None] == [way] * (way != "transposed"), spelling
    check_on_xla(plan, program)


def in_message_order(loop: PartLoop, tile: jax.Array) -> jax.Array:
    order = memory_order(loop.shapes[-1], tile.dtype.name)
    message = message_order(loop.steps[-1].each, order)
    assert message is not None
    return loop.by_parts(tile, order, message)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("f32[16, 16, {x}{y}2]", "f32[16, {x}4, 16]"),  # the minor dim has two elements in a message, and dim 1 four
        ("f32[{x}4, 16, {y}4]", "f32[16, {y}8, {x}2]"),
        ("f32[16, 8, {x}{y}3]", "f32[16, {y}4, 24]"),
    ],
)
def test_an_exchange_in_the_order_of_full_lanes(source: str, target: str, monkeypatch: pytest.MonkeyPatch):
    narrow_lanes(monkeypatch)
    monkeypatch.setattr(PartLoop, "on", in_message_order)
    check_on_xla(one_step("exchange", source, target, StepMode(parts=2)))


def test_a_block_of_narrow_lanes_is_left_to_xla():
    program = lower_plan(one_step("all_to_all", "f32[16, {x}4, 8]", "f32[{x}4, 16, 8]", StepMode(parts=2)))
    step = program.instructions[0]
    assert isinstance(step, InParts) and blockwise(step, program.tile_shapes[0], program.dtype) is None


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
