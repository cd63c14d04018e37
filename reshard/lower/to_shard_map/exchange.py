"""An exchange on a device's tile: one `ppermute` a round, between slices and in-place updates.

Many rounds alike are a loop, whose body packs a message and writes one. A `ppermute` names its pairs in the program, so
the body has a branch for each list of pairs. Unrolled, every round would be packed and written by code of its own.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.lower.exchange import Transfer
from reshard.lower.exchange_order import box_extents
from reshard.lower.program import Exchange, JointExchange
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.rounds import LOOPED
from reshard.lower.to_shard_map.tiles import laid_out, piece, resized, unfilled, written
from reshard.lower.to_shard_map.tpu_layout import in_place_of, memory_order
from reshard.lower.views import StridedTransfer, ViewExchange
from reshard.plans.rules.tile_view import TileView

Array = jax.Array
PIECES = 4
"""The fewest rounds between the same devices that become a loop: a tight budget cuts messages into thousands of pieces.
"""


def exchange(step: Exchange, place: MeshPlace, tile: Array, shape: Sequence[int], in_part: bool = False) -> Array:
    """Round by round; on CPUs, which hold all messages at once anyway, joined at the end if none is in pieces.

    `in_part` says that the tile is a part of one: what is around it has chosen its order of dims.
    """
    by_device = message_orders(step)
    if by_device is None:
        return _by_rounds(step, place, shape, in_part, tile)

    def at_once(tile: Array) -> Array:
        here = place.anew()
        opened = tile.reshape(step.send.digits)
        messages = [_message(BoxMessages([turn], here), here, opened) for turn in message_turns(step)]
        return joined(step, here, by_device, messages).reshape(shape)

    return lax.platform_dependent(tile, cpu=at_once, default=partial(_by_rounds, step, place.anew(), shape, in_part))


def joint_exchange(
    step: JointExchange, place: MeshPlace, tiles: Sequence[Array], shapes: Sequence[Sequence[int]]
) -> list[Array]:
    """The exchanges of several arrays, one message a round for all of them; one after another if one is in pieces."""
    orders = [by_device for each in step.each if (by_device := message_orders(each)) is not None]
    if len(orders) < len(step.each):
        each = zip(step.each, tiles, shapes, strict=True)
        return [exchange(one, place, tile, shape) for one, tile, shape in each]

    def at_once(*tiles: Array) -> list[Array]:
        here = place.anew()
        opened = [tile.reshape(one.send.digits) for one, tile in zip(step.each, tiles, strict=True)]
        turns = zip(*(message_turns(one) for one in step.each), strict=True)
        messages = zip(*(_joint_message(turn, here, opened) for turn in turns), strict=True)
        each = zip(step.each, orders, messages, shapes, strict=True)
        return [joined(one, here, by, list(parts)).reshape(shape) for one, by, parts, shape in each]

    def by_rounds(*tiles: Array) -> list[Array]:
        return _joint_rounds(step, place.anew(), tiles, shapes)

    return lax.platform_dependent(*tiles, cpu=at_once, default=by_rounds)


def _joint_rounds(
    step: JointExchange, place: MeshPlace, tiles: Sequence[Array], shapes: Sequence[Sequence[int]]
) -> list[Array]:
    opened = [tile.reshape(one.send.digits) for one, tile in zip(step.each, tiles, strict=True)]
    filled = [_start(one, tile) for one, tile in zip(step.each, tiles, strict=True)]
    for number, turn in enumerate(zip(*(message_turns(one) for one in step.each), strict=True)):
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


# Boxes of tiles as messages: taken out of a tile on the devices that send them, written into one where they arrive.
#
# Transfers of one form run as one program on all devices: where a device's boxes start is looked up by its position,
# and by the number of the turn where one program runs many.
#
#   BoxMessages         boxes of a tile's digits, sliced and written in place
#   StridedMessages     strided boxes of a flat tile, at computed indices: tables have a few numbers a device, whatever
#                       the box's size


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


# An exchange whose messages are joined once all have arrived, for a platform that holds all of them at once anyway.
#
# XLA:CPU starts all rounds at once, whatever barriers separate them. Joining the messages at the end is then one copy,
# while updating the result in place round by round is a fill and two copies.


MOST = 16
"""The most different orders that devices may have; each is a branch of the program."""
Order = tuple[int, ...]
"""Numbers of turns."""


def message_orders(step: Exchange) -> dict[int, Order] | None:
    """For each device, the turns whose messages lie one after another in its result; local copies are the first turn.

    None unless all messages are one box of one shape, they tile the result, and none is sent in pieces.

    For example, f32[{x}2, 6] -> f32[6, {x}2] on <x=3>: the result of device 1 is its message from device 0, of
    turn 2, then its own share, of turn 0, and the message from device 2, of turn 1. So its order is (2, 0, 1).
    """
    if not _whole_messages(step) or not _one_shape(step):
        return None
    places = _places(step)
    count = math.prod(grid(step))
    if len(message_turns(step)) != count or any(len(by_turn) != count for by_turn in places.values()):
        return None
    by_device = {device: tuple(sorted(by_turn, key=by_turn.__getitem__)) for device, by_turn in places.items()}
    return by_device if len(set(by_device.values())) <= MOST else None


def joins_in_one_copy(step: Exchange) -> bool:
    """Whether the messages of an exchange can be joined once all have arrived, along one axis of the result.

    Along two axes they are joined twice.
    """
    return message_orders(step) is not None and sum(count > 1 for count in grid(step)) == 1


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
    for number, turn in enumerate(message_turns(step)):
        for t in turn:
            places.setdefault(t.receiver, {})[number] = tuple(start for start, _ in t.boxes[0].dst)
    return places


def message_turns(step: Exchange) -> list[Sequence[Transfer]]:
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
    return (t for turn in message_turns(step) for t in turn)


# An exchange between two sets of devices in its two halves: what the senders pack, and what the receivers write.
#
#   batches              the local copies and the rounds of an exchange, in batches of messages of one form
#   packed               on the sender's mesh: its message of a round, flat, of the batch's size; messages that a relay
#                        passes on are packed on the receivers' mesh, out of tiles of the result
#   filled               on the receiver's mesh: its tile with the message of a round written into it
#
# What carries messages from one set to the other is not part of any program here.


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
