"""All ranks of a communicator meet, or all give up in time, before they make what blocks inside MPI.

Making communicators and windows waits inside MPI until every rank takes part, and cannot be given up. A rank therefore
first says that it is there, and rank 0 opens the meeting once all are:

    rank 1    come 1 ->               <- opened 1                       all go on, and none waits long inside MPI
    rank 2    come 1 ->    leave 1 ->              come 2 ->            gave up once, and came back in its next call
    rank 0              (rank 1)           (none)         (all): opens

A rank that leaves looks out for an opening that is already on its way, for a time much longer than a message takes.
The messages go over a duplicate of the communicator that is made once, and for which the ranks wait as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import cast

import numpy as np
from mpi4py import MPI

from reshard.errors import RankError
from reshard.runtime.on_mpi.tags import OPENED, PRESENCE

_GRACE = 0.5
"""Seconds, at most, that a rank which leaves looks out for an opening; a quarter of a short limit."""

pause = cast("Callable[[], None]", getattr(os, "sched_yield", lambda: time.sleep(0)))
"""Yields the core."""


def meet(comm: MPI.Intracomm, limit: float) -> None:
    """Returns on all ranks once all are here; raises `RankError` on a rank that has waited `limit` seconds."""
    grace = min(_GRACE, limit / 4)
    deadline = time.monotonic() + limit - grace
    if not _meeting_of(comm).held(deadline, grace):
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
            self._made = until(self._request.Test, deadline)
        if not self._made:
            return False
        if self._comm.rank == 0:
            return until(self._open, deadline)
        self._number += 1
        self._send(self._number, 0, PRESENCE)
        if until(self._opened, deadline):
            return True
        self._send(-self._number, 0, PRESENCE)
        return until(self._opened, time.monotonic() + grace)

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


def until(done: Callable[[], bool], deadline: float) -> bool:
    """Whether `done()` is true before the deadline; the wait yields the core."""
    while not done():
        if time.monotonic() > deadline:
            return False
        pause()
    return True


def _free(comm: MPI.Comm, _: int, meeting: Meeting) -> None:
    if comm not in (MPI.COMM_WORLD, MPI.COMM_SELF):  # They go in MPI_Finalize, in which nothing is to be freed.
        meeting.free()


_KEY = MPI.Comm.Create_keyval(delete_fn=_free)


def _meeting_of(comm: MPI.Intracomm) -> Meeting:
    meeting = cast("Meeting | None", comm.Get_attr(_KEY))
    if meeting is None:
        meeting = Meeting(comm)
        comm.Set_attr(_KEY, meeting)
    return meeting
