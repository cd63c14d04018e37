"""Moves between two sets of ranks: every way, the plans' steps, arrays on some ranks, and callers' mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

SLOW = [
    *(("moves_sampled", ranks) for ranks in (2, 4, 8)),
    *(("relays", ranks) for ranks in (4, 6)),
    *(("mistakes", ranks) for ranks in (3, 4)),  # On two some mistakes are none: there is only one other target.
    ("arrays", 3),
    ("plans", 3),
]
SWEEP = [
    (topic, ranks)
    for topic in ("moves", "plans", "arrays", "relays")
    for ranks in (2, 3, 4, 6, 8)
    if (topic, ranks) != ("relays", 2)
]
RUNS = [*SLOW, *(pytest.param(*run, marks=pytest.mark.sweep) for run in SWEEP if run not in SLOW)]


@pytest.mark.slow
@pytest.mark.parametrize(("topic", "ranks"), RUNS)
def test_on_ranks(topic: str, ranks: int, tmp_path: Path):
    running.check(f"crossing.{topic}", ranks, tmp_path)
