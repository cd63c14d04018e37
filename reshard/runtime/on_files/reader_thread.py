"""Waves of readings: where they lie in memory, and the thread that reads one while another moves.

    threads   read wave 0 and 1 | read wave 1 | read wave 2    | read wave 3
    caller    prepares          | moves wave 0, prepares       | moves wave 1, prepares

Two buffers are reused in turn, each as soon as its wave has moved, so that there is always something to read, and what
is read goes to fresh pages but once. What is where its target wants it is read straight into that.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from reshard.errors import PlanError, quoted
from reshard.plans.load_plan import LoadPlan, Wave
from reshard.plans.stored import Box, Checkpoint
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_files.drivers import Missing
from reshard.runtime.on_files.engine import CheckpointReader, LateDriver, ReadChecks, ReadCounts, WantedTiles
from reshard.types.layout import Layout

Array = NDArray[Any]

ALIGNED = 64
"""Tiles of a wave begin at multiples of this: lines of the caches, and elements of every dtype."""


class ReaderThread:
    """Reads in threads of its own, two requests at a time; the end of a `with` waits for what it reads."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._pool = ThreadPoolExecutor(2, "reshard-reader")
        self._reading: deque[Future[None]] = deque()

    def start(self, wanted: Iterable[WantedTiles]) -> None:
        """Begins to fill some tiles, which are not touched until the `wait` for them."""
        self._reading.append(self._pool.submit(self._reader.read_tiles, list(wanted)))

    def wait(self) -> None:
        """Waits until the tiles of the first `start` that is not waited for are filled; raises what that raised."""
        self._reading.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def list_staged_layouts(wave: Wave) -> dict[str, Layout]:
    """What a wave has in memory beside targets: readings that are moved, and packs gathered from them, by name."""
    straight = {direct.reading for direct in wave.direct}
    packs = {reading.name for reading in wave.readings if reading.packed}
    staged = {reading.name: reading.layout for reading in wave.readings if reading.name not in straight}
    ends = dict[str, Layout]() if wave.tree is None else wave.tree.target_layouts
    return staged | {gathered_name(name): ends[name] for name in ends if name in packs}


def gathered_name(pack: str) -> str:
    """How a pack that has been gathered is called beside the reading of its name."""
    return f"{pack} gathered"


def place_staged(staged: Mapping[str, Layout], together: bool = False) -> tuple[dict[str, int], int]:
    """Where the tiles of each begin in a device's buffer, and the bytes of that; or in one of all devices `together`.

    It is the same in all processes, and for all devices that have a tile: others read there.
    """
    places: dict[str, int] = {}
    filled: defaultdict[int, int] = defaultdict(int)
    # Those of all devices first: behind tiles of few, they would leave holes on the others.
    for name, layout in sorted(staged.items(), key=lambda each: (-each[1].mesh.size, -each[1].tile_bytes)):
        size = -(-layout.tile_bytes // ALIGNED) * ALIGNED
        # Of a tensor that few devices read, the others have no tile, and keep no room for it.
        devices = (0,) if together else layout.mesh.devices
        places[name] = max(filled[device] for device in devices)
        for device in devices:
            filled[device] = places[name] + size * (layout.mesh.size if together else 1)
    return places, max(filled.values(), default=0)


def view_staged_tile(buffer: Array, place: int, layout: Layout) -> Array:
    """A tile that begins at this byte of a buffer."""
    return np.ndarray(layout.tile_shape, numpy_dtype(layout.dtype), buffer, place)


def view_direct_tile(target: Array, box: Box | None, shape: Sequence[int]) -> Array:
    """The part of a target's tile that a reading of this tile shape is read into.

    >>> view_direct_tile(np.zeros((2, 4, 3)), ((1, 2), (0, 2), (0, 3)), (2, 3)).shape
    (2, 3)
    """
    part = target if box is None else target[tuple(slice(*ends) for ends in box)]
    view = part.reshape(shape)
    if view.size and not np.shares_memory(view, target):
        raise PlanError(
            f"a reading with tiles of {shape} cannot be read into {quoted(box)} of a tile of {target.shape}"
        )
    return view


def longest_buffers(plan: LoadPlan, together: bool = False) -> int:
    """The bytes of the buffer that has room for each wave of a plan."""
    return max((place_staged(list_staged_layouts(wave), together)[1] for wave in plan.waves), default=0)


Progress = Callable[[int], object]
"""Is told of bytes that have been read, by all processes together."""


# A checkpoint read by several threads of one process, each with a reader of its own.
#
#     wave     q 16 MiB   k 4 MiB   v 4 MiB   o 16 MiB   gate 48 MiB   up 48 MiB
#     thread   0          0         0         0          0             1              about as many bytes each
#
# A process that has the machine to itself is not done with one thread: `preadv` copies from the page cache at the speed
# of one core, and runs are put in their places by another copy. What one reading takes of a file stays with one thread,
# so that its neighbours are read in one call, and its coded chunks once.


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
