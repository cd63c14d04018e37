"""A tile's digits and blocks as numpy arrays, by the `TileView` that an instruction gives.

view of tile (4, 4), digits (4, 2, 2), blocks (1,)     opened: shape (4, 2, 2)     numbered: 2 blocks of (4, 2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.lower.exchange import Box, Span, Transfer
from reshard.types.rules.tile_view import TileView

Array = NDArray[Any]


def opened(view: TileView, tile: Array) -> Array:
    """A tile, padded and reshaped to its digits; a view of it if nothing is padded."""
    if view.tile != view.padded:
        tile = np.pad(tile, [(0, p - t) for t, p in zip(view.tile, view.padded, strict=True)])
    return tile.reshape(view.digits)


def numbered(view: TileView, digits: Array) -> Array:
    """The blocks of a tile that is reshaped to its digits, numbered along a new first axis."""
    rest = [axis for axis in range(digits.ndim) if axis not in view.blocks]
    return digits.transpose(*view.blocks, *rest).reshape(view.count, *view.block_shape)


def closed(view: TileView, blocks: Array) -> Array:
    """The tile that numbered blocks make up, cut to its true shape."""
    rest = [axis for axis in range(len(view.digits)) if axis not in view.blocks]
    order = [*view.blocks, *rest]
    spread = blocks.reshape([view.digits[axis] for axis in order])
    whole = spread.transpose(np.argsort(order)).reshape(view.padded)
    return whole[tuple(slice(extent) for extent in view.tile)]


def copy_boxes(transfer: Transfer, opened: Mapping[int, Array], filled: Mapping[int, Array]) -> None:
    """Copies the boxes of a message from the sender's digits to the receiver's."""
    for box in transfer.boxes:
        part = (filled if transfer.relayed else opened)[transfer.sender][_at(box.src)]
        filled[transfer.receiver][_at(box.dst)] = part.reshape(_extents(box))


def _extents(box: Box) -> tuple[int, ...]:
    return tuple(extent for _, extent in box.dst)


def _at(spans: Sequence[Span]) -> tuple[slice, ...]:
    return tuple(slice(start, start + extent) for start, extent in spans)
