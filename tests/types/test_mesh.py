"""Meshes: names and sizes, sub-axes, strides and coordinates, device orders, equality."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import MeshError
from reshard.types import mesh as mesh_module
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis, is_chain, merged_spans
from reshard.types.whole import whole

MESHES = st.lists(st.sampled_from((1, 2, 3, 4, 5, 6, 8, 12, 80)), max_size=4).map(
    lambda sizes: Mesh({f"a{at}": size for at, size in enumerate(sizes)})
)


def test_axes_in_order():
    mesh = Mesh(x=4, y=2)
    assert (mesh.size, dict(mesh.axes), list(mesh.axes), str(mesh)) == (8, {"x": 4, "y": 2}, ["x", "y"], "<x=4, y=2>")
    assert Mesh({"x": 4, "y": 2}) == Mesh([("x", 4), ("y", 2)]) == mesh
    assert Mesh(y=2, x=4) != mesh
    assert hash(Mesh({"x": 4, "y": 2})) == hash(mesh)


def test_too_many_ids_are_refused_before_one_is_read():
    class Endless:
        def __len__(self) -> int:
            return 1 << 25

        def __iter__(self):
            raise AssertionError("read")

    for axes in ({"x": 1 << 25}, {"x": 4}):
        with pytest.raises(MeshError, match=r"too many to list ids of|lists 33554432"):
            Mesh(axes, device_ids=Endless())  # type: ignore[arg-type]


def test_a_million_ids_are_checked_at_once(monkeypatch: pytest.MonkeyPatch):
    """One by one, 2^24 of them took ten seconds."""
    checks = []
    monkeypatch.setattr(mesh_module, "whole", lambda value, *ends: checks.append(value) or whole(value, *ends))
    ids = range(7, 7 + (1 << 20))
    assert Mesh({"x": 1 << 20}, device_ids=ids).devices == tuple(ids)
    assert Mesh({"x": 4}, device_ids=np.array([3, 2, 1, 0])).device_ids == (3, 2, 1, 0)
    assert len(checks) < 100


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (lambda mesh: mesh.axis_at("x"), "'x'"),
        (lambda mesh: mesh.axis_at(64), "64"),
        (lambda mesh: mesh.span("x"), "'x'"),
        (lambda mesh: mesh.stride(SubAxis("z", 1, 2)), "'z'"),
        (lambda mesh: mesh.stride(SubAxis([], 1, 2)), r"\[\]"),
        (lambda mesh: mesh.stride(SubAxis("x", 0, 2)), "0 x 2"),
        (lambda mesh: mesh.spell(5), "5"),
        (lambda mesh: mesh.coordinate("a", SubAxis("x", 1, 4)), "'a'"),
        (lambda mesh: mesh.coordinate(1, "y"), "'y'"),
        (lambda mesh: mesh.coordinates(1, 3), "3"),
        (lambda mesh: mesh.sub_axes(1.5, 2), "1.5"),
        (lambda mesh: mesh.position([1]), r"\[1\]"),
    ],
)
def test_what_is_no_sub_axis_or_position_is_said(call: Callable[[Mesh], object], given: str):
    with pytest.raises(MeshError, match=given):
        call(Mesh(x=4, y=2))


def test_is_immutable():
    mesh = Mesh(x=2)
    with pytest.raises(AttributeError, match="immutable"):
        mesh.axes = {"x": 3}  # type: ignore[misc]


def test_positions_and_device_ids():
    mesh = Mesh({"x": 2, "y": 2}, device_ids=[7, 5, 3, 1])
    assert mesh.devices == (7, 5, 3, 1)
    assert [mesh.position(d) for d in mesh.devices] == [0, 1, 2, 3]
    with pytest.raises(MeshError, match="device 0 is not in mesh"):
        mesh.position(0)
    with pytest.raises(MeshError, match="device 4 is not in mesh"):
        Mesh(x=4).position(4)
    with pytest.raises(MeshError, match="device -1 is not in mesh"):
        Mesh(x=4).position(-1)


def test_device_ids_in_the_order_of_positions_are_the_default():
    assert Mesh({"x": 3}, device_ids=[0, 1, 2]) == Mesh(x=3)
    assert hash(Mesh({"x": 3}, device_ids=[0, 1, 2])) == hash(Mesh(x=3))
    assert Mesh({"x": 3}, device_ids=[0, 2, 1]) != Mesh(x=3)
    assert Mesh(x=3) != "<x=3>"


@given(MESHES)
def test_text_round_trip(mesh: Mesh):
    assert Mesh.parse(str(mesh)) == mesh
    assert Mesh.parse(str(mesh).strip("<>").replace(" ", "")) == mesh


@pytest.mark.parametrize("first", ["", "-1", "x", "1.5", "9" * 30, "\u0661"])
def test_the_number_of_the_first_device_is_a_number(first: str):
    with pytest.raises(MeshError, match="after @ comes the number of the first device"):
        Mesh.parse(f"z=4@{first}")


def test_devices_are_numbered_once():
    with pytest.raises(MeshError, match="leave device_ids out"):
        Mesh.parse("x=2@4", [0, 1])


def test_sub_axes_are_read_and_spelled():
    mesh = Mesh(x=8, y=3)
    assert mesh.sub_axis("x") == SubAxis("x", 1, 8)
    assert mesh.sub_axis(" x:(2)4 ") == SubAxis("x", 2, 4)
    assert mesh.spell(SubAxis("x", 2, 4)) == "x:(2)4"
    assert mesh.spell(SubAxis("x", 1, 8)) == "x"
    assert mesh.spell(SubAxis("x", 1, 4)) == "x:(1)4"


@given(MESHES)
def test_strides_are_coordinates(mesh: Mesh):
    sizes, step = tuple(mesh.axes.values()), max(1, mesh.size // 7)
    where = {at: np.unravel_index(at, sizes) if sizes else () for at in range(0, mesh.size, step)}
    for at, (name, size) in enumerate(mesh.axes.items()):
        for pre in (d for d in range(1, size + 1) if size % d == 0):
            for factor in (d for d in range(1, size // pre + 1) if (size // pre) % d == 0):
                stride = mesh.stride(SubAxis(name, pre, factor))
                for position in range(0, mesh.size, step):
                    # The coordinate along the axis has the digits pre, factor and rest.
                    rest = size // (pre * factor)
                    assert position // stride % factor == where[position][at] // rest % factor
                    sub = SubAxis(name, pre, factor)
                    assert mesh.coordinate(position, sub) == where[position][at] // rest % factor
                    assert mesh.span(sub) == (stride, stride * factor)


@given(MESHES)
def test_sub_axes_undo_strides(mesh: Mesh):
    for name, size in mesh.axes.items():
        for pre in (d for d in range(1, size) if size % d == 0):
            sub = SubAxis(name, pre, size // pre)
            assert mesh.sub_axes(mesh.stride(sub), sub.size) == [sub]


@given(st.lists(st.tuples(st.integers(1, 24), st.integers(2, 6)), max_size=4))
def test_merged_spans_are_a_chain_that_covers_each_span(factors: list[tuple[int, int]]):
    spans = [(low, low * size) for low, size in factors]
    merged = merged_spans(spans)
    assert is_chain([end for span in merged for end in span])
    for low, high in spans:
        assert any(below <= low and high <= above and low % below == above % high == 0 for below, above in merged)


@pytest.mark.parametrize("mesh", [Mesh(x=4, y=2), Mesh({"x": 3}, device_ids=[2, 0, 1])], ids=repr)
def test_a_mesh_travels_between_processes(mesh: Mesh):
    layout = Layout.parse("f32[{x}2]", mesh)
    for copied in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
        assert copied == layout
        assert hash(copied) == hash(layout)
        assert copied.mesh.device_ids == mesh.device_ids


def test_hashes_are_computed_again_in_another_process():
    layout = Layout.parse("f32[{x}2]", Mesh(x=4))
    hash(layout)
    code = f"import pickle, reshard as rs; a = pickle.loads({pickle.dumps(layout)!r}); "
    code += "b = rs.Layout.parse('f32[{x}2]', rs.Mesh(x=4)); print(a == b, hash(a) == hash(b), a in {b})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert ran.stdout.split() == ["True"] * 3
