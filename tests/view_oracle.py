"""The oracle of moves with a view: numpy's own reshape and transpose of a global index array, cut by `types.meaning`.

    reference(global index array of the source) -> the array that the target means

It shares no code with views: a case brings its reference, or it is built of atoms by numpy alone (`Case`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

import reshard as rs
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
    """A random move: atoms with windows, grouped into the dims of both sides, and its reference in numpy."""

    move: rs.Move
    windows: tuple[tuple[int, int, int, int, int], ...]
    """Of each atom: its size in the source, the first value taken, how many, its size in the target, the first filled.
    """
    order: tuple[int, ...]
    text: str

    def reference(self, array: np.ndarray) -> np.ndarray:
        """The target's array of a source's array."""
        atoms = array.reshape([source for source, *_ in self.windows])
        part = atoms[tuple(slice(start, start + count) for _, start, count, _, _ in self.windows)]
        target = [self.windows[at] for at in self.order]
        full = np.arange(KEPT, KEPT + prod(self.move.target.shape)).reshape([size for *_, size, _ in target])
        full[tuple(slice(first, first + count) for _, _, count, _, first in target)] = part.transpose(self.order)
        return full.reshape(self.move.target.shape)


def random_case(choose: random.Random, dtype: str = "int64", parts: bool = True, most: int = 240) -> Case:
    """A random view of up to four atoms between random layouts, with parts taken or filled in a third of the cases."""
    mesh = choose.choice([mesh for mesh in MESHES if mesh.size <= 12])
    sizes: list[int] = []
    for _ in range(choose.randint(1, 4)):
        sizes.append(choose.choice([size for size in (1, 2, 3, 4, 5, 6, 8, 12) if size * prod(sizes) <= most]))
    windows = [(size, 0, size, size, 0) for size in sizes]
    take, into = {}, {}
    if parts and choose.randint(0, 2) == 0:
        at = choose.randrange(len(sizes))
        start = choose.randrange(sizes[at])
        stop = choose.randint(start + 1, sizes[at])
        if choose.random() < 0.5:
            take[f"a{at}"] = slice(start, stop)
            windows[at] = (sizes[at], start, stop - start, stop - start, 0)
        else:
            into[f"a{at}"] = slice(start, stop)
            windows[at] = (stop - start, 0, stop - start, sizes[at], start)
    order = list(range(len(sizes)))
    if choose.random() < 0.8:
        choose.shuffle(order)
    source, target = _grouped(choose, range(len(sizes))), _grouped(choose, order)
    shapes = [[prod(windows[at][side] for at in dim) for dim in dims] for dims, side in ((source, 0), (target, 3))]
    text = " -> ".join(" ".join(f"({' '.join(f'a{at}' for at in dim)})" for dim in dims) for dims in (source, target))
    both = [random_layout(choose, mesh, shape, dtype) for shape in shapes]
    move = rs.Move(*both, view=text, take=take, into=into, **{f"a{at}": size for at, size in enumerate(sizes)})
    return Case(move, tuple(windows), tuple(order), text)


def _grouped(choose: random.Random, atoms: Sequence[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    for at in atoms:
        if groups and choose.random() < 0.5:
            groups[-1].append(at)
        else:
            groups.append([at])
    return groups
