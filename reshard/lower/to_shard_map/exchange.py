"""An exchange on a device's tile: one `ppermute` a round, between slices and in-place updates.

Many rounds alike are a loop, whose body packs a message and writes one. A `ppermute` names its pairs in the program, so
the body has a branch for each list of pairs. Unrolled, every round would be packed and written by code of its own.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.lower.batch import JointExchange
from reshard.lower.exchange import Transfer
from reshard.lower.exchange_order import box_extents
from reshard.lower.program import Exchange
from reshard.lower.to_shard_map import joining
from reshard.lower.to_shard_map.boxes import BoxMessages, Turn, kinds_of
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.rounds import LOOPED
from reshard.lower.to_shard_map.tiles import laid_out, resized, unfilled
from reshard.lower.to_shard_map.tpu_layout import in_place_of, memory_order
from reshard.types.rules.tile_view import TileView

Array = jax.Array
PIECES = 4
"""The fewest rounds between the same devices that become a loop: a tight budget cuts messages into thousands of pieces.
"""


def exchange(step: Exchange, place: MeshPlace, tile: Array, shape: Sequence[int], in_part: bool = False) -> Array:
    """Round by round; on CPUs, which hold all messages at once anyway, joined at the end if none is in pieces.

    `in_part` says that the tile is a part of one: what is around it has chosen its order of dims.
    """
    by_device = joining.orders(step)
    if by_device is None:
        return _by_rounds(step, place, shape, in_part, tile)

    def at_once(tile: Array) -> Array:
        here = place.anew()
        opened = tile.reshape(step.send.digits)
        messages = [_message(BoxMessages([turn], here), here, opened) for turn in joining.turns(step)]
        return joining.joined(step, here, by_device, messages).reshape(shape)

    return lax.platform_dependent(tile, cpu=at_once, default=partial(_by_rounds, step, place.anew(), shape, in_part))


def joint_exchange(
    step: JointExchange, place: MeshPlace, tiles: Sequence[Array], shapes: Sequence[Sequence[int]]
) -> list[Array]:
    """The exchanges of several arrays, one message a round for all of them; one after another if one is in pieces."""
    orders = [by_device for each in step.each if (by_device := joining.orders(each)) is not None]
    if len(orders) < len(step.each):
        each = zip(step.each, tiles, shapes, strict=True)
        return [exchange(one, place, tile, shape) for one, tile, shape in each]

    def at_once(*tiles: Array) -> list[Array]:
        here = place.anew()
        opened = [tile.reshape(one.send.digits) for one, tile in zip(step.each, tiles, strict=True)]
        turns = zip(*(joining.turns(one) for one in step.each), strict=True)
        messages = zip(*(_joint_message(turn, here, opened) for turn in turns), strict=True)
        each = zip(step.each, orders, messages, shapes, strict=True)
        return [joining.joined(one, here, by, list(parts)).reshape(shape) for one, by, parts, shape in each]

    def by_rounds(*tiles: Array) -> list[Array]:
        return _joint_rounds(step, place.anew(), tiles, shapes)

    return lax.platform_dependent(*tiles, cpu=at_once, default=by_rounds)


def _joint_rounds(
    step: JointExchange, place: MeshPlace, tiles: Sequence[Array], shapes: Sequence[Sequence[int]]
) -> list[Array]:
    opened = [tile.reshape(one.send.digits) for one, tile in zip(step.each, tiles, strict=True)]
    filled = [_start(one, tile) for one, tile in zip(step.each, tiles, strict=True)]
    for number, turn in enumerate(zip(*(joining.turns(one) for one in step.each), strict=True)):
        filled = place.after(filled) if number else filled
        messages = _joint_message(turn, place, opened)
        boxes = [BoxMessages([each], place) for each in turn]
        filled = [one.put(into, part) for one, into, part in zip(boxes, filled, messages, strict=True)]
    return [tile.reshape(shape) for tile, shape in zip(filled, shapes, strict=True)]


def _joint_message(turn: Sequence[Turn], place: MeshPlace, opened: Sequence[Array]) -> list[Array]:
    """What arrives of each array in one round, in which their messages travel as one."""
    boxes = [BoxMessages([each], place) for each in turn]
    parts = [one.take(tile) for one, tile in zip(boxes, opened, strict=True)]
    if all(t.sender == t.receiver for t in turn[0]):
        return parts
    arrived = place.permute(jnp.concatenate([part.reshape(-1) for part in parts]), _pairs(turn[0]))
    ends = itertools.accumulate(part.size for part in parts)
    return [arrived[end - part.size : end].reshape(part.shape) for part, end in zip(parts, ends, strict=True)]


def _message(boxes: BoxMessages, place: MeshPlace, opened: Array) -> Array:
    message = boxes.take(opened)
    local = all(t.sender == t.receiver for t in boxes.transfers)
    return message if local else place.permute(message, _pairs(boxes.transfers))


def _by_rounds(step: Exchange, place: MeshPlace, shape: Sequence[int], in_part: bool, tile: Array) -> Array:
    rounds = LoopedRounds.of(step, tile.dtype.name, in_part)
    on_tpu = partial(_ordered, rounds, place, shape, rounds.orders)
    if rounds.orders.as_they_are:
        return on_tpu(tile)
    plain = partial(_ordered, rounds, place.anew(), shape, PLAIN)
    return lax.platform_dependent(tile, tpu=on_tpu, default=plain)


@dataclass(frozen=True)
class LoopedRounds:
    """An exchange, its rounds grouped into loops, its local copies by form, and the orders of its tiles on a TPU."""

    step: Exchange
    local: list[list[Transfer]]
    groups: list[list[Turn]]
    orders: Orders

    @classmethod
    def of(cls, step: Exchange, dtype: str, in_part: bool) -> LoopedRounds:
        groups = _alike(step.rounds)
        loops = any(len(turns) > 1 for turns in groups)
        return cls(step, kinds_of(step.local), groups, Orders.of(step, dtype, loops, in_part))


class Orders(NamedTuple):
    """The orders in which a TPU has the axes of the operand, of a message, and of the result in memory, while messages
    are cut out of the one and written to the other; None leaves them to XLA."""

    send: tuple[int, ...] | None
    message: tuple[int, ...] | None
    receive: tuple[int, ...] | None

    @classmethod
    def of(cls, step: Exchange, dtype: str, loops: bool, in_part: bool) -> Orders:
        """Those in which the tiles lie, or of the messages where these would be padded too much.

        In a part, and where messages differ in form, only the result of loops has one: XLA would lay it out as the
        loop writes it, whatever the padding.
        """
        box = None if in_part else box_extents(step)
        if box is None:
            return cls(None, None, memory_order(step.receive.digits, dtype)) if loops else PLAIN
        sent, written = next(itertools.chain(step.local, *step.rounds)).boxes[0].form
        return cls(
            _order(step.send, box, sent, dtype), memory_order(sent, dtype), _order(step.receive, box, written, dtype)
        )

    @property
    def as_they_are(self) -> bool:
        """Whether all axes are in their own order."""
        return all(order is None or order == tuple(range(len(order))) for order in self)


PLAIN = Orders(None, None, None)


def _order(view: TileView, box: Sequence[int], form: Sequence[int], dtype: str) -> tuple[int, ...]:
    return memory_order(view.digits if in_place_of(view.tile, box, dtype) else form, dtype)


def _ordered(rounds: LoopedRounds, place: MeshPlace, shape: Sequence[int], orders: Orders, tile: Array) -> Array:
    """The result, round by round."""
    step = rounds.step
    opened = tile.reshape(step.send.digits)
    order = orders.receive or range(len(step.receive.digits))
    filled = _start(step, tile).transpose(order)
    for kind in rounds.local:
        boxes = BoxMessages([kind], place)
        filled = boxes.put(filled, boxes.take(opened, orders.send), orders.receive)
    for number, turns in enumerate(rounds.groups):
        filled = place.after(filled) if number else filled
        filled = _turns(turns, place, orders, opened, filled)
    filled = filled if orders.receive is None else laid_out(filled)
    return filled.transpose(np.argsort(order)).reshape(shape)


def _start(step: Exchange, tile: Array) -> Array:
    """The result before anything is written: zeros where boxes leave padding out."""
    received = Counter[int]()
    for transfer in itertools.chain(step.local, *step.rounds):
        received[transfer.receiver] += transfer.elements
    size = math.prod(step.receive.digits)
    every = len(received) == len(step.receivers) and all(count == size for count in received.values())
    return unfilled(step.receive.digits, tile.dtype) if every else jnp.zeros(step.receive.digits, tile.dtype)


def _alike(rounds: Sequence[Turn]) -> list[list[Turn]]:
    """The rounds, grouped where one loop runs them: each device's message, if it has one, is of one form.

    Loops over the pieces of messages between the same devices need no branches; many such loops are one with branches.
    """
    groups: list[list[Turn]] = []
    for form, same in itertools.groupby(rounds, _form):
        turns = list(same)
        between = _between_the_same(turns, form is not None)
        groups += [turns] if form is not None and len(between) >= LOOPED else between
    return groups


def _between_the_same(turns: Sequence[Turn], of_one_form: bool) -> list[list[Turn]]:
    groups: list[list[Turn]] = []
    for _, same in itertools.groupby(turns, _pairs):
        pieces = list(same)
        groups += [pieces] if of_one_form and len(pieces) >= PIECES else [[turn] for turn in pieces]
    return groups


def _form(turn: Turn) -> tuple[Any, ...] | None:
    """The form of all messages of a round; None if they differ."""
    return turn[0].form if len(kinds_of(turn)) == 1 else None


def _turns(turns: Sequence[Turn], place: MeshPlace, orders: Orders, opened: Array, filled: Array) -> Array:
    if len(turns) == 1:
        return _turn(turns[0], place, orders, opened, filled)

    def one(number: Array, filled: Array) -> Array:
        here = place.anew()
        boxes = BoxMessages(turns, here, number)
        permute = partial(here.permute_in_turn, pairs=[_pairs(turn) for turn in turns], turn=number)
        return laid_out(_sent(boxes, permute, orders, opened, filled))

    return lax.fori_loop(0, len(turns), one, filled)


def _turn(turn: Turn, place: MeshPlace, orders: Orders, opened: Array, filled: Array) -> Array:
    """One round: each device packs the boxes that it sends, if any, and writes those that it receives."""
    kinds = [BoxMessages([kind], place) for kind in kinds_of(turn)]
    if len(kinds) == 1:
        return _sent(kinds[0], partial(place.permute, pairs=_pairs(turn)), orders, opened, filled)
    size = (max(kind.elements for kind in kinds),)
    message = jnp.zeros(size, opened.dtype)
    for kind in kinds:
        packed = resized(kind.take(opened).reshape(-1), size)
        message = lax.select(jnp.broadcast_to(kind.sends(), size), packed, message)
    message = place.permute(message, _pairs(turn))
    for kind in kinds:
        filled = kind.put(filled, message[: kind.elements], orders.receive)
    return filled


def _sent(boxes: BoxMessages, permute: Callable[[Array], Array], orders: Orders, opened: Array, filled: Array) -> Array:
    """`filled` with the message that arrives written to it; on a TPU it travels in the order of least padding."""
    message = boxes.take(opened, orders.send)
    if orders.message is None or len(boxes.first.boxes) > 1:
        return boxes.put(filled, permute(message), orders.receive)
    message = message.transpose(orders.message)
    message = permute(message if orders.message == orders.send else laid_out(message))
    return boxes.put(filled, message.transpose(np.argsort(orders.message)), orders.receive)


def _pairs(turn: Turn) -> list[tuple[int, int]]:
    return [(t.sender, t.receiver) for t in turn]
