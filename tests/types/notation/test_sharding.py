"""Shardings as plain data: their axes are looked up on the mesh that they write, or on the one given."""

from __future__ import annotations

import pytest

from reshard.errors import MeshError
from reshard.types.mesh import Mesh, SubAxis
from reshard.types.notation.sharding import Placed, RawMesh, RawSharding, place

MESH = Mesh(x=6, y=5)


def test_axes_are_looked_up():
    raw = RawSharding((("y", "x:(1)2"), ()), ("x:(2)3",), (), "sum", ())
    x, y = SubAxis("x", 1, 2), SubAxis("y", 1, 5)
    assert place(raw, MESH) == Placed(MESH, ((y, x), ()), (), "sum", (SubAxis("x", 2, 3),))
    partial = RawSharding(((),), unreduced=("y",), reduction="max", manual=("x",))
    assert place(partial, MESH) == Placed(MESH, ((),), (y,), "max", (SubAxis("x", 1, 6),))


def test_a_written_mesh_is_used_and_must_be_the_one_given():
    raw = RawSharding((("x",),), mesh=RawMesh((("x", 2), ("y", 3)), (5, 4, 3, 2, 1, 0)))
    own = Mesh(x=2, y=3, device_ids=[5, 4, 3, 2, 1, 0])
    assert place(raw, None) == place(raw, own)
    assert place(raw, None).mesh == own
    with pytest.raises(MeshError, match=r"that it writes, not on .*; give that one, or none"):
        place(raw, Mesh(x=2, y=3))


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
        place(RawSharding(((axis,),)), mesh)
    with pytest.raises(MeshError):
        place(RawSharding(((),), replicated=(axis,)), mesh)


def test_padding_adds_dims_that_are_not_split_and_keeps_the_rest():
    raw = RawSharding((("x",),), ("y",), mesh=RawMesh((("x", 2),), None))
    assert raw.padded(3) == raw._replace(dims=(("x",), (), ()))
    assert raw.padded(1) == raw.padded(0) == raw
