"""What a call returns: the tile itself, `out`, a new tile with clear padding, or the donated memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_results(ranks: int, tmp_path: Path):
    running.check("calls.moves", ranks, tmp_path)
