"""Schedules of trees: which moves go together, within what the tree's plan promises."""

from __future__ import annotations

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.mpi import redistribute
from reshard.runtime.on_mpi.launches import (
    STACKED,
    Bundle,
    Hop,
    Launch,
    SharedStack,
    Stack,
    lifted,
    list_hops,
    list_launches,
)
from reshard.runtime.on_mpi.team import Facts

MESH = rs.Mesh(x=4)
TURN = ("f32[{x}4, 16]", "f32[16, {x}4]")


def parts(
    moves: dict[str, tuple[str, str]], nodes: tuple[int, ...] = (0, 0, 0, 0), apart: bool = False
) -> list[Launch]:
    ends = {name: tuple(rs.Layout.parse(text, MESH) for text in pair) for name, pair in moves.items()}
    return list_launches(rs.plan_tree(ends), Facts(nodes, False), apart)


def stacks(*given: Launch) -> list[tuple[str, ...]]:
    return [stack.names for part in given for stack in (part.stacks if isinstance(part, Bundle) else (part,))]


def test_equal_moves_are_one_stack_of_one_bundle() -> None:
    (bundle,) = parts({"a": TURN, "b": ("f32[{x}2, 16]", "f32[8, {x}4]"), "c": TURN})
    assert isinstance(bundle, Bundle)
    assert stacks(bundle) == [("a", "c"), ("b",)]
    assert str(bundle.stacks[0].plan.source) == "f32[2, {x}4, 16]"


def test_results_with_memory_of_their_own_are_taken_from_stacks_on_one_node_only() -> None:
    moves = {"a": TURN, "b": TURN, "s": ("f32[16] + sum{x}", "f32[{x}4]"), "t": ("f32[16] + sum{x}", "f32[{x}4]")}
    shared, *sums = parts(moves, apart=True)
    assert isinstance(shared, SharedStack) and shared.names == ("a", "b") and shared.plan.source.shape == (2, 16, 16)
    assert stacks(*shared.alone()) == [("a",), ("b",)]
    assert stacks(*sums) == [("s",), ("t",)]
    assert stacks(*parts({"a": TURN, "b": TURN}, (0, 0, 1, 1), apart=True)) == [("a",), ("b",)]


def test_large_tiles_move_alone() -> None:
    size = 2 * STACKED // 4
    move = (f"f32[{{x}}{size}]", f"f32[{4 * size}]")
    assert stacks(*parts({"a": move, "b": move})) == [("a",), ("b",)]


def test_what_has_no_buffers_is_not_stacked() -> None:
    move = ("f32[16]", "f32[{x}4]")
    assert stacks(*parts({"a": move, "b": move})) == [("a",), ("b",)]


def test_sums_run_the_steps_of_their_plan_and_the_rest_is_bundled_by_dtype() -> None:
    moves = {"a": TURN, "s": ("f32[16] + sum{x}", "f32[{x}4]"), "b": TURN, "h": ("bf16[{x}4]", "bf16[16]")}
    made = parts(moves, (0, 0, 1, 1))
    assert [stacks(part) for part in made if isinstance(part, Stack)] == [[("s",)]]
    assert sorted(name for part in made if isinstance(part, Bundle) for names in stacks(part) for name in names) == [
        "a",
        "b",
        "h",
    ]


@pytest.mark.parametrize("nodes", [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 3)])
def test_what_messages_and_copies_take_is_within_the_promise(nodes: tuple[int, ...]) -> None:
    whole = ("f32[{x}64]", "f32[256]")
    ends = {f"{at}{name}": pair for at in range(30) for name, pair in {"t": TURN, "w": whole}.items()}
    layouts = {name: tuple(rs.Layout.parse(text, MESH) for text in pair) for name, pair in ends.items()}
    tree = rs.plan_tree(layouts)
    live = sum(plan.source.tile_bytes for plan in tree.plans.values())
    for part in list_launches(tree, Facts(nodes, False)):
        assert isinstance(part, Bundle)
        live += sum(stack.plan.target.tile_bytes for stack in part.stacks)
        copied = sum(stack.plan.source.tile_bytes for stack in part.stacks if len(stack.names) > 1)
        assert live + copied + 2 * part.staging <= tree.peak_bytes


def test_a_lifted_layout_is_whole_in_front() -> None:
    layout = lifted(rs.Layout.parse("f32[2{x}3/20] + sum{y}", rs.Mesh(x=4, y=2)), 5)
    assert str(layout) == "f32[5, 2{x}3/20] + sum{y}"


TRAINER, SERVER = rs.Mesh(fsdp=4), rs.Mesh({"tp": 2, "rep": 2}, device_ids=[4, 5, 6, 7])


def plan(source: str, target: str, **options) -> rs.Plan:
    return rs.plan(rs.Layout.parse(source, TRAINER), rs.Layout.parse(target, SERVER), **options)


def test_a_plan_that_gathers_has_a_hop_for_each_step_between_nodes_and_one_inside() -> None:
    gathers = plan("f32[{fsdp}4, 8]", "f32[16, {tp}4]")
    assert [step.kind for step in gathers.steps] == ["exchange", "all_gather"]
    hops = list_hops(gathers, True)
    assert hops is not None
    assert [(hop.source, hop.target) for hop in hops] == [(step.operand, step.result) for step in gathers.steps]
    assert list_hops(gathers, False) == (Hop(gathers.source, gathers.target),)


def test_sums_and_casts_and_relays_cut_by_a_budget_have_none() -> None:
    assert list_hops(plan("f32[16] + sum{fsdp}", "f32[{tp}8]"), False) is None
    ends = rs.Layout.parse("f32[12]", rs.Mesh(x=1)), rs.Layout.parse("f32[12]", rs.Mesh(d=5))
    cut = rs.plan(*ends, budget=2 * 48 + 8)
    assert cut.steps[0].mode.relay and cut.steps[0].mode.chunk
    assert list_hops(cut, True) is None
    ends = rs.Layout.parse("f32[{fsdp}4]", TRAINER), rs.Layout.parse("bf16[16]", TRAINER)
    assert list_hops(rs.plan(rs.Move(*ends, cast=True)), False) is None


def test_a_move_through_a_view_is_one_hop() -> None:
    source, target = rs.Layout.parse("f32[{fsdp}3]", TRAINER), rs.Layout.parse("f32[{tp}2, 3]", SERVER)
    (hop,) = list_hops(rs.plan(rs.Move(source, target, view="(a b) -> a b")), False) or ()
    assert hop.form is not None and not hop.fills


def test_what_goes_to_a_peer_is_one_message() -> None:
    ends = [plan("f32[{fsdp}4, 8]", "f32[{tp}8, 8]"), plan("f32[{fsdp}2]", "f32[{tp}4]")]
    routes = tuple((Hop(each.source, each.target),) for each in ends)
    facts = Facts((0,) * 4 + (1,) * 4, False)
    for rank in range(8):
        part = Bundle((), routes, 4, 1 << 20).part(0, (False, False), rank, facts)
        for side in (part.messages.sends, part.messages.receives):
            peers = [chunk.peer for chunk in side.chunks]
            assert len(peers) == len(set(peers))
            assert sum(len(each.chunks) for each in side.sides) == 2 * len(peers)


@pytest.mark.parametrize("dtype", ["M8[s]", "uint64", [("a", "i4"), ("b", "f4")]])
def test_equal_moves_of_elements_without_a_name_keep_their_dtypes(dtype: object) -> None:
    source, target = rs.Layout.parse("u64[4{x}1]", rs.Mesh(x=1)), rs.Layout.parse("u64[4]", rs.Mesh(y=1))
    words = np.arange(4, dtype="u8")
    moved = redistribute({"a": words.view(dtype), "b": words}, source, target, MPI.COMM_SELF)
    assert moved["a"].dtype == np.dtype(dtype) and np.array_equal(moved["a"].view("u8"), words)
    assert moved["b"].dtype == np.uint64
