"""The threads of a rank take turns on a communicator, and overlapping calls of two threads are noticed.

MPI pairs the calls of a communicator by their order on each rank. Threads that call at the same time have no order, so
the ranks may pair the call of one thread with that of another, whose data are others. A lock keeps such calls apart;
both know that they overlapped, and end with one error on all ranks (`collective`).

    thread 1    |--- call 1 ---|                      overlapped: another thread came
    thread 2           |- waits -|--- call 2 ---|     overlapped: it had to wait

If MPI was started for one thread at a time, all communicators share one lock.
"""

from __future__ import annotations

import threading
import time
from threading import get_ident
from typing import cast

from mpi4py import MPI

from reshard.errors import AgreementError, RankError

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
        self._came = 0

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
            self._came += waits
            came = self._came
        if not self._lock.acquire(blocking=False):
            waits = True
            left = max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX))
            if not self._lock.acquire(timeout=left):
                self._leave()
                raise RankError("another thread of this rank is in a call on this communicator, and did not return")
        self._owner = self._last = me
        self._turn = Turn(self, waits, came, False)
        return self._turn

    def give_back(self) -> None:
        """Ends the turn of the thread that has it."""
        self._owner = 0
        self._lock.release()
        self._leave()

    def _leave(self) -> None:
        with self._counting:
            self._inside -= 1

    @property
    def came(self) -> int:
        """How many threads have come while another one had the turn."""
        return self._came


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
_KEY = MPI.Comm.Create_keyval()
_making = threading.Lock()
_process = threading.RLock()


def turns_of(comm: MPI.Intracomm) -> Turns:
    """The turns on a communicator. Raises `AgreementError` in a thread in which MPI must not be called at all."""
    if _LEVEL < MPI.THREAD_SERIALIZED and not MPI.Is_thread_main():
        raise AgreementError("MPI was started for the main thread only; make the call there")
    turns = cast("Turns | None", comm.Get_attr(_KEY))
    return turns or _make_turns(comm)


def _make_turns(comm: MPI.Intracomm) -> Turns:
    with _making:
        turns = cast("Turns | None", comm.Get_attr(_KEY))
        if turns is None:
            turns = Turns(None if _LEVEL == MPI.THREAD_MULTIPLE else _process)
            comm.Set_attr(_KEY, turns)
    return turns
