"""Exchanges that overwrite their operand: slots of one buffer, freed and filled in turn.

    tile --pack--> slot slot slot ...    one slot per share that is still needed
    turn: send a slot, receive into the one it frees (or into a free one)
    slots --unpack--> tile

A share is sent in g neighbouring turns, once for each source-only replica to be gathered, and
leaves in the last of them. After k shares have left, f - k wait and k g have come, so at most
max(f, f g) slots are in use: never more than the larger of the two tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from reshard.errors import PlanError
from reshard.lower.groups import Chains
from reshard.types.layout import Layout
from reshard.types.pair.refine import Refinement, refine
from reshard.types.rules import tile_view
from reshard.types.rules.exchange import in_place_cut
from reshard.types.rules.tile_view import TileView

Place = tuple[int | None, ...]
"""Where a share lies in a view: an index per digit, None for a whole digit."""


class SlotTransfer(NamedTuple):
    """`length` elements of one slot go to the same place of another device's slot."""

    sender: int
    receiver: int
    src_slot: int
    dst_slot: int
    start: int
    length: int


@dataclass(frozen=True)
class ExchangeInPlace:
    """A buffer of `slots` slots of `slot` elements a device; `pack` and `unpack` list, per device,
    which place of the operand's and the result's digits each slot takes from and goes to.
    """

    send: TileView
    receive: TileView
    slot: int
    slots: int
    pack: dict[int, tuple[tuple[int, Place], ...]]
    rounds: tuple[tuple[SlotTransfer, ...], ...]
    unpack: dict[int, tuple[tuple[int, Place], ...]]
    staged: bool


class _Device:
    """Which shares a device has in which slots, as the turns go by."""

    def __init__(self, slots: int) -> None:
        self.free = list(range(slots))[::-1]
        self.waiting: dict[Place, int] = {}
        self.arrived: dict[Place, int] = {}

    def take(self) -> int:
        return self.free.pop()


def in_place(operand: Layout, result: Layout, chunk: int | None) -> ExchangeInPlace:
    """The turns of an even exchange, with a slot for every share; messages of at most `chunk` elements."""
    r = refine(operand, result)
    if r is None or not r.exact:
        raise PlanError(f"exchange: {operand} -> {result} cannot go in place; the layouts are not even")
    send, receive = tile_view.before(operand, r), tile_view.after(result, r)
    slots = max(send.elements, receive.elements) // r.common if r.common else 0
    piece = in_place_cut(r.common, chunk)[1]
    ids = operand.mesh.devices
    turns = list(_turns(r, operand.mesh.size)) if r.common else []
    devices = [_Device(slots) for _ in ids]
    for turn in turns:
        for sender, _, src, _ in turn:
            if src not in devices[sender].waiting:
                devices[sender].waiting[src] = devices[sender].take()
    pack = {ids[at]: tuple((slot, place) for place, slot in d.waiting.items()) for at, d in enumerate(devices)}
    rounds: list[tuple[SlotTransfer, ...]] = []
    for number, turn in enumerate(turns):
        last = {(sender, src) for sender, _, src, _ in turn} - {
            (sender, src) for later in turns[number + 1 :] for sender, _, src, _ in later
        }
        moved = list(_turn(turn, last, devices))
        for start in range(0, r.common, piece):
            length = min(piece, r.common - start)
            rounds.append(tuple(SlotTransfer(ids[s], ids[d], a, b, start, length) for s, d, a, b in moved))
    unpack = {ids[at]: tuple((slot, place) for place, slot in d.arrived.items()) for at, d in enumerate(devices)}
    return ExchangeInPlace(
        send, receive, r.common, slots, pack, tuple(turn for turn in rounds if turn), unpack, piece > 1
    )


_Send = tuple[int, int, Place, Place]
"""Sender and receiver positions, and where the share lies in the operand and in the result."""


def _turn(
    turn: list[_Send], last: set[tuple[int, Place]], devices: list[_Device]
) -> Iterator[tuple[int, int, int, int]]:
    """One turn's transfers between slots: first all slots that it frees, then all that it fills."""
    slots = {(sender, src): devices[sender].waiting[src] for sender, _, src, _ in turn}
    kept = {(sender, src) for sender, receiver, src, _ in turn if sender == receiver}
    for sender, src in last - kept:
        if slots[sender, src] not in devices[sender].arrived.values():
            devices[sender].free.append(slots[sender, src])
    for sender, receiver, src, dst in turn:
        if sender == receiver:
            devices[receiver].arrived[dst] = slots[sender, src]
            continue
        devices[receiver].arrived[dst] = slot = devices[receiver].take()
        yield sender, receiver, slots[sender, src], slot


def _turns(r: Refinement, size: int) -> Iterator[list[_Send]]:
    """The bijections of the exchange, those that send the same share next to each other."""
    chains = Chains(r)
    gathers = [head not in r.used_after for _, head in chains.shares]
    ranges = [range(a.radix) for a, _ in chains.shares]
    order = sorted(range(len(ranges)), key=lambda at: gathers[at])
    for values in itertools.product(*(ranges[at] for at in order)):
        turn = [0] * len(ranges)
        for at, value in zip(order, values, strict=True):
            turn[at] = value
        yield [_send(r, chains, at, turn) for at in range(size)]


def _send(r: Refinement, chains: Chains, receiver: int, turn: list[int]) -> _Send:
    share = {a.src: v for (a, _), v in zip(chains.shares, chains.share(receiver, turn), strict=True)}
    src = tuple(None if a.dst is None else receiver // a.dst % a.radix for a in r.digits if a.src is None)
    dst = tuple(None if a.src is None else share[a.src] for a in r.digits if a.dst is None)
    return chains.sender(receiver, turn), receiver, src, dst


def offsets(view: TileView, place: Place) -> Iterator[int]:
    """The flat offsets, in order, of the elements at a place of a tile."""
    strides = [math.prod(view.digits[at + 1 :]) for at in range(len(view.digits))]
    spans = [range(radix) if value is None else (value,) for radix, value in zip(view.digits, place, strict=True)]
    for index in itertools.product(*spans):
        yield sum(i * stride for i, stride in zip(index, strides, strict=True))
