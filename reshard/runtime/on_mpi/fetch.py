"""Exchanges in which a rank waits for its neighbours alone, made once or again and again: rows and halos that ranks
name for themselves (`lower.to_mpi.picks`), and moves between two layouts by handles.

    begin     each rank sends what others take of its tile, and says that the tile is ready
    finish    it copies what it has itself, takes what has arrived, copies what others have in shared memory, and waits
              until those that read its own tile have done so

Inside a node, large parts are read where they lie; small ones, and those of private tiles that cannot be read, are
written by their owner to memory of who takes them. Of a move both sides know who takes what of whom. What ranks name
they ask for, once: nobody knows who will ask it, so the ranks make out together when all have been asked (a
non-blocking consensus, in which each talks to those that it asks alone).

    rank 0    asks 2        is asked by 1, answers      all that it sent was received: enters a barrier ...
    rank 1    asks 0        nobody asks it              ... in which it goes on answering, until all have entered

A rank whose arguments are wrong takes part all the same, and says so to those that take from it: they and it raise the
same error, and what others wait for comes to no harm.

Each exchange has tags of its own, so that several may be under way, and messages of one never reach another.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from mpi4py import MPI

from reshard.geometry.blocks import Block, scale_blocks
from reshard.lower.to_mpi import Box, Picks, fetches_by_rank, measure_along, read_request, served_by_rank, write_request
from reshard.lower.to_mpi.peer_table import pack_shape
from reshard.runtime.account import Account
from reshard.runtime.on_mpi.copies.copy_order import list_copy_steps, order_copies, widen_block
from reshard.runtime.on_mpi.copies.strided_copy import (
    Array,
    RunTable,
    TileCopies,
    are_short_runs,
    copy_view,
    find_word_dtype,
    view_as_words,
)
from reshard.runtime.on_mpi.direct_moves import Direct, read_remote_tiles
from reshard.runtime.on_mpi.node.arena import round_to_line
from reshard.runtime.on_mpi.node.cma import WORTHWHILE
from reshard.runtime.on_mpi.team import FETCHES, FIRST_FETCH, Team, Watch
from reshard.runtime.on_mpi.wire.chunks import DIRECT, mean_run
from reshard.runtime.on_mpi.wire.message_exchange import Call
from reshard.types import Layout

PUSHED = 64 << 10
"""Bytes of a part up to which its owner writes it to memory of who takes it: one more copy, and one wait less."""

PATIENCE = 1e-3
"""Seconds that a result which must stay as it is holds back what has come, before it comes to memory in between: who
reads a tile must not keep its owner waiting for another rank.
"""

_MANY = 4  # Blocks from which a step for each takes longer than their copies by index, made out once.
_BLOCKED = 64 << 10  # Bytes of a copy from which it goes block by block where memory orders differ.


class WordCopy(Protocol):
    """A copy between two arrays of raw words, made out once: that takes as long as to copy ten rows."""

    def run(self, target: Array, source: Array) -> None:
        """Makes the copy."""


class BoxCopy:
    """A copy of a box of one array into a box of another: `slices` is what slices leave of the source, `picked` what
    lists pick of that, along `dim`, or of several dims at once where that is -1. `key` is where it goes, `lists`
    whether by lists.
    """

    def __init__(
        self, key: tuple[Any, ...], lists: bool, slices: tuple[Any, ...], picked: Any = None, dim: int = -1
    ) -> None:
        self._made = key, lists, slices, picked, dim
        self._source: Array | None = None
        self._part: Any = None

    @classmethod
    def between(cls, here: Box, there: Box = ()) -> BoxCopy:
        """The copy into `here` of what the source has `there`, or of all of it.

        >>> target = np.zeros((3, 2), int)
        >>> BoxCopy.between((np.array([2, 0]), slice(0, 2)), (slice(1, 3), slice(0, 2))).run(
        ...     target, np.arange(8).reshape(4, 2)
        ... )
        >>> target.tolist()
        [[4, 5], [0, 0], [2, 3]]
        """

        def index_lists(box: Box) -> tuple[Any, ...]:
            # Numpy takes one list beside slices as it is; several are to pick each with each.
            if sum(not isinstance(along, slice) for along in box) < 2:
                return (*box, ...)
            lists = [np.arange(at.start, at.stop, dtype=np.int64) if isinstance(at, slice) else at for at in box]
            return np.ix_(*cast("list[Array]", lists))

        listed = [dim for dim, along in enumerate(there) if not isinstance(along, slice)]
        key, lists = index_lists(here), not all(isinstance(along, slice) for along in here)
        if len(listed) > 1:
            return cls(key, lists, (...,), index_lists(there))
        slices = (*[along if isinstance(along, slice) else slice(None) for along in there], ...) if there else ()
        return cls(key, lists, slices, there[listed[0]], listed[0]) if listed else cls(key, lists, slices)

    def run(self, target: Array, source: Array) -> None:
        """Makes the copy."""
        key, lists, slices, picked, dim = self._made
        part = source
        if slices:
            # A gather has one tile in all its calls, and a view of it takes as long as a short row.
            if source is not self._source:
                self._source, self._part = source, source[slices]
            part = self._part
        if picked is None and not lists and part.nbytes > _BLOCKED:
            copy_view(target[key], part)
        elif picked is None:
            target[key] = part
        elif dim < 0:
            target[key] = part[picked]
        elif lists or not (into := target[key]).flags.c_contiguous:
            target[key] = part.take(picked, dim)
        else:
            # Indices are right by now; to find that out again, numpy would go through memory of its own.
            part.take(picked, dim, into, "clip")


class BlockCopy:
    """The copies that blocks make between C-ordered arrays of words, into one of so many `elements`."""

    def __init__(self, blocks: Sequence[Block], elements: int, itemsize: int) -> None:
        self._blocks, self._made = blocks, dict[Any, Any]()
        by_index = are_short_runs(blocks, itemsize, _MANY)
        large = itemsize * sum([block.elements for block in blocks]) > _BLOCKED
        self._order = order_copies(blocks, elements, itemsize) if large and not by_index else None
        self._table = RunTable(blocks, itemsize, False) if by_index else None
        few = () if self._order or by_index else scale_blocks(tuple(blocks), itemsize, itemsize)
        self._views = [
            (
                each.extents,
                find_word_dtype(width),
                each.dst,
                *([axis[end] for axis in each.axes] for end in (2, 1)),
                each.src,
            )
            for each, width in (widen_block(block, itemsize) for block in few)
        ]

    def run(self, target: Array, source: Array) -> None:
        """Makes the copies."""
        for extents, dtype, to, into, by, at in self._views:
            np.ndarray(extents, dtype, target, to, into)[...] = np.ndarray(extents, dtype, source, at, by)
        if self._table is not None:
            self._table.copy(target, source)
        if self._order is not None:
            copies = [TileCopies(self._blocks, target, source)]
            for step in list_copy_steps(copies, self._order, self._made, whole=True):
                step()

    def read(self, call: Call, rank: int, address: int, target: Array) -> None:
        """Makes the copies out of memory of another process of the node."""
        move = self._made.setdefault(read_remote_tiles, Direct((), ((rank, tuple(self._blocks)),), (), cast(Any, None)))
        for step in read_remote_tiles({rank: address}, True)(call, move, target, target):
            step()


class Received(NamedTuple):
    """What comes from another rank in each call, and how it gets into the result: out of a message of these extents, or
    out of the owner's tile, in runs of so many bytes; and, where owners are asked, what it is asked.
    """

    owner: int
    extents: tuple[int, ...]
    put: Callable[[], WordCopy]
    pull: Callable[[], WordCopy]
    run: float = math.inf
    request: Array | None = None

    @property
    def elements(self) -> int:
        """How many elements come."""
        return math.prod(self.extents)


class Sent(NamedTuple):
    """What goes to another rank: the extents of the message, and the copy out of the tile into it."""

    extents: tuple[int, ...]
    pack: Callable[[], WordCopy]


class FetchParts(NamedTuple):
    """All that a rank copies of its own tile, receives, and sends, by rank; None where it is asked for that. In `again`
    are, for each dim, places of the result, and those whose elements they get, too.
    """

    own: Callable[[], Sequence[WordCopy]]
    received: Sequence[Received]
    sent: Mapping[int, Sent] | None = None
    again: Sequence[tuple[Array, Array]] = ()

    @property
    def neighbours(self) -> set[int]:
        """The ranks that something comes from, or goes to."""
        return {part.owner for part in self.received} | set(self.sent or ())


def parts_of_picks(picks: Picks, rank: int) -> FetchParts:
    """The parts of what a rank picks."""
    return FetchParts(
        lambda: [BoxCopy.between(box.here, box.there) for box in picks.boxes if box.owner == rank],
        [
            Received(
                box.owner,
                tuple(map(measure_along, box.here)),
                partial(BoxCopy.between, box.here),
                partial(BoxCopy.between, box.here, box.there),
                request=write_request(box.there),
            )
            for box in picks.boxes
            if box.owner != rank
        ],
        None,
        picks.again,
    )


def parts_of_move(source: Layout, target: Layout, rank: int, nodes: tuple[int, ...], itemsize: int) -> FetchParts:
    """The parts of a move between two layouts, of which both sides know who takes what of whom."""
    mine, theirs = (listing(source, target, rank, nodes) for listing in (fetches_by_rank, served_by_rank))
    elements = math.prod(target.tile_shape)

    def unpack(blocks: Sequence[Block]) -> WordCopy:
        return BlockCopy([block.reversed for block in pack_shape(tuple(blocks), "dst")], elements, itemsize)

    def pack(blocks: Sequence[Block], count: int) -> WordCopy:
        return BlockCopy(pack_shape(tuple(blocks), "src"), count, itemsize)

    received, sent = list[Received](), dict[int, Sent]()
    for row, owner in enumerate(mine):
        if owner != rank:
            blocks, count = mine.blocks_of_row(row), int(mine.elements[row])
            pull = partial(BlockCopy, blocks, elements, itemsize)
            run = mean_run(Counter(block.axes for block in blocks), ["src"]) * itemsize
            received.append(Received(owner, (count,), partial(unpack, blocks), pull, run))
    for row, taker in enumerate(theirs):
        if taker != rank:
            count = int(theirs.elements[row])
            sent[taker] = Sent((count,), partial(pack, theirs.blocks_of_row(row), count))
    return FetchParts(lambda: [BlockCopy(mine.get(rank, ()), elements, itemsize)], received, sent)


class _Message(NamedTuple):
    """A message of each call: the other rank, its packed elements, whether they are wrong, the copy into these, or out
    of them, and how MPI takes all of it, in parts that every MPI can count.
    """

    rank: int
    packed: Array
    wrong: Array
    copy: WordCopy
    parts: Sequence[list[Any]]

    @classmethod
    def of(cls, rank: int, extents: Sequence[int], dtype: np.dtype[Any], copy: WordCopy) -> _Message:
        """The message of packed elements of these extents."""
        end = math.prod(extents) * dtype.itemsize
        memory = np.empty(end + 1, np.uint8)
        parts = [[memory[start : start + DIRECT], MPI.BYTE] for start in range(0, memory.size, DIRECT)]
        return cls(rank, memory[:end].view(dtype).reshape(extents), memory[end:], copy, parts)


class _Push(NamedTuple):
    """What is written to a member's inbox in each call, in either half by turns."""

    member: int
    halves: Sequence[Array]
    copy: WordCopy


class _Take(NamedTuple):
    """What is copied into the result once a member is ready: out of either half of the inbox, or, without one, of its
    tile.
    """

    member: int
    halves: Sequence[Array]
    copy: WordCopy


class Fetch:
    """One rank's part of an exchange between neighbours, of elements of `dtype`, raw words, in tiles of one shape.

    Made by all ranks together, each with its own parts; `places` has the ranks of this node whose tiles can be read
    where they lie, and their places in shared memory, 0 where each call tells. If it is `lasting`, it may be made
    again, and the ranks of a node tell each other when; else all of them begin and end together.
    """

    def __init__(
        self,
        team: Team,
        watch: Watch,
        parts: FetchParts,
        places: Mapping[int, int],
        dtype: np.dtype[Any],
        tile_shape: tuple[int, ...],
        lasting: bool = True,
    ) -> None:
        self.team, self._me, self._calls = team, team.node_sync.me, 0
        self._dtype, self._shape, self._places = dtype, tile_shape, places
        self._wrong, self._tile = False, cast("Array | None", None)
        self._given = self._words = cast("Array | None", None)
        self._theirs: dict[int, tuple[int, Array]] = {}
        self._told: list[MPI.Request] = []
        self._again = [(dim, *each) for dim, each in enumerate(parts.again) if len(each[0])]
        self._requests: list[MPI.Request] = []
        team.fetches += 1
        self._tag = FIRST_FETCH + team.fetches % FETCHES * 2
        members = {rank: member for member, rank in enumerate(team.members)}
        shared = _share_words(team, watch) if lasting and len(members) > 1 else None
        self.received = parts.received
        """What comes from other ranks."""
        pulled, pushed, sent = (list[Received]() for _ in range(3))
        for part in parts.received:
            # The kernel takes long for short runs.
            is_small = lasting and (part.elements * dtype.itemsize <= PUSHED or part.run < WORTHWHILE)
            if part.owner in places and not is_small and (shared or not lasting):
                pulled.append(part)
            elif part.owner in members and shared:
                pushed.append(part)
            else:
                sent.append(part)
        sizes = [round_to_line(part.elements * dtype.itemsize) for part in pushed]
        inboxes = _share_inboxes(team, watch, sum(sizes)) if shared else None
        if inboxes is None:
            pushed, sent = [], sent + pushed
        starts = list(itertools.accumulate(sizes, initial=0))
        # Each tells the owners on its node how it takes its part: who reads a tile counts how often it has.
        mine, self._lines = shared or (np.empty(0, np.int64), list[Any]())
        if shared is not None:
            mine[[_READS + members[part.owner] for part in pulled]] = 0
            inbox_of = _READS + len(members)
            for part, start in zip(pushed, starts, strict=False):
                mine[inbox_of + members[part.owner]] = start
            team.gather(watch)
        if (given := parts.sent) is None:
            # Where all tiles lie in the memory of one node, and are read only now, nobody is asked.
            asks = lasting or not (team.one_node and team.shared)
            given = self._ask_owners(watch, [*pushed, *sent]) if asks else {}

        def inbox(member: int, start: int, extents: Sequence[int]) -> list[Array]:
            ends = slice(start, start + math.prod(extents) * dtype.itemsize)
            return [] if inboxes is None else [each[ends].view(dtype).reshape(extents) for each in inboxes[1][member]]

        self._own = parts.own()
        self._takes = [_Take(members[part.owner], (), part.pull()) for part in pulled]
        for part, start in zip(pushed, starts, strict=False):
            self._takes.append(_Take(members[part.owner], inbox(self._me, start, part.extents), part.put()))
        self._receives = [_Message.of(part.owner, part.extents, dtype, part.put()) for part in sent]
        self._sends: list[_Message] = []
        self._pushes: list[_Push] = []
        self._readers = [member for member, line in enumerate(self._lines) if line[_READS + self._me] >= 0]
        readers = {team.members[member] for member in self._readers}
        for rank, (extents, pack) in sorted(given.items()):
            start = -1
            if rank in members and shared is not None:
                start = self._lines[members[rank]][_READS + len(members) + self._me]
            if start >= 0:
                self._pushes.append(_Push(members[rank], inbox(members[rank], start, extents), pack()))
            elif rank not in readers:
                self._sends.append(_Message.of(rank, extents, dtype, pack()))
        self._kept = shared, inboxes
        self.neighbours = tuple(sorted(parts.neighbours | set(given) | readers))
        """The ranks that it comes from, or that take of this rank's tile."""
        self._takers = sorted(set(given) | readers)
        self._tells = bool(readers) and not all(places.values())  # Where others find the tile in each call.

    def _ask_owners(self, watch: Watch, wanted: Sequence[Received]) -> dict[int, Sent]:
        """Asks each owner for a box of its tile; returns what other ranks ask of this one."""
        comm, asked = self.team.comm, dict[int, Sent]()
        sent = [comm.Issend([cast(Any, part.request), MPI.INT64_T], part.owner, self._tag) for part in wanted]
        status, barrier = MPI.Status(), list[MPI.Request]()

        def answered() -> bool:
            while comm.Iprobe(MPI.ANY_SOURCE, self._tag, status):
                words = np.empty(status.Get_count(MPI.INT64_T), np.int64)
                comm.Recv([words, MPI.INT64_T], status.source, self._tag)
                there = read_request(words)
                extents = tuple(map(measure_along, there))
                asked[status.source] = Sent(extents, partial(BoxCopy.between, _whole(there), there))
            if not barrier and MPI.Request.Testall(sent):
                barrier.append(comm.Ibarrier())
            return bool(barrier) and barrier[0].Test()

        watch.until(answered)
        return asked

    def words_of(self, tile: Array) -> Array:
        """A tile as words; the same array for the tile of the last call."""
        if tile is not self._given:
            self._given, self._words = tile, view_as_words(tile)
        return cast(Array, self._words)

    def begin(self, watch: Watch, tile: Array | None, wrong: str = "") -> None:
        """Sends what others take of this rank's tile, in words, and says that the tile is ready: it must not change
        before `finish` returns. Or, without a tile, says what is `wrong` with this rank's arguments.
        """
        self._calls = calls = self._calls + 1
        self._wrong, self._tile = bool(wrong), tile
        comm, tag, lines = self.team.comm, self._tag + 1, self._lines
        for each in self._receives:
            self._requests += [comm.Irecv(part, each.rank, tag) for part in each.parts]
        # What is wrong travels with the message, so that nobody waits for one more.
        for each in self._sends:
            each.wrong[0] = self._wrong
            if tile is not None:
                each.copy.run(each.packed, tile)
            self._requests += [comm.Isend(part, each.rank, tag) for part in each.parts]
        if wrong:
            text = bytearray(wrong.encode())
            self._told = [comm.Isend([text, MPI.BYTE], rank, self._tag) for rank in self._takers]
        for member, halves, copy in self._pushes:
            # Who has begun the last call has read this half in the one before.
            if lines[member][_READY] < calls - 1:
                watch.until(lambda member=member: lines[member][_READY] >= calls - 1)
            if tile is not None:
                copy.run(halves[calls & 1], tile)
        if lines:
            line = lines[self._me]
            line[_WRONG + (calls & 1)] = self._wrong
            if self._tells and tile is not None:
                line[_PLACE] = self.team.arena.place_of(tile)
                line[_ADDRESS] = tile.__array_interface__["data"][0]
            # Whoever sees the number of the call sees all that was written before it.
            self.team.node_sync.fence()
            line[_READY] = calls

    def finish(self, watch: Watch, target: Array | None, held: bool = False) -> dict[int, str]:
        """Fills the result, words in C order, except for what nobody was asked for; returns what is wrong with the
        arguments of ranks that it takes from. `held`: the result stays as it is if there is any such.
        """
        into, back = self._await_parts(watch, target, held)
        told = self._hear_wrong(watch)
        if told or self._wrong:
            into = None
        elif back and into is not None:
            self._copy_own(into)
        for take in self._takes if back else ():
            self._take(watch, take, into)
        if into is not None and target is not None:
            for each in self._receives:
                each.copy.run(into, each.packed)
            for dim, copies, of in self._again:
                at = (slice(None),) * dim
                into[(*at, copies)] = into[(*at, of)]
            if into is not target:
                copy_view(target, into)
        # Only now, when this rank has heard the others: two that are wrong would else wait for each other.
        if self._told:
            watch.until(lambda: MPI.Request.Testall(self._told))
        if self._readers:
            lines, mine, calls = self._lines, _READS + self._me, self._calls
            watch.until(lambda: all(lines[member][mine] >= calls for member in self._readers))
        self._tile = None
        return told

    def _await_parts(self, watch: Watch, target: Array | None, held: bool) -> tuple[Array | None, bool]:
        """Waits for what comes, and copies what this rank has itself and what members have ready; returns what it
        copied into, and whether it held all of that back. A call without errors takes what this takes, so a part of an
        inbox is copied here, and not by `_take`.
        """
        lines, calls, fence = self._lines, self._calls, self.team.node_sync.fence
        parity = _WRONG + (calls & 1)
        back, into, left = held and target is not None, target, self._takes
        since = time.monotonic() if back else 0.0
        if into is not None and not back:
            self._copy_own(into)

        def arrived() -> bool:
            # Those that are ready come first.
            nonlocal back, into, left
            # Messages go on while members are late: other nodes must not wait for these.
            sent = not self._requests or MPI.Request.Testall(self._requests)
            if back and target is not None:
                if sent and not any([lines[take.member][_READY] < calls for take in left if lines]):
                    return True
                if time.monotonic() - since <= PATIENCE:
                    return False
                back, into = False, np.empty_like(target)
                self._copy_own(into)
            late: list[_Take] = []
            for take in left:
                member, halves, copy = take
                if lines and lines[member][_READY] < calls:
                    late.append(take)
                elif halves and into is not None:
                    fence()
                    if not lines[member][parity]:
                        copy.run(into, halves[calls & 1])
                else:
                    self._take(watch, take, into)
            left = late
            return sent and not late

        if left or self._requests:
            watch.until(arrived)
        self._requests = []
        return into, back

    def _hear_wrong(self, watch: Watch) -> dict[int, str]:
        """What is wrong with the arguments of ranks that this one takes from."""
        lines = self._lines
        # An owner may have begun the next call, but not the one after it, which writes here again.
        parity = _WRONG + (self._calls & 1)
        wrong = [self.team.members[take.member] for take in self._takes if lines and lines[take.member][parity]]
        wrong += [each.rank for each in self._receives if each.wrong[0]]
        told: dict[int, str] = {}
        for rank in sorted(wrong):
            comm, status = self.team.comm, MPI.Status()
            watch.until(partial(comm.Iprobe, rank, self._tag, status))
            text = bytearray(status.Get_count(MPI.BYTE))
            comm.Recv([text, MPI.BYTE], rank, self._tag)
            told[rank] = text.decode()
        return told

    def _copy_own(self, target: Array) -> None:
        for copy in self._own:
            copy.run(target, cast(Array, self._tile))

    def _take(self, watch: Watch, take: _Take, into: Array | None) -> None:
        """Copies what a member has ready, unless it is wrong or nothing is to be copied, and says so to it."""
        team, lines, calls = self.team, self._lines, self._calls
        member, halves, copy = take
        team.node_sync.fence()
        if into is not None and not (lines and lines[member][_WRONG + (calls & 1)]):
            if halves:
                copy.run(into, halves[calls & 1])
            elif place := self._places[rank := team.members[member]] or lines[member][_PLACE]:
                if self._theirs.get(member, (0,))[0] != place:
                    self._theirs[member] = place, team.arena.tile(member, place, self._shape, self._dtype)
                copy.run(into, self._theirs[member][1])
            else:
                call = Call(team, watch, team.pool, Account("uint8"), team.rank)
                cast(BlockCopy, copy).read(call, rank, lines[member][_ADDRESS], into)
        # The owner waits for this word alone, not for the end of this rank's call.
        if not halves and lines:
            team.node_sync.fence()
            lines[self._me][_READS + member] = calls


def _whole(box: Box) -> Box:
    return tuple([slice(0, measure_along(along)) for along in box])


# Words in the memory of a node by which its ranks tell each other, without the others, how far they are.
#
#     rank 0    3 | 0 0 | 0 2 -1 | -1 -1 64    its tile is ready for call 3; it has read that of rank 1 in call 2, and
#                                              rank 2 writes to byte 64 of its inbox
#     rank 1    3 | 0 1 | ...                  it has made call 3, in which its arguments were wrong
#
# Between them is where the tile lies in this call: its place in the memory of the node, and its address.

_READY, _WRONG, _PLACE, _ADDRESS, _READS = 0, 1, 3, 4, 5


def _share_words(team: Team, watch: Watch) -> tuple[Array, list[Any]] | None:
    """This rank's words, which are released with the array, and those of all members; None if the node has no room."""
    extent, dtype = (_READS + 2 * len(team.members),), np.dtype(np.int64)
    place = team.arena.take(dtype.itemsize * extent[0], partial(team.gather, watch))
    if not place:
        return None
    mine = team.arena.hold(place, extent, dtype)
    mine[:_READS], mine[_READS:] = 0, -1
    lines = [team.arena.tile(member, place, extent, dtype) for member in range(len(team.members))]
    # A memoryview is read in a third of the time of an array.
    return mine, [memoryview(cast(Any, line)).cast("B").cast("q") for line in lines]


def _share_inboxes(team: Team, watch: Watch, nbytes: int) -> tuple[Array, list[Array]] | None:
    """This rank's inbox, which is released with the array, and the two halves of those of all members, as bytes; None
    if none of them needs one, or the node has no room.
    """
    most = max(words[0] for words in team.gather(watch, [nbytes]))
    place = team.arena.take(2 * most, partial(team.gather, watch)) if most else 0
    if not place:
        return None
    halves, byte = (2, most), np.dtype(np.uint8)
    return team.arena.hold(place, halves, byte), [
        team.arena.tile(member, place, halves, byte) for member in range(len(team.members))
    ]
