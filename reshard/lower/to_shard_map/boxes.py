"""Boxes of tiles as messages: taken out of a tile on the devices that send them, written into one where they arrive.

Transfers of one shape run as one program on all devices: where a device's boxes start is looked up by its position, and
by the number of the turn where one program runs many.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reshard.lower.exchange import Transfer
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.tiles import piece, written

Array = jax.Array
Turn = Sequence[Transfer]
Form = tuple[Any, ...]
"""The extents of a transfer's boxes at both ends."""


def kinds_of(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    """Transfers grouped by the extents of their boxes, with at most one transfer a device in each group."""
    kinds: dict[tuple[Any, ...], list[Transfer]] = {}
    seen: Counter[tuple[int, Any]] = Counter()
    for t in transfers:
        shape = shape_of(t)
        kinds.setdefault((shape, seen[t.receiver, shape]), []).append(t)
        seen[t.receiver, shape] += 1
    return list(kinds.values())


def shape_of(transfer: Transfer) -> Form:
    """The extents of the transfer's boxes at both ends."""
    return tuple((_extents(box.src), _extents(box.dst)) for box in transfer.boxes)


def _extents(spans: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(extent for _, extent in spans)


class BoxMessages:
    """Transfers of one shape in one turn, or in several alike: the devices that take part, and where boxes start."""

    def __init__(self, turns: Sequence[Turn], place: MeshPlace, number: Array | None = None) -> None:
        self.turns = turns
        self.number = number
        self.transfers = turns[0]
        self.first = next(t for turn in turns for t in turn)
        self.elements = self.first.elements
        self.place = place

    def sends(self) -> Array:
        """Whether this device sends a message."""
        return self.place.look_up(*self._members("sender")) != 0

    def _gets(self) -> Array | None:
        """Whether this device receives a message; None if all devices always do."""
        table, number = self._members("receiver")
        return None if table.all() else self.place.look_up(table, number) != 0

    def _members(self, side: str) -> tuple[np.ndarray[Any, Any], Array | None]:
        """The table of the devices at one side of the transfers, and the turn in which to look them up."""
        table = np.zeros((len(self.turns), len(self.place.devices)), np.int32)
        for turn, transfers in enumerate(self.turns):
            table[turn, [self.place.positions[getattr(t, side)] for t in transfers]] = 1
        return (table[0], None) if self.number is None else (table, self.number)

    def _starts(self, number: int, side: str) -> list[Array]:
        """The start of box `number` on each axis of this device's operand (`side` "sender") or result ("receiver")."""
        end = "src" if side == "sender" else "dst"
        rank = len(getattr(self.first.boxes[number], end))
        table = np.zeros((len(self.turns), len(self.place.devices), rank), np.int32)
        for turn, transfers in enumerate(self.turns):
            for t in transfers:
                starts = [start for start, _ in getattr(t.boxes[number], end)]
                table[turn, self.place.positions[getattr(t, side)]] = starts
        columns = (table[..., axis] for axis in range(rank))
        return [self.place.look_up(column if self.number is not None else column[0], self.number) for column in columns]

    def take(self, opened: Array) -> Array:
        """This device's boxes in one message."""
        boxes = enumerate(self.first.boxes)
        parts = [piece(opened, self._starts(at, "sender"), _extents(box.src)) for at, box in boxes]
        # A single box keeps its shape: XLA:CPU would recompute the index of every element of a flat one, half as fast.
        return parts[0] if len(parts) == 1 else jnp.concatenate([part.reshape(-1) for part in parts])

    def put(self, filled: Array, message: Array) -> Array:
        """`filled` with the message's boxes written at their places, on the devices that receive one."""
        gets = self._gets()
        at = 0
        for number, box in enumerate(self.first.boxes):
            part = message if len(self.first.boxes) == 1 else message[at : at + box.elements]
            content = part.reshape(_extents(box.dst))
            filled = written(filled, content, self._starts(number, "receiver"), gets)
            at += box.elements
        return filled
