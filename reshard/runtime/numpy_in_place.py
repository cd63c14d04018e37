"""Steps that overwrite their operand, on numpy: exchanges slot by slot, and steps whose parts take each other's place.

A copy of the given tile stands for its own memory. It is counted once, and nothing else is as large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.lower.exchange_in_place import ExchangeInPlace, SlotTransfer, place_offsets, transposing_stops
from reshard.lower.program import InParts, Instruction
from reshard.plans.rules.parts import Cut, part_regions
from reshard.plans.rules.tile_view import TileView
from reshard.runtime.account import Account

Array = NDArray[Any]
Tiles = dict[int, Array]
Run = Callable[[Instruction, Tiles, Sequence[int], Account], Tiles]
"""Runs an instruction on the tiles of all devices."""


def overwrites_operand(instruction: Instruction) -> bool:
    """Whether an instruction makes the operand's memory the result's."""
    return isinstance(instruction, ExchangeInPlace) or (isinstance(instruction, InParts) and instruction.in_place)


def run_exchange_in_place(step: ExchangeInPlace, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    """One buffer a device holds the operand, then the result; only its slots are ever written."""
    size = step.slot * step.slots
    buffers: Tiles = {}
    for device, tile in tiles.items():
        memory.free(device, tile.size)
        memory.take(device, max(size, tile.size))
        buffers[device] = np.resize(tile.reshape(-1), max(size, tile.size))
        _rearrange_buffer(buffers[device], _slot_offsets(step, step.pack[device], step.send))
    for turn in step.rounds:
        memory.launches += 1
        _slot_turn(step, turn, buffers, memory)
    result: Tiles = {}
    count = math.prod(shape)
    for device, buffer in buffers.items():
        order = {to: at for at, to in _slot_offsets(step, step.unpack[device], step.receive).items()}
        _rearrange_buffer(buffer, order)
        result[device] = buffer[:count].reshape(tuple(shape))
        memory.free(device, buffer.size)
        memory.take(device, count)
    return result


def _slot_turn(step: ExchangeInPlace, turn: Sequence[SlotTransfer], buffers: Tiles, memory: Account) -> None:
    """One round: all slots are read before any is written, as if the messages crossed."""
    ends = [(device, t.length) for t in turn for device in (t.sender, t.receiver)] if step.staged else []
    for device, length in ends:
        memory.take(device, length)
    in_flight = [buffers[t.sender][_slot_slice(step, t.src_slot, t.start, t.length)].copy() for t in turn]
    for t, content in zip(turn, in_flight, strict=True):
        memory.receive(t.receiver, t.length)
        buffers[t.receiver][_slot_slice(step, t.dst_slot, t.start, t.length)] = content
    for device, length in ends:
        memory.free(device, length)


def _slot_slice(step: ExchangeInPlace, slot: int, start: int, length: int) -> slice:
    return slice(slot * step.slot + start, slot * step.slot + start + length)


def _slot_offsets(step: ExchangeInPlace, places: Sequence[tuple[int, Any]], view: TileView) -> dict[int, int]:
    """Offset in the buffer -> offset in the tile, for every element that some slot holds."""
    source: dict[int, int] = {}
    for slot, place in places:
        source.update(enumerate(place_offsets(view, place), slot * step.slot))
    return source


def _rearrange_buffer(buffer: Array, source: dict[int, int]) -> None:
    """Assigns buffer[to] = buffer[source[to]] for all `to` at once, in place.

    It follows each chain of assignments from its end, and each cycle from anywhere, with one element set aside.

    >>> buffer = np.array([5, 6, 7])
    >>> _rearrange_buffer(buffer, {0: 1, 1: 0})
    >>> buffer
    array([6, 5, 7])
    """
    readers = {at: to for to, at in source.items()}
    starts = [to for to in source if to not in readers] + list(source)
    done: set[int] = set()
    for start in starts:
        if start in done or source.get(start) == start:
            continue
        held, at = buffer[start], start
        while at in source and at not in done:
            done.add(at)
            origin = source[at]
            buffer[at] = held if origin == start else buffer[origin]
            at = origin


def run_parts_over_operand(step: InParts, tiles: Tiles, shape: Sequence[int], memory: Account, run: Run) -> Tiles:
    """One buffer a device holds the operand, then the result; parts are cut out of it and written over each other."""
    before = next(iter(tiles.values())).shape
    where = part_regions(before, step.take, shape, step.put)
    buffers = {device: tile.reshape(-1).copy() for device, tile in tiles.items()}
    _transpose_slots(buffers, (where.outer, where.before, where.parts), memory)
    for number in range(where.parts):
        places = {device: buffer.reshape(where.outer, where.parts, -1)[:, number] for device, buffer in buffers.items()}
        parts: Tiles = {}
        for device, place in places.items():
            memory.take(device, place.size)
            parts[device] = place.reshape(_shape_of_part(before, step.take)).copy()
        for device, part in run(step.each, parts, _shape_of_part(shape, step.put), memory).items():
            places[device][...] = part.reshape(places[device].shape)
            memory.free(device, part.size + parts[device].size)
    _transpose_slots(buffers, (where.outer, where.parts, where.after), memory)
    return {device: buffer.reshape(tuple(shape)) for device, buffer in buffers.items()}


def _shape_of_part(shape: Sequence[int], cut: Cut) -> tuple[int, ...]:
    return (*shape[: cut.axis], cut.outer * cut.inner, *shape[cut.axis + 1 :])


def _transpose_slots(buffers: Tiles, slots: tuple[int, int, int], memory: Account) -> None:
    """Transposes (outer, rows, columns) slots of each buffer to (outer, columns, rows), with one slot in hand."""
    outer, rows, columns = slots
    stops = transposing_stops(rows, columns)
    for device, buffer in buffers.items() if stops else ():
        each = buffer.reshape(outer, rows * columns, -1)
        hand = np.empty_like(each[:, 0])
        memory.take(device, hand.size)
        for at in stops:
            taken = each[:, at].copy()
            each[:, at], hand = hand, taken
        memory.free(device, hand.size)
