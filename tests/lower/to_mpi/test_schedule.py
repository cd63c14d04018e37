"""Schedules without MPI: all devices in one process, element by element, against the oracle."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.errors import PlanError
from reshard.lower.program import PutPart, Reorder, TakePart
from reshard.lower.to_mpi import Overwrite, PeerBlocks, Reduce, Schedule, StepMessages, schedule_device
from reshard.lower.to_mpi.rank_schedule import is_closed, local_blocks, own_boxes
from reshard.plans.plan import Step, StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from reshard.plans.rules.view_steps import TileOrder
from reshard.types import Layout, Mesh
from tests.layouts import pairs, random_crossing
from tests.lower.to_mpi.elements import Tiles, assert_filled, places, put, taken
from tests.oracle import PADDING, finished, summands_of, tiles_of
from tests.view_oracle import random_case


def after_messages(tiles: Tiles, steps: dict[int, StepMessages], shape: tuple[int, ...]) -> Tiles:
    """One step on all devices: turn by turn, messages are received in the order in which they were sent."""
    results = {device: np.full(shape, PADDING) for device in steps}
    for device, step in steps.items():
        for block in step.local:
            put(results[device], (block,), taken(tiles[device], (block,)))
    for passed, held in ((False, tiles), (True, results)):
        wire: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
        for device, step in steps.items():
            before, _ = step.frames or (None, None)
            for sent in (turn.send for turn in (step.passed if passed else step.turns) if turn.send):
                wire[device, sent.peer].append(taken(held[device], sent.blocks, before))
        for device, step in steps.items():
            _, after = step.frames or (None, None)
            for received in (turn.receive for turn in (step.passed if passed else step.turns) if turn.receive):
                put(results[device], received.blocks, wire[received.peer, device].pop(0), after)
        assert not any(wire.values()), "messages that nobody receives"
    return results


def after_sum(tiles: Tiles, steps: dict[int, Reduce], shape: tuple[int, ...]) -> Tiles:
    """One reduction on all devices: each share is the sum of the blocks of all members."""
    results = {device: np.full(shape, PADDING) for device in tiles}
    for device, step in steps.items():
        for blocks in step.each:
            mine = blocks[step.group.index(device) if step.scatter else 0]
            before, after = step.frames
            summands = [taken(tiles[member], (mine,), before) for member in step.group]
            put(results[device], (mine,), [sum(values) for values in zip(*summands, strict=True)], after)
    return results


def after_overwrite(tiles: Tiles, steps: dict[int, Overwrite], shape: tuple[int, ...]) -> Tiles:
    """An exchange in one buffer a device: packed into slots, turn by turn from slot to slot, unpacked."""
    buffers = {device: np.full((step.slots, step.slot), PADDING) for device, step in steps.items()}
    for device, step in steps.items():
        for slot, block in step.pack:
            buffers[device][slot] = taken(tiles[device], (block,))
    for number in range(max((len(step.turns) for step in steps.values()), default=0)):
        turns = {device: step.turns[number] for device, step in steps.items() if number < len(step.turns)}
        sent = {
            (device, out.peer): buffers[device][out.slot, out.start : out.start + out.length].copy()
            for device, (out, _) in turns.items()
            if out
        }
        for device, (_, into) in turns.items():
            if into:
                buffers[device][into.slot, into.start : into.start + into.length] = sent.pop((into.peer, device))
        assert not sent, "messages that nobody receives in this turn"
    results = {device: np.full(shape, PADDING) for device in tiles}
    for device, step in steps.items():
        for slot, block in step.unpack:
            put(results[device], (block.reversed,), list(buffers[device][slot]))
    return results


RUN = {StepMessages: after_messages, Reduce: after_sum, Overwrite: after_overwrite}


def run(plan: rs.Plan, tiles: Tiles) -> Tiles:
    schedules: dict[int, Schedule] = {device: schedule_device(plan, device) for device in plan.source.mesh.devices}
    for at, step in enumerate(plan.steps):
        steps = {device: each.steps[at] for device, each in schedules.items()}
        kind = {type(each) for each in steps.values()}.pop()
        tiles = RUN[kind](tiles, steps, step.result.tile_shape)
        assert {each.tile_shapes[at] for each in schedules.values()} == {step.result.tile_shape}
    return tiles


@given(pairs(most_rank=2), st.booleans())
@settings(max_examples=60)
def test_a_schedule_moves_every_element(pair: tuple[Layout, Layout], tight: bool):
    source, target = pair
    plan = rs.plan(source, target, budget=source.tile_bytes + target.tile_bytes if tight and source.even else None)
    assert_filled(target, run(plan, tiles_of(source)))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[{x}6, 5] + sum{y}", "[{x}{y}3, 5]"),
        ("[5, {x}6] + sum{y}", "[5, {x}6]"),
        ("[7, 3] + sum{x,y}", "[{x}4/7, 3]"),
    ],
)
def test_summands_add_up_to_every_element(before: str, after: str):
    mesh = Mesh(x=2, y=2)
    source, target = (Layout.parse(f"s32{text}", mesh) for text in (before, after))
    tiles = run(rs.plan(source, target), summands_of(source))
    assert_filled(target, finished(target, tiles))


@pytest.mark.parametrize(
    ("mesh", "before", "after"),
    [
        (Mesh(x=2), "[{x}4, 8]", "[8, {x}4]"),
        (Mesh(x=3), "[{x}5, 6]", "[15, {x}2]"),
        (Mesh(x=2, y=3), "[{y}{x}2, 6]", "[12, {y}{x}1]"),
    ],
)
def test_a_donated_tile_is_overwritten_slot_by_slot(mesh: Mesh, before: str, after: str):
    source, target = (Layout.parse(f"s32{text}", mesh) for text in (before, after))
    plan = rs.plan(source, target, budget=source.tile_bytes + target.tile_bytes - 1, donate=True)
    assert isinstance(schedule_device(plan, 0).steps[0], Overwrite)
    assert_filled(target, run(plan, tiles_of(source)))


@pytest.mark.parametrize(
    ("kind", "before", "after", "parts"),
    [
        ("all_to_all", "[{x}6, 8]", "[12, {x}4]", 3),
        ("all_gather", "[6, {x}5, 3]", "[6, 10, 3]", 2),
        ("reduce_scatter", "[12, 10] + sum{x}", "[12, {x}5]", 4),
    ],
)
def test_parts_of_a_step_are_blocks_of_the_whole_tile(kind: str, before: str, after: str, parts: int):
    mesh = Mesh(x=2)
    source, target = (Layout.parse(f"s32{text}", mesh) for text in (before, after))
    steps = [StepSpec(kind, target, StepMode(parts=parts))]
    tiles = summands_of(source) if source.partial else tiles_of(source)
    assert_filled(target, run(chain(source, target, steps), tiles))


@pytest.mark.parametrize(
    ("before", "after", "packed"),
    [
        ("[6, 5] + sum{x}", "[{x}3, 5]", False),
        ("[6, 4] + sum{x}", "[6, {x}2]", True),
        ("[7, 3] + sum{x}", "[{x}4/7, 3]", True),
        ("[6, 5] + sum{x}", "[6, 5]", False),
    ],
)
def test_shares_that_do_not_follow_one_another_are_packed(before: str, after: str, packed: bool):
    mesh = Mesh(x=2)
    source, target = (Layout.parse(f"s32{text}", mesh) for text in (before, after))
    step = schedule_device(rs.plan(source, target), 1).steps[0]
    assert isinstance(step, Reduce)
    assert step.packed == packed
    assert not step.placed


def test_no_turn_waits_for_a_later_one():
    """In the k-th turn of a group everybody sends to one and receives from one, who do the same then."""
    mesh = Mesh(x=4)
    plan = rs.plan(Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[16, {x}4]", mesh))
    turns = {device: schedule_device(plan, device).steps[0].turns for device in mesh.devices}
    for k in range(3):
        for device in mesh.devices:
            send = turns[device][k].send
            assert isinstance(send, PeerBlocks)
            assert turns[send.peer][k].receive.peer == device


def test_the_turns_of_the_worked_example():
    """The table at the head of the module: device 1 of x=4 in an all-to-all."""
    mesh = Mesh(x=4)
    plan = rs.plan(Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[16, {x}4]", mesh))
    step = schedule_device(plan, 1).steps[0]
    assert [(turn.send.peer, turn.receive.peer) for turn in step.turns] == [(2, 0), (3, 3), (0, 2)]
    assert [turn.send.blocks[0].src for turn in step.turns] == [8, 12, 0]
    assert [turn.receive.blocks[0].dst for turn in step.turns] == [0, 48, 32]
    assert (step.local[0].src, step.local[0].dst) == (4, 16)
    assert {turn.send.blocks[0].elements for turn in step.turns} == {16}


def test_parts_that_take_each_others_place_are_refused():
    mesh = Mesh(x=4)
    source, target = Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[16, {x}4]", mesh)
    plan = chain(source, target, [StepSpec("all_to_all", target, StepMode(parts=2, in_place=True))], donate=True)
    with pytest.raises(PlanError, match="run on JAX alone"):
        schedule_device(plan, 0)


def test_only_checked_plans_are_lowered():
    with pytest.raises(PlanError, match="checked Plan"):
        schedule_device("f32[4]", 0)


@pytest.mark.parametrize(
    ("source", "target", "view"),
    [("f32[{x}4, 6]", "f32[{x}24]", "a b -> (a b)"), ("f64[8, 6] + sum{x}", "f64[48]", "a b -> (a b)")],
)
def test_a_rank_without_a_tile_has_the_steps_of_the_others(source: str, target: str, view: str):
    """Ranks drop steps that leave memory as it is, and meet between the rest: a rank outside must drop the same."""
    mesh = Mesh(x=2)
    plan = rs.plan(rs.Move(Layout.parse(source, mesh), Layout.parse(target, mesh), view=view))
    inside, outside = (schedule_device(plan, device).steps for device in (0, 7))
    assert [getattr(step, "aliases", False) for step in inside] == [getattr(step, "aliases", False) for step in outside]


# ---- Strided blocks of views between flat tiles, against numpy's own transposes and slices


def run_copies(step, tile: np.ndarray, result: np.ndarray) -> np.ndarray:
    """The result after a step's local copies, element by element."""
    after = result.reshape(-1).copy()
    for block in local_blocks(step, tile.shape, result.shape):
        for src, dst in zip(places(block, "src"), places(block, "dst"), strict=True):
            after[dst] = tile.reshape(-1)[src]
    return after.reshape(result.shape)


def test_copies():
    tile = np.arange(24).reshape(4, 6)
    order = TileOrder((2, 2, 6), (2, 0, 1))
    assert np.array_equal(
        run_copies(Reorder(order), tile, np.zeros((6, 4))), tile.reshape(2, 2, 6).transpose(2, 0, 1).reshape(6, 4)
    )
    spans = ((1, 2), (2, 3))
    assert np.array_equal(run_copies(TakePart(spans), tile, np.zeros((2, 3))), tile[1:3, 2:5])
    whole = np.full((4, 6), -1)
    whole[1:3, 2:5] = [[0, 1, 2], [3, 4, 5]]
    assert np.array_equal(run_copies(PutPart(spans), np.arange(6).reshape(2, 3), np.full((4, 6), -1)), whole)


def test_both_ends_of_a_message_agree():
    checked = 0
    for seed in range(120):
        move = random_case(random.Random(seed), most=96).move
        plan = rs.plan(move)
        if not any(step.kind == "exchange" and step.mode.view is not None for step in plan.steps):
            continue
        schedules = {device: schedule_device(plan, device) for device in move.source.mesh.devices}
        at = next(n for n, step in enumerate(plan.steps) if step.kind == "exchange" and step.mode.view is not None)
        for device, mine in schedules.items():
            step = mine.steps[at]
            assert isinstance(step, StepMessages)
            for turn in step.turns:
                if turn.send is not None:
                    other = [t.receive for t in schedules[turn.send.peer].steps[at].turns if t.receive]
                    assert (device, turn.send.blocks) in [(each.peer, each.blocks) for each in other]
                    checked += 1
    assert checked > 20


# ---- Exchanges of boxes by one device: which ones are worked out alone, and in which turns they go


MESH = Mesh(x=5)
BEFORE, AFTER = Layout.parse("f32[{x}3/13]", MESH), Layout.parse("f32[2{x}2/13]", MESH)
ELSEWHERE = Layout.parse("f32[2{y}3/13]", Mesh({"y": 3}, device_ids=[2, 4, 6]))
EVEN = Layout.parse("f32[{x}2, 10]", MESH), Layout.parse("f32[10, {x}2]", MESH)


@pytest.mark.parametrize(
    ("step", "device", "closed"),
    [
        (Step("exchange", BEFORE, AFTER), 0, True),
        (Step("exchange", BEFORE, AFTER), 7, False),
        (Step("exchange", BEFORE, AFTER, StepMode(chunk=1)), 0, True),
        (Step("exchange", BEFORE, ELSEWHERE), 7, True),
        (Step("exchange", BEFORE, ELSEWHERE, StepMode(relay=True)), 0, True),
        (Step("exchange", *EVEN), 0, False),
        (Step("all_to_all", *EVEN), 0, False),
    ],
)
def test_boxes_that_go_from_tile_to_tile(step: Step, device: int, closed: bool) -> None:
    assert is_closed(step, device) == closed


@pytest.mark.parametrize("target", [AFTER, ELSEWHERE])
@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_the_head_of_both_queues_is_the_same_message(target: Layout, chunk: int | None) -> None:
    """Ranks that send and receive in their order never wait for each other, with one message under way."""
    step = Step("exchange", BEFORE, target, StepMode(chunk=chunk))
    devices = {*BEFORE.mesh.devices, *target.mesh.devices}
    turns = {device: own_boxes(step, device, step.cost.scratch).turns for device in devices}
    sends = {d: [(t.send.peer, d, t.send.blocks) for t in of if t.send] for d, of in turns.items()}
    receives = {d: [(d, *t.receive) for t in of if t.receive] for d, of in turns.items()}
    most = max(map(len, [*sends.values(), *receives.values()]))
    # What no buffer stages is not cut: it is sent and received where it lies.
    assert most == (
        step.cost.launches if step.cost.scratch or chunk is None else Step("exchange", BEFORE, target).launches
    )
    while any(sends.values()):
        ready = [(d, to[0][0]) for d, to in sends.items() if to and receives[to[0][0]][0] == to[0]]
        assert ready, "every rank waits for another"
        for sender, receiver in ready:
            sends[sender].pop(0)
            receives[receiver].pop(0)
    assert not any(receives.values())


@pytest.mark.fast(20)
@pytest.mark.parametrize("relay", [False, True])
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("seed", range(20))
def test_every_element_arrives_on_other_devices(seed: int, chunk: int | None, relay: bool) -> None:
    source, target = random_crossing(random.Random(seed))
    step = Step("exchange", source, target, StepMode(chunk=chunk, relay=relay))
    devices = {*source.mesh.devices, *target.mesh.devices}
    own = {device: own_boxes(step, device, step.cost.scratch) for device in devices}
    assert_filled(target, after_messages(tiles_of(source), own, target.tile_shape))
