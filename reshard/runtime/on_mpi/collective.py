"""One collective call, from its arguments to its end: what each public function of `reshard.mpi` runs in.

    turn         this thread's turn on the communicator                        turns
    team         the ranks' team, built anew after a failure                   team, meeting
    agreement    arguments checked and planned; all ranks go on, or none       agreement
    body         the caller's `with` block: data move                          team.moving
    end          nobody returns before all are done

Everything that depends on the caller's arguments belongs into `prepare`: an exception there, of any kind and on any
rank, ends the call on all ranks at once. `limit` counts from the beginning of the call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

from mpi4py import MPI

from reshard.errors import AgreementError, quoted
from reshard.runtime.on_mpi.agreement import prepare_together
from reshard.runtime.on_mpi.limits import check_limit, seconds_of
from reshard.runtime.on_mpi.team import TIME_LIMIT, Team, Watch, check_alive, moving, team_of
from reshard.runtime.on_mpi.turns import OVERLAP, turns_of
from reshard.runtime.on_mpi.window_tiles import ABSENT, Posted

T = TypeVar("T")


class Agreed(NamedTuple, Generic[T]):
    """A call that all ranks have agreed on: their team, the watch for all waits, and what this rank prepared."""

    team: Team
    watch: Watch
    value: T


@contextmanager
def collective(
    comm: MPI.Intracomm,
    limit: float,
    prepare: Callable[[Team], T],
    request: Callable[[T], str],
    posting: Callable[[T], Posted] | None = None,
    ahead: Callable[[Team, Watch], None] | None = None,
    alone: Callable[[Team, T], bool] | None = None,
) -> Generator[Agreed[T]]:
    """Runs the `with` block once all ranks agree, and ends when all ranks have run theirs; else all ranks raise.

    `prepare` checks this rank's arguments and plans, `request` says what must be the same on all ranks, and `posting`
    what the node's other ranks need to know. `ahead` is what the ranks do together even before that; it depends on no
    argument that may be wrong. `alone` says whether this rank waits for no other in the block, and cannot fail there:
    if that is so on all of them, and one thread of each makes all calls, the ranks do not meet at its end.
    """
    start = time.monotonic()
    allowed = seconds_of(limit) or TIME_LIMIT
    turns = turns_of(_checked(comm))
    turn = turns.take(start + allowed)
    try:
        team = team_of(comm, max(0.0, start + allowed - time.monotonic()))
        watch = Watch(team, allowed, start)
        team.finish_started()

        def checked() -> T:
            check_limit(limit)
            if turn.overlapped:
                raise AgreementError(OVERLAP)
            return prepare(team)

        def described(value: T) -> str:
            return f"{request(value)}{_thread() if turns.mixed else ''}"

        def posted_alone(value: T) -> Posted:
            return Posted(int(turns.is_here and alone is not None and alone(team, value)), 0, 0, ABSENT)

        if ahead is not None:
            with moving(team):
                ahead(team, watch)
        value = prepare_together(team, watch, checked, described, posting if alone is None else posted_alone)
        ended = alone is not None and team.shared  # All ranks have posted that they need not meet again.
        with moving(team):
            yield Agreed(team, watch, value)
            ended = ended or team.sync(watch, -1 if turn.overlapped else 0)
        if not ended:
            raise AgreementError(OVERLAP)
    except AgreementError as error:
        turns.mixed |= OVERLAP in str(error)  # All ranks learn it in the same call.
        raise
    finally:
        turn.release()


def _thread() -> str:
    return f", in thread {threading.current_thread().name}"


def _checked(comm: object) -> MPI.Intracomm:
    if not isinstance(comm, MPI.Intracomm):
        raise AgreementError(
            f"comm {quoted(comm)} is not a communicator of these ranks; give one such as MPI.COMM_WORLD"
            f"{', or what comm.Merge() returns' if isinstance(comm, MPI.Intercomm) else ''}"
        )
    return check_alive(comm)
