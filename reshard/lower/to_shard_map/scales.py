"""The scale of a cast, beside the array that it scales: one number, or one for each channel, block or tile.

    array f32[{x}4, 256] on <x=2>, shape 8 x 256

    scale   shape 1 x 1      one number
            8 x 1            one for each row
            8 x 2            one for each 1 x 128 block
            2 x 1            one for each tile

Each dim of a scale divides that of the array, and cuts its indices into that many equal blocks. The devices that hold a
part of the array are given the part of the scale that belongs to it, so nothing is as large as the array.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from reshard.errors import LayoutError
from reshard.types.layout import Layout

Array = jax.Array


def check_scale(scale: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raises `LayoutError` for a scale of a shape that does not divide the array's, dim by dim, from the last on.

    >>> check_scale((4, 1), (8, 256))
    >>> check_scale((3, 1), (8, 256))
    Traceback (most recent call last):
    reshard.errors.LayoutError: the scale has shape (3, 1), whose dims do not divide those of an array of (8, 256)
    """
    own = shape[len(shape) - len(scale) :] if len(scale) <= len(shape) else None
    if own is None or any(blocks < 1 or size % blocks for blocks, size in zip(scale, own, strict=True)):
        raise LayoutError(f"the scale has shape {scale}, whose dims do not divide those of an array of {shape}")


def spread_scale(scale: Array, layout: Layout, spec: PartitionSpec) -> tuple[Array, PartitionSpec]:
    """The scale in blocks that the tiles of a layout divide, and the spec that gives each tile its own."""
    check_scale(scale.shape, layout.shape)
    scale = scale.reshape((1,) * (len(layout.shape) - scale.ndim) + scale.shape)
    entries = [*spec, *[None] * (len(layout.shape) - len(spec))]
    held: list[object] = []
    for at, (size, padded, tile) in enumerate(zip(layout.shape, layout.padded_shape, layout.tile_shape, strict=True)):
        blocks = scale.shape[at]
        held.append(None if blocks == 1 else entries[at])
        if blocks > 1:
            scale = jnp.repeat(scale, _count_scale_blocks(blocks, size, padded // tile) // blocks, axis=at)
        if blocks > 1 and padded > size:
            more = (*scale.shape[:at], padded - size, *scale.shape[at + 1 :])
            scale = jnp.concatenate([scale, jnp.ones_like(scale, shape=more)], axis=at)
    return scale, PartitionSpec(*held)


def expand_scale(scale: Array, shape: Sequence[int]) -> Array:
    """A tile's part of the scale, as an array that broadcasts to a tile of this shape."""
    for at, size in enumerate(shape):
        if 1 < scale.shape[at] < size:
            scale = jnp.repeat(scale, size // scale.shape[at], axis=at)
    return scale


def _count_scale_blocks(blocks: int, size: int, tiles: int) -> int:
    """How many blocks of a dim both the scale's and the tiles can be cut into."""
    if size % tiles == 0 and blocks % tiles == 0:
        return blocks
    return tiles if size % tiles == 0 and tiles % blocks == 0 else size
