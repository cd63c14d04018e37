"""The oracle of moves with a view: numpy's own reshape and transpose of a global index array, cut by `types.meaning`.

    reference(global index array of the source) -> the array that the target means

It shares no code with views: a case brings its reference, or it is built of atoms by numpy alone (`Case`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

import reshard as rs
from benchmarks.fuzz_moves import RandomView, random_view
from reshard.runtime import Account
from reshard.types import Layout
from reshard.types.meaning import meaning
from tests.layouts import MESHES, random_layout

PADDING = -7
KEPT = 10**6  # What the target's other parts hold: more than any index.


def cut(layout: Layout, array: np.ndarray) -> dict[int, np.ndarray]:
    """Every device's tile of a global array, `PADDING` where there is no element."""
    tiles = {}
    for device in layout.mesh.devices:
        tiles[device] = np.full(layout.tile_shape, PADDING, array.dtype)
        index = [np.asarray(along, np.int64) for along in meaning(layout, device)]
        local = [np.flatnonzero(along < size) for along, size in zip(index, layout.shape, strict=True)]
        true = [along[at] for along, at in zip(index, local, strict=True)]
        tiles[device][np.ix_(*local)] = array[np.ix_(*true)]
    return tiles


def check_move(
    move: rs.Move, reference: Callable[[np.ndarray], np.ndarray], at_bound: bool = True, **options: Any
) -> rs.Plan:
    """Plans a move, runs it on indices, and asserts what every device ends with, and bytes, launches and memory.

    With `at_bound`, that no device receives more than the lower bound.
    """
    plan = rs.plan(move, **options)
    run_plan(plan, move, reference)
    if at_bound:
        assert plan.received_bytes == plan.lower_bound_bytes, plan
    assert rs.Plan.from_json(plan.to_json()) == plan
    return plan


def run_plan(plan: rs.Plan, move: rs.Move, reference: Callable[[np.ndarray], np.ndarray]) -> None:
    """Runs a plan on indices against the reference."""
    source, target = move.source, move.target
    indices = np.arange(prod(source.shape), dtype=np.int64).reshape(source.shape).astype(source.dtype)
    into = None
    if move.view.into:
        held = np.arange(KEPT, KEPT + prod(target.shape)).reshape(target.shape).astype(target.dtype)
        into = cut(target, held)
    memory = Account(source.dtype)
    given = cut(source, indices)
    kept = {device: tile.copy() for device, tile in given.items()}
    moved = rs.simulate(plan, given, memory, into=into)
    wanted = cut(target, reference(indices).astype(target.dtype))
    assert set(moved) == set(target.mesh.devices)
    assert all(np.array_equal(tile, kept[device]) for device, tile in given.items()), "a source was written to"
    for device, tile in moved.items():
        real = cut(target, np.ones(target.shape, np.int64))[device] != PADDING
        assert tile.shape == target.tile_shape and tile.dtype == np.dtype(target.dtype), plan
        assert np.array_equal(tile[real], wanted[device][real]), f"device {device} of {plan}"
    assert memory.received_bytes == plan.received_bytes or len(plan.steps) > 1, plan
    assert memory.received_bytes <= plan.received_bytes, plan
    assert memory.launches == plan.launches, plan
    assert memory.peak_bytes <= plan.peak_bytes, f"{memory.peak_bytes} live: {plan}"


@dataclass(frozen=True)
class Case:
    """A random move, and its view as numpy understands it."""

    move: rs.Move
    view: RandomView

    def reference(self, array: np.ndarray) -> np.ndarray:
        """The target's array of a source's array."""
        shape = self.move.target.shape
        return self.view.apply(array, np.arange(KEPT, KEPT + prod(shape)).reshape(shape))


def random_case(choose: random.Random, dtype: str = "int64", parts: bool = True, most: int = 240) -> Case:
    """A random view of up to four atoms between random layouts, with parts taken or filled in a third of the cases."""
    mesh = choose.choice([mesh for mesh in MESHES if mesh.size <= 12])
    view = random_view(choose, most, 1 / 3 if parts else 0)
    source, target = (random_layout(choose, mesh, shape, dtype) for shape in view.shapes)
    return Case(rs.Move(source, target, **view.options), view)
