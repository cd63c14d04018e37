"""`reshard.files.check`: every checksum that is there, and what no checksum speaks for.

bytes                                    are compared with
of files that the sidecar lists          the CRC-32 of each block, elements or not
of coded chunks that it lists            the CRC-32 of the elements that they decode to
of other coded chunks                    what the format has inside (CRC-32C, fletcher32, zstd's own), as decoded
of raw pieces with a checksum (DCP)      that of the zip that they lie in
all others                               nothing: `record=True` writes a sidecar that speaks for them from now on
"""

from __future__ import annotations

import itertools
import os
import secrets
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike

import numpy as np

from reshard.errors import ChecksumError, FileError
from reshard.files.open import open as open_checkpoint
from reshard.plans.stored import Checkpoint, ChunkGrid
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_files.drivers import Missing, check_missing, open_driver
from reshard.runtime.on_files.formats.metadata_files import file_error, open_regular
from reshard.runtime.on_files.sidecar import (
    BlockChecks,
    ChunkSums,
    FileSums,
    SavedSums,
    find_sums,
    list_blocks,
    list_piece_rows,
    sidecar_of,
    sum_chunks,
    write_sums,
)
from reshard.types import dtypes
from reshard.types.units import bytes_text, counted

_AT_ONCE = 1 << 23
"""Bytes of a file that are in memory at once."""


@dataclass(frozen=True)
class CheckReport:
    """What a check has found: `faults` is empty if all bytes that have a checksum are those that were saved.

    `checked` has bytes by what they were compared with; `unchecked` are those that nothing speaks for.
    """

    path: str
    format: str
    tensors: int
    save: str | None
    checked: Mapping[str, int]
    unchecked: int
    faults: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.path}: {counted(self.tensors, 'tensor')}, {self.format}"]
        lines += [f"  {bytes_text(count):>10}  {what}" for what, count in self.checked.items()]
        if self.unchecked:
            lines.append(f"  {bytes_text(self.unchecked):>10}  without a checksum (--record writes one for later)")
        lines += [f"  fault: {fault}" for fault in self.faults]
        lines.append(f"  {counted(len(self.faults), 'fault')}" if self.faults else "  no fault found")
        return "\n".join(lines)


class _FaultCollector(BlockChecks):
    """Goes on after a block that is not what was saved, and counts the bytes of all that were compared."""

    def __init__(self, ckpt: Checkpoint, sums: SavedSums | None, faults: list[str]) -> None:
        super().__init__(ckpt, sums)
        self._faults = faults
        self.listed = self._starts.keys()
        self.compared = 0

    def on_block(self, file: int, block: int, found: int) -> None:
        self.compared += self.count_block_bytes(file, block)
        try:
            super().on_block(file, block, found)
        except ChecksumError as error:
            self._faults.append(str(error))


def check(path: str | PathLike[str], *, missing: Missing = "refuse", record: bool = False) -> CheckReport:
    """Reads a checkpoint and compares it with every checksum that is there, in the memory of a chunk.

    Chunks that are not there are faults unless `missing="fill"`. With `record`, the sums of what was read are written
    beside the checkpoint, as `save` does, so that whatever changes afterwards is an error when it is loaded; one that
    has faults, or a sidecar already, is left as it is. Raises `FileError` for what `open` refuses.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/w.npy", np.arange(6.0))
    ...     before, after = check(folder, record=True), check(folder)
    >>> before.unchecked, after.unchecked, after.checked, after.faults
    (48, 0, {'the crc32 of blocks in the sidecar': 176}, ())
    """
    checking = _Checking(open_checkpoint(path), missing, record)
    checking.read_files()
    checking.read_chunks()
    if record and checking.sums is None and not checking.faults:
        checking.write_sidecar()
    ckpt, sums = checking.ckpt, checking.sums
    save = None if sums is None else sums.save
    checked, faults = dict(checking.checked), tuple(checking.faults)
    return CheckReport(ckpt.path, ckpt.format, len(ckpt), save, checked, checking.unchecked, faults)


class _Checking:
    """A checkpoint that is being checked, what was found so far, and the sums to record."""

    def __init__(self, ckpt: Checkpoint, missing: Missing, record: bool) -> None:
        self.ckpt, self._record = ckpt, record
        self._missing: Missing = missing
        # A check goes on after a fault: who repairs a checkpoint wants to know them all.
        self.faults: list[str] = []
        self.checked: Counter[str] = Counter()
        self.unchecked = 0
        self.sums: SavedSums | None = None
        self._of_files: dict[str, FileSums] = {}
        self._of_chunks: dict[str, ChunkSums] = {}
        try:
            check_missing(ckpt, ckpt, missing)
            self.sums = find_sums(ckpt)
        except FileError as error:
            self.faults.append(str(error))
        self._compare = _FaultCollector(ckpt, self.sums, self.faults)

    def read_files(self) -> None:
        """Reads the files that have raw pieces, or no elements at all."""
        compare = self._compare
        parts: dict[int, set[int]] = {}
        coded: set[int] = set()
        for stored in self.ckpt.values():
            # A grid of very many chunks has none that can be read by offset.
            for piece in () if isinstance(stored.pieces, ChunkGrid) else stored.pieces:
                if not piece.raw:
                    coded.add(piece.file)
                    continue
                # Row by row where there is padding, which who reads elements does not read.
                rows = list_piece_rows(piece, dtypes.nbytes(1, stored.dtype))
                parts.setdefault(piece.file, set()).update(at for row in rows for at in row)
                if not compare.has_sum_at(piece.file, piece.offset):
                    self.unchecked += piece.nbytes
        # The sidecar has files by their paths from where it lies.
        folder = os.path.realpath(sidecar_of(self.ckpt.path).parent)
        for number, file in enumerate(self.ckpt.files):
            # Chunks have sums of their elements, and so have the values of a database, wherever they lie.
            of_values = self.ckpt.format == "orbax" and file.path.split(os.sep)[-2] == "d"
            if number not in parts and (number in coded or of_values):
                continue
            try:
                if number not in compare.listed and not self._record:
                    continue
                with open_regular(file.path) as opened:
                    for at in range(0, opened.size if number in compare.listed else 0, _AT_ONCE):
                        compare.add(number, at, opened.read(at, min(_AT_ONCE, opened.size - at)))
                    if self.sums is not None or not self._record:
                        continue
                    # Blocks end where pieces do, so that who reads one piece reads all of its blocks.
                    starts = list_blocks(opened.size, parts.get(number, ()))
                    edges = itertools.pairwise([*starts.tolist(), opened.size])
                    found = [zlib.crc32(opened.read(low, high - low)) for low, high in edges]
                    name = os.path.relpath(os.path.realpath(file.path), folder)
                    self._of_files[name] = FileSums(opened.size, starts, np.array(found, np.uint32))
            except FileError as error:
                self.faults.append(str(error))
        if compare.compared:
            where = "in the format" if self.sums is None else "of blocks in the sidecar"
            self.checked[f"the crc32 {where}"] += compare.compared

    def read_chunks(self) -> None:
        """Decodes all chunks of tensors that have coded ones."""
        coded = [stored for stored in self.ckpt.values() if any(not piece.raw for piece in stored.pieces)]
        if not coded:
            return
        driver = open_driver(self.ckpt, self._missing)
        try:
            for stored in coded:
                listed = self.sums is not None and stored.name in self.sums.tensors
                what = "the crc32 of elements in the sidecar" if listed else "what the format itself has, as decoded"
                chunks = stored.chunks or tuple(max(1, size) for size in stored.shape)
                found: list[int] = []
                for piece in stored.pieces:
                    # Those that are missing were said before, all together.
                    if piece.nbytes == 0 and self._missing == "refuse":
                        continue
                    # Of a chunk that is filled, the elements are the fill value, and have a sum as well.
                    elements = np.empty([stop - start for start, stop in piece.box], numpy_dtype(stored.dtype))
                    try:
                        driver.start_boxes([(stored, piece.box, elements)])()
                        self._compare.add_chunks(stored, piece.box, elements)
                        self.checked[what] += piece.nbytes
                        if self._record:
                            found += [each for _, _, each in sum_chunks(stored.shape, chunks, piece.box, elements)]
                    except FileError as error:
                        self.faults.append(str(error))
                self._of_chunks[stored.name] = ChunkSums(chunks, np.array(found, np.uint32))
        finally:
            driver.close()

    def write_sidecar(self) -> None:
        """Records the sums of what was read, in one step: a sidecar that is cut would make a checkpoint unreadable."""
        beside = sidecar_of(self.ckpt.path)
        part = beside.with_name(f".{beside.name}.part")
        try:
            part.write_bytes(write_sums([SavedSums(secrets.token_hex(8), self._of_files, self._of_chunks)]))
            part.replace(beside)
        except OSError as error:
            raise file_error(
                str(beside), f"cannot be written ({error.strerror}); make room, or do not record"
            ) from None
