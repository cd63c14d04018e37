"""Lowered programs as data: groups partition the devices, pairs are bijections, rounds are matchings, as few as the
busiest device allows, and boxes cover what they must, once."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from math import prod

import numpy as np
import pytest

import reshard as rs
from reshard.errors import PlanError
from reshard.lower import lower_plan
from reshard.lower.exchange_rounds import ExchangeInPlace
from reshard.lower.program import (
    AllGather,
    AllReduce,
    AllToAll,
    CastTiles,
    Exchange,
    Permute,
    Program,
    PutPart,
    ReduceScatter,
    Reorder,
    Slice,
    TakePart,
    is_alias,
    join_instructions,
    join_launches,
    lower_batch,
    permute_pairs,
    transposing_cycles,
    transposing_passes,
)
from reshard.lower.program_traffic import program_traffic
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.layouts import random_pair
from tests.lower.covering import MESH, busiest, covers, matchings
from tests.sampling import sampled
from tests.trees import llama

# ---- by hand -------------------------------------------------------------------------------------


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


# ---- views ---------------------------------------------------------------------------------------

M4 = rs.Mesh(x=4)


def program_of_move(source: str, target: str, device: int | None = None, **options):
    return lower_plan(rs.plan(rs.Move(*(rs.Layout.parse(text, M4) for text in (source, target)), **options)), device)


def test_instructions():
    took = program_of_move("f32[3{x}2, 5]", "bf16[{x}2, 5]", view="(t h) d -> h d", take={"t": 1}, t=3, cast=True)
    assert [type(each) for each in took.instructions] == [Reorder, TakePart, CastTiles, Reorder]
    assert took.instructions[1].spans == ((1, 1), (0, 2), (0, 5))
    assert [is_alias(each) for each in took.instructions] == [True, False, False, True]
    put = program_of_move("f32[{x}2, 5]", "f32[3{x}2, 5]", view="h d -> (t h) d", into={"t": 1}, t=3)
    assert [type(each) for each in put.instructions] == [Reorder, PutPart, Reorder]


def test_an_exchange_of_one_device_has_the_rounds_of_all():
    whole = program_of_move("f32[{x}6]", "f32[{x}2]", view="(t h) -> h", take={"t": 1}, t=3).instructions[0]
    assert isinstance(whole, Exchange) and whole.viewed
    for device in M4.devices:
        mine = program_of_move("f32[{x}6]", "f32[{x}2]", device, view="(t h) -> h", take={"t": 1}, t=3).instructions[0]
        assert len(mine.rounds) == len(whole.rounds)
        for some, turn in zip(mine.rounds, whole.rounds, strict=True):
            assert some == tuple(t for t in turn if device in (t.sender, t.receiver))
    for turn in whole.rounds:
        for end in ("sender", "receiver"):
            devices = [getattr(transfer, end) for transfer in turn]
            assert len(set(devices)) == len(devices)


def test_traffic_is_counted_in_the_narrower_dtype():
    for source, target in (("f32[{x}4]", "bf16[16]"), ("bf16[{x}4]", "f32[16]"), ("f32[16] + sum{x}", "bf16[16]")):
        plan = rs.plan(rs.Move(*(rs.Layout.parse(text, M4) for text in (source, target)), cast=True))
        assert max(program_traffic(lower_plan(plan)).received.values()) == plan.received_bytes


# ---- batches -------------------------------------------------------------------------------------


def between(source: str, target: str, mesh: rs.Mesh = MESH, **options: object):
    return lower_plan(rs.plan(rs.Layout.parse(source, mesh), rs.Layout.parse(target, mesh), **options)).instructions


@pytest.mark.parametrize(
    "steps",
    [
        [Permute(((0, 1), (1, 0))), Permute(((0, 0), (1, 1)))],
        [AllReduce(((0, 1),), "sum"), AllReduce(((0, 1),), "max")],
        [AllReduce(((0, 1),), "sum"), Permute(((0, 1), (1, 0)))],
        [*between("f32[{x}4]", "f32[16]"), *between("f32[{y}8]", "f32[16]")],
        [
            *between("f32[{x}3/10]", "f32[{y}5]"),
            *between("f32[{x}3/11]", "f32[{y}6/11]"),
            Permute(((0, 0),)),
        ],
        [*between("f32[16]", "f32[{x}4]")] * 2,
    ],
)
def test_instructions_between_different_devices_are_refused(steps):
    with pytest.raises(PlanError):
        join_instructions(steps)


def test_only_a_checked_batch_is_lowered():
    with pytest.raises(PlanError, match="a checked Batch"):
        lower_batch(None)


def test_every_batch_of_a_model_is_lowered():
    for batch in rs.plan_tree(llama(MESH)).batches:
        programs = lower_batch(batch)
        assert len(programs) == len(batch.names)
        shares = [len(programs) > 1 and steps[0].cost.launches > 0 for steps in batch.steps]
        assert [each is not None for each in join_launches(programs)] == shares


# ---- the pairs of permutes -----------------------------------------------------------------------


def right(source: Layout, target: Layout) -> tuple[tuple[int, int], ...]:
    """The pairs, checked by meaning."""
    pairs = permute_pairs(source, target)
    devices = sorted(source.mesh.devices)
    assert sorted(sender for sender, _ in pairs) == sorted(receiver for _, receiver in pairs) == devices
    for sender, receiver in pairs:
        assert meaning(source, sender) == meaning(target, receiver)
    return pairs


def test_summands_stay_summands():
    """Two devices hold the same piece of different summands: they must not be taken for each other."""
    source, target = (Layout.parse(f"f32[{{{axis}}}2] + sum{{z}}", Mesh(x=2, y=2, z=2)) for axis in "xy")
    pairs = right(source, target)
    z = source.mesh.sub_axis("z")
    assert all(source.mesh.coordinate(a, z) == source.mesh.coordinate(b, z) for a, b in pairs)


def test_devices_in_another_order():
    choose = random.Random(1)
    for order in choose.sample(list(permutations(range(6))), 20):
        source = Layout.parse("f32[{x}{y}1]", Mesh(x=2, y=3))
        target = Layout.parse("f32[{x}{y}1]", Mesh({"x": 2, "y": 3}, device_ids=order))
        right(source, target)


def test_a_device_keeps_its_own_tile_where_it_can():
    """Replicas along y: four devices need what they hold, though others hold it too."""
    reordered = Mesh({"x": 2, "y": 4}, device_ids=[0, 1, 2, 7, 4, 5, 6, 3])
    pairs = right(Layout.parse("f32[{x}1]", Mesh(x=2, y=4)), Layout.parse("f32[{x}1]", reordered))
    assert {(d, d) for d in (0, 1, 2, 4, 5, 6)} <= set(pairs)
    assert {(3, 7), (7, 3)} <= set(pairs)


def test_no_permutation():
    with pytest.raises(PlanError, match="no device is left that holds what device"):
        permute_pairs(Layout.parse("f32[{x}3/10]", Mesh(x=4)), Layout.parse("f32[{x:(1)2}5]", Mesh(x=4)))


# ---- replica groups and block numbers, against coordinates counted one by one --------------------


def coordinates(mesh: Mesh, device: int, factors: list[tuple[int, int]]) -> tuple[int, ...]:
    """The device's coordinates, counted: along a factor, they change every `stride` positions."""
    position = mesh.devices.index(device)
    counted = []
    for stride, size in factors:
        values = [value for value in range(size) for _ in range(stride)]
        counted.append(values[position % len(values)])
    return tuple(counted)


# ---- slots transposed where they are -------------------------------------------------------------


def carried(slots: np.ndarray, stops: Sequence[int]) -> np.ndarray:
    """The slots after a hand that puts down what it has and takes up what is there, stop by stop."""
    slots, hand = slots.copy(), -1
    for at in stops:
        hand, slots[at] = slots[at], hand
    return slots


def test_every_small_matrix_is_transposed():
    for rows in range(1, 10):
        for columns in range(1, 10):
            matrix = np.arange(rows * columns)
            moved = carried(matrix, list(itertools.chain(*transposing_cycles(rows, columns))))
            assert np.array_equal(moved, matrix.reshape(rows, columns).T.reshape(-1)), (rows, columns)


@pytest.mark.parametrize(
    ("outer", "rows", "columns", "slot", "passes"),
    [(1, 8, 16, 1 << 20, 1), (1, 1536, 16, 1 << 13, 2), (3, 16, 1536, 1 << 12, 2), (1, 7, 11, 64, 1), (5, 1, 9, 64, 0)],
)
def test_small_slots_change_places_in_two_passes(outer: int, rows: int, columns: int, slot: int, passes: int):
    """As many as the first factor of the rows, or the second of the columns, at a time."""
    found = transposing_passes(outer, rows, columns, slot)
    assert len(found) == passes
    slots = np.arange(outer * rows * columns)
    for each in found:
        slots = slots.reshape(each.outer, each.rows * each.columns, -1)
        order = carried(np.arange(each.rows * each.columns), list(itertools.chain(*transposing_cycles(*each[1:]))))
        slots = slots[:, order].reshape(-1)
    expected = np.arange(outer * rows * columns).reshape(outer, rows, columns).swapaxes(1, 2)
    assert np.array_equal(slots, expected.reshape(-1))
    turns = sum(each.rows * each.columns for each in found)
    assert turns <= rows * columns and (passes < 2 or turns <= 1500)


def test_what_lies_right_is_not_touched():
    for rows, columns in ((1, 7), (7, 1)):
        assert not transposing_cycles(rows, columns)
    assert not {0, 23}.intersection(*transposing_cycles(4, 6))
    assert [len(cycle) for cycle in transposing_cycles(8, 8)] == [
        3
    ] * 28  # pairs that change places, each with a stop to come back to
