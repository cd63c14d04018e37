"""Indices that pieces share, counted block by block, against the meaning of both layouts."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from reshard.geometry import overlap
from reshard.geometry.overlap import piece, shared_elements
from reshard.types.layout import Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh
from tests.layouts import MESHES, random_layout


def owners(layout: Layout) -> dict[int, int]:
    """Global index -> the number of the piece that has it."""
    at = {d: piece(layout.dims[0], layout.mesh, layout.mesh.position(d)) for d in layout.mesh.devices}
    return {index: at[d] for d in layout.mesh.devices for index in meaning(layout, d)[0]}


def assert_shared(source: Layout, target: Layout) -> None:
    before, after = owners(source), owners(target)
    expected = Counter((after[index], before[index]) for index in range(source.shape[0]))
    counts = shared_elements(source.dims[0], target.dims[0])
    assert {(q, p): n for q, by in enumerate(counts) for p, n in by.items()} == expected, f"{source} -> {target}"


@pytest.mark.parametrize("faster", [0, 1 << 40], ids=["counted", "walked"])
def test_both_ways_to_count_against_the_meaning(faster: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overlap, "_FASTER", faster)
    choose = random.Random(3)
    shared_elements.cache_clear()
    for size in (0, 1, 2, 3, 5, 7, 12, 13, 24, 29, 60, 97, 211):
        for _ in range(12):
            assert_shared(*(random_layout(choose, choose.choice(MESHES), [size]) for _ in range(2)))
    shared_elements.cache_clear()


def test_two_levels_of_rounds_on_both_sides():
    mesh = Mesh(x=4, y=4)
    assert_shared(*(Layout.parse(text, mesh) for text in ("f32[15{x}5{y}3/3539]", "f32[16{y}7{x}2/3539]")))
