"""Schedules of trees: which moves go together, within what the tree's plan promises."""

from __future__ import annotations

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

import reshard as rs
from reshard.runtime.on_mpi.team import Facts
from reshard.runtime.on_mpi.tree_schedule import STACKED, BundledStacks, Part, SharedStack, Stack, lifted, schedule_of

MESH = rs.Mesh(x=4)
TURN = ("f32[{x}4, 16]", "f32[16, {x}4]")


def parts(moves: dict[str, tuple[str, str]], nodes: tuple[int, ...] = (0, 0, 0, 0), apart: bool = False) -> list[Part]:
    ends = {name: tuple(rs.Layout.parse(text, MESH) for text in pair) for name, pair in moves.items()}
    return schedule_of(rs.plan_tree(ends), Facts(nodes, False), apart)


def stacks(*given: Part) -> list[tuple[str, ...]]:
    return [stack.names for part in given for stack in (part.stacks if isinstance(part, BundledStacks) else (part,))]


def test_equal_moves_are_one_stack_of_one_bundle() -> None:
    (bundle,) = parts({"a": TURN, "b": ("f32[{x}2, 16]", "f32[8, {x}4]"), "c": TURN})
    assert isinstance(bundle, BundledStacks)
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
    assert sorted(
        name for part in made if isinstance(part, BundledStacks) for names in stacks(part) for name in names
    ) == [
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
    for part in schedule_of(tree, Facts(nodes, False)):
        assert isinstance(part, BundledStacks)
        live += sum(stack.plan.target.tile_bytes for stack in part.stacks)
        copied = sum(stack.plan.source.tile_bytes for stack in part.stacks if len(stack.names) > 1)
        assert live + copied + 2 * part.bundle.staging <= tree.peak_bytes


def test_a_lifted_layout_is_whole_in_front() -> None:
    layout = lifted(rs.Layout.parse("f32[2{x}3/20] + sum{y}", rs.Mesh(x=4, y=2)), 5)
    assert str(layout) == "f32[5, 2{x}3/20] + sum{y}"
