"""Small moves inside a node: every rank copies its tile to memory that the node shares, and takes what it needs there.

    rank 0     copies its tile to half 0   posts: call 7 |  all posted: copies from half 0     half 1 for call 8 ...
    rank 1     copies its tile to half 0   posts: call 7 |  all posted: copies from half 0

One synchronization is all that a call needs. It carries the agreement: the digest of the request with the number of the
call, and whether this rank `defers`, because an argument is wrong or unusual. If some rank does, none has written
anything, and all of them make the call again in the general way (`collective`), which says what is wrong. If the
digests differ, the ranks tell each other what they request, and all raise.

Two halves are enough: a rank writes to one again two synchronizations later, when all have read it. That holds if only
one move at a time is between its two parts, `start` and `finish`: other calls of the communicator finish it first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from reshard.lower.to_mpi import seat_of
from reshard.runtime.account import Account, begin_account, measures
from reshard.runtime.numpy_dtypes import numpy_dtype
from reshard.runtime.on_mpi.agreement import digest_of, disagree
from reshard.runtime.on_mpi.direct import Direct, direct
from reshard.runtime.on_mpi.fused_copies import ByteCopy, fused
from reshard.runtime.on_mpi.meeting import pause
from reshard.runtime.on_mpi.prepare import MoveRequest, Prepared
from reshard.runtime.on_mpi.strided_copy import Array, raw
from reshard.runtime.on_mpi.team import CORES, SPINS, Team, Watch, moving
from reshard.runtime.on_mpi.wire.chunks import Region

STAGED = 256 << 10
"""Bytes of a tile up to which moves are staged; a communicator keeps twice as many on each rank."""

_LARGEST = 4 * STAGED  # Bytes of a result: larger ones are copied in the order of their memory.
_LONG = 512  # Bytes from which a run does not gain from being one element, see `strided_copy`.
_STATE = 2  # The word of a sync's head with a rank's state, of which the ranks' bits are joined:
_NO_RESULT, _OUT, _NEW, _DEFERS = 0, 1, 2, 4  # one with an `out` and one without are not the same call.
_LOOKS = 64  # Pauses before a wait looks at the clock.


class Outcome(Enum):
    """What `finish` gives in place of a tile."""

    DEFERRED = "all ranks make the call again in the general way"


DEFERRED = Outcome.DEFERRED


def is_small(team: Team, request: MoveRequest, ready: Prepared) -> bool:
    """Whether a move can be staged; the same on all ranks."""
    ends = request.source, request.target
    plain = request.budget is None and not request.donate and all(end.even for end in ends)
    moves = ready.direct is not None and bool(ready.steps.steps)
    fits = request.source.tile_bytes <= STAGED and request.target.tile_bytes <= _LARGEST
    return plain and moves and fits and team.one_node and team.size > 1


def stage_of(team: Team, watch: Watch) -> bool:
    """Whether the ranks of the node have the memory for small moves; allocates it, once. Collective."""
    if team.stage is None:
        team.stage = team.arena.take(2 * STAGED, partial(team.gather, watch))
    return team.stage != 0


class _Copy(NamedTuple):
    """One copy of a call: what is read in either half, and the view of the result that it fills."""

    sources: tuple[Array, Array]
    extents: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int
    strides: tuple[int, ...]


class StagedMove:
    """One rank's part of a small move, which can be made any number of times.

    `start` and `finish` are collective, and called by turns.
    """

    def __init__(self, team: Team, request: MoveRequest, ready: Prepared) -> None:
        source, target = request.source, request.target
        self.team = team
        self._text = str(request)
        self._digest = digest_of(f"staged {self._text}")
        self._number = 0
        self._device, self._direct = ready.device, cast(Direct, ready.direct)
        self._dtype = numpy_dtype(source.dtype)
        self._named = source.dtype
        self._given = seat_of(source.mesh, team.rank, team.size) is not None
        self._taken = seat_of(target.mesh, team.rank, team.size) is not None
        self._shapes = source.tile_shape, target.tile_shape
        self._buffers = self._dtype.isbuiltin == 1  # Others have no buffer protocol.
        memory, start, part = team.arena.around(team.stage or 0)
        starts = [start + member * part for member in range(team.size)]
        mine = starts[team.node_sync.me]
        shape, strides = self._shapes[0], _strides(self._shapes[0], self._dtype.itemsize)
        self._stages = tuple(np.ndarray(shape, self._dtype, memory, mine + half * STAGED, strides) for half in (0, 1))
        self._copies = tuple(self._viewed(each, memory) for each in fused(self._listed(team, request, starts)))

    def _listed(self, team: Team, request: MoveRequest, starts: list[int]) -> list[ByteCopy]:
        """What this rank copies, out of its own part of the memory as well as out of those of others."""
        every = direct(request.source, request.target, team.rank, team.nodes, self._dtype.itemsize, 0)
        before, after = (_strides(shape, self._dtype.itemsize) for shape in self._shapes)
        pairs = [(team.rank, pair) for pair in every.own]
        pairs += [(rank, pair) for rank, those in every.pulls for pair in those]
        return [
            ByteCopy(
                starts[rank] + _at(source, before),
                _at(target, after),
                target.extents,
                tuple(before[dim] * step for dim, step in source.steps),
                tuple(after[dim] * step for dim, step in target.steps),
            )
            for rank, (source, target) in pairs
        ]

    def _viewed(self, copy: ByteCopy, memory: Array) -> _Copy:
        """A copy with its views of the shared memory; elements that are together on both sides are one wider one."""
        start, into, extents, before, after = copy
        width = self._dtype.itemsize
        while extents and before[-1] == after[-1] == width and extents[-1] * width < _LONG:
            width *= extents[-1]
            extents, before, after = extents[:-1], before[:-1], after[:-1]
        dtype = raw(np.empty(0, np.dtype((np.void, width)))).dtype
        halves = (np.ndarray(extents, dtype, memory, start + half * STAGED, before) for half in (0, 1))
        return _Copy((next(halves), next(halves)), extents, dtype, into, after)

    def fits(self, tile: Any, out: Any) -> bool:
        """Whether a rank's arguments are plain ones that are right."""
        if self._given:
            if type(tile) is not np.ndarray or tile.shape != self._shapes[0] or tile.dtype != self._dtype:
                return False
        elif tile is not None:
            return False
        if out is None:
            return True
        if not self._taken or type(out) is not np.ndarray or out.shape != self._shapes[1] or out.dtype != self._dtype:
            return False
        if not out.flags.carray:
            return False
        return tile is None or not np.may_share_memory(tile, out)

    def start(self, tile: Any, out: Any, plain: bool = True) -> None:
        """Begins a call: stages the tile and posts it. The tile may change afterwards.

        The rank defers if its arguments are not plain ones. The caller has the turn, and no other move of the
        communicator is begun and not finished.
        """
        team = self.team
        sync, fits = team.node_sync, plain and self.fits(tile, out)
        if fits and self._given:
            try:
                np.copyto(self._stages[sync.half], tile)
            except BaseException:
                with moving(team):  # Tells the others.
                    raise
        team.calls += 1
        self._number = number = self._digest + team.calls
        state = _DEFERS if not fits else _NO_RESULT if not self._taken else _NEW if out is None else _OUT
        sync.post((number, -number, state, 0, 0, 0, team.arena.logged))

    def finish(self, out: Any, limit: float, memory: Account | None = None) -> Any:
        """Ends a call: the result, which is `out` if it is given; None outside the target's mesh, or `DEFERRED`."""
        team = self.team
        sync = team.node_sync
        try:
            if not sync.complete():
                self._wait(sync.complete, limit)
            state = sync.common(self._number, _STATE)
        except BaseException:
            with moving(team):
                raise
        if state is None:
            team.heads()
            disagree(team, Watch(team, limit), self._text)
        if state > _NEW:
            return DEFERRED
        try:
            result = self._filled(1 - sync.half, out) if self._taken else None
            if memory is not None or measures():
                self._count(memory)
        except BaseException:
            with moving(team):
                raise
        return result

    def _filled(self, half: int, out: Array | None) -> Array:
        result = np.empty(self._shapes[1], self._dtype) if out is None else out
        into = result if self._buffers else raw(result)
        for sources, extents, dtype, start, strides in self._copies:
            np.copyto(np.ndarray(extents, dtype, into, start, strides), sources[half])
        return result

    def _wait(self, complete: Callable[[], bool], limit: float) -> None:
        for _ in range(SPINS if self.team.size <= CORES else 0):
            if complete():
                return
        since, turns = time.monotonic(), 0
        watch: Watch | None = None
        while not complete():
            pause()
            turns += 1
            if turns % _LOOKS == 0:
                watch = watch or Watch(self.team, limit, since)
                watch.look()

    def _count(self, memory: Account | None) -> None:
        """Counts what a call takes and receives. The memory for small moves belongs to the communicator."""
        account = begin_account(self._named, memory)
        if self._given:
            account.take(self._device, int(np.prod(self._shapes[0])))
        if self._taken:
            account.take(self._device, int(np.prod(self._shapes[1])))
        account.receive(self._device, self._direct.pulled)


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The byte strides of a C-ordered tile."""
    strides: list[int] = []
    for extent in reversed(shape):
        strides.append(itemsize)
        itemsize *= extent
    return tuple(reversed(strides))


def _at(region: Region, strides: tuple[int, ...]) -> int:
    """The byte of a C-ordered tile at which a region starts."""
    return sum(at * stride for at, stride in zip(region.start, strides, strict=True))
