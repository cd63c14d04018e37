"""Every element is read from its source chunk and goes to its target chunk in memory: direct, or as a sweep.

    shape (12, 100), chunks (4, 100) -> (3, 10), memory for 500 elements

    region        window          source rows that are read
    (3, 100)      3 x 100         24: the chunk of rows 0-3 for region 0-2, again for 3-5, ...
    (12, 40)      12 x 40         36: all of them for columns 0-39, for 40-79 and for 80-99
    (12, 100)     6 x 100         (12, all columns once, but needs 600)
    (12, 80)      6 x 80          24: a sweep: two regions, each along rows 0-11

A sweep along a dim reads each chunk of a region once and carries the rows that straddle, so that a region may take all
of that dim; the window takes what is read and not yet written.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from reshard.plans.rechunk_plan import RechunkTask
from reshard.synth.rechunking.grids import find_window, list_cuts


class RegionCut(NamedTuple):
    """Along one dim: rows of the window that one process holds, rows of a region, rows that all regions read."""

    held: int
    region: int
    read: int


class StreamedRegions(NamedTuple):
    """Regions without a file between: elements read, elements that a process holds, and how a window runs."""

    read: int
    held: int
    region: tuple[int, ...]
    along: int
    dealt: int
    window: int


def find_streamed_regions(task: RechunkTask) -> StreamedRegions | None:
    """The regions that read the fewest elements within memory; None if no region has room.

    Several processes share the window along dim `dealt`; beside it each has four source chunks: one that it reads, one
    packed for others, and two that it receives.
    """
    chunk = math.prod(task.source_chunks) * task.itemsize
    beside = max(task.read_buffer + (4 * chunk if task.processes > 1 else 0), task.write_buffer)
    room = (task.memory - beside) // task.itemsize
    # Room is counted in elements from here on, so that extents multiply to what they hold.
    dims = range(len(task.shape))
    sizes = list(zip(task.shape, task.source_chunks, task.target_chunks, strict=True))
    cuts = [list_cuts(*each) for each in sizes]
    best: StreamedRegions | None = None
    # Rows of an array of one dim are read and written in order: nobody has a share of the same rows.
    for dealt in dims if task.processes > 1 and len(dims) > 1 else (-1,):
        whole: list[list[RegionCut]] = []
        for dim, cut in zip(dims, cuts, strict=True):
            chunk = task.target_chunks[dim]
            # The largest share that a process has of a region's target chunks.
            shares = [math.ceil(math.ceil(region / chunk) / task.processes) * chunk for region, _ in cut]
            held = shares if dim == dealt else [region for region, _ in cut]
            whole.append(
                [RegionCut(min(rows, region), region, read) for rows, (region, read) in zip(held, cut, strict=True)]
            )
        # Without a sweep (-1), then with one along each dim, which reads every chunk once there.
        for along in (-1, *dims):
            # Rows of a window that moves cannot be shares of processes, too.
            if along == dealt and along >= 0:
                continue
            options = list(whole)
            if along >= 0:
                size, source, target = sizes[along]
                swept = [
                    RegionCut(find_window(size, region, source, source, target), region, read)
                    for region, read in cuts[along]
                ]
                # As along other dims, only what holds more to read less.
                options[along] = [
                    cut
                    for cut in sorted(swept)
                    if cut.read == min(each.read for each in swept if each.held <= cut.held)
                ]
            found = _find_product(options, room, None if best is None else (best.read, best.held))
            if found is not None:
                read, held, picked = found
                region = tuple(cut.region for cut in picked)
                axis = along if along >= 0 else int(dealt == 0 and len(dims) > 1)
                window = picked[axis].held if along >= 0 else picked[axis].region
                best = StreamedRegions(read, held, region, axis, dealt, window)
    return best


def _find_product(
    options: Sequence[Sequence[RegionCut]], room: int, best: tuple[int, int] | None
) -> tuple[int, int, tuple[RegionCut, ...]] | None:
    """One option of each dim with the least product of reads (then of what is held) among those that `room` holds.

    Along a dim options hold more and read less in turn, so the last dim takes the largest that fits, and a dim is left
    as soon as the fewest reads of the dims behind it cannot beat the best found.
    """
    # Of the dims from each on: what no choice of them can beat.
    fewest_read, least_held = [1], [1]
    for option in reversed(options):
        fewest_read.append(fewest_read[-1] * min(cut.read for cut in option))
        least_held.append(least_held[-1] * min(cut.held for cut in option))
    fewest_read.reverse()
    least_held.reverse()
    found: tuple[int, int, tuple[RegionCut, ...]] | None = None

    def visit(dim: int, read: int, held: int, picked: tuple[RegionCut, ...]) -> None:
        nonlocal found, best
        if dim == len(options):
            if best is None or (read, held) < best:
                best, found = (read, held), (read, held, picked)
            return
        fitting = bisect_right(options[dim], room // (held * least_held[dim + 1]), key=lambda cut: cut.held)
        # The largest first: it reads the fewest, so the first that is too dear ends the dim.
        for cut in reversed(options[dim][:fitting]):
            if best is not None and read * cut.read * fewest_read[dim + 1] > best[0]:
                break
            visit(dim + 1, read * cut.read, held * cut.held, (*picked, cut))

    visit(0, 1, 1, ())
    return found
