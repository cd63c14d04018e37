"""Steps whose parts take each other's place, on a tile."""

from __future__ import annotations

import re

import jax
import pytest

from reshard.lower import lower_plan
from reshard.lower.program import InParts
from reshard.lower.to_shard_map import parts_in_place, tpu_layout
from reshard.lower.to_shard_map.parts import joined
from reshard.lower.to_shard_map.parts_in_place import PartsInPlace, on_tpu, regions_on_tpu
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.plans.rules.cost import StepMode
from reshard.plans.rules.parts import Cut, regions
from reshard.types.layout import Layout
from tests.lower.to_shard_map.on_xla import MESH, check_on_xla, one_step, stacked

STEPS = [
    ("permute", "f32[{x}{y}8, 3, 5]", "f32[{y}{x}8, 3, 5]", 2),
    ("all_to_all", "f32[{x}4, 16]", "f32[16, {x}4]", 2),  # columns of the operand, which are slots of the result
    ("all_to_all", "f32[16, {x}4]", "f32[{x}4, 16]", 4),  # the other way round
    ("exchange", "f32[{x}4, {y}8, 3]", "f32[{y}8, {x}4, 3]", 2),
    ("exchange", "f32[8, {x}{y}2, 6]", "f32[{x}2, {y}8, 6]", 3),
    ("all_reduce", "f32[6, 4] + sum{x}", "f32[6, 4]", 3),
]


def in_place(kind: str, source: str, target: str, parts: int) -> Plan:
    return one_step(kind, source, target, StepMode(parts=parts, in_place=True), donate=True)


@pytest.mark.fast(3)
@pytest.mark.parametrize(("kind", "source", "target", "parts"), STEPS)
def test_parts_in_place(kind: str, source: str, target: str, parts: int):
    check_on_xla(in_place(kind, source, target, parts))


TILED = [
    # By 2 x 4 tiles. Rows stay whole; a strided part; slots before, after, and both; another dim minor in memory.
    ("permute", "f32[{x}{y}8, 3, 2, 8]", "f32[{y}{x}8, 3, 2, 8]", 2, (1, 1), 1),
    ("all_to_all", "f32[{x}4, 16, 2, 4]", "f32[16, {x}4, 2, 4]", 2, (1, 1), 1),
    ("all_to_all", "f32[{x}8, 64]", "f32[32, {x}16]", 4, (1, 1), 2),
    ("all_to_all", "f32[{x}4, 2, 16]", "f32[16, 2, {x}4]", 4, (1, 4), 2),
    ("all_to_all", "f32[16, 8, {x}6]", "f32[{x}4, 8, 24]", 4, (4, 1), 2),
    ("exchange", "f32[{x}4, {y}4, 8]", "f32[{y}8, {x}2, 8]", 2, (1, 2), 1),
]


@pytest.mark.fast(3)
@pytest.mark.parametrize(("kind", "source", "target", "parts", "slots", "unit"), TILED)
def test_tiles_as_they_lie_on_a_tpu(
    kind: str,
    source: str,
    target: str,
    parts: int,
    slots: tuple[int, int],
    unit: int,
    monkeypatch: pytest.MonkeyPatch,
):
    """On a CPU, with tiles of 2 x 4 elements instead of 8 x 128."""
    seen: list[tuple[tuple[int, int], int]] = []

    def on(loop: PartsInPlace, tile: jax.Array) -> jax.Array:
        lying = on_tpu(loop.step.take, tile.shape, loop.step.put, loop.shape)
        assert lying is not None
        where = lying.regions(loop.step.take, tile.shape, loop.step.put, loop.shape)
        seen.append(((where.before, where.after), len(lying.operand.unit)))
        return loop.by(lying, tile)

    monkeypatch.setattr(tpu_layout, "_memory_order", getattr(tpu_layout, "_memory_order").__wrapped__)  # noqa: B009
    for module in (tpu_layout, parts_in_place):
        monkeypatch.setattr(module, "LANES", 4)
        monkeypatch.setattr(module, "SUBLANES", 2)
    monkeypatch.setattr(PartsInPlace, "on", on)
    check_on_xla(in_place(kind, source, target, parts))
    assert (slots, unit) in seen


def test_the_loops_carry_one_tile():
    """No loop carries a second buffer as large, nor is one made between them."""
    plan = in_place("all_to_all", "f32[16, 3, {x}1]", "f32[{x}4, 3, 4]", 4)
    program = lower_plan(plan)
    (step,) = program.instructions
    assert isinstance(step, InParts) and step.in_place
    assert regions(plan.source.tile_shape, step.take, plan.target.tile_shape, step.put).transpositions
    f, sharding = stacked(program, plan.source.mesh.axes)
    tiles = jax.ShapeDtypeStruct((8, *plan.source.tile_shape), "float32", sharding=sharding)
    text = f.lower(tiles).compile().as_text()
    carried = re.findall(r"= \(([^()]*(?:\([^()]*\)[^()]*)*)\) while\(", text)
    assert carried
    for shapes in carried:
        sizes = [eval(dims.replace(",", "*") or "1") for dims in re.findall(r"f32\[([\d,]*)\]", shapes)]
        assert max(sizes) == 48 and sum(sizes) <= 48 + 12, shapes


def test_steps_in_place_follow_one_another():
    """Their parts are the same, but each step needs the tile that all parts of the one before have made."""
    texts = ("f32[{x}{y}8, 3]", "f32[{y}{x}8, 3]", "f32[{x}{y}8, 3]")
    source, between, target = (Layout.parse(text, MESH) for text in texts)
    mode = StepMode(parts=2, in_place=True)
    steps = [StepSpec("permute", between, mode), StepSpec("permute", target, mode)]
    plan = chain(source, target, steps, donate=True)
    assert [len(numbers) for numbers in joined(lower_plan(plan).instructions)] == [1, 1]
    check_on_xla(plan)


def test_what_lies_in_whole_tiles_on_a_tpu():
    for take, operand, put, result, able in (
        (Cut(0, 1, 8, 8), (64, 512, 512), Cut(0, 8, 8, 8), (512, 512, 64), True),
        (Cut(0, 1, 8, 8), (64, 500, 480), Cut(0, 8, 8, 8), (512, 500, 60), False),  # no dim of 128 elements
        (Cut(1, 1, 64, 8), (64, 512, 512), Cut(1, 1, 64, 1), (512, 64, 512), False),  # pieces of one row
        (Cut(1, 1, 8, 64), (64, 512), Cut(1, 1, 8, 64), (64, 512), False),  # half of the lanes
        (Cut(0, 1, 8, 1024), (8192,), Cut(0, 1, 8, 1024), (8192,), False),  # a list has tiles of its own
    ):
        assert (regions_on_tpu(take, operand, put, result) is not None) == able, (operand, result)
