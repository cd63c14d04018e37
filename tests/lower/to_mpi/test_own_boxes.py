"""Exchanges of boxes by one device: which ones are worked out alone, and in which turns they go."""

from __future__ import annotations

import random

import numpy as np
import pytest

from reshard.lower.to_mpi import SendReceive
from reshard.lower.to_mpi.rank_schedule import is_closed, own_boxes
from reshard.plans.plan import Step
from reshard.plans.rules.step_mode import StepMode
from reshard.types import Layout, Mesh
from tests.layouts import random_crossing
from tests.lower.to_mpi.elements import put, taken
from tests.oracle import PADDING, tiles_of

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
    turns = {device: own_boxes(step, device).turns for device in devices}
    sends = {d: [(t.send.peer, d, t.send.blocks) for t in of if t.send] for d, of in turns.items()}
    receives = {d: [(d, *t.receive) for t in of if t.receive] for d, of in turns.items()}
    assert max(map(len, [*sends.values(), *receives.values()])) == step.cost.launches
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
    held, wanted = tiles_of(source), tiles_of(target)
    results = {device: np.full(target.tile_shape, PADDING) for device in wanted}
    own = {device: own_boxes(step, device) for device in {*held, *wanted}}
    for device, mine in own.items():
        if mine.local:
            put(results[device], mine.local, taken(held[device], mine.local))
    _deliver({device: mine.turns for device, mine in own.items()}, held, results)
    _deliver({device: mine.passed for device, mine in own.items()}, results, results)
    for device, tile in wanted.items():
        real = tile != PADDING
        assert np.array_equal(results[device][real], tile[real])


def _deliver(
    turns: dict[int, tuple[SendReceive, ...]], tiles: dict[int, np.ndarray], results: dict[int, np.ndarray]
) -> None:
    """All messages of a turn: what each device sends to another arrives there in the same order."""
    under_way: dict[tuple[int, int], list[list[int]]] = {}
    for device, of in turns.items():
        for peer, blocks in (turn.send for turn in of if turn.send):
            under_way.setdefault((device, peer), []).append(list(taken(tiles[device], blocks)))
    for device, of in turns.items():
        for peer, blocks in (turn.receive for turn in of if turn.receive):
            put(results[device], blocks, under_way[peer, device].pop(0))
    assert not any(under_way.values())
