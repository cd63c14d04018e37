"""Moves between two sets of ranks: every way, the plans' steps, arrays on some ranks, and callers' mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import running
from tests.mpi.sampling import sampled

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

TOPICS = ["moves_sampled", "moves", "plans", "arrays", "mistakes"]


@pytest.mark.parametrize(
    ("topic", "ranks"),
    sampled(TOPICS, [2, 3, 4, 6, 8], ("moves_sampled", 4), ("arrays", 3), ("mistakes", 4)),
)
def test_on_ranks(topic: str, ranks: int, tmp_path: Path):
    running.check(f"crossing.{topic}", ranks, tmp_path)
