"""Shardings as plain data: their axes are looked up on the mesh that they write, or on the one given."""

from __future__ import annotations

import re

import pytest

from reshard.errors import MeshError, NotationError
from reshard.types.mesh import Mesh, SubAxis
from reshard.types.notation.sharding import Placed, RawMesh, RawSharding, Reader, place_sharding

MESH = Mesh(x=6, y=5)


def test_axes_are_looked_up():
    raw = RawSharding((("y", "x:(1)2"), ()), ("x:(2)3",), (), "sum", ())
    x, y = SubAxis("x", 1, 2), SubAxis("y", 1, 5)
    assert place_sharding(raw, MESH) == Placed(MESH, ((y, x), ()), (), "sum", (SubAxis("x", 2, 3),))
    partial = RawSharding(((),), unreduced=("y",), reduction="max", manual=("x",))
    assert place_sharding(partial, MESH) == Placed(MESH, ((),), (y,), "max", (SubAxis("x", 1, 6),))


def test_a_written_mesh_is_used_and_must_be_the_one_given():
    raw = RawSharding((("x",),), mesh=RawMesh((("x", 2), ("y", 3)), (5, 4, 3, 2, 1, 0)))
    own = Mesh(x=2, y=3, device_ids=[5, 4, 3, 2, 1, 0])
    assert place_sharding(raw, None) == place_sharding(raw, own)
    assert place_sharding(raw, None).mesh == own
    with pytest.raises(MeshError, match=r"that it writes, not on .*; give that one, or none"):
        place_sharding(raw, Mesh(x=2, y=3))


@pytest.mark.parametrize(
    ("axis", "mesh", "message"),
    [
        ("x", None, "no mesh is given; pass the mesh that has them"),
        ("z", MESH, "unknown axis 'z': mesh <x=6, y=5> has axes x, y"),
        ("x:(4)2", MESH, "4 x 2 does not divide axis 'x' of size 6"),
    ],
)
def test_refused(axis: str, mesh: Mesh | None, message: str):
    with pytest.raises(MeshError, match=message.replace("(", r"\(").replace(")", r"\)")):
        place_sharding(RawSharding(((axis,),)), mesh)
    with pytest.raises(MeshError):
        place_sharding(RawSharding(((),), replicated=(axis,)), mesh)


def test_padding_adds_dims_that_are_not_split_and_keeps_the_rest():
    raw = RawSharding((("x",),), ("y",), mesh=RawMesh((("x", 2),), None))
    assert raw.padded(3) == raw._replace(dims=(("x",), (), ()))
    assert raw.padded(1) == raw.padded(0) == raw


# The reader takes tokens and never looks back; the grammar that Shardy's and HLO's shardings share.


def reader(text: str) -> Reader:
    return Reader("list", text)


def test_tokens_are_taken_and_blanks_skipped():
    at = reader("  [ 4 ,\n2]x")
    assert at.sees("[") and at.at == 2, "seeing takes the blanks only"
    assert not at.take("{") and at.take("[")
    assert at.number("a number") == 4
    assert at.match(re.compile(r",\s*2")) is not None
    assert at.match(re.compile("y")) is None
    at.need("]", "close it")
    assert (at.word(), at.word()) == ("x", "")
    at.end()


@pytest.mark.parametrize(
    ("text", "items"), [("]", ()), ("1]", (1,)), ("1, 2 ,3 ]", (1, 2, 3)), ("999999999999999999]", (10**18 - 1,))]
)
def test_items(text: str, items: tuple[int, ...]):
    at = reader(text)
    assert at.items(lambda: at.number("a number"), "]") == items
    at.end()


@pytest.mark.parametrize(
    ("text", "left"), [("{} x", "x"), ("{a={b}, c} x", "x"), ('{"}" {"{\\"{"}} x', "x"), ("{ {} {} }", "")]
)
def test_braced_blocks_are_skipped_with_what_they_quote(text: str, left: str):
    at = reader(text)
    at.skip_braces()
    assert at.word() == left


@pytest.mark.parametrize(
    ("fails", "text", "message"),
    [
        (lambda at: at.need("]", "close it"), "}", "list '}': cannot read '}'; close it"),
        (lambda at: at.need("]", "close it"), " ", "list ' ': it ends too early; close it"),
        (lambda at: at.number("a number"), "1" * 19, "a number"),
        (lambda at: at.number("a number"), "x", "cannot read 'x'; a number"),
        (lambda at: at.items(at.word, "]"), "a b]", "cannot read 'b]'; separate items with commas"),
        (lambda at: at.skip_braces(), "{ {} ", "it ends too early; close the block with }"),
        (lambda at: at.end(), " rest ", "cannot read 'rest'; nothing may follow the sharding"),
        (lambda at: at.fail("do it", 2), "abcd", "list 'abcd': cannot read 'cd'; do it"),
        (lambda at: at.fail("do it"), "x" * 500, f"list '{'x' * 197}...': cannot read '{'x' * 37}...'; do it"),
    ],
)
def test_failures_name_the_text_the_place_and_what_to_do(fails, text: str, message: str):
    with pytest.raises(NotationError, match=re.escape(message)):
        fails(reader(text))


@pytest.mark.parametrize(
    ("text", "sharding"),
    [
        ("[]", RawSharding(())),
        ("[{\"y\"}, {}, {'x', z}]", RawSharding((("y",), (), ("x", "z")))),
        ('[{"x":(1)2, ?}p3, {?}]', RawSharding((("x:(1)2",), ()))),
        ('[{}], replicated={"x"}, unreduced={y}', RawSharding(((),), ("x",), ("y",))),
        ("[{}], unreduced=max{y}", RawSharding(((),), unreduced=("y",), reduction="max")),
    ],
)
def test_value(text: str, sharding: RawSharding):
    assert reader(text).value() == sharding


def test_only_the_lists_that_a_notation_has_are_read():
    keys = ("manual", "metadata")
    assert reader('[{}], manual={x}, metadata={op_name="}"}').value(keys) == RawSharding(((),), manual=("x",))
    with pytest.raises(NotationError, match="each of manual, metadata may follow the dims once"):
        reader("[{}], replicated={x}").value(keys)
    with pytest.raises(NotationError, match="may follow the dims once"):
        reader("[{}], manual={x}, manual={y}").value(keys)


@pytest.mark.parametrize(("text", "name"), [('"x"', "x"), ("'a.b-c'", "a.b-c"), ("x : ( 2 ) 4", "x:(2)4")])
def test_axis(text: str, name: str):
    assert reader(text).axis() == name


def test_axis_size_and_op():
    assert reader('"x" = 4').axis_size() == ("x", 4)
    assert [reader(text).reduction() for text in ("", "{", "min{", "sum")] == ["sum", "sum", "min", "sum"]
    for fails in (reader("x 4").axis_size, reader("=4").axis_size, reader("mean{").reduction):
        with pytest.raises(NotationError):
            fails()
