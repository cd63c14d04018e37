"""Steps in parts: loops that several share, parts that overlap, parts in place, and how a TPU writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Literal

import reshard as rs
from reshard.errors import StepError
from reshard.lower import lower_plan
from reshard.lower.program import InParts
from reshard.lower.to_shard_map import part_loops, part_writers, run_collectives, run_exchange, tile_memory
from reshard.lower.to_shard_map.part_loops import (
    find_regions_on_tpu,
    find_tiles_on_tpu,
    group_instructions,
    group_steps,
    overlap_parts,
    writes_parts_over,
)
from reshard.lower.to_shard_map.part_writers import add_part_digit
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.plans.rules.split_steps import Cut, part_regions
from reshard.plans.rules.step_mode import StepMode
from reshard.plans.rules.tile_view import TileView
from reshard.types import Layout
from tests.lower.to_shard_map.on_xla import MESH, check_on_xla, one_step, stacked
from tests.oracle import check

# ---- steps that share a loop -----------------------------------------------------------------------

PLANS = [
    # Kinds and layouts, then the steps of each loop.
    (
        ["slice", "f32[{x}{y}8, 3, 5]", "permute", "f32[{y}{x}8, 3, 5]", "all_gather", "f32[{y}32, 3, 5]"],
        "f32[{x}16, 3, 5]",
        [3],
    ),
    # Parts of the exchange are rows, those of the gather columns.
    (["all_to_all", "f32[32, {x}2]", "all_gather", "f32[32, 8]"], "f32[{x}8, 8]", [1, 1]),
    # In two parts and in four.
    (["permute", "f32[{y}{x}8, 3, 5]", "all_gather/4", "f32[{y}32, 3, 5]"], "f32[{x}{y}8, 3, 5]", [1, 1]),
    # At once in between.
    (
        ["slice", "f32[{x}{y}8, 3, 5]", "permute/1", "f32[{y}{x}8, 3, 5]", "all_gather", "f32[{y}32, 3, 5]"],
        "f32[{x}16, 3, 5]",
        [1] * 3,
    ),
]


@pytest.mark.fast(3)
@pytest.mark.parametrize(("steps", "source", "sizes"), PLANS)
def test_steps_share_a_loop_where_their_parts_are_the_same(steps: list[str], source: str, sizes: list[int]):
    """In two parts each, unless a step says how many."""
    moves: list[StepSpec] = []
    for name, result in zip(steps[::2], steps[1::2], strict=True):
        kind, _, count = name.partition("/")
        moves.append(StepSpec(kind, Layout.parse(result, MESH), StepMode(parts=int(count or 2))))
    plan = chain(Layout.parse(source, MESH), moves[-1].result, moves)
    program = lower_plan(plan)
    assert [len(loop) for loop in group_steps(plan.steps)] == sizes
    assert [len(run) for run in group_instructions(program.instructions)] == sizes
    run, _ = stacked(program, MESH.axes)
    text = jax.jit(run).lower(jnp.zeros((MESH.size, *program.tile_shape))).as_text()
    in_parts = sum(step.mode.parts > 1 for step in plan.steps)
    assert text.count("stablehlo.while") == in_parts - sum(size - 1 for size in sizes)
    check_on_xla(plan)


# ---- parts that overlap ----------------------------------------------------------------------------

OVERLAPPING = [
    ("all_to_all", "f32[{x}5, 3, 24]", "f32[20, 3, {x}6]", (2, 3)),
    ("all_gather", "f32[12, {x}2, {y}5]", "f32[12, 8, 10]", (4,)),  # along dims behind the parts
    ("permute", "f32[{x}{y}4, 7]", "f32[{y}{x}4, 7]", (7,)),
    ("reduce_scatter", "f32[12, 7] + mean{y}", "f32[12, {y}4/7]", (4,)),
    ("all_gather", "f32[{x}{y}2, 12]", "f32[16, 12]", (6,)),
    ("all_to_all", "i32[{x}{y}2, 8, 5]", "i32[{x}4, {y}4, 5]", (5,)),
    ("reduce_scatter", "f32[8, 12] + sum{x}", "f32[{x}2, 12]", (3,)),
]


def overlapping(kind: str, source: str, target: str, count: int) -> Plan:
    return one_step(kind, source, target, StepMode(parts=count, overlap=True))


@pytest.mark.fast(4)
@pytest.mark.parametrize(("kind", "source", "target", "counts"), OVERLAPPING)
def test_every_part_that_overlaps_arrives(kind: str, source: str, target: str, counts: tuple[int, ...]):
    """Even and odd numbers of parts, from two on: a turn of the loop does two."""
    for count in counts:
        plan = overlapping(kind, source, target, count)
        check(plan)
        check_on_xla(plan)


def test_steps_before_the_last_are_done_with_what_is_packed():
    steps = [("slice", "f32[{x}{y}8, 3, 6]"), ("permute", "f32[{y}{x}8, 3, 6]"), ("all_gather", "f32[{y}32, 3, 6]")]
    moves = [StepSpec(kind, Layout.parse(result, MESH), StepMode(parts=6)) for kind, result in steps]
    moves[-1] = moves[-1]._replace(mode=StepMode(parts=6, overlap=True))
    check_on_xla(chain(Layout.parse("f32[{x}16, 3, 6]", MESH), moves[-1].result, moves))


@pytest.mark.parametrize(
    ("kind", "source", "target", "mode"),
    [
        ("permute", "f32[{x}{y}4, 9]", "f32[{y}{x}4, 9]", StepMode(overlap=True)),  # there is one part only
        ("slice", "f32[8, 4]", "f32[{x}2, 4]", StepMode(parts=2, overlap=True)),
        ("exchange", "f32[{x}4, 4]", "f32[16, {x}1]", StepMode(parts=2, overlap=True)),
    ],
)
def test_what_does_not_overlap_is_refused(kind: str, source: str, target: str, mode: StepMode):
    with pytest.raises(StepError, match="overlap=True"):
        one_step(kind, source, target, mode)


def test_two_parts_live_at_once():
    plan = overlapping("permute", "f32[{x}{y}4, 9]", "f32[{y}{x}4, 9]", 3)
    tile = 4 * 9 * 4
    assert plan.peak_bytes == 2 * tile + 2 * 2 * tile // 3
    assert rs.Plan.from_json(plan.to_json()) == plan
    assert rs.prove(plan)


def test_a_part_is_written_beside_the_next_but_before_the_one_after():
    """In a turn of the loop, cosine n writes a part while sine n sends the next one."""
    count = 7

    def write(filled: jax.Array, part: jax.Array, number: jax.Array) -> jax.Array:
        return filled.at[number].set(jnp.cos(part))

    traced = jax.make_jaxpr(lambda tile: overlap_parts(count, tile, lambda at: tile[at], jnp.sin, write))(
        jnp.zeros(count)
    )
    (loop,) = [one for one in traced.eqns if one.primitive.name == "scan"]
    body = loop.params["jaxpr"].jaxpr
    *_, filled, _ = body.invars
    before: dict[object, set[str]] = {filled: {"cos 0"}}
    waits: dict[str, set[str]] = {}
    for one in body.eqns:
        name = one.primitive.name
        needs = set[str]().union(*(before.get(of, ()) for of in one.invars if not isinstance(of, Literal)))
        if name in ("sin", "cos"):
            number = 1 + sum(other.startswith(name) for other in waits)
            waits[f"{name} {number}"] = needs
            needs = {*needs, f"{name} {number}"}
        before |= dict.fromkeys(one.outvars, needs)
    for number in (1, 2):
        assert f"cos {number - 1}" in waits[f"sin {number}"]
        assert f"cos {number}" not in waits[f"sin {number}"]
        assert f"sin {number}" not in waits[f"cos {number}"]


# ---- parts in place of each other ------------------------------------------------------------------

IN_PLACE = [
    ("permute", "f32[{x}{y}8, 3, 5]", "f32[{y}{x}8, 3, 5]", 2),
    ("all_to_all", "f32[{x}4, 16]", "f32[16, {x}4]", 2),  # columns of the operand, which are slots of the result
    ("all_to_all", "f32[16, {x}4]", "f32[{x}4, 16]", 4),  # the other way round
    ("exchange", "f32[{x}4, {y}8, 3]", "f32[{y}8, {x}4, 3]", 2),
    ("exchange", "f32[8, {x}{y}2, 6]", "f32[{x}2, {y}8, 6]", 3),
    ("all_reduce", "f32[6, 4] + sum{x}", "f32[6, 4]", 3),
]


def in_place(kind: str, source: str, target: str, count: int) -> Plan:
    return one_step(kind, source, target, StepMode(parts=count, in_place=True), donate=True)


@pytest.mark.fast(3)
@pytest.mark.parametrize(("kind", "source", "target", "count"), IN_PLACE)
def test_parts_in_place(kind: str, source: str, target: str, count: int):
    check_on_xla(in_place(kind, source, target, count))


def test_the_loops_in_place_carry_one_tile():
    """No loop carries a second buffer as large, nor is one made between them."""
    plan = in_place("all_to_all", "f32[16, 3, {x}1]", "f32[{x}4, 3, 4]", 4)
    program = lower_plan(plan)
    (step,) = program.instructions
    assert isinstance(step, InParts) and step.in_place
    assert part_regions(plan.source.tile_shape, step.take, plan.target.tile_shape, step.put).transpositions
    f, sharding = stacked(program, plan.source.mesh.axes)
    given = jax.ShapeDtypeStruct((8, *plan.source.tile_shape), "float32", sharding=sharding)
    text = f.lower(given).compile().as_text()
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
    assert [len(numbers) for numbers in group_instructions(lower_plan(plan).instructions)] == [1, 1]
    check_on_xla(plan)


def test_what_lies_in_whole_tiles_on_a_tpu():
    for take, operand, put, result, able in (
        (Cut(0, 1, 8, 8), (64, 512, 512), Cut(0, 8, 8, 8), (512, 512, 64), True),
        (Cut(0, 1, 8, 8), (64, 500, 480), Cut(0, 8, 8, 8), (512, 500, 60), False),  # no dim of 128 elements
        (Cut(1, 1, 64, 8), (64, 512, 512), Cut(1, 1, 64, 1), (512, 64, 512), False),  # pieces of one row
        (Cut(1, 1, 8, 64), (64, 512), Cut(1, 1, 8, 64), (64, 512), False),  # half of the lanes
        (Cut(0, 1, 8, 1024), (8192,), Cut(0, 1, 8, 1024), (8192,), False),  # a list has tiles of its own
    ):
        assert (find_regions_on_tpu(take, operand, put, result) is not None) == able, (operand, result)


# ---- as spelled for a TPU, on a CPU ----------------------------------------------------------------
#
# Lanes are few, so that small tiles have full ones. What starts unfilled holds NaN: each element must be written.


@pytest.fixture
def small_tpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Tiles of 2 x 4 elements instead of 8 x 128; returns the shapes of what started unfilled."""
    used: list[tuple[int, ...]] = []

    def branch(*arrays: Any, default: Callable[..., Any], **branches: Callable[..., Any]) -> Any:
        return branches.get("tpu", default)(*arrays)

    def used_memory(shape: Sequence[int], dtype: Any) -> jax.Array:
        used.append(tuple(shape))
        return jnp.full(tuple(shape), jnp.nan, dtype)

    monkeypatch.setattr(lax, "platform_dependent", branch)
    for module in (tile_memory, part_loops, part_writers, run_collectives):
        monkeypatch.setattr(module, "LANES", 4)
        monkeypatch.setattr(module, "SUBLANES", 2, raising=False)
    monkeypatch.setattr(tile_memory, "_choose_memory_order", getattr(tile_memory, "_choose_memory_order").__wrapped__)  # noqa: B009
    monkeypatch.setattr(run_exchange, "LOOPED", 2)
    for module in (part_loops, run_exchange):
        monkeypatch.setattr(module, "make_unfilled", used_memory)
    for module in (part_loops, part_writers, run_exchange, tile_memory):
        monkeypatch.setattr(module, "fix_layout", lambda tile, order=None: tile)  # layouts are a TPU's
    return used


PARTS, HALF, ONCE = StepMode(parts=2), StepMode(2), StepMode()
ON_TPU = [
    # An exchange too narrow for the order of the result; the first case is always in the fast tier.
    ("exchange", "f32[{x}{y}2, 8, 24]", "f32[16, 8, {y}{x}3]", ONCE),
    # Written into the result: its minor dim is whole in a message.
    ("all_to_all", "f32[16, {x}4, 8]", "f32[{x}4, 16, 8]", PARTS),
    ("all_to_all", "f32[{x}{y}2, 16, 16]", "f32[16, {x}4, {y}8]", PARTS),
    ("all_gather", "f32[16, {x}4, {y}8]", "f32[16, 16, 16]", PARTS),
    # Cut out and packed in one kernel, put together and written in another: along major dims, and rows of two.
    ("all_to_all", "f32[{x}8, 32, 8]", "f32[32, {x}8, 8]", StepMode(parts=4)),
    ("all_to_all", "f32[3, {y}{x}4, 16, 8]", "f32[3, 32, {y}{x}2, 8]", PARTS),
    ("all_to_all", "f32[16, {y}8, 6, 8]", "f32[{y}8, 16, 6, 8]", PARTS),
    # Put together with another dim last, since the result's minor dim is narrow in a message.
    ("all_to_all", "f32[16, 16, {x}3]", "f32[16, {x}4, 12]", PARTS),
    ("all_to_all", "f32[16, 16, {x}2, 5]", "f32[{x}4, 16, 8, 5]", PARTS),
    ("all_gather", "f32[16, 16, {x}3]", "f32[16, 16, 12]", PARTS),
    ("all_gather", "f32[16, {y}8, 4, {x}3]", "f32[16, 16, 4, 12]", PARTS),
    # Exchanges: in loops, its lanes in dim 1; in pieces; of messages that are narrow at both ends; where another dim is
    # minor in the operand; that read little of a part.
    ("exchange", "f32[16, 16, {x}{y}2]", "f32[16, {x}4, 16]", PARTS),
    ("exchange", "f32[{x}4, 16, {y}4]", "f32[16, {y}8, {x}2]", PARTS),
    ("exchange", "f32[{x}4, 8, 3]", "f32[16, {x}2, 3]", HALF),
    ("exchange", "f32[16, {y}4, {x}4]", "f32[16, {x}2, {y}8]", ONCE),
    ("exchange", "f32[24, 8, {x}{y}1]", "f32[{y}12, 8, {x}2]", ONCE),
    ("exchange", "f32[{y}16, 8, 16]", "f32[32, {y}4, {x}4]", PARTS),
    # Overlapping, in the result's order, and slots that change places.
    ("all_to_all", "f32[16, 16, {x}3]", "f32[16, {x}4, 12]", StepMode(parts=4, overlap=True)),
    ("permute", "f32[16, 8, {x}{y}3]", "f32[16, 8, {y}{x}3]", StepMode(parts=4, overlap=True)),
    ("all_to_all", "f32[16, {x}8, 8]", "f32[{x}4, 32, 8]", StepMode(parts=2, in_place=True)),
]


@pytest.mark.fast(4)
@pytest.mark.parametrize(("kind", "source", "target", "mode"), ON_TPU)
def test_each_element_is_written(kind: str, source: str, target: str, mode: StepMode, small_tpu: list[tuple[int, ...]]):
    check_on_xla(one_step(kind, source, target, mode, donate=mode.in_place))
    assert small_tpu


@pytest.mark.usefixtures("small_tpu")
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("f32[16, {x}4, 8]", "f32[{x}4, 16, 8]"),
        ("f32[3, {y}{x}4, 16, 8]", "f32[3, 32, {y}{x}2, 8]"),
        ("f32[{x}4, {y}8, 16]", "f32[16, 16, {x}{y}2]"),  # two digits number the blocks
    ],
)
def test_an_all_to_all_at_once_is_packed_by_xla(source: str, target: str):
    check_on_xla(one_step("all_to_all", source, target, ONCE))


LYING = [
    # By 2 x 4 tiles. Rows stay whole; a strided part; slots before, after, and both; another dim minor in memory.
    ("permute", "f32[{x}{y}8, 3, 2, 8]", "f32[{y}{x}8, 3, 2, 8]", 2, (1, 1), 1),
    ("all_to_all", "f32[{x}8, 64]", "f32[32, {x}16]", 4, (1, 1), 2),
    ("all_to_all", "f32[{x}4, 2, 16]", "f32[16, 2, {x}4]", 4, (1, 4), 2),
    ("all_to_all", "f32[16, 8, {x}6]", "f32[{x}4, 8, 24]", 4, (4, 1), 2),
    ("exchange", "f32[{x}4, {y}4, 8]", "f32[{y}8, {x}2, 8]", 2, (1, 2), 1),
    ("all_to_all", "f32[{x}4, 16, 2, 4]", "f32[16, {x}4, 2, 4]", 2, (1, 1), 1),
]


@pytest.mark.fast(3)
@pytest.mark.parametrize(("kind", "source", "target", "count", "slots", "unit"), LYING)
@pytest.mark.usefixtures("small_tpu")
def test_tiles_as_they_lie_on_a_tpu(kind: str, source: str, target: str, count: int, slots: tuple[int, int], unit: int):
    plan = in_place(kind, source, target, count)
    (step,) = lower_plan(plan).instructions
    assert isinstance(step, InParts)
    lying = find_tiles_on_tpu(step.take, plan.source.tile_shape, step.put, plan.target.tile_shape)
    assert lying is not None and len(lying.operand.unit) == unit
    where = lying.regions(step.take, plan.source.tile_shape, step.put, plan.target.tile_shape)
    assert (where.before, where.after) == slots
    check_on_xla(plan)


@pytest.mark.usefixtures("small_tpu")
def test_parts_in_place_are_written_straight_into_the_tile():
    """Where parts lie alike in both tiles: rows of 4 lanes, and another order of dims at one end."""
    for source, target, count, over in (
        ("f32[{x}4, 16, 2, 4]", "f32[16, {x}4, 2, 4]", 2, True),
        ("f32[{x}8, 64]", "f32[32, {x}16]", 4, False),  # by tiles of 2 x 4 elements
        ("f32[{x}4, 2, 16]", "f32[16, 2, {x}4]", 4, False),  # slots change places
    ):
        plan = in_place("all_to_all", source, target, count)
        (step,) = lower_plan(plan).instructions
        assert isinstance(step, InParts)
        assert writes_parts_over(step, plan.source.tile_shape, plan.target.tile_shape, plan.source.dtype) == over
        check_on_xla(plan)


def test_parts_between_no_two_digits_of_a_tile():
    assert add_part_digit(TileView((2, 8), (2, 8), (2, 4, 2), (0, 1, 1), (1,)), Cut(1, 2, 3, 4), (2, 24)) is None
