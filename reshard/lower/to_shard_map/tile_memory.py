"""Tiles and their blocks: the padding, digits and transposes of a `TileView`, in JAX."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from reshard.plans.rules.tile_view import TileView
from reshard.types import dtypes

Array = jax.Array


def merge_block_digits(view: TileView) -> TileView:
    """The view with neighbouring digits of a dim as one where blocks number them in order, or not at all.

    A TPU transposes few digits in one pass over memory, and often needs two for many.
    """
    groups: list[list[int]] = []
    for axis in range(len(view.digits)):
        before = groups[-1][-1] if groups else axis
        joins = axis > 0 and view.dims[before] == view.dims[axis] and (before in view.blocks) == (axis in view.blocks)
        if joins and axis in view.blocks:
            joins = view.blocks.index(axis) == view.blocks.index(before) + 1
        groups[-1].append(axis) if joins else groups.append([axis])
    return TileView(
        view.tile,
        view.padded,
        tuple(math.prod(view.digits[axis] for axis in group) for group in groups),
        tuple(view.dims[group[0]] for group in groups),
        tuple(at for axis in view.blocks for at, group in enumerate(groups) if group[0] == axis),
    )


def make_unfilled(shape: Sequence[int], dtype: DTypeLike) -> Array:
    """An array of which every element is written later: on a TPU or a CUDA GPU, no pass over memory fills it first."""

    def empty() -> Array:
        return lax.empty(tuple(shape), dtype)

    return lax.platform_dependent(tpu=empty, cuda=empty, default=lambda: jnp.zeros(tuple(shape), dtype))


def fix_layout(tile: Array, order: Sequence[int] | None = None) -> Array:
    """The array, on a TPU with its dims in this order in memory; None: its last dim minor.

    An unfilled array has no layout of its own: XLA takes that of a part written to it, and copies all of it at the end.
    """
    rows = Layout(tuple(range(tile.ndim) if order is None else order))
    if jnp.iscomplexobj(tile):  # A TPU has none: XLA makes pairs of them, but not of a constraint.
        return tile
    return lax.platform_dependent(tile, tpu=lambda tile: with_layout_constraint(tile, rows), default=lambda tile: tile)


def keep_tile_layout(tile: Array, part: Array) -> Array:
    """A part of a tile, on a TPU in the tile's order of dims: XLA might copy the tile, to cut the part out of that in
    another order."""
    return fix_layout(part, choose_memory_order(tile.shape, tile.dtype.name))


def split_tile_digits(view: TileView, tile: Array) -> Array:
    """The tile, padded and reshaped to its digits."""
    return resize_tile(tile, view.padded).reshape(view.digits)


def resize_tile(tile: Array, shape: Sequence[int]) -> Array:
    """The tile, padded with zeros or cut at the high end of each dim."""
    if tile.shape == tuple(shape):
        return tile
    return lax.pad(
        tile, jnp.zeros((), tile.dtype), [(0, to - now, 0) for now, to in zip(tile.shape, shape, strict=True)]
    )


def number_blocks(view: TileView, tile: Array) -> Array:
    """The tile's blocks, numbered along a new first axis."""
    view = merge_block_digits(view)
    rest = [axis for axis in range(len(view.digits)) if axis not in view.blocks]
    return split_tile_digits(view, tile).transpose(*view.blocks, *rest).reshape(view.count, *view.block_shape)


def join_blocks(view: TileView, blocks: Array) -> Array:
    """The tile that numbered blocks make up, cut to its true shape."""
    view = merge_block_digits(view)
    rest = [axis for axis in range(len(view.digits)) if axis not in view.blocks]
    order = [*view.blocks, *rest]
    spread = blocks.reshape([view.digits[axis] for axis in order])
    return resize_tile(spread.transpose(np.argsort(order)).reshape(view.padded), view.tile)


@dataclass(frozen=True)
class BlockRuns:
    """Where the blocks of a tile lie: the tile's dims in an order, each as runs in which a block has one range.

    `view` has the digits of the tile in this order, and those that number the blocks.
    """

    view: TileView

    @classmethod
    def of(cls, view: TileView, order: Sequence[int] | None = None) -> BlockRuns:
        """Those of a tile whose dims lie in memory in this order, or in their own."""
        rank = {dim: at for at, dim in enumerate(range(len(view.tile)) if order is None else order)}
        axes = sorted(range(len(view.digits)), key=lambda axis: rank[view.dims[axis]])
        return cls(
            replace(
                view,
                digits=tuple(view.digits[axis] for axis in axes),
                dims=tuple(view.dims[axis] for axis in axes),
                blocks=tuple(axes.index(axis) for axis in view.blocks),
            )
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The tile's shape in runs."""
        return tuple(math.prod(self.view.digits[axis] for axis in run) for run in self.view.runs)

    @property
    def block(self) -> tuple[int, ...]:
        """A block's shape in runs."""
        kept = ([axis for axis in run if axis not in self.view.blocks] for run in self.view.runs)
        return tuple(math.prod(self.view.digits[axis] for axis in run) for run in kept)

    def starts(self, number: Array | int, *last: Array) -> list[Array]:
        """Where the block of a number begins in each run; `last` are the values of the last digits that number it."""
        digits, split = self.view.digits, len(self.view.blocks) - len(last)
        values: dict[int, Any] = dict(zip(self.view.blocks[split:], last, strict=True))
        number = jnp.asarray(number, jnp.int32)
        for axis in reversed(self.view.blocks[:split]):
            radix = np.int32(digits[axis])  # A number of Python would be wider than the other, where jax has 64 bits.
            values[axis], number = lax.rem(number, radix), lax.div(number, radix)
        return [jnp.asarray(start, jnp.int32) for start in self._sum_digits(values)]

    def list_starts(self, number: int) -> list[int]:
        """`starts` of a number that is known."""
        values: dict[int, int] = {}
        for axis in reversed(self.view.blocks):
            number, values[axis] = divmod(number, self.view.digits[axis])
        return self._sum_digits(values)

    def _sum_digits(self, values: Mapping[int, Any]) -> list[Any]:
        digits = self.view.digits
        below = {a: math.prod(digits[b] for b in run if b > a) for run in self.view.runs for a in run}
        return [sum(values[a] * below[a] for a in run if a in values) for run in self.view.runs]


def find_free_runs(view: TileView, order: Sequence[int]) -> BlockRuns | None:
    """The places of blocks in a tile whose dims are in this order; None unless its runs lie in a TPU's memory as its
    dims do, so that neither is copied to the other."""
    if view.tile != view.padded:
        return None
    free = BlockRuns.of(view, order)
    runs = [[run for run in free.view.runs if free.view.dims[run[0]] == dim] for dim in dict.fromkeys(free.view.dims)]
    if len(runs[-1]) > 1 or free.block[-1] % LANES:
        return None
    whole_rows = len(runs) < 2 or len(runs[-2]) == 1 or free.shape[-2] % SUBLANES == 0
    return free if whole_rows else None


def cut_box(tile: Array, starts: Sequence[Array], extents: Sequence[int]) -> Array:
    """The box of these extents that begins at `starts`, which are not negative, so XLA need not check."""
    # MLIR writes a slice of a scalar in a way that it cannot read.
    return lax.dynamic_slice(tile, starts, extents, allow_negative_indices=False) if starts else tile


def write_box(filled: Array, content: Array, starts: list[Array], gets: Array | None) -> Array:
    """`filled` with the content written at `starts`, on the devices where `gets` is true (None: on all)."""
    if gets is not None:
        now = cut_box(filled, starts, content.shape)
        content = lax.select(jnp.broadcast_to(gets, content.shape), content, now)
    if content.shape == filled.shape:
        return content
    return lax.dynamic_update_slice(filled, content, starts, allow_negative_indices=False)


# How a TPU has an array in memory: the order of its dims, and the padding of the two minor ones.
#
# Rows of the minor dim are padded to 128 elements, and their number to 8, or to the next power of two where there are
# fewer. Of all orders of the dims XLA takes the one of least padding, near the array's own, for arguments and results:
#
#     bf16[512, 512, 64]     (0, 2, 1)    512 lanes instead of 64 of 128
#     bf16[4096, 4096, 12]   (2, 0, 1)    4,096 rows instead of 12 of 16
#     bf16[64, 64, 32, 64]   (0, 1, 2, 3)    64 lanes of 128, whichever dim is minor: twice its bytes


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


def measure_padding(shape: Sequence[int], dtype: str) -> float:
    """How many times its own bytes an array takes, in the order of least padding; of no elements, none.

    >>> measure_padding((64, 64, 32, 64), "bfloat16")
    2.0
    """
    own = math.prod(shape) * dtypes.bits(dtype) / 8
    return count_padded_bytes(shape, dtype) / own if own else 0.0


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
