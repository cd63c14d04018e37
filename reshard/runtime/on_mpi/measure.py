"""Latency and bandwidth of a communicator, measured by exchanges that all ranks make at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from reshard.runtime.on_mpi.tags import MEASURE
from reshard.runtime.on_mpi.team import Team, Watch

_SMALL, _LARGE = 8, 4 << 20
_ROUNDS = (50, 8)
_REPEATS = 5


class LinkMeasurement(NamedTuple):
    """Seconds that a minimal message takes, and bytes/second that one rank sends while it receives as many."""

    latency: float
    bandwidth: float


def measure(team: Team, watch: Watch, near: bool) -> LinkMeasurement | None:
    """The cost of an exchange between ranks of one node (`near`) or of different nodes; None without such pairs.

    All ranks exchange at once, each with the k-th next and the k-th previous one, so that links and memory are shared
    as in a redistribution. The result is the slowest rank's median, the same on all ranks.
    """
    shifts = [k for k in range(1, team.size) if _pairs(team, k, near)] or ([0] if near and team.size == 1 else [])
    if not shifts:
        return None
    shift = shifts[len(shifts) // 2]
    short, long = (
        _seconds(team, watch, shift, near, nbytes, n) for nbytes, n in zip((_SMALL, _LARGE), _ROUNDS, strict=True)
    )
    return LinkMeasurement(short, _LARGE / max(long - short, 1e-9))


def _pairs(team: Team, shift: int, near: bool) -> list[int]:
    """The ranks whose peer at this distance is on their own node (`near`), or on another one."""
    return [rank for rank in range(team.size) if team.near(rank, (rank + shift) % team.size) == near]


def _seconds(team: Team, watch: Watch, shift: int, near: bool, nbytes: int, rounds: int) -> float:
    """Median seconds of one exchange on the slowest rank."""
    sends = team.rank in _pairs(team, shift, near)
    receives = (team.rank - shift) % team.size in _pairs(team, shift, near)
    after, before = (team.rank + shift) % team.size, (team.rank - shift) % team.size
    out, into = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

    def exchange() -> None:
        requests: list[MPI.Request] = [team.comm.Irecv([into, MPI.BYTE], before, MEASURE)] if receives else []
        requests += [team.comm.Isend([out, MPI.BYTE], after, MEASURE)] if sends else []
        watch.until(lambda: MPI.Request.Testall(requests))

    times = [_timed(team, watch, exchange, rounds) for _ in range(_REPEATS)]
    slowest = np.array([sorted(times)[_REPEATS // 2]])
    request = team.comm.Iallreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    watch.until(request.Test)
    return float(slowest[0])


def _timed(team: Team, watch: Watch, exchange: Callable[[], None], rounds: int) -> float:
    team.settle(watch)
    start = time.perf_counter()
    for _ in range(rounds):
        exchange()
    return (time.perf_counter() - start) / rounds
