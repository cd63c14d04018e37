"""Strided blocks of views between flat tiles, against numpy's own transposes and slices."""

import random

import numpy as np

import reshard as rs
from reshard.lower.program import PutPart, Reorder, TakePart
from reshard.lower.to_mpi import StepMessages, schedule_device
from reshard.lower.to_mpi.rank_schedule import local_blocks
from reshard.plans.rules.view_steps import TileOrder
from tests.lower.to_mpi.elements import places
from tests.view_oracle import random_case


def run(step, tile: np.ndarray, result: np.ndarray) -> np.ndarray:
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
        run(Reorder(order), tile, np.zeros((6, 4))), tile.reshape(2, 2, 6).transpose(2, 0, 1).reshape(6, 4)
    )
    spans = ((1, 2), (2, 3))
    assert np.array_equal(run(TakePart(spans), tile, np.zeros((2, 3))), tile[1:3, 2:5])
    whole = np.full((4, 6), -1)
    whole[1:3, 2:5] = [[0, 1, 2], [3, 4, 5]]
    assert np.array_equal(run(PutPart(spans), np.arange(6).reshape(2, 3), np.full((4, 6), -1)), whole)


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
