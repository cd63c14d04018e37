"""Moves between two sets of ranks: every way, the plans' steps, arrays on some ranks, and callers' mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

FAST = [("moves_sampled", 4), ("relays_sampled", 4), ("arrays", 3), ("mistakes", 4)]
SLOW = [("moves_sampled", 2), ("moves_sampled", 8), ("relays", 4), ("relays", 6), ("plans", 3), ("mistakes", 3)]
# On two ranks some mistakes are none: there is only one other target.
SWEEP = [
    (topic, ranks)
    for topic in ("moves", "plans", "arrays", "relays")
    for ranks in (2, 3, 4, 6, 8)
    if (topic, ranks) != ("relays", 2)
]
RUNS = [
    *FAST,
    *(pytest.param(*run, marks=pytest.mark.slow) for run in SLOW),
    *(pytest.param(*run, marks=pytest.mark.sweep) for run in SWEEP if run not in (*FAST, *SLOW)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("topic", "ranks"), RUNS)
def test_on_ranks(topic: str, ranks: int, tmp_path: Path):
    running.check(f"crossing.{topic}", ranks, tmp_path)
