"""Exchanges of tiles with their dims in another order: the same elements, transposed, by the numpy runtime."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from reshard.lower import lower_plan
from reshard.lower.program import Exchange
from reshard.lower.to_shard_map.run_exchange import find_box_extents, reorder_exchange
from reshard.plans.plan import StepSpec, chain
from reshard.runtime import run
from reshard.types import Layout, Mesh
from tests.oracle import source_tiles


@pytest.mark.parametrize(
    ("source", "target", "extents"),
    [
        ("f32[{x}4, 16, 6]", "f32[16, {y}8, 6]", [4, 8, 6]),
        ("f32[16, 4, {x}{y}3]", "f32[{y}{x}2, 4, 24]", [2, 4, 3]),
        ("f32[{x}5/17, 6, 4]", "f32[17, {x}2/6, 4]", None),  # in boxes of several extents
    ],
)
def test_an_exchange_of_transposed_tiles(source: str, target: str, extents: list[int] | None):
    mesh = Mesh(x=4, y=2)
    before, after = Layout.parse(source, mesh), Layout.parse(target, mesh)
    plan = chain(before, after, [StepSpec("exchange", after)])
    program, tiles = lower_plan(plan), source_tiles(plan)
    (step,) = program.instructions
    assert isinstance(step, Exchange)
    assert find_box_extents(step) == extents
    moved = run(program, tiles)
    for order in itertools.permutations(range(3)):
        other = replace(
            program,
            tile_shape=tuple(program.tile_shape[dim] for dim in order),
            instructions=(reorder_exchange(step, order),),
            tile_shapes=(tuple(program.tile_shapes[0][dim] for dim in order),),
        )
        there = run(other, {device: tile.transpose(order) for device, tile in tiles.items()})
        assert all(np.array_equal(there[device], tile.transpose(order)) for device, tile in moved.items())
