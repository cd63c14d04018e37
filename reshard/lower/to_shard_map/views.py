"""The steps of a move with a view on a device's tile: reshapes, transposes, slices, casts, and exchanges of boxes."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from reshard.errors import PlanError
from reshard.lower.to_shard_map import scales
from reshard.lower.to_shard_map.boxes import StridedMessages, kinds_of
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.tiles import resized
from reshard.lower.views import (
    CastTiles,
    PutPart,
    Reorder,
    StridedTransfer,
    TakePart,
    ViewExchange,
    ViewInstruction,
    fills,
)
from reshard.types import dtypes

Array = jax.Array


class Beside(NamedTuple):
    """What a program needs beside the source's tile: the target's, of which it fills a part, and a cast's scale."""

    into: Array | None = None
    scale: Array | None = None


ALONE = Beside()


def run_view(
    step: ViewInstruction, place: MeshPlace, tile: Array, shape: Sequence[int], beside: Beside = ALONE
) -> Array:
    """Runs one instruction on a device's tile; the tile after it has this shape."""
    if fills(step) and beside.into is None:
        raise PlanError("the move fills part of its target: give the target's array")
    return _RUN[type(step)](step, place, tile, tuple(shape), beside)


def _reorder(step: Reorder, place: MeshPlace, tile: Array, shape: tuple[int, ...], beside: Beside) -> Array:
    return tile.reshape(step.order.digits).transpose(step.order.order).reshape(shape)


def _take(step: TakePart, place: MeshPlace, tile: Array, shape: tuple[int, ...], beside: Beside) -> Array:
    starts = [start for start, _ in step.spans]
    return lax.slice(tile, starts, [start + extent for start, extent in step.spans])


def _put(step: PutPart, place: MeshPlace, tile: Array, shape: tuple[int, ...], beside: Beside) -> Array:
    into = cast("Array", beside.into).reshape(shape)
    return lax.dynamic_update_slice(into, tile, [start for start, _ in step.spans])


def _cast(step: CastTiles, place: MeshPlace, tile: Array, shape: tuple[int, ...], beside: Beside) -> Array:
    if beside.scale is None:
        return tile.astype(step.dtype)
    scale = scales.of_tile(beside.scale, shape)
    if dtypes.bits(step.dtype) < dtypes.bits(tile.dtype.name):
        return (tile / scale.astype(tile.dtype)).astype(step.dtype)
    return tile.astype(step.dtype) * scale.astype(step.dtype)


def _exchange(step: ViewExchange, place: MeshPlace, tile: Array, shape: tuple[int, ...], beside: Beside) -> Array:
    flat = tile.reshape(-1)
    into = beside.into
    filled = jnp.zeros(math.prod(shape), tile.dtype) if into is None or not step.fills else into.reshape(-1)
    for kind in kinds_of(step.local):
        boxes = StridedMessages([kind], place)
        filled = boxes.put(filled, boxes.take(flat))
    for number, turn in enumerate(step.rounds):
        filled = place.after(filled) if number else filled
        filled = _turn(turn, place, flat, filled)
    return filled.reshape(shape)


def _turn(turn: Sequence[StridedTransfer], place: MeshPlace, flat: Array, filled: Array) -> Array:
    """One round: each device packs the boxes that it sends, if any, and writes those that it receives."""
    kinds = [StridedMessages([kind], place) for kind in kinds_of(turn)]
    size = (max(kind.elements for kind in kinds),)
    message = jnp.zeros(size, flat.dtype)
    for kind in kinds:
        message = lax.select(jnp.broadcast_to(kind.sends(), size), resized(kind.take(flat), size), message)
    message = place.permute(message, [(t.sender, t.receiver) for t in turn])
    for kind in kinds:
        filled = kind.put(filled, message[: kind.elements])
    return filled


_RUN: dict[type[ViewInstruction], Callable[..., Array]] = {
    Reorder: _reorder,
    TakePart: _take,
    PutPart: _put,
    CastTiles: _cast,
    ViewExchange: _exchange,
}
