"""What memory cannot assemble goes through files, in runs that the next pass reads in one piece.

    shape (8, 8), chunks (1, 8) -> (8, 1), memory for 48 elements

    rows are read one by one           columns 0-4 are assembled in the window, 40 elements
                                       columns 5-7 are written: 8 x 3 elements, one fragment of each row
    the file is read in one run        columns 5-7 are assembled and written: 24 elements
    read 64 + 24, written 64 + 24      (all through a file: 128 + 128; direct, in two regions: 128 + 64)

The fragment of a block that is read and a block that is assembled later may be tiny: 1 GiB in 16 MiB of memory makes
fragments of 256 KiB, 1 TiB such of 256 bytes. Then files in turn, each with blocks of a shape between, take fewer
requests than they cost in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations, product
from typing import NamedTuple

from reshard.plans.rechunk_plan import RechunkTask, Spill
from reshard.synth.rechunking.grids import count_read_rows, count_segments, find_window, list_cuts

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
