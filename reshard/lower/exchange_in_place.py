"""Exchanges that overwrite their operand: one buffer a device, cut into slots, so that no second tile is needed.

    tile --pack--> slot slot slot ... --rounds--> slot slot slot ... --unpack--> tile

A slot holds one *share*: what a tile of the operand has for a tile of the result. Where the result replicates along
an axis that the operand uses, g devices need the same share, and it is sent in g neighbouring turns. Its slot is free
in the last of them, and a share that arrives may fill it in the same turn.

**Why the buffer is never larger than the larger tile.** Let a device send f different shares. After k of them have
left, f - k wait and k g have arrived, so at most max(f, f g) slots are in use, and these are the sizes of the
operand's and the result's tile in shares. `lower_in_place` has an example.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from reshard.errors import PlanError
from reshard.geometry.refine import Refinement, refine
from reshard.lower.colouring import EvenRounds
from reshard.lower.groups import coordinate
from reshard.plans.rules import tile_view
from reshard.plans.rules.exchange import in_place_cut
from reshard.plans.rules.tile_view import TileView
from reshard.types.layout import Layout

Place = tuple[int | None, ...]
"""Where a share lies in a view of a tile: an index for each digit, None where it takes the whole digit."""


class SlotTransfer(NamedTuple):
    """`length` elements of a slot, from `start` on, go to the same place of another device's slot."""

    sender: int
    receiver: int
    src_slot: int
    dst_slot: int
    start: int
    length: int


@dataclass(frozen=True)
class ExchangeInPlace:
    """Each device has a buffer of `slots` slots of `slot` elements.

    `pack` lists, for every device, (slot, place of the operand's tile) of each share that is sent or kept; `unpack`
    does the same for the result's tile. `staged` says that messages need buffers of their own while they travel.
    """

    send: TileView
    receive: TileView
    slot: int
    slots: int
    pack: dict[int, tuple[tuple[int, Place], ...]]
    rounds: tuple[tuple[SlotTransfer, ...], ...]
    unpack: dict[int, tuple[tuple[int, Place], ...]]
    staged: bool


class _Send(NamedTuple):
    """One share on its way: positions of sender and receiver, its place in the operand and in the result."""

    sender: int
    receiver: int
    src: Place
    dst: Place


class _Buffer:
    """Which slots of a device hold a share that waits to be sent, a share that has arrived, or nothing."""

    def __init__(self, slots: int) -> None:
        self.free = list(range(slots))[::-1]
        self.waiting: dict[Place, int] = {}
        self.arrived: dict[Place, int] = {}

    def put(self, shares: dict[Place, int], place: Place) -> int:
        """Gives a share a free slot."""
        shares[place] = slot = self.free.pop()
        return slot

    def release(self, src: Place) -> None:
        """Frees the slot of a share that was sent for the last time, unless the device keeps the share."""
        slot = self.waiting[src]
        if slot not in self.arrived.values():
            self.free.append(slot)


def lower_in_place(operand: Layout, result: Layout, chunk: int | None) -> ExchangeInPlace:
    """The rounds of an even exchange between slots, in messages of at most `chunk` elements.

    For example, f32[{x}{y}1, 2] -> f32[4, {x}1] on <x=2, y=2>: an array of 4 x 2, its elements numbered 0 to 7.
    Device d holds row d; devices 0 and 1 need column 0 (elements 0, 2, 4, 6), devices 2 and 3 column 1. A share is
    one element, a device has f = 2 of them, and g = 2 devices need each, so that a buffer has 4 slots:

                  device 0      device 1      device 2      device 3
        tile      0 1           2 3           4 5           6 7
        pack      0 1 . .       2 3 . .       5 4 . .       7 6 . .      in the order in which they are sent
        turn 0    0 1 . .       2 3 . .       5 4 . .       7 6 . .      each keeps its first share: nothing is sent
        turn 1    0 1 2 .       2 3 0 .       5 4 7 .       7 6 5 .      0 <-> 1 and 2 <-> 3 swap copies of slot 0
        turn 2    0 1 2 4       2 3 0 6       5 4 7 1       7 6 5 3      0 <-> 2 and 1 <-> 3 swap copies of slot 1
        turn 3    0 6 2 4       2 4 0 6       5 3 7 1       7 1 5 3      0 <-> 3 and 1 <-> 2; slot 1 leaves: reused
        unpack    0 2 4 6       0 2 4 6       1 3 5 7       1 3 5 7

    Raises `PlanError` for layouts without an exact common refinement: their shares are not all of one size.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2, y=2)
    >>> step = lower_in_place(Layout.parse("f32[{x}{y}1, 2]", mesh), Layout.parse("f32[4, {x}1]", mesh), None)
    >>> [(t.sender, t.src_slot, t.receiver, t.dst_slot) for t in step.rounds[-1]]
    [(3, 1, 0, 1), (2, 1, 1, 1), (1, 1, 2, 1), (0, 1, 3, 1)]
    """
    r = refine(operand, result)
    if r is None or not r.exact:
        raise PlanError(f"exchange: {operand} -> {result} cannot go in place; the layouts are not even")
    send, receive = tile_view.before(operand, r), tile_view.after(result, r)
    slots = max(send.elements, receive.elements) // r.common if r.common else 0
    ids = operand.mesh.devices
    buffers = [_Buffer(slots) for _ in ids]
    turns = list(_bijections(r, len(ids))) if r.common else []
    # A slot for every share that is sent, or kept, on the device that has it, in the order of the rounds.
    for share in itertools.chain(*turns):
        if share.src not in buffers[share.sender].waiting:
            buffers[share.sender].put(buffers[share.sender].waiting, share.src)
    pack = {device: _slots_of_places(buffer.waiting) for device, buffer in zip(ids, buffers, strict=True)}
    largest = in_place_cut(r.common, chunk)[1]
    rounds = [
        tuple(SlotTransfer(ids[m.sender], ids[m.receiver], m.src_slot, m.dst_slot, start, length) for m in moves)
        for moves in _between_slots(turns, buffers)
        if moves
        for start, length in _chunk_spans(r.common, largest)
    ]
    unpack = {device: _slots_of_places(buffer.arrived) for device, buffer in zip(ids, buffers, strict=True)}
    # A single element needs no staging buffer: it can be read and written at once.
    return ExchangeInPlace(send, receive, r.common, slots, pack, tuple(rounds), unpack, staged=largest > 1)


def _slots_of_places(shares: dict[Place, int]) -> tuple[tuple[int, Place], ...]:
    return tuple((slot, place) for place, slot in shares.items())


def _chunk_spans(elements: int, largest: int) -> list[tuple[int, int]]:
    """(start, length) of the pieces of a share, in order.

    >>> _chunk_spans(10, 4)
    [(0, 4), (4, 4), (8, 2)]
    """
    return [(start, min(largest, elements - start)) for start in range(0, elements, largest)]


class _SlotMove(NamedTuple):
    """A share from slot to slot: positions of sender and receiver, and their slots."""

    sender: int
    receiver: int
    src_slot: int
    dst_slot: int


def _between_slots(turns: list[list[_Send]], buffers: list[_Buffer]) -> Iterator[list[_SlotMove]]:
    """The moves of each turn, while the buffers follow."""
    last_turn = {(share.sender, share.src): number for number, turn in enumerate(turns) for share in turn}
    for number, turn in enumerate(turns):
        leaving = [share for share in turn if last_turn[share.sender, share.src] == number]
        yield list(_slot_moves(turn, leaving, buffers))


def _slot_moves(turn: list[_Send], leaving: list[_Send], buffers: list[_Buffer]) -> Iterator[_SlotMove]:
    """The moves of one turn: all slots that it frees are free before it fills any."""
    for share in leaving:
        if share.sender != share.receiver:
            buffers[share.sender].release(share.src)
    for sender, receiver, src, dst in turn:
        slot = buffers[sender].waiting[src]
        if sender == receiver:
            buffers[receiver].arrived[dst] = slot
        else:
            yield _SlotMove(sender, receiver, slot, buffers[receiver].put(buffers[receiver].arrived, dst))


def _bijections(r: Refinement, size: int) -> Iterator[list[_Send]]:
    """The bijections of the exchange, those that send the same share next to each other."""
    rounds = EvenRounds(r)
    replicates = [head not in r.used_after for _, head in rounds.shares]
    ranges = [range(digit.radix) for digit, _ in rounds.shares]
    order = sorted(range(len(ranges)), key=replicates.__getitem__)
    for values in itertools.product(*(ranges[at] for at in order)):
        turn = [0] * len(ranges)
        for at, value in zip(order, values, strict=True):
            turn[at] = value
        yield [_share_to_send(r, rounds, receiver, turn) for receiver in range(size)]


def _share_to_send(r: Refinement, rounds: EvenRounds, receiver: int, turn: list[int]) -> _Send:
    values = {d.src: value for (d, _), value in zip(rounds.shares, rounds.share(receiver, turn), strict=True)}
    src = tuple(None if d.dst is None else coordinate(receiver, d.dst, d.radix) for d in r.digits if d.src is None)
    dst = tuple(None if d.src is None else values[d.src] for d in r.digits if d.dst is None)
    return _Send(rounds.sender(receiver, turn), receiver, src, dst)


def place_offsets(view: TileView, place: Place) -> Iterator[int]:
    """The flat offsets in a tile, in order, of the elements at a place of it.

    >>> list(place_offsets(TileView((2, 3), (2, 3), (2, 3), (0, 1), ()), (None, 1)))
    [1, 4]
    """
    strides = [math.prod(view.digits[at + 1 :]) for at in range(len(view.digits))]
    spans = [range(radix) if value is None else (value,) for radix, value in zip(view.digits, place, strict=True)]
    for index in itertools.product(*spans):
        yield sum(i * stride for i, stride in zip(index, strides, strict=True))


# Parts that take each other's place: a tile becomes the result part by part, in its own memory.
#
#     f32[16, 3, {x}1] -> f32[{x}4, 3, 4] on <x=4>, an all-to-all in 4 parts: part k has rows k, 4 + k, 8 + k and 12 + k
#
#     tile        0 1 2 3 | 4 5 6 7 | 8 9 a b | c d e f      16 rows of 3 elements
#     together    0 4 8 c | 1 5 9 d | 2 6 a e | 3 7 b f      each part is one piece
#     part 0      row 0   | 1 5 9 d | 2 6 a e | 3 7 b f      12 elements of the result take the place of 0 4 8 c
#     part 1      row 0   | row 1   | 2 6 a e | 3 7 b f
#
# A part of the result is as large as one of the operand. One that is not a single piece of a tile consists of slots,
# which are brought together before the first part, or put where they belong after the last
# (`plans.rules.parts.Regions`).
#
# **Slots change places in the tile's memory,** with one slot in hand. The hand goes through each cycle of slots, and at
# each puts down what it has and takes up what is there; back at the first, it puts down the last. What it puts down at
# the first slot of a cycle belongs to none, and is overwritten in the end.


@lru_cache(maxsize=1024)
def transposing_stops(rows: int, columns: int) -> tuple[int, ...]:
    """The slots, numbered row by row, at which a hand stops that transposes rows x columns slots where they are.

    >>> hand, slots = "", list("abcdef")  # (a b c), (d e f)
    >>> for at in transposing_stops(2, 3):
    ...     hand, slots[at] = slots[at], hand
    >>> "".join(slots)
    'adbecf'
    """
    stops: list[int] = []
    moved: set[int] = set()
    for start in range(rows * columns):
        if start in moved:
            continue
        cycle = [start]
        while (at := _transposed(cycle[-1], rows, columns)) != start:
            cycle.append(at)
        moved.update(cycle)
        stops += [*cycle, start] if len(cycle) > 1 else []
    return tuple(stops)


def _transposed(slot: int, rows: int, columns: int) -> int:
    """Where a slot's content belongs."""
    return slot % columns * rows + slot // columns
