"""Shardy's tensor shardings: forms as its own parser takes them, and what is refused."""

import re

import pytest

from reshard.errors import LayoutError, MeshError, NotationError
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

MESH = Mesh(x=4, y=2, z=1, u=8)
GRID = (16, 16, 16)


def read(text, mesh=MESH, shape=GRID):
    return Layout.from_shardy(text, mesh, shape, "float32")


TEXTS = [
    ('[{"y"}, {}, {"x"}]', "f32[{y}8, 16, {x}4]"),
    ("[{'y'}, {}, {'x'}]", "f32[{y}8, 16, {x}4]"),
    ("[{y}, {}, {x}]", "f32[{y}8, 16, {x}4]"),
    ("[{}, {}, {}]", "f32[16, 16, 16]"),
    ('[{"x", "y"}, {}, {}]', "f32[{x}{y}2, 16, 16]"),
    ('[{"y", "x"}, {}, {}]', "f32[{y}{x}2, 16, 16]"),
    ('[{"z"}, {"z"}, {}]', "f32[16, 16, 16]"),
    ('[{"x":(1)2}, {"x":(2)2}, {}]', "f32[{x:(1)2}8, {x:(2)2}8, 16]"),
    ('[{"x":(2)2, "x":(1)2}, {}, {}]', "f32[{x:(2)2}{x:(1)2}4, 16, 16]"),
    ('[{"x":(1)2, "x":(2)2}, {}, {}]', "f32[{x}4, 16, 16]"),
    ('[{"u":(1)2, "x", "u":(4)2}, {}, {}]', "f32[{u:(1)2}{x}{u:(4)2}1, 16, 16]"),
    ('[{"x", ?}, {?}, {"y", ?}]', "f32[{x}4, 16, {y}8]"),
    ('[{"x"}p0, {}p12, {"y", ?}p1]', "f32[{x}4, 16, {y}8]"),
    ('[{"x"}, {}, {}], replicated={"y"}', "f32[{x}4, 16, 16]"),
    ('[{"x"}, {}, {}], unreduced={"y"}', "f32[{x}4, 16, 16] + sum{y}"),
    ('[{"x"}, {}, {}], unreduced{"y"}', "f32[{x}4, 16, 16] + sum{y}"),
    ('[{"x"}, {}, {}], unreduced=sum{"y"}', "f32[{x}4, 16, 16] + sum{y}"),
    ('[{"x"}, {}, {}], unreduced=max{"y", "u":(2)2}', "f32[{x}4, 16, 16] + max{y}{u:(2)2}"),
    ('[{"x"}, {}, {}], unreduced=min{"u", "y"}', "f32[{x}4, 16, 16] + min{y}{u}"),
    ('[{"x"}, {}, {}], replicated={}, unreduced={}', "f32[{x}4, 16, 16]"),
    ('<@mesh, [{"y"}, {}, {"x"}]>', "f32[{y}8, 16, {x}4]"),
    ('#sdy.sharding<@mesh, [{"y"}, {}, {"x"}]>', "f32[{y}8, 16, {x}4]"),
    ('sdy.sharding = #sdy.sharding<@mesh_0, [{"y"}, {}, {"x"}]>', "f32[{y}8, 16, {x}4]"),
    ('#sdy.sharding<@"a mesh", [{"y"}, {}, {"x"}]>', "f32[{y}8, 16, {x}4]"),
    ('#sdy.sharding_per_value<[<@mesh, [{"y"}, {}, {"x"}]>]>', "f32[{y}8, 16, {x}4]"),
    ('#sdy.sharding<@mesh, [{\\"y\\"}, {}, {\\"x\\"}]>', "f32[{y}8, 16, {x}4]"),
    (' [ { "y" } , { } , { "x" : ( 1 ) 2 , ? } p3 ] ', "f32[{y}8, 16, {x:(1)2}8]"),
    (
        '#sdy.sharding<@mesh, [{"x", "y":(1)2}, {?}, {"z", ?}], unreduced={"u":(1)2}, replicated={"u":(2)4}>',
        "f32[{x}{y}2, 16, 16] + sum{u:(1)2}",
    ),
]


@pytest.mark.parametrize(("text", "layout"), TEXTS)
def test_text(text, layout):
    assert read(text) == Layout.parse(layout, MESH)


def test_rank_zero():
    assert str(read("[]", shape=())) == "f32[]"
    assert str(read('#sdy.sharding<@mesh, [], unreduced={"x"}>', shape=())) == "f32[] + sum{x}"


def test_uneven_dims_pad():
    assert str(read('[{"x"}, {"y"}]', shape=(10, 7))) == "f32[{x}3/10, {y}4/7]"


WRITTEN = [
    ('#sdy.sharding<mesh<["x"=2,"y"=4]>, [{"x"}, {}, {"y"}]>', Mesh(x=2, y=4), [["x"], [], ["y"]]),
    ('<mesh<["x"=2], device_ids=[1, 0]>, [{"x"}, {}, {}]>', Mesh(x=2, device_ids=[1, 0]), [["x"]]),
    ('<mesh<["x"=2], device_ids=[0, 1]>, [{"x"}, {}, {}]>', Mesh(x=2), [["x"]]),
    ('<mesh<["x"=1], device_ids=[3]>, [{"x"}, {}, {}]>', Mesh(x=1, device_ids=[3]), []),
    ("<mesh<[]>, [{}, {}, {}]>", Mesh(), []),
    ('#sdy.sharding_per_value<[<mesh<["x"=2, "y"=2]>, [{}, {"y", "x"}, {}]>]>', Mesh(x=2, y=2), [[], ["y", "x"]]),
]


@pytest.mark.parametrize(("text", "mesh", "spec"), WRITTEN)
def test_a_mesh_written_inside(text, mesh, spec):
    expected = Layout.from_spec(mesh, GRID, "float32", spec)
    assert read(text, None) == expected
    assert read(text, mesh) == expected
    with pytest.raises(MeshError, match=r"on the mesh .* that it writes, not on .*; give that one, or none"):
        read(text)


REFUSED = [
    ("", NotationError, "it ends too early; write one {} per dim in []"),
    ("P('x')", NotationError, "cannot read \"P('x')\"; write one {} per dim in []"),
    ('["x", {}, {}]', NotationError, 'write each dim in braces, as in {"x"} or {}'),
    ('[{"x"}, {}, {}', NotationError, "it ends too early; separate items with commas and close the list with ]"),
    ('[{"x"} {} {}]', NotationError, "separate items with commas"),
    ('[{"x" "y"}, {}, {}]', NotationError, "separate the axes of a dim with commas"),
    ('[{"x",}, {}, {}]', NotationError, "cannot read '}, {}, {}]'; write an axis as"),
    ('[{?, "x"}, {}, {}]', NotationError, "? comes last in a dim"),
    ('[{"x"}q1, {}, {}]', NotationError, "cannot read 'q1, {}, {}]'"),
    ('[{"x":2}, {}, {}]', NotationError, 'write a sub-axis as "x":(pre)size'),
    ('[{"x y"}, {}, {}]', NotationError, "a name is a letter or _"),
    ('[{"x":(' + "9" * 5000 + ")2}, {}, {}]", NotationError, "two whole numbers"),
    ('[{"w"}, {}, {}]', MeshError, "unknown axis 'w': mesh <x=4, y=2, z=1, u=8> has axes x, y, z, u"),
    ('[{"x":(3)2}, {}, {}]', MeshError, "3 x 2 does not divide axis 'x' of size 4"),
    ('[{"x"}, {"x"}, {}]', LayoutError, "is used as x and as x, which overlap"),
    ('[{"x"}, {}, {}], replicated={"x"}', LayoutError, "is used as x and as x"),
    ('[{"x"}, {}, {}], unreduced={"x"}', LayoutError, "partial axes included (single use)"),
    ('[{}, {}, {}], unreduced={"y"}, replicated={"y"}', LayoutError, "overlap"),
    ('[{}, {}, {}], unreduced=mean{"y"}', NotationError, "unreduced axes have sum, max, min"),
    ('[{}, {}, {}], replicated="x"', NotationError, 'write replicated={"x"}'),
    ('[{"x"}, {}]', LayoutError, "2 dims of axes for global shape (16, 16, 16) of rank 3"),
    ("[{}, {}, {}] or so", NotationError, "cannot read 'or so'; nothing may follow the sharding"),
    ('<[{"x"}, {}, {}]>', NotationError, "name the mesh, as in <@mesh, [{}]>"),
    ('<@mesh [{"x"}, {}, {}]>', NotationError, "a comma follows the mesh"),
    ("<@mesh, [{}, {}, {}]", NotationError, "close the sharding with >"),
    ("#sdy.sharding", NotationError, 'write #sdy.sharding<@mesh, [{"x"}, {}]>'),
    ('<mesh<["x"=two]>, [{}, {}, {}]>', NotationError, 'write the axes of a mesh as "x"=4'),
    ('<mesh<["x"=2], device_ids=[0, 0]>, [{}, {}, {}]>', MeshError, "ids must be distinct"),
    ("<mesh<[], device_ids=[3]>, []>", LayoutError, "the others hold nothing, but in a layout every device"),
    (
        "#sdy.sharding_per_value<[<@mesh, [{}, {}, {}]>, <@mesh, [{}, {}, {}]>]>",
        NotationError,
        "it lists several values; give the sharding of one of them",
    ),
    ("#sdy.sharding_per_value<[]>", NotationError, "a per-value sharding has its values in <>"),
]


@pytest.mark.parametrize(("text", "error", "message"), REFUSED)
def test_refused(text, error, message):
    with pytest.raises(error, match=re.escape(message)):
        read(text)


def test_a_mesh_is_needed_from_somewhere():
    with pytest.raises(MeshError, match="no mesh is given; pass the mesh that has them"):
        read('[{"x"}, {}, {}]', None)
