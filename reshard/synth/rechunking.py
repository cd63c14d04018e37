"""Which bytes move where when a stored array gets other chunks: the fewest that are read and written within a memory.

    plan_rechunking         all ways enumerated, and the cheapest as an `ArrayRechunk`
    find_streamed_regions   direct and sweep: regions whose target chunks are assembled while source chunks stream by
    find_spilled_regions    the rest goes through files, in passes, while a part of it is assembled as it is read
    list_cuts, find_window  how grids of chunks along one dim meet: reads of a cut, windows of a sweep

A plan knows shapes, chunks, bytes and how many processes join; it sees neither paths nor ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import permutations, product
from typing import NamedTuple

from reshard.errors import BudgetError
from reshard.plans.rechunk_plan import ArrayRechunk, RechunkTask, Spill
from reshard.types.units import bytes_text, shape_text

STEP_BYTES = 64 << 20
"""A sweep reads at least so much at a time if memory allows, so that several chunks are on their way at once."""


def plan_rechunking(task: RechunkTask) -> ArrayRechunk:
    """The plan that reads and writes the fewest bytes within memory, short runs of spill files counted as long ones.

    Of equal ones it is the one in a single pass. Raises `BudgetError` if a chunk does not fit in memory.

    >>> rows_to_columns = RechunkTask((8, 8), (1, 8), (8, 1), 1, 64, least_run=1)
    >>> plans = map(plan_rechunking, [rows_to_columns, replace(rows_to_columns, memory=48)])
    >>> [(plan.method, plan.traffic_bytes) for plan in plans]
    [('direct', 128), ('spill', 176)]
    """
    # Nothing is read of an array without elements, and an array without dims is one of a single row.
    if not math.prod(task.shape):
        return ArrayRechunk(task, task.target_chunks, 0, -1, 1, 1, None, 0, 0, 0, 0, 0)
    if not task.shape:
        task = replace(task, shape=(1,), source_chunks=(1,), target_chunks=(1,))
    written = math.prod(-(-size // chunk) * chunk for size, chunk in zip(task.shape, task.target_chunks, strict=True))
    chunks_written = written // math.prod(task.target_chunks)
    streamed = find_streamed_regions(replace(task, processes=1))
    if task.processes > 1:
        # With regions of their own processes need nobody. Together they have larger ones, or enough of them for all.
        joint = find_streamed_regions(task)
        if joint is not None and (streamed is None or joint.read < streamed.read or streamed.region == task.shape):
            streamed = joint
    below = None if streamed is None else (streamed.read + written) * task.itemsize
    # Only a cheaper one is worth the files.
    spilled = find_spilled_regions(task, below)
    if spilled is not None:
        return ArrayRechunk(
            task,
            spilled.region,
            spilled.along,
            -1,
            spilled.spill.reads[spilled.along],
            spilled.window,
            spilled.spill,
            (spilled.read + spilled.spilled) * task.itemsize,
            (written + spilled.spilled) * task.itemsize,
            spilled.price,
            spilled.requests,
            spilled.peak,
        )
    if streamed is None:
        source, target = (math.prod(chunks) * task.itemsize for chunks in (task.source_chunks, task.target_chunks))
        least = max(source + task.read_buffer, target + task.write_buffer, source + task.write_buffer)
        raise BudgetError(
            f"a source chunk of {shape_text(task.source_chunks)} ({bytes_text(source)}) or a target chunk of "
            f"{shape_text(task.target_chunks)} ({bytes_text(target)}), with the buffers that coding it takes, does not "
            f"fit in memory of {bytes_text(task.memory)}; give at least {bytes_text(least)}, or choose smaller chunks",
            least,
        )
    step, window, peak = _widen_step(task, streamed)
    return ArrayRechunk(
        task,
        streamed.region,
        streamed.along,
        streamed.dealt,
        step,
        window,
        None,
        streamed.read * task.itemsize,
        written * task.itemsize,
        (streamed.read + written) * task.itemsize,
        streamed.read // math.prod(task.source_chunks) + chunks_written,
        peak,
    )


def _widen_step(task: RechunkTask, streamed: StreamedRegions) -> tuple[int, int, int]:
    """Rows that are read at a time, rows of the window, bytes at the peak: more rows while memory has room for them."""
    along, region = streamed.along, streamed.region
    buffers = max(task.read_buffer, task.write_buffer)
    cross = streamed.held // max(1, min(streamed.window, region[along])) * task.itemsize
    step, window = task.source_chunks[along], streamed.window
    # A direct region is read at once; the parts of a window that processes share are as they are.
    if window >= region[along] or streamed.dealt >= 0:
        beside = 4 * math.prod(task.source_chunks) * task.itemsize if streamed.dealt >= 0 else 0
        held = streamed.held * task.itemsize + buffers + beside
        return (region[along] if window >= region[along] else step), window, held
    while step < region[along] and step * cross < STEP_BYTES:
        sizes = task.shape[along], region[along], task.source_chunks[along]
        wider = find_window(*sizes, 2 * step, task.target_chunks[along])
        if wider * cross + buffers > task.memory:
            break
        step, window = 2 * step, wider
    return step, window, window * cross + buffers


# Every element is read from its source chunk and goes to its target chunk in memory: direct, or as a sweep.
#
#     shape (12, 100), chunks (4, 100) -> (3, 10), memory for 500 elements
#
#     region        window          source rows that are read
#     (3, 100)      3 x 100         24: the chunk of rows 0-3 for region 0-2, again for 3-5, ...
#     (12, 40)      12 x 40         36: all of them for columns 0-39, for 40-79 and for 80-99
#     (12, 100)     6 x 100         (12, all columns once, but needs 600)
#     (12, 80)      6 x 80          24: a sweep: two regions, each along rows 0-11
#
# A sweep along a dim reads each chunk of a region once and carries the rows that straddle, so that a region may take
# all of that dim; the window takes what is read and not yet written.


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


# What memory cannot assemble goes through files, in runs that the next pass reads in one piece.
#
#     shape (8, 8), chunks (1, 8) -> (8, 1), memory for 48 elements
#
#     rows are read one by one           columns 0-4 are assembled in the window, 40 elements
#                                        columns 5-7 are written: 8 x 3 elements, one fragment of each row
#     the file is read in one run        columns 5-7 are assembled and written: 24 elements
#     read 64 + 24, written 64 + 24      (all through a file: 128 + 128; direct, in two regions: 128 + 64)
#
# The fragment of a block that is read and a block that is assembled later may be tiny: 1 GiB in 16 MiB of memory makes
# fragments of 256 KiB, 1 TiB such of 256 bytes. Then files in turn, each with blocks of a shape between, take fewer
# requests than they cost in bytes.


MOST_PASSES = 4
"""Files in turn that are tried: each makes fragments larger by the memory over a fragment's size before."""

MOST_REGIONS = 4096
"""Shapes of regions that are looked at; where dims have more cuts together, each keeps those with the fewest reads."""

PRICED_REGIONS = 24
"""Regions, those that move the fewest bytes, for which blocks are chosen and fragments counted."""


class SpilledRegions(NamedTuple):
    """Regions with files between: their price (bytes, short runs as long ones), and how they run."""

    price: int
    read: int
    spilled: int
    requests: int
    region: tuple[int, ...]
    along: int
    window: int
    peak: int
    spill: Spill


def find_spilled_regions(task: RechunkTask, below: int | None) -> SpilledRegions | None:
    """The regions whose price is least, if it is below `below`; None if none is, or a chunk does not fit in memory."""
    source = math.prod(task.source_chunks) * task.itemsize
    room = task.memory - max(task.read_buffer, task.write_buffer)
    last_room = task.memory - task.write_buffer
    if source > task.memory - task.read_buffer or math.prod(task.target_chunks) * task.itemsize > last_room:
        return None
    # What regions move is known at once, what fragments cost only with blocks: the best few are looked at closely.
    outlines = sorted(_list_outlines(task, room - source), key=lambda each: each[0])[:PRICED_REGIONS]
    best: SpilledRegions | None = None
    for least, region, along, dim in outlines:
        limit = below if best is None else best.price
        if limit is not None and least >= limit:
            break
        # Memory of the first pass is divided: more for blocks makes longer fragments, more for the window fewer bytes.
        for share in (0, 8, 4, 2, 1):
            spilled = _price_region(task, region, along, dim, source if share == 0 else max(source, room // share))
            if spilled is not None and (limit is None or spilled.price < limit):
                best, limit = spilled, spilled.price
    return best


def _list_outlines(task: RechunkTask, room: int) -> list[tuple[int, tuple[int, ...], int, int]]:
    """Regions as (bytes moved at least, shape, dim of the window, dim that is split), with `room` for the window."""
    dims = range(len(task.shape))
    cuts = [list_cuts(*each) for each in zip(task.shape, task.source_chunks, task.target_chunks, strict=True)]
    most = max(2, int(MOST_REGIONS ** (1 / max(1, len(cuts)))))
    if math.prod(map(len, cuts)) > MOST_REGIONS:
        cuts = [sorted(each, key=lambda cut: cut[1])[:most] for each in cuts]
    written = _count_written(task)
    outlines: list[tuple[int, tuple[int, ...], int, int]] = []
    for picked in product(*cuts):
        region = tuple(cut[0] for cut in picked)
        read = math.prod(cut[1] for cut in picked)
        # Everything through a file, unless a window has room for some of it.
        best = (2 * task.nbytes, 0, len(dims) - 1)
        for along in dims:
            window = _find_region_window(task, region, along, task.source_chunks[along])
            for dim in dims:
                if dim != along:
                    start = _find_start(task, region, along, dim, window, room)
                    best = min(best, (2 * _count_spilled(task, region, dim, start) * task.itemsize, along, dim))
        outlines.append(((read + written) * task.itemsize + best[0], region, best[1], best[2]))
    return outlines


def _count_written(task: RechunkTask) -> int:
    return math.prod(-(-size // chunk) * chunk for size, chunk in zip(task.shape, task.target_chunks, strict=True))


def _find_region_window(task: RechunkTask, region: tuple[int, ...], along: int, step: int) -> int:
    return find_window(task.shape[along], region[along], task.source_chunks[along], step, task.target_chunks[along])


def _find_start(task: RechunkTask, region: tuple[int, ...], along: int, dim: int, window: int, room: int) -> int:
    """Rows along `dim` that `room` bytes assemble while a region is read: whole target chunks, and not all of them."""
    if task.processes > 1 or dim == along:
        return 0
    others = math.prod(window if at == along else size for at, size in enumerate(region) if at != dim)
    chunk = task.target_chunks[dim]
    return max(0, min(room // (others * task.itemsize) // chunk * chunk, (region[dim] - 1) // chunk * chunk))


def _count_spilled(task: RechunkTask, region: tuple[int, ...], dim: int, start: int) -> int:
    size = task.shape[dim]
    # Each region keeps its first rows, and the last one may have fewer than that.
    regions, last = divmod(size, region[dim])
    kept = regions * start + min(start, last)
    return math.prod(task.shape) // max(1, size) * (size - kept)


def _price_region(
    task: RechunkTask, region: tuple[int, ...], along: int, dim: int, read_room: int
) -> SpilledRegions | None:
    """The spill of a region whose blocks as read take `read_room` bytes: the rest of the memory is the window's."""
    room = task.memory - max(task.read_buffer, task.write_buffer)
    if read_room > room:
        return None
    rooms = (read_room // task.itemsize, (task.memory - task.write_buffer) // task.itemsize)
    reads, runs = pick_blocks(region, task.source_chunks, task.target_chunks, *rooms)
    if math.prod(map(count_segments, region, reads, runs)) * task.least_run > math.prod(region) * task.itemsize:
        # Fragments are short: blocks are filled dim by dim, too, in each order, and the best of all are taken.
        reads, runs = min(
            _list_filled_blocks(region, task.source_chunks, task.target_chunks, *rooms, (reads, runs)),
            key=lambda blocks: math.prod(map(count_segments, region, *blocks)),
        )
    used = math.prod(reads) * task.itemsize
    window = _find_region_window(task, region, along, reads[along])
    start = _find_start(task, region, along, dim, window, room - used)
    spilled = _count_spilled(task, region, dim, start)
    # Along each dim what is spilled of all regions but the last, and of the last: (how many, rows).
    lengths = [
        [(size // block, block - start * (at == dim)), (1, size % block - start * (at == dim))]
        for at, (size, block) in enumerate(zip(task.shape, region, strict=True))
    ]
    read = math.prod(map(count_read_rows, task.shape, task.source_chunks, region))
    chunks = [-(-size // chunk) for size, chunk in zip(task.shape, task.target_chunks, strict=True)]
    whole = (read + _count_written(task)) * task.itemsize
    base = read // math.prod(task.source_chunks) + math.prod(chunks)
    best: SpilledRegions | None = None
    for passes in range(1, MOST_PASSES + 1):
        stages = _list_stages(reads, runs, passes, task.memory // task.itemsize)
        # Fragments of each file: those of the blocks before that meet its own.
        counts = [
            math.prod(
                sum(times * count_segments(rows, *sizes) for times, rows in parts if rows > 0)
                for parts, *sizes in zip(lengths, one, other, strict=True)
            )
            for one, other in zip((reads, *stages[:-1]), stages, strict=True)
        ]
        # A read of a run is long; writes of fragments may be short.
        short = sum(max(spilled * task.itemsize, count * task.least_run) for count in counts)
        price = whole + short + passes * spilled * task.itemsize
        requests = base + sum(counts) + sum(spilled // math.prod(stage) for stage in stages)
        # The first pass has a block and the window, a later one a block of the file before, the last one target chunks.
        held = math.prod(window if at == along else size for at, size in enumerate(region) if at != dim) * start
        peak = max(
            used + held * task.itemsize + max(task.read_buffer, task.write_buffer),
            *(math.prod(stage) * task.itemsize for stage in stages[:-1]),
            math.prod(stages[-1]) * task.itemsize + task.write_buffer,
        )
        spill = Spill(dim, start, reads, stages)
        found = SpilledRegions(price, read, passes * spilled, requests, region, along, window, peak, spill)
        if best is None or found.price < best.price:
            best = found
        if max(counts) * task.least_run <= spilled * task.itemsize:
            break  # No fragment is short: another file would only add its bytes.
    return best


def pick_blocks(
    region: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...], read_room: int, run_room: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Blocks of whole source chunks and of whole target chunks that cut a region into few fragments between them.

    They grow from one chunk each, always along the dim where fragments become fewer for the least room.

    >>> pick_blocks((4096, 4096), (1, 4096), (4096, 1), 65536, 65536)
    ((16, 4096), (4096, 16))
    """
    shapes = [[min(size, chunk) for size, chunk in zip(region, chunks, strict=True)] for chunks in (source, target)]
    rooms = (read_room, run_room)
    while True:
        best: tuple[float, int, int, int] | None = None
        for which, (shape, chunks, room) in enumerate(zip(shapes, (source, target), rooms, strict=True)):
            volume = math.prod(shape)
            for dim, size in enumerate(region):
                if shape[dim] >= size:
                    continue
                # Twice as long, one chunk longer, or as long as there is room for.
                most = room // (volume // shape[dim]) // chunks[dim] * chunks[dim]
                for longer in {min(size, 2 * shape[dim]), min(size, shape[dim] + chunks[dim]), min(size, most)}:
                    if longer <= shape[dim] or volume // shape[dim] * longer > room:
                        continue
                    other = shapes[1 - which][dim]
                    fewer = count_segments(size, shape[dim], other) / count_segments(size, longer, other)
                    # By how much fragments become longer, for each doubling of memory.
                    gain = math.log(fewer) / math.log(longer / shape[dim])
                    if gain > 0 and (best is None or gain > best[0]):
                        best = (gain, which, dim, longer)
        if best is None:
            return tuple(shapes[0]), tuple(shapes[1])
        shapes[best[1]][best[2]] = best[3]


def _list_filled_blocks(
    region: tuple[int, ...],
    source: tuple[int, ...],
    target: tuple[int, ...],
    read_room: int,
    run_room: int,
    first: tuple[tuple[int, ...], tuple[int, ...]],
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Pairs of blocks that take all of one dim after the other while there is room, and `first`."""

    def fill(chunks: Sequence[int], limits: Sequence[int], order: Sequence[int], room: int) -> tuple[int, ...]:
        shape = [min(size, chunk) for size, chunk in zip(region, chunks, strict=True)]
        for dim in order:
            rows = room // (math.prod(shape) // shape[dim])
            # All of the dim if it fits, else whole chunks of it.
            longest = min(region[dim], -(-limits[dim] // chunks[dim]) * chunks[dim])
            shape[dim] = longest if longest <= rows else max(shape[dim], rows // chunks[dim] * chunks[dim])
        return tuple(shape)

    dims = range(len(region))
    orders = list(permutations(dims)) if len(region) <= 4 else [tuple(dims), tuple(reversed(dims))]
    found = [first]
    for run in {fill(target, region, order, run_room) for order in orders}:
        # Blocks as read need no more of a dim than the runs have, if others can have it.
        found += [(fill(source, limits, order, read_room), run) for limits in (region, run) for order in orders]
    return found


def _list_stages(reads: Sequence[int], runs: Sequence[int], passes: int, room: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the blocks of each file: between the blocks that are read and the last ones, in equal ratios."""
    stages: list[tuple[int, ...]] = []
    for at in range(1, passes):
        share = at / passes
        shape = [max(1, round(a ** (1 - share) * b**share)) for a, b in zip(reads, runs, strict=True)]
        # Rounded up, a shape may be too large by a little.
        while math.prod(shape) > room:
            longest = max(range(len(shape)), key=lambda dim: shape[dim])
            shape[longest] = max(1, min(shape[longest] - 1, shape[longest] * room // math.prod(shape)))
        stages.append(tuple(shape))
    return (*stages, tuple(runs))


# How two grids of chunks along one dim meet, in closed form.
#
# size 10, source chunks of 4, target chunks of 3
#
# source   0 1 2 3|4 5 6 7|8 9
# target   0 1 2|3 4 5|6 7 8|9     6 segments: 0-2 3 4-5 6-7 8 9
# cut 6    0 1 2 3 4 5|6 7 8 9     the chunk 4-7 is read for both regions: 4 chunks are read, 16 elements
# window   0-3, then 3-7, then 6-9: 5 rows hold what is read and not yet written, one source chunk at a time


def count_read_rows(size: int, source: int, region: int) -> int:
    """Rows that are read, in whole chunks, if regions of `region` rows are read one by one.

    A boundary between two regions that is none between chunks adds a chunk.

    >>> count_read_rows(10, 4, 6), count_read_rows(10, 4, 10), count_read_rows(12, 4, 8)
    (16, 12, 12)
    """
    # Chunks and boundaries that cut one: every cut makes one more read, of a whole chunk.
    boundaries = -(-size // region) - 1
    aligned = boundaries // (source // math.gcd(source, region))
    return source * (-(-size // source) + boundaries - aligned)


def count_segments(size: int, one: int, other: int) -> int:
    """Into how many segments two grids cut a dim.

    >>> count_segments(10, 4, 3), count_segments(12, 4, 3), count_segments(8, 8, 2)
    (6, 6, 4)
    """
    # A boundary of both grids counts once.
    shared = (size - 1) // math.lcm(one, other)
    return 1 + (size - 1) // one + (size - 1) // other - shared


@lru_cache(maxsize=4096)
def find_window(size: int, region: int, source: int, step: int, target: int) -> int:
    """The most rows at once between the first that is not written and the last that is read, `step` rows at a time.

    Steps of a region begin where the source chunk does that its first row is of.

    >>> find_window(10, 10, 4, 4, 3), find_window(12, 12, 2, 2, 6), find_window(8, 4, 3, 3, 2)
    (5, 6, 3)
    """
    # Where all steps are few they are looked at: the bound below is not reached if the dim ends before.
    if size > 64 * step or size > 64 * region:
        return min(region, step + target - math.gcd(step if region >= size else source, target))
    most = 0
    for first in range(0, size, region):
        grid, end = first // source * source, min(size, first + region)
        low = first
        while low < end:
            high = min(end, grid + ((low - grid) // step + 1) * step)
            most = max(most, high - low // target * target)
            low = high
    return most


def list_cuts(size: int, source: int, target: int) -> list[tuple[int, int]]:
    """Regions along a dim that are worth a try: (rows of a region, rows read), more rows with fewer reads.

    Regions are whole target chunks. Reads depend on how many regions there are and on the divisor that a region shares
    with a source chunk, so for each divisor and number of regions the smallest region is looked at.

    >>> list_cuts(10, 4, 3), list_cuts(12, 4, 3), list_cuts(4, 4, 1)
    ([(3, 24), (6, 16), (10, 12)], [(3, 24), (6, 16), (12, 12)], [(1, 16), (2, 8), (4, 4)])
    """
    # `period` regions of one target chunk pass until a boundary is one of source chunks again.
    chunks = -(-size // target)
    period = source // math.gcd(source, target)
    found: dict[int, int] = {}
    # A region of `unit` chunks, or a multiple, has its boundaries between source chunks once in period / unit.
    small = [each for each in range(1, math.isqrt(period) + 1) if period % each == 0]
    for unit in sorted({*small, *(period // each for each in small)}):
        units = -(-chunks // unit)
        length = 1
        while length <= units:
            regions = -(-units // length)
            length = -(-units // regions)  # the smallest that makes so few
            region = min(size, length * unit * target)
            found[region] = count_read_rows(size, source, region)
            length = units + 1 if regions == 1 else -(-units // (regions - 1))
    # What holds more rows and reads no fewer is of no use to anybody.
    cuts: list[tuple[int, int]] = []
    for region, rows in sorted(found.items()):
        if not cuts or rows < cuts[-1][1]:
            cuts.append((region, rows))
    return cuts
