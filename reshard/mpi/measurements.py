"""What is measured: the network of a communicator, by all of its ranks, and what a rank takes to work out its part of a
move, in one process, for jobs larger than the machine at hand.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from reshard.errors import PlanError, name_arguments, quoted
from reshard.geometry.remesh import one_set
from reshard.lower.to_mpi import Reduce, Stripes, ranks_of_nodes
from reshard.mpi.tile_checks import check_layout
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_mpi.collective import collective
from reshard.runtime.on_mpi.prepare import Request, TilePlan, check_seats, clear_caches, plan_uncached, read_options
from reshard.runtime.on_mpi.run_plan import RunnableStep
from reshard.runtime.on_mpi.team import MEASURE, TIME_LIMIT, Comm, Facts, Team, Watch
from reshard.runtime.on_mpi.wire.by_node import plan_joined
from reshard.runtime.on_mpi.wire.chunks import Messages
from reshard.runtime.platform_network import Calibration, store_calibration
from reshard.synth import Link, Network
from reshard.types import Layout
from reshard.types.units import counted
from reshard.types.whole import whole


@name_arguments
def calibrate(comm: Comm, name: str = "calibrated", limit: float = TIME_LIMIT, *, store: bool = True) -> Network:
    """Measures the network of a communicator: `inner` within a node, `outer` between nodes, `domain` ranks per node.

    All ranks call it and get the same network, in seconds and bytes per second. On a single node `outer` equals
    `inner`. Unless `store` is False, a rank of each node keeps it there for communicators that are used for the first
    time later, with as many ranks on as many nodes, on nodes that all have it: calls on them that name no network plan
    for it, where `RESHARD_NETWORK` names none either. On other nodes, write `network.to_json()` to a file for that, or
    for `network=`.

    >>> from mpi4py import MPI
    >>> network = calibrate(MPI.COMM_WORLD, "here", store=False)
    >>> network.name, network.domain == MPI.COMM_WORLD.size
    ('here', True)
    """

    def prepare(_: Team) -> None:
        Network(name, Link(0.0, 1.0))  # Checks the name.

    with collective(comm, limit, prepare, lambda _: "calibrate") as (team, watch, _):
        inner, outer = (measure_link(team, watch, near) for near in (True, False))
        domain = min(team.nodes.count(node) for node in set(team.nodes))
        on = counted(len(set(team.nodes)), "node")
        source = f"measured on {team.size} ranks on {on}, all ranks exchanging at once"
        network = Network(name, inner, outer or inner, domain, source=source)
        if store and team.rank == team.members[0]:
            store_calibration(team.kind, Calibration(network, None))
    return network


# Latency and bandwidth of a communicator, measured by exchanges that all ranks make at once.

_SMALL, _LARGE = 8, 4 << 20
_ROUNDS = (50, 8)
_REPEATS = 5


def measure_link(team: Team, watch: Watch, near: bool) -> Link | None:
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
    return Link(short, _LARGE / max(long - short, 1e-9))


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


# The figures of a rank's schedule.


class ScheduleFigures(NamedTuple):
    """What one rank's schedule takes and has.

    `seconds` of a processor and `bytes` of memory are what it takes to work it out for the first time, beside the plan,
    which all moves need. `sends` and `receives` are the rank's messages to and from ranks of other nodes, and of its
    own if the plan's steps are run. If messages are joined by node, they are those that the rank carries, laid out from
    what the ranks of its node tell it. Reductions are MPI's own and count as none.

    >>> from reshard.types import Mesh
    >>> ends = (Layout.parse(text, Mesh(x=64)) for text in ("f32[{x}1, 64]", "f32[64, {x}1]"))
    >>> figures = schedule_figures(*ends, rank=5, nodes=8)
    >>> figures.sends == figures.receives, figures.seconds < 60, figures.bytes > 0
    (True, True, True)
    """

    seconds: float
    bytes: int
    sends: int
    receives: int


def schedule_figures(
    source: Layout,
    target: Layout,
    *,
    rank: int = 0,
    nodes: int | Sequence[int] | None = None,
    budget: int | str | None = None,
    network: Network | str | None = None,
) -> ScheduleFigures:
    """The figures of one rank's schedule in a move, without the other ranks.

    `nodes` is the number of nodes, which have equally many ranks, one after another; or the node of every rank; without
    it every rank is on a node of its own. The memory of schedules that were worked out before in this process is given
    up, so that the figures are those of a first call. Raises the errors of `reshard.plan`, and `PlanError` for a rank
    or nodes that the layouts do not have.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=1024)
    >>> slabs = Layout.parse("f32[{x}1, 1024, 64]", mesh), Layout.parse("f32[1024, {x}1, 64]", mesh)
    >>> schedule_figures(*slabs, rank=5).sends
    1023
    """
    check_layout(source, "source")
    check_layout(target, "target")
    # The smallest communicator that has all devices.
    size = (
        source.mesh.size if one_set(source.mesh, target.mesh) else 1 + max(*source.mesh.devices, *target.mesh.devices)
    )
    facts = Facts(_node_of_each(nodes, size), True)
    at = whole(rank, 0, size - 1)
    if at is None:
        raise PlanError(f"rank {quoted(rank)}: {source} -> {target} has ranks 0 to {size - 1}")
    check_seats(source, target, size)
    request = Request.of_tile(source, target, read_options(budget, network))
    itemsize = numpy_dtype(source.dtype).itemsize
    first = plan_uncached(request, at, facts, itemsize)  # Makes the plan.
    # What the members of the rank's node would tell it.
    here = next(ranks for ranks in ranks_of_nodes(facts.nodes) if at in ranks) if first.joined else ()
    told = [plan_joined(source, target, member, facts.nodes).list_elements()[0] for member in here]

    def work_out() -> tuple[TilePlan, Stripes | None]:
        ready = plan_uncached(request, at, facts, itemsize)
        return ready, None if ready.by_node is None else ready.by_node.lay_stripes(at, told)

    clear_caches()
    start = time.thread_time()
    ready, stripes = work_out()
    seconds = time.thread_time() - start
    clear_caches()
    # Once more for the memory: tracing it takes time.
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        _ = work_out()
        nbytes = tracemalloc.get_traced_memory()[1] - before
    finally:
        if not tracing:
            tracemalloc.stop()
    if stripes is not None:
        return ScheduleFigures(seconds, nbytes, len(stripes.sends), len(stripes.receives))
    steps = [step.run for step in ready.steps.steps] if ready.planned else []
    if not ready.planned and ready.direct is not None:
        steps = [ready.direct.messages]
    sends, receives = zip((0, 0), *map(_count_of_step, steps), strict=True)
    return ScheduleFigures(seconds, nbytes, sum(sends), sum(receives))


def _node_of_each(nodes: int | Sequence[int] | None, size: int) -> tuple[int, ...]:
    if nodes is None:
        return tuple(range(size))
    if isinstance(nodes, Sequence):
        each = [whole(node) for node in nodes]
        if len(each) != size or None in each:
            raise PlanError(f"nodes {quoted(nodes)}: give the node of each of the {size} ranks as a number, or a count")
        return tuple(node for node in each if node is not None)
    count = whole(nodes, 1, size)
    if count is None or size % count:
        raise PlanError(
            f"nodes {quoted(nodes)}: {size} ranks are not spread evenly over that many; give the node of each"
        )
    return tuple(at // (size // count) for at in range(size))


def _count_of_step(step: RunnableStep) -> tuple[int, int]:
    """The messages that a rank sends and receives in a step."""
    match step:
        case Messages(sends=sends, receives=receives, passed=passed):
            out, into = (0, 0) if passed is None else _count_of_step(passed)
            return len(sends.chunks) + out, len(receives.chunks) + into
        case _:
            turns = () if isinstance(step, Reduce) else getattr(step, "turns", ())
            return sum(out is not None for out, _ in turns), sum(into is not None for _, into in turns)
