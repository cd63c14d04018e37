"""Boxes of tiles as messages: taken out of a tile on the devices that send them, written into one where they arrive.

Transfers of one form run as one program on all devices: where a device's boxes start is looked up by its position, and
by the number of the turn where one program runs many.

    BoxMessages         boxes of a tile's digits, sliced and written in place
    StridedMessages     strided boxes of a flat tile, at computed indices: tables have a few numbers a device, whatever
                        the box's size
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.lower.exchange import Transfer
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.tiles import laid_out, piece, written
from reshard.lower.views import StridedTransfer

Array = jax.Array
Turn = Sequence[Transfer]
T = TypeVar("T", Transfer, StridedTransfer)


def kinds_of(transfers: Sequence[T]) -> list[list[T]]:
    """Transfers grouped by form, with at most one transfer a device in each group."""
    kinds: dict[tuple[Any, ...], list[T]] = {}
    seen: Counter[tuple[int, Any]] = Counter()
    for t in transfers:
        form = t.form
        kinds.setdefault((form, seen[t.receiver, form]), []).append(t)
        seen[t.receiver, form] += 1
    return list(kinds.values())


class _Messages(Generic[T]):
    """Transfers of one form in one turn, or in several alike: the devices that take part, and where boxes start."""

    def __init__(self, turns: Sequence[Sequence[T]], place: MeshPlace, number: Array | None = None) -> None:
        self.turns = turns
        self.number = number
        self.transfers = turns[0]
        self.first = next(t for turn in turns for t in turn)
        self.elements = self.first.elements
        self.place = place

    def sends(self) -> Array:
        """Whether this device sends a message."""
        return self._look_up(self._members("sender")) != 0

    def _gets(self) -> Array | None:
        """Whether this device receives a message; None if all devices always do."""
        table = self._members("receiver")
        return None if table.all() else self._look_up(table) != 0

    def _members(self, side: str) -> np.ndarray[Any, Any]:
        """A table by turn and position: 1 for the devices at one side of the transfers."""
        table = np.zeros((len(self.turns), len(self.place.devices)), np.int32)
        for turn, transfers in enumerate(self.turns):
            table[turn, [self.place.positions[getattr(t, side)] for t in transfers]] = 1
        return table

    def _columns(self, number: int, side: str) -> list[Array]:
        """What `_row` says of box `number`, for this device and this turn, at its operand's (`side` "sender") or its
        result's end ("receiver")."""
        width = len(self._row(self.first, number, side))
        table = np.zeros((len(self.turns), len(self.place.devices), width), np.int32)
        for turn, transfers in enumerate(self.turns):
            for t in transfers:
                table[turn, self.place.positions[getattr(t, side)]] = self._row(t, number, side)
        return [self._look_up(table[..., column]) for column in range(width)]

    def _row(self, transfer: T, number: int, side: str) -> Sequence[int]:
        """Where a box of a transfer lies at one end, in a few numbers."""
        raise NotImplementedError

    def _look_up(self, table: np.ndarray[Any, Any]) -> Array:
        """This device's entry of a table by turn and position."""
        return self.place.look_up(table[0]) if self.number is None else self.place.look_up(table, self.number)


class BoxMessages(_Messages[Transfer]):
    """Boxes of the digits that a tile is reshaped to."""

    def _row(self, transfer: Transfer, number: int, side: str) -> Sequence[int]:
        box = transfer.boxes[number]
        return [start for start, _ in (box.src if side == "sender" else box.dst)]

    def take(self, opened: Array, order: Sequence[int] | None = None) -> Array:
        """This device's boxes in one message, on a TPU cut out of a tile whose axes have this order in memory."""
        boxes = enumerate(self.first.boxes)
        parts = [piece(opened, self._columns(at, "sender"), box.form[0]) for at, box in boxes]
        parts = parts if order is None else [laid_out(part, order) for part in parts]
        # A single box keeps its shape: XLA:CPU would recompute the index of every element of a flat one, half as fast.
        return parts[0] if len(parts) == 1 else jnp.concatenate([part.reshape(-1) for part in parts])

    def put(self, filled: Array, message: Array, order: Sequence[int] | None = None) -> Array:
        """`filled`, its axes in this order, with the boxes written at their places, on the devices that receive one."""
        gets = self._gets()
        at = 0
        for number, box in enumerate(self.first.boxes):
            part = message if len(self.first.boxes) == 1 else message[at : at + box.elements]
            content, starts = part.reshape(box.form[1]), self._columns(number, "receiver")
            if order is not None:
                content, starts = content.transpose(order), [starts[axis] for axis in order]
            filled = written(filled, content, starts, gets)
            at += box.elements
        return filled


class StridedMessages(_Messages[StridedTransfer]):
    """Strided boxes of flat tiles."""

    def _row(self, transfer: StridedTransfer, number: int, side: str) -> Sequence[int]:
        box = transfer.boxes[number]
        return (box.src, *box.src_strides) if side == "sender" else (box.dst, *box.dst_strides)

    def take(self, flat: Array) -> Array:
        """This device's boxes in one message."""
        return jnp.concatenate([flat[self._indices(at, "sender")] for at in range(len(self.first.boxes))])

    def put(self, filled: Array, message: Array) -> Array:
        """`filled` with the message's boxes at their places, on the devices that receive one."""
        at, gets = 0, self._gets()
        for number, box in enumerate(self.first.boxes):
            places = self._indices(number, "receiver")
            indices = places if gets is None else jnp.where(gets, places, filled.size)
            part = message[at : at + box.elements]
            filled = filled.at[indices].set(part, mode="drop", unique_indices=True)
            at += box.elements
        return filled

    def _indices(self, number: int, side: str) -> Array:
        """The places of box `number` in this device's flat operand (`side` "sender") or result ("receiver")."""
        extents = self.first.boxes[number].extents
        start, *strides = self._columns(number, side)
        indices = jnp.broadcast_to(start, extents)
        for axis, stride in enumerate(strides):
            indices = indices + lax.broadcasted_iota(jnp.int32, extents, axis) * stride
        return indices.reshape(-1)
