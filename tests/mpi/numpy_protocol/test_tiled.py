"""True parts of tiles, new arrays around them, and numpy's axes."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.errors import LayoutError
from reshard.lower.to_mpi import ranks
from reshard.mpi import DistArray
from reshard.mpi.numpy_protocol import tiled
from reshard.types import Layout, Mesh
from tests.layouts import random_pair
from tests.mpi.numpy_protocol.arrays import COMM, array
from tests.oracle import PADDING, tiles_of


def test_the_true_part_is_all_elements_and_no_padding() -> None:
    choose = random.Random(1)
    for _ in range(150):
        layout = random_pair(choose)[0]
        for rank, device in enumerate(ranks(layout.mesh)):
            real = tiles_of(layout)[device] != PADDING
            inside = np.zeros(layout.tile_shape, bool)
            inside[tuple(map(slice, tiled.extents(layout, rank)))] = True
            assert np.array_equal(inside, real), (layout, rank)


def test_a_new_tile_has_zeros_for_padding() -> None:
    layout = Layout.parse("f64[2{x}2/3]", Mesh(x=1))
    a = DistArray(layout, np.full(layout.tile_shape, 7.0), COMM)
    made = tiled.with_true_part(a, layout, np.ones(3, "int32"))
    assert made.layout.dtype == "int32"
    assert made.tile.tolist() == [1, 1, 1, *[0] * (layout.tile_shape[0] - 3)]


def test_dtypes_without_a_name() -> None:
    assert tiled.layout_dtype(np.dtype("M8[D]")) == "uint64"
    for kind in ("O", "U3"):
        with pytest.raises(TypeError, match="to_global"):
            tiled.layout_dtype(np.dtype(kind))
    with pytest.raises(TypeError, match="sum of a DistArray of dtype datetime64"):
        layout = Layout.parse("u64[3]", Mesh(x=1))
        DistArray.from_global(np.zeros(3, "M8[D]"), layout, COMM, dtype="M8[D]").sum()


def test_axes() -> None:
    assert tiled.normalized_axes((-1, 0), 3) == (0, 2)
    with pytest.raises(ValueError, match="duplicate"):
        tiled.normalized_axes((0, -1), 1)
    with pytest.raises(np.exceptions.AxisError):
        tiled.normalized_axes(2, 2)


def test_other_communicators() -> None:
    a = array([1.0])
    copy = DistArray(a.layout, a.tile, COMM.Dup())
    assert float(a + copy) == 2.0
    tiled.check_together("add", [a, copy])
    if MPI.COMM_WORLD.size == 1:
        return
    with pytest.raises(LayoutError, match="different communicators"):
        tiled.check_together("add", [a, DistArray(a.layout, a.tile, MPI.COMM_WORLD)])


def test_elements_of_arrays_without_dims() -> None:
    assert type(tiled.unwrapped(array(np.float32(3)))) is np.float32
    a = array([3])
    assert tiled.unwrapped(a) is a
    assert tiled.finished(a) is a
    assert tiled.axes_of(tiled.local_dim(4)) == []
