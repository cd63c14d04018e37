"""The messages of a move: how its blocks are cut into messages, the same at the sender and at the receiver.

    Chunk       one message: a peer, and blocks between the tile and the message
    ChunkTable  a message to each peer of a table, made when it is asked for
    Side        the messages that a rank sends, or receives, in the order of the turns
    JointSide   the same of several arrays, whose messages to one peer travel together
    Messages    both sides, the local copies, and how much may be staged

The cut depends on the plan alone, never on the memory order of one rank's tile, so both ends agree without negotiation.
Padding is sent too, but is in no block of a chunk: it is what its blocks leave out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
from mpi4py import MPI

from reshard.geometry.blocks import Axis, Block, cut_block
from reshard.lower.to_mpi import PeerTable, SendReceive, StepMessages, TableTurns
from reshard.lower.to_mpi.peer_table import pack_shape
from reshard.lower.to_mpi.rank_schedule import LEAST_STAGED
from reshard.lower.to_mpi.tile_blocks import Blocks, End, Frames, Shape, clip_source, pack_block
from reshard.runtime.on_mpi.copies.stream_copy import SHORT
from reshard.runtime.on_mpi.copies.strided_copy import (
    MANY_BLOCKS,
    Array,
    RunTable,
    are_short_runs,
    locate_block,
    overlaps_itself,
    pair_views,
    view_block,
)
from reshard.types.whole import check_deadline

DIRECT = 64 << 20
"""The most bytes that MPI is given at once: far below the 2^31 that Open MPI can count."""

STAGED = 4 << 20
"""The most bytes of a staged message, so that several can be packed, under way and unpacked at once."""

UNBUFFERED = 1 << 20
"""The most bytes of a message for which the plan has no buffer. A tile that MPI cannot take as it lies is packed,
one message in each direction at a time, beside the plan's memory.
"""

SMALL = 64 << 10
"""Bytes below which messages are not cut further just to have several under way."""

_BYTE = np.dtype(np.uint8)


class Chunk(NamedTuple):
    """One message: the rank at its other end, and its blocks, from the tile (`src`) to the message (`dst`). If it is
    `padded`, some of its elements are in none.
    """

    peer: int
    elements: int
    blocks: Blocks
    padded: bool = False

    def direct(self, tile: Array) -> Array | None:
        """The message as contiguous memory of the tile, if it lies there in one run; then it needs no staging."""
        if len(self.blocks) != 1 or self.padded:
            return None
        elements = view_block(tile, self.blocks[0], "src")
        return elements.reshape(-1) if elements.flags.c_contiguous else None

    def packing(self, tile: Array, buffer: Array) -> list[tuple[Array, Array]]:
        """The copies, as (target, source), out of the tile into the message's buffer; writes zeros for padding."""
        if self.padded:
            buffer[...] = 0
        return pair_views(self.blocks, buffer, tile)

    def unpacking(self, tile: Array, buffer: Array) -> list[tuple[Array, Array]]:
        """The copies, as (target, source), out of the message's buffer into the tile, without padding."""
        return [(part, whole) for whole, part in pair_views(self.blocks, buffer, tile)]


def pack_chunks(
    peer: int, blocks: Iterable[Block], cap: int, end: End, padding: tuple[Shape, Shape] | None = None
) -> Iterator[Chunk]:
    """Packs blocks into messages of at most `cap` elements; a block that is larger is cut.

    The tile is at the `end` of the blocks; `padding` has the shape in which they lie and that of the tile, if it has
    not all of them.

    >>> from reshard.geometry.blocks import Axis
    >>> [chunk.elements for chunk in pack_chunks(1, [Block(0, 0, (Axis(7, 1, 1),))], 3, "src")]
    [3, 3, 1]
    """
    packed: list[Block] = []
    total = 0

    def chunk() -> Chunk:
        padded = padding is not None and sum([block.elements for block in packed]) != total
        return Chunk(peer, total, tuple(packed), padded)

    for block in itertools.chain.from_iterable(cut_block(whole, cap) for whole in blocks):
        check_deadline()
        elements = block.elements
        if total and total + elements > cap:
            yield chunk()
            packed, total = [], 0
        if elements:
            piece = pack_block(block, end, total)
            packed += [piece] if padding is None else clip_source(piece, *padding)
        total += elements
    if total:
        yield chunk()


class ChunkTable(Sequence[Chunk]):
    """One message to, or from, each peer of a table, whose tile is at that end of the blocks.

    A rank of a job of thousands has as many: they are made one by one, when they go.
    """

    def __init__(self, table: PeerTable, end: End) -> None:
        self._table, self._starts = table, table.src if end == "src" else table.dst
        self._end: End = end
        self._shapes: dict[int, Blocks] = {}
        self._last: tuple[int, Chunk] | None = None

    def __len__(self) -> int:
        """How many messages there are."""
        return len(self._table)

    @overload
    def __getitem__(self, number: int) -> Chunk: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Chunk]: ...
    def __getitem__(self, number: int | slice) -> Chunk | Sequence[Chunk]:
        """The message of this number, or some of them."""
        if isinstance(number, slice):
            return [self[at] for at in range(*number.indices(len(self)))]
        last = self._last
        if last is not None and last[0] == number:  # It is asked for several times on its way.
            return last[1]
        table, start = self._table, int(self._starts[number])
        kind = int(table.kinds[number])
        if kind not in self._shapes:
            self._shapes[kind] = pack_shape(table.shapes[kind], self._end)
        blocks = [Block(at + start, to, axes) for at, to, axes in self._shapes[kind]]
        chunk = Chunk(int(table.peers[number]), int(table.elements[number]), tuple(blocks))
        self._last = number, chunk
        return chunk


# MPI datatypes for messages that are not contiguous in a tile, so that MPI packs and unpacks while it sends. They are
# used where the budget leaves no room for a buffer, and on MPICH for long runs, which it sends one by one:
#
#     four and eight ranks, relative to a plain copy    as a datatype    packed before
#     runs of 256 KiB                                   1.3 to 1.5       2.5 to 3.7
#     runs of 16 KiB                                    1.9 to 2.1       2.1 to 2.7
#     short runs                                        4 to 11
#
# On Open MPI, datatypes are as fast as packing first if every rank has a core, and were slower when ranks shared cores.
#
# MPI sees no other strides than those of slices and transpositions: positive ones, each at least as long as what lies
# below it. Open MPI takes a stride of -1 byte for one of 1, and would write far outside a reversed tile. Reversed,
# broadcast and overlapping tiles are packed, beside the plan's memory where that has no buffers.

TAKES_RUNS = "MPICH" in MPI.Get_library_version()
"""Whether this MPI sends long runs faster from a datatype than packed."""

LONG = 16 << 10
"""Bytes from which a run counts as long."""


class OwnedDatatype(MPI.Datatype):
    """A datatype that is freed with the last reference to it: a message that is posted has one."""

    def __del__(self, is_finalized: Callable[[], bool] = MPI.Is_finalized) -> None:
        # A default argument, because at exit this module's globals may be gone before the caches that hold datatypes.
        if self and not is_finalized():
            self.Free()


class _OfStrides(NamedTuple):
    """What a side knows of tiles of some strides: whether MPI takes them, and by message its datatype, and whether it
    has long runs."""

    strides: tuple[int, ...]
    is_taken: bool
    types: dict[int, MPI.Datatype]
    long: dict[int, bool]


class Side:
    """One direction of a move: the messages that a rank sends, or those that it receives.

    Their MPI datatypes are kept until a tile of other strides comes, in one record: moves of two communicators, which
    threads may make at the same time, have the same sides.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self.chunks: Sequence[Chunk] = chunks if isinstance(chunks, ChunkTable) else tuple(chunks)
        self._known = _OfStrides((), True, {}, {})
        self._runs: dict[tuple[int, bool], RunTable | None] = {}

    def unstaged(self, number: int, tile: Array, staging: int) -> list[Any] | None:
        """The specification with which MPI sends message `number` from, or receives it into, the tile itself.

        None if it must be staged, for which there is room for `staging` elements unless MPI cannot take the tile.
        """
        chunk = self.chunks[number]
        memory = chunk.direct(tile)
        if memory is not None:
            return [memory.view(_BYTE), MPI.BYTE]
        if chunk.padded or not self._of(tile).is_taken:
            return None
        # Plans assume C-ordered tiles and may leave no room to stage messages of other tiles: MPI packs those.
        if chunk.elements > staging or (TAKES_RUNS and self.has_long_runs(number, tile)):
            return [memory_of(tile), 1, self.datatype(number, tile)]
        return None

    def has_long_runs(self, number: int, tile: Array) -> bool:
        """Whether message `number` consists of long runs of the tile."""
        long = self._of(tile).long
        if number not in long:
            chunk = self.chunks[number]
            runs = sum(b.elements * tile.itemsize // _run_in_tile(b, tile)[1] for b in chunk.blocks)
            long[number] = chunk.elements * tile.itemsize >= LONG * runs
        return long[number]

    def datatype(self, number: int, tile: Array) -> MPI.Datatype:
        """The datatype of message number `number`, relative to the first element of a tile that MPI takes."""
        known = self._of(tile).types
        if number not in known:
            offsets: list[int] = []
            types: list[MPI.Datatype] = []
            for block in self.chunks[number].blocks:
                # A run of bytes, repeated along the axes from the innermost to the outermost.
                offset, run, axes = _run_in_tile(block, tile)
                made = MPI.BYTE.Create_contiguous(run)
                for extent, stride in reversed(axes):
                    inner, made = made, made.Create_hvector(extent, 1, stride)
                    inner.Free()
                offsets.append(offset)
                types.append(made)
            known[number] = OwnedDatatype(MPI.Datatype.Create_struct([1] * len(types), offsets, types).Commit())
            for made in types:
                made.Free()
        return known[number]

    def _of(self, tile: Array) -> _OfStrides:
        known = self._known
        if tile.strides != known.strides:
            rises = all(stride > 0 for stride, extent in zip(tile.strides, tile.shape, strict=True) if extent > 1)
            known = self._known = _OfStrides(tile.strides, rises and not overlaps_itself(tile), {}, {})
        return known

    def is_short(self, number: int, tile: Array) -> bool:
        """Whether message `number` has short runs in the tile."""
        return all(_run_in_tile(block, tile)[1] < SHORT for block in self.chunks[number].blocks[:1])

    def list_indexed(self, number: int, tile: Array, buffer: Array, packs: bool) -> list[Callable[[], object]] | None:
        """The copies of message `number` between the tile and its buffer as functions, if it is one of very many short
        runs, which go by index.
        """
        chunk, key = self.chunks[number], (number, packs)
        if len(chunk.blocks) < MANY_BLOCKS or chunk.padded or not tile.flags.c_contiguous:
            return None
        if key not in self._runs:
            blocks = chunk.blocks if packs else [block.reversed for block in chunk.blocks]
            self._runs[key] = RunTable(blocks, tile.itemsize, packs) if are_short_runs(blocks, tile.itemsize) else None
        table = self._runs[key]
        return None if table is None else table.list_steps(*((buffer, tile) if packs else (tile, buffer)))

    def packing(self, number: int, tile: Array, buffer: Array) -> list[tuple[Array, Array]]:
        """The copies of message `number` out of the tile into its buffer, see `Chunk`."""
        return self.chunks[number].packing(tile, buffer)

    def unpacking(self, number: int, tile: Array, buffer: Array) -> list[tuple[Array, Array]]:
        """The copies of message `number` out of its buffer into the tile."""
        return self.chunks[number].unpacking(tile, buffer)


def memory_of(tile: Array) -> MPI.memory:
    """All memory of a tile that MPI takes, from its first element on."""
    reach = sum((extent - 1) * stride for extent, stride in zip(tile.shape, tile.strides, strict=True))
    address: int = tile.__array_interface__["data"][0]
    return MPI.memory.fromaddress(address, reach + tile.itemsize, readonly=not tile.flags.writeable)


def _run_in_tile(block: Block, tile: Array) -> tuple[int, int, list[tuple[int, int]]]:
    """Where a block starts in a tile, the bytes of its contiguous runs, and the (extent, stride) axes of these."""
    offset, strides = locate_block(tile, block, "src")
    axes, run = list(zip(block.extents, strides, strict=True)), tile.itemsize
    while axes and (axes[-1][1] == run or axes[-1][0] == 1):
        run *= axes.pop()[0]
    return offset, run, axes


# The messages of several arrays as one: what goes to the same peer travels together.
#
#     array a, to rank 1: 8 elements      array b, to rank 1: 2 elements      one message of 10 elements
#
# Both ends join the same messages in the same order, so they agree without negotiation. Messages are joined up to the
# size at which those of one array are cut.


class JointChunk(NamedTuple):
    """One message: the rank at its other end, and its parts, each an array and the number of its message there."""

    peer: int
    elements: int
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class JointSide:
    """One direction of several moves: the messages that a rank sends, or receives, and each array's own.

    `tiles` are those of all arrays.
    """

    chunks: tuple[JointChunk, ...]
    sides: tuple[Side, ...]

    def unstaged(self, number: int, tiles: Any, staging: int) -> list[Any] | None:
        """As `Side.unstaged`: only a message of one array is sent from, or received into, its tile."""
        parts = self.chunks[number].parts
        if len(parts) != 1:
            return None
        array, its = parts[0]
        return self.sides[array].unstaged(its, tiles[array], staging)

    def is_short(self, number: int, tiles: Any) -> bool:
        """As `Side.is_short`, of the message's first part."""
        array, its = self.chunks[number].parts[0]
        return self.sides[array].is_short(its, tiles[array])

    def list_indexed(self, number: int, tiles: Any, buffer: Array, packs: bool) -> list[Callable[[], object]] | None:
        """As `Side.list_indexed`, if all parts go by index."""
        steps: list[Callable[[], object]] = []
        for (array, its), (_, _, part) in zip(self.chunks[number].parts, self._parts(number, buffer), strict=True):
            more = self.sides[array].list_indexed(its, tiles[array], part, packs)
            if more is None:
                return None
            steps += more
        return steps

    def packing(self, number: int, tiles: Any, buffer: Array) -> list[tuple[Array, Array]]:
        """The copies of message `number` out of the tiles into its buffer, see `Chunk`."""
        return [p for chunk, at, part in self._parts(number, buffer) for p in chunk.packing(tiles[at], part)]

    def unpacking(self, number: int, tiles: Any, buffer: Array) -> list[tuple[Array, Array]]:
        """The copies of message `number` out of its buffer into the tiles."""
        return [p for chunk, at, part in self._parts(number, buffer) for p in chunk.unpacking(tiles[at], part)]

    def _parts(self, number: int, buffer: Array) -> Iterator[tuple[Chunk, int, Array]]:
        start = 0
        for array, its in self.chunks[number].parts:
            chunk = self.sides[array].chunks[its]
            yield chunk, array, buffer[start : start + chunk.elements]
            start += chunk.elements


@dataclass(frozen=True)
class Messages:
    """One rank's messages in the order of the turns, its local copies, and how many elements each direction may stage.

    `held`: on every rank, all that it receives fits into buffers beside those, so that the result can stay untouched
    until everything has arrived. `passed` are those of the second turn of a relay, between result tiles.
    """

    sends: Side | JointSide
    receives: Side | JointSide
    local: Blocks
    staging: int
    held: bool = False
    passed: Messages | None = None


def messages_of_step(
    step: StepMessages, ranks: Mapping[int, int], shapes: Frames, itemsize: int, received: int, *, casts: bool = False
) -> Messages:
    """The messages of one step between tiles of these shapes.

    `ranks` has the rank of each device, `received` is the most bytes that any of them receives in the step. What is
    cast on the way passes through buffers: where the step has none, through one of a page in each direction.
    """
    staging = step.scratch // itemsize // 2
    largest = max(1, LEAST_STAGED // itemsize) if casts and not staging else None

    def between(turns: Sequence[SendReceive], local: Blocks, held: bool, passed: Messages | None) -> Messages:
        sent: BlocksByRank
        arriving: BlocksByRank
        if isinstance(turns, TableTurns):
            sent, arriving = (table.rename_peers(ranks) for table in (turns.sends, turns.receives))
        else:
            sent = [(ranks[turn.send.peer], turn.send.blocks) for turn in turns if turn.send]
            arriving = [(ranks[turn.receive.peer], turn.receive.blocks) for turn in turns if turn.receive]
        return messages_between(sent, arriving, local, itemsize, staging, held, padding, passed, largest)

    padding = None if step.frames is None else ((step.frames[0], shapes[0]), (step.frames[1], shapes[1]))
    passed = between(step.passed, (), False, None) if step.passed else None
    return between(step.turns, step.local, received <= staging * itemsize, passed)


BlocksByRank = Sequence[tuple[int, Sequence[Block]]] | PeerTable
"""The blocks that go to, or come from, each peer, in the order of the turns."""


def messages_between(
    sent: BlocksByRank,
    received: BlocksByRank,
    local: Blocks,
    itemsize: int,
    staging: int,
    held: bool = False,
    padding: tuple[tuple[Shape, Shape], tuple[Shape, Shape]] | None = None,
    passed: Messages | None = None,
    largest: int | None = None,
) -> Messages:
    """Messages and local copies between tiles; each direction may stage `staging` elements.

    `padding` has, for either end, the shape in which the blocks of messages lie, and that of the tile. No message
    has more than `largest` elements.
    """
    cap = largest or message_cap(staging, itemsize)

    def side(by_rank: BlocksByRank, end: End, of: tuple[Shape, Shape] | None) -> Side:
        if isinstance(by_rank, PeerTable):
            if of is None and (not len(by_rank) or by_rank.elements.max() <= cap):
                return Side(ChunkTable(by_rank, end))
            by_rank = [*by_rank.items()]
        by_peer = [tuple(pack_chunks(peer, blocks, cap, end, of)) for peer, blocks in by_rank]
        return Side(chunk for turn in itertools.zip_longest(*by_peer) for chunk in turn if chunk is not None)

    before, after = (None, None) if padding is None else padding
    return Messages(side(sent, "src", before), side(received, "dst", after), local, staging, held, passed)


def message_cap(staging: int, itemsize: int) -> int:
    """The most elements of a message, if `staging` elements can be staged: a quarter, for four messages under way, but
    not less than `SMALL` bytes if there is room.
    """
    if not staging:
        return max(1, UNBUFFERED // itemsize)
    return max(1, min(staging, STAGED // itemsize, max(staging // 4, SMALL // itemsize)))


def merge_messages(each: Sequence[Messages], staging: int, itemsize: int, rank: int, size: int) -> Messages:
    """The messages of several arrays as those of one; each direction may stage `staging` elements in all.

    Peers come in the order in which `plan_direct` lists them: the next rank first for what is sent, the previous one
    for what is received.
    """
    cap = message_cap(staging, itemsize) if staging else 0  # What is joined is staged.
    sends = [(rank + k) % size for k in range(1, size)]
    receives = [(rank - k) % size for k in range(1, size)]
    sent, received = [messages.sends for messages in each], [messages.receives for messages in each]
    return Messages(_join_sides(sent, sends, cap), _join_sides(received, receives, cap), (), staging)


def _join_sides(each: Sequence[Side | JointSide], peers: Iterable[int], cap: int) -> JointSide:
    """The messages of each peer, joined as long as they have at most `cap` elements together."""
    sides = tuple(side for side in each if isinstance(side, Side))
    by_peer: dict[int, list[tuple[int, int, int]]] = {}
    for array, side in enumerate(sides):
        for number, chunk in enumerate(side.chunks):
            by_peer.setdefault(chunk.peer, []).append((array, number, chunk.elements))
    chunks: list[JointChunk] = []
    for peer in peers:
        parts: list[tuple[int, int]] = []
        total = 0
        for array, number, elements in by_peer.get(peer, ()):
            if parts and total + elements > cap:
                chunks.append(JointChunk(peer, total, tuple(parts)))
                parts, total = [], 0
            parts.append((array, number))
            total += elements
        if parts:
            chunks.append(JointChunk(peer, total, tuple(parts)))
    return JointSide(tuple(chunks), sides)


def mean_run(alike: Mapping[tuple[Axis, ...], int], ends: Sequence[End]) -> float:
    """The average number of elements per run that is contiguous at these ends of blocks, in C-ordered tiles, given how
    many of them have which axes.

    >>> alike = {(Axis(4, 16, 8), Axis(8, 1, 1)): 3}
    >>> [mean_run(alike, ends) for ends in (["src", "dst"], ["src"], ["dst"])]
    [8.0, 8.0, 32.0]
    """
    elements = runs = 0
    for axes, count in alike.items():
        size = Block(0, 0, axes).elements
        run = 1
        for axis in reversed(axes):
            if ("src" in ends and axis.src != run) or ("dst" in ends and axis.dst != run):
                break
            run *= axis.extent
        elements += count * size
        runs += count * (size // max(1, run))
    return elements / max(1, runs)
