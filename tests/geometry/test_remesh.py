"""The same placement on another mesh: every device holds the same elements."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.geometry.remesh import common_mesh, mesh_of_used, remesh
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


def test_common_mesh():
    assert common_mesh(Mesh(x=4, y=2), Mesh(x=2, y=4)) == Mesh(d0=2, d1=2, d2=2)
    assert common_mesh(Mesh(x=6), Mesh(a=2, b=3)) == Mesh(d0=2, d1=3)
    assert common_mesh(Mesh(a=3, b=2), Mesh(a=2, b=3)) is None
    assert common_mesh(Mesh(x=4), Mesh(x=8)) is None
    assert common_mesh(Mesh(x=2), Mesh({"x": 2}, device_ids=[1, 0])) is None
    both = [Mesh({"x": 4}, device_ids=[3, 1, 2, 0]), Mesh({"a": 2, "b": 2}, device_ids=[3, 1, 2, 0])]
    assert common_mesh(*both) == Mesh({"d0": 2, "d1": 2}, device_ids=[3, 1, 2, 0])


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("f32[{w:(1)2}6]", "f32[{z:(2)2}6]", Mesh(d0=2, d1=3, d2=2)),
        ("f32[{w}3]", "f32[{z:(1)2}6]", None),  # positions 3 to 12 against 2 to 4
        ("f32[12]", "f32[12]", Mesh(d0=12)),
        ("f32[12] + sum{w:(2)2}", "f32[12]", Mesh(d0=2, d1=2, d2=3)),
    ],
)
def test_a_mesh_of_the_sub_axes_that_two_layouts_use(source: str, target: str, expected: Mesh | None):
    a, b = Layout.parse(source, Mesh(w=4, x=3)), Layout.parse(target, Mesh(y=3, z=4))
    assert common_mesh(a.mesh, b.mesh) is None
    mesh = mesh_of_used(a, b)
    assert mesh == expected
    if mesh is not None:
        for layout in (a, b):
            moved = remesh(layout, mesh)
            assert moved is not None
            assert [meaning(moved, d) for d in mesh.devices] == [meaning(layout, d) for d in mesh.devices]


# Which devices two meshes have in common.
