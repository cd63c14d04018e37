"""The steps of a move with a view on a device's tile: reshapes, transposes, slices, casts, and exchanges of boxes.

A strided box is gathered from the flat tile at computed indices: its first place and its strides are looked up by the
device's position, so that tables have a few numbers a device, whatever the box's size.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.errors import PlanError
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

Array = jax.Array


def run_view(step: ViewInstruction, place: MeshPlace, tile: Array, shape: Sequence[int], into: Array | None) -> Array:
    """Runs one instruction; `into` is the target's tile, of which some write a part."""
    if fills(step) and into is None:
        raise PlanError("the move fills part of its target: give the target's array")
    return _RUN[type(step)](step, place, tile, tuple(shape), into)


def _reorder(step: Reorder, place: MeshPlace, tile: Array, shape: tuple[int, ...], into: Array | None) -> Array:
    return tile.reshape(step.order.digits).transpose(step.order.order).reshape(shape)


def _take(step: TakePart, place: MeshPlace, tile: Array, shape: tuple[int, ...], into: Array | None) -> Array:
    starts = [start for start, _ in step.spans]
    return lax.slice(tile, starts, [start + extent for start, extent in step.spans])


def _put(step: PutPart, place: MeshPlace, tile: Array, shape: tuple[int, ...], into: Array | None) -> Array:
    return lax.dynamic_update_slice(cast("Array", into).reshape(shape), tile, [start for start, _ in step.spans])


def _cast(step: CastTiles, place: MeshPlace, tile: Array, shape: tuple[int, ...], into: Array | None) -> Array:
    return tile.astype(step.dtype)


def _exchange(step: ViewExchange, place: MeshPlace, tile: Array, shape: tuple[int, ...], into: Array | None) -> Array:
    flat = tile.reshape(-1)
    filled = jnp.zeros(math.prod(shape), tile.dtype) if into is None or not step.fills else into.reshape(-1)
    for kind in _kinds(step.local):
        boxes = _StridedBoxes(kind, place)
        filled = boxes.put(filled, boxes.take(flat))
    for number, turn in enumerate(step.rounds):
        filled = place.after(filled) if number else filled
        filled = _turn(turn, place, flat, filled)
    return filled.reshape(shape)


def _turn(turn: Sequence[StridedTransfer], place: MeshPlace, flat: Array, filled: Array) -> Array:
    """One round: each device packs the boxes that it sends, if any, and writes those that it receives."""
    kinds = [_StridedBoxes(kind, place) for kind in _kinds(turn)]
    size = (max(kind.elements for kind in kinds),)
    message = jnp.zeros(size, flat.dtype)
    for kind in kinds:
        message = lax.select(jnp.broadcast_to(kind.sends, size), resized(kind.take(flat), size), message)
    message = place.permute(message, [(t.sender, t.receiver) for t in turn])
    for kind in kinds:
        filled = kind.put(filled, message[: kind.elements])
    return filled


def _kinds(transfers: Sequence[StridedTransfer]) -> list[list[StridedTransfer]]:
    """Transfers grouped by the extents of their boxes, with at most one transfer a device in each group."""
    kinds: dict[tuple[Any, ...], list[StridedTransfer]] = {}
    seen: Counter[tuple[int, Any]] = Counter()
    for transfer in transfers:
        shape = tuple(box.extents for box in transfer.boxes)
        kinds.setdefault((shape, seen[transfer.receiver, shape]), []).append(transfer)
        seen[transfer.receiver, shape] += 1
    return list(kinds.values())


class _StridedBoxes:
    """Transfers whose boxes have the same extents, one by one."""

    def __init__(self, transfers: Sequence[StridedTransfer], place: MeshPlace) -> None:
        self.transfers, self.place = transfers, place
        self.elements = transfers[0].elements
        self.sends = place.flag([transfer.sender for transfer in transfers])
        self._gets = place.flag([transfer.receiver for transfer in transfers])

    def take(self, flat: Array) -> Array:
        """This device's boxes in one message."""
        parts = [flat[self._indices(at, "sender")] for at in range(len(self.transfers[0].boxes))]
        return jnp.concatenate(parts)

    def put(self, filled: Array, message: Array) -> Array:
        """`filled` with the message's boxes at their places, on the devices that receive one."""
        at = 0
        for number, box in enumerate(self.transfers[0].boxes):
            indices = jnp.where(self._gets, self._indices(number, "receiver"), filled.size)
            part = message[at : at + box.elements]
            filled = filled.at[indices].set(part, mode="drop", unique_indices=True)
            at += box.elements
        return filled

    def _indices(self, number: int, side: str) -> Array:
        """The places of box `number` in this device's flat operand (`side` "sender") or result ("receiver")."""
        extents = self.transfers[0].boxes[number].extents
        table = np.zeros((len(self.place.devices), 1 + len(extents)), np.int32)
        for transfer in self.transfers:
            box = transfer.boxes[number]
            row = (box.src, *box.src_strides) if side == "sender" else (box.dst, *box.dst_strides)
            table[self.place.positions[getattr(transfer, side)]] = row
        start, *strides = (self.place.look_up(column) for column in table.T)
        indices = jnp.broadcast_to(start, extents)
        for axis, stride in enumerate(strides):
            indices = indices + lax.broadcasted_iota(jnp.int32, extents, axis) * stride
        return indices.reshape(-1)


_RUN: dict[type[ViewInstruction], Callable[..., Array]] = {
    Reorder: _reorder,
    TakePart: _take,
    PutPart: _put,
    CastTiles: _cast,
    ViewExchange: _exchange,
}
