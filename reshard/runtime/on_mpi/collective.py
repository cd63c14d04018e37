"""One collective call, from its arguments to its end: what each public function of `reshard.mpi` runs in.

    turn         this thread's turn on the communicator, after a move that a thread makes      team.Turns
    team         the ranks' team, built anew after a failure                                   team
    agreement    arguments checked and planned; all ranks go on, or none                       prepare_together
    body         the caller's `with` block: data move                                          team.report_failure
    end          nobody returns before all are done

Everything that depends on the caller's arguments belongs into `prepare`: an exception there, of any kind and on any
rank, ends the call on all ranks at once. `limit` counts from the beginning of the call.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, cast

import numpy as np
from mpi4py import MPI

from reshard import errors
from reshard.errors import AgreementError, BudgetError, PlanError, ReshardError, quoted
from reshard.plans.manifest import Manifest, list_differences
from reshard.runtime.on_mpi.team import (
    OVERLAP,
    TIME_LIMIT,
    Team,
    Watch,
    check_alive,
    report_failure,
    team_at_hand,
    team_of,
    turns_of,
)
from reshard.runtime.on_mpi.window_tiles import ABSENT, NOWHERE, Posted
from reshard.types.whole import planning_until

T = TypeVar("T")


class Agreed(NamedTuple, Generic[T]):
    """A call that all ranks have agreed on: their team, the watch for all waits, and what this rank prepared."""

    team: Team
    watch: Watch
    value: T


class ReadyCall(NamedTuple):
    """What a rank has prepared: what all must request alike, what it posts to its node, what it runs, and what becomes
    of the result when all ranks are done.
    """

    text: str
    posted: Posted
    run: Callable[[Team, Watch], Any]
    finish: Callable[[Any], Any] | None = None


def run_together(
    comm: MPI.Intracomm,
    limit: float,
    prepare: Callable[[Team], ReadyCall],
    ahead: Callable[[Team, Watch], None] | None = None,
) -> Any:
    """Prepares a call, agrees on it with the other ranks, and runs it. `ahead` is as in `collective`."""
    with collective(comm, limit, prepare, lambda ready: ready.text, lambda ready: ready.posted, ahead) as agreed:
        team, watch, ready = agreed
        moved = ready.run(team, watch)
    return moved if ready.finish is None else ready.finish(moved)


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
    begun, turns = team_at_hand(check_communicator(comm)), turns_of(comm)
    if begun is not None:
        begun.join_started()
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
            # Once threads have overlapped, the ranks must not pair the calls of different ones.
            thread = f", in thread {threading.current_thread().name}" if turns.mixed else ""
            return f"{request(value)}{thread}"

        if ahead is not None:
            with report_failure(team):
                ahead(team, watch)
        if alone is not None:
            posting = lambda value: Posted(int(turns.is_here and alone(team, value)), 0, 0, ABSENT)  # noqa: E731
        value = prepare_together(team, watch, checked, described, posting)
        ended = alone is not None and team.shared  # All ranks have posted that they need not meet again.
        with report_failure(team):
            yield Agreed(team, watch, value)
            ended = ended or team.sync(watch, -1 if turn.overlapped else 0)
        if not ended:
            raise AgreementError(OVERLAP)
    except AgreementError as error:
        turns.mixed |= OVERLAP in str(error)  # All ranks learn it in the same call.
        raise
    finally:
        turn.release()


def check_communicator(comm: object) -> MPI.Intracomm:
    """The communicator itself; raises `AgreementError` if it is none, and `RankError` if it has been freed."""
    if not isinstance(comm, MPI.Intracomm):
        raise AgreementError(
            f"comm {quoted(comm)} is not a communicator of these ranks; give one such as MPI.COMM_WORLD"
            f"{', or what comm.Merge() returns' if isinstance(comm, MPI.Intercomm) else ''}"
        )
    return check_alive(comm)


# Agreement before any data move: all ranks make the same request with tiles that fit, or all raise the same error.
#
# In the normal case this costs one synchronization: each rank posts a digest of its request, and all digests are equal.
# Only if they differ, or if a rank has failed, do the ranks gather each other's text to say what went wrong.


MANIFEST_END = "\n"
"""What follows the manifest in the request for a tree."""


def prepare_together(
    team: Team,
    watch: Watch,
    prepare: Callable[[], T],
    request: Callable[[T], str],
    posting: Callable[[T], Posted] | None = None,
) -> T:
    """What `prepare` returns, once all ranks agree on the `request` that describes it; or all ranks raise.

    An exception of any kind in these functions is raised on all ranks. Planning that would take longer than the
    watch's limit is such an exception.
    """
    prepared: T | None = None
    posted = NOWHERE
    text = ""
    error: Exception | None = None
    try:
        with planning_until(watch.deadline - watch.margin):
            prepared = prepare()
        text = request(prepared)
        posted = posted if posting is None else posting(prepared)
    except Exception as caught:  # The other ranks are waiting: it is raised once they know.
        error = caught
    team.calls += 1
    number = -1 if error is not None else digest_of(text) + team.calls
    with report_failure(team):
        agreed = team.sync(watch, number, posted, posted.address != 0, posted.place != 0, posted.into)
    if not agreed:
        raise_disagreement(team, watch, text + (", with an out" if posted.into else ""), error)
    return cast(T, prepared)


def digest_of(text: str) -> int:
    """A number of 62 bits that tells requests apart, the same in every process.

    >>> digest_of("a") == digest_of("a") != digest_of("b")
    True
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def raise_disagreement(team: Team, watch: Watch, request: str, error: Exception | None = None) -> NoReturn:
    """Raises the same error on all ranks, which were to make this request and do not: `AgreementError`, or that of one
    of them, perhaps this rank's own `error`.
    """
    # What each rank requested, or why it failed.
    mine = Statement.of(error, request, team.calls)
    with report_failure(team):
        statements = [Statement(*json.loads(text)) for text in gather_texts(team, watch, json.dumps(mine))]
    team.calls = max(statement.calls for statement in statements)
    failed = {rank: each for rank, each in enumerate(statements) if each.kind}
    if failed:
        raise join_errors(failed, error, len(statements))
    raise AgreementError(
        f"the ranks ask for different things, so nothing was moved: "
        f"{_compare_manifests(statements) or _list_requests(statements)}; make the same call on all"
    )


_MOST_TOLD = 4096  # Characters of an error that others hear.


class Statement(NamedTuple):
    """What a rank tells others after a failed agreement: its error, if it has one, and its request.

    `kind` and `text` are the error's class and message, `smallest` the extra field of a `BudgetError`.
    """

    kind: str
    text: str
    smallest: int = 0
    request: str = ""
    calls: int = 0

    @classmethod
    def of(cls, error: Exception | None, request: str = "", calls: int = 0) -> Statement:
        """What a rank says of its error."""
        return cls(
            type(error).__name__ if error else "",
            str(error)[:_MOST_TOLD],
            getattr(error, "smallest", 0),
            request,
            calls,
        )


def gather_texts(team: Team, watch: Watch, text: str) -> list[str]:
    """The text of each rank, on all of them."""
    return [content.decode() for content in gather_contents(team, watch, text.encode())]


def gather_contents(team: Team, watch: Watch, content: bytes) -> list[bytes]:
    """The bytes of each rank, on all of them."""

    def wait(request: MPI.Request) -> None:
        try:
            watch.until(request.Test)
        except BaseException:
            _given_up.append(request)  # It is kept alive: MPI may still write to its buffers.
            raise

    mine = np.frombuffer(content, np.uint8)
    sizes = np.empty(team.size, np.int64)
    wait(team.comm.Iallgather(np.array([mine.size], np.int64), sizes))
    contents = np.empty(int(sizes.sum()), np.uint8)
    wait(team.comm.Iallgatherv(mine, [contents, sizes.tolist()]))
    return [part.tobytes() for part in np.split(contents, np.cumsum(sizes)[:-1])]


_given_up: list[MPI.Request] = []


def join_errors(failed: Mapping[int, Statement], own: Exception | None, ranks: int) -> Exception:
    """The one error of ranks of which some failed, by rank: this one's `own` if all of so many ranks have the same."""
    if own is not None and len(failed) == ranks and len({(each.kind, each.text) for each in failed.values()}) == 1:
        return own
    more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
    rank, first = min(failed.items())
    text, kind = f"rank {rank}{more}: {first.text}; nothing was moved", getattr(errors, first.kind, None)
    if isinstance(kind, type) and issubclass(kind, ReshardError):
        error: Exception = kind(text, first.smallest) if issubclass(kind, BudgetError) else kind(text)
    else:
        error = AgreementError(f"{first.kind}: {text}")  # Not a class of this package.
    error.__cause__ = own
    return error


def _compare_manifests(statements: list[Statement]) -> str | None:
    """How the manifests of two ranks differ, if the requests are manifests of trees; None otherwise."""
    try:
        manifests = [Manifest.from_json(each.request.partition(MANIFEST_END)[0]) for each in statements]
    except ReshardError:
        return None
    other = next((rank for rank, each in enumerate(manifests) if each != manifests[0]), None)
    if other is None:
        return None
    return "; ".join(list_differences(manifests[0], manifests[other], "on rank 0", f"on rank {other}"))


def _list_requests(statements: list[Statement]) -> str:
    """The different requests, each with the ranks that made it."""
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(statements):
        request, end, options = each.request.partition(MANIFEST_END)
        if end:  # The manifests are equal on all ranks by now.
            request = f"a tree of arrays, {options or 'no options'}"
        ranks.setdefault(f"{request} (call {each.calls} of this communicator)", []).append(rank)
    return "; ".join(f"ranks {made}: {request}" for request, made in ranks.items())


# Time limits of calls: how long a call may plan and wait for other ranks, in seconds.


def seconds_of(limit: object) -> float | None:
    """A time limit in seconds; None if it is not a positive number.

    >>> seconds_of(3), seconds_of(0), seconds_of("soon")
    (3.0, None, None)
    """
    if type(limit) is float and limit > 0:
        return limit
    if isinstance(limit, bool) or not isinstance(limit, Real):
        return None
    try:
        seconds = float(limit)
    except OverflowError:
        return None
    return seconds if seconds > 0 else None


def check_limit(limit: object) -> None:
    """Raises `PlanError` unless a time limit is a positive number."""
    if seconds_of(limit) is None:
        raise PlanError(f"limit {quoted(limit)}: give a positive number of seconds")
