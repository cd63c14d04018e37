"""Bundles: the hops of plans; on several ranks, the topics of `tests.mpi.trees` run them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

import reshard as rs
from reshard.runtime.on_mpi.bundle import Bundle, Hop, hops_of
from reshard.runtime.on_mpi.team import Facts
from tests.mpi import running

TRAINER, SERVER = rs.Mesh(fsdp=4), rs.Mesh({"tp": 2, "rep": 2}, device_ids=[4, 5, 6, 7])


def plan(source: str, target: str, **options) -> rs.Plan:
    return rs.plan(rs.Layout.parse(source, TRAINER), rs.Layout.parse(target, SERVER), **options)


def test_a_plan_that_gathers_has_a_hop_for_each_step_between_nodes_and_one_inside() -> None:
    gathers = plan("f32[{fsdp}4, 8]", "f32[16, {tp}4]")
    assert [step.kind for step in gathers.steps] == ["exchange", "all_gather"]
    hops = hops_of(gathers, True)
    assert hops is not None
    assert [(hop.source, hop.target) for hop in hops] == [(step.operand, step.result) for step in gathers.steps]
    assert hops_of(gathers, False) == (Hop(gathers.source, gathers.target),)


def test_sums_and_casts_and_relays_cut_by_a_budget_have_none() -> None:
    assert hops_of(plan("f32[16] + sum{fsdp}", "f32[{tp}8]"), False) is None
    ends = rs.Layout.parse("f32[12]", rs.Mesh(x=1)), rs.Layout.parse("f32[12]", rs.Mesh(d=5))
    cut = rs.plan(*ends, budget=2 * 48 + 8)
    assert cut.steps[0].mode.relay and cut.steps[0].mode.chunk
    assert hops_of(cut, True) is None
    ends = rs.Layout.parse("f32[{fsdp}4]", TRAINER), rs.Layout.parse("bf16[16]", TRAINER)
    assert hops_of(rs.plan(rs.Move(*ends, cast=True)), False) is None


def test_a_move_through_a_view_is_one_hop() -> None:
    source, target = rs.Layout.parse("f32[{fsdp}3]", TRAINER), rs.Layout.parse("f32[{tp}2, 3]", SERVER)
    (hop,) = hops_of(rs.plan(rs.Move(source, target, view="(a b) -> a b")), False) or ()
    assert hop.form is not None and not hop.fills


def test_what_goes_to_a_peer_is_one_message() -> None:
    ends = [plan("f32[{fsdp}4, 8]", "f32[{tp}8, 8]"), plan("f32[{fsdp}2]", "f32[{tp}4]")]
    routes = tuple((Hop(each.source, each.target),) for each in ends)
    facts = Facts((0,) * 4 + (1,) * 4, False)
    for rank in range(8):
        part = Bundle(routes, 4, 1 << 20).part(0, (False, False), rank, facts)
        for side in (part.messages.sends, part.messages.receives):
            peers = [chunk.peer for chunk in side.chunks]
            assert len(peers) == len(set(peers))
            assert sum(len(each.chunks) for each in side.sides) == 2 * len(peers)


@pytest.mark.slow
def test_bundles_on_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_MPI_NODES", "3")
    running.check("trees.across_sampled", 6, tmp_path)
