"""A checkpoint read by several threads of one process, each with a reader of its own.

    wave     q 16 MiB   k 4 MiB   v 4 MiB   o 16 MiB   gate 48 MiB   up 48 MiB
    thread   0          0         0         0          0             1              about as many bytes each

A process that has the machine to itself is not done with one thread: `preadv` copies from the page cache at the speed
of one core, and runs are put in their places by another copy. What one reading takes of a file stays with one thread,
so that its neighbours are read in one call, and its coded chunks once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import Self

from reshard.plans.stored import Checkpoint
from reshard.runtime.on_files.drivers import Missing
from reshard.runtime.on_files.engine import CheckpointReader, LateDriver, ReadChecks, ReadCounts, WantedTiles

_LEAST = 8 << 20
"""Bytes below which another thread is not worth its calls."""


class ParallelReader:
    """Reads tiles as `CheckpointReader` does, with up to `threads` of them, and adds up what they count."""

    def __init__(
        self, ckpt: Checkpoint, counts: ReadCounts, checks: ReadChecks | None, missing: Missing, threads: int
    ) -> None:
        self._driver = LateDriver(ckpt, missing)
        self._make = partial(CheckpointReader, ckpt, checks=checks, missing=missing, driver=self._driver)
        self._counts = counts
        self._before = ReadCounts(counts.bytes, counts.calls, set(counts.files))
        self._pool = ThreadPoolExecutor(threads, "reshard-reader")
        self._threads = threads
        self._readers: list[CheckpointReader] = []

    def read_tiles(self, wanted: Sequence[WantedTiles]) -> None:
        """Fills the tiles, padding left as it is."""
        groups = list(self._share_out(wanted))
        # Files are opened by those who read: small loads have one reader.
        self._readers += [self._make(counts=ReadCounts()) for _ in groups[len(self._readers) :]]
        reading = [
            self._pool.submit(reader.read_tiles, group) for reader, group in zip(self._readers, groups, strict=False)
        ]
        # All of them end before one's error is raised: the tiles are the caller's again then.
        wait(reading)
        self._add_up()
        for each in reading:
            each.result()

    def _share_out(self, wanted: Sequence[WantedTiles]) -> Iterator[list[WantedTiles]]:
        """What is wanted, in its order, in as many groups of about equal bytes as there are threads at most."""
        sizes = [sum(tile.nbytes for tile in tiles.values()) for _, tiles in wanted]
        count = max(1, min(self._threads, sum(sizes) // _LEAST))
        group: list[WantedTiles] = []
        done, number = 0, 1
        for each, size in zip(wanted, sizes, strict=True):
            # One that would go further beyond the end of its share than it lacks begins the next.
            if group and number < count and (done + size / 2) * count > number * sum(sizes):
                yield group
                group, number = [], number + 1
            group.append(each)
            done += size
        if group:
            yield group

    def _add_up(self) -> None:
        every = [self._before, *(reader.counts for reader in self._readers)]
        self._counts.bytes = sum(each.bytes for each in every)
        self._counts.calls = sum(each.calls for each in every)
        self._counts.files.update(*(each.files for each in every))

    def close(self) -> None:
        """Closes what is open; raises `FileError` if a file is not as it was when the checkpoint was opened."""
        with ExitStack() as closing:
            closing.callback(self._add_up)
            # Counted when it is closed, once for all readers.
            closing.callback(self._driver.close, self._before)
            for reader in self._readers:
                closing.callback(reader.close)
            self._pool.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except Exception:
            if kind is None:  # Else the first error is the one to tell.
                raise
