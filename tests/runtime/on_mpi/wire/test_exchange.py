"""Messages of a step on three ranks, with any staging. See `tests.mpi.modules`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")


@pytest.mark.slow
def test_every_element_arrives_within_the_staging(tmp_path: Path):
    running.check("modules.exchange", 3, tmp_path)
