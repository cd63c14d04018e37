"""DistArray, relabelling and calibration. See `tests.mpi.arrays`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")


@pytest.mark.parametrize("ranks", [1, 3, 6])
@pytest.mark.parametrize("topic", ["making", "functions", "saving"])
def test_arrays(topic: str, ranks: int, tmp_path: Path):
    running.check(f"arrays.{topic}", ranks, tmp_path)


def test_relabelling(tmp_path: Path):
    pytest.importorskip("scipy")
    running.check("arrays.relabelling", 3, tmp_path)


def test_calibration(tmp_path: Path):
    running.check("arrays.calibration", 4, tmp_path)
