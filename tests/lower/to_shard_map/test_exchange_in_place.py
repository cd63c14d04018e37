"""Exchanges that overwrite their operand, on a tile."""

from __future__ import annotations

import pytest

from reshard.lower import lower_plan
from reshard.lower.program import ExchangeInPlace
from reshard.lower.to_shard_map import exchange_in_place, shares_lie_in_order
from reshard.lower.to_shard_map.exchange_in_place import in_order
from reshard.plans.rules.cost import StepMode
from reshard.plans.rules.tile_view import TileView
from tests.lower.to_shard_map.on_xla import check_on_xla, one_step
from tests.sampling import sampled


@pytest.mark.fast(2)
@pytest.mark.parametrize("chunk", sampled([1, 2, 5, None], 2, None))
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("f32[{x}4, 16]", "f32[16, {x}4]"),
        ("f32[{x}4]", "f32[16]"),
        ("f32[16]", "f32[{x}4]"),
        ("f32[2{x}{y}2, 8]", "f32[2{y}{x}2, 8]"),
        ("f32[{x}4, {y}4]", "f32[{y}8, {x}2]"),
    ],
)
def test_exchanges_in_place(source: str, target: str, chunk: int | None):
    check_on_xla(one_step("exchange", source, target, StepMode(chunk, in_place=True), donate=True))


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("source", "target", "chunk"),
    [
        ("f32[{x}4, {y}4]", "f32[{y}8, {x}2]", None),
        ("f32[{x}4, 16]", "f32[16, {x}4]", 5),  # the last piece is shorter
        ("f32[{x}4]", "f32[16]", None),
        ("f32[2{x}{y}2, 8]", "f32[2{y}{x}2, 8]", 2),
    ],
)
def test_loops_over_rounds_and_shares(source: str, target: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exchange_in_place, "LOOPED", 2)
    check_on_xla(one_step("exchange", source, target, StepMode(chunk, in_place=True), donate=True))


def test_what_xla_can_overwrite():
    """Programs that pack and unpack nothing; for others XLA would hold the tile twice."""
    for source, target, able in (
        ("f32[{x}4]", "f32[{y}8]", False),
        ("f32[{x}4, {y}8]", "f32[{y}8, {x}4]", False),
        ("f32[2{x}2]", "f32[2{x:(2)2}{x:(1)2}2]", True),
    ):
        program = lower_plan(one_step("exchange", source, target, StepMode(None, in_place=True), donate=True))
        assert isinstance(program.instructions[0], ExchangeInPlace)
        assert shares_lie_in_order(program) == able, (source, target)


def test_slots_in_order_are_the_tile_itself():
    view = TileView((2, 3), (2, 3), (2, 3), (0, 1), ())
    rows = ((0, (0, None)), (1, (1, None)))
    assert in_order({0: rows, 1: rows}, view)
    assert in_order({0: rows[::-1]}, view)  # listed in another order, but in the same slots
    assert not in_order({0: rows, 1: ((0, (1, None)), (1, (0, None)))}, view)  # swapped on one device
    assert not in_order({0: rows[:1]}, view)  # a row is missing
    assert not in_order({0: tuple((at, (None, at)) for at in range(3))}, view)  # columns do not lie in one run
