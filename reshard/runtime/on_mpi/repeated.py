"""Calls that are made again: what all ranks of a node have agreed on, and how they agree on it once more.

    call 1    `collective`         prepared and agreed on; the ranks keep a `PreparedMove`, and memory for small moves
    call 2    `PreparedMove`       one synchronization; as call 1 if some rank defers

All ranks keep what they have agreed on, so that all have a `PreparedMove` for a request, or none. A handle has one
before its first call. An array that is made like an earlier one has an `AgreedCall`, which moves nothing.

Small moves inside a node: every rank copies its tile to memory that the node shares, and takes what it needs there.

    rank 0     copies its tile to half 0   posts: call 7 |  all posted: copies from half 0     half 1 for call 8 ...
    rank 1     copies its tile to half 0   posts: call 7 |  all posted: copies from half 0

One synchronization is all that a call needs. It carries the agreement: the digest of the request with the number of
the call, and whether this rank *defers*, because an argument is wrong or unusual. If some rank does, none has written
anything, and all of them make the call as if for the first time, which says what is wrong. If the digests differ, the
ranks tell each other what they request, and all raise.

Sums are moves, too, where their plan is one reduction: every rank combines all summands of what it needs, in the order
of the ranks, as `run_plan` combines small ones: so the bits of the first call are those of the next ones.

Two halves are enough: a rank writes to one again two synchronizations later, when all have read it. That holds if
only one move at a time is between its two parts, `start` and `finish`: other calls of the communicator finish it
first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from reshard.geometry.blocks import Block
from reshard.lower.to_mpi import Reduce, seat_of
from reshard.runtime.account import Account, begin_account, measures
from reshard.runtime.numpy_tiles import numpy_dtype, ufunc
from reshard.runtime.on_mpi.collective import digest_of, raise_disagreement
from reshard.runtime.on_mpi.copies.copy_order import list_tile_copies, widen_block
from reshard.runtime.on_mpi.copies.stream_copy import find_kernel
from reshard.runtime.on_mpi.copies.strided_copy import Array, find_word_dtype, view_as_words
from reshard.runtime.on_mpi.global_array import clear_padding
from reshard.runtime.on_mpi.node.node_sync import STATES
from reshard.runtime.on_mpi.prepare import Request, TilePlan
from reshard.runtime.on_mpi.run_plan import ORDERED
from reshard.runtime.on_mpi.team import CORES, SPINS, TIME_LIMIT, Team, Watch, pause, report_failure, team_at_hand
from reshard.runtime.on_mpi.window_tiles import new_tile
from reshard.types.reductions import all_reduce_elements

STAGED = 2 << 20
"""Bytes of a tile up to which moves are staged; a communicator keeps twice as many on each rank, or less: see
`_FIRST_STAGE`."""

_FIRST_STAGE = 256 << 10  # Bytes of a tile up to which a communicator keeps only twice these; larger ones have another.

TILES, ARRAYS = "staged", "staged arrays"
"""Kinds of prepared moves: of tiles, and of distributed arrays."""

_RETAINED = 64  # Requests that a communicator keeps: the oldest go.
_AFTER_DEFERRED = 8  # Calls of a request before the one that prepares it anew, after a rank has deferred.
_LONGEST = 2**53  # Larger ints need not be exact as floats.
_LARGEST = 4 * STAGED  # Bytes of a result: larger ones are copied in the order of their memory.
_RUNS = 64  # Pieces of a layout: of more, a move is copied by tables.
_YIELDS = 64  # Pauses of the compiled call before Python waits, which looks at the clock.
_MOVED = 1  # What the compiled call says when it has made the whole move.
_NO_RESULT, _OUT, _NEW, _DEFERS = 0, 1, 2, 4  # States, whose bits are joined: with and without `out` are two calls.
_LOOKS = 64  # Pauses before a wait looks at the clock.

try:
    from reshard.runtime.on_mpi.copies._stream import exchange, prepare_exchange
except ImportError:  # There was no compiler where this was installed.
    exchange = prepare_exchange = None

_ndarray, _may_share_memory = np.ndarray, np.may_share_memory  # Looked up once: such look-ups are most of a small call.


class Outcome(Enum):
    """What `finish` gives in place of a tile."""

    DEFERRED = "all ranks make the call as if for the first time"


DEFERRED = Outcome.DEFERRED


class AgreedCall:
    """A request that all ranks of a node have agreed on: its text and digest, and what it is about."""

    def __init__(self, team: Team, kind: str, text: str, value: object = None) -> None:
        self.team, self.text, self.value = team, text, value
        self._digest = STATES * (digest_of(f"{kind} {text}") // STATES)

    def hold(self, limit: float) -> tuple[Callable[[], None], bool]:
        """Takes this thread's turn, and finishes the move that has begun; returns what gives the turn back, and whether
        the same thread makes all calls: if not, the rank defers, so that all see whether threads overlap.
        """
        team, turns = self.team, self.team.turns
        # A rank on which another thread came last defers: the calls of two threads have no order, and only the first
        # way to make the call finds that out on all ranks.
        same = turns.take_again()
        release = turns.free if same else turns.take(time.monotonic() + limit).release
        if team.started is not None:
            try:
                team.finish_started()
            except BaseException:
                release()
                raise
        return release, same

    def agree_again(self, watch: Watch, plain: bool) -> bool:
        """Whether all ranks make this request again, and none defers, as one does that is not `plain`.

        One synchronization; `AgreementError` on all ranks if some make another request.
        """
        team, sync = self.team, self.team.node_sync
        team.calls = calls = team.calls + 1
        number = self._digest + STATES * calls
        with report_failure(team):
            sync.post_head(number if plain else number + 1, team.arena.log())
            if not sync.complete():
                watch.until(sync.complete)
            state = sync.common(number)
            team.arena.update(sync.logs())
        if state is None:
            raise_disagreement(team, watch, self.text)
        if state:
            self.forget()
        return not state

    def forget(self) -> None:
        """After some rank has deferred: the request is made as if for the first time, a move for a while."""
        for key, each in list(self.team.repeated.items()):
            if each is self:
                if isinstance(self, PreparedMove):
                    self.team.repeated[key] = _AFTER_DEFERRED
                else:
                    del self.team.repeated[key]


def keep_agreed(team: Team, key: Hashable, text: str, value: object) -> None:
    """Keeps a request that all ranks have agreed on, and that they may agree on again."""
    if team.one_node:
        team.repeated[key] = AgreedCall(team, "again", text, value)
        _forget_oldest(team)


def find_agreed(comm: object, key: Hashable) -> AgreedCall | None:
    """What a communicator has kept of a request, if it can still be used."""
    team = team_at_hand(comm)
    agreed = None if team is None else team.repeated.get(key)
    return agreed if isinstance(agreed, AgreedCall) and agreed.team.alive else None


def keep_prepared(
    team: Team, watch: Watch, request: Request, ready: TilePlan, now: bool = False, kind: str = TILES
) -> PreparedMove | None:
    """Keeps what the next call of a request of a `kind` needs, unless a rank has deferred lately; `now` in any case.

    Collective.
    """
    if not is_small(team, request, ready):
        return None
    # All ranks keep and forget the same keys, since they agree on each request: so they all find it again, or none.
    key = kind, request.source, request.target
    left: int | PreparedMove = team.repeated.get(key, 0)
    if isinstance(left, PreparedMove):
        return left
    if left > 0 and not now:
        left -= 1
    else:
        half = min(STAGED, _FIRST_STAGE) if request.source.tile_bytes <= _FIRST_STAGE else STAGED
        if half not in team.stages:  # Where the node has no room, it is 0 from now on, on all ranks.
            team.stages[half] = team.arena.take(2 * half, partial(team.gather, watch))
        left = PreparedMove(team, request, ready, half, kind) if team.stages[half] else left - 1
    team.repeated[key] = left
    _forget_oldest(team)
    return left if isinstance(left, PreparedMove) else None


def find_prepared(comm: object, key: Hashable) -> PreparedMove | None:
    """The move that a communicator has prepared for a request, by its kind and layouts, if it can still be used."""
    team = team_at_hand(comm)
    move = None if team is None else team.repeated.get(key)
    return move if isinstance(move, PreparedMove) and move.team.alive else None


def _forget_oldest(team: Team) -> None:
    if len(team.repeated) > _RETAINED:
        del team.repeated[next(iter(team.repeated))]


def limit_or_usual(limit: Any) -> float:
    """A limit in seconds; the usual one if what is given is none, which the first call of a request then refuses."""
    number = type(limit) is float or (type(limit) is int and limit < _LONGEST)
    return limit if number and limit > 0 else TIME_LIMIT


def is_small(team: Team, request: Request, ready: TilePlan) -> bool:
    """Whether a move can be staged; the same on all ranks."""
    ends = request.source, request.target
    plain = request.options.budget is None and not request.options.donate
    fits = request.source.tile_bytes <= STAGED and request.target.tile_bytes <= _LARGEST
    few = all(len(dim.pieces.numbers) <= _RUNS for end in ends for dim in end.dims if dim.pieces is not None)
    if not (plain and fits and few and team.one_node and team.size > 1):
        return False
    # The steps last: they are worked out when they are asked for, which takes a quarter of a first call.
    return bool(ready.steps.steps) if ready.direct is not None else find_sum(team, ready) is not None


def find_sum(team: Team, ready: TilePlan) -> Reduce | None:
    """The one reduction that a small move is, without padding that its summands would have to be packed around."""
    steps, (source, target) = ready.steps.steps, (ready.request.source, ready.request.target)
    if len(steps) != 1 or not isinstance(run := steps[0].run, Reduce):
        return None
    padded = zip((source, target), run.frames, strict=True)
    whole = all(math.prod(end.tile_shape) == math.prod(frame) for end, frame in padded)
    return run if whole and team.size * source.tile_bytes <= ORDERED else None


class _Copy(NamedTuple):
    """One copy of a call: what is read in either half, and the view of the result that takes it or combines with it."""

    sources: list[Array]
    extents: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int
    strides: tuple[int, ...]


class PreparedMove(AgreedCall):
    """One rank's part of a small move, which can be made any number of times.

    `start` and `finish` are collective, and called by turns.
    """

    def __init__(self, team: Team, request: Request, ready: TilePlan, half: int, kind: str) -> None:
        super().__init__(team, kind, f"DistArray: {request}" if kind == ARRAYS else str(request))
        source, self._target = request.source, request.target
        # New results of more bytes lie in the arena, whose memory is used again: that of the process is given back to
        # the system, and its pages are cleared again. The ranks take part in that together.
        self._shared = self._target.tile_bytes > _FIRST_STAGE
        self._sync, self._log = team.node_sync, team.arena
        self._looks = 4 * SPINS if team.size <= CORES else 1  # A look takes a quarter of the time of one of `Watch`.
        self._digest_new, self._digest_out = self._digest + _NEW, self._digest + _OUT
        self._number = 0
        self._device = ready.device
        self._dtype = numpy_dtype(source.dtype)
        self._named = source.dtype
        self._given = seat_of(source.mesh, team.rank, team.size) is not None
        self.seat = seat_of(self._target.mesh, team.rank, team.size)
        """This rank's seat in the target's mesh; None if it gets no result."""
        self._taken = self.seat is not None
        self._shapes = source.tile_shape, self._target.tile_shape
        self._clears = self._taken and not self._target.even
        self._empty = np.zeros if self._clears else np.empty  # Padding of new results is zero, as that of others is.
        self._buffers = self._dtype.isbuiltin == 1  # Others have no buffer protocol.
        memory, start, part = team.arena.around(team.stages[half])
        starts = [start + member * part for member in range(team.size)]
        mine = starts[team.node_sync.me]
        self._stages = tuple(np.ndarray(self._shapes[0], self._dtype, memory, mine + at) for at in (0, half))
        itemsize = self._dtype.itemsize
        copies, summands, total = list[Block](), list[Block](), find_sum(team, ready)
        self._received, self._combine, self._count = 0, np.add, 1
        if ready.direct is not None:
            self._received = ready.direct.pulled
            copies = list_tile_copies(((team.rank, ready.direct.own), *ready.direct.pulls), itemsize, starts)
        elif total is not None and total.group:
            ranks, count = [ready.steps.ranks[device] for device in total.group], math.prod(self._shapes[1])
            share = ranks.index(team.rank) if total.scatter else 0
            first, *others = [
                list_tile_copies(
                    [(rank, [block for of in total.each for block in of[share : share + 1]])], itemsize, starts
                )
                for rank in ranks
            ]
            copies, summands = first, [block for other in others for block in other]
            self._combine, self._count = ufunc(total.reduction), len(ranks) if total.reduction == "mean" else 1
            self._received = count * len(others) if total.scatter else all_reduce_elements(count, len(ranks))

        def bind(block: Block, dtype: np.dtype[Any]) -> _Copy:
            before, after = ([axis[side] for axis in block.axes] for side in (1, 2))
            sources = [np.ndarray(block.extents, dtype, memory, block.src + at, before) for at in (0, half)]
            return _Copy(sources, block.extents, dtype, block.dst, tuple(after))

        widened = [widen_block(copy, itemsize) for copy in copies]
        self._copies = tuple(bind(block, find_word_dtype(width)) for block, width in widened)
        self._summands = tuple(bind(block, self._dtype) for block in summands)
        self._exchange: object = None
        if (
            prepare_exchange is not None
            and total is None
            and find_kernel()
            and self._buffers
            and self._given
            and self._taken
        ):
            lines = team.node_sync.where_heads_lie(self._looks, _YIELDS)
            places = [memory.ctypes.data + mine + at for at in (0, half)]
            sizes = [math.prod(shape) * itemsize for shape in self._shapes]
            numbers = [*lines, *places, half, itemsize, *map(len, self._shapes), *sizes, len(copies)]
            numbers += [size for shape in self._shapes for size in shape]
            for wide, width in widened:
                axes = [number for axis in wide.axes for number in axis]
                numbers += [memory.ctypes.data + wide.src, wide.dst, width, len(wide.axes), *axes]
            code = memoryview(cast(Any, np.empty(0, self._dtype))).format
            self._exchange = prepare_exchange(np.array(numbers, np.int64).tobytes(), _ndarray, code)

    def fits(self, tile: Any, out: Any) -> bool:
        """Whether a rank's arguments are plain ones that are right."""
        if self._given:
            if type(tile) is not _ndarray or tile.shape != self._shapes[0]:
                return False
            if tile.dtype is not self._dtype and tile.dtype != self._dtype:
                return False
        elif tile is not None:
            return False
        return out is None or self._takes(out, tile)

    def _takes(self, out: Any, tile: Array | None) -> bool:
        """Whether a result can be written to `out`, which has nothing of the tile's memory."""
        if type(out) is not _ndarray or not self._taken or out.shape != self._shapes[1]:
            return False
        if (out.dtype is not self._dtype and out.dtype != self._dtype) or not out.flags.carray or out is tile:
            return False
        if tile is None or (tile.base is None and out.base is None):  # Each has its own memory.
            return True
        return not _may_share_memory(tile, out)

    def run(self, tile: Any, out: Any, limit: float, memory: Any, plain: bool) -> Any:
        """A whole call: the result, or `DEFERRED`. The caller has the turn; `plain` says that no option is unusual."""
        alone = self._exchange is not None and not (self._shared and out is None)
        if exchange is None or not alone or memory is not None or not plain or measures():
            self.start(tile, out, plain)
            return self.finish(out, limit, memory)
        # Both parts in compiled code, if this rank's arguments are plain ones, and the others come soon.
        team, sync = self.team, self._sync
        result = self._empty(self._shapes[1], self._dtype) if out is None else out
        calls, synced = team.calls + 1, sync.synced + 1
        number = (self._digest_new if out is None else self._digest_out) + STATES * calls
        try:
            done = exchange(self._exchange, tile, result, number, synced, self._log.logged)
            if done:
                team.calls, sync.synced = calls, synced
        except BaseException:
            with report_failure(team):
                raise
        if done == _MOVED:
            return result
        if done:
            self._number = self._digest + STATES * calls
        else:
            self.start(tile, out, plain)
        return self.finish(out, limit)

    def start(self, tile: Any, out: Any, plain: bool = True) -> None:
        """Begins a call: stages the tile and posts it. The tile may change afterwards.

        The rank defers if its arguments are not plain ones. The caller has the turn, and no other move of the
        communicator is begun and not finished.
        """
        team, sync = self.team, self._sync
        if not (plain and self.fits(tile, out)):
            state = _DEFERS
        else:
            state = (_NEW if out is None else _OUT) if self._taken else _NO_RESULT
            if self._given:
                try:
                    self._stages[sync.half][...] = tile
                except BaseException:
                    with report_failure(team):  # Tells the others.
                        raise
        team.calls = calls = team.calls + 1
        self._number = number = self._digest + STATES * calls
        sync.post_head(number + state, self._log.log() if self._shared else self._log.logged)

    def finish(self, out: Any, limit: float, memory: Account | None = None) -> Any:
        """Ends a call: the result, which is `out` if it is given; None outside the target's mesh, or `DEFERRED`."""
        sync = self._sync
        try:
            if not sync.complete(self._looks):
                since, turns = time.monotonic(), 0
                watch: Watch | None = None
                while not sync.complete():
                    pause()
                    turns += 1
                    if turns % _LOOKS == 0:
                        watch = watch or Watch(self.team, limit, since)
                        watch.look()
            state = sync.common(self._number)
            if self._shared:
                self._log.update(sync.logs())
            if state is not None and state <= _NEW:
                # More memory for results takes synchronizations, after which the halves may have changed places.
                staged, synced = 1 - sync.half, sync.synced
                if self._shared and state == _NEW:
                    out = new_tile(self.team, Watch(self.team, limit), self._target, self._dtype).tile
                    if self._clears:
                        clear_padding(self._target, cast(int, self.seat), out)
                result = self._filled(staged, out) if self._taken else None
                if sync.synced != synced:  # A fast rank's next call could write to the half that others still read.
                    self.team.gather(Watch(self.team, limit))
                if memory is not None or measures():
                    # What a call takes and receives. The memory for small moves belongs to the communicator.
                    account = begin_account(self._named, memory)
                    for has, shape in zip((self._given, self._taken), self._shapes, strict=True):
                        if has:
                            account.take(self._device, math.prod(shape))
                    account.receive(self._device, self._received)
                return result
        except BaseException:
            with report_failure(self.team):
                raise
        if state is not None:
            self.forget()
            return DEFERRED
        self.team.heads()
        raise_disagreement(self.team, Watch(self.team, limit), self.text)

    def _filled(self, half: int, out: Array | None) -> Array:
        result = self._empty(self._shapes[1], self._dtype) if out is None else out
        into = result if self._buffers else view_as_words(result)
        for sources, extents, dtype, start, strides in self._copies:
            _ndarray(extents, dtype, into, start, strides)[...] = sources[half]
        if self._summands:
            with np.errstate(all="ignore"):
                for sources, extents, dtype, start, strides in self._summands:
                    view = _ndarray(extents, dtype, into, start, strides)
                    self._combine(view, sources[half], out=view)
                if self._count > 1:
                    result /= self._dtype.type(self._count)
        return result
