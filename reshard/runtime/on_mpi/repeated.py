"""Moves that are made again and again: what a communicator keeps of them, and the call that takes it.

    call 1    general: `collective`         counted
    call 2    general                       the ranks allocate the memory for small moves and prepare a `StagedMove`
    call 3    `StagedMove`                  one synchronization; general again if some rank defers

All ranks count the calls that they have agreed on, so that all have a `StagedMove` for a request, or none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from reshard.runtime.on_mpi.prepare import MoveRequest, Prepared
from reshard.runtime.on_mpi.staged import DEFERRED, StagedMove, is_small, stage_of
from reshard.runtime.on_mpi.team import TIME_LIMIT, Team, Watch, team_at_hand

T = TypeVar("T")

_KEPT = 64  # Requests that a communicator keeps: the oldest go.
_AFTER = 1  # General calls of a request before the one that prepares a `StagedMove`.
_AFTER_DEFERRED = 8  # The same, after a rank has deferred.


def keep(team: Team, watch: Watch, request: MoveRequest, ready: Prepared, now: bool = False) -> StagedMove | None:
    """Keeps what the next call of a request needs, once it was called before, or `now`. Collective."""
    if not is_small(team, request, ready):
        return None
    key = request.source, request.target
    left: int | StagedMove = team.repeated.get(key, _AFTER)
    if isinstance(left, StagedMove):
        return left
    if (left > 0 and not now) or not stage_of(team, watch):
        left -= 1
    else:
        left = StagedMove(team, request, ready)
    team.repeated[key] = left
    if len(team.repeated) > _KEPT:
        del team.repeated[next(iter(team.repeated))]
    return left if isinstance(left, StagedMove) else None


def kept(comm: object, key: Hashable) -> StagedMove | None:
    """What a communicator has kept of a request, if it can still be used."""
    team = team_at_hand(comm)
    move = None if team is None else team.repeated.get(key)
    return move if isinstance(move, StagedMove) and move.team.alive else None


def seconds(limit: object) -> float:
    """A limit in seconds, or the usual one if it is not one."""
    return limit if type(limit) is float and limit >= 0 else TIME_LIMIT


def call_again(
    move: StagedMove, tile: Any, out: Any, limit: Any, memory: Any, usual: bool, general: Callable[[], Any]
) -> Any:
    """The result of a move that all ranks have made before; `general` makes the call if some rank defers, as one whose
    arguments are not `usual` does.
    """
    turns, team, allowed = move.team.turns, move.team, seconds(limit)
    if not turns.take_again():
        return _by_another_thread(move, allowed, general)
    try:
        if team.started is not None:
            team.finish_started()
        move.start(tile, out, usual and allowed is limit)
        result = move.finish(out, allowed, memory)
        return general() if _deferred(move, result) else result
    finally:
        turns.free()


def begin_again(move: StagedMove, tile: Any, out: Any, limit: float) -> None:
    """Begins a move; the caller ends it by `end_again`, or another call of the communicator does by `team.started`."""
    turns, team = move.team.turns, move.team
    again = turns.take_again()
    turn = None if again else turns.take(time.monotonic() + limit)
    try:
        team.finish_started()
        move.start(tile, out, again)
    finally:
        turns.free() if turn is None else turn.release()


def end_again(move: StagedMove, out: Any, limit: float, general: Callable[[], Any]) -> Any:
    """The result of a move that has begun."""
    turn = move.team.turns.take(time.monotonic() + limit)
    try:
        result = move.finish(out, limit)
        return general() if _deferred(move, result) else result
    finally:
        turn.release()


def _by_another_thread(move: StagedMove, limit: float, general: Callable[[], T]) -> T:
    """Defers, so that the general call sees whether threads overlap."""
    turn = move.team.turns.take(time.monotonic() + limit)
    try:
        move.team.finish_started()
        move.start(None, None, plain=False)
        _deferred(move, move.finish(None, limit))
        return general()
    finally:
        turn.release()


def _deferred(move: StagedMove, result: object) -> bool:
    """Whether some rank deferred; if so, the request is called in the general way for a while."""
    if result is not DEFERRED:
        return False
    for key, each in list(move.team.repeated.items()):
        if each is move:
            move.team.repeated[key] = _AFTER_DEFERRED
    return True
