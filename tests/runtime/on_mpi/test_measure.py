"""Measured links: only between pairs that exist, and of plausible size. See `tests.mpi.calls`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.mpi.calibration import _pairs, measure
from reshard.runtime.on_mpi.team import Team, Watch


@pytest.mark.slow
def test_ranks_within_a_node_and_on_different_nodes(tmp_path: Path):
    running.check("calls.measurements", 3, tmp_path)


def test_a_single_rank_measures_messages_to_itself():
    team = Team(MPI.COMM_SELF, None, 5)
    watch = Watch(team, 5)
    alone = measure(team, watch, True)
    assert alone is not None
    assert 0 < alone.latency < 1
    assert measure(team, watch, False) is None


@pytest.mark.parametrize(("shift", "near", "ranks"), [(1, True, [0, 2]), (1, False, [1, 3]), (2, False, [0, 1, 2, 3])])
def test_which_ranks_have_a_peer_at_a_distance(shift: int, near: bool, ranks: list[int]):
    nodes = (0, 0, 1, 1)
    team = cast(Any, SimpleNamespace(size=4, near=lambda one, other: nodes[one] == nodes[other]))
    assert _pairs(team, shift, near) == ranks
