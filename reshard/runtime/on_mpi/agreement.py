"""Agreement before any data move: all ranks make the same request with tiles that fit, or all raise the same error.

In the normal case this costs one synchronization: each rank posts a digest of its request, and all digests are equal.
Only if they differ, or if a rank has failed, do the ranks gather each other's text to say what went wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, cast

from reshard import errors
from reshard.errors import AgreementError, BudgetError, ReshardError
from reshard.runtime.on_mpi.team import Team, Watch, moving
from reshard.runtime.on_mpi.window_tiles import NOWHERE, Posted

T = TypeVar("T")


def begin(
    team: Team,
    limit: float,
    request: str,
    prepare: Callable[[], T],
    posting: Callable[[T], Posted] | None = None,
) -> tuple[Watch, T]:
    """Prepares a call and agrees on `request` with the other ranks: either all ranks go on, or all raise and nothing
    has moved.

    Returns the watch for the call's waits, and what `prepare` returned. `posting` turns that into the words that the
    other ranks of the node need, see `window_tiles.where`.
    """
    watch = Watch(team, limit)
    prepared: T | None = None
    posted = NOWHERE
    error: Exception | None = None
    try:
        prepared = prepare()
        posted = posted if posting is None else posting(prepared)
    except Exception as caught:  # The other ranks are waiting: it is raised once they know.
        error = caught
    agree(team, watch, request, digest_of(request), error, posted, posted.address > 0, posted.place > 0)
    return watch, cast(T, prepared)


def digest_of(text: str) -> int:
    """A number of 62 bits that tells requests apart, the same in every process.

    >>> digest_of("a") == digest_of("a") != digest_of("b")
    True
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def agree(
    team: Team,
    watch: Watch,
    request: str,
    digest: int,
    error: Exception | None = None,
    words: Sequence[int] = (),
    plain: bool = True,
    shared: bool = True,
) -> None:
    """Returns on all ranks, or raises on all: the ranks' own `error`, or `AgreementError` if their requests differ.

    `request` is this rank's request as text and `digest` its number; `words`, `plain` and `shared` are passed
    to `Team.sync`.
    """
    team.calls += 1
    number = -1 if error is not None else digest + team.calls
    with moving(team):
        if team.sync(watch, number, words, plain, shared):
            return
    kind = "" if error is None else type(error).__name__
    mine = _Statement(kind, str(error), getattr(error, "smallest", 0), request, team.calls)
    statements: list[_Statement] = team.comm.allgather(mine)
    team.calls = max(statement.calls for statement in statements)
    _raise(statements, error)


class _Statement(NamedTuple):
    """What a rank tells the others after a failed agreement: its error, if it has one, and its request.

    `kind` and `text` are the error's class and message, `smallest` the extra field of a `BudgetError`.
    """

    kind: str
    text: str
    smallest: int
    request: str
    calls: int


def _raise(statements: list[_Statement], own: Exception | None) -> None:
    failed = [(rank, each) for rank, each in enumerate(statements) if each.kind]
    if not failed:
        raise AgreementError(
            f"the ranks ask for different things, so nothing was moved: {_requests(statements)}; make the same call "
            f"on all"
        )
    alike = len(failed) == len(statements) and len({(each.kind, each.text) for _, each in failed}) == 1
    if own is not None and alike:
        raise own
    more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
    rank, first = failed[0]
    raise _error(first, f"rank {rank}{more}: {first.text}; nothing was moved") from own


def _requests(statements: list[_Statement]) -> str:
    """The different requests, each with the ranks that made it."""
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(statements):
        ranks.setdefault(f"{each.request} (call {each.calls} of this communicator)", []).append(rank)
    return "; ".join(f"ranks {made}: {request}" for request, made in ranks.items())


def _error(statement: _Statement, text: str) -> ReshardError:
    """An error of the same class with this text; `AgreementError` if the class is not one of this package."""
    kind = getattr(errors, statement.kind, None)
    if kind is BudgetError:
        return BudgetError(text, statement.smallest)
    if isinstance(kind, type) and issubclass(kind, ReshardError):
        return kind(text)
    return AgreementError(f"{statement.kind}: {text}")
