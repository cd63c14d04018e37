"""The reference runtime: all devices in one process, on numpy.

It follows the lowered program and nothing else, so that running it tests the lowering. Every buffer is counted while
it lives, and every element when it is received from another device (`Account`). These counts are an independent
measurement to compare with what a plan promises and with what `lower.traffic` derives from the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.lower.exchange import Transfer
from reshard.lower.exchange_in_place import ExchangeInPlace
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
    SplitSum,
)
from reshard.lower.views import VIEW_INSTRUCTIONS, aliases, last_dtype
from reshard.runtime.account import Account, begin_account
from reshard.runtime.given_tiles import checked_tiles
from reshard.runtime.numpy_dtypes import identities, ufunc
from reshard.runtime.numpy_in_place import exchange_in_place, overwrites, parts_in_place
from reshard.runtime.numpy_tiles import closed, copy_boxes, numbered, opened
from reshard.runtime.numpy_views import NO_EXTRAS, Extras, run_view
from reshard.types.reductions import all_reduce_elements
from reshard.types.rules.parts import Cut
from reshard.types.rules.tile_view import TileView

Array = NDArray[Any]
Tiles = dict[int, Array]


def run(program: Program, tiles: Mapping[int, Array], memory: Account | None = None, more: Extras = NO_EXTRAS) -> Tiles:
    """Runs a program on one tile for each device id; returns the result's tiles.

    The given tiles are never written to. Raises `TileError` for tiles that do not fit the program's source.

    >>> from reshard.lower import lower_plan
    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=2)
    >>> program = lower_plan(plan(Layout.parse("int64[{x}1]", mesh), Layout.parse("int64[2]", mesh)))
    >>> run(program, {0: np.array([5]), 1: np.array([6])})
    {0: array([5, 6]), 1: array([5, 6])}
    """
    checked = checked_tiles(program.devices, program.tile_shape, program.dtype, tiles)
    memory = begin_account(program.dtype, memory)
    for device, tile in checked.items():
        memory.take(device, tile.size)
    for device, tile in more.into.items():
        memory.take(device, tile.size, last_dtype(program.instructions))
    given = after = checked
    for instruction, shape in zip(program.instructions, program.tile_shapes, strict=True):
        before, dtype = after, memory.dtype
        if isinstance(instruction, VIEW_INSTRUCTIONS):
            after = run_view(instruction, before, shape, memory, more)
        else:
            after = run_instruction(instruction, before, shape, memory)
        if aliases(instruction):
            given = after if before is given else given
        elif not overwrites(instruction) and (before is not given or not program.keep_source):
            for device, tile in before.items():
                memory.free(device, tile.size, dtype)
    return {device: tile.copy() if after is given else tile for device, tile in after.items()}


def run_instruction(instruction: Instruction, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    """Runs one instruction on a tile for each device; returns the tiles after it, which have this shape."""
    return _RUN[type(instruction)](instruction, tiles, shape, memory)


def _slice(step: Slice, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    result: Tiles = {}
    for device, tile in tiles.items():
        block = numbered(step.send, opened(step.send, tile))[step.block[device]]
        result[device] = _new(memory, device, closed(step.receive, block), shape)
    return result


def _all_gather(step: AllGather, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    memory.launches += 1
    result: Tiles = {}
    for group in step.groups:
        for device in group:
            buffer = _arrivals(memory, device, step.receive, tiles[device].dtype)
            for at, peer in enumerate(group):
                _receive(memory, device, peer, buffer, at, tiles[peer])
            result[device] = _unpack(memory, device, step.receive, buffer, shape)
    return result


def _all_to_all(step: AllToAll, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    memory.launches += 1
    result: Tiles = {}
    for group in step.groups:
        packed = {device: _pack(memory, device, step.send, tiles[device]) for device in group}
        arrived: Tiles = {}
        for to, device in enumerate(group):
            arrived[device] = _arrivals(memory, device, step.receive, tiles[device].dtype)
            for at, peer in enumerate(group):
                _receive(memory, device, peer, arrived[device], at, packed[peer][to])
        for device in group:
            _unpacked(memory, device, step.send)
            result[device] = _unpack(memory, device, step.receive, arrived[device], shape)
    return result


def _reduce_scatter(step: ReduceScatter, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    memory.launches += 1
    result: Tiles = {}
    for group in step.groups:
        packed = {device: _pack(memory, device, step.send, tiles[device]) for device in group}
        for to, device in enumerate(group):
            total = _combined(step.reduction, [packed[peer][to] for peer in group])
            result[device] = _new(memory, device, closed(step.receive, total), shape)
            memory.receive(device, (len(group) - 1) * packed[device][to].size)
        for device in group:
            _unpacked(memory, device, step.send)
    return result


def _all_reduce(step: AllReduce, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    memory.launches += 1
    result: Tiles = {}
    for group in step.groups:
        total = _combined(step.reduction, [tiles[peer] for peer in group])
        for device in group:
            result[device] = _new(memory, device, total, shape)
            memory.receive(device, all_reduce_elements(total.size, len(group)))
    return result


def _split_sum(step: SplitSum, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    result: Tiles = {}
    for device, tile in tiles.items():
        blocks = identities(step.reduction, (step.receive.count, *step.receive.block_shape), tile.dtype)
        place = step.place[device]
        if place is not None:
            kept = numbered(step.send, opened(step.send, tile))[step.keep[device]]
            blocks[place] = kept.reshape(step.receive.block_shape)
        result[device] = _new(memory, device, closed(step.receive, blocks), shape)
    return result


def _permute(step: Permute, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    memory.launches += 1
    result: Tiles = {}
    for sender, receiver in step.pairs:
        if sender != receiver:
            memory.receive(receiver, tiles[sender].size)
        result[receiver] = _new(memory, receiver, tiles[sender], shape)
    return result


def _exchange(step: Exchange, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    result: Tiles = {}
    dtype = next(iter(tiles.values())).dtype
    for device in step.receivers:
        memory.take(device, math.prod(shape))
        result[device] = np.zeros(shape, dtype)
    opened = {device: tile.reshape(step.send.digits) for device, tile in tiles.items()}
    filled = {device: tile.reshape(step.receive.digits) for device, tile in result.items()}
    for transfer in step.local:
        copy_boxes(transfer, opened, filled)
    for turn in step.rounds:
        memory.launches += 1
        _turn(step, turn, opened, filled, memory)
    return result


def _turn(step: Exchange, turn: Sequence[Transfer], opened: Tiles, filled: Tiles, memory: Account) -> None:
    """One round, whose staging buffers are all live at once."""
    sent = [t for t in turn if t.sender != t.receiver]
    ends = [(device, t.elements) for t in sent for device in (t.sender, t.receiver)] if step.staged else []
    for device, elements in ends:
        memory.take(device, elements)
    for transfer in sent:
        memory.receive(transfer.receiver, transfer.elements)
    for transfer in turn:
        copy_boxes(transfer, opened, filled)
    for device, elements in ends:
        memory.free(device, elements)


def _in_parts(step: InParts, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    """One part after another; one part of the operand and one of the result live beside both tiles, or two each."""
    if step.in_place:
        return parts_in_place(step, tiles, shape, memory, run_instruction)
    result: Tiles = {}
    for device, tile in tiles.items():
        memory.take(device, math.prod(shape))
        result[device] = np.empty(tuple(shape), tile.dtype)
    waiting: list[tuple[int, Tiles, Tiles]] = []
    for number in range(step.take.parts):
        parts = {device: _new(memory, device, *_cut(step.take, tile, number)) for device, tile in tiles.items()}
        part_shape = _cut(step.put, result[next(iter(result))], number)[1]
        waiting.append((number, parts, _RUN[type(step.each)](step.each, parts, part_shape, memory)))
        if not step.overlap or number:
            _put_part(step.put, result, *waiting.pop(0), memory)
    for last in waiting:
        _put_part(step.put, result, *last, memory)
    return result


def _put_part(put: Cut, result: Tiles, number: int, parts: Tiles, moved: Tiles, memory: Account) -> None:
    """Copies a part of every device into the results, and frees it with the part that it was made of."""
    for device, part in moved.items():
        place = _middle(put, result[device])[:, number]
        place[...] = part.reshape(place.shape)
        memory.free(device, part.size)
        memory.free(device, parts[device].size)


def _middle(cut: Cut, tile: Array) -> Array:
    """A view of a tile with its parts along axis 1, and everything before them as axis 0."""
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
    """The blocks one after another; the tile itself, which costs no memory, if they lie so already."""
    if not view.in_place:
        memory.take(device, view.elements)
    return np.ascontiguousarray(numbered(view, opened(view, tile)))


def _unpacked(memory: Account, device: int, view: TileView) -> None:
    if not view.in_place:
        memory.free(device, view.elements)


def _arrivals(memory: Account, device: int, view: TileView, dtype: np.dtype[Any]) -> Array:
    """The buffer in which blocks arrive; it becomes the result itself if they lie there in the same order."""
    memory.take(device, view.elements)
    return np.empty((view.count, *view.block_shape), dtype)


def _receive(memory: Account, device: int, peer: int, buffer: Array, at: int, block: Array) -> None:
    if device != peer:
        memory.receive(device, block.size)
    buffer[at] = block.reshape(buffer.shape[1:])


def _unpack(memory: Account, device: int, view: TileView, buffer: Array, shape: Sequence[int]) -> Array:
    if view.in_place:
        return buffer.reshape(tuple(shape))
    result = _new(memory, device, closed(view, buffer), shape)
    memory.free(device, view.elements)
    return result


def _combined(reduction: str, parts: Sequence[Array]) -> Array:
    total = reduce(ufunc(reduction), parts)
    return total / np.asarray(len(parts), total.dtype) if reduction == "mean" else total


_RUN: dict[type[Instruction], Callable[[Any, Tiles, Sequence[int], Account], Tiles]] = {
    Slice: _slice,
    AllGather: _all_gather,
    AllToAll: _all_to_all,
    ReduceScatter: _reduce_scatter,
    AllReduce: _all_reduce,
    SplitSum: _split_sum,
    Permute: _permute,
    Exchange: _exchange,
    ExchangeInPlace: exchange_in_place,
    InParts: _in_parts,
}
