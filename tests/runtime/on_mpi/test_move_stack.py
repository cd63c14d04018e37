"""Stacks: which moves go together, within what a batch promises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

import reshard as rs
from reshard.runtime.on_mpi.move_stack import STACKED, Stack, lifted, stacks_of
from reshard.runtime.on_mpi.team import Facts

MESH = rs.Mesh(x=4)
TEAM = cast(Any, SimpleNamespace(size=4, rank=0, facts=Facts((0, 0, 0, 0), False)))


def stacks(moves: dict[str, tuple[str, str]], bounded: bool = False, **dtypes: str) -> list[Stack]:
    ends = {name: tuple(rs.Layout.parse(text, MESH) for text in pair) for name, pair in moves.items()}
    tiles = {name: np.zeros(pair[0].tile_shape, dtypes.get(name, pair[0].dtype)) for name, pair in ends.items()}
    return stacks_of(TEAM, rs.plan_tree(ends), tiles, bounded)


TURN = ("f32[{x}4, 16]", "f32[16, {x}4]")


def test_equal_moves_are_one_stack() -> None:
    made = stacks({"a": TURN, "b": ("f32[{x}2, 16]", "f32[8, {x}4]"), "c": TURN})
    assert [stack.names for stack in made] == [("a", "c"), ("b",)]
    assert str(made[0].request.source) == "f32[2, {x}4, 16]"


def test_large_tiles_move_alone() -> None:
    size = 2 * STACKED // 4
    move = (f"f32[{{x}}{size}]", f"f32[{4 * size}]")
    assert [stack.names for stack in stacks({"a": move, "b": move})] == [("a",), ("b",)]


def test_what_has_no_buffers_is_not_stacked() -> None:
    move = ("f32[16]", "f32[{x}4]")
    assert [stack.names for stack in stacks({"a": move, "b": move})] == [("a",), ("b",)]


def test_a_stack_is_bounded_by_its_batch() -> None:
    (stack,) = stacks({"a": TURN, "b": TURN}, bounded=True)
    assert stack.request.budget == 2 * 256 + 4 * 256
    (free,) = stacks({"a": TURN, "b": TURN})
    assert free.request.budget is None


def test_a_lifted_layout_is_whole_in_front() -> None:
    layout = lifted(rs.Layout.parse("f32[2{x}3/20] + sum{y}", rs.Mesh(x=4, y=2)), 5)
    assert str(layout) == "f32[5, 2{x}3/20] + sum{y}"
