"""Collective calls: wrong arguments, threads and slow planning end with one error. See `tests.mpi.mistakes`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.errors import AgreementError, PlanError, TileError
from reshard.runtime.on_mpi.collective import collective
from reshard.runtime.on_mpi.team import TIME_LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("topic", ["planning", "arguments"])
def test_one_error_on_all_ranks(topic: str, tmp_path: Path):
    running.check(f"mistakes.{topic}", 3, tmp_path)


@pytest.mark.slow
def test_threads(tmp_path: Path):
    running.check("mistakes.threads", 3, tmp_path)


@pytest.mark.parametrize("limit", [1, 0.5, float("inf"), True, "5", None, -1, float("nan"), 10**400])
def test_limits(limit: Any):
    def run() -> float:
        with collective(MPI.COMM_SELF, limit, lambda _: 7, str) as (_, watch, value):
            assert value == 7
            return watch.deadline - time.monotonic()

    if limit in (1, 0.5, float("inf")) and limit is not True:
        assert run() <= limit
    else:
        with pytest.raises(PlanError, match="give a positive number of seconds"):
            run()
    assert limit is not None or TIME_LIMIT == 60


@pytest.mark.parametrize("comm", [None, 5, "world", MPI.COMM_NULL, MPI.Group()])
def test_what_is_not_a_communicator(comm: Any):
    with pytest.raises(AgreementError, match="is not a communicator"), collective(comm, 5, lambda _: 7, str):
        pass


def test_an_error_in_prepare_or_request_leaves_the_team_and_one_in_the_block_breaks_it():
    def fails(*_: Any) -> Any:
        raise TileError("no tile")

    with collective(MPI.COMM_SELF, 5, lambda _: 7, str) as (team, _, _):
        pass
    for arguments in ((fails, str), (lambda _: 7, fails)):
        with pytest.raises(TileError, match="no tile"), collective(MPI.COMM_SELF, 5, *arguments):
            raise AssertionError
    with collective(MPI.COMM_SELF, 5, lambda _: 7, str) as (same, _, _):
        assert same is team
    with pytest.raises(ValueError, match="odd"), collective(MPI.COMM_SELF, 5, lambda _: 7, str):
        raise ValueError("odd")
    assert team.broken
    with collective(MPI.COMM_SELF, 5, lambda _: 7, str) as (other, _, _):
        assert other is not team
