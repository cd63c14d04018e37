"""Elementwise functions: what broadcasts, what is refused, and padding that no function sees."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.errors import LayoutError, TileError
from reshard.mpi import DistArray
from reshard.mpi.numpy_protocol.elementwise import aligned, mapped, zipped
from reshard.types import Layout, Mesh
from tests.mpi.numpy_protocol.arrays import array, as_rank, whole

A = np.arange(6.0).reshape(2, 3)


class Somewhere(DistArray):
    """An array of any layout: `aligned` looks at layouts only."""

    def __init__(self, text: str, mesh: Mesh) -> None:
        layout = Layout.parse(text, mesh)
        super().__init__(layout, np.zeros(layout.tile_shape, layout.dtype), as_rank(mesh))


def test_rows_and_columns_broadcast() -> None:
    a = array(A)
    assert np.array_equal(whole(a + array(A[0])), A + A[0])
    assert np.array_equal(whole(array(A[:1]) * array(A[:, :1])), A[:1] * A[:, :1])
    with pytest.raises(LayoutError, match="do not broadcast together"):
        a + array(np.zeros(2))


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        (("f64[{x}2/7, 5]", "f64[5]"), "f64[{x}2/7, 5]"),
        (("f64[{x}2/7, 5]", "f64[1, 5]", "f64[]"), "f64[{x}2/7, 5]"),
        (("f64[{x}2/7, 1]", "f64[1, {y}3]"), "f64[{x}2/7, {y}3]"),
        (("f64[{x}1/1]", "f64[1]"), "f64[{x}/1]"),
        (("f64[{x}2/7, 1]", "f64[1, {x}2]"), None),
        (("f64[{x}2/7, 5]", "f64[7, 5]"), None),
        (("f64[{x}1/1, 5]", "f64[7, 5]"), None),
        (("f64[2{x}1/7]", "f64[{x}2/7]"), None),
    ],
)
def test_where_tiles_have_the_same_elements(texts: tuple[str, ...], wanted: str | None) -> None:
    arrays = [Somewhere(text, Mesh(x=4, y=2)) for text in texts]
    if wanted is None:
        with pytest.raises(LayoutError, match="redistribute one of them"):
            aligned("add", arrays)
    else:
        assert str(aligned("add", arrays)) == wanted


def test_other_meshes_and_partial_arrays_are_refused() -> None:
    one, other = Somewhere("f64[8]", Mesh(x=4)), Somewhere("f64[8]", Mesh(y=4))
    with pytest.raises(LayoutError, match="redistribute one of them"):
        aligned("add", [one, other])
    with pytest.raises(LayoutError, match="still to be summed"):
        aligned("add", [Somewhere("f64[8] + sum{x}", Mesh(x=4))])


def test_padding_is_not_computed_with() -> None:
    layout = Layout.parse("f64[{x}2/7]", Mesh(x=4))
    a = DistArray(layout, np.array([1.0, 0.0]), as_rank(layout.mesh, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        part = mapped("reciprocal", np.reciprocal, a)
    assert part.tile.tolist() == [1.0, 0.0]
    assert zipped("add", np.add, a, 1).tile.tolist() == [2.0, 0.0]


def test_out() -> None:
    a, out = array(A), array(np.zeros((2, 3)))
    assert np.add(a, 1, out=out) is out
    assert np.array_equal(whole(out), A + 1)
    same = a
    a += 1
    assert a is same
    assert np.array_equal(whole(a), A + 1)
    with pytest.raises(LayoutError, match="out has layout"):
        np.add(a, 1, out=array(np.zeros((3, 2))))
    with pytest.raises(TileError, match="out is a ndarray"):
        np.add(a, 1, out=np.zeros((2, 3)))
    with pytest.raises(TypeError, match="to_global"):
        np.add(a, 1, out=out, where=A > 3)


def test_refused() -> None:
    a = array(A)
    if hasattr(np, "vecdot"):  # from numpy 2 on
        with pytest.raises(TypeError, match=r"vecdot of DistArrays is not implemented.*to_global"):
            np.vecdot(a, a)
    with pytest.raises(LayoutError, match=r"an array of shape \(2, 3\); give a number"):
        a + A
    with pytest.raises(LayoutError, match="give a number"):
        [1, 2, 3] * a
