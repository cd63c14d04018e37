"""Stages: parts of local dims are taken before and put after; parts of spread dims have none."""

import reshard as rs
from reshard.geometry.view_layouts import view_stages

MESH = rs.Mesh(x=4)


def move(source: str, target: str, **options) -> rs.Move:
    both = (rs.Layout.parse(text, MESH) for text in (source, target))
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
