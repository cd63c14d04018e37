"""The meaning of layouts, against tables written by hand and formulas from elsewhere."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.types.layout import Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh


def table(text: str, mesh: Mesh) -> dict[int, list[list[int]]]:
    layout = Layout.parse(text, mesh)
    return {device: [list(dim) for dim in meaning(layout, device)] for device in mesh.devices}


@pytest.mark.parametrize(
    ("text", "mesh", "expected"),
    [
        ("f32[{x}2]", Mesh(x=3), {0: [[0, 1]], 1: [[2, 3]], 2: [[4, 5]]}),
        ("f32[2{x}]", Mesh(x=3), {0: [[0, 3]], 1: [[1, 4]], 2: [[2, 5]]}),
        ("f32[4]", Mesh(x=2), {0: [[0, 1, 2, 3]], 1: [[0, 1, 2, 3]]}),
        # Block-cyclic: rounds of blocks of two.
        ("f32[2{x}2]", Mesh(x=2), {0: [[0, 1, 4, 5]], 1: [[2, 3, 6, 7]]}),
        # The major axis first; x is the more significant digit.
        ("f32[{x}{y}]", Mesh(x=2, y=2), {0: [[0]], 1: [[1]], 2: [[2]], 3: [[3]]}),
        ("f32[{y}{x}]", Mesh(x=2, y=2), {0: [[0]], 1: [[2]], 2: [[1]], 3: [[3]]}),
        # Strided: y inside x's pieces.
        ("f32[{x}2{y}]", Mesh(x=2, y=2), {0: [[0, 2]], 1: [[1, 3]], 2: [[4, 6]], 3: [[5, 7]]}),
        # Sub-axes: x:(1)2 is the major half of the coordinate.
        ("f32[{x:(1)2}2]", Mesh(x=4), {0: [[0, 1]], 1: [[0, 1]], 2: [[2, 3]], 3: [[2, 3]]}),
        ("f32[{x:(2)2}2]", Mesh(x=4), {0: [[0, 1]], 1: [[2, 3]], 2: [[0, 1]], 3: [[2, 3]]}),
        # Padding: indices at or past the true size.
        ("f32[{x}2/3]", Mesh(x=2), {0: [[0, 1]], 1: [[2, 3]]}),
        ("f32[{x}/1]", Mesh(x=3), {0: [[0]], 1: [[1]], 2: [[2]]}),
        ("f32[1{x}2/3]", Mesh(x=3), {0: [[0, 1]], 1: [[2, 3]], 2: [[4, 5]]}),
        ("f32[0, {x}2]", Mesh(x=2), {0: [[], [0, 1]], 1: [[], [2, 3]]}),
        ("f32[]", Mesh(x=2), {0: [], 1: []}),
        ("f32[{y}, {x}2]", Mesh(x=2, y=2), {0: [[0], [0, 1]], 1: [[1], [0, 1]], 2: [[0], [2, 3]], 3: [[1], [2, 3]]}),
        # Device ids: the device at position 0 is 7.
        ("f32[{x}2]", Mesh({"x": 2}, device_ids=[7, 3]), {7: [[0, 1]], 3: [[2, 3]]}),
    ],
)
def test_tables(text: str, mesh: Mesh, expected: dict[int, list[list[int]]]):
    assert table(text, mesh) == expected


def test_the_elements_of_a_tile_do_not_depend_on_partial_axes():
    mesh = Mesh(x=2, y=2)
    assert table("f32[{x}2] + sum{y}", mesh) == table("f32[{x}2]", mesh)


@given(st.integers(1, 9), st.integers(0, 40))
def test_uneven_tiles_are_gspmd_s(pieces: int, size: int):
    mesh = Mesh(x=pieces)
    layout = Layout.from_spec(mesh, (size,), "f32", [["x"]])
    tile = ceil(size / pieces)
    for device in range(pieces):
        held = [index for index in meaning(layout, device)[0] if index < size]
        assert held == list(range(min(size, device * tile), min(size, (device + 1) * tile)))


def test_sub_axes_are_those_of_a_reshaped_mesh():
    whole, split = Mesh(x=12), Mesh(a=2, b=3, c=2)
    names = {"x:(1)2": "a", "x:(2)3": "b", "x:(6)2": "c"}
    text = "f32[{x:(6)2}2{x:(1)2}, {x:(2)3}4]"
    renamed = text
    for old, new in names.items():
        renamed = renamed.replace(old, new)
    assert table(text, whole) == table(renamed, split)
