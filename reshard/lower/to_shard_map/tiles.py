"""Tiles and their blocks: the padding, digits and transposes of a `TileView`, in JAX."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from reshard.lower.to_shard_map.tpu_layout import choose_memory_order
from reshard.plans.rules.tile_view import TileView

Array = jax.Array


def merge_block_digits(view: TileView) -> TileView:
    """The view with neighbouring digits of a dim as one where blocks number them in order, or not at all.

    A TPU transposes few digits in one pass over memory, and often needs two for many.
    """
    groups: list[list[int]] = []
    for axis in range(len(view.digits)):
        joins = bool(groups) and _are_one_digit(view, groups[-1][-1], axis)
        groups[-1].append(axis) if joins else groups.append([axis])
    return TileView(
        view.tile,
        view.padded,
        tuple(math.prod(view.digits[axis] for axis in group) for group in groups),
        tuple(view.dims[group[0]] for group in groups),
        tuple(at for axis in view.blocks for at, group in enumerate(groups) if group[0] == axis),
    )


def _are_one_digit(view: TileView, axis: int, following: int) -> bool:
    """Whether two neighbouring digits are one digit to the blocks."""
    if view.dims[axis] != view.dims[following] or (axis in view.blocks) != (following in view.blocks):
        return False
    return axis not in view.blocks or view.blocks.index(following) == view.blocks.index(axis) + 1


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


def cut_box(tile: Array, starts: Sequence[Array], extents: Sequence[int]) -> Array:
    """The box of these extents that begins at `starts`, which are not negative, so XLA need not check."""
    return lax.dynamic_slice(tile, starts, extents, allow_negative_indices=False)


def write_box(filled: Array, content: Array, starts: list[Array], gets: Array | None) -> Array:
    """`filled` with the content written at `starts`, on the devices where `gets` is true (None: on all)."""
    if gets is not None:
        now = cut_box(filled, starts, content.shape)
        content = lax.select(jnp.broadcast_to(gets, content.shape), content, now)
    if content.shape == filled.shape:
        return content
    return lax.dynamic_update_slice(filled, content, starts, allow_negative_indices=False)
