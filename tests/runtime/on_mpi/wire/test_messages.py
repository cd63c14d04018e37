"""Messages of a step: sender and receiver cut them alike, and staging bounds their size."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.lower.to_mpi import Axis, Block, StepMessages, schedule
from reshard.runtime.on_mpi.wire import messages as module
from reshard.runtime.on_mpi.wire.messages import between, mean_run, messages
from reshard.types import Layout, Mesh
from tests.layouts import pairs
from tests.lower.to_mpi.elements import places


@given(pairs(most_rank=2), st.sampled_from([1, 8, 4096]))
@settings(max_examples=40)
def test_both_ends_cut_messages_alike(pair: tuple[Layout, Layout], scratch: int):
    source, target = pair
    plan = rs.plan(source, target)
    ranks = {device: device for device in source.mesh.devices}
    schedules = {device: schedule(plan, device) for device in source.mesh.devices}
    for at, step in enumerate(plan.steps):
        sent, received = defaultdict(list), defaultdict(list)
        for device, each in schedules.items():
            if not isinstance(each.steps[at], StepMessages):
                return
            shapes = (each.tile_shape, *each.tile_shapes)
            mine = each.steps[at].__class__(each.steps[at].local, each.steps[at].turns, scratch)
            cut = messages(mine, ranks, shapes[at], shapes[at + 1], 4, step.received_bytes)
            for chunk in cut.sends.chunks:
                sent[device, chunk.peer].append(chunk.elements)
            for chunk in cut.receives.chunks:
                received[chunk.peer, device].append(chunk.elements)
        assert sent == received


ROW = Block((0,), (0,), (Axis(0, 1 << 18, 1, 1),))


@pytest.mark.parametrize(
    ("staging", "count", "largest"),
    [
        (0, 1, 1 << 18),  # unstaged: one message from tile to tile
        (1 << 18, 4, 1 << 16),  # a quarter each, so that four are under way
        (1 << 15, 16, 1 << 14),  # not below 64 KiB for that
        (100, 2622, 100),  # but never above the staging
    ],
)
def test_the_size_of_messages(staging: int, count: int, largest: int):
    cut = between([(1, [ROW])], [(2, [ROW])], (), (1 << 18,), (1 << 18,), 4, staging)
    for side in (cut.sends, cut.receives):
        sizes = [chunk.elements for chunk in side.chunks]
        assert (len(sizes), max(sizes), sum(sizes)) == (count, largest, 1 << 18)


def test_unstaged_messages_stay_below_what_mpi_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "DIRECT", 1 << 16)
    cut = between([(1, [ROW])], [], (), (1 << 18,), (1 << 18,), 4, 0)
    assert {chunk.elements for chunk in cut.sends.chunks} == {1 << 14}


def test_all_that_is_received_is_held_if_there_is_room():
    mesh = Mesh(x=3)
    plan = rs.plan(Layout.parse("f32[{x}3, 9]", mesh), Layout.parse("f32[9, {x}3]", mesh))
    step = schedule(plan, 0).steps[0]
    ranks = dict.fromkeys(range(3), 0)
    for scratch, held in ((2 * 72, True), (2 * 71, False), (0, False)):
        mine = StepMessages(step.local, step.turns, scratch)
        assert messages(mine, ranks, (3, 9), (9, 3), 4, 72).held == held


@pytest.mark.parametrize("shapes", [((6, 8), None), (None, (5, 12)), ((6, 8), (5, 12))])
def test_the_mean_run_is_that_of_the_addresses(shapes):
    """Neighbours in the order of a block are in one run if their addresses follow one another at both ends."""
    block = Block((1, 0), (0, 2), (Axis(0, 3, 1, 1), Axis(1, 8, 1, 1)))
    ends = [
        [at[0] * shape[1] + at[1] for at in places(block, end)]
        for end, shape in zip(("src", "dst"), shapes, strict=True)
        if shape
    ]
    breaks = sum(
        any(after[k] != before[k] + 1 for k in range(len(ends)))
        for before, after in itertools.pairwise(zip(*ends, strict=True))
    )
    assert mean_run([block], *shapes) == block.elements / (1 + breaks)
    assert mean_run([], *shapes) == 0
