"""An exchange whose messages are joined when all are there, for a platform that keeps them anyway.

XLA:CPU starts all rounds at once, whatever barrier is between them. To join the messages then is one copy, where an
update in place for each round is a fill and two.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from reshard.lower.exchange import Transfer
from reshard.lower.program import Exchange
from reshard.lower.to_shard_map.place import Place

Array = jax.Array
MOST = 16
"""Orders of messages that devices may have, each a branch of the program."""
Order = tuple[int, ...]


def orders(step: Exchange) -> dict[int, Order] | None:
    """By device, the turns whose messages lie one after another in its result, local copies being the first turn;
    None unless every message is one box, all of one shape and together the result, and none is sent in pieces.
    """
    if len({_pairs(turn) for turn in step.rounds}) < len(step.rounds) or len(step.rounds) > MOST:
        return None
    shapes = {(tuple(n for _, n in box.src), tuple(n for _, n in box.dst)) for t in _all(step) for box in t.boxes}
    if len(shapes) != 1 or any(len(t.boxes) != 1 for t in _all(step)):
        return None
    starts: dict[int, dict[int, Order]] = {}
    for number, turn in enumerate(turns(step)):
        for t in turn:
            starts.setdefault(t.receiver, {})[number] = tuple(start for start, _ in t.boxes[0].dst)
    count = math.prod(grid(step))
    if any(len(found) != count for found in starts.values()) or len(turns(step)) != count:
        return None
    found = {device: tuple(sorted(at, key=at.__getitem__)) for device, at in starts.items()}
    return found if len(set(found.values())) <= MOST else None


def turns(step: Exchange) -> list[Sequence[Transfer]]:
    """The rounds, after the local copies if there are any."""
    return [step.local, *step.rounds] if step.local else list(step.rounds)


def grid(step: Exchange) -> tuple[int, ...]:
    """How many boxes lie along each axis of the result."""
    box = next(_all(step)).boxes[0]
    return tuple(radix // n for radix, (_, n) in zip(step.receive.digits, box.dst, strict=True))


def joined(step: Exchange, place: Place, by_device: dict[int, Order], messages: Sequence[Array]) -> Array:
    """The result, from this device's messages by turn."""
    extents = [n for _, n in next(_all(step)).boxes[0].dst]
    distinct = list(dict.fromkeys(by_device.values()))
    branches = [partial(_in_order, order, grid(step)) for order in distinct]
    shaped = [message.reshape(extents) for message in messages]
    if len(branches) == 1:
        return branches[0](*shaped)
    which = place.by_device({device: distinct.index(order) for device, order in by_device.items()})
    return lax.switch(which, branches, *shaped)


def _in_order(order: Order, boxes: Sequence[int], *messages: Array) -> Array:
    found = [messages[at] for at in order]
    for axis in reversed(range(len(boxes))):
        count = boxes[axis]
        found = [jnp.concatenate(found[at : at + count], axis) for at in range(0, len(found), count)]
    return found[0]


def _pairs(turn: Sequence[Transfer]) -> tuple[tuple[int, int], ...]:
    return tuple((t.sender, t.receiver) for t in turn)


def _all(step: Exchange) -> Iterator[Transfer]:
    return (t for turn in turns(step) for t in turn)
