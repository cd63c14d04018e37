"""Boxes of one stored tensor, read and written within a number of bytes: raw pieces by offset, coded ones by a driver.

    reader.read_box(box, out)       any box, into memory of any strides
    writer.write_box(box, data)     whole chunks (whole shards), so that each file is written once

A driver decodes all chunks of a request at once, so requests are cut into batches of so many chunks as there is room
for beside their elements.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.blocks import Axis, Block, list_strides
from reshard.plans.stored import Box, Checkpoint, ChunkGrid, Stored, StoredPiece
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_files.commit import write_fully
from reshard.runtime.on_files.drivers import Driver
from reshard.runtime.on_files.formats.metadata_files import file_error
from reshard.runtime.on_files.formats.new_arrays import NewArray
from reshard.runtime.on_files.formats.npy import read_npy

STAGING = 1 << 20
"""Bytes of the buffer through which elements go that lie otherwise in memory than in a file."""

_WRITING = os.O_WRONLY | os.O_CLOEXEC
_LONG_RUN = 4096
"""Bytes of a gap between two runs from which each is read alone, and of a run that needs no buffer."""


class StoredReader:
    """Reads boxes of a stored tensor; `batch` chunks at most are decoded at once, `pool` has threads that read."""

    def __init__(
        self, ckpt: Checkpoint, stored: Stored, driver: Driver | None, batch: int, pool: ThreadPoolExecutor
    ) -> None:
        self._files, self._stored, self._driver, self._batch, self._pool = ckpt.files, stored, driver, batch, pool
        self._threads = pool._max_workers  # pyright: ignore[reportPrivateUsage]

    def read_box(self, box: Box, out: NDArray[Any]) -> None:
        """Fills `out` with the elements of a box."""
        if not out.size:
            return
        if self._driver is not None:
            chunks = self._stored.chunks or self._stored.shape
            # Each thread asks for one batch at a time, so as many batches as threads are decoded at once.
            driver = self._driver

            def read_part(part: Box) -> None:
                driver.start_boxes([(self._stored, part, out[select_part(part, box)])])()

            list(self._pool.map(read_part, cut_batches(box, chunks, self._batch)))
            return
        pieces = list(self._find_pieces(box))
        # Each thread reads its share of the pieces, through a buffer of its own.
        shares = [pieces[at :: self._threads] for at in range(min(self._threads, len(pieces)))]
        list(self._pool.map(partial(self._read_pieces, box, out), shares))

    def _find_pieces(self, box: Box) -> Iterator[StoredPiece]:
        pieces, chunks = self._stored.pieces, self._stored.chunks
        if chunks is None or len(pieces) == 1:
            yield from (
                each for each in pieces if all(a < d and c < b for (a, b), (c, d) in zip(box, each.box, strict=True))
            )
            return
        counts = [-(-size // chunk) for size, chunk in zip(self._stored.shape, chunks, strict=True)]
        for index in product(*(range(a // chunk, -(-b // chunk)) for (a, b), chunk in zip(box, chunks, strict=True))):
            yield pieces[number_chunk(index, counts)]

    def _read_pieces(self, box: Box, out: NDArray[Any], pieces: Sequence[StoredPiece]) -> None:
        staging = np.empty(max(1, STAGING // out.itemsize), out.dtype)
        for piece in pieces:
            part = intersect_boxes(box, piece.box)
            extents = [stop - start for start, stop in piece.box]
            strides = piece.strides or list_strides(extents)
            first = sum((a - c) * stride for (a, _), (c, _), stride in zip(part, piece.box, strides, strict=True))
            # Rows in the order of the file, whatever the order of the dims.
            order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
            path = self._files[piece.file].path
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise file_error(path, f"cannot be opened ({error.strerror}); restore the file") from None
            try:
                _read_strided(
                    descriptor,
                    piece.offset + first * out.itemsize,
                    out[select_part(part, box)].transpose(order),
                    [strides[dim] for dim in order],
                    staging,
                )
            except (OSError, EOFError) as error:
                raise file_error(
                    path, f"cannot be read ({error}); restore the file", tensor=self._stored.name, offset=piece.offset
                ) from None
            finally:
                os.close(descriptor)


class StoredWriter:
    """Writes boxes of whole chunks of a stored tensor: by a driver, or as raw bytes without one.

    Raw chunks of zarr are files of their own, named `chunk_files` with the numbers of the chunk, joined by `separator`;
    without such a name they lie where the tensor's pieces are, or it is one raw piece.
    """

    def __init__(
        self,
        ckpt: Checkpoint,
        stored: Stored,
        driver: Driver | None,
        unit: Sequence[int],
        batch: int,
        pool: ThreadPoolExecutor,
        chunk_files: str = "",
        separator: str = "/",
    ) -> None:
        self._ckpt, self._stored, self._driver = ckpt, stored, driver
        self._unit, self._batch, self._pool = tuple(unit), batch, pool
        self._chunk_files, self._separator = chunk_files, separator
        self._threads = pool._max_workers  # pyright: ignore[reportPrivateUsage]

    def write_box(self, box: Box, data: NDArray[Any]) -> None:
        """Writes the elements of a box of whole units: chunks, or shards of them."""
        if not data.size:
            return
        if self._driver is not None:
            driver = self._driver

            def write_part(part: Box) -> None:
                driver.write_box(self._stored, part, data[select_part(part, box)])

            list(self._pool.map(write_part, cut_batches(box, self._unit, self._batch)))
            return
        if self._chunk_files or len(self._stored.pieces) > 1:
            # Each thread writes its share of the chunks, through a buffer of its own.
            chunks = list(cut_batches(box, self._unit, 1))
            shares = [chunks[at :: self._threads] for at in range(min(self._threads, len(chunks)))]
            list(self._pool.map(partial(self._write_chunks, box, data), shares))
            return
        # A new .npy file: one piece, in C order.
        (piece,) = self._stored.pieces
        path = self._ckpt.files[piece.file].path
        descriptor = os.open(path, _WRITING)
        try:
            _write_strided(descriptor, piece.offset, self._stored.shape, box, data)
        except OSError as error:
            raise file_error(path, f"cannot be written ({error.strerror})", tensor=self._stored.name) from None
        finally:
            os.close(descriptor)

    def _write_chunks(self, box: Box, data: NDArray[Any], chunks: Sequence[Box]) -> None:
        staging = np.empty(max(1, STAGING // data.itemsize), data.dtype)
        for chunk in chunks:
            numbers = [start // size for (start, _), size in zip(chunk, self._unit, strict=True)]
            path, offset = self._chunk_files + self._separator.join(map(str, numbers)), 0
            if not self._chunk_files:
                counts = [-(-size // of) for size, of in zip(self._stored.shape, self._unit, strict=True)]
                piece = self._stored.pieces[number_chunk(numbers, counts)]
                path, offset = self._ckpt.files[piece.file].path, piece.offset
            try:
                descriptor = _create_chunk_file(path) if self._chunk_files else os.open(path, _WRITING)
                try:
                    _write_padded(descriptor, data[select_part(chunk, box)], self._unit, staging, offset)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise file_error(path, f"cannot be written ({error.strerror})", tensor=self._stored.name) from None


def _create_chunk_file(path: str) -> int:
    flags = _WRITING | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        # Folders of chunks are made with the first one in each.
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, flags, 0o666)


def _write_padded(
    descriptor: int, data: NDArray[Any], chunk: Sequence[int], staging: NDArray[Any], offset: int
) -> None:
    """Writes a chunk whole, with zeros where the shape clips it."""
    whole = data.shape == tuple(chunk)
    for slab in iterate_slabs(chunk, len(staging)):
        depth = len(slab) if slab != (...,) else 0
        # A slab that lies in one piece in memory needs no copy.
        if whole and data[slab].flags.c_contiguous:
            rows = data[slab]
        else:
            last: Any = slab[depth - 1] if depth else slice(0, 0)
            shape = (min(last.stop, chunk[depth - 1]) - last.start, *chunk[depth:]) if depth else tuple(chunk)
            rows = staging[: math.prod(shape)].reshape(shape)
            if not whole:
                rows[...] = 0
            if all(index < size for index, size in zip(slab[: max(0, depth - 1)], data.shape, strict=False)):
                part = data[slab]
                rows[tuple(map(slice, part.shape))] = part
        write_all(descriptor, rows, offset)
        offset += rows.nbytes


def number_chunk(index: Sequence[int], counts: Sequence[int]) -> int:
    """The number of a chunk in C order.

    >>> number_chunk((2, 1), (3, 4))
    9
    """
    number = 0
    for at, count in zip(index, counts, strict=True):
        number = number * count + at
    return number


def needs_driver(stored: Stored) -> bool:
    """Whether its pieces are coded, or only a driver finds them."""
    return isinstance(stored.pieces, ChunkGrid) or not all(piece.raw for piece in stored.pieces)


def find_read_unit(stored: Stored, itemsize: int, least: int) -> tuple[int, ...]:
    """What is read whole: a coded chunk, or as many raw elements of a piece as lie together in `least` bytes.

    Parts of raw chunks divide them, so that they are a grid of the tensor, too.

    >>> from reshard.plans.stored import StoredPiece
    >>> piece = StoredPiece(((0, 64), (0, 128), (0, 256)), 0, 0, 8388608)
    >>> find_read_unit(Stored("w", "float32", (64, 128, 256), (piece,)), 4, 65536)
    (1, 64, 256)
    >>> halves = [StoredPiece(((0, 64), (at, at + 64), (0, 256)), 0, 0, 4194304) for at in (0, 64)]
    >>> find_read_unit(Stored("w", "float32", (64, 128, 256), halves, (64, 64, 256)), 4, 49152)
    (1, 32, 256)
    """
    chunked = stored.chunks is not None and (needs_driver(stored) or len(stored.pieces) > 1)
    whole = stored.chunks if stored.chunks is not None and chunked else stored.shape
    if chunked and needs_driver(stored):
        return whole
    # From the densest dim on, rows lie together until one is cut.
    unit = [1] * len(whole)
    strides = stored.pieces[0].strides if stored.pieces else None
    room = max(1, least // itemsize)
    for dim in sorted(range(len(unit)), key=lambda dim: strides[dim] if strides else -dim):
        most = max(1, min(whole[dim], room))
        unit[dim] = next(each for each in range(most, 0, -1) if not chunked or whole[dim] % each == 0)
        room //= unit[dim]
        if unit[dim] < whole[dim]:
            break
    return tuple(unit)


def cut_batches(box: Box, chunks: Sequence[int], most: int) -> Iterator[Box]:
    """Parts of a box with `most` chunks at most, in C order.

    >>> list(cut_batches(((0, 4), (2, 10)), (2, 4), 2))
    [((0, 2), (2, 8)), ((0, 2), (8, 10)), ((2, 4), (2, 8)), ((2, 4), (8, 10))]
    """
    # In chunks: from the last dim on whole rows of the box are taken while there is room.
    origin = [start // chunk * chunk for (start, _), chunk in zip(box, chunks, strict=True)]
    block = list(chunks)
    for dim, (_, stop) in reversed([*enumerate(box)]):
        count = -(-(stop - origin[dim]) // chunks[dim])
        taken = max(1, min(most, count))
        block[dim] *= taken
        most //= taken
        if taken < count:
            break
    return iterate_grid(box, origin, block)


def iterate_grid(box: Box, origin: Sequence[int], block: Sequence[int]) -> Iterator[Box]:
    """The parts of a box that a grid of blocks makes, in C order.

    >>> list(iterate_grid(((2, 7), (0, 2)), (1, 0), (3, 2)))
    [((2, 4), (0, 2)), ((4, 7), (0, 2))]
    """
    cuts: list[list[tuple[int, int]]] = []
    for (start, stop), zero, size in zip(box, origin, block, strict=True):
        bounds = [start, *range(start + size - (start - zero) % size, stop, size), stop]
        cuts.append([pair for pair in pairwise(bounds) if pair[0] < pair[1]])
    return product(*cuts)


def intersect_boxes(one: Box, other: Box) -> Box:
    """What two boxes have in common; where that is nothing, a box without elements."""
    return tuple((max(a, c), max(max(a, c), min(b, d))) for (a, b), (c, d) in zip(one, other, strict=True))


def make_box_block(part: Box, source: Box, target: Box) -> Block:
    """A part of two boxes as a block between them, both in C order.

    >>> make_box_block(((2, 4), (1, 3)), ((0, 4), (0, 3)), ((2, 6), (1, 9)))
    Block(src=7, dst=0, axes=(Axis(extent=2, src=3, dst=8), Axis(extent=2, src=1, dst=1)))
    """
    sides = [list_strides([stop - start for start, stop in box]) for box in (source, target)]
    src, dst = (
        sum((a - low) * step for (a, _), (low, _), step in zip(part, box, strides, strict=True))
        for box, strides in zip((source, target), sides, strict=True)
    )
    return Block(src, dst, tuple(Axis(b - a, *steps) for (a, b), *steps in zip(part, *sides, strict=True)))


def select_part(part: Box, box: Box) -> tuple[slice, ...]:
    """The index of a part in an array that holds a box."""
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(part, box, strict=True))


def write_all(descriptor: int, data: NDArray[Any], offset: int) -> None:
    """Writes a contiguous array at an offset."""
    write_fully(descriptor, offset, [memoryview(data.reshape(-1).view(np.uint8))])


def read_all(descriptor: int, out: NDArray[Any], offset: int) -> None:
    """Fills a contiguous array from an offset on, however often the system gives only a part."""
    view = memoryview(out.reshape(-1).view(np.uint8))
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise EOFError(f"{len(view)} bytes are missing at byte {offset}")
        view, offset = view[count:], offset + count


def iterate_slabs(shape: Sequence[int], most: int) -> Iterator[tuple[Any, ...]]:
    """Indices that take an array apart, in C order, into parts of at most `most` elements.

    >>> list(iterate_slabs((2, 3, 4), 8))
    [(0, slice(0, 2, None)), (0, slice(2, 4, None)), (1, slice(0, 2, None)), (1, slice(2, 4, None))]
    """
    # The dims behind `dim` are taken whole.
    dim, behind = len(shape), 1
    while dim and behind * shape[dim - 1] <= most:
        behind *= shape[dim - 1]
        dim -= 1
    if dim == 0:
        yield (...,)
        return
    rows = most // behind
    for outer in product(*map(range, shape[: dim - 1])):
        for start in range(0, shape[dim - 1], rows):
            yield (*outer, slice(start, start + rows))


def _read_strided(
    descriptor: int, offset: int, out: NDArray[Any], strides: Sequence[int], staging: NDArray[Any]
) -> None:
    """Fills `out` from elements that lie `strides` apart in a file, largest first."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(out.shape, strides, strict=True))
    dense = span == out.size
    if dense and out.flags.c_contiguous and out.nbytes >= _LONG_RUN:
        read_all(descriptor, out, offset)
        return
    # A gap that takes less time to read than another call is read with what lies around it.
    run = 1
    for size, stride in zip(reversed(out.shape), reversed(strides), strict=True):
        if size != 1 and stride != run:
            break
        run *= size
    if span <= staging.size and (span - out.size) * out.itemsize <= _LONG_RUN * (out.size // run):
        read_all(descriptor, staging[:span], offset)
        shifts = [stride * out.itemsize for stride in strides]
        out[...] = np.ndarray(out.shape, out.dtype, staging, 0, shifts)
        return
    # Rows of the largest stride one by one, or as many together as the buffer takes.
    inner = 1 + sum((size - 1) * stride for size, stride in zip(out.shape[1:], strides[1:], strict=True))
    row, rows = out.size // out.shape[0], 1
    if inner <= staging.size and (strides[0] - row) * out.itemsize <= _LONG_RUN * max(1, row // run):
        rows = max(1, (staging.size - inner) // strides[0] + 1)
    for start in range(0, out.shape[0], rows):
        part = out[start] if rows == 1 and out.ndim > 1 else out[start : start + rows]
        inward = strides[1:] if rows == 1 and out.ndim > 1 else strides
        _read_strided(descriptor, offset + start * strides[0] * out.itemsize, part, inward, staging)


def _write_strided(descriptor: int, offset: int, shape: Sequence[int], box: Box, data: NDArray[Any]) -> None:
    """Writes a box of an array that lies in C order in a file, in runs as long as it has."""
    extents = [stop - start for start, stop in box]
    outer = len(shape) - 1
    # The dims behind that the box has whole lie together.
    while outer > 0 and extents[outer] == shape[outer]:
        outer -= 1
    behind = math.prod(shape[outer + 1 :])
    for index in product(*map(range, extents[:outer])):
        # The place of the run's first element, as a number whose digits are its indices.
        at = 0
        for dim, number in enumerate((*index, 0)[: outer + 1]):
            at = at * shape[dim] + box[dim][0] + number
        rows = data[index]
        start = offset + at * behind * data.itemsize
        for slab in iterate_slabs(rows.shape, max(1, STAGING // data.itemsize)):
            part = np.ascontiguousarray(rows[slab])
            write_all(descriptor, part, start)
            start += part.nbytes


def create_npy(path: str, tensors: Mapping[str, NewArray]) -> Checkpoint:
    """Makes .npy files of the right length without their elements: one at `path`, or of several arrays a folder."""
    single = len(tensors) == 1
    if not single:
        os.makedirs(path)
    for name, new in tensors.items():
        dtype = numpy_dtype(new.dtype)
        if dtype.isbuiltin != 1:
            raise file_error(path, f"cannot hold {new.dtype}, which numpy does not have; take zarr", tensor=name)
        at = path if single else os.path.join(path, f"{name.replace('/', '.')}.npy")
        with open(at, "xb") as file:
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": new.shape}
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + math.prod(new.shape) * dtype.itemsize)
    return read_npy(path)
