"""Lowered programs as data: groups partition the devices, pairs are bijections, rounds are matchings, as few
as the busiest device allows, and boxes cover what they must, once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.errors import PlanError
from reshard.lower import lower
from reshard.lower.exchange import Box, Transfer, colour
from reshard.lower.exchange_in_place import ExchangeInPlace
from reshard.lower.program import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Instruction,
    Permute,
    Program,
    ReduceScatter,
    Slice,
)
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from reshard.types.plan import Plan, Step, StepSpec, chain
from reshard.types.rules.cost import StepMode
from tests.layouts import pairs, random_pair

MESH = Mesh(x=4, y=2)


def instruction(kind: str, source: str, target: str, mesh: Mesh = MESH, mode: StepMode | None = None) -> Instruction:
    """The instruction of one step."""
    before, after = Layout.parse(source, mesh), Layout.parse(target, mesh)
    donate = mode is not None and mode.in_place
    (found,) = lower(chain(before, after, [StepSpec(kind, after, mode or StepMode())], donate)).instructions
    return found


# ---- by hand -------------------------------------------------------------------------------------


def test_slice_blocks():
    found = instruction("slice", "f32[16]", "f32[{x}{y}2]")
    assert isinstance(found, Slice)
    assert found.block == {device: device for device in range(8)}
    found = instruction("slice", "f32[16]", "f32[{y}{x}2]")
    assert isinstance(found, Slice)
    assert found.block == {2 * x + y: 4 * y + x for x in range(4) for y in range(2)}


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
    found = instruction("all_gather", source, target)
    assert isinstance(found, AllGather)
    assert found.groups == groups


def test_reduction_groups():
    found = instruction("reduce_scatter", "f32[16] + max{y}", "f32[{y}8]")
    assert isinstance(found, ReduceScatter)
    assert (found.groups, found.reduction) == (((0, 1), (2, 3), (4, 5), (6, 7)), "max")
    every = instruction("all_reduce", "f32[16] + mean{x}{y}", "f32[16]")
    assert isinstance(every, AllReduce)
    assert [sorted(g) for g in every.groups] == [list(range(8))]
    assert every.reduction == "mean"


def test_device_ids_are_those_of_the_mesh():
    mesh = Mesh({"x": 4}, device_ids=[10, 3, 7, 20])
    found = instruction("all_gather", "f32[{x}4]", "f32[16]", mesh)
    assert isinstance(found, AllGather)
    assert found.groups == ((10, 3, 7, 20),)


def test_permutation_pairs():
    found = instruction("permute", "f32[{x}{y}2]", "f32[{y}{x}2]")
    assert isinstance(found, Permute)
    # Device 2 x + y holds piece 2 x + y before, and needs piece 4 y + x.
    assert dict((to, sender) for sender, to in found.pairs) == {
        2 * x + y: 4 * y + x for x in range(4) for y in range(2)
    }


def test_rounds_of_an_all_to_all_by_exchange():
    found = instruction("exchange", "f32[{x}4, 16]", "f32[16, {x}4]", Mesh(x=4))
    assert isinstance(found, Exchange)
    assert [(t.sender, t.receiver) for t in found.local] == [(d, d) for d in range(4)]
    assert len(found.rounds) == 3
    for turn in found.rounds:
        assert sorted(t.sender for t in turn) == sorted(t.receiver for t in turn) == [0, 1, 2, 3]
    assert {(t.sender, t.receiver) for turn in found.rounds for t in turn} == {
        (a, b) for a in range(4) for b in range(4) if a != b
    }
    assert found.staged
    assert not instruction("exchange", "f32[{x}4]", "f32[16]", Mesh(x=4)).staged  # type: ignore[union-attr]


def test_chunks_are_no_larger_than_asked():
    found = instruction("exchange", "f32[{x}4, 16]", "f32[16, {x}4]", Mesh(x=4), StepMode(5))
    assert isinstance(found, Exchange)
    assert {t.elements for turn in found.rounds for t in turn} == {4}
    assert len(found.rounds) == 12


def test_only_plans_are_lowered():
    for other in (None, "plan", 3, (MESH,)):
        with pytest.raises(PlanError, match="lower takes a checked Plan"):
            lower(other)  # type: ignore[arg-type]


# ---- for any plan --------------------------------------------------------------------------------


def partition(program: Program, groups: tuple[tuple[int, ...], ...]) -> None:
    assert sorted(device for group in groups for device in group) == sorted(program.devices)
    assert len({len(group) for group in groups}) == 1


def matchings(rounds: tuple[tuple[Transfer, ...], ...]) -> None:
    """No device sends or receives twice in a round, and no round is for nothing."""
    for turn in rounds:
        assert turn
        assert len({t.sender for t in turn}) == len({t.receiver for t in turn}) == len(turn)
        assert any(t.sender != t.receiver for t in turn)


def busiest(rounds: tuple[tuple[Transfer, ...], ...]) -> int:
    """The most messages that one device sends or receives."""
    sent = Counter(t.sender for turn in rounds for t in turn)
    received = Counter(t.receiver for turn in rounds for t in turn)
    return max((*sent.values(), *received.values()), default=0)


def elements(view_digits: tuple[int, ...], spans: tuple[tuple[int, int], ...]) -> Iterator[int]:
    """The flat offsets in a tile of a box in its digits."""
    strides = [prod(view_digits[at + 1 :]) for at in range(len(view_digits))]
    for index in product(*(range(start, start + extent) for start, extent in spans)):
        yield sum(i * s for i, s in zip(index, strides, strict=True))


def global_index(layout: Layout, device: int, offset: int) -> tuple[int, ...]:
    """The global index of a flat offset in a tile."""
    found = []
    for dim, extent in zip(reversed(meaning(layout, device)), reversed(layout.tile_shape), strict=True):
        found.append(dim[offset % extent])
        offset //= extent
    return tuple(found[::-1])


def covers(step: Step, found: Exchange) -> None:
    """Each true element of each target tile is written once, from a device that holds that very element."""
    written: Counter[tuple[int, int]] = Counter()
    for transfer in (*found.local, *(t for turn in found.rounds for t in turn)):
        for box in transfer.boxes:
            for src, dst in zip(
                elements(found.send.digits, box.src), elements(found.receive.digits, box.dst), strict=True
            ):
                written[transfer.receiver, dst] += 1
                source = global_index(step.operand, transfer.sender, src)
                assert source == global_index(step.result, transfer.receiver, dst)
                assert all(i < n for i, n in zip(source, step.operand.shape, strict=True)), "padding is not data"
    for device in step.result.mesh.devices:
        for offset in range(prod(step.result.tile_shape)):
            index = global_index(step.result, device, offset)
            real = all(i < n for i, n in zip(index, step.result.shape, strict=True))
            assert written[device, offset] == real, f"{index} on {device}: {step.operand} -> {step.result}"


def sound(plan: Plan) -> Counter[str]:
    """Asserts what every lowered program keeps, and counts its instructions."""
    program = lower(plan)
    assert program.devices == plan.source.mesh.devices
    assert (program.tile_shape, program.dtype) == (plan.source.tile_shape, plan.source.dtype)
    assert program.tile_shapes == tuple(step.result.tile_shape for step in plan.steps)
    assert program.keep_source == (not plan.donate)
    for step, found in zip(plan.steps, program.instructions, strict=True):
        match found:
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
            case Exchange(_, _, local, rounds, _):
                matchings(rounds)
                assert all(t.sender == t.receiver for t in local)
                assert len(rounds) == step.launches == busiest(rounds)
                assert all(t.elements <= (step.mode.chunk or t.elements) for turn in rounds for t in turn)
                covers(step, found)
            case ExchangeInPlace():
                for turn in found.rounds:
                    assert len({t.sender for t in turn}) == len({t.receiver for t in turn}) == len(turn)
                assert len(found.rounds) == step.launches
                assert found.slot * found.slots <= max(prod(step.operand.tile_shape), prod(step.result.tile_shape))
                for places in (found.pack, found.unpack):
                    assert sorted(places) == sorted(program.devices)
                    assert all(len({slot for slot, _ in own}) == len(own) <= found.slots for own in places.values())
    return Counter(type(found).__name__ for found in program.instructions)


@settings(max_examples=200)
@given(pairs(most_rank=2), st.booleans())
def test_any_program_is_sound(pair: tuple[Layout, Layout], donate: bool):
    sound(rs.plan(*pair, donate=donate))


def test_random_programs_of_all_instructions_are_sound():
    choose, seen = random.Random(1), Counter[str]()
    for number in range(1500):
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
    assert all(seen[kind.__name__] >= 5 for kind in kinds), seen


def test_direct_exchanges_of_even_pairs_take_no_more_rounds_than_the_busiest_device():
    choose = random.Random(2)
    for _ in range(200):
        source, target = random_pair(choose, most_rank=2)
        moves = [StepSpec("exchange", target, StepMode(choose.choice((None, 1, 2, 5))))] if source != target else []
        sound(chain(source, target, moves))


# ---- colouring -----------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=60))
def test_colouring_uses_as_many_rounds_as_the_largest_degree(edges: list[tuple[int, int]]):
    """Any bipartite multigraph, not only those that layouts make."""
    transfers = [Transfer(a, b, (Box(((at, 1),), ((at, 1),)),)) for at, (a, b) in enumerate(edges)]
    turns = colour(transfers)
    for turn in turns:
        assert len({t.sender for t in turn}) == len({t.receiver for t in turn}) == len(turn) > 0
    assert sorted(t.boxes[0].src[0][0] for turn in turns for t in turn) == list(range(len(edges)))
    degrees = Counter(a for a, _ in edges), Counter(b for _, b in edges)
    assert len(turns) == max((n for degree in degrees for n in degree.values()), default=0)


def test_colouring_of_a_dense_random_graph():
    choose = random.Random(3)
    edges = [(choose.randrange(40), choose.randrange(40)) for _ in range(1500)]
    turns = colour([Transfer(a, b, ()) for a, b in edges])
    assert sum(map(len, turns)) == len(edges)
    assert len(turns) == max(
        (Counter(a for a, _ in edges) + Counter()).most_common(1)[0][1],
        Counter(b for _, b in edges).most_common(1)[0][1],
    )
