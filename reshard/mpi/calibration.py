"""`calibrate`: measures a communicator's latencies and bandwidths as a `Network` to plan for."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from reshard.runtime.on_mpi.collective import collective
from reshard.runtime.on_mpi.team import MEASURE, TIME_LIMIT, Comm, Team, Watch
from reshard.synth import Link, Network


def calibrate(comm: Comm, name: str = "calibrated", limit: float = TIME_LIMIT) -> Network:
    """Measures the network of a communicator: `inner` within a node, `outer` between nodes, `domain` ranks per node.

    All ranks call it and get the same network, in seconds and bytes per second. On a single node `outer` equals
    `inner`. Write `network.to_json()` to a file for `Network.load`, `--network` and `network=`.

    >>> from mpi4py import MPI
    >>> network = calibrate(MPI.COMM_WORLD, "here")
    >>> network.name, network.domain == MPI.COMM_WORLD.size
    ('here', True)
    """

    def prepare(_: Team) -> None:
        Network(name, Link(0.0, 1.0))  # Checks the name.

    with collective(comm, limit, prepare, lambda _: "calibrate") as (team, watch, _):
        measured = [measure_link(team, watch, near) for near in (True, False)]
    inner, outer = (None if link is None else Link(link.latency, link.bandwidth) for link in measured)
    domain = min(team.nodes.count(node) for node in set(team.nodes))
    nodes = len(set(team.nodes))
    source = f"measured on {team.size} ranks on {nodes} node{'s' if nodes > 1 else ''}, all ranks exchanging at once"
    return Network(name, inner, outer or inner, domain, source=source)


# Latency and bandwidth of a communicator, measured by exchanges that all ranks make at once.

_SMALL, _LARGE = 8, 4 << 20
_ROUNDS = (50, 8)
_REPEATS = 5


class LinkMeasurement(NamedTuple):
    """Seconds that a minimal message takes, and bytes/second that one rank sends while it receives as many."""

    latency: float
    bandwidth: float


def measure_link(team: Team, watch: Watch, near: bool) -> LinkMeasurement | None:
    """The cost of an exchange between ranks of one node (`near`) or of different nodes; None without such pairs.

    All ranks exchange at once, each with the k-th next and the k-th previous one, so that links and memory are shared
    as in a redistribution. The result is the slowest rank's median, the same on all ranks.
    """
    shifts = [k for k in range(1, team.size) if _ranks_in_pairs(team, k, near)] or (
        [0] if near and team.size == 1 else []
    )
    if not shifts:
        return None
    shift = shifts[len(shifts) // 2]
    short, long = (
        _time_exchange(team, watch, shift, near, nbytes, n) for nbytes, n in zip((_SMALL, _LARGE), _ROUNDS, strict=True)
    )
    return LinkMeasurement(short, _LARGE / max(long - short, 1e-9))


def _ranks_in_pairs(team: Team, shift: int, near: bool) -> list[int]:
    """The ranks whose peer at this distance is on their own node (`near`), or on another one."""
    return [rank for rank in range(team.size) if team.near(rank, (rank + shift) % team.size) == near]


def _time_exchange(team: Team, watch: Watch, shift: int, near: bool, nbytes: int, rounds: int) -> float:
    """Median seconds of one exchange on the slowest rank."""
    sends = team.rank in _ranks_in_pairs(team, shift, near)
    receives = (team.rank - shift) % team.size in _ranks_in_pairs(team, shift, near)
    after, before = (team.rank + shift) % team.size, (team.rank - shift) % team.size
    out, into = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

    def exchange() -> None:
        requests: list[MPI.Request] = [team.comm.Irecv([into, MPI.BYTE], before, MEASURE)] if receives else []
        requests += [team.comm.Isend([out, MPI.BYTE], after, MEASURE)] if sends else []
        watch.until(lambda: MPI.Request.Testall(requests))

    times: list[float] = []
    for _ in range(_REPEATS):
        team.settle(watch)
        start = time.perf_counter()
        for _ in range(rounds):
            exchange()
        times.append((time.perf_counter() - start) / rounds)
    slowest = np.array([sorted(times)[_REPEATS // 2]])
    request = team.comm.Iallreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    watch.until(request.Test)
    return float(slowest[0])
