"""Dims split and merged at atoms, and units, against the meaning of the layouts."""

import random

import numpy as np
import pytest

import reshard as rs
from reshard.geometry.view_layouts import (
    find_middle,
    fuse_atoms,
    invert_view,
    layout_over,
    merge_dims,
    split_dim,
    view_stages,
)
from reshard.types.layout import Dim, Layout
from reshard.types.meaning import meaning
from reshard.types.view import Atom, View
from tests.layouts import MESHES, random_layout
from tests.view_oracle import random_case

MESH = rs.Mesh(x=4, y=2)


def dim(text: str) -> Dim:
    return Layout.parse(f"f32[{text}]", MESH).dims[0]


@pytest.mark.parametrize(
    ("text", "sizes", "parts"),
    [
        ("3{x}2", (3, 8), ["3", "{x}2"]),
        ("{x}6", (3, 8), None),
        ("{x}6", (8, 3), ["{x:(1)4}2", "3"]),
        ("{x}6", (2, 12), ["{x:(1)2}", "{x:(2)2}6"]),
        ("{x}4/14", (7, 2), ["{x}2/7", "2"]),
        ("{x}3/10", (5, 2), None),
        ("0", (0, 3), ["0", "3"]),
        ("{x}/1", (), None),
        ("1", (), []),
        ("5", (2, 3), None),
    ],
)
def test_splitting(text, sizes, parts):
    split = split_dim(dim(text), sizes)
    if parts is None:
        assert split is None
    else:
        assert Layout(MESH, tuple(split), "float32") == Layout.parse(f"f32[{', '.join(parts)}]", MESH)
        merged = merge_dims(split)
        assert Layout(MESH, (merged,), "float32") == Layout.parse(f"f32[{text}]", MESH)


def test_a_split_dim_means_what_it_did():
    for seed in range(300):
        choose = random.Random(seed)
        sizes = [choose.choice((1, 2, 3, 4, 6)) for _ in range(3)]
        layout = random_layout(choose, choose.choice(MESHES), [int(np.prod(sizes))])
        parts = split_dim(layout.dims[0], sizes)
        if parts is None:
            continue
        split = Layout(layout.mesh, tuple(parts), layout.dtype)
        for device in layout.mesh.devices:
            grid = np.meshgrid(*meaning(split, device), indexing="ij")
            real = np.logical_and.reduce([index < size for index, size in zip(grid, sizes, strict=True)])
            flat = np.ravel_multi_index(tuple(np.where(real, index, 0) for index in grid), sizes)
            whole = [index for index in meaning(layout, device)[0] if index < layout.shape[0]]
            assert sorted(flat[real]) == sorted(whole) == list(flat[real])


def test_only_the_major_part_may_be_padded():
    assert merge_dims([dim("2"), dim("{x}3/10")]) is None
    assert merge_dims([dim("{x}3/10"), dim("2")]).size == 20
    assert merge_dims([dim("0"), dim("3")]).size == 0
    assert layout_over(Layout.parse("f32[{x}2]", MESH), [dim("{x}2"), dim("{x}2")]) is None


def test_fusing_keeps_the_map():
    for seed in range(300):
        view = random_case(random.Random(seed)).move.view
        assert fuse_atoms(view).map == view.map
        assert invert_view(invert_view(view)) == view
        assert (fuse_atoms(view).source_shape, fuse_atoms(view).target_shape) == (view.source_shape, view.target_shape)


def test_dims_that_share_atoms_and_do_not_split_have_no_units():
    view = View((Atom("a", 3), Atom("b", 8)), ((0, 1),), ((1, 0),))
    target = Layout.parse("f32[{x}{y}3]", MESH)
    assert find_middle(Layout.parse("f32[{x}6]", MESH), target, view).target == Layout.parse("f32[3{x}{y}]", MESH)
    assert find_middle(Layout.parse("f32[{x}{y}3]", MESH), Layout.parse("f32[3{y}{x}]", MESH), view) is None


# Stages: parts of local dims are taken before and put after; parts of spread dims have none.


def move(source: str, target: str, **options) -> rs.Move:
    both = (rs.Layout.parse(text, rs.Mesh(x=4)) for text in (source, target))
    return rs.Move(*both, **options)


def parts_of(move: rs.Move):
    return view_stages(move.source, move.target, move.view)


def test_a_part_of_a_local_atom():
    parts = parts_of(move("f32[3{x}2, 5]", "f32[{x}2, 5]", view="(t h) d -> h d", take={"t": 1}, t=3))
    assert [str(parts.before.whole), str(parts.before.part)] == ["f32[3, {x}2, 5]", "f32[1, {x}2, 5]"]
    assert parts.after is None and str(parts.middle.source) == str(parts.middle.target) == "f32[{x}2, 5]"
    parts = parts_of(move("f32[{x}2, 5]", "f32[3{x}2, 5]", view="h d -> (t h) d", into={"t": 1}, t=3))
    assert [str(parts.after.whole), str(parts.after.part)] == ["f32[3, {x}2, 5]", "f32[1, {x}2, 5]"]


def test_a_part_of_a_spread_atom():
    assert parts_of(move("f32[{x}6]", "f32[{x}2]", view="(t h) -> h", take={"t": 1}, t=3)) is None
    assert parts_of(move("f32[{x}3]", "f32[{x}2]", take={0: slice(0, 8)})) is None
    assert parts_of(move("f32[{x}2]", "f32[{x}3]", into={0: slice(0, 8)})) is None
    assert parts_of(move("f32[{x}/1, 3]", "f32[3]", take={0: 0})) is None
