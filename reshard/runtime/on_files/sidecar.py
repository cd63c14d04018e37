"""The sidecar `reshard.json`: what a save wrote, so that bytes which are not that are an error and never data.

    out/model.safetensors.index.json
    out/model-00001-of-00002-9f3c.safetensors     |-header-|-- block --|-- block --|- rest -|-- next tensor ...
    out/reshard.json                               sum       sum         sum         sum      sum

A block ends where a tensor ends, after `BLOCK` bytes at most: who reads some tensors of a file can check all of what it
reads. Chunks that only their format's library finds have sums of their decoded elements, in C order.

Blocks need not be read by one process. CRC-32 is linear over bits: that of a block is the exclusive or of those of its
runs, each followed by as many zeros as the block has bytes behind it. So every process adds up what it has read,
and what they have is combined at the end. A process that writes does the same:

    block           |....aaaaaa..bbbb|       a read by one process, b by another
    sum, raw         a * x^(8 * 6)  ^  b * x^0      polynomials over bits, modulo that of CRC-32

The sidecar may list two saves, since it is replaced before the index of the newer one is, and once more after that: a
reader takes the one that has written all of the files which the index names, and where none has, files of several
saves are mixed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.errors import ChecksumError, FileError, quoted, shortened
from reshard.plans.stored import NO_FILE, Box, Checkpoint, ChunkGrid, Stored, StoredPiece
from reshard.types import dtypes
from reshard.types.input_files import read_input
from reshard.types.json_fields import Fields

SIDECAR = "reshard.json"
BLOCK = 1 << 20
"""Bytes of a block: of 1 TiB, the sums take 8 MiB."""

_FORMAT = 1
_MOST_BYTES = 1 << 28
_MOST_INDEX = 1 << 26
"""Of files without elements, which are checked whole when a checkpoint is opened."""
_ADVICE = "restore the file or save again; delete reshard.json only if it was changed on purpose"

# The numbers of CRC-32, as zlib has them: bit 31 is x^0, and multiplying by x shifts right.
_POLYNOMIAL = 0xEDB88320
_ONES = 0xFFFFFFFF


@lru_cache(maxsize=4096)
def _power_of_bytes(count: int) -> int:
    """x^(8 count), modulo the polynomial: multiplying by it puts `count` zero bytes behind."""
    power, square = 1 << 31, 1 << 23  # 1 and x^8
    while count:
        if count & 1:
            power = _multiply_polynomials(power, square)
        square, count = _multiply_polynomials(square, square), count >> 1
    return power


def _multiply_polynomials(a: int, b: int) -> int:
    product = 0
    while a:
        # Bit by bit: 32 steps at most, for ends of runs alone, which are few.
        if a & (1 << 31):
            product ^= b
        a = (a << 1) & _ONES
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


class FileSums(NamedTuple):
    """A file that a save wrote: its size, where its blocks begin, and the CRC-32 of each."""

    size: int
    starts: NDArray[np.int64]
    sums: NDArray[np.uint32]


class ChunkSums(NamedTuple):
    """The CRC-32 of each chunk's decoded elements, chunks in C order and clipped at the end of the array."""

    chunks: tuple[int, ...]
    sums: NDArray[np.uint32]


@dataclass(frozen=True)
class SavedSums:
    """What one save wrote; `files` by their paths from the folder of the sidecar."""

    save: str
    files: Mapping[str, FileSums]
    tensors: Mapping[str, ChunkSums] = field(default_factory=lambda: MappingProxyType({}))
    index: str = ""
    """The file that was renamed last, and when it was changed: where it is the only file, two saves of equal sizes are
    told apart by this."""
    changed_ns: int = 0


def list_blocks(size: int, parts: Iterable[int]) -> NDArray[np.int64]:
    """Where the blocks of a file begin whose tensors (and other parts) begin at `parts`.

    >>> list_blocks(2 * BLOCK + 100, [0, 60, 100]).tolist()
    [0, 60, 100, 1048676]
    """
    edges = sorted({0, *parts})
    edges.append(max(size, edges[-1]))
    starts: list[int] = []
    for start, end in itertools.pairwise(edges):
        starts += range(start, end, BLOCK)
    # 8 bytes for each MiB, and searched for every run.
    return np.array(starts, np.int64)


class Segments(NamedTuple):
    """Where the blocks of a file are that have other bytes between them, such as padding: for each stretch of the file
    its block (-1: of none), and the bytes of that block behind it; for each block its bytes."""

    block: Sequence[int]
    behind: Sequence[int]
    length: Mapping[int, int]


class BlockSums:
    """Sums of the blocks of numbered files, from runs of bytes in any order; each byte is added once, by one process.

    Several threads may add. `starts` has for each file where its blocks begin, and where the last ends, or where its
    `segments` do.
    """

    def __init__(self, starts: Mapping[int, NDArray[np.int64]], segments: Mapping[int, Segments] | None = None) -> None:
        self._starts, self._segments = starts, segments or {}
        self.found: dict[tuple[int, int], int] = {}
        self._parts: dict[tuple[int, int], tuple[int, int]] = {}  # (file, block): bytes that were added, sum so far
        self._lock = threading.Lock()

    def add(self, file: int, offset: int, buffer: Any) -> None:
        """Adds the bytes of a file from `offset` on; `buffer` is anything with contiguous bytes."""
        starts, segments = self._starts.get(file), self._segments.get(file)
        view = memoryview(buffer)
        if starts is None or not view.nbytes:
            return
        view = view.cast("B")
        end = offset + view.nbytes
        # Blocks are cut where tensors end, so a run may meet many of them.
        first = max(0, int(np.searchsorted(starts, offset, "right")) - 1)
        last = min(int(np.searchsorted(starts, end, "left")), len(starts) - 1)
        edges = starts[first : last + 1].tolist()
        for at, (low, high) in enumerate(itertools.pairwise(edges), first):
            block, behind = (at, 0) if segments is None else (segments.block[at], segments.behind[at])
            run = view[max(low - offset, 0) : min(high, end) - offset]
            if block < 0 or not run.nbytes:
                continue
            # What is read in large runs has whole blocks, of which nothing need be kept.
            if run.nbytes == self.count_block_bytes(file, block):
                self.on_block(file, block, zlib.crc32(run))
            else:
                raw = zlib.crc32(run, _ONES) ^ _ONES  # From a register of zeros, as linearity wants it.
                behind += max(0, high - end)
                self._add_part(file, block, run.nbytes, _multiply_polynomials(raw, _power_of_bytes(behind)))

    def partials(self) -> list[tuple[int, int, int, int]]:
        """What this process has of blocks that it has not all of, for `merge`: file, block, bytes, sum so far."""
        with self._lock:
            return [(*at, *part) for at, part in sorted(self._parts.items())]

    def merge(self, others: Iterable[Sequence[Sequence[int]]]) -> None:
        """Adds the `partials` of other processes."""
        for file, block, count, raw in (part for parts in others for part in parts):
            self._add_part(file, block, count, raw)

    def on_block(self, file: int, block: int, found: int) -> None:
        """Is called with the sum of each block of which all bytes have been added, and keeps it in `found`."""
        self.found[file, block] = found

    def count_block_bytes(self, file: int, block: int) -> int:
        """Bytes of a block."""
        segments = self._segments.get(file)
        if segments is not None:
            return segments.length[block]
        return int(self._starts[file][block + 1] - self._starts[file][block])

    def _add_part(self, file: int, block: int, count: int, raw: int) -> None:
        length = self.count_block_bytes(file, block)
        with self._lock:
            had, so_far = self._parts.pop((file, block), (0, 0))
            # No order among runs: the exclusive or has none.
            count, raw = had + count, so_far ^ raw
            if count < length:
                self._parts[file, block] = (count, raw)
                return
        # What zlib returns begins with a register of ones and ends with their complement.
        self.on_block(file, block, raw ^ _ONES ^ _multiply_polynomials(_ONES, _power_of_bytes(length)))


class BlockChecks(BlockSums):
    """Compares what is read with what was saved, in the thread that reads; a difference is a `ChecksumError`.

        sums = find_sums(ckpt)                              None if there is no sidecar
        checks = BlockChecks(ckpt, sums)
        checks.add(piece.file, offset, buffer)              every run of bytes once
        checks.add_chunks(stored, box, decoded)             instead, for boxes of whole chunks of a coded tensor
        checks.merge(partials of all other processes)       at the end, on one process or on all

    Blocks that nobody has read wholly are not checked.
    """

    def __init__(self, ckpt: Checkpoint, sums: SavedSums | None) -> None:
        self._ckpt, self._sums = ckpt, SavedSums("", {}) if sums is None else sums
        # The same numbers as in the checkpoint.
        self._names = _names_of_files(ckpt)
        files = self._sums.files
        self._of_file = {at: files[name] for at, name in enumerate(self._names) if name in files}
        starts = {at: np.append(of.starts, of.size) for at, of in self._of_file.items()}
        self._of_piece: dict[tuple[int, int], tuple[Stored, StoredPiece, int]] = {}
        stretches = self._list_known_pieces()
        super().__init__(
            starts | {file: cut for file, (cut, _) in stretches.items()},
            {file: segments for file, (_, segments) in stretches.items()},
        )

    def _list_known_pieces(self) -> dict[int, tuple[NDArray[np.int64], Segments]]:
        """What is known of raw pieces of files without sums of their own, each a block of its file: the sum of a
        chunk's elements, which lie there as they are, or the checksum that the format has.
        """
        rows_of: defaultdict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        lengths: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for stored in self._ckpt.values():
            if isinstance(stored.pieces, ChunkGrid):
                continue
            of = self._sums.tensors.get(stored.name)
            known = of.sums.tolist() if of is not None and len(of.sums) == len(stored.pieces) else None
            size = dtypes.nbytes(1, stored.dtype)
            for at, piece in enumerate(stored.pieces):
                if not piece.raw or piece.file == NO_FILE or piece.file in self._of_file or not piece.nbytes:
                    continue
                in_order = list(piece.strides or ()) == sorted(piece.strides or (), reverse=True)
                if known is not None and in_order:
                    expected, rows = known[at], list_piece_rows(piece, size)
                elif piece.checksum is not None and piece.checksum[0] == "crc32":
                    expected, rows = piece.checksum[1], iter([(piece.offset, piece.offset + piece.nbytes)])
                else:
                    continue
                block, listed = len(lengths[piece.file]), list(rows)
                left = lengths[piece.file][block] = sum(high - low for low, high in listed)
                self._of_piece[piece.file, block] = stored, piece, expected
                for low, high in listed:
                    left -= high - low
                    rows_of[piece.file].append((low, high, block, left))
        made: dict[int, tuple[NDArray[np.int64], Segments]] = {}
        for file, rows in rows_of.items():
            starts, blocks, behind = [0], [-1], [0]
            for low, high, block, after in sorted(rows):
                starts += [low, high]
                blocks += [block, -1]
                behind += [after, 0]
            # Between blocks, and behind the last, are stretches of none.
            made[file] = np.array([*starts, 1 << 62]), Segments(blocks, behind, lengths[file])
        return made

    def has_sum_at(self, file: int, offset: int) -> bool:
        """Whether the byte of a file is in a block with a sum."""
        starts, segments = self._starts.get(file), self._segments.get(file)
        if starts is None or segments is None:
            return starts is not None
        return segments.block[int(np.searchsorted(starts, offset, "right")) - 1] >= 0

    def on_block(self, file: int, block: int, found: int) -> None:
        """Raises `ChecksumError` for a block whose bytes are not those that were saved."""
        piece = None
        if (file, block) in self._of_piece:
            stored, piece, expected = self._of_piece[file, block]
            tensor, low, high = stored.name, piece.offset, piece.offset + piece.nbytes
        else:
            tensor, expected = None, int(self._of_file[file].sums[block])
            low, high = (int(self._starts[file][block + at]) for at in (0, 1))
        if found == expected:
            return
        if piece is None:
            # What is told here is worth looking through all pieces.
            tensor = next(
                (
                    name
                    for name, each in self._ckpt.items()
                    for at in each.pieces
                    if at.file == file and at.offset < high and low < at.offset + at.nbytes
                ),
                None,
            )
        of = "" if tensor is None else f" of tensor {quoted(tensor)}"
        writer = f"save {self._sums.save}" if self._sums.save else "its writer"
        raise ChecksumError(
            f"{quoted(self._ckpt.files[file].path)}: bytes {low} to {high}{of} are not those that {writer} wrote: "
            f"their crc32 is {found:08x}, not {expected:08x}; {_ADVICE}"
        )

    def add_chunks(self, stored: Stored, box: Box, data: NDArray[Any]) -> None:
        """Checks a box of whole chunks, clipped at the end of the tensor, by their decoded elements."""
        sums = self._sums.tensors.get(stored.name)
        if sums is None:
            return
        for number, part, found in sum_chunks(stored.shape, sums.chunks, box, data):
            if found != (expected := int(sums.sums[number])):
                at = ", ".join(f"{low + cut.start}:{low + cut.stop}" for (low, _), cut in zip(box, part, strict=True))
                raise ChecksumError(
                    f"{quoted(self._ckpt.path)}: chunk {number} of tensor {quoted(stored.name)}, elements [{at}], is "
                    f"not what save {self._sums.save} wrote: the crc32 of its elements is {found:08x}, not "
                    f"{expected:08x}; {_ADVICE}"
                )


def list_piece_rows(piece: StoredPiece, size: int) -> Iterator[tuple[int, int]]:
    """The bytes of a raw piece in stretches without padding, in C order; `size` is that of an element.

    >>> list(list_piece_rows(StoredPiece(((0, 2), (0, 3)), 0, 80, 28, strides=(4, 1)), 4))
    [(80, 92), (96, 108)]
    """
    extents, strides = [stop - start for start, stop in piece.box], piece.strides or ()
    if math.prod(extents) * size == piece.nbytes:  # In whatever order.
        yield piece.offset, piece.offset + piece.nbytes
        return
    below, inner = 1, len(extents)
    # The last dims without padding are one row.
    while inner and (not strides or extents[inner - 1] == 1 or strides[inner - 1] == below):
        below *= extents[inner - 1]
        inner -= 1
    for index in np.ndindex(*extents[:inner]):
        at = piece.offset + size * sum(number * step for number, step in zip(index, strides, strict=False))
        yield at, at + below * size


def sum_chunks(
    shape: Sequence[int], chunks: Sequence[int], box: Box, data: NDArray[Any]
) -> Iterator[tuple[int, tuple[slice, ...], int]]:
    """The chunks of a box of whole chunks: their numbers in C order, where they are in the box, and their CRC-32.

    >>> data = np.arange(12, dtype=np.uint8).reshape(3, 4)
    >>> [(number, part[0]) for number, part, _ in sum_chunks((5, 4), (2, 4), ((2, 5), (0, 4)), data)]
    [(1, slice(0, 2, None)), (2, slice(2, 3, None))]
    """
    counts = [-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True)]
    found: list[tuple[int, tuple[slice, ...]]] = [(0, ())]
    for (low, high), chunk, count in zip(box, chunks, counts, strict=True):
        along = [(at, slice(at * chunk - low, min((at + 1) * chunk, high) - low)) for at in range(low // chunk, count)]
        along = [(at, cut) for at, cut in along if cut.start < high - low]
        found = [(number * count + at, (*cuts, cut)) for number, cuts in found for at, cut in along]
    for number, part in found:
        # In C order and little-endian, whatever order the elements have in memory.
        plain = np.ascontiguousarray(data[part])
        if plain.dtype.byteorder == ">":
            plain = plain.astype(plain.dtype.newbyteorder("<"))
        yield number, part, zlib.crc32(memoryview(plain.reshape(-1).view(np.uint8)))


# The file itself.


def sidecar_of(path: str | os.PathLike[str]) -> Path:
    """Where the sidecar of a checkpoint is: in its folder, or beside its only file."""
    given = Path(path)
    return given / SIDECAR if given.is_dir() else given.with_name(f"{given.name}.{SIDECAR}")


def find_checks(ckpt: Checkpoint) -> BlockChecks | None:
    """What compares a checkpoint with its checksums, in a sidecar or in its own format; None if there are none."""
    sums = find_sums(ckpt)
    pieces = (at for of in ckpt.values() if not isinstance(of.pieces, ChunkGrid) for at in of.pieces)
    return None if sums is None and all(at.checksum is None for at in pieces) else BlockChecks(ckpt, sums)


def find_sums(ckpt: Checkpoint) -> SavedSums | None:
    """What the sidecar of a checkpoint says of its files, None without a sidecar.

    Raises `ChecksumError` where no save has written all of these files in these sizes, or where a file without
    elements, such as an index, is not what the save has written.
    """
    saves = read_sidecar(sidecar_of(ckpt.path))
    if not saves:
        return None
    names, folder = _names_of_files(ckpt), sidecar_of(ckpt.path).parent
    faults: list[str] = []
    fitting: list[SavedSums] = []
    for saved in saves:
        fault = _fault_of_files(folder, ckpt, names, saved)
        if fault is None:
            fitting.append(saved)
        faults.append(f"save {saved.save}: {fault}")
    # Of two saves that fit, the newer one may have been killed before its file was renamed.
    if len(fitting) > 1:
        changed = {saved.save: saved.changed_ns for saved in fitting}
        with contextlib.suppress(OSError):
            fitting.sort(key=lambda saved: (folder / saved.index).stat().st_mtime_ns != changed[saved.save])
    if fitting:
        return fitting[0]
    raise ChecksumError(f"{quoted(ckpt.path)} is not what was saved there: {'; '.join(faults)}; {_ADVICE}")


def _fault_of_files(folder: Path, ckpt: Checkpoint, names: Sequence[str], saved: SavedSums) -> str | None:
    """Why a checkpoint is not what this save has written, None if it may be."""
    for name, file in zip(names, ckpt.files, strict=True):
        of = saved.files.get(name)
        # Stores of chunks have files that only their library knows; their sums are by chunk.
        if of is None and not saved.tensors:
            return f"file {quoted(name)} is of another save"
        if of is not None and of.size != file.size:
            return f"file {quoted(name)} has {file.size} B, not {of.size} B"
    read_later: set[str] = set()
    for name, stored in ckpt.items():
        if isinstance(stored.pieces, ChunkGrid):
            if name not in saved.tensors:
                return f"tensor {quoted(name)} is of another save"
        else:
            read_later |= {names[piece.file] for piece in stored.pieces if piece.file != NO_FILE}
    for name in sorted(saved.files.keys() - read_later):  # An index, or what else has no elements.
        of = saved.files[name]
        if of.size > _MOST_INDEX:
            return f"file {quoted(name)} has tensors that this checkpoint has not"
        try:
            content = read_input(folder / name, of.size, regular=True)
        except (OSError, ValueError) as error:
            return f"file {quoted(name)} cannot be read: {shortened(str(error))}"
        edges = [*of.starts.tolist(), of.size]
        found = [zlib.crc32(content[low:high]) for low, high in itertools.pairwise(edges)]
        if len(content) != of.size or found != of.sums.tolist():
            return f"file {quoted(name)} has other bytes"
    return None


def _names_of_files(ckpt: Checkpoint) -> list[str]:
    """The paths of a checkpoint's files from the folder of its sidecar."""
    folder = os.path.realpath(sidecar_of(ckpt.path).parent)
    return [os.path.relpath(os.path.realpath(os.path.join(folder, file.path)), folder) for file in ckpt.files]


def write_sums(saves: Sequence[SavedSums]) -> bytes:
    """The text of a sidecar, the last save first."""
    listed: list[dict[str, Any]] = []
    for saved in saves:
        files: dict[str, Any] = {}
        for name, of in saved.files.items():
            # Blocks of full length follow from where their part begins.
            parts = of.starts[np.diff(of.starts, prepend=-1) != BLOCK].tolist()
            files[name] = {"size": of.size, "parts": parts, "sums": of.sums.astype(">u4").tobytes().hex()}
        tensors = {
            name: {"chunks": list(of.chunks), "sums": of.sums.astype(">u4").tobytes().hex()}
            for name, of in saved.tensors.items()
        }
        head = {"save": saved.save, "algorithm": "crc32", "block": BLOCK, "index": saved.index}
        listed.append({**head, "changed_ns": saved.changed_ns, "files": files, "tensors": tensors})
    return json.dumps({"format": _FORMAT, "saves": listed}).encode()


def read_sidecar(path: Path) -> tuple[SavedSums, ...]:
    """The saves that a sidecar lists, the last one first; none without a sidecar. Raises `FileError`."""
    try:
        text = read_input(path, _MOST_BYTES, regular=True).decode()
        head = Fields.read(text, "a sidecar", _ADVICE)
        if head.get("format", int) != _FORMAT:
            raise head.error(f"format is {head.get('format', int)}, and this version reads format {_FORMAT}")
        return tuple(_read_sums(saved) for saved in head.objects("saves", "save"))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise FileError(f"{quoted(str(path))} is not a sidecar: {shortened(str(error))}; {_ADVICE}") from None


def _read_sums(saved: Fields) -> SavedSums:
    if saved.get("algorithm", str) != "crc32" or saved.get("block", int) != BLOCK:
        raise saved.error("its sums are not the crc32 of blocks of 1 MiB")
    files: dict[str, FileSums] = {}
    for name, data in saved.object("files").items():
        each = Fields.of(data, saved.what, f"file {quoted(name)}", saved.cure)
        size, parts = each.get("size", int), each.listed("parts", int)
        # Before anything is allocated: a sidecar may say what it likes.
        if not 0 <= size < 1 << 62 or not all(0 <= part <= size for part in parts):
            raise each.error(f"size is {quoted(size)} and its parts begin at {quoted(parts)}")
        sums = np.frombuffer(bytes.fromhex(each.get("sums", str)), ">u4").astype(np.uint32)
        if not len(parts) <= len(sums) <= len(parts) + size // BLOCK or len(sums) != len(
            starts := list_blocks(size, parts)
        ):
            raise each.error(f"it has {len(sums)} sums for {size} B in {len(parts)} parts")
        files[name] = FileSums(size, starts, sums)
    tensors: dict[str, ChunkSums] = {}
    for name, data in saved.object("tensors").items():
        each = Fields.of(data, saved.what, f"tensor {quoted(name)}", saved.cure)
        sums = np.frombuffer(bytes.fromhex(each.get("sums", str)), ">u4").astype(np.uint32)
        tensors[name] = ChunkSums(tuple(each.listed("chunks", int)), sums)
    return SavedSums(saved.get("save", str), files, tensors, saved.get("index", str), saved.get("changed_ns", int))
