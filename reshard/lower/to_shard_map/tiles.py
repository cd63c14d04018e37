"""Tiles and their blocks: the padding, digits and transposes of a `TileView`, in JAX."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.types.rules.tile_view import TileView

Array = jax.Array


def opened(view: TileView, tile: Array) -> Array:
    """The tile, padded and reshaped to its digits."""
    return resized(tile, view.padded).reshape(view.digits)


def resized(tile: Array, shape: Sequence[int]) -> Array:
    """The tile, padded with zeros or cut at the high end of each dim."""
    if tile.shape == tuple(shape):
        return tile
    return lax.pad(
        tile, jnp.zeros((), tile.dtype), [(0, to - now, 0) for now, to in zip(tile.shape, shape, strict=True)]
    )


def blocks_of(view: TileView, tile: Array) -> Array:
    """The tile's blocks, numbered along a new first axis."""
    rest = [axis for axis in range(len(view.digits)) if axis not in view.blocks]
    return opened(view, tile).transpose(*view.blocks, *rest).reshape(view.count, *view.block_shape)


def closed(view: TileView, blocks: Array) -> Array:
    """The tile that numbered blocks make up, cut to its true shape."""
    rest = [axis for axis in range(len(view.digits)) if axis not in view.blocks]
    order = [*view.blocks, *rest]
    spread = blocks.reshape([view.digits[axis] for axis in order])
    return resized(spread.transpose(np.argsort(order)).reshape(view.padded), view.tile)


def written(filled: Array, content: Array, starts: list[Array], gets: Array | None) -> Array:
    """`filled` with the content written at `starts`, on the devices where `gets` is true (None: on all)."""
    if gets is not None:
        now = lax.dynamic_slice(filled, starts, content.shape)
        content = lax.select(jnp.broadcast_to(gets, content.shape), content, now)
    if content.shape == filled.shape:
        return content
    return lax.dynamic_update_slice(filled, content, starts)
