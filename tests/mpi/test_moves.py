"""Moves on 1 to 8 ranks, in every way that they can go, against the oracle. See `tests.mpi.cases`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_moves(ranks: int, tmp_path: Path):
    running.check("cases.moves", ranks, tmp_path)


def test_dtypes(tmp_path: Path):
    running.check("cases.dtypes", 8, tmp_path)
