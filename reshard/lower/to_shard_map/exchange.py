"""An exchange on one tile: a `ppermute` a round, between slices and updates in place."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.lower.exchange import Transfer
from reshard.lower.program import Exchange
from reshard.lower.to_shard_map.place import Place
from reshard.lower.to_shard_map.tiles import resized, written

Array = jax.Array


def exchange(step: Exchange, place: Place, tile: Array, shape: Sequence[int]) -> Array:
    opened = tile.reshape(step.send.digits)
    filled = jnp.zeros(step.receive.digits, tile.dtype)
    for kind in _kinds(step.local):
        boxes = _Boxes(kind, place)
        filled = boxes.put(filled, boxes.take(opened))
    for number, turn in enumerate(step.rounds):
        filled = _turn(turn, place, opened, place.after(filled) if number else filled)
    return filled.reshape(shape)


def _turn(turn: Sequence[Transfer], place: Place, opened: Array, filled: Array) -> Array:
    """One round: every device packs the boxes that it sends, if any, and places those that it gets."""
    kinds = [_Boxes(kind, place) for kind in _kinds(turn)]
    pairs = [(t.sender, t.receiver) for t in turn]
    if len(kinds) == 1:
        return kinds[0].put(filled, place.permute(kinds[0].take(opened), pairs))
    size = (max(kind.elements for kind in kinds),)
    message = jnp.zeros(size, opened.dtype)
    for kind in kinds:
        packed = resized(kind.take(opened).reshape(-1), size)
        message = lax.select(jnp.broadcast_to(kind.sends, size), packed, message)
    message = place.permute(message, pairs)
    for kind in kinds:
        filled = kind.put(filled, message[: kind.elements])
    return filled


def _kinds(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    """Transfers whose boxes have the same extents, together, at most one for each device."""
    found: dict[tuple[Any, ...], list[Transfer]] = {}
    seen: Counter[tuple[int, Any]] = Counter()
    for t in transfers:
        shape = tuple((_extents(box.src), _extents(box.dst)) for box in t.boxes)
        found.setdefault((shape, seen[t.receiver, shape]), []).append(t)
        seen[t.receiver, shape] += 1
    return list(found.values())


def _extents(spans: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(extent for _, extent in spans)


class _Boxes:
    """Transfers of one shape: where each device's boxes start, and who takes part."""

    def __init__(self, transfers: list[Transfer], place: Place) -> None:
        self.first = transfers[0]
        self.elements = self.first.elements
        self.transfers = transfers
        self.place = place
        self.sends = place.flag([t.sender for t in transfers])

    def _starts(self, number: int, side: str) -> list[Array]:
        """Where box `number` starts on each axis of this device's operand or result."""
        end = "src" if side == "sender" else "dst"
        rank = len(getattr(self.first.boxes[number], end))
        table = np.zeros((len(self.place.devices), rank), np.int32)
        for t in self.transfers:
            table[self.place.positions[getattr(t, side)]] = [start for start, _ in getattr(t.boxes[number], end)]
        return [self.place.look_up(column) for column in table.T]

    def take(self, opened: Array) -> Array:
        """This device's boxes in one message."""
        boxes = enumerate(self.first.boxes)
        parts = [lax.dynamic_slice(opened, self._starts(at, "sender"), _extents(box.src)) for at, box in boxes]
        # One box keeps its shape: flat, XLA:CPU computes the index of every element anew, at half the speed.
        return parts[0] if len(parts) == 1 else jnp.concatenate([part.reshape(-1) for part in parts])

    def put(self, filled: Array, message: Array) -> Array:
        """The message's boxes at their places, on the devices that get one."""
        gets = None
        if len(self.transfers) < len(self.place.devices):
            gets = self.place.flag([t.receiver for t in self.transfers])
        at = 0
        for number, box in enumerate(self.first.boxes):
            part = message if len(self.first.boxes) == 1 else message[at : at + box.elements]
            content = part.reshape(_extents(box.dst))
            filled = written(filled, content, self._starts(number, "receiver"), gets)
            at += box.elements
        return filled
