"""Parts that take each other's place: a tile becomes the result part by part, in its own memory.

    f32[16, 3, {x}1] -> f32[{x}4, 3, 4] on <x=4>, an all-to-all in 4 parts: part k has rows k, 4 + k, 8 + k and 12 + k

    tile        0 1 2 3 | 4 5 6 7 | 8 9 a b | c d e f      16 rows of 3 elements
    together    0 4 8 c | 1 5 9 d | 2 6 a e | 3 7 b f      each part is one piece
    part 0      row 0   | 1 5 9 d | 2 6 a e | 3 7 b f      12 elements of the result take the place of 0 4 8 c
    part 1      row 0   | row 1   | 2 6 a e | 3 7 b f

A part of the result is as large as one of the operand. One that is not a single piece of a tile consists of slots,
which are brought together before the first part, or put where they belong after the last (`types.rules.parts.Regions`).

**Slots change places in the tile's memory,** with one slot in hand. The hand goes through each cycle of slots, and at
each puts down what it has and takes up what is there; back at the first, it puts down the last. What it puts down at
the first slot of a cycle belongs to none, and is overwritten in the end.
"""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1024)
def transposing(rows: int, columns: int) -> tuple[int, ...]:
    """The slots, numbered row by row, at which a hand stops that transposes rows x columns slots where they are.

    >>> hand, slots = "", list("abcdef")  # (a b c), (d e f)
    >>> for at in transposing(2, 3):
    ...     hand, slots[at] = slots[at], hand
    >>> "".join(slots)
    'adbecf'
    """
    stops: list[int] = []
    moved: set[int] = set()
    for start in range(rows * columns):
        if start in moved:
            continue
        cycle = [start]
        while (at := _transposed(cycle[-1], rows, columns)) != start:
            cycle.append(at)
        moved.update(cycle)
        stops += [*cycle, start] if len(cycle) > 1 else []
    return tuple(stops)


def _transposed(slot: int, rows: int, columns: int) -> int:
    """Where a slot's content belongs."""
    return slot % columns * rows + slot // columns
