"""Moves that are made again and again: what a communicator keeps of them, and the call that takes it.

    call 1    general: `collective`         counted
    call 2    general                       the ranks allocate the memory for small moves and prepare a `StagedMove`
    call 3    `StagedMove`                  one synchronization; general again if some rank defers

All ranks count the calls that they have agreed on, so that all have a `StagedMove` for a request, or none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

from reshard.runtime.on_mpi.agreement import digest_of, disagree
from reshard.runtime.on_mpi.node.node_sync import STATES
from reshard.runtime.on_mpi.prepare import MoveRequest, Prepared
from reshard.runtime.on_mpi.staged import DEFERRED, UNUSUAL, StagedMove, is_small, stage_of
from reshard.runtime.on_mpi.team import TIME_LIMIT, Team, Watch, moving, team_at_hand

T = TypeVar("T")

General = Callable[[Any, Any, Any], Any]
"""Makes a call in the general way, with this tile, `out` and account."""

_KEPT = 64  # Requests that a communicator keeps: the oldest go.
_AFTER = 1  # General calls of a request before the one that prepares a `StagedMove`.
_LONGEST = 2**53  # Larger ints need not be exact as floats.
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
    _forget_oldest(team)
    return left if isinstance(left, StagedMove) else None


def kept(comm: object, key: Hashable) -> StagedMove | None:
    """What a communicator has kept of a request, if it can still be used."""
    team = team_at_hand(comm)
    move = None if team is None else team.repeated.get(key)
    return move if isinstance(move, StagedMove) and move.team.alive else None


class KeptRequest(NamedTuple):
    """A request that all ranks of a team have agreed on: its key, its text and digest, and what it is about."""

    team: Team
    key: Hashable
    text: str
    digest: int
    value: Any


def keep_agreed(team: Team, key: Hashable, text: str, value: object) -> None:
    """Keeps a request that all ranks have agreed on, and that they may agree on again by `agree_again`."""
    if team.one_node:
        team.repeated[key] = KeptRequest(team, key, text, STATES * (digest_of(f"again {text}") // STATES), value)
        _forget_oldest(team)


def agreed_before(comm: object, key: Hashable) -> KeptRequest | None:
    """What a communicator has kept of a request by `keep_agreed`, if it can still be used."""
    team = team_at_hand(comm)
    agreed = None if team is None else team.repeated.get(key)
    return agreed if isinstance(agreed, KeptRequest) and agreed.team.alive else None


def agree_again(
    agreed: KeptRequest,
    check: Callable[[], object],
    limit: Any,
    body: Callable[[Team, Watch], T],
    general: Callable[[], T],
) -> T:
    """What `body` returns once all ranks make this request again; `general` makes the call if some rank defers, as one
    does for which `check` does not return the agreed value, or raises.
    """
    team, allowed = agreed.team, seconds(limit)
    turns = team.turns
    again = turns.take_again()
    turn = None if again else turns.take(time.monotonic() + allowed)
    try:
        if team.started is not None:
            team.finish_started()
        watch = Watch(team, allowed)
        state = _joined(agreed, watch, again and allowed is limit and _is_value(agreed, check))
        if state is None:
            disagree(team, watch, agreed.text)
        if state:
            team.repeated.pop(agreed.key, None)
            return general()
        try:
            return body(team, watch)
        except BaseException:
            with moving(team):
                raise
    finally:
        turns.free() if turn is None else turn.release()


def _is_value(agreed: KeptRequest, check: Callable[[], object]) -> bool:
    try:
        return check() == agreed.value
    except Exception:  # The general call raises it, on all ranks.
        return False


def _joined(agreed: KeptRequest, watch: Watch, plain: bool) -> int | None:
    """Whether some rank defers; None if some make another request. One synchronization."""
    team, sync = agreed.team, agreed.team.node_sync
    team.calls = calls = team.calls + 1
    number = agreed.digest + STATES * calls
    try:
        sync.post_head(number if plain else number + 1, team.arena.log())
        if not sync.complete():
            watch.until(sync.complete)
        state = sync.common(number)
        team.arena.update(sync.logs())
    except BaseException:
        with moving(team):
            raise
    return state


def _forget_oldest(team: Team) -> None:
    if len(team.repeated) > _KEPT:
        del team.repeated[next(iter(team.repeated))]


def seconds(limit: Any) -> float:
    """A limit in seconds; the usual one if what is given is none, which the general call then refuses."""
    number = type(limit) is float or (type(limit) is int and limit < _LONGEST)
    return limit if number and limit > 0 else TIME_LIMIT


def call_again(move: StagedMove, tile: Any, out: Any, limit: float, memory: Any, usual: bool, general: General) -> Any:
    """The result of a move that all ranks have made before; `general` makes the call if some rank defers, as one whose
    arguments are not `usual` does.
    """
    team = move.team
    turns = team.turns
    if not turns.take_again():
        return _by_another_thread(move, limit, lambda: general(tile, out, memory))
    try:
        if team.started is not None:
            team.finish_started()
        result = move.at_once(tile, out, limit) if memory is None and usual else UNUSUAL
        if result is UNUSUAL:
            move.start(tile, out, usual)
            result = move.finish(out, limit, memory)
        if result is not DEFERRED:
            return result
        _defer(move)
        return general(tile, out, memory)
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
        if result is not DEFERRED:
            return result
        _defer(move)
        return general()
    finally:
        turn.release()


def _by_another_thread(move: StagedMove, limit: float, general: Callable[[], T]) -> T:
    """Defers, so that the general call sees whether threads overlap."""
    turn = move.team.turns.take(time.monotonic() + limit)
    try:
        move.team.finish_started()
        move.start(None, None, plain=False)
        if move.finish(None, limit) is DEFERRED:
            _defer(move)
        return general()
    finally:
        turn.release()


def _defer(move: StagedMove) -> None:
    """After some rank has deferred: the request is called in the general way for a while."""
    for key, each in list(move.team.repeated.items()):
        if each is move:
            move.team.repeated[key] = _AFTER_DEFERRED
