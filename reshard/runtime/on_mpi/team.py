"""The ranks of a communicator as a team: who shares a node with whom, how they agree, how a call ends for all.

A team is built once per communicator, by all of its ranks, and kept with it. Every wait goes through a
`Watch`, which yields the core, looks for a rank that reported failure, and gives up after a time limit.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

import numpy as np
from mpi4py import MPI

from reshard.errors import AgreementError, RankError
from reshard.runtime.on_mpi.node.cma import Remote
from reshard.runtime.on_mpi.node.node_sync import Board
from reshard.runtime.on_mpi.node.windows import Windows
from reshard.runtime.on_mpi.pool import Pool

Comm = MPI.Intracomm

TIME_LIMIT = 60.0
"""Seconds that a rank waits for another one, unless the call says otherwise."""

NODES = "RESHARD_MPI_NODES"
"""Environment variable: pretend that the ranks are on so many nodes, to test what goes between nodes."""

YIELDS = MPI.get_vendor()[0] == "Open MPI"
"""Whether this MPI yields the core when a test finds nothing; MPICH never does."""

_SHARED = "/dev/shm"  # Where MPICH and Open MPI have their windows on Linux.
_FAILED = 901
_GROUPS = 64  # Communicators of groups that are kept: MPICH has about 2,000 in all.
_LOOKS = 64  # Waiting turns between two looks at failures and the clock, each several times the cost of a turn.
_yield = getattr(os, "sched_yield", lambda: time.sleep(0))


class Facts(NamedTuple):
    """What all ranks know of their machine: the node of every rank, whether the ranks of a node can read each
    other's memory, and how many bytes of shared windows a rank can have.
    """

    nodes: tuple[int, ...]
    reads: bool
    room: int


class Team:
    """A private duplicate of a communicator, the node of each of its ranks, and this node's board."""

    def __init__(self, comm: MPI.Intracomm, nodes: int | None, limit: float) -> None:
        self.comm = duplicate = _duplicate(comm, limit)
        self.rank, self.size = comm.rank, comm.size
        self.broken = False
        self.calls = 0
        self.plain = True
        self.pool = Pool()
        self._posted = 0
        self._sent: list[MPI.Request] = []
        self._groups: dict[tuple[int, ...], MPI.Intracomm] = {}
        self.node = _node(duplicate, nodes)
        self.board = Board(self.node)
        self.windows = Windows(self.node)
        self.remote = Remote(self.node)
        leaders: list[int] = duplicate.allgather(self.node.bcast(self.rank if self.node.rank == 0 else None))
        order = {leader: number for number, leader in enumerate(dict.fromkeys(leaders))}
        self.nodes = tuple(order[leader] for leader in leaders)
        self.members = tuple(rank for rank in range(self.size) if self.nodes[rank] == self.nodes[self.rank])
        reads, room = zip(*duplicate.allgather((self.remote.works, _room() // self.node.size)), strict=True)
        self.facts = Facts(self.nodes, all(reads), min(room))

    @property
    def one_node(self) -> bool:
        """Whether all ranks can read each other's shared windows."""
        return len(self.members) == self.size

    def near(self, rank: int, other: int) -> bool:
        """Whether two ranks are on one node."""
        return self.nodes[rank] == self.nodes[other]

    def sync(self, watch: Watch, digest: int = 0, words: Sequence[int] = (), plain: bool = True) -> bool:
        """Waits for all ranks; whether all gave the same digest, a number from 0 up (less: this rank cannot go on).

        Afterwards `posted` has the words of the members of this node, and `plain` says whether all ranks' were.
        """
        ends = np.array([digest, -digest, not plain], np.int64)
        self._posted = len(ends) + len(words)
        self.board.post((*ends.tolist(), *words))
        if self.one_node:
            watch.until(self.board.complete)
            most = np.max([self.board.read(member, len(ends)) for member in range(self.board.size)], axis=0)
        else:
            most = np.empty_like(ends)
            request = self.comm.Iallreduce(ends, most, MPI.MAX)
            watch.until(request.Test)
            watch.until(self.board.complete)
        self.plain = not most[2]
        return bool(digest >= 0 and most[0] == -most[1])

    def posted(self) -> list[list[int]]:
        """The words that each member of this node gave to the last sync, before anything else is posted."""
        return [self.board.read(member, self._posted)[3:] for member in range(self.board.size)]

    def gather(self, watch: Watch, words: Sequence[int] = ()) -> list[list[int]]:
        """Waits for the members of this node alone; the words that each posted, all as many."""
        self.board.post(words)
        watch.until(self.board.complete)
        return [self.board.read(member, len(words)) for member in range(self.board.size)]

    def settle(self, watch: Watch) -> None:
        """Waits until every rank has come as far as this one."""
        self.sync(watch)

    def group(self, ranks: tuple[int, ...]) -> MPI.Intracomm:
        """The communicator of some ranks, in this order; made once, by those ranks."""
        if ranks == tuple(range(self.size)):
            return self.comm
        if ranks not in self._groups:
            if len(self._groups) >= _GROUPS:
                self._groups.pop(next(iter(self._groups))).Free()
            self._groups[ranks] = self.comm.Create_group(self.comm.group.Incl(ranks))
        return self._groups[ranks]

    def fail(self, text: str) -> None:
        """Tells every rank that this one cannot finish the call."""
        self.broken = True
        self.board.fail(text)
        message = bytearray(text.encode()[:1024])
        for rank in range(self.size):
            if not self.near(rank, self.rank):
                self._sent.append(self.comm.Isend([message, MPI.BYTE], rank, _FAILED))

    def failures(self) -> dict[int, str]:
        """What ranks have reported, by rank."""
        found = {self.members[member]: text for member, text in self.board.failed().items()}
        status = MPI.Status()
        while not self.one_node and self.comm.Iprobe(MPI.ANY_SOURCE, _FAILED, status):
            message = bytearray(status.Get_count(MPI.BYTE))
            self.comm.Recv([message, MPI.BYTE], status.source, _FAILED)
            found[status.source] = message.decode(errors="replace")
        return found


_PENDING = MPI.Comm.Create_keyval()


def _duplicate(comm: MPI.Intracomm, limit: float) -> MPI.Intracomm:
    """A duplicate, once all ranks ask for one; after a call that gave up, the next one goes on with its request."""
    pending = cast("tuple[MPI.Intracomm, MPI.Request] | None", comm.Get_attr(_PENDING))
    duplicate, request = pending or comm.Idup()
    comm.Set_attr(_PENDING, (duplicate, request))
    deadline = time.monotonic() + limit
    while not request.Test():
        _yield()
        if time.monotonic() > deadline:
            raise RankError(f"rank {comm.rank}: the other ranks did not make this call within {limit:g} s")
    comm.Delete_attr(_PENDING)
    return duplicate


class _OthersFailed(RankError):
    """Raised where another rank has failed, and has told everybody."""


class Watch:
    """The waits of one call: they yield, and end when a rank fails or the time is over."""

    def __init__(self, team: Team, limit: float) -> None:
        self._team = team
        self._limit = limit
        self._deadline = time.monotonic() + limit
        self._turns = 0

    def until(self, done: Callable[[], bool]) -> None:
        """Waits until `done()`."""
        while not done():
            self.pause()

    def pause(self) -> None:
        """One turn of waiting; raises `RankError` when waiting has no end."""
        _yield()
        self._turns += 1
        if self._turns % _LOOKS == 0:
            self.look()

    def look(self) -> None:
        """Raises `RankError` if a rank has failed or the time is over."""
        failed = self._team.failures()
        if failed:
            said = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items()))
            raise _OthersFailed(f"the call ended on all ranks, because one failed: {said}")
        if time.monotonic() > self._deadline:
            late = [self._team.members[m] for m in self._team.board.missing()]
            who = f"; ranks {late} of its node have not come so far" if late else ""
            raise RankError(
                f"rank {self._team.rank} waited longer than {self._limit:g} s{who}; if they are only slow, give a "
                f"higher limit, else look for a rank that died or did not make the call"
            )


@contextmanager
def moving(team: Team) -> Generator[None]:
    """While data move: an error on this rank ends the call on all, and the team with it."""
    try:
        yield
    except _OthersFailed as error:
        team.broken = True
        raise RankError(str(error)) from None
    except BaseException as error:
        team.fail(f"{type(error).__name__}: {error}")
        raise


def world() -> Comm:
    """The communicator of all ranks that were started together."""
    return MPI.COMM_WORLD


_KEY = MPI.Comm.Create_keyval()


def team_of(comm: MPI.Intracomm, limit: float = TIME_LIMIT, nodes: int | None = None) -> Team:
    """The communicator's team, built by the first call (which all ranks must make) or after a failure.

    `nodes` pretends that the ranks are on so many nodes; without it `RESHARD_MPI_NODES` may.
    """
    found = cast("Team | None", comm.Get_attr(_KEY))
    if found is None or found.broken or nodes is not None:
        found = Team(comm, nodes if nodes is not None else _pretended(), limit)
        comm.Set_attr(_KEY, found)
    return found


def _room() -> int:
    """Bytes of this node that shared windows may fill: those beyond are a bus error, not an error of MPI."""
    if not hasattr(os, "statvfs") or not os.path.isdir(_SHARED):
        return sys.maxsize
    found = os.statvfs(_SHARED)
    return found.f_bavail * found.f_frsize // 2


def _pretended() -> int | None:
    text = os.environ.get(NODES)
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise AgreementError(f"{NODES}={text!r}: give the number of nodes to pretend, a whole number from 1 up")
    return int(text)


def _node(comm: MPI.Intracomm, nodes: int | None) -> MPI.Intracomm:
    near = cast("MPI.Intracomm", comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank))
    if nodes is None:
        return near
    return cast("MPI.Intracomm", near.Split(comm.rank * nodes // comm.size, comm.rank))
