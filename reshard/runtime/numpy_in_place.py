"""Steps that overwrite their operand, on numpy: exchanges slot by slot, and steps whose parts take each other's place.

A copy of the given tile stands for its own memory. It is counted once, and nothing else is as large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.lower.exchange_in_place import ExchangeInPlace, SlotTransfer, offsets, transposing
from reshard.lower.program import InParts, Instruction
from reshard.plans.rules.parts import Cut, regions
from reshard.plans.rules.tile_view import TileView
from reshard.runtime.account import Account

Array = NDArray[Any]
Tiles = dict[int, Array]
Run = Callable[[Instruction, Tiles, Sequence[int], Account], Tiles]
"""Runs an instruction on the tiles of all devices."""


def overwrites(instruction: Instruction) -> bool:
    """Whether an instruction makes the operand's memory the result's."""
    return isinstance(instruction, ExchangeInPlace) or (isinstance(instruction, InParts) and instruction.in_place)


def exchange_in_place(step: ExchangeInPlace, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    """One buffer a device holds the operand, then the result; only its slots are ever written."""
    size = step.slot * step.slots
    buffers: Tiles = {}
    for device, tile in tiles.items():
        memory.free(device, tile.size)
        memory.take(device, max(size, tile.size))
        buffers[device] = np.resize(tile.reshape(-1), max(size, tile.size))
        _rearrange(buffers[device], _slots(step, step.pack[device], step.send))
    for turn in step.rounds:
        memory.launches += 1
        _slot_turn(step, turn, buffers, memory)
    result: Tiles = {}
    count = math.prod(shape)
    for device, buffer in buffers.items():
        order = {to: at for at, to in _slots(step, step.unpack[device], step.receive).items()}
        _rearrange(buffer, order)
        result[device] = buffer[:count].reshape(tuple(shape))
        memory.free(device, buffer.size)
        memory.take(device, count)
    return result


def _slot_turn(step: ExchangeInPlace, turn: Sequence[SlotTransfer], buffers: Tiles, memory: Account) -> None:
    """One round: all slots are read before any is written, as if the messages crossed."""
    ends = [(device, t.length) for t in turn for device in (t.sender, t.receiver)] if step.staged else []
    for device, length in ends:
        memory.take(device, length)
    in_flight = [buffers[t.sender][_slot(step, t.src_slot, t.start, t.length)].copy() for t in turn]
    for t, content in zip(turn, in_flight, strict=True):
        memory.receive(t.receiver, t.length)
        buffers[t.receiver][_slot(step, t.dst_slot, t.start, t.length)] = content
    for device, length in ends:
        memory.free(device, length)


def _slot(step: ExchangeInPlace, slot: int, start: int, length: int) -> slice:
    return slice(slot * step.slot + start, slot * step.slot + start + length)


def _slots(step: ExchangeInPlace, places: Sequence[tuple[int, Any]], view: TileView) -> dict[int, int]:
    """Offset in the buffer -> offset in the tile, for every element that some slot holds."""
    source: dict[int, int] = {}
    for slot, place in places:
        source.update(enumerate(offsets(view, place), slot * step.slot))
    return source


def _rearrange(buffer: Array, source: dict[int, int]) -> None:
    """Assigns buffer[to] = buffer[source[to]] for all `to` at once, in place.

    It follows each chain of assignments from its end, and each cycle from anywhere, with one element set aside.

    >>> buffer = np.array([5, 6, 7])
    >>> _rearrange(buffer, {0: 1, 1: 0})
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


def parts_in_place(step: InParts, tiles: Tiles, shape: Sequence[int], memory: Account, run: Run) -> Tiles:
    """One buffer a device holds the operand, then the result; parts are cut out of it and written over each other."""
    before = next(iter(tiles.values())).shape
    where = regions(before, step.take, shape, step.put)
    buffers = {device: tile.reshape(-1).copy() for device, tile in tiles.items()}
    _transpose(buffers, (where.outer, where.before, where.parts), memory)
    for number in range(where.parts):
        places = {device: buffer.reshape(where.outer, where.parts, -1)[:, number] for device, buffer in buffers.items()}
        parts: Tiles = {}
        for device, place in places.items():
            memory.take(device, place.size)
            parts[device] = place.reshape(_part_shape(before, step.take)).copy()
        for device, part in run(step.each, parts, _part_shape(shape, step.put), memory).items():
            places[device][...] = part.reshape(places[device].shape)
            memory.free(device, part.size + parts[device].size)
    _transpose(buffers, (where.outer, where.parts, where.after), memory)
    return {device: buffer.reshape(tuple(shape)) for device, buffer in buffers.items()}


def _part_shape(shape: Sequence[int], cut: Cut) -> tuple[int, ...]:
    return (*shape[: cut.axis], cut.outer * cut.inner, *shape[cut.axis + 1 :])


def _transpose(buffers: Tiles, slots: tuple[int, int, int], memory: Account) -> None:
    """Transposes (outer, rows, columns) slots of each buffer to (outer, columns, rows), with one slot in hand."""
    outer, rows, columns = slots
    stops = transposing(rows, columns)
    for device, buffer in buffers.items() if stops else ():
        each = buffer.reshape(outer, rows * columns, -1)
        hand = np.empty_like(each[:, 0])
        memory.take(device, hand.size)
        for at in stops:
            taken = each[:, at].copy()
            each[:, at], hand = hand, taken
        memory.free(device, hand.size)
