"""The same placement on another mesh: every device holds the same elements."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.geometry.remesh import remesh
from reshard.types.layout import Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh
from tests.layouts import random_layout

EIGHT = (
    Mesh(d=8),
    Mesh(x=4, y=2),
    Mesh(y=2, x=4),
    Mesh(a=2, b=2, c=2),
    Mesh({"x": 4, "y": 2}, device_ids=[0, 4, 1, 5, 2, 6, 3, 7]),  # the transpose of 2 x 4
    Mesh({"a": 2, "b": 2, "c": 2}, device_ids=[0, 4, 2, 6, 1, 5, 3, 7]),
    Mesh({"d": 8}, device_ids=[7, 1, 2, 3, 4, 5, 6, 0]),  # no digit permutation
)
TWELVE = (Mesh(x=4, y=3), Mesh(x=3, y=4), Mesh(x=12), Mesh(a=2, b=6), Mesh(a=2, b=3, c=2))


@settings(max_examples=150)
@given(st.randoms(), st.sampled_from((EIGHT, TWELVE)))
def test_the_layout_on_the_other_mesh_means_the_same(choose: random.Random, meshes: tuple[Mesh, ...]):
    old, new = choose.choice(meshes), choose.choice(meshes)
    layout = random_layout(choose, old, [choose.randint(0, 24)], partial=bool(choose.randint(0, 1)))
    moved = remesh(layout, new)
    if moved is not None:
        assert (moved.mesh, moved.dtype, moved.reduction, moved.shape) == (
            new,
            layout.dtype,
            layout.reduction,
            layout.shape,
        )
        for device in old.devices:
            assert meaning(moved, device) == meaning(layout, device)
        assert remesh(moved, old) == layout


@pytest.mark.parametrize(
    ("text", "old", "new", "expected"),
    [
        ("f32[{d}2]", Mesh(d=8), Mesh(x=4, y=2), "f32[{x}{y}2]"),
        ("f32[{x}2, {y}2]", Mesh(x=4, y=2), Mesh(d=8), "f32[{d:(1)4}2, {d:(4)2}2]"),
        ("f32[{x}4]", Mesh(x=2, y=4), Mesh(x=4, y=2), "f32[{x:(1)2}4]"),
        ("f32[{y}4]", Mesh(x=2, y=4), Mesh(x=4, y=2), "f32[{x:(2)2}{y}4]"),
        ("f32[8] + max{x}", Mesh(x=2, y=4), Mesh(d=8), "f32[8] + max{d:(1)2}"),
        # The devices of the second mesh are listed column by column of the first.
        ("f32[{x}2]", Mesh(x=2, y=2), Mesh({"p": 2, "q": 2}, device_ids=[0, 2, 1, 3]), "f32[{q}2]"),
        ("f32[{x}1]", Mesh(x=3, y=2), Mesh(x=2, y=3), None),  # positions 0-1 against 0-2
        ("f32[{x}]", Mesh(x=3), Mesh({"x": 3}, device_ids=[1, 0, 2]), None),
        ("f32[{x}]", Mesh(x=2), Mesh({"x": 2}, device_ids=[0, 2]), None),
        ("f32[{x}]", Mesh(x=2), Mesh(x=4), None),
    ],
)
def test_by_hand(text: str, old: Mesh, new: Mesh, expected: str | None):
    moved = remesh(Layout.parse(text, old), new)
    assert moved is None if expected is None else str(moved) == expected


# Which devices two meshes have in common.
