"""What ranks fetch by boxes that they name: rows by number, halos (`lower.to_mpi.picks`); once, or again and again.

    begin     each rank sends what others have asked it for, and says that its tile is ready
    finish    it copies what it has itself, takes what has arrived, copies what others have in shared memory, and waits
              until those that read its own tile have done so

Inside a node, large boxes are read where they lie; small ones, and those of private tiles, are written by their owner
to memory of who takes them. Owners are asked for what they are to write or to send, once: nobody knows who will ask it,
so the ranks make out together when all have been asked (a non-blocking consensus, in which each talks to those that it
asks alone). After that a rank waits for its neighbours only, and not for the others.

    rank 0    asks 2        is asked by 1, answers      all that it sent was received: enters a barrier ...
    rank 1    asks 0        nobody asks it              ... in which it goes on answering, until all have entered

Each fetch has tags of its own, so that several may be under way, and messages of one never reach another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
from mpi4py import MPI

from reshard.lower.to_mpi import Box, PickedBox, Picks, measure_along, read_request, write_request
from reshard.runtime.on_mpi.copies.strided_copy import Array, copy_view, view_as_words
from reshard.runtime.on_mpi.node.arena import round_to_line
from reshard.runtime.on_mpi.team import FETCHES, FIRST_FETCH, Team, Watch
from reshard.runtime.on_mpi.wire.chunks import DIRECT

PUSHED = 64 << 10
"""Bytes of a box up to which its owner writes it to memory of who takes it: one more copy, and one wait less."""

_BLOCKED = 64 << 10  # Bytes of a copy from which it goes block by block where memory orders differ.


class BoxCopy(NamedTuple):
    """A copy of a box of raw memory into a box of a tile, made out once: that takes as long as to copy ten rows.

    `part` is what slices leave of the memory, `picked` what lists pick of it, along `dim`, or of several dims at once
    where that is -1. `key` is where it goes, `lists` whether by lists.
    """

    key: tuple[Any, ...]
    lists: bool
    part: Array
    picked: Any = None
    dim: int = -1

    @classmethod
    def between(cls, here: Box, memory: Array, there: Box) -> BoxCopy:
        """The copy into `here` of what the memory has `there`.

        >>> memory, here = np.arange(8).reshape(4, 2), (np.array([2, 0]), slice(0, 2))
        >>> target = np.zeros((3, 2), int)
        >>> BoxCopy.between(here, memory, (slice(1, 3), slice(0, 2))).run(target)
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
            return cls(key, lists, memory, index_lists(there))
        part = memory[(*[along if isinstance(along, slice) else slice(None) for along in there], ...)]
        return cls(key, lists, part, there[listed[0]], listed[0]) if listed else cls(key, lists, part)

    def run(self, target: Array) -> None:
        """Makes the copy into a raw tile."""
        key, lists, part, picked, dim = self
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


class _Message(NamedTuple):
    """A message of each call: the other rank, its packed elements, the copy into these, or out of them, and how MPI
    takes them, in parts that every MPI can count.
    """

    rank: int
    packed: Array
    copy: BoxCopy
    parts: Sequence[list[Any]]

    @classmethod
    def of(cls, rank: int, packed: Array, copy: BoxCopy) -> _Message:
        """The message of packed elements."""
        memory = packed.reshape(-1).view(np.uint8)
        parts = [[memory[start : start + DIRECT], MPI.BYTE] for start in range(0, memory.size, DIRECT)]
        return cls(rank, packed, copy, parts)


class _Push(NamedTuple):
    """What is written to a member's inbox in each call, in either half by turns."""

    member: int
    halves: Sequence[Array]
    copy: BoxCopy


class _Take(NamedTuple):
    """What is copied into the result once a member is ready: out of either half of the inbox, or of its tile."""

    member: int
    halves: Sequence[BoxCopy]


class Fetch:
    """One rank's part of a fetch of one array's elements, whose tile is `tile`.

    Made by all ranks together, with what each picks; `places` has where the tiles of this node lie in shared memory.
    If it is `lasting`, it may be made again, and the ranks of a node tell each other when; else all of them begin and
    end together.
    """

    def __init__(
        self,
        team: Team,
        watch: Watch,
        tile: Array,
        picks: Picks,
        places: Mapping[int, int],
        tile_shape: tuple[int, ...],
        lasting: bool,
    ) -> None:
        self.team, self._me, self._calls = team, team.node_sync.me, 0
        self._tile, raw = tile, view_as_words(tile)  # The tile stays alive: others read it.
        self._again = [(dim, *each) for dim, each in enumerate(picks.again) if len(each[0])]
        self._requests: list[MPI.Request] = []
        team.fetches += 1
        self._tag = FIRST_FETCH + team.fetches % FETCHES * 2
        members = {rank: member for member, rank in enumerate(team.members)}
        shared = _share_words(team, watch) if lasting and len(members) > 1 else None
        self.received = [box for box in picks.boxes if box.owner != team.rank]
        """What comes from other ranks."""
        pulled, pushed, sent = (list[PickedBox]() for _ in range(3))
        for box in self.received:
            is_small = lasting and box.elements * raw.itemsize <= PUSHED
            if box.owner in members and places[box.owner] > 0 and not is_small and (shared or not lasting):
                pulled.append(box)
            elif box.owner in members and shared:
                pushed.append(box)
            else:
                sent.append(box)
        sizes = [round_to_line(box.elements * raw.itemsize) for box in pushed]
        inboxes = _share_inboxes(team, watch, sum(sizes)) if shared else None
        if inboxes is None:
            pushed, sent = [], sent + pushed
        starts = list(itertools.accumulate(sizes, initial=0))
        wanted = [*zip(pushed, starts, strict=False), *zip(sent, itertools.repeat(-1))]
        # Where all tiles lie in the memory of one node, and are read only now, nobody is asked.
        asked = self._ask_owners(watch, wanted) if lasting or not (team.one_node and team.shared) else {}

        def inbox(member: int, start: int, box: Box) -> list[Array]:
            extents, dtype = tuple(map(measure_along, box)), raw.dtype
            ends = slice(start, start + math.prod(extents) * dtype.itemsize)
            return [] if inboxes is None else [each[ends].view(dtype).reshape(extents) for each in inboxes[1][member]]

        self._own = [BoxCopy.between(box.here, raw, box.there) for box in picks.boxes if box.owner == team.rank]
        self._takes: list[_Take] = []
        for box in pulled:
            member = members[box.owner]
            other = view_as_words(team.arena.tile(member, places[box.owner], tile_shape, tile.dtype))
            self._takes.append(_Take(member, [BoxCopy.between(box.here, other, box.there)] * 2))
        for box, start in zip(pushed, starts, strict=False):
            halves = [BoxCopy.between(box.here, part, _whole(part)) for part in inbox(self._me, start, box.here)]
            self._takes.append(_Take(members[box.owner], halves))
        packed = [np.empty([measure_along(along) for along in box.here], raw.dtype) for box in sent]
        self._receives = [
            _Message.of(box.owner, part, BoxCopy.between(box.here, part, _whole(part)))
            for box, part in zip(sent, packed, strict=True)
        ]
        self._sends: list[_Message] = []
        self._pushes: list[_Push] = []
        for rank, words in sorted(asked.items()):
            start, there = int(words[0]), read_request(words[1:])
            part = np.empty([measure_along(along) for along in there], raw.dtype)
            copy = BoxCopy.between(_whole(part), raw, there)
            if start < 0:
                self._sends.append(_Message.of(rank, part, copy))
            else:
                self._pushes.append(_Push(members[rank], inbox(members[rank], start, there), copy))
        self._lines, self._readers, self._kept = list[Any](), list[int](), (shared, inboxes)
        if shared is not None:
            mine, self._lines = shared
            mine[[_READS + members[box.owner] for box in pulled]] = 1
            team.gather(watch)
            self._readers = [member for member, line in enumerate(self._lines) if line[_READS + self._me]]
        self._waits = bool(pulled or self._readers)
        readers = {team.members[member] for member in self._readers}
        self.neighbours = tuple(sorted({box.owner for box in self.received} | set(asked) | readers))
        """The ranks that it comes from, or that take of this rank's tile."""

    def _ask_owners(self, watch: Watch, wanted: Sequence[tuple[PickedBox, int]]) -> dict[int, Array]:
        """Asks each owner for a box of its tile, to be written to a place of this rank's inbox, or to be sent where
        that is -1; returns what other ranks ask of this one.
        """
        comm, asked = self.team.comm, dict[int, Array]()
        sent = [
            comm.Issend([np.concatenate([[place], write_request(box.there)]), MPI.INT64_T], box.owner, self._tag)
            for box, place in wanted
        ]
        status, barrier = MPI.Status(), list[MPI.Request]()

        def answered() -> bool:
            while comm.Iprobe(MPI.ANY_SOURCE, self._tag, status):
                words = np.empty(status.Get_count(MPI.INT64_T), np.int64)
                comm.Recv([words, MPI.INT64_T], status.source, self._tag)
                asked[status.source] = words
            if not barrier and MPI.Request.Testall(sent):
                barrier.append(comm.Ibarrier())
            return bool(barrier) and barrier[0].Test()

        watch.until(answered)
        return asked

    def begin(self, watch: Watch) -> None:
        """Sends what others take of this rank's tile, and says that the tile is ready: it must not change before
        `finish` returns.
        """
        self._calls = calls = self._calls + 1
        comm, tag, lines = self.team.comm, self._tag + 1, self._lines
        for each in self._receives:
            self._requests += [comm.Irecv(part, each.rank, tag) for part in each.parts]
        for each in self._sends:
            each.copy.run(each.packed)
            self._requests += [comm.Isend(part, each.rank, tag) for part in each.parts]
        for member, halves, copy in self._pushes:
            # Who has begun the last call has read this half in the one before.
            if lines[member][_READY] < calls - 1:
                watch.until(lambda member=member: lines[member][_READY] >= calls - 1)
            copy.run(halves[calls & 1])
        if lines:
            self.team.node_sync.fence()
            lines[self._me][_READY] = calls

    def finish(self, watch: Watch, result: Array) -> None:
        """Fills the result, except for what nobody was asked for."""
        target, lines, calls = view_as_words(result), self._lines, self._calls
        for copy in self._own:
            copy.run(target)
        left = self._takes

        def arrived() -> bool:
            # Those that are ready come first.
            nonlocal left
            late: list[_Take] = []
            for take in left:
                if lines and lines[take.member][_READY] < calls:
                    late.append(take)
                    continue
                self.team.node_sync.fence()
                take.halves[calls & 1].run(target)
            left = late
            return not late and (not self._requests or MPI.Request.Testall(self._requests))

        if left or self._requests:
            watch.until(arrived)
        self._requests = []
        for each in self._receives:
            each.copy.run(target)
        for dim, copies, of in self._again:
            at = (slice(None),) * dim
            target[(*at, copies)] = target[(*at, of)]
        if self._waits and lines:
            self.team.node_sync.fence()
            lines[self._me][_DONE] = calls
            watch.until(lambda: all(lines[member][_DONE] >= calls for member in self._readers))


def _whole(part: Array) -> Box:
    return tuple([slice(0, extent) for extent in part.shape])


# Words in the memory of a node by which its ranks tell each other, without the others, how far they are.
#
#     rank 0    3 | 2 | 0 1 0      its tile is ready for call 3, it has read what it needs in call 2, and reads tile 1
#     rank 1    3 | 3 | 0 0 0      it has made call 3, and returns when rank 0 has, which reads its tile

_READY, _DONE, _READS = 0, 1, 2


def _share_words(team: Team, watch: Watch) -> tuple[Array, list[Any]] | None:
    """This rank's words, which are released with the array, and those of all members; None if the node has no room."""
    extent, dtype = (_READS + len(team.members),), np.dtype(np.int64)
    place = team.arena.take(dtype.itemsize * extent[0], partial(team.gather, watch))
    if not place:
        return None
    mine = team.arena.hold(place, extent, dtype)
    mine[:] = 0
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
