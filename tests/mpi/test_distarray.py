"""Distributed arrays: making them, numpy's functions on them, moves, and arguments that do not fit.

On several ranks the topics of `tests.mpi.arrays` run; the rest is on the one rank of this process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.errors import AgreementError, LayoutError, PlanError, RankError, TileError
from reshard.mpi import DistArray
from reshard.runtime import Account
from reshard.types import Layout, Mesh

COMM = MPI.COMM_SELF
LAYOUT = Layout.parse("f64[5, 7]", Mesh(x=1))


def test_values() -> None:
    array = DistArray.from_function(lambda i, j: 10 * i + j, LAYOUT, COMM)
    wanted = np.add.outer(10.0 * np.arange(5), np.arange(7))
    assert np.array_equal(array.to_global(), wanted) and np.array_equal(array.to_global(root=None), wanted)
    assert (array.shape, array.dtype, array.comm, array.layout) == ((5, 7), np.float64, COMM, LAYOUT)
    assert array.local_index_ranges() == ((range(5),), (range(7),))


def test_a_table_that_could_not_be_read_back_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reshard.mpi.distarray.MOST_METADATA", (1 << 20) + 5)
    with pytest.raises(LayoutError, match="layout of fewer runs"):
        DistArray.zeros(LAYOUT, COMM).save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_given_tile_is_the_arrays_memory() -> None:
    tile = np.zeros(LAYOUT.tile_shape)
    array = DistArray(LAYOUT, tile, COMM)
    array.tile[0, 0] = 3
    assert tile[0, 0] == 3
    with pytest.raises(TileError, match=r"the tile has shape \(7, 5\), but tiles of"):
        DistArray(LAYOUT, np.zeros((7, 5)), COMM)


def test_elements_without_a_name() -> None:
    """Dates move as words of 8 bytes."""
    layout = Layout.parse("u64[{x}4]", Mesh(x=1))
    days = np.array(["2024-02-28", "2024-02-29", "1970-01-01", "NaT"], "M8[D]")
    array = DistArray.from_global(days, layout, COMM, dtype="M8[D]")
    assert array.dtype == days.dtype
    assert np.array_equal(array.to_global(), days, equal_nan=True)
    with pytest.raises(TileError, match="does not fit"):
        DistArray.zeros(layout, COMM, dtype="i4")


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: DistArray.from_global(None, LAYOUT, COMM), TileError, "the array is None"),
        (lambda: DistArray.from_global(np.zeros((7, 5)), LAYOUT, COMM), TileError, "of shape (7, 5) and dtype float64"),
        (lambda: DistArray.from_global(np.zeros((5, 7)), LAYOUT, COMM, root=1), PlanError, "root 1 is not a rank"),
        (
            lambda: DistArray.zeros(LAYOUT, COMM).to_global(-1),
            PlanError,
            "root -1 is not a rank of a communicator of 1",
        ),
        (lambda: DistArray.from_global(np.zeros((5, 7), "f4"), LAYOUT, COMM), TileError, "dtype float32"),
        (lambda: DistArray.zeros(Layout.parse("f64[{x}4]", Mesh(x=2)), COMM), PlanError, "not every device is one of"),
        (lambda: DistArray.full(LAYOUT, range(10**12), COMM), TileError, "does not broadcast to tiles"),
        (
            lambda: DistArray.from_function(lambda i, j: "x", LAYOUT, COMM),
            TileError,
            "the function returns 'x', not float64",
        ),
        (lambda: DistArray.full(LAYOUT, 1, COMM, limit=0), PlanError, "limit 0: give a positive number of seconds"),
        (lambda: DistArray.zeros(LAYOUT, COMM).redistribute(LAYOUT, limit=-1), PlanError, "limit -1: give a positive"),
        (
            lambda: DistArray.zeros(LAYOUT, COMM).redistribute(LAYOUT, relabel="no"),
            PlanError,
            "relabel 'no': give True",
        ),  # pyright: ignore
    ],
)
def test_arguments_that_do_not_fit(make: object, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        make()  # pyright: ignore
    assert text in str(caught.value)


def test_moves() -> None:
    """Accounts are filled, `out` is used, and an array of the wrong layout is refused."""
    rows, columns = (Layout.parse("f64[6, 4]", mesh) for mesh in (Mesh(x=1), Mesh(y=1)))
    a = DistArray.from_function(lambda i, j: 4 * i + j, rows, COMM)
    memory = Account("float64")
    out = DistArray.zeros(columns, COMM)
    assert a.redistribute(columns, out=out, memory=memory) is out
    assert np.array_equal(out.tile, a.tile) and memory.received_bytes == 0
    assert a.redistribute(rows) is a
    assert a.redistribute(rows, out=a) is a and a.redistribute(0, out=a) is a
    same = DistArray.zeros(rows, COMM)
    assert a.redistribute(rows, out=same) is same and np.array_equal(same.tile, a.tile)
    with pytest.raises(TileError, match="out has layout"):
        a.redistribute(columns, out=DistArray.zeros(Layout.parse("f64[4, 6]", Mesh(x=1)), COMM))
    with pytest.raises(TileError, match="out is a ndarray"):
        a.redistribute(columns, out=np.zeros((6, 4)))  # pyright: ignore
    with pytest.raises(LayoutError, match="dim 2 of"):
        a.redistribute(2)
    cube = DistArray.zeros(Layout.parse("f64[{x}6, 4, 2]", Mesh(x=1)), COMM)
    assert cube.redistribute(0, to=1).layout == cube.layout.with_local(0, 1)
    with pytest.raises(PlanError, match="to=1 is the dim that takes axes"):
        cube.redistribute(cube.layout, to=1)


def test_a_whole_array_of_either_byte_order() -> None:
    for code in ("<f8", ">f8"):
        assert np.array_equal(DistArray.from_global(np.ones((5, 7), code), LAYOUT, COMM).tile, np.ones((5, 7)))


def test_it_says_what_it_is() -> None:
    assert repr(DistArray.zeros(LAYOUT, COMM)) == f"DistArray({LAYOUT} on {LAYOUT.mesh}, rank 0 of 1)"


@pytest.mark.parametrize("comm", [None, "world", np.zeros(2), 4])
def test_what_is_no_communicator_is_refused(comm: Any) -> None:
    with pytest.raises(AgreementError, match="is not a communicator of these ranks"):
        DistArray(Layout.parse("f64[4]", Mesh(x=1)), np.zeros(4), comm)
    with pytest.raises(RankError, match="or has been freed"):
        DistArray(Layout.parse("f64[4]", Mesh(x=1)), np.zeros(4), MPI.COMM_NULL)  # pyright: ignore


def test_what_is_given_and_what_is_got_share_no_memory() -> None:
    """On one rank nothing moves, and an array is another one all the same."""
    layout = Layout.parse("s64[7, 3]", Mesh(x=1))
    whole = np.arange(21).reshape(7, 3)
    array = DistArray.from_global(whole, layout, MPI.COMM_SELF)
    back = array.to_global(0)
    assert back is not None and np.array_equal(back, whole)
    assert not np.shares_memory(array.tile, whole) and not np.shares_memory(array.tile, back)
