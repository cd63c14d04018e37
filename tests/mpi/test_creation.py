"""Arrays that are made again and again, see `tests.mpi.again`; what they hold is in test_distarray.py."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from tests.mpi import running


@pytest.mark.slow
def test_arrays_are_made_again(tmp_path: Path):
    running.check("again.creations", 3, tmp_path)
