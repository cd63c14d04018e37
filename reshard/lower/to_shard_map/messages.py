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
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from reshard.lower.exchange import Transfer
from reshard.lower.program import Exchange
from reshard.lower.to_shard_map.boxes import BoxMessages, StridedMessages
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.tiles import resized
from reshard.lower.views import StridedTransfer, ViewExchange

Array = jax.Array
AnyExchange = Exchange | ViewExchange
AnyTurn = tuple[Transfer, ...] | tuple[StridedTransfer, ...]


class MessageBatch(NamedTuple):
    """Rounds whose messages have the same forms, so that one program serves all of them.

    `elements` are those of the largest message, to which the others are padded; `relayed` messages are read from the
    sender's tile of the result, once those of the batches before have arrived.
    """

    turns: tuple[AnyTurn, ...]
    forms: tuple[tuple[Any, ...], ...]
    elements: int
    relayed: bool


def batches(step: AnyExchange) -> list[MessageBatch]:
    """The local copies, cut to the size of messages, and the rounds of an exchange, by the forms of their messages.

    Those that a relay passes on are the last.
    """
    by_forms: dict[tuple[bool, tuple[Any, ...]], list[AnyTurn]] = {}
    for turn in (*_local_turns(step), *step.rounds):
        forms = tuple(sorted({t.form for t in turn}))
        by_forms.setdefault((any(t.relayed for t in turn), forms), []).append(turn)
    return [
        MessageBatch(tuple(turns), forms, max(t.elements for turn in turns for t in turn), relayed)
        for (relayed, forms), turns in sorted(by_forms.items(), key=lambda each: each[0][0])
    ]


def _local_turns(step: AnyExchange) -> list[AnyTurn]:
    """The copies that devices make for themselves, in pieces no larger than the largest message."""
    most = max((t.elements for turn in step.rounds for t in turn), default=None)
    of_one = StridedTransfer if isinstance(step, ViewExchange) else Transfer
    by_device: dict[int, list[Any]] = {}
    for t in step.local:
        for box in cast("tuple[Any, ...]", t.boxes):
            pieces = box.cut(most or max(1, t.elements))
            by_device.setdefault(t.receiver, []).extend(of_one(t.sender, t.receiver, (piece,)) for piece in pieces)
    longest = max(map(len, by_device.values()), default=0)
    return [tuple(copies[at] for copies in by_device.values() if at < len(copies)) for at in range(longest)]


def packed(step: AnyExchange, batch: MessageBatch, place: MeshPlace, number: Array, tile: Array) -> Array:
    """The message that this device sends in round `number` of the batch, of `batch.elements` elements."""
    opened = tile.reshape(_digits(step, batch.relayed))
    size = (batch.elements,)
    kinds = _kinds(step, batch, place, number)
    message = resized(kinds[0].take(opened).reshape(-1), size)
    for kind in kinds[1:]:
        other = resized(kind.take(opened).reshape(-1), size)
        message = lax.select(jnp.broadcast_to(kind.sends(), size), other, message)
    return message


def filled(
    step: AnyExchange, batch: MessageBatch, place: MeshPlace, number: Array, tile: Array, message: Array
) -> Array:
    """The tile with the message that this device receives in round `number`, if it receives one, in its place."""
    opened = tile.reshape(_digits(step, True))
    for kind in _kinds(step, batch, place, number):
        opened = kind.put(opened, message[: kind.elements])
    return opened.reshape(tile.shape)


def _digits(step: AnyExchange, receiving: bool) -> tuple[int, ...]:
    """What a tile of the operand, or of the result, is reshaped to: strided boxes lie in flat tiles."""
    if isinstance(step, ViewExchange):
        return (-1,)
    return tuple((step.receive if receiving else step.send).digits)


def _kinds(step: AnyExchange, batch: MessageBatch, place: MeshPlace, number: Array) -> list[Any]:
    """The boxes of the batch by their forms, each in the rounds in which some message has it."""
    of_form = StridedMessages if isinstance(step, ViewExchange) else BoxMessages
    by_form: list[list[list[Any]]] = [
        [[t for t in turn if t.form == form] for turn in batch.turns] for form in batch.forms
    ]
    return [of_form(turns, place, number) for turns in by_form]


def is_whole(step: Exchange) -> bool:
    """Whether every message is a sender's whole tile and fills its receiver's: then nothing needs packing.

    It is not where messages are in pieces, nor where a device receives several, or passes some on.
    """
    sizes = {math.prod(view.digits) for view in (step.send, step.receive)}
    transfers = [*step.local, *(t for turn in step.rounds for t in turn)]
    return len(sizes) == 1 and all(t.elements in sizes and not t.relayed for t in transfers)
