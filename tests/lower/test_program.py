"""Lowered programs as data: groups partition the devices, pairs are bijections, rounds are matchings, as few as the
busiest device allows, and boxes cover what they must, once."""

from __future__ import annotations

import random
from collections import Counter
from math import prod

import pytest

import reshard as rs
from reshard.errors import PlanError
from reshard.lower import lower_plan
from reshard.lower.exchange_rounds import ExchangeInPlace
from reshard.lower.program import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    InParts,
    Permute,
    Program,
    ReduceScatter,
    Slice,
)
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.plans.rules.split_steps import Cut
from reshard.plans.rules.step_mode import StepMode
from reshard.types import Mesh
from tests.layouts import random_pair
from tests.lower.covering import MESH, busiest, covers, instruction, matchings
from tests.sampling import sampled

# ---- by hand -------------------------------------------------------------------------------------


def test_slice_blocks():
    lowered = instruction("slice", "f32[16]", "f32[{x}{y}2]")
    assert isinstance(lowered, Slice)
    assert lowered.block == {device: device for device in range(8)}
    lowered = instruction("slice", "f32[16]", "f32[{y}{x}2]")
    assert isinstance(lowered, Slice)
    assert lowered.block == {2 * x + y: 4 * y + x for x in range(4) for y in range(2)}


@pytest.mark.parametrize(
    ("source", "target", "groups"),
    [
        ("f32[{x}4]", "f32[16]", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("f32[{y}8]", "f32[16]", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("f32[{x}{y}2]", "f32[16]", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("f32[{y}{x}2]", "f32[16]", ((0, 2, 4, 6, 1, 3, 5, 7),)),
        ("f32[{x}4]", "f32[{x:(1)2}8]", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("f32[{x:(1)2}8]", "f32[16]", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ],
)
def test_gather_groups(source: str, target: str, groups: tuple[tuple[int, ...], ...]):
    lowered = instruction("all_gather", source, target)
    assert isinstance(lowered, AllGather)
    assert lowered.groups == groups


def test_reduction_groups():
    lowered = instruction("reduce_scatter", "f32[16] + max{y}", "f32[{y}8]")
    assert isinstance(lowered, ReduceScatter)
    assert (lowered.groups, lowered.reduction) == (((0, 1), (2, 3), (4, 5), (6, 7)), "max")
    every = instruction("all_reduce", "f32[16] + mean{x}{y}", "f32[16]")
    assert isinstance(every, AllReduce)
    assert [sorted(g) for g in every.groups] == [list(range(8))]
    assert every.reduction == "mean"


def test_device_ids_are_those_of_the_mesh():
    mesh = Mesh({"x": 4}, device_ids=[10, 3, 7, 20])
    lowered = instruction("all_gather", "f32[{x}4]", "f32[16]", mesh)
    assert isinstance(lowered, AllGather)
    assert lowered.groups == ((10, 3, 7, 20),)


def test_a_step_in_parts_is_one_instruction_and_two_cuts():
    lowered = instruction("all_to_all", "f32[{x}4, 16]", "f32[16, {x}4]", Mesh(x=4), StepMode(parts=2))
    assert isinstance(lowered, InParts)
    assert isinstance(lowered.each, AllToAll)
    assert lowered.each.send.tile == (2, 16) and lowered.each.receive.tile == (8, 4)
    assert (lowered.take, lowered.put) == (Cut(0, 1, 2, 2), Cut(0, 4, 2, 2))


def test_only_plans_are_lowered():
    for other in (None, "plan", 3, (MESH,)):
        with pytest.raises(PlanError, match="lower takes a checked Plan"):
            lower_plan(other)  # type: ignore[arg-type]


# ---- for any plan --------------------------------------------------------------------------------


def partition(program: Program, groups: tuple[tuple[int, ...], ...]) -> None:
    assert sorted(device for group in groups for device in group) == sorted(program.devices)
    assert len({len(group) for group in groups}) == 1


def sound(plan: Plan) -> Counter[str]:
    """Asserts what every lowered program keeps, and counts its instructions."""
    program = lower_plan(plan)
    assert program.devices == plan.source.mesh.devices
    assert (program.tile_shape, program.dtype) == (plan.source.tile_shape, plan.source.dtype)
    assert program.tile_shapes == tuple(step.result.tile_shape for step in plan.steps)
    assert program.keep_source == (not plan.donate)
    for step, lowered in zip(plan.steps, program.instructions, strict=True):
        match lowered:
            case Slice(send, receive, block):
                assert sorted(block) == sorted(program.devices)
                assert set(block.values()) <= set(range(send.count))
                assert prod(send.block_shape) == receive.elements
            case AllGather(groups, send, receive):
                partition(program, groups)
                assert len(groups[0]) == receive.count
                assert send.elements * receive.count == receive.elements
            case AllToAll(groups, send, receive):
                partition(program, groups)
                assert len(groups[0]) == send.count == receive.count
                assert send.elements == receive.elements
            case ReduceScatter(groups, send, receive, reduction):
                partition(program, groups)
                assert len(groups[0]) == send.count
                assert reduction == step.operand.reduction
                assert receive.elements * send.count == send.elements
            case AllReduce(groups, reduction):
                partition(program, groups)
                assert reduction == step.operand.reduction
            case Permute(pairs):
                assert sorted(s for s, _ in pairs) == sorted(r for _, r in pairs) == sorted(program.devices)
            case Exchange(local=local, rounds=rounds):
                matchings(rounds)
                assert all(t.sender == t.receiver for t in local)
                assert len(rounds) == step.launches == busiest(rounds)
                assert all(t.elements <= (step.mode.chunk or t.elements) for turn in rounds for t in turn)
                covers(step, lowered)
            case ExchangeInPlace():
                for turn in lowered.rounds:
                    assert len({t.sender for t in turn}) == len({t.receiver for t in turn}) == len(turn)
                assert len(lowered.rounds) == step.launches
                assert lowered.slot * lowered.slots <= max(prod(step.operand.tile_shape), prod(step.result.tile_shape))
                for places in (lowered.pack, lowered.unpack):
                    assert sorted(places) == sorted(program.devices)
                    assert all(len({slot for slot, _ in own}) == len(own) <= lowered.slots for own in places.values())
    return Counter(type(lowered).__name__ for lowered in program.instructions)


@pytest.mark.parametrize("count", sampled([300, 1500], 300))
def test_random_programs_of_all_instructions_are_sound(count: int):
    choose, seen = random.Random(1), Counter[str]()
    for number in range(count):
        source, target = random_pair(choose, "float32", partial=number % 4 == 0, most_rank=2)
        plan = rs.plan(source, target, donate=number % 2 == 0)
        seen += sound(plan)
        if not source.partial and number % 3 == 0:
            try:
                tight = rs.plan(source, target, budget=plan.floor_bytes, donate=plan.donate)
            except rs.errors.BudgetError as error:
                tight = rs.plan(source, target, budget=error.smallest, donate=plan.donate)
            seen += sound(tight)
    kinds = (Slice, AllGather, AllToAll, ReduceScatter, AllReduce, Permute, Exchange, ExchangeInPlace)
    assert all(seen[kind.__name__] >= count // 300 for kind in kinds), seen


def test_direct_exchanges_of_even_pairs_take_no_more_rounds_than_the_busiest_device():
    choose = random.Random(2)
    for _ in range(100):
        source, target = random_pair(choose, most_rank=2)
        moves = [StepSpec("exchange", target, StepMode(choose.choice((None, 1, 2, 5))))] if source != target else []
        sound(chain(source, target, moves))
