"""A `view_exchange` between two sets of devices in its two halves, as `messages` has them for an exchange."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.tiles import resized
from reshard.lower.to_shard_map.views import StridedBoxes, extents_of
from reshard.lower.views import StridedTransfer, ViewExchange

Array = jax.Array
Turn = tuple[StridedTransfer, ...]
Form = tuple[tuple[int, ...], ...]


class ViewBatch(NamedTuple):
    """Rounds whose messages have the same forms; `elements` are those of the largest message."""

    turns: tuple[Turn, ...]
    forms: tuple[Form, ...]
    elements: int
    relayed: bool = False


def batches(step: ViewExchange) -> list[ViewBatch]:
    """The local copies, cut to the size of messages, and the rounds, by the forms of their messages."""
    by_forms: dict[tuple[Form, ...], list[Turn]] = {}
    for turn in (*_local_turns(step), *step.rounds):
        by_forms.setdefault(tuple(sorted({extents_of(t) for t in turn})), []).append(turn)
    return [
        ViewBatch(tuple(turns), forms, max(t.elements for turn in turns for t in turn))
        for forms, turns in by_forms.items()
    ]


def _local_turns(step: ViewExchange) -> list[Turn]:
    """The copies that devices make for themselves, in pieces no larger than the largest message."""
    most = max((t.elements for turn in step.rounds for t in turn), default=None)
    by_device: dict[int, list[StridedTransfer]] = {}
    for t in step.local:
        cut = (piece for box in t.boxes for piece in box.cut(most or max(1, t.elements)))
        by_device.setdefault(t.receiver, []).extend(StridedTransfer(t.sender, t.receiver, (piece,)) for piece in cut)
    longest = max(map(len, by_device.values()), default=0)
    return [tuple(copies[at] for copies in by_device.values() if at < len(copies)) for at in range(longest)]


def packed(step: ViewExchange, batch: ViewBatch, place: MeshPlace, number: Array, tile: Array) -> Array:
    """The message that this device sends in round `number` of the batch, of `batch.elements` elements."""
    flat, size = tile.reshape(-1), (batch.elements,)
    kinds = _kinds(batch, place, number)
    message = resized(kinds[0].take(flat), size)
    for kind in kinds[1:]:
        message = lax.select(jnp.broadcast_to(kind.sends(), size), resized(kind.take(flat), size), message)
    return message


def filled(step: ViewExchange, batch: ViewBatch, place: MeshPlace, number: Array, tile: Array, message: Array) -> Array:
    """The tile with the message that this device receives in round `number`, if it receives one, in its place."""
    flat = tile.reshape(-1)
    for kind in _kinds(batch, place, number):
        flat = kind.put(flat, message[: kind.elements])
    return flat.reshape(tile.shape)


def _kinds(batch: ViewBatch, place: MeshPlace, number: Array) -> list[StridedBoxes]:
    return [
        StridedBoxes([[t for t in turn if extents_of(t) == form] for turn in batch.turns], place, number)
        for form in batch.forms
    ]
