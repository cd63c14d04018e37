"""The idle axes of layouts on the way."""

from __future__ import annotations

import pytest

from reshard.plans.idle import find_idle_axes
from reshard.types import Layout, Mesh

MESH = Mesh(x=4, y=4)


@pytest.mark.parametrize(
    ("source", "target", "between", "axes"),
    [
        ("f32[{x}4]", "f32[16]", ["f32[4{y}]", "f32[16]"], ("y",)),
        ("f32[{x}4]", "f32[16]", ["f32[{x}4]", "f32[16]"], ()),
        ("f32[{x:(1)2}8]", "f32[16]", ["f32[{x}4]", "f32[16]"], ("x:(2)2",)),
        ("f32[16]", "f32[{x:(2)2}8]", ["f32[{x}{y}1]"], ("x:(1)2", "y")),
        ("f32[16] + sum{x}", "f32[16]", ["f32[{x}4]", "f32[16]"], ()),
    ],
)
def test_idle_axes_are_those_that_neither_end_uses(source: str, target: str, between: list[str], axes: tuple[str, ...]):
    layouts = [Layout.parse(text, MESH) for text in (source, target)]
    assert find_idle_axes(*layouts, [Layout.parse(text, MESH) for text in between]) == axes


def test_ends_on_two_meshes_have_none():
    source, target = Layout.parse("f32[16]", MESH), Layout.parse("f32[16]", Mesh(z=16))
    assert find_idle_axes(source, target, [Layout.parse("f32[{y}4]", MESH)]) == ()
