"""How two grids of chunks along one dim meet, in closed form.

size 10, source chunks of 4, target chunks of 3

source   0 1 2 3|4 5 6 7|8 9
target   0 1 2|3 4 5|6 7 8|9     6 segments: 0-2 3 4-5 6-7 8 9
cut 6    0 1 2 3 4 5|6 7 8 9     the chunk 4-7 is read for both regions: 4 chunks are read, 16 elements
window   0-3, then 3-7, then 6-9: 5 rows hold what is read and not yet written, one source chunk at a time
"""

from __future__ import annotations

import math
from functools import lru_cache


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
