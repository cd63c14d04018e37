"""An exchange whose messages are joined once all have arrived, for a platform that holds all of them at once anyway.

XLA:CPU starts all rounds at once, whatever barriers separate them. Joining the messages at the end is then one copy,
while updating the result in place round by round is a fill and two copies.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from reshard.lower.exchange import Transfer
from reshard.lower.program import Exchange
from reshard.lower.to_shard_map.place import MeshPlace

Array = jax.Array
MOST = 16
"""The most different orders that devices may have; each is a branch of the program."""
Order = tuple[int, ...]
"""Numbers of turns."""


def orders(step: Exchange) -> dict[int, Order] | None:
    """For each device, the turns whose messages lie one after another in its result; local copies are the first turn.

    None unless all messages are one box of one shape, they tile the result, and none is sent in pieces.

    For example, f32[{x}2, 6] -> f32[6, {x}2] on <x=3>: the result of device 1 is its message from device 0, of
    turn 2, then its own share, of turn 0, and the message from device 2, of turn 1. So its order is (2, 0, 1).
    """
    if not _whole_messages(step) or not _one_shape(step):
        return None
    places = _places(step)
    count = math.prod(grid(step))
    if len(turns(step)) != count or any(len(by_turn) != count for by_turn in places.values()):
        return None
    by_device = {device: tuple(sorted(by_turn, key=by_turn.__getitem__)) for device, by_turn in places.items()}
    return by_device if len(set(by_device.values())) <= MOST else None


def joins_in_one_copy(step: Exchange) -> bool:
    """Whether the messages of an exchange can be joined once all have arrived, along one axis of the result.

    Along two axes they are joined twice.
    """
    return orders(step) is not None and sum(count > 1 for count in grid(step)) == 1


def _whole_messages(step: Exchange) -> bool:
    """Whether no two rounds are between the same devices, as the pieces of one message are."""
    distinct = {tuple((t.sender, t.receiver) for t in turn) for turn in step.rounds}
    return len(distinct) == len(step.rounds) <= MOST


def _one_shape(step: Exchange) -> bool:
    """Whether every message is one box, and all boxes have the same extents at both ends."""
    shapes = {(tuple(n for _, n in box.src), tuple(n for _, n in box.dst)) for t in _all(step) for box in t.boxes}
    return len(shapes) == 1 and all(len(t.boxes) == 1 for t in _all(step))


def _places(step: Exchange) -> dict[int, dict[int, tuple[int, ...]]]:
    """Where in its result each device gets the message of each turn."""
    places: dict[int, dict[int, tuple[int, ...]]] = {}
    for number, turn in enumerate(turns(step)):
        for t in turn:
            places.setdefault(t.receiver, {})[number] = tuple(start for start, _ in t.boxes[0].dst)
    return places


def turns(step: Exchange) -> list[Sequence[Transfer]]:
    """The rounds, after the local copies if there are any."""
    return [step.local, *step.rounds] if step.local else list(step.rounds)


def grid(step: Exchange) -> tuple[int, ...]:
    """The number of boxes along each axis of the result."""
    box = next(_all(step)).boxes[0]
    return tuple(radix // n for radix, (_, n) in zip(step.receive.digits, box.dst, strict=True))


def joined(step: Exchange, place: MeshPlace, by_device: Mapping[int, Order], messages: Sequence[Array]) -> Array:
    """The result, from this device's messages turn by turn."""
    extents = [n for _, n in next(_all(step)).boxes[0].dst]
    distinct = list(dict.fromkeys(by_device.values()))
    branches = [partial(_in_order, order, grid(step)) for order in distinct]
    shaped = [message.reshape(extents) for message in messages]
    if len(branches) == 1:
        return branches[0](*shaped)
    which = place.by_device({device: distinct.index(order) for device, order in by_device.items()})
    return lax.switch(which, branches, *shaped)


def _in_order(order: Order, boxes: Sequence[int], *messages: Array) -> Array:
    """The messages in this order, joined along one axis of the grid after another, the minor one first."""
    blocks = [messages[at] for at in order]
    for axis in reversed(range(len(boxes))):
        count = boxes[axis]
        blocks = [jnp.concatenate(blocks[at : at + count], axis) for at in range(0, len(blocks), count)]
    return blocks[0]


def _all(step: Exchange) -> Iterator[Transfer]:
    return (t for turn in turns(step) for t in turn)
