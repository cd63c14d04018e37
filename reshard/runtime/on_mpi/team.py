"""The ranks of a communicator as a team: which share a node, how they synchronize, and how a call ends on all.

All ranks build the team together in their first call, and keep it as an attribute of the communicator. Every wait goes
through a `Watch`, which yields the core, notices ranks that have reported failure, and gives up after a time limit.
Before they build it the ranks meet (`meet_ranks`), and the threads of a rank take turns (`Turns`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from threading import get_ident
from typing import Any, NamedTuple, cast

import numpy as np
from mpi4py import MPI

from reshard.errors import AgreementError, PlanError, RankError, TileError
from reshard.runtime.on_mpi.copies.strided_copy import Array
from reshard.runtime.on_mpi.node.arena import LOG, PAGE, Arena, Pool, share_segment
from reshard.runtime.on_mpi.node.cma import RemoteMemory
from reshard.runtime.on_mpi.node.node_sync import NodeSync, sync_bytes
from reshard.runtime.platform_network import find_shared_network
from reshard.types import Layout, Mesh

Comm = MPI.Intracomm

TIME_LIMIT = 60.0
"""Seconds that a rank waits for another one if the call sets no limit."""

NODES = "RESHARD_MPI_NODES"
"""Environment variable: pretend that the ranks are spread over this many nodes, to test messages between nodes."""

YIELDS = MPI.get_vendor()[0] == "Open MPI"
"""Whether this MPI yields the core in a test that finds nothing complete; MPICH never does."""

SPINS = 200
"""Looks at what others have posted, in about 20 us, before a rank with a core of its own yields it."""

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""The cores that this process may use."""

_WORD = 8
_HEAD = 7  # Words of each sync before the call's own.
_GROUPS = 64  # Cached communicators of groups: MPICH has about 2,000 communicators in total.
_LOOK = 2e-3  # Seconds between two checks for failures and the time limit, which cost several times a pause.


# The tags of all messages of this runtime, so that no two kinds of message share one.

FAILED = 901
"""A rank of another node reports that it cannot finish the call."""

EXCHANGE = 902
"""Blocks of a step, or of a direct move (`wire.message_exchange`)."""

OVERWRITE = 903
"""Slots of an exchange inside a donated tile (`run_plan`)."""

DEVICE = 904
"""Blocks from GPU to GPU (`gpu`)."""

PRESENCE = 905
"""A rank comes to a meeting, or leaves it."""

OPENED = 906
"""Everyone has come to the meeting."""

MEASURE = 907
"""A message whose time is taken (`reshard.mpi.measurements`)."""

FIRST_FETCH, FETCHES = 1000, 15000
"""The first tag of fetches, of which each has two of its own, and how many there are before one is used again."""


class Facts(NamedTuple):
    """The machine, as all ranks know it: the node of every rank, and whether the ranks of each node can read each
    other's memory.
    """

    nodes: tuple[int, ...]
    reads: bool


class Started(NamedTuple):
    """A move that has begun: what finishes it, and the thread that makes it meanwhile, or 0."""

    finish: Callable[[], object]
    thread: int = 0


class Team:
    """A private duplicate of a communicator, and what the ranks of this node share: memory, and a `NodeSync`.

    `stages` has the place of the memory for small moves, by its size, 0 if the node has no room; `repeated`
    has what `staged` keeps of earlier calls, and `started` finishes the move that has begun and is not waited for yet.

    `kind` names what is measured of such a team, and `measured` is the network that all its ranks have of that, or
    their error.

    `nodes` has the node of each rank, `members` are the ranks of this node, and `one_node` says whether these are all
    ranks. At the last sync, `plain` says whether all ranks' tiles were C-ordered, `shared` whether all lay in memory
    that their nodes share, and `into` whether the ranks that have a result gave an array for it. A team is `broken`
    once a call has failed on some rank; the next call builds a new one.
    """

    def __init__(self, comm: MPI.Intracomm, nodes: int | None, limit: float) -> None:
        meet_ranks(comm, limit)
        try:
            self.comm = duplicate = comm.Dup()
        except MPI.Exception as error:
            raise RankError(f"MPI cannot duplicate the communicator: {error}; free those no longer used") from None
        self.rank, self.size = comm.rank, comm.size
        self.broken = False
        self.calls = self.fetches = self.fetched = 0
        self.plain = self.shared = True
        self.into = False
        self.freed = False
        self.turns = turns_of(comm)
        self.stages: dict[int, int] = {}
        self.repeated: dict[Hashable, Any] = {}
        self.started: Started | None = None
        self.pool = Pool()
        self._posted = 0
        self._sent: list[MPI.Request] = []
        self._reports: dict[int, str] = {}
        self._groups: dict[tuple[int, ...], MPI.Intracomm] = {}
        node, memory = _split_node(duplicate, nodes)
        split = sync_bytes(node.size)
        self.node_sync = NodeSync(node.size, node.rank, memory[:split])
        self.arena = Arena(node.size, node.rank, memory[split:].view(np.int64)[: node.size * LOG].reshape(-1, LOG))
        self.remote_memory = RemoteMemory(node)
        leaders: list[int] = duplicate.allgather(node.bcast(self.rank if node.rank == 0 else None))
        _free_comm(node)
        order = {leader: number for number, leader in enumerate(dict.fromkeys(leaders))}
        self.nodes = tuple(order[leader] for leader in leaders)
        self.members = tuple(rank for rank in range(self.size) if self.nodes[rank] == self.nodes[self.rank])
        self.one_node = len(self.members) == self.size
        self.kind = f"{MPI.get_vendor()[0]} {self.size} ranks {len(order)} nodes"
        self.measured = find_shared_network(self.kind, duplicate.allgather)
        self.facts = Facts(self.nodes, bool(duplicate.allreduce(self.remote_memory.works, MPI.LAND)))

    def free(self) -> None:
        """Frees the team's communicators; all ranks call it, once. Arrays in the node's memory live on."""
        self.freed = True
        for group in self._groups.values():
            group.Free()
        self._groups.clear()
        self.comm.Free()

    def near(self, rank: int, other: int) -> bool:
        """Whether two ranks are on one node."""
        return self.nodes[rank] == self.nodes[other]

    def sync(
        self,
        watch: Watch,
        digest: int = 0,
        words: Sequence[int] = (),
        plain: bool = True,
        shared: bool = True,
        into: bool | None = None,
    ) -> bool:
        """Waits for all ranks; returns whether all gave the same digest, and the same `into`.

        A digest is a non-negative number; a negative one says that this rank cannot go on. `into` is None on a rank
        that goes with the others. Afterwards `posted()` returns the words of this node's members, `self.plain` is true
        if `plain` was on all ranks, `self.shared` if `shared` was, and `self.into` if `into` was on some.
        """
        ends = np.array([digest, -digest, not plain, not shared, into is True, into is False], np.int64)
        self._posted = _HEAD + len(words)
        self.node_sync.post((*ends.tolist(), self.arena.log(), *words))
        over_all = None if self.one_node else np.empty_like(ends)
        if over_all is not None:
            watch.until(self.comm.Iallreduce(ends, over_all, MPI.MAX).Test)
        watch.until(self.node_sync.complete)
        columns = self.heads()
        most = [max(column) for column in columns] if over_all is None else over_all.tolist()
        self.plain, self.shared, self.into = not most[2], not most[3], bool(most[4])
        return digest >= 0 and most[0] == -most[1] and not (most[4] and most[5])

    def heads(self) -> list[tuple[int, ...]]:
        """The first words that the members of this node gave to the last sync, word by word; updates the arena."""
        heads = [self.node_sync.read(member, _HEAD) for member in range(self.node_sync.size)]
        *columns, logged = zip(*heads, strict=True)
        self.arena.update(list(logged))
        return columns

    def finish_started(self) -> None:
        """Finishes the move that has begun: the next call may use what it needs."""
        started = self.started
        if started is not None and started.thread != get_ident():
            self.started = None
            started.finish()

    def join_started(self) -> None:
        """Waits for the thread that makes the move that has begun, if one does.

        Before a call takes its turn: that thread has the turn, and whoever waits for it there has overlapped.
        """
        started = self.started
        if started is not None and started.thread not in (0, get_ident()):
            started.finish()

    @property
    def alive(self) -> bool:
        """Whether the team can go on: its communicator has not been freed, and no rank has failed.

        The thread of a move that has begun comes first: it must see the reports that are looked for here.
        """
        self.join_started()
        if self.broken or self.freed:
            return False
        if self.node_sync.reported or not self.one_node:
            self.broken = bool(self.failures())
        return not self.broken

    def some(self, watch: Watch, one: bool, other: bool) -> tuple[bool, bool]:
        """Whether each of two conditions holds on some rank."""
        self.sync(watch, plain=not one, shared=not other)
        return not self.plain, not self.shared

    def posted(self) -> list[list[int]]:
        """The words that each member of this node gave to the last sync; valid until this rank posts again."""
        return [self.node_sync.read(member, self._posted)[_HEAD:] for member in range(self.node_sync.size)]

    def gather(self, watch: Watch, words: Sequence[int] = ()) -> list[list[int]]:
        """Waits for the members of this node only; returns the words of each, equally many."""
        self.node_sync.post(words)
        watch.until(self.node_sync.complete)
        return [self.node_sync.read(member, len(words)) for member in range(self.node_sync.size)]

    def settle(self, watch: Watch) -> None:
        """Waits until every rank has reached this point of the call."""
        self.sync(watch)

    def group(self, ranks: tuple[int, ...]) -> MPI.Intracomm:
        """The communicator of these ranks, in this order; created by those ranks together, then cached."""
        if ranks == tuple(range(self.size)):
            return self.comm
        if ranks not in self._groups:
            if len(self._groups) >= _GROUPS:
                self._groups.pop(next(iter(self._groups))).Free()
            self._groups[ranks] = self.comm.Create_group(self.comm.group.Incl(ranks))
        return self._groups[ranks]

    def fail(self, text: str) -> None:
        """Reports to every rank that this one cannot finish the call."""
        self.broken = True
        self.node_sync.fail(text)
        message = bytearray(text.encode()[:1024])
        for rank in range(self.size):
            if not self.near(rank, self.rank):
                self._sent.append(self.comm.Isend([message, MPI.BYTE], rank, FAILED))

    def failures(self) -> dict[int, str]:
        """The failures reported so far, by rank."""
        texts = {self.members[member]: text for member, text in self.node_sync.failed().items()}
        if self.one_node or self.freed:
            return texts
        status = MPI.Status()
        while self.comm.Iprobe(MPI.ANY_SOURCE, FAILED, status):
            message = bytearray(status.Get_count(MPI.BYTE))
            self.comm.Recv([message, MPI.BYTE], status.source, FAILED)
            self._reports[status.source] = message.decode(errors="replace")
        return texts | self._reports


class _OthersFailed(RankError):
    """Another rank has failed and has reported it, so this rank need not."""


class Watch:
    """The waits of one call: they yield the core, and end when a rank fails or the time limit is reached."""

    def __init__(self, team: Team, limit: float, since: float | None = None) -> None:
        self._team = team
        self._limit = limit
        self._looked = time.monotonic()
        self.deadline = (self._looked if since is None else since) + limit

    @property
    def margin(self) -> float:
        """Seconds before the deadline at which a rank stops planning, so that the others hear of it in time."""
        return min(1.0, self._limit / 4)

    def renew(self) -> None:
        """Lets the call go on for another time limit from now: all ranks have come as far as this."""
        self.deadline = time.monotonic() + self._limit

    def until(self, done: Callable[[], bool]) -> None:
        """Waits until `done()` is true: with a core for each rank, it polls for a while before it yields its own."""
        for _ in range(SPINS if self._team.size <= CORES else 0):
            if done():
                return
        while not done():
            self.pause()

    def pause(self) -> None:
        """Yields the core once; raises `RankError` if the wait should end."""
        pause()
        if time.monotonic() - self._looked > _LOOK:
            self.look()

    def look(self) -> None:
        """Raises `RankError` if a rank has failed or the time limit is reached."""
        self._looked = time.monotonic()
        failed = self._team.failures()
        if failed:
            reports = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items()))
            raise _OthersFailed(f"the call ended on all ranks, because one failed: {reports}")
        if self._looked > self.deadline:
            late = [self._team.members[m] for m in self._team.node_sync.missing()]
            who = f"; ranks {late} of its node have not got this far" if late else ""
            raise RankError(
                f"rank {self._team.rank} waited longer than {self._limit:g} s{who}; if they are only slow, give a "
                f"higher limit, else look for a rank that died or did not make the call"
            )


class report_failure:
    """Wraps the part of a call that moves data: an error on this rank ends the call, and the team, on all ranks.

    A class: a generator as context takes 1 us more, and a new array of 14 us enters two.
    """

    __slots__ = ("team", "where")

    def __init__(self, team: Team, where: str = "") -> None:
        """`where` says in which of several calls an error of this rank was, and not a wait that took too long."""
        self.team, self.where = team, where

    def __enter__(self) -> None:
        """Nothing is done before an error."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Tells the other ranks of an error, which is raised on."""
        if error is None:
            return
        if isinstance(error, _OthersFailed):
            self.team.broken = True
            raise RankError(str(error)) from None
        if not self.team.broken:  # Else an inner part of the call has reported it.
            where = "" if isinstance(error, RankError) else self.where
            self.team.fail(f"{where}{type(error).__name__}: {error}")


def world() -> Comm:
    """The communicator of all ranks that were started together (`MPI.COMM_WORLD`).

    >>> comm = world()
    >>> 0 <= comm.rank < comm.size
    True
    """
    return MPI.COMM_WORLD


def _forget_team(comm: MPI.Comm, _: int, team: Team) -> None:
    """Called by MPI on all ranks when a communicator is freed, or gets another team.

    A broken team is left as it is: its messages may still be under way, and would reach a communicator made later.
    """
    team.repeated.clear()  # They keep the team and its memory alive.
    if not team.broken and comm not in (MPI.COMM_WORLD, MPI.COMM_SELF):
        team.free()


_KEY = MPI.Comm.Create_keyval(delete_fn=_forget_team)


def check_alive(comm: MPI.Intracomm) -> MPI.Intracomm:
    """The communicator itself; raises `RankError` if it has been freed."""
    if comm == MPI.COMM_NULL:
        raise RankError(
            "the communicator is MPI.COMM_NULL, or has been freed; give one that is alive: an array's tile can be "
            "wrapped again, DistArray(array.layout, array.tile, comm)"
        )
    return comm


def team_of(comm: MPI.Intracomm, limit: float = TIME_LIMIT, nodes: int | None = None) -> Team:
    """The communicator's team. The first call, and the first after a failure, builds it; all ranks must make that call.

    It is freed with the communicator. A rank that took no part in the failed call, because it skipped it, sees the
    others' reports here, and so comes to the new team in the same call as they.

    `nodes` pretends that the ranks are on this many nodes, by default those of `RESHARD_MPI_NODES`, if set.
    """
    team = cast("Team | None", check_alive(comm).Get_attr(_KEY))
    if team is None or not team.alive or nodes is not None:
        text = os.environ.get(NODES)
        if nodes is None and text:
            if not text.isdecimal() or int(text) < 1:
                raise AgreementError(f"{NODES}={text!r}: give the number of nodes to pretend, a whole number from 1 up")
            nodes = int(text)
        team = Team(comm, nodes, limit)
        comm.Set_attr(_KEY, team)
    return team


def team_at_hand(comm: object) -> Team | None:
    """The communicator's team if it has one, alive or not."""
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        return None
    team: Any = comm.Get_attr(_KEY)
    return team


def _split_node(comm: MPI.Intracomm, nodes: int | None) -> tuple[MPI.Intracomm, Array]:
    """The ranks of this rank's node, and a little memory that they share.

    If they cannot share memory, each is a node of its own, and they send each other messages.
    """
    near = cast("MPI.Intracomm", comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank))
    if nodes is not None:
        part = cast("MPI.Intracomm", near.Split(comm.rank * nodes // comm.size, comm.rank))
        _free_comm(near)
        near = part
    nbytes = sync_bytes(near.size) // near.size + LOG * _WORD
    capacity = -(-nbytes // PAGE) * PAGE

    def gather(words: Sequence[int]) -> list[list[int]]:
        return near.allgather(list(words))

    memory = share_segment(near.size, near.rank, capacity, gather) if near.size > 1 else np.zeros(capacity, np.uint8)
    if memory is not None:
        return near, memory
    _free_comm(near)
    return MPI.COMM_SELF, np.zeros(capacity, np.uint8)


def _free_comm(comm: MPI.Intracomm) -> None:
    """Frees a communicator unless it is one of MPI's own."""
    if comm != MPI.COMM_SELF:
        comm.Free()


# Inter-communicators: their two groups merged into one communicator, and layouts that count the ranks of a group.
#
#     group A, 3 ranks     0  1  2               merged     0  1  2  3  4
#     group B, 2 ranks              0  1
#
#     a layout on <x=2> of group B               is on ranks 3 and 4
#
# MPI merges once, for all later calls, and may put either group first. That blocks inside MPI, so the ranks meet
# before: they ask for a duplicate, which MPI makes, without blocking, when all ranks of both groups have asked for it.
# One gap is left: a rank whose limit ends in the milliseconds between the last request and its own look at it gives up,
# and the others wait inside MPI until it makes its next call. `meeting` closes that gap inside one communicator by a
# message that says who leaves; between two groups nobody can collect these before the groups are merged.


class MergedGroups(NamedTuple):
    """The merged communicator, and its ranks by group; `mine` is the number of this rank's group, 0 or 1."""

    comm: MPI.Intracomm
    ranks: tuple[range, range]
    mine: int

    def giving(self, team: Team, watch: Watch, gives: bool) -> list[int]:
        """The groups, by number, of which some rank gives a tile. Collective."""
        some = team.some(watch, gives and self.mine == 0, gives and self.mine == 1)
        return [number for number, given in enumerate(some) if given]

    def one_giving(self, giving: list[int]) -> int:
        """The one group that gives tiles; raises `TileError` if there are none or two."""
        if len(giving) != 1:
            text = "ranks of both groups of the inter-communicator give tiles" if giving else "no rank gives a tile"
            raise TileError(f"{text}: the source's ranks do, all in one group, and the others give None")
        return giving[0]

    def seated(self, layout: Layout, number: int) -> Layout:
        """A layout on the ranks of a group as one on the merged communicator.

        Raises `PlanError` unless all device ids are ranks of the group.
        """
        ranks = self.ranks[number]
        if layout.mesh.size > len(ranks) or max(layout.mesh.devices) >= len(ranks):
            raise PlanError(
                f"{layout} is on {layout.mesh!r}, but its group of the inter-communicator has {len(ranks)} ranks; give "
                f"a mesh whose device ids are ranks of that group"
            )
        return _shift_devices(layout, ranks.start)


@lru_cache(maxsize=256)
def _shift_devices(layout: Layout, first: int) -> Layout:
    ids = [first + device for device in layout.mesh.devices]
    return replace(layout, mesh=Mesh(layout.mesh.axes, device_ids=ids))


def groups_of(comm: MPI.Intercomm, limit: float) -> MergedGroups:
    """The groups of an inter-communicator, merged in the first call, which all ranks of both make together.

    Raises `RankError` if some rank does not make that call within `limit` seconds; a later call may still merge them.
    """
    if comm == MPI.COMM_NULL:
        raise RankError("the inter-communicator is MPI.COMM_NULL, or has been freed; give one that is alive")
    groups = cast("MergedGroups | None", comm.Get_attr(_GROUPS_KEY))
    if groups is not None:
        return groups
    # A duplicate comes once all ranks have asked for it. MPI cannot cancel the request: a later call waits for it.
    pending = cast("tuple[MPI.Intercomm, MPI.Request] | None", comm.Get_attr(_PENDING))
    if pending is None:
        pending = comm.Idup()
        comm.Set_attr(_PENDING, pending)
    duplicate, request = pending
    if not wait_until(request.Test, time.monotonic() + limit):
        raise RankError(
            f"rank {comm.rank} of its group: the other ranks of both groups of the inter-communicator did not make "
            f"their first call within {limit:g} s; if they are only slow, give a higher limit, else look for a rank "
            f"that died or did not make the call"
        )
    comm.Delete_attr(_PENDING)
    merged = duplicate.Merge()
    duplicate.Free()
    first = merged.rank == comm.rank
    here, there = comm.size, comm.remote_size
    ranks = (range(here), range(here, here + there)) if first else (range(there), range(there, here + there))
    groups = MergedGroups(merged, ranks, 0 if first else 1)
    comm.Set_attr(_GROUPS_KEY, groups)
    return groups


def _free_groups(_: MPI.Comm, __: int, groups: MergedGroups) -> None:
    groups.comm.Free()


_GROUPS_KEY = MPI.Comm.Create_keyval(delete_fn=_free_groups)
_PENDING = MPI.Comm.Create_keyval()


# All ranks of a communicator meet, or all give up in time, before they make what blocks inside MPI.
#
# Making communicators and windows waits inside MPI until every rank takes part, and cannot be given up. A rank
# therefore first says that it is there, and rank 0 opens the meeting once all are:
#
#     rank 1    come 1 ->               <- opened 1                       all go on, and none waits long inside MPI
#     rank 2    come 1 ->    leave 1 ->              come 2 ->            gave up once, and came back in its next call
#     rank 0              (rank 1)           (none)         (all): opens
#
# A rank that leaves looks out for an opening that is already on its way, for a time much longer than a message takes.
# The messages go over a duplicate of the communicator that is made once, and for which the ranks wait as well.


_GRACE = 0.5
"""Seconds, at most, that a rank which leaves looks out for an opening; a quarter of a short limit."""

pause = cast("Callable[[], None]", getattr(os, "sched_yield", lambda: time.sleep(0)))
"""Yields the core."""


def meet_ranks(comm: MPI.Intracomm, limit: float) -> None:
    """Returns on all ranks once all are here; raises `RankError` on a rank that has waited `limit` seconds."""
    grace = min(_GRACE, limit / 4)
    deadline = time.monotonic() + limit - grace
    meeting = cast("Meeting | None", comm.Get_attr(_MEETING_KEY))
    if meeting is None:
        meeting = Meeting(comm)
        comm.Set_attr(_MEETING_KEY, meeting)
    if not meeting.held(deadline, grace):
        raise RankError(
            f"rank {comm.rank}: the other ranks did not make this call within {limit:g} s; if they are only slow, give "
            f"a higher limit, else look for a rank that died or did not make the call"
        )


class Meeting:
    """One rank's side of the meetings of a communicator; on rank 0, also who has come."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self._request = comm.Idup()
        self._made = False
        self._number = 0
        self._present: dict[int, int] = {}
        self._sent: list[MPI.Request] = []

    def held(self, deadline: float, grace: float) -> bool:
        """Whether all ranks came before the deadline."""
        if not self._made:  # MPI cannot cancel the request: a later call waits for the same one.
            self._made = wait_until(self._request.Test, deadline)
        if not self._made:
            return False
        if self._comm.rank == 0:
            return wait_until(self._open, deadline)
        self._number += 1
        self._send(self._number, 0, PRESENCE)
        if wait_until(self._opened, deadline):
            return True
        self._send(-self._number, 0, PRESENCE)
        return wait_until(self._opened, time.monotonic() + grace)

    def free(self) -> None:
        """Frees the duplicate, unless some ranks have not asked for it yet."""
        if self._made:
            self._comm.Free()

    def _open(self) -> bool:
        """On rank 0: opens the meeting if all the others are there."""
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, PRESENCE, status):
            number = self._receive(status.source, PRESENCE)
            if number > 0:
                self._present[status.source] = number
            elif self._present.get(status.source) == -number:
                del self._present[status.source]
        if len(self._present) < self._comm.size - 1:
            return False
        for rank, number in self._present.items():
            self._send(number, rank, OPENED)
        self._present = {}
        return True

    def _opened(self) -> bool:
        """On the other ranks: whether rank 0 has opened the meeting."""
        if not self._comm.Iprobe(0, OPENED):
            return False
        number = self._receive(0, OPENED)
        if number != self._number:  # An opening that was later than `grace`: the others wait inside MPI.
            self._send(-self._number, 0, PRESENCE)
        return True

    def _send(self, number: int, to: int, tag: int) -> None:
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent.append(self._comm.Isend([np.array([number], np.int64), MPI.INT64_T], to, tag))

    def _receive(self, source: int, tag: int) -> int:
        number = np.empty(1, np.int64)
        self._comm.Recv([number, MPI.INT64_T], source, tag)
        return int(number[0])


def wait_until(done: Callable[[], bool], deadline: float) -> bool:
    """Whether `done()` is true before the deadline; the wait yields the core."""
    while not done():
        if time.monotonic() > deadline:
            return False
        pause()
    return True


def _free_meeting(comm: MPI.Comm, _: int, meeting: Meeting) -> None:
    if comm not in (MPI.COMM_WORLD, MPI.COMM_SELF):  # They go in MPI_Finalize, in which nothing is to be freed.
        meeting.free()


_MEETING_KEY = MPI.Comm.Create_keyval(delete_fn=_free_meeting)


# The threads of a rank take turns on a communicator, and overlapping calls of two threads are noticed.
#
# MPI pairs the calls of a communicator by their order on each rank. Threads that call at the same time have no order,
# so the ranks may pair the call of one thread with that of another, whose data are others. A lock keeps such calls
# apart; both know that they overlapped, and end with one error on all ranks (`collective`).
#
#     thread 1    |--- call 1 ---|                      overlapped: another thread came
#     thread 2           |- waits -|--- call 2 ---|     overlapped: it had to wait
#
# If MPI was started for one thread at a time, all communicators share one lock.


OVERLAP = (
    "two threads of a rank made calls on one communicator at the same time, so the order of these calls is undefined; "
    "let one thread make them, or give each thread a communicator of its own (comm.Dup())"
)


class Turns:
    """The turns of the threads on one communicator; a thread that has the turn may take it again.

    `mixed` is set once threads have overlapped, on all ranks in the same call: from then on, requests name the thread,
    so that the ranks no longer pair calls of different ones.
    """

    def __init__(self, lock: threading.RLock | None = None) -> None:
        self.mixed = False
        self._lock = lock or threading.RLock()
        self.free = self._lock.release
        """Gives back a turn of `take_again`."""
        self._counting = threading.Lock()
        self._owner = 0
        self._last = 0
        self._turn: Turn | None = None
        self._inside = 0
        self.came = 0
        """How many threads have come while another one had the turn."""

    def take_again(self) -> bool:
        """Takes the turn at once if the thread that had the last one asks, and no other is here; whether it did.

        `free` gives it back. Ranks on which the same thread makes all calls need not look for threads that overlap.
        """
        return self._last == get_ident() and not self.mixed and self._lock.acquire(False)

    @property
    def is_here(self) -> bool:
        """Whether this thread had the last turn, and no threads have overlapped so far."""
        return self._last == get_ident() and not self.mixed

    def take(self, deadline: float) -> Turn:
        """Waits for this thread's turn, which it gives back by `release`; `RankError` if the deadline comes first."""
        me = get_ident()
        if self._owner == me and self._turn is not None:
            return self._turn.within()
        with self._counting:
            waits = self._inside > 0
            self._inside += 1
            self.came += waits
            came = self.came
        if not self._lock.acquire(blocking=False):
            waits = True
            left = max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX))
            if not self._lock.acquire(timeout=left):
                with self._counting:
                    self._inside -= 1
                raise RankError("another thread of this rank is in a call on this communicator, and did not return")
        self._owner = self._last = me
        self._turn = Turn(self, waits, came, False)
        return self._turn

    def give_back(self) -> None:
        """Ends the turn of the thread that has it."""
        self._owner = 0
        self._lock.release()
        with self._counting:
            self._inside -= 1


class Turn:
    """One thread's turn."""

    def __init__(self, turns: Turns, waited: bool, came: int, again: bool) -> None:
        self._turns, self._waited, self._came, self._again = turns, waited, came, again

    def within(self) -> Turn:
        """A turn within this one."""
        return Turn(self._turns, self._waited, self._came, True)

    def release(self) -> None:
        """Ends the turn, unless it is one within another."""
        if not self._again:
            self._turns.give_back()

    @property
    def overlapped(self) -> bool:
        """Whether this thread had to wait, or another one has come in the meantime."""
        return self._waited or self._turns.came != self._came


_LEVEL = MPI.Query_thread()
_TURNS_KEY = MPI.Comm.Create_keyval()
_making = threading.Lock()
_process = threading.RLock()


def turns_of(comm: MPI.Intracomm) -> Turns:
    """The turns on a communicator. Raises `AgreementError` in a thread in which MPI must not be called at all."""
    if _LEVEL < MPI.THREAD_SERIALIZED and not MPI.Is_thread_main():
        raise AgreementError("MPI was started for the main thread only; make the call there")
    turns = cast("Turns | None", comm.Get_attr(_TURNS_KEY))
    if turns is None:
        with _making:
            turns = cast("Turns | None", comm.Get_attr(_TURNS_KEY))
            if turns is None:
                turns = Turns(None if _LEVEL == MPI.THREAD_MULTIPLE else _process)
                comm.Set_attr(_TURNS_KEY, turns)
    return turns
