"""An exchange that overwrites its operand, in one buffer of slots that XLA updates in place."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.lower.exchange_in_place import ExchangeInPlace, SlotTransfer
from reshard.lower.program import Program
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.tiles import write_box
from reshard.plans.rules.tile_view import TileView

Array = jax.Array
LOOPED = 16
"""The fewest rounds between any devices that become a loop: one piece of code packs and writes the messages of all, of
which XLA would compile a copy for each unrolled round."""


def shares_lie_in_order(program: Program) -> bool:
    """Whether every in-place exchange of a program packs and unpacks nothing: its slots, in order, are the tile.

    Otherwise XLA would copy the tile to rearrange its shares, and so hold it twice.
    """
    return all(
        slots_are_tile(step.pack, step.send) and slots_are_tile(step.unpack, step.receive)
        for step in program.instructions
        if isinstance(step, ExchangeInPlace)
    )


def run_exchange_in_place(step: ExchangeInPlace, place: MeshPlace, tile: Array, shape: Sequence[int]) -> Array:
    """Packs the tile into slots, sends slots round by round, and unpacks the result."""
    buffer = _pack_slots(step, place, tile)
    for length, same in itertools.groupby(step.rounds, lambda turn: turn[0].length):
        turns = list(same)
        buffer = repeat_rounds(len(turns), place, partial(_send_slots, turns, length), buffer)
    return _unpack_slots(step, place, buffer, shape)


def _send_slots(
    turns: Sequence[Sequence[SlotTransfer]], length: int, place: MeshPlace, number: Array | int, buffer: Array
) -> Array:
    """The buffer after turn `number`, in which messages of this length go from slot to slot."""
    src, dst, gets, start = np.zeros((4, len(turns), len(place.devices)), np.int32)
    for at, turn in enumerate(turns):
        start[at] = turn[0].start
        for t in turn:
            src[at, place.positions[t.sender]] = t.src_slot
            dst[at, place.positions[t.receiver]] = t.dst_slot
            gets[at, place.positions[t.receiver]] = 1
    first = place.look_up(start, number)
    message = lax.dynamic_slice(buffer, (place.look_up(src, number), first), (1, length))
    message = place.permute_in_turn(message, [[(t.sender, t.receiver) for t in turn] for turn in turns], number)
    receives = None if gets.all() else place.look_up(gets, number) != 0
    return write_box(buffer, message, [place.look_up(dst, number), first], receives)


def _pack_slots(step: ExchangeInPlace, place: MeshPlace, tile: Array) -> Array:
    opened = tile.reshape(step.send.digits)
    if step.slots * step.slot == tile.size and slots_are_tile(step.pack, step.send):
        return opened.reshape(step.slots, step.slot)
    shares = _Shares(step.pack, step.send, place.devices)

    def one(place: MeshPlace, number: Array | int, buffer: Array) -> Array:
        slot, starts = shares.look_up(place, number)
        share = lax.dynamic_slice(opened, starts, shares.extents).reshape(1, step.slot)
        return lax.dynamic_update_slice(buffer, share, (slot, jnp.zeros((), jnp.int32)))

    return repeat_rounds(shares.count, place, one, jnp.zeros((step.slots, step.slot), tile.dtype))


def _unpack_slots(step: ExchangeInPlace, place: MeshPlace, buffer: Array, shape: Sequence[int]) -> Array:
    if step.slots * step.slot == math.prod(shape) and slots_are_tile(step.unpack, step.receive):
        return buffer.reshape(tuple(shape))
    shares = _Shares(step.unpack, step.receive, place.devices)

    def one(place: MeshPlace, number: Array | int, filled: Array) -> Array:
        slot, starts = shares.look_up(place, number)
        share = lax.dynamic_slice(buffer, (slot, jnp.zeros((), jnp.int32)), (1, step.slot))
        return lax.dynamic_update_slice(filled, share.reshape(shares.extents), starts)

    return repeat_rounds(shares.count, place, one, jnp.zeros(step.receive.digits, buffer.dtype)).reshape(tuple(shape))


_Places = Mapping[int, tuple[tuple[int, tuple[int | None, ...]], ...]]
"""By device id, (slot, place in a view) of each share."""


class _Shares:
    """Every device's shares, by number: their slots, and where they lie in a view."""

    def __init__(self, places: _Places, view: TileView, devices: Sequence[int]) -> None:
        """Every device has equally many."""
        rows = [[(slot, *(at or 0 for at in where)) for slot, where in places[device]] for device in devices]
        self.count = len(rows[0])
        table = np.asarray(rows, np.int32).reshape(len(devices), self.count, len(view.digits) + 1)
        self.columns = table.transpose(2, 1, 0)  # each by number and device
        first = places[devices[0]][0][1] if self.count else (None,) * len(view.digits)
        self.extents = tuple(radix if at is None else 1 for radix, at in zip(view.digits, first, strict=True))

    def look_up(self, place: MeshPlace, number: Array | int) -> tuple[Array, list[Array]]:
        """The slot of this device's share of that number, and its starts in the view."""
        slot, *starts = (place.look_up(column, number) for column in self.columns)
        return slot, starts


def slots_are_tile(places: _Places, view: TileView) -> bool:
    """Whether the slots of every device, one after another, are the tile as it lies in memory."""
    first = next(iter(places.values()))
    whole = [index is None for index in first[0][1]] if first else []
    if whole != sorted(whole):
        return False
    ranges = [range(radix) for radix, keep in zip(view.digits, whole, strict=True) if not keep]
    order = list(itertools.product(*ranges))
    return all(
        {slot: tuple(i for i in where if i is not None) for slot, where in listed} == dict(enumerate(order))
        for listed in places.values()
    )


def repeat_rounds(
    count: int, place: MeshPlace, run: Callable[[MeshPlace, Array | int, Array], Array], start: Array
) -> Array:
    """What `run` makes of a value in round after round from 0 on: unrolled if they are few, else in a loop.

    It is given the place, which is another one inside a loop, the round's number and the value.
    """

    def run_in_loop(number: Array, value: Array) -> Array:
        return run(place.anew(), number, value)

    if count >= LOOPED:
        return lax.fori_loop(0, count, run_in_loop, start)
    for number in range(count):
        start = run(place, number, start)
    return start
