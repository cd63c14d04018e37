"""Reads what tiles want of a checkpoint: every stored byte once, neighbours of a file in one call.

    tiles wanted       what each takes of each piece of its tensor               lower.to_files
    raw pieces         `preadv`: long runs straight into tiles, short ones through a buffer
    coded pieces       whole, by the driver of the format, into tiles or through a buffer
    alike tiles        one is read, the others are copies of it

Nothing is mapped: a mapped file that is cut meanwhile ends the process, and its pages count as the process's own.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from reshard.errors import FileError, quoted, shortened
from reshard.geometry.blocks import Block, cut_range, fuse_axes, list_strides
from reshard.geometry.holders import tile_of
from reshard.lower.to_files.file_reads import (
    MOST_BUFFERS,
    MOST_BYTES,
    SCRATCH,
    FileRead,
    FileSpan,
    count_elements_until,
    list_reading_reads,
    list_spans,
)
from reshard.plans.load_plan import DECODED, Reading
from reshard.plans.stored import Box, Checkpoint, Stored, StoredFile
from reshard.runtime.on_files.drivers import Driver, Missing, open_driver
from reshard.runtime.on_files.formats.new_arrays import BoxToRead
from reshard.runtime.on_files.stored_boxes import cut_batches, select_part
from reshard.runtime.on_mpi.copies.strided_copy import copy_view, view_as_words, view_block
from reshard.runtime.on_mpi.node.arena import call_libc

Array = NDArray[Any]

REQUESTS = 4
"""Calls that are under way at once, where files take their time."""

REQUESTED = 1 << 20
"""Bytes of elements that a library is asked to decode in one request: beyond that nothing is gained."""

MOST_OPEN = 128
"""The most files that a reader keeps open beside those that it reads."""

SLOW, SLOW_BYTES = 10e-3, 250e6
"""Seconds of a call, and bytes a second beyond them, from which files take their time, as those on a network do."""


@dataclass
class ReadCounts:
    """What was really read: bytes, calls, and the files that were opened, as numbers of `Checkpoint.files`."""

    bytes: int = 0
    calls: int = 0
    files: set[int] = field(default_factory=set[int])


WantedTiles = tuple[Reading, Mapping[int, Array]]
"""Tiles of a reading to fill, by device; each may be any view in memory."""


class ReadChecks(Protocol):
    """What is told of all bytes that are read, in the thread that reads them."""

    def add(self, file: int, offset: int, buffer: Any) -> None:
        """Bytes of a file from an offset on."""

    def add_chunks(self, stored: Stored, box: Box, data: Array) -> None:
        """The elements of whole chunks."""


class _Tile(NamedTuple):
    """One tile of a call, as words of the size of its elements, with what it takes of each piece of which tensor."""

    words: Array
    reads: Sequence[tuple[Stored, FileRead]]


class _CodedPart(NamedTuple):
    """Whole chunks of a tensor: where they go, or None and the shares that tiles have of them, by their blocks."""

    stored: Stored
    box: Box
    out: Array | None
    shares: Sequence[tuple[Array, Sequence[Block]]]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        words = self.shares[0][0] if self.out is None else self.out
        return math.prod(stop - start for start, stop in self.box) * words.itemsize


class LateDriver:
    """The driver of a checkpoint's format, opened when it is first needed; several readers may share one.

    The library's counts are of all that the process reads: two drivers would both count what either does.
    """

    def __init__(self, ckpt: Checkpoint, missing: Missing) -> None:
        self._ckpt = ckpt
        self._missing: Missing = missing
        self._driver: Driver | None = None
        self._opening = threading.Lock()

    def start_boxes(self, parts: Sequence[BoxToRead]) -> Callable[[], None]:
        """Begins to fill arrays with the elements of boxes of whole chunks; what it returns waits for them."""
        with self._opening:
            if self._driver is None:
                self._driver = open_driver(self._ckpt, self._missing)
        return self._driver.start_boxes(parts)

    def close(self, counts: ReadCounts) -> None:
        """Closes it, if it was opened, and adds what the library has counted."""
        driver, self._driver = self._driver, None
        if driver is not None:
            nbytes, calls = driver.read_counts()
            counts.bytes += nbytes
            counts.calls += calls
            driver.close()


class CheckpointReader:
    """Reads tiles of one checkpoint, and counts what it read; its files are opened when they are first needed.

    `close` raises `FileError` if a file has changed since the checkpoint was opened. Threads may share it.

    >>> import tempfile
    >>> from reshard.types import Layout, Mesh
    >>> from reshard.plans.stored import StoredPiece
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(np.arange(8, dtype="<f4").tobytes()), file.flush()
    ...     status = os.stat(file.name)
    ...     stored = Stored("w", "float32", (4, 2), (StoredPiece(((0, 4), (0, 2)), 0, 0, 32),))
    ...     files = (StoredFile(file.name, status.st_size, status.st_mtime_ns),)
    ...     tile = np.empty((4, 1), "f4")
    ...     columns = Reading("w", "w", None, Layout.parse("f32[4, {x}1]", Mesh(x=2)))
    ...     with CheckpointReader(Checkpoint(file.name, "npy", files, {"w": stored})) as reader:
    ...         reader.read_tiles([(columns, {1: tile})])
    >>> tile[:, 0].tolist()
    [1.0, 3.0, 5.0, 7.0]
    """

    def __init__(
        self,
        ckpt: Checkpoint,
        counts: ReadCounts | None = None,
        checks: ReadChecks | None = None,
        missing: Missing = "refuse",
        driver: LateDriver | None = None,
    ) -> None:
        self.ckpt = ckpt
        self.counts = ReadCounts() if counts is None else counts
        self._checks = checks
        self._files: dict[int, int] = {}
        self._holds = Counter[int]()
        self._driver = LateDriver(ckpt, missing) if driver is None else driver
        self._owns_driver = driver is None
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._waits = False
        self._pool: ThreadPoolExecutor | None = None

    def read_tiles(self, wanted: Iterable[WantedTiles]) -> None:
        """Fills the tiles, padding left as it is. No two tiles want the same elements unless they want the same."""
        tiles: list[_Tile] = []
        copies: list[tuple[Array, Array]] = []
        for reading, of in wanted:
            # Devices that replicate a tile have one copy each, and none of them reads what another has read.
            first: dict[object, Array] = {}
            for device, tile in of.items():
                words = view_as_words(tile)
                twin = first.setdefault(tile_of(reading.layout, device), words)
                if twin is not words:
                    copies.append((words, twin))
                elif tile.size:
                    tiles.append(_Tile(words, list_reading_reads(self.ckpt, reading, device)))
        spans = list_spans((at, tile.words.itemsize, [read for _, read in tile.reads]) for at, tile in enumerate(tiles))
        # One call at a time, as long as files answer at the speed of memory: threads would fault pages in side by side,
        # in one process's memory, and take longer.
        with self._turn:
            while spans and not self._waits:
                self._read_span(spans.pop(0), tiles)
        # A store that takes its time for each request takes it for several at once.
        under_way: list[Future[None]] = []
        if spans:
            with self._lock:
                self._pool = self._pool or ThreadPoolExecutor(REQUESTS, "reshard-request")
            under_way = [self._pool.submit(self._read_span, span, tiles) for span in spans]
        try:
            self._read_coded(tiles)
        finally:
            # Nobody writes to a tile any more when this returns, or raises.
            failed = [each for each in under_way if each.exception()]
        for each in failed:
            each.result()
        # When all is there: a tile may be read in several calls.
        for tile, twin in copies:
            copy_view(tile, twin)

    def _read_span(self, span: FileSpan, tiles: Sequence[_Tile]) -> None:
        """Reads a span: long runs straight into tiles, short ones through a buffer."""
        if not span.straight:
            self._read_scattered(span, tiles)
            return
        buffers = [
            each for part in span.parts for each in _list_run_buffers(tiles[part.tile].words, part.block, part.itemsize)
        ]
        buffers.sort(key=lambda each: each[0])
        # As many neighbours as a call takes, in calls one behind another.
        at = 0
        while at < len(buffers):
            start, end, several = buffers[at][0], at, list[Array]()
            nbytes = 0
            while end < len(buffers) and len(several) < MOST_BUFFERS:
                run = buffers[end][1]
                if several and nbytes + run.nbytes > MOST_BYTES:
                    break
                several.append(run)
                nbytes += run.nbytes
                end += 1
            self._read_bytes(span.file, start, several)
            at = end

    def _read_scattered(self, span: FileSpan, tiles: Sequence[_Tile]) -> None:
        """Reads a span of short runs through a buffer."""
        scratch = np.empty(min(SCRATCH, span.stop - span.start), np.uint8)
        for start in range(span.start, span.stop, SCRATCH):
            stop = min(span.stop, start + SCRATCH)
            self._read_bytes(span.file, start, [scratch[: stop - start]])
            # Each part has its elements in the order of the file, so that those of the buffer are a range of them.
            for part in span.parts:
                words = tiles[part.tile].words
                first, last = (count_elements_until(part.block, at) for at in (start, stop))
                for block in cut_range(part.block, first, last):
                    steps = [axis.src for axis in block.axes]
                    source = np.ndarray(block.extents, words.dtype, scratch, block.src - start, steps)
                    copy_view(view_block(words, block, "dst"), source)

    def _read_coded(self, tiles: Sequence[_Tile]) -> None:
        """Reads chunks whole, each of them once: into the one tile that is made of chunks, else through a buffer."""
        users: dict[tuple[str, Box], list[tuple[_Tile, Stored, FileRead]]] = {}
        for tile in tiles:
            for stored, read in tile.reads:
                if not read.piece.raw:
                    users.setdefault((stored.name, read.piece.box), []).append((tile, stored, read))
        # Of a tile that is a box of its tensor many chunks are one request.
        parts: list[_CodedPart] = []
        whole: set[tuple[str, Box]] = set()
        for tile in tiles:
            coded = [(stored, read) for stored, read in tile.reads if not read.piece.raw]
            boxes = [read.piece.box for _, read in coded]
            # A pack has several tensors in a tile, which may have any number of dims.
            if (
                not boxes
                or len(coded) < len(tile.reads)
                or len({of.name for of, _ in coded}) > 1
                or any(len(users[of.name, r.piece.box]) > 1 for of, r in coded)
            ):
                continue
            stored = coded[0][0]
            around = tuple((min(d[0] for d in dim), max(d[1] for d in dim)) for dim in zip(*boxes, strict=True))
            extents = [stop - start for start, stop in around]
            elements = sum(block.elements for _, read in coded for block in read.blocks)
            # The tile is this box of its tensor, if it has its dims and as many elements as are taken.
            if elements == math.prod(extents) and is_box_of_tile(coded, around, tile.words.shape):
                chunks = [max(1, size) for size in stored.chunks or stored.shape]
                most = REQUESTED // (math.prod(chunks) * tile.words.itemsize)
                for box in cut_batches(around, chunks, most):
                    # The dots: without dims, numpy gives the element and not a view of it.
                    parts.append(_CodedPart(stored, box, tile.words[(..., *select_part(box, around))], []))
                whole.update((stored.name, box) for box in boxes)
        # A chunk that several tiles share, or that a tile has a part of.
        for at, several in users.items():
            if at not in whole:
                shares = [(tile.words, read.blocks) for tile, _, read in several]
                parts.append(_CodedPart(several[0][1], at[1], None, shares))
        # Libraries decode what is asked for beside each other, and keep it meanwhile.
        under_way: deque[tuple[int, Sequence[_CodedPart], Callable[[], None]]] = deque()
        try:
            for group in _group_parts(parts):
                size = sum(part.nbytes for part in group)
                while len(under_way) > 1 and sum(each for each, *_ in under_way) + size > DECODED:
                    self._finish_coded(*under_way.popleft()[1:])
                asked: list[BoxToRead] = []
                for part in group:
                    shape = [stop - start for start, stop in part.box]
                    out = np.empty(shape, part.shares[0][0].dtype) if part.out is None else part.out
                    asked.append((part.stored, part.box, out))
                filled = [part._replace(out=out) for part, (_, _, out) in zip(group, asked, strict=True)]
                under_way.append((size, filled, self._driver.start_boxes(asked)))
            while under_way:
                self._finish_coded(*under_way.popleft()[1:])
        finally:
            # Nobody writes to a tile any more when this raises.
            for *_, wait in under_way:
                with contextlib.suppress(FileError):
                    wait()

    def _finish_coded(self, parts: Sequence[_CodedPart], wait: Callable[[], None]) -> None:
        """Waits for chunks, and puts those that were read to a buffer where they belong."""
        wait()
        for part in parts:
            if part.out is None:
                continue
            if self._checks is not None:
                self._checks.add_chunks(part.stored, part.box, part.out)
            for words, blocks in part.shares:
                for block in blocks:
                    copy_view(view_block(words, block, "dst"), view_block(part.out, block, "src"))
        # What libraries have freed would stay with the process: several chunks for each of their threads.
        call_libc("malloc_trim", 0)

    def _read_bytes(self, number: int, offset: int, buffers: Sequence[Array]) -> None:
        """Fills buffers with the bytes of a file from an offset on."""
        with self._hold_file(number) as file:
            self._fill_buffers(file, number, offset, buffers)
        # In this thread: the bytes are in its caches, and nobody waits for it but the next read.
        if self._checks is not None:
            for buffer in buffers:
                self._checks.add(number, offset, buffer)
                offset += buffer.nbytes

    @contextlib.contextmanager
    def _hold_file(self, number: int) -> Generator[int]:
        """The descriptor of a file, open as long as it is held, and longer unless others are: a store may have a file
        for each chunk, and a process as few as 1,024 descriptors.
        """
        with self._lock:
            file = self._files.pop(number, None)
            self._files[number] = file = open_stored_file(self.ckpt.files[number]) if file is None else file
            self.counts.files.add(number)
            self._holds[number] += 1
        try:
            with self._lock:
                more = len(self._files) - MOST_OPEN
                idle = [other for other in self._files if not self._holds[other]] if more > 0 else []
                for other in idle[: max(0, more)]:
                    unused = self._files.pop(other)
                    with contextlib.closing(os.fdopen(unused, "rb", buffering=0)):
                        _check_unchanged(self.ckpt.files[other], os.fstat(unused))
            yield file
        finally:
            with self._lock:
                self._holds[number] -= 1

    def _fill_buffers(self, file: int, number: int, offset: int, buffers: Sequence[Array]) -> None:
        """What the kernel leaves out is asked for again."""
        of = self.ckpt.files[number]
        left: list[Array] = list(buffers)
        at, total = offset, sum(buffer.nbytes for buffer in buffers)
        while at < offset + total:
            begun = time.perf_counter()
            try:
                count = os.preadv(file, left, at)
            except OSError as error:
                raise FileError(
                    f"{quoted(of.path)}{self._name_tensor(number, at)}: cannot read {offset + total - at} B from byte "
                    f"{at} on: {shortened(str(error))}; try again, or restore the file"
                ) from None
            self._waits |= time.perf_counter() - begun > SLOW + count / SLOW_BYTES
            with self._lock:
                self.counts.calls += 1
                self.counts.bytes += max(0, count)
            if count <= 0:
                size, more = os.fstat(file).st_size, offset + total - at
                raise FileError(
                    f"{quoted(of.path)}{self._name_tensor(number, at)}: the file ends at byte {size}, and {more} B "
                    f"from byte {at} on are wanted: it had {of.size} B when it was opened, and was cut; restore it"
                )
            at += count
            # The kernel may stop anywhere, at a signal or where it has no more at hand.
            while left and left[0].nbytes <= count:
                count -= left.pop(0).nbytes
            if left:
                left[0] = left[0].reshape(-1).view(np.uint8)[count:]

    def _name_tensor(self, number: int, offset: int) -> str:
        """The tensor that has a byte of a file, as an error names it."""
        for stored in self.ckpt.values():
            if any(of.file == number and of.offset <= offset < of.offset + of.nbytes for of in stored.pieces):
                return f", tensor {quoted(stored.name)}"
        return ""

    def close(self) -> None:
        """Closes what is open; raises `FileError` if a file is not as it was when the checkpoint was opened."""
        files, self._files = self._files, {}
        pool, self._pool = self._pool, None
        with contextlib.ExitStack() as closing:
            if pool is not None:
                pool.shutdown()
            if self._owns_driver:
                closing.callback(self._driver.close, self.counts)
            for file in files.values():
                closing.callback(os.close, file)
            # A file that somebody wrote to meanwhile may have given some of both.
            for number, file in files.items():
                _check_unchanged(self.ckpt.files[number], os.fstat(file))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with contextlib.suppress(*(() if kind is None else (FileError,))):  # The first error is the one to tell.
            self.close()


def open_stored_file(of: StoredFile) -> int:
    """The descriptor of a file, opened to be read; raises `FileError` if it is not the one that it was."""
    # What has become a pipe must not make this wait for its writer.
    try:
        file = os.open(of.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise FileError(f"cannot open {quoted(of.path)}: {shortened(str(error))}") from None
    try:
        _check_unchanged(of, os.fstat(file))
    except BaseException:
        os.close(file)
        raise
    return file


def _check_unchanged(of: StoredFile, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise FileError(f"{quoted(of.path)} is not a regular file any more; restore it")
    if (status.st_size, status.st_mtime_ns) != (of.size, of.changed_ns):
        raise FileError(
            f"{quoted(of.path)} has changed since it was opened: it had {of.size} B, changed at {of.changed_ns} ns, "
            f"and has {status.st_size} B, changed at {status.st_mtime_ns} ns; open it again when nobody writes to it"
        )


def is_box_of_tile(reads: Sequence[tuple[Stored, FileRead]], box: Box, shape: Sequence[int]) -> bool:
    """Whether a tile of this shape begins with a box of the one tensor that it takes these pieces of."""
    if len(shape) != len(box) or any(stop - start > size for (start, stop), size in zip(box, shape, strict=True)):
        return False
    below = list_strides(shape)
    for stored, read in reads:
        at = sum((piece[0] - of[0]) * step for piece, of, step in zip(read.piece.box, box, below, strict=True))
        # Each piece is one block, whole, at its own place in the box.
        if stored is not reads[0][0] or len(read.blocks) != 1 or read.blocks[0].dst != at or read.blocks[0].src:
            return False
        if any(axis.dst != step for axis, step in zip(read.blocks[0].axes, below, strict=False)):
            return False
    return True


def _group_parts(parts: Iterable[_CodedPart]) -> Iterator[list[_CodedPart]]:
    """Parts in the order in which they are, as many in a group as one request is for."""
    group: list[_CodedPart] = []
    nbytes = 0
    for part in parts:
        if group and nbytes + part.nbytes > REQUESTED:
            yield group
            group, nbytes = [], 0
        group.append(part)
        nbytes += part.nbytes
    if group:
        yield group


def _list_run_buffers(words: Array, block: Block, size: int) -> Iterator[tuple[int, Array]]:
    """The runs of a block as bytes of the file where they begin, and where they go in the tile's memory."""
    # Axes may be joined where the tile is C-ordered; else each stays within one dim, whose stride it has.
    if words.flags.c_contiguous:
        block = fuse_axes(Block(block.src, block.dst * size, tuple(a._replace(dst=a.dst * size) for a in block.axes)))
        block = block._replace(dst=block.dst // size, axes=tuple(a._replace(dst=a.dst // size) for a in block.axes))
    view = view_block(words, block, "dst")
    below, outer = size, len(block.axes)
    while outer:
        extent, src, _ = block.axes[outer - 1]
        if extent != 1 and (src, view.strides[outer - 1]) != (below, below):
            break
        below, outer = below * extent, outer - 1
    if not outer:
        yield block.src, view
        return
    axes = block.axes[:outer]
    for index in np.ndindex(*(axis.extent for axis in axes)):
        yield block.src + sum(at * axis.src for at, axis in zip(index, axes, strict=True)), view[(*index, ...)]
