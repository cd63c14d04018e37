"""How a TPU has an array in memory: the order of its dims, and the padding of the two minor ones.

Rows of the minor dim are padded to 128 elements, and their number to 8, or to the next power of two where there are
fewer. Of all orders of the dims XLA takes the one of least padding, near the array's own, for arguments and results:

    bf16[512, 512, 64]     (0, 2, 1)    512 lanes instead of 64 of 128
    bf16[4096, 4096, 12]   (2, 0, 1)    4,096 rows instead of 12 of 16
    bf16[64, 64, 32, 64]   (0, 1, 2, 3)    64 lanes of 128, whichever dim is minor: twice its bytes
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

from reshard.types import dtypes

LANES = 128
"""A TPU pads the minor dim of an array in memory to a multiple of this many elements."""
SUBLANES = 8
"""The multiple to which it pads the dim before, unless that is smaller."""


def choose_memory_order(shape: Sequence[int], dtype: str) -> tuple[int, ...]:
    """The dims of an array in the order in which a TPU has it in memory, the minor one last.

    A loop's result should be in this order: XLA lays out what a loop carries as the loop writes it, whatever the
    padding, and copies all of it at the end if the result is in another order.

    >>> choose_memory_order((256, 128, 3), "bfloat16"), choose_memory_order((4096, 1, 4096), "bfloat16")
    ((2, 0, 1), (1, 0, 2))
    """
    return _choose_memory_order(tuple(shape), dtype)


@lru_cache(maxsize=4096)
def _choose_memory_order(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    dims = range(len(shape))
    if len(shape) < 2 or not math.prod(shape):
        return tuple(dims)
    near = itertools.permutations(reversed(dims), 2)
    orders = [(*(dim for dim in dims if dim not in last), *reversed(last)) for last in near]
    return min(orders, key=lambda order: count_padded_elements([shape[dim] for dim in order], dtype))


def is_cut_in_place(tile: Sequence[int], box: Sequence[int], dtype: str) -> bool:
    """Whether boxes are cut out of a tile, or written to it, as it lies in memory: with their padding they take at most
    half of it. For larger ones XLA copies the tile to another order of dims.

    >>> is_cut_in_place((1024, 256, 4096), (1024, 256, 512), "bfloat16")
    True
    >>> is_cut_in_place((64, 256, 4), (64, 192, 4), "int8")
    False
    """
    order = choose_memory_order(tile, dtype)
    padded = (count_padded_elements([shape[dim] for dim in order], dtype) for shape in (box, tile))
    return 2 * next(padded) <= next(padded)


def count_padded_bytes(shape: Sequence[int], dtype: str, order: Sequence[int] | None = None) -> int:
    """The bytes that an array takes with its dims in this order, or in the one of least padding.

    >>> count_padded_bytes((64, 64, 32, 64), "bfloat16") // (64 * 64 * 32 * 64 * 2)
    2
    >>> count_padded_bytes((16, 128, 128, 64), "bfloat16") // (16 * 128 * 128 * 64 * 2)
    1
    """
    extents = [shape[dim] for dim in (choose_memory_order(shape, dtype) if order is None else order)]
    return -(-count_padded_elements(extents, dtype) * dtypes.bits(dtype) // 8)


def count_padded_elements(extents: Sequence[int], dtype: str) -> int:
    """The elements that an array takes with its dims in memory in this order, minor last.

    >>> count_padded_elements((64, 3, 100), "bfloat16") == 64 * 4 * 128
    True
    """
    if len(extents) < 2:
        return math.prod(extents)
    *major, second, minor = extents
    # Elements of less than 32 bits share a word with those of the next rows, so few rows are at least that many.
    few = max(1 << (second - 1).bit_length(), 32 // dtypes.bits(dtype)) if second else 0
    rows = -(-second // SUBLANES) * SUBLANES if second >= SUBLANES else few
    return math.prod(major) * rows * -(-minor // LANES) * LANES
