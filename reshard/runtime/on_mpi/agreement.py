"""Agreement before data move: all ranks make the same request, with tiles that fit, or all raise the same error."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from reshard import errors
from reshard.errors import AgreementError, BudgetError, ReshardError
from reshard.runtime.on_mpi.team import Team, Watch, moving


def digest_of(text: str) -> int:
    """A number from 0 up that tells requests apart, the same in every process.

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
) -> None:
    """Returns on all ranks, or raises on all: the ranks' own `error`, or `AgreementError` if their requests differ.

    `request` says what this rank asks for, `digest` is its number; `words` and `plain` are for `Team.sync`.
    """
    team.calls += 1
    asked = -1 if error is not None else digest + team.calls
    with moving(team):
        if team.sync(watch, asked, words, plain):
            return
    kind = "" if error is None else type(error).__name__
    found = _Said(kind, str(error), getattr(error, "smallest", 0), request, team.calls)
    said: list[_Said] = team.comm.allgather(found)
    team.calls = max(each.calls for each in said)
    _raise(said, error)


class _Said(NamedTuple):
    """What a rank tells the others: its error's class and text and what else a `BudgetError` has, and its request."""

    kind: str
    text: str
    smallest: int
    request: str
    calls: int


def _raise(said: list[_Said], own: Exception | None) -> None:
    failed = [(rank, each) for rank, each in enumerate(said) if each.kind]
    if own is not None and len(failed) == len(said) and len({(each.kind, each.text) for _, each in failed}) == 1:
        raise own
    if failed:
        more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        rank, first = failed[0]
        raise _error(first, f"rank {rank}{more}: {first.text}; nothing was moved") from own
    asked: dict[str, list[int]] = {}
    for rank, each in enumerate(said):
        asked.setdefault(f"{each.request} (call {each.calls} of this communicator)", []).append(rank)
    shown = "; ".join(f"ranks {ranks}: {request}" for request, ranks in asked.items())
    raise AgreementError(
        f"the ranks ask for different things, so nothing was moved: {shown}; make the same call on all"
    )


def _error(said: _Said, text: str) -> ReshardError:
    """The error of that class; those of others than this package are errors of agreement."""
    found = getattr(errors, said.kind, None)
    if found is BudgetError:
        return BudgetError(text, said.smallest)
    if isinstance(found, type) and issubclass(found, ReshardError):
        return found(text)
    return AgreementError(f"{said.kind}: {text}")
