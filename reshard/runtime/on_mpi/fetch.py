"""What ranks fetch by boxes that they name: rows by number, halos (`lower.to_mpi.picks`); once, or again and again.

    begin     each rank says that its tile is ready, and sends what others have asked it for
    finish    it copies what it has itself, takes what has arrived, copies what others have in shared memory, and waits
              until those that read its own tile have done so

Inside a node, tiles in shared memory are read where they lie. All others are asked for what they are to send, once:
nobody knows who will ask it, so the ranks make out together when all have been asked (a non-blocking consensus, in
which each talks to those that it asks alone). After that a rank waits for its neighbours only, and not for the others.

    rank 0    asks 2        is asked by 1, answers      all that it sent was received: enters a barrier ...
    rank 1    asks 0        nobody asks it              ... in which it goes on answering, until all have entered

Each fetch has tags of its own, so that several may be under way, and messages of one never reach another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
from mpi4py import MPI

from reshard.lower.to_mpi import Box, PickedBox, Picks, measure_along, read_request, write_request
from reshard.runtime.on_mpi.copies.strided_copy import Array, copy_view, view_as_words
from reshard.runtime.on_mpi.team import FETCHES, FIRST_FETCH, Team, Watch
from reshard.runtime.on_mpi.wire.chunks import DIRECT


def copy_box(target: Array, here: Box, source: Array, there: Box) -> None:
    """Copies a box of one raw tile into a box of another.

    >>> target = np.zeros((3, 2), int)
    >>> copy_box(target, (np.array([2, 0]), slice(0, 2)), np.arange(8).reshape(4, 2), (slice(1, 3), slice(0, 2)))
    >>> target.tolist()
    [[4, 5], [0, 0], [2, 3]]
    """
    into, lists = _select_slices(target, here)
    if lists:
        into[_index_lists(into, lists)] = read_box(source, there)
    else:
        read_box(source, there, into)


def read_box(source: Array, there: Box, into: Array | None = None) -> Array:
    """A box of a raw tile: a view, or a copy in `into`, or else in new memory."""
    part, lists = _select_slices(source, there)
    if not lists:
        if into is not None:
            copy_view(into, part)
        return part
    if len(lists) > 1:
        part = part[_index_lists(part, lists)]
        if into is not None:
            into[...] = part
        return part
    ((dim, index),) = lists.items()
    # Indices are right by now; to find that out again, numpy would go through memory of its own.
    if into is not None and into.flags.c_contiguous:
        return part.take(index, axis=dim, out=into, mode="clip")
    part = part.take(index, axis=dim)
    if into is not None:
        into[...] = part
    return part


def _select_slices(tile: Array, box: Box) -> tuple[Array, dict[int, Array]]:
    """The part of a tile that the slices of a box leave, and by dim the lists that it has."""
    part = tile[(*[along if isinstance(along, slice) else slice(None) for along in box], ...)]
    return part, {dim: along for dim, along in enumerate(box) if not isinstance(along, slice)}


def _index_lists(part: Array, lists: Mapping[int, Array]) -> tuple[Any, ...]:
    if len(lists) == 1:
        ((dim, index),) = lists.items()
        return (*[slice(None)] * dim, index)
    every: list[Array] = [*map(np.arange, part.shape)]
    return np.ix_(*[lists.get(dim, index) for dim, index in enumerate(every)])


class _Message(NamedTuple):
    """A message of each call: the other rank, the box of the tile or of the result, and its packed elements."""

    rank: int
    box: Box
    buffer: Array


class Fetch:
    """One rank's part of a fetch of one array's elements, whose tile is `tile`; its result has a `shape`.

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
        shape: tuple[int, ...],
        places: Mapping[int, int],
        tile_shape: tuple[int, ...],
        lasting: bool,
    ) -> None:
        self.team, self.shape, self._tile = team, shape, tile
        self._dtype, self._again = tile.dtype, [*enumerate(picks.again)]
        self._requests: list[MPI.Request] = []
        team.fetches += 1
        self._tag = FIRST_FETCH + team.fetches % FETCHES * 2
        words = view_as_words(tile)
        alone = team.one_node and team.shared  # All tiles of all ranks lie in the memory of this node.
        self._calls, together = 0, lasting and len(team.members) > 1
        self._words = _share_words(team, watch) if together else None
        if together and self._words is None:
            alone, near = False, set[int]()  # The same on all ranks of the node.
        else:
            near = {rank for rank, place in places.items() if place > 0}
        self._own = [(words, box) for box in picks.boxes if box.owner == team.rank]
        others = [box for box in picks.boxes if box.owner in near and box.owner != team.rank]
        members = {rank: member for member, rank in enumerate(team.members)}
        shared = [team.arena.tile(members[at.owner], places[at.owner], tile_shape, tile.dtype) for at in others]
        self._near = [*zip(map(view_as_words, shared), others, strict=True)]
        far = [box for box in picks.boxes if box.owner not in near and box.owner != team.rank]
        asked = {} if alone else self._ask_owners(watch, far)
        self._receives = [self._new_message(box.owner, box.here) for box in far]
        self._sends = [self._new_message(rank, read_request(words)) for rank, words in sorted(asked.items())]
        self._numbers, self._takers = members, list[int]()
        if self._words is not None:
            mine, lines = self._words
            mine[[_READS + members[box.owner] for _, box in self._near]] = 1
            team.gather(watch)
            at = _READS + members[team.rank]
            self._takers = [member for member, line in enumerate(lines) if line[at]]
        self.received = [box for box in picks.boxes if box.owner != team.rank]
        """What comes from other ranks."""
        self.neighbours = tuple(
            sorted({box.owner for box in self.received} | set(asked) | {team.members[at] for at in self._takers})
        )
        """The ranks that it comes from, or that read of this rank's tile."""

    def _new_message(self, rank: int, box: Box) -> _Message:
        extents = tuple(map(measure_along, box))
        return _Message(rank, box, np.empty(extents, self._dtype))

    def _ask_owners(self, watch: Watch, boxes: Sequence[PickedBox]) -> dict[int, Array]:
        """Asks each owner for a box of its tile; returns what other ranks ask of this one."""
        comm, asked = self.team.comm, dict[int, Array]()
        sent = [comm.Issend([write_request(box.there), MPI.INT64_T], box.owner, self._tag) for box in boxes]
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

    def begin(self) -> None:
        """Posts all messages, and says that this rank's tile is ready: it must not change before `finish` returns."""
        self._calls += 1
        if self._words is not None:
            self.team.node_sync.fence()
            self._words[0][_READY] = self._calls
        comm, tag = self.team.comm, self._tag + 1
        self._requests = [
            comm.Irecv(part, each.rank, tag) for each in self._receives for part in _cut_buffer(each.buffer)
        ]
        tile = view_as_words(self._tile)
        for each in self._sends:
            read_box(tile, each.box, view_as_words(each.buffer))
            self._requests += [comm.Isend(part, each.rank, tag) for part in _cut_buffer(each.buffer)]

    def finish(self, watch: Watch, result: Array) -> None:
        """Fills the result, except for what nobody was asked for."""
        words = view_as_words(result)
        for tile, box in self._own:
            copy_box(words, box.here, tile, box.there)
        left = [*self._near]

        def arrived() -> bool:
            # Those that are ready come first.
            for at in reversed(range(len(left))):
                tile, box = left[at]
                if self._words is None or self._words[1][self._numbers[box.owner]][_READY] >= self._calls:
                    self.team.node_sync.fence()
                    copy_box(words, box.here, tile, box.there)
                    left.pop(at)
            return not left and MPI.Request.Testall(self._requests)

        watch.until(arrived)
        self._requests = []
        for each in self._receives:
            buffer = view_as_words(each.buffer)
            copy_box(words, each.box, buffer, tuple(map(slice, buffer.shape)))
        for dim, (copies, of) in self._again:
            if len(copies):
                at = (slice(None),) * dim
                words[(*at, copies)] = words[(*at, of)]
        if self._words is not None:
            mine, lines = self._words
            self.team.node_sync.fence()
            mine[_DONE] = self._calls
            watch.until(lambda: all(lines[member][_DONE] >= self._calls for member in self._takers))


def _cut_buffer(buffer: Array) -> Iterator[list[Any]]:
    """A packed message as MPI takes it, in parts that every MPI can count."""
    nbytes = buffer.nbytes
    memory = buffer.reshape(-1).view(np.uint8)
    for start in range(0, nbytes, DIRECT):
        yield [memory[start : start + DIRECT], MPI.BYTE]


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
