"""The reference runtime: all devices in one process, on numpy.

It follows the lowered program and nothing else, so that running it tests the lowering. Every
buffer is counted while it lives (`Account`) and every byte between devices as it is received, so
that what a plan promises can be compared with what happens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.errors import TileError
from reshard.lower import lower
from reshard.lower.exchange import Box, Span, Transfer
from reshard.lower.exchange_in_place import ExchangeInPlace, offsets
from reshard.lower.program import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    InParts,
    Instruction,
    Permute,
    Program,
    ReduceScatter,
    Slice,
)
from reshard.runtime.account import Account, begin_account
from reshard.types.plan import Plan
from reshard.types.reductions import all_reduce_elements
from reshard.types.rules.parts import Cut
from reshard.types.rules.tile_view import TileView

Array = NDArray[Any]
Tiles = dict[int, Array]

_COMBINE: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
}


def simulate(plan: Plan, tiles: Mapping[int, Array], memory: Account | None = None) -> Tiles:
    """Runs a plan on numpy arrays, all devices in this process: the target's tiles by device id, from the source's.

    Tiles have the layout's tile shape, padding included, and its dtype; the given ones are not written to. `memory`
    is filled with the bytes that were live and received. Raises `TileError` if the tiles are not the source's.

    >>> import numpy as np, reshard as rs
    >>> mesh = rs.Mesh(x=2)
    >>> plan = rs.plan(rs.Layout.parse("int64[{x}2]", mesh), rs.Layout.parse("int64[4]", mesh))
    >>> rs.simulate(plan, {0: np.array([0, 1]), 1: np.array([2, 3])})[1]
    array([0, 1, 2, 3])
    """
    return run(lower(plan), tiles, memory)


def run(program: Program, tiles: Mapping[int, Array], memory: Account | None = None) -> Tiles:
    """Runs a program on one tile per device id and returns the result's tiles.

    The given tiles are never written to. Raises `TileError` if they are not the source's.
    """
    checked = _checked(program, tiles)
    memory = begin_account(program.dtype, memory)
    for device, tile in checked.items():
        memory.take(device, tile.size)
    now = checked
    for instruction, shape in zip(program.instructions, program.tile_shapes, strict=True):
        before = now
        now = _RUN[type(instruction)](instruction, before, shape, memory)
        if isinstance(instruction, ExchangeInPlace):
            continue  # The operand's buffer is now the result's.
        if before is not checked or not program.keep_source:
            for device, tile in before.items():
                memory.free(device, tile.size)
    return {device: tile.copy() if now is checked else tile for device, tile in now.items()}


def _checked(program: Program, tiles: Mapping[int, Array]) -> Tiles:
    if not isinstance(tiles, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TileError(f"tiles are a {type(tiles).__name__}; give a dict of one tile per device id")
    if set(tiles) != set(program.devices):
        missing = sorted(set(program.devices) - set(tiles))[:8]
        extra = sorted(set(tiles) - set(program.devices))[:8]
        raise TileError(
            f"tiles are given for {len(tiles)} devices, the plan has {len(program.devices)} (missing {missing}, "
            f"unknown {extra}); give one tile per device id of the mesh"
        )
    checked = {device: np.asarray(tiles[device]) for device in program.devices}
    for device, tile in checked.items():
        if tile.shape != program.tile_shape:
            raise TileError(
                f"device {device}'s tile has shape {tile.shape}, the source's tiles have {program.tile_shape}"
            )
        if tile.dtype.name != program.dtype:
            raise TileError(
                f"device {device}'s tile is {tile.dtype.name}, the source is {program.dtype}; cast it first"
            )
    return checked


def _open(view: TileView, tile: Array) -> Array:
    """A tile padded and reshaped to its digits, without a copy where nothing is padded."""
    if view.tile != view.padded:
        tile = np.pad(tile, [(0, p - t) for t, p in zip(view.tile, view.padded, strict=True)])
    return tile.reshape(view.digits)


def _blocks(view: TileView, digits: Array) -> Array:
    """Digits with the block number first: one contiguous block after another."""
    rest = [axis for axis in range(digits.ndim) if axis not in view.blocks]
    return digits.transpose(*view.blocks, *rest).reshape(view.count, *view.block_shape)


def _close(view: TileView, blocks: Array) -> Array:
    """The tile made of numbered blocks, cut to its true shape."""
    rest = [axis for axis in range(len(view.digits)) if axis not in view.blocks]
    order = [*view.blocks, *rest]
    spread = blocks.reshape([view.digits[axis] for axis in order])
    whole = spread.transpose(np.argsort(order)).reshape(view.padded)
    return whole[tuple(slice(extent) for extent in view.tile)]


def _slice(step: Slice, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    found: Tiles = {}
    for device, tile in tiles.items():
        block = _blocks(step.send, _open(step.send, tile))[step.block[device]]
        found[device] = _new(memory, device, _close(step.receive, block), shape)
    return found


def _all_gather(step: AllGather, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    memory.launches += 1
    found: Tiles = {}
    for group in step.groups:
        for device in group:
            buffer = _arrivals(memory, device, step.receive, tiles[device].dtype)
            for at, peer in enumerate(group):
                _receive(memory, device, peer, buffer, at, tiles[peer])
            found[device] = _unpack(memory, device, step.receive, buffer, shape)
    return found


def _all_to_all(step: AllToAll, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    memory.launches += 1
    found: Tiles = {}
    for group in step.groups:
        packed = {device: _pack(memory, device, step.send, tiles[device]) for device in group}
        arrived: Tiles = {}
        for to, device in enumerate(group):
            arrived[device] = _arrivals(memory, device, step.receive, tiles[device].dtype)
            for at, peer in enumerate(group):
                _receive(memory, device, peer, arrived[device], at, packed[peer][to])
        for device in group:
            _unpacked(memory, device, step.send)
            found[device] = _unpack(memory, device, step.receive, arrived[device], shape)
    return found


def _reduce_scatter(step: ReduceScatter, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    memory.launches += 1
    found: Tiles = {}
    for group in step.groups:
        packed = {device: _pack(memory, device, step.send, tiles[device]) for device in group}
        for to, device in enumerate(group):
            total = _combined(step.reduction, [packed[peer][to] for peer in group])
            found[device] = _new(memory, device, _close(step.receive, total), shape)
            memory.receive(device, (len(group) - 1) * packed[device][to].size)
        for device in group:
            _unpacked(memory, device, step.send)
    return found


def _all_reduce(step: AllReduce, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    memory.launches += 1
    found: Tiles = {}
    for group in step.groups:
        total = _combined(step.reduction, [tiles[peer] for peer in group])
        for device in group:
            found[device] = _new(memory, device, total, shape)
            # A reduce-scatter and an all-gather of what it made.
            memory.receive(device, all_reduce_elements(total.size, len(group)))
    return found


def _permute(step: Permute, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    memory.launches += 1
    found: Tiles = {}
    for sender, receiver in step.pairs:
        if sender != receiver:
            memory.receive(receiver, tiles[sender].size)
        found[receiver] = _new(memory, receiver, tiles[sender], shape)
    return found


def _exchange(step: Exchange, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    found: Tiles = {}
    for device, tile in tiles.items():
        memory.take(device, int(np.prod(shape)))
        found[device] = np.zeros(shape, tile.dtype)
    opened = {device: tile.reshape(step.send.digits) for device, tile in tiles.items()}
    filled = {device: tile.reshape(step.receive.digits) for device, tile in found.items()}
    for transfer in step.local:
        _copy(transfer, opened, filled)
    for turn in step.rounds:
        memory.launches += 1
        _turn(step, turn, opened, filled, memory)
    return found


def _turn(step: Exchange, turn: Sequence[Transfer], opened: Tiles, filled: Tiles, memory: Account) -> None:
    """One round: all staging buffers of a round live together."""
    sent = [t for t in turn if t.sender != t.receiver]
    ends = [(device, t.elements) for t in sent for device in (t.sender, t.receiver)] if step.staged else []
    for device, elements in ends:
        memory.take(device, elements)
    for transfer in sent:
        memory.receive(transfer.receiver, transfer.elements)
    for transfer in turn:
        _copy(transfer, opened, filled)
    for device, elements in ends:
        memory.free(device, elements)


def _exchange_in_place(step: ExchangeInPlace, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    """One buffer a device, for operand and result alike; only its slots are ever written."""
    size = step.slot * step.slots
    buffers: Tiles = {}
    for device, tile in tiles.items():
        memory.take(device, max(size, tile.size) - tile.size)
        buffers[device] = np.resize(tile.reshape(-1), max(size, tile.size))
        _rearrange(buffers[device], _slots(step, step.pack[device], step.send))
    for turn in step.rounds:
        memory.launches += 1
        ends = [(device, t.length) for t in turn for device in (t.sender, t.receiver)] if step.staged else []
        for device, length in ends:
            memory.take(device, length)
        flying = [buffers[t.sender][_slot(step, t.src_slot, t.start, t.length)].copy() for t in turn]
        for t, content in zip(turn, flying, strict=True):
            memory.receive(t.receiver, t.length)
            buffers[t.receiver][_slot(step, t.dst_slot, t.start, t.length)] = content
        for device, length in ends:
            memory.free(device, length)
    found: Tiles = {}
    for device, buffer in buffers.items():
        order = {to: at for at, to in _slots(step, step.unpack[device], step.receive).items()}
        _rearrange(buffer, order)
        count = int(np.prod(shape))
        found[device] = buffer[:count].reshape(tuple(shape))
        memory.free(device, buffer.size - count)
    return found


def _slot(step: ExchangeInPlace, slot: int, start: int, length: int) -> slice:
    return slice(slot * step.slot + start, slot * step.slot + start + length)


def _slots(step: ExchangeInPlace, places: Sequence[tuple[int, Any]], view: TileView) -> dict[int, int]:
    """Offset in the slots -> offset in the tile, for every element that some slot holds."""
    found: dict[int, int] = {}
    for slot, place in places:
        found.update(enumerate(offsets(view, place), slot * step.slot))
    return found


def _rearrange(buffer: Array, source: dict[int, int]) -> None:
    """buffer[to] = buffer[source[to]] for all at once, along chains and cycles, one element in hand."""
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


def _copy(transfer: Transfer, opened: Tiles, filled: Tiles) -> None:
    for box in transfer.boxes:
        part = opened[transfer.sender][_at(box.src)]
        filled[transfer.receiver][_at(box.dst)] = part.reshape(_extents(box))


def _extents(box: Box) -> tuple[int, ...]:
    return tuple(extent for _, extent in box.dst)


def _at(spans: Sequence[Span]) -> tuple[slice, ...]:
    return tuple(slice(start, start + extent) for start, extent in spans)


def _in_parts(step: InParts, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    """The result is there from the start; beside it live one part of it and one of the operand."""
    found: Tiles = {}
    for device, tile in tiles.items():
        memory.take(device, int(np.prod(shape)))
        found[device] = np.empty(tuple(shape), tile.dtype)
    for number in range(step.take.parts):
        parts = {device: _new(memory, device, *_cut(step.take, tile, number)) for device, tile in tiles.items()}
        done = _RUN[type(step.each)](step.each, parts, _cut(step.put, found[next(iter(found))], number)[1], memory)
        for device, part in done.items():
            _middle(step.put, found[device])[:, number] = part.reshape(
                _middle(step.put, found[device])[:, number].shape
            )
            memory.free(device, part.size)
            memory.free(device, parts[device].size)
    return found


def _middle(cut: Cut, tile: Array) -> Array:
    """A tile with everything before its parts as axis 0 and its parts as axis 1."""
    rest = tile.shape[cut.axis + 1 :]
    return tile.reshape(math.prod(tile.shape[: cut.axis]) * cut.outer, cut.parts, cut.inner, *rest)


def _cut(cut: Cut, tile: Array, number: int) -> tuple[Array, tuple[int, ...]]:
    """One part of a tile, and its shape."""
    shape = (*tile.shape[: cut.axis], cut.outer * cut.inner, *tile.shape[cut.axis + 1 :])
    return _middle(cut, tile)[:, number].reshape(shape), shape


def _new(memory: Account, device: int, content: Array, shape: Sequence[int]) -> Array:
    memory.take(device, content.size)
    return content.reshape(tuple(shape)).copy()


def _pack(memory: Account, device: int, view: TileView, tile: Array) -> Array:
    """Blocks one after another: the tile itself where they lie so already."""
    if not view.in_place:
        memory.take(device, view.elements)
    return np.ascontiguousarray(_blocks(view, _open(view, tile)))


def _unpacked(memory: Account, device: int, view: TileView) -> None:
    if not view.in_place:
        memory.free(device, view.elements)


def _arrivals(memory: Account, device: int, view: TileView, dtype: np.dtype[Any]) -> Array:
    """The buffer that blocks arrive in: the result itself where they lie so already."""
    memory.take(device, view.elements)
    return np.empty((view.count, *view.block_shape), dtype)


def _receive(memory: Account, device: int, peer: int, buffer: Array, at: int, block: Array) -> None:
    if device != peer:
        memory.receive(device, block.size)
    buffer[at] = block.reshape(buffer.shape[1:])


def _unpack(memory: Account, device: int, view: TileView, buffer: Array, shape: Sequence[int]) -> Array:
    if view.in_place:
        return buffer.reshape(tuple(shape))
    found = _new(memory, device, _close(view, buffer), shape)
    memory.free(device, view.elements)
    return found


def _combined(reduction: str, parts: Sequence[Array]) -> Array:
    total = reduce(_COMBINE[reduction], parts)
    return total / np.asarray(len(parts), total.dtype) if reduction == "mean" else total


_RUN: dict[type[Instruction], Callable[[Any, Tiles, Sequence[int], Account], Tiles]] = {
    Slice: _slice,
    AllGather: _all_gather,
    AllToAll: _all_to_all,
    ReduceScatter: _reduce_scatter,
    AllReduce: _all_reduce,
    Permute: _permute,
    Exchange: _exchange,
    ExchangeInPlace: _exchange_in_place,
    InParts: _in_parts,
}
