"""Runs a plan of new chunks: source chunks go into a window, or into a spill file, and whole target chunks come out.

    region of a plan                      rows along dim `along`, a few source chunks at a time

    read     |====|====|====|             into the window, straight into place
    window        [==carried==|==new==]   rows that no whole target chunk takes yet are carried
    write    |======|======|              each target chunk once, as soon as it is whole

With a spill, blocks that are read are cut: what the window takes goes there, every other fragment into the run of the
target block that it is part of. A run is read in one piece later. Its fragments lie one behind the other, each in C
order, so what is read is what is there, and offsets are products of extents.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise, product
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from reshard.plans.rechunk_plan import ArrayRechunk, Spill
from reshard.plans.stored import Box
from reshard.runtime.on_files.commit import OneProcess, Processes, raise_together
from reshard.runtime.on_files.stored_boxes import (
    STAGING,
    intersect_boxes,
    iterate_grid,
    iterate_slabs,
    read_all,
    select_part,
    write_all,
)


class BoxReader(Protocol):
    """Reads boxes of one array."""

    def read_box(self, box: Box, out: NDArray[Any]) -> None:
        """Fills `out` with the elements of a box."""


class BoxWriter(Protocol):
    """Writes boxes of whole chunks of one array."""

    def write_box(self, box: Box, data: NDArray[Any]) -> None:
        """Writes the elements of a box."""


class SpillFile:
    """A file of runs, one for each block of a region's grid, that fragments are written into and blocks read from.

    `box` is what the file holds of the array, `block` the shape of the blocks, whose grid begins where `box` does.
    Fragments are what the blocks of another grid, of shape `cutters` from `origin` on, make of them.
    """

    def __init__(
        self, descriptor: int, box: Box, block: Sequence[int], origin: Sequence[int], cutters: Sequence[int]
    ) -> None:
        self._descriptor, self._box, self._block = descriptor, box, tuple(block)
        self._origin, self._cutters = tuple(origin), tuple(cutters)

    def list_blocks(self) -> list[Box]:
        """The blocks that have a run, in the order of their runs."""
        return list(iterate_grid(self._box, [start for start, _ in self._box], self._block))

    def write_parts(self, box: Box, data: NDArray[Any]) -> None:
        """Writes a block of the cutting grid, fragment by fragment; `box` is where `data` lies in the array."""
        staging = np.empty(max(1, STAGING // data.itemsize), data.dtype)
        # What the window keeps of this block is not in the file.
        for block in iterate_grid(intersect_boxes(box, self._box), [start for start, _ in self._box], self._block):
            whole = tuple(
                (low + (start - low) // size * size, min(high, low + (start - low) // size * size + size))
                for (start, _), (low, high), size in zip(block, self._box, self._block, strict=True)
            )
            offset = self._locate_fragment(whole, block) * data.itemsize
            part = data[select_part(block, box)]
            for slab in iterate_slabs(part.shape, len(staging)):
                rows = part[slab]
                # A slab that lies in one piece in memory needs no copy.
                if not rows.flags.c_contiguous:
                    packed = staging[: rows.size].reshape(rows.shape)
                    packed[...] = rows
                    rows = packed
                write_all(self._descriptor, rows, offset)
                offset += rows.nbytes

    def read_block(self, block: Box, out: NDArray[Any]) -> None:
        """Fills `out` with a block, whose fragments are read many at a time."""
        staging = np.empty(max(1, STAGING // out.itemsize), out.dtype)
        offset = self._locate_fragment(block, block) * out.itemsize
        waiting: list[NDArray[Any]] = []
        size = 0

        def read_waiting() -> None:
            nonlocal offset, size
            taken = staging[:size]
            read_all(self._descriptor, taken, offset)
            offset += taken.nbytes
            at = 0
            for part in waiting:
                part[...] = taken[at : at + part.size].reshape(part.shape)
                at += part.size
            waiting.clear()
            size = 0

        # Fragments follow each other in the file: as many as the buffer holds are read by one call.
        for fragment in iterate_grid(block, self._origin, self._cutters):
            target = out[select_part(fragment, block)]
            for slab in iterate_slabs(target.shape, len(staging)):
                part = target[slab]
                if size + part.size > len(staging):
                    read_waiting()
                waiting.append(part)
                size += part.size
        read_waiting()

    def _locate_fragment(self, block: Box, fragment: Box) -> int:
        """Elements before a fragment: those of the blocks before its block, then those of fragments before it.

        Boxes of a grid in C order: those before one along dim d have its own extents in the dims before d, begin at the
        low end of d, and take all that there is in the dims behind.
        """
        return _count_elements_before(self._box, block) + _count_elements_before(block, fragment)


def run_array(
    plan: ArrayRechunk,
    dtype: np.dtype[Any],
    reader: BoxReader,
    writer: BoxWriter,
    spill_path: str,
    processes: Processes,
) -> None:
    """Reads all of an array and writes all of it in its new chunks; all processes call it, and raise together."""
    task = plan.task
    # Regions begin where target chunks do: nobody writes a part of one.
    starts = [range(0, size, block) for size, block in zip(task.shape, plan.region, strict=True)]
    error: Exception | None = None
    for number, corner in enumerate(product(*starts)):
        sizes = zip(corner, task.shape, plan.region, strict=True)
        region = tuple((start, min(size, start + block)) for start, size, block in sizes)
        if plan.spill is not None:
            _spill_region(plan, plan.spill, region, dtype, reader, writer, spill_path, processes)
        elif plan.dealt >= 0:
            share = list_shares(plan, region)[processes.rank]
            _stream_region(
                plan, region, _replace_dim(region, plan.dealt, share), dtype, reader, writer, None, OneProcess()
            )
        elif number % processes.size == processes.rank and error is None:
            try:
                _stream_region(plan, region, region, dtype, reader, writer, None, OneProcess())
            except Exception as failed:  # The others are told at the end: until then none waits for another.
                error = failed
    raise_together(processes, error)


def list_shares(plan: ArrayRechunk, region: Box) -> list[tuple[int, int]]:
    """The rows along dim `dealt` of a region that each process has in its window: whole target chunks."""
    start, stop = region[plan.dealt]
    chunk = plan.task.target_chunks[plan.dealt]
    rows = math.ceil(math.ceil((stop - start) / chunk) / plan.task.processes) * chunk
    bounds = [min(stop, start + rows * at) for at in range(plan.task.processes + 1)]
    return list(pairwise(bounds))


def _stream_region(
    plan: ArrayRechunk,
    region: Box,
    kept: Box,
    dtype: np.dtype[Any],
    reader: BoxReader,
    writer: BoxWriter,
    spilled: SpillFile | None,
    processes: Processes,
) -> None:
    """Reads a region step by step; `kept`, a part of it, goes through the window, the rest into the spill file."""
    along, task = plan.along, plan.task
    first, end = region[along]
    shape = [stop - start for start, stop in kept]
    shape[along] = min(plan.window, shape[along])
    window = np.empty(shape, dtype)
    target = task.target_chunks[along]
    grid_start = first // task.source_chunks[along] * task.source_chunks[along]
    # A window of all rows takes them at once, wherever the region begins between source chunks.
    step = end - grid_start if shape[along] == end - first and spilled is None else plan.step
    written = low = first
    while low < end:
        high = min(end, grid_start + ((low - grid_start) // step + 1) * step)
        rows, place = kept, window
        # A share without elements reads along with the others, too.
        if shape[along]:
            rows = _replace_dim(kept, along, (low, high))
            place = window[select_part(rows, _replace_dim(kept, along, (written, written + shape[along])))]
        if spilled is None:
            reader.read_box(rows, place)
        else:
            _read_source_blocks(plan, _replace_dim(region, along, (low, high)), rows, place, reader, spilled, processes)
        # Whole target chunks are ready up to here; the rows behind move to the front of the window.
        ready = high if high == end else high // target * target
        if ready > written and window.size:
            writer.write_box(_replace_dim(kept, along, (written, ready)), _take_rows(window, along, 0, ready - written))
            # Never more rows at a time than lie apart: numpy would copy overlapping ones into memory of its own.
            distance, carried = ready - written, high - ready
            for start in range(0, carried, distance):
                count = min(distance, carried - start)
                moved = _take_rows(window, along, start + distance, count)
                _take_rows(window, along, start, count)[...] = moved
        written = max(written, ready)
        low = high


def _read_source_blocks(
    plan: ArrayRechunk,
    rows: Box,
    kept: Box,
    place: NDArray[Any],
    reader: BoxReader,
    spilled: SpillFile,
    processes: Processes,
) -> None:
    """Reads the blocks of a step, and puts each of their elements into the window or into the spill file."""
    assert plan.spill is not None
    origin = _floor_corner(rows, plan.task.source_chunks)
    # One buffer for all blocks: memory that is given back would be cleared by the system and faulted in again.
    buffer = np.empty(math.prod(plan.spill.reads), place.dtype)
    for number, block in enumerate(iterate_grid(rows, origin, plan.spill.reads)):
        # Steps have a few blocks each, so that processes begin at another one each time.
        if (number + rows[plan.along][0] // plan.step) % processes.size != processes.rank:
            continue
        inside = intersect_boxes(block, kept)
        # All of it stays in memory, so it is read where it belongs.
        if inside == block:
            reader.read_box(block, place[select_part(block, kept)])
            continue
        extents = [stop - start for start, stop in block]
        data = buffer[: math.prod(extents)].reshape(extents)
        reader.read_box(block, data)
        if all(start < stop for start, stop in inside):
            place[select_part(inside, kept)] = data[select_part(inside, block)]
        spilled.write_parts(block, data)


def _spill_region(
    plan: ArrayRechunk,
    spill: Spill,
    region: Box,
    dtype: np.dtype[Any],
    reader: BoxReader,
    writer: BoxWriter,
    spill_path: str,
    processes: Processes,
) -> None:
    """Reads a region into the window and a file; then each file into the next, and the last into target chunks."""
    first, end = region[spill.dim]
    middle = min(end, first + spill.start)
    kept = _replace_dim(region, spill.dim, (first, middle))
    rest = _replace_dim(region, spill.dim, (middle, end))
    # The last region along the dim may be so short that all of it fits.
    if middle == end:
        _stream_region(plan, region, kept, dtype, reader, writer, None, processes)
        return
    origin, cutters = _floor_corner(region, plan.task.source_chunks), spill.reads
    previous: SpillFile | None = None
    descriptors: list[int] = []
    try:
        for at, block in enumerate((*spill.runs, None)):
            error: Exception | None = None
            try:
                if block is None:
                    assert previous is not None
                    for box, data in _read_spill_runs(previous, dtype, spill.runs[-1], processes):
                        writer.write_box(box, data)
                else:
                    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                    descriptors.append(os.open(f"{spill_path}-{at % 2}", flags, 0o600))
                    current = SpillFile(descriptors[-1], rest, block, origin, cutters)
                    if previous is None:
                        _stream_region(plan, region, kept, dtype, reader, writer, current, processes)
                    else:
                        for box, data in _read_spill_runs(previous, dtype, spill.runs[at - 1], processes):
                            current.write_parts(box, data)
                        os.close(descriptors.pop(0))
                    previous, origin, cutters = current, [start for start, _ in rest], block
            except Exception as failed:  # Whatever it is, no process goes on reading what another has not written.
                error = failed
            raise_together(processes, error)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        # All have passed the same passes, so nobody opens a file that another removes.
        if processes.rank == 0:
            for number in range(2):
                with suppress(FileNotFoundError):
                    os.unlink(f"{spill_path}-{number}")
        processes.gather("")


def _read_spill_runs(
    spilled: SpillFile, dtype: np.dtype[Any], block: Sequence[int], processes: Processes
) -> Iterator[tuple[Box, NDArray[Any]]]:
    buffer = np.empty(math.prod(block), dtype)
    for box in spilled.list_blocks()[processes.rank :: processes.size]:
        extents = [stop - start for start, stop in box]
        data = buffer[: math.prod(extents)].reshape(extents)
        spilled.read_block(box, data)
        yield box, data


def _take_rows(array: NDArray[Any], along: int, start: int, rows: int) -> NDArray[Any]:
    return array[(slice(None),) * along + (slice(start, start + rows),)]


def _replace_dim(box: Box, dim: int, pair: tuple[int, int]) -> Box:
    return (*box[:dim], pair, *box[dim + 1 :])


def _floor_corner(box: Box, chunks: Sequence[int]) -> list[int]:
    return [start // chunk * chunk for (start, _), chunk in zip(box, chunks, strict=True)]


def _count_elements_before(box: Box, part: Box) -> int:
    extents = [stop - start for start, stop in box]
    count, own = 0, 1
    for dim, ((start, stop), (low, _)) in enumerate(zip(part, box, strict=True)):
        count += own * (start - low) * math.prod(extents[dim + 1 :])
        own *= stop - start
    return count
