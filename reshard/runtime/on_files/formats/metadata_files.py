"""Files from which metadata are read: only regular ones inside the checkpoint, in as few bytes as they need.

What a checkpoint says about itself may be wrong or hostile: an index can name `../../etc/passwd`, a pipe on which a
read waits for ever, or lengths that no memory holds. So names are resolved here, files are opened here, and each error
says which file, tensor and byte it is about.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, TypeVar, cast

from reshard.errors import FileError, quoted, shortened
from reshard.plans.stored import ChunkGrid, Stored, StoredFile, StoredPiece
from reshard.types.whole import MOST, MOST_LISTED

T = TypeVar("T")
R = TypeVar("R")

SLOW_FILE, SIDE_BY_SIDE = 5e-3, 16
"""Seconds that the metadata of a file take where files are slow, and how many of them are read at once there."""

MOST_METADATA = 1 << 26
"""The most bytes of one file of metadata, such as an index: 45,000 tensors take 4 MiB."""


class OpenedFile:
    """A regular file that is open to be read, and what tells it from others."""

    def __init__(self, path: str, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self.path, self.size = path, found.st_size
        self.identity = StoredFile(path, found.st_size, found.st_mtime_ns)
        self._descriptor = descriptor

    def read(self, offset: int, nbytes: int) -> bytes:
        """So many bytes; raises `FileError` where the file ends before."""
        parts: list[bytes] = []
        at, end = offset, offset + nbytes
        while 0 <= at < end:
            try:
                parts.append(os.pread(self._descriptor, end - at, at))
            except OSError as error:
                raise file_error(self.path, f"cannot be read ({error.strerror})", offset=at) from None
            if not parts[-1]:
                break
            at += len(parts[-1])
        if at != end or offset < 0:
            raise file_error(
                self.path, f"{nbytes} B are to be read, but the file ends at byte {self.size}", offset=offset
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)


@contextmanager
def open_regular(path: str) -> Generator[OpenedFile]:
    """Opens a file to read; raises `FileError` for what is not there and for folders, pipes and devices."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for somebody who writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError, TypeError) as error:  # ValueError: a NUL in the name.
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        cure = "; restore the file" if isinstance(error, OSError) and error.errno == errno.ENOENT else ""
        raise file_error(path, f"cannot be opened ({shortened(why)}){cure}") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
            kind = next((name for is_kind, name in kinds if is_kind(mode)), "a device")
            raise file_error(path, f"is {kind}, not a regular file; put the file itself there")
        yield OpenedFile(path, descriptor)
    finally:
        os.close(descriptor)


def read_metadata(path: str, most: int = MOST_METADATA) -> tuple[bytes, StoredFile]:
    """All that a small file holds, and the file's identity; raises `FileError` if it has more than `most` bytes."""
    with open_regular(path) as file:
        if file.size > most:
            raise file_error(path, f"has {file.size} B, more than the {most} B that metadata may take")
        return file.read(0, file.size), file.identity


def read_side_by_side(read: Callable[[T], R], what: Sequence[T]) -> Iterator[R]:
    """What is read of each of several files, in their order.

    In a page cache a file takes less than a thread does. Where one takes long, as on a network, the others are read by
    several threads, each of which waits for its own.
    """
    for at, each in enumerate(what):
        begun = time.perf_counter()
        found = read(each)
        slow = time.perf_counter() - begun > SLOW_FILE
        yield found
        if slow:
            pool = ThreadPoolExecutor(SIDE_BY_SIDE, "reshard-metadata")
            try:
                yield from pool.map(read, what[at + 1 :])
            finally:
                # After an error nobody wants the others.
                pool.shutdown(wait=True, cancel_futures=True)
            return


def resolve_inside(folder: str, name: object, said_by: str) -> str:
    """The path of a file that a checkpoint's metadata name; `said_by` is the file that says so.

    Raises `FileError` for names that are absolute or climb out of the folder, and for links that lead out of it. The
    cache of Hugging Face is the exception that everybody has: its `snapshots/<revision>` holds links to `../../blobs`.

    >>> resolve_inside("llama", "a/b.safetensors", "llama/index.json")
    'llama/a/b.safetensors'
    >>> resolve_inside("llama", "../b.safetensors", "llama/index.json")
    Traceback (most recent call last):
    reshard.errors.FileError: 'llama/index.json' names the file '../b.safetensors', which is outside its folder; \
write a name inside the folder
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise file_error(said_by, f"names the file {quoted(name)}; write the name of a file in text")
    # The text is looked at first: a path that climbs out and in again would pass the comparison of real paths below.
    parts = PurePosixPath(name.replace("\\", "/") if os.sep == "\\" else name)
    if parts.is_absolute() or os.path.isabs(name) or ".." in parts.parts:
        raise file_error(
            said_by, f"names the file {quoted(name)}, which is outside its folder; write a name inside the folder"
        )
    path = os.path.join(folder, name)
    root = os.path.realpath(folder)
    real = os.path.realpath(path)
    roots = [root]
    if os.path.basename(os.path.dirname(root)) == "snapshots":
        roots.append(os.path.join(os.path.dirname(os.path.dirname(root)), "blobs"))
    if not any(real.startswith(os.path.join(each, "")) for each in roots):
        raise file_error(
            said_by,
            f"names the file {quoted(name)}, a link out of the folder to {quoted(real)}; put the file itself there",
        )
    return path


def read_sizes(said: object, count: int | None = None) -> tuple[int, ...] | None:
    """A list of whole numbers of at least 0 as JSON has it, or None for anything else, and unless `count` are there.

    >>> read_sizes([8, 4]), read_sizes([8, True]), read_sizes([8, 4.0]), read_sizes([8], 2)
    ((8, 4), None, None, None)
    """
    if type(said) is not list:
        return None
    sizes = cast("list[Any]", said)
    if len(sizes) > MOST_LISTED or (count is not None and len(sizes) != count):
        return None
    return tuple(sizes) if all(type(size) is int and 0 <= size <= MOST for size in sizes) else None


def file_error(
    path: str, found: str, *, tensor: object = None, offset: int | None = None, kind: type[FileError] = FileError
) -> FileError:
    """The error about a file, and a tensor and a byte in it: what was found, what was expected, what to do.

    >>> str(file_error("a.npy", "the header is cut; copy the file again", offset=10))
    "'a.npy', byte 10: the header is cut; copy the file again"
    """
    where = [quoted(path)]
    if tensor is not None:
        where.append(f"tensor {quoted(tensor)}")
    if offset is not None:
        where.append(f"byte {offset}" if abs(offset) <= MOST else "a byte beyond any file")
    return kind(f"{', '.join(where)}{' ' if len(where) == 1 else ': '}{found}")


def check_cover(path: str, stored: Stored) -> None:
    """Raises `FileError` unless the pieces of a tensor cover its shape exactly once.

    Boxes inside the shape cover it if they have as many elements and no two meet. Two meet only if they do so along
    the first dim where most differ, so a sweep along that dim compares each box with those that are open there.
    """
    pieces = [piece for piece in stored.pieces if all(start < stop for start, stop in piece.box)]
    elements = 0
    for piece in pieces:
        count = 1
        for (start, stop), size in zip(piece.box, stored.shape, strict=True):
            if not 0 <= start <= stop <= size:
                raise file_error(
                    path, f"has the piece {box_text(piece.box)}, outside the shape {stored.shape}", tensor=stored.name
                )
            count *= stop - start
        elements += count
    wanted = 1
    for size in stored.shape:
        wanted *= size
    if elements < wanted:
        raise file_error(
            path,
            f"has pieces of {elements} elements, and {wanted} are to be covered: some are missing; save it again",
            tensor=stored.name,
        )
    if pieces and stored.shape:
        dims = range(len(stored.shape))
        along = max(dims, key=lambda dim: len({piece.box[dim][0] for piece in pieces}))
        _check_disjoint(path, stored.name, sorted((piece.box for piece in pieces), key=lambda box: box[along]), along)
    if elements != wanted:  # Several pieces of a scalar.
        raise file_error(path, f"has pieces of {elements} elements for {wanted}; save it again", tensor=stored.name)


def _check_disjoint(path: str, name: str, boxes: Sequence[Sequence[tuple[int, int]]], along: int) -> None:
    open_boxes: list[Sequence[tuple[int, int]]] = []
    for box in boxes:
        open_boxes = [each for each in open_boxes if each[along][1] > box[along][0]]
        for each in open_boxes:
            if all(a < d and c < b for (a, b), (c, d) in zip(each, box, strict=True)):
                both = f"{box_text(each)} and {box_text(box)}"
                raise file_error(path, f"has the pieces {both}, which overlap; save it again", tensor=name)
        open_boxes.append(box)


def measure_span(extents: Sequence[int], strides: Sequence[int]) -> tuple[int, tuple[int, ...] | None]:
    """How many elements lie from the first to the last of a box, ends included, and its strides, None in C order.

    >>> [measure_span(*given) for given in (((2, 3), (3, 1)), ((2, 3), (4, 1)), ((1, 3), (9, 1)))]
    [(6, None), (7, (4, 1)), (3, None)]
    """
    if 0 in extents:
        return 0, None
    below, in_order = 1, True
    for extent, stride in zip(reversed(extents), reversed(strides), strict=True):
        in_order &= extent == 1 or stride == below  # Along a dim of one element no step is ever made.
        below *= extent
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True))
    return span, None if in_order else tuple(strides)


def find_chunks(shape: Sequence[int], pieces: Sequence[StoredPiece]) -> tuple[int, ...] | None:
    """The shape of the chunks if pieces, in this order, are those of a regular grid in C order; else None.

    >>> pieces = [StoredPiece(box, 0, 0, 0) for box in (((0, 4), (0, 6)), ((4, 7), (0, 6)))]
    >>> find_chunks((7, 6), pieces), find_chunks((7, 6), pieces[:1]), find_chunks((7, 6), pieces[::-1])
    ((4, 6), None, None)
    """
    if len(pieces) < 2 or 0 in shape:
        return None
    chunks = tuple([stop - start for start, stop in pieces[0].box])
    if 0 in chunks:
        return None
    grid = ChunkGrid(tuple(shape), chunks, 0)
    alike = len(grid) == len(pieces) and all(a.box == b.box for a, b in zip(grid, pieces, strict=True))
    return chunks if alike else None


def box_text(box: Sequence[tuple[int, int]]) -> str:
    """A box as slices.

    >>> box_text(((0, 4), (2, 8)))
    '[0:4, 2:8]'
    """
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"
