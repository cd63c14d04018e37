"""The shortest shared run, from the ends of blocks, against the runs themselves."""

from __future__ import annotations

import random

import pytest

from reshard.geometry.overlap import shares, shortest_shared
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from tests.layouts import MESHES, random_layout


def listed(source: Layout, target: Layout) -> int:
    every = shares(source.dims[0], target.dims[0])
    return min((run.length for by in every for runs in by.values() for run in runs), default=1)


@pytest.mark.parametrize("seed", range(3))
def test_random_pairs(seed: int):
    choose = random.Random(seed)
    for _ in range(500):
        size = choose.randint(0, 90)
        pair = [random_layout(choose, choose.choice(MESHES), [size]) for _ in range(2)]
        assert shortest_shared(*(layout.dims[0] for layout in pair)) == listed(*pair), pair


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("f32[3{x}2]", "f32[3{x}2]", 6),  # Every block continues in the next one of its piece, on both sides.
        ("f32[3{x}2/9]", "f32[3{y}2/9]", 4),  # The last index continues its piece, alone in the last block.
        ("f32[{x}4/7]", "f32[2{y}2/7]", 1),
        ("f32[2{x}4/13]", "f32[2{y}6/13]", 1),
        ("f32[3{x}4]", "f32[2{y}6]", 2),
        ("f32[3{x}4/17]", "f32[3{z}2/17]", 2),  # Index 16, alone in a block of both, continues 10 and 11 in both.
    ],
)
def test_by_hand(source: str, target: str, expected: int):
    pair = [Layout.parse(text, Mesh(x=2, y=2, z=3)) for text in (source, target)]
    assert listed(*pair) == expected
    assert shortest_shared(*(layout.dims[0] for layout in pair)) == expected
