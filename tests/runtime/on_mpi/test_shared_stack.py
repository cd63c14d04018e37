"""Equal moves on one node into arrays of the caller, see `tests.mpi.trees`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from tests.mpi import running


@pytest.mark.slow
def test_results_are_taken_out_of_shared_copies(tmp_path: Path):
    running.check("trees.shared", 3, tmp_path)
