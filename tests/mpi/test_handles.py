"""Handles on one rank; those on several are in tests/runtime/on_mpi/test_staged.py."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.errors import LayoutError, PlanError, RankError, TileError
from reshard.mpi import prepare
from reshard.types import Layout, Mesh

ROWS, WHOLE = Layout.parse("f64[{x}4, 3]", Mesh(x=1)), Layout.parse("f64[4, 3]", Mesh(x=1))
TILE = np.arange(12.0).reshape(4, 3)


def test_a_handle_moves_and_names_its_ends():
    with prepare(ROWS, WHOLE, MPI.COMM_SELF) as handle:
        assert (handle.source, handle.target) == (ROWS, WHOLE)
        out = np.zeros((4, 3))
        assert handle(TILE, out=out) is out and np.array_equal(out, TILE)
        assert np.array_equal(handle.start(TILE).wait(), TILE)
    with pytest.raises(PlanError, match="freed"):
        handle(TILE)
    with pytest.raises(PlanError, match="freed"):
        handle.start(TILE).wait()


def test_wrong_arguments():
    with pytest.raises(LayoutError):
        prepare("f64[4]", WHOLE, MPI.COMM_SELF)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="budget"):
        prepare(ROWS, WHOLE, MPI.COMM_SELF, budget="much")
    for limit in ("soon", 0, -1.0, float("nan"), True):
        with pytest.raises(PlanError, match=f"limit {limit!r}: give a positive number of seconds"):
            prepare(ROWS, WHOLE, MPI.COMM_SELF, limit=limit)  # type: ignore[arg-type]
    with pytest.raises(TileError, match="shape"):
        prepare(ROWS, WHOLE, MPI.COMM_SELF).start(TILE.T).wait()


def test_a_handle_ends_with_its_communicator():
    comm = MPI.COMM_SELF.Dup()
    handle = prepare(ROWS, WHOLE, comm)
    comm.Free()
    with pytest.raises(RankError):
        handle(TILE)
