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
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.errors import PlanError
from reshard.lower.to_shard_map import scales
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
    for kind in _kinds(step.local):
        boxes = StridedBoxes([kind], place)
        filled = boxes.put(filled, boxes.take(flat))
    for number, turn in enumerate(step.rounds):
        filled = place.after(filled) if number else filled
        filled = _turn(turn, place, flat, filled)
    return filled.reshape(shape)


def _turn(turn: Sequence[StridedTransfer], place: MeshPlace, flat: Array, filled: Array) -> Array:
    """One round: each device packs the boxes that it sends, if any, and writes those that it receives."""
    kinds = [StridedBoxes([kind], place) for kind in _kinds(turn)]
    size = (max(kind.elements for kind in kinds),)
    message = jnp.zeros(size, flat.dtype)
    for kind in kinds:
        message = lax.select(jnp.broadcast_to(kind.sends(), size), resized(kind.take(flat), size), message)
    message = place.permute(message, [(t.sender, t.receiver) for t in turn])
    for kind in kinds:
        filled = kind.put(filled, message[: kind.elements])
    return filled


def _kinds(transfers: Sequence[StridedTransfer]) -> list[list[StridedTransfer]]:
    """Transfers grouped by the extents of their boxes, with at most one transfer a device in each group."""
    kinds: dict[tuple[Any, ...], list[StridedTransfer]] = {}
    seen: Counter[tuple[int, Any]] = Counter()
    for transfer in transfers:
        shape = extents_of(transfer)
        kinds.setdefault((shape, seen[transfer.receiver, shape]), []).append(transfer)
        seen[transfer.receiver, shape] += 1
    return list(kinds.values())


def extents_of(transfer: StridedTransfer) -> tuple[tuple[int, ...], ...]:
    """The extents of a transfer's boxes."""
    return tuple(box.extents for box in transfer.boxes)


class StridedBoxes:
    """Transfers whose boxes have the same extents, one by one, in one turn, or in several alike."""

    def __init__(
        self, turns: Sequence[Sequence[StridedTransfer]], place: MeshPlace, number: Array | None = None
    ) -> None:
        self._turns, self._place, self._number = turns, place, number
        self._first = next(transfer for turn in turns for transfer in turn)
        self.elements = self._first.elements

    def sends(self) -> Array:
        """Whether this device sends a message."""
        return self._takes_part("sender")

    def _takes_part(self, side: str) -> Array:
        table = np.zeros((len(self._turns), len(self._place.devices)), np.int32)
        for turn, transfers in enumerate(self._turns):
            table[turn, [self._place.positions[getattr(t, side)] for t in transfers]] = 1
        return self._look_up(table) != 0

    def _look_up(self, table: np.ndarray[Any, Any]) -> Array:
        """This device's entry of a table by turn and position."""
        return self._place.look_up(table[0]) if self._number is None else self._place.look_up(table, self._number)

    def take(self, flat: Array) -> Array:
        """This device's boxes in one message."""
        parts = [flat[self._indices(at, "sender")] for at in range(len(self._first.boxes))]
        return jnp.concatenate(parts)

    def put(self, filled: Array, message: Array) -> Array:
        """`filled` with the message's boxes at their places, on the devices that receive one."""
        at, gets = 0, self._takes_part("receiver")
        for number, box in enumerate(self._first.boxes):
            indices = jnp.where(gets, self._indices(number, "receiver"), filled.size)
            part = message[at : at + box.elements]
            filled = filled.at[indices].set(part, mode="drop", unique_indices=True)
            at += box.elements
        return filled

    def _indices(self, number: int, side: str) -> Array:
        """The places of box `number` in this device's flat operand (`side` "sender") or result ("receiver")."""
        extents = self._first.boxes[number].extents
        table = np.zeros((len(self._turns), len(self._place.devices), 1 + len(extents)), np.int32)
        for turn, transfers in enumerate(self._turns):
            for transfer in transfers:
                box = transfer.boxes[number]
                row = (box.src, *box.src_strides) if side == "sender" else (box.dst, *box.dst_strides)
                table[turn, self._place.positions[getattr(transfer, side)]] = row
        start, *strides = (self._look_up(column) for column in np.moveaxis(table, 2, 0))
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
