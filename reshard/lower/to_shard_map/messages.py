"""An exchange between two sets of devices in its two halves: what the senders pack, and what the receivers write.

    batches              the local copies and the rounds of an exchange, in batches of messages of one form
    packed               on the sender's mesh: its message of a round, flat, of the batch's size; messages that a relay
                         passes on are packed on the receivers' mesh, out of tiles of the result
    filled               on the receiver's mesh: its tile with the message of a round written into it

What carries messages from one set to the other is not part of any program here.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from reshard.lower.exchange import Box, Transfer
from reshard.lower.program import Exchange
from reshard.lower.to_shard_map.boxes import BoxMessages, Form, Turn, shape_of
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.tiles import resized
from reshard.types.pair import pieces

Array = jax.Array


class MessageBatch(NamedTuple):
    """Rounds whose messages have the same forms, so that one program serves all of them.

    `elements` are those of the largest message, to which the others are padded; `relayed` messages are read from the
    sender's tile of the result, once those of the batches before have arrived.
    """

    turns: tuple[Turn, ...]
    forms: tuple[Form, ...]
    elements: int
    relayed: bool


def batches(step: Exchange) -> list[MessageBatch]:
    """The local copies, cut to the size of messages, and the rounds of an exchange, by the forms of their messages.

    Those that a relay passes on are the last.
    """
    by_forms: dict[tuple[bool, tuple[Form, ...]], list[Turn]] = {}
    for turn in (*_local_turns(step), *step.rounds):
        forms = tuple(sorted({shape_of(t) for t in turn}))
        by_forms.setdefault((any(t.relayed for t in turn), forms), []).append(turn)
    return [
        MessageBatch(tuple(turns), forms, max(t.elements for turn in turns for t in turn), relayed)
        for (relayed, forms), turns in sorted(by_forms.items(), key=lambda each: each[0][0])
    ]


def _local_turns(step: Exchange) -> list[Turn]:
    """The copies that devices make for themselves, in pieces no larger than the largest message."""
    most = max((t.elements for turn in step.rounds for t in turn), default=None)
    by_device: dict[int, list[Transfer]] = {}
    for t in step.local:
        cut = [piece for box in t.boxes for piece in _pieces(box, most or max(1, t.elements))]
        by_device.setdefault(t.receiver, []).extend(Transfer(t.sender, t.receiver, (piece,)) for piece in cut)
    longest = max(map(len, by_device.values()), default=0)
    return [[copies[at] for copies in by_device.values() if at < len(copies)] for at in range(longest)]


def _pieces(box: Box, most: int) -> list[Box]:
    """A box in pieces of at most so many elements; one whose axes differ at the two ends stays whole."""
    extents = [extent for _, extent in box.src]
    if box.elements <= most or extents != [extent for _, extent in box.dst]:
        return [box]
    ends = [[start for start, _ in side] for side in (box.src, box.dst)]

    def moved(starts: Sequence[int], piece: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple((start + low, extent) for start, (low, extent) in zip(starts, piece, strict=True))

    return [Box(moved(ends[0], piece), moved(ends[1], piece)) for piece in pieces.cut(extents, most)]


def packed(step: Exchange, batch: MessageBatch, place: MeshPlace, number: Array, tile: Array) -> Array:
    """The message that this device sends in round `number` of the batch, of `batch.elements` elements."""
    opened = tile.reshape((step.receive if batch.relayed else step.send).digits)
    size = (batch.elements,)
    kinds = _kinds(batch, place, number)
    message = resized(kinds[0].take(opened).reshape(-1), size)
    for kind in kinds[1:]:
        other = resized(kind.take(opened).reshape(-1), size)
        message = lax.select(jnp.broadcast_to(kind.sends(), size), other, message)
    return message


def filled(step: Exchange, batch: MessageBatch, place: MeshPlace, number: Array, tile: Array, message: Array) -> Array:
    """The tile with the message that this device receives in round `number`, if it receives one, in its place."""
    opened = tile.reshape(step.receive.digits)
    for kind in _kinds(batch, place, number):
        opened = kind.put(opened, message[: kind.elements])
    return opened.reshape(tile.shape)


def _kinds(batch: MessageBatch, place: MeshPlace, number: Array) -> list[BoxMessages]:
    """The boxes of the batch by their forms, each in the rounds in which some message has it."""
    return [
        BoxMessages([[t for t in turn if shape_of(t) == form] for turn in batch.turns], place, number)
        for form in batch.forms
    ]


def is_whole(step: Exchange) -> bool:
    """Whether every message is a sender's whole tile and fills its receiver's: then nothing needs packing.

    It is not where messages are in pieces, nor where a device receives several, or passes some on.
    """
    sizes = {math.prod(view.digits) for view in (step.send, step.receive)}
    transfers = [*step.local, *(t for turn in step.rounds for t in turn)]
    return len(sizes) == 1 and all(t.elements in sizes and not t.relayed for t in transfers)
