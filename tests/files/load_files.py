"""Files for random loads, without any code of formats: the bytes of each piece at its offset, chunks in a stand-in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from reshard.plans.stored import Box, Checkpoint, Stored, StoredFile
from reshard.runtime.on_files import engine
from reshard.runtime.on_files.formats.tensorstore_arrays import RequestCounts


def write_pieces(path: Path, stored: Mapping[str, Stored], arrays: Mapping[str, np.ndarray]) -> Checkpoint:
    """One file with all raw pieces of some tensors."""
    with path.open("wb") as file:
        for name, each in stored.items():
            for piece in each.pieces:
                if piece.raw:
                    file.seek(piece.offset)
                    file.write(arrays[name][tuple(slice(*ends) for ends in piece.box)].tobytes())
    return describe_file(path, stored)


def describe_file(path: Path, stored: Mapping[str, Stored]) -> Checkpoint:
    """The checkpoint of tensors in one file, as it is now."""
    status = os.stat(path)
    return Checkpoint(str(path), "safetensors", (StoredFile(str(path), status.st_size, status.st_mtime_ns),), stored)


class ChunkDriver:
    """Gives chunks out of arrays, and refuses one that is asked for twice, or in part."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays, self.bytes, self.requests = arrays, 0, 0
        self.given: set[tuple[str, tuple[int, ...]]] = set()

    def start_boxes(self, parts: Sequence[tuple[Stored, Box, np.ndarray]]) -> Callable[[], None]:
        return lambda: [self.read_box(*part) for part in parts] and None

    def read_box(self, stored: Stored, box: Box, out: np.ndarray) -> None:
        assert stored.chunks is not None
        starts = [range(*ends, chunk) for ends, chunk in zip(box, stored.chunks, strict=True)]
        for (low, high), chunk, size in zip(box, stored.chunks, stored.shape, strict=True):
            assert low % chunk == 0 and (high % chunk == 0 or high == size)
        for start in np.stack(np.meshgrid(*starts), -1).reshape(-1, len(starts)).tolist():
            assert (stored.name, tuple(start)) not in self.given
            self.given.add((stored.name, tuple(start)))
        out.view(stored.dtype)[...] = self.arrays[stored.name][tuple(slice(*ends) for ends in box)]
        self.requests += 1

    def read_counts(self) -> RequestCounts:
        return RequestCounts(self.bytes, self.requests)

    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def chunks_of(arrays: Mapping[str, np.ndarray]) -> Iterator[ChunkDriver]:
    """While this is open, coded chunks are those of arrays."""
    driver = ChunkDriver(arrays)

    def open_driver(*_: Any) -> ChunkDriver:
        return driver

    with mock.patch.object(engine, "open_driver", open_driver):
        yield driver
