"""The reference runtime: all devices in one process, on numpy.

It follows the lowered program and nothing else, so that running it tests the lowering. Every buffer is counted while
it lives, and every element when it is received from another device (`Account`). These counts are an independent
measurement to compare with what a plan promises and with what `lower.program_traffic` derives from the program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, cast, overload

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from reshard.errors import PlanError, TileError, quoted
from reshard.lower import lower_plan
from reshard.lower.exchange_rounds import Exchange, ExchangeInPlace, SlotTransfer, Transfer, place_offsets
from reshard.lower.program import (
    AllGather,
    AllReduce,
    AllToAll,
    AnyProgram,
    CastTiles,
    InParts,
    Instruction,
    JointExchange,
    PackedCollective,
    Permute,
    Program,
    PutPart,
    ReduceScatter,
    Reorder,
    Slice,
    Spans,
    SplitSum,
    TakePart,
    is_alias,
    last_dtype,
    lower_batch,
    transposing_stops,
)
from reshard.plans.plan import Plan, TreePlan
from reshard.plans.rules.split_steps import Cut, part_regions
from reshard.plans.rules.tile_view import TileView
from reshard.runtime.account import Account, InBytes, begin_account
from reshard.runtime.numpy_tiles import (
    checked_tiles,
    identities,
    numpy_dtype,
    tile_per_device,
    ufunc,
    with_padding,
    without_padding,
)
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.reductions import all_reduce_elements
from reshard.types.whole import checked_flag

Array = NDArray[Any]
Tiles = dict[int, Array]


@dataclass(frozen=True)
class Extras:
    """What a run needs beside the source's tiles: copies of the target's tiles that it fills, and the cast's scales.

    Without `casts`, values stay as they are where a program casts: the prover's marks are counted, not converted.
    """

    into: Tiles = field(default_factory=dict[int, Array])
    scale: Mapping[int, Any] = field(default_factory=dict[int, Any])
    casts: bool = True


NO_EXTRAS = Extras()


# The steps of a move with a view on numpy: tiles reordered, parts taken and put, casts, exchanges of strided boxes.


def _existing_tiles(plan: Plan, into: object) -> Tiles:
    target = plan.target
    shapes = {device: (target.tile_shape, target.tile_shape_of(device)) for device in target.mesh.devices}
    tiles: Tiles = {}
    for device, tile in tile_per_device(shapes, into).items():
        padded = with_padding(target, device, tile)
        if padded.shape != target.tile_shape or padded.dtype.name != target.dtype:
            raise TileError(
                f"device {device}'s target tile is {padded.dtype.name}{list(padded.shape)}, and {target} has tiles "
                f"{list(target.tile_shape)}"
            )
        tiles[device] = padded.copy()
    return tiles


def _scales_by_device(plan: Plan, scale: object) -> Mapping[int, Any]:
    if scale is None:
        return {}
    if plan.source.dtype == plan.target.dtype:
        raise TileError(f"scale {quoted(scale)}: {plan.source} -> {plan.target} casts nothing; leave it out")
    devices = plan.source.mesh.devices
    if not isinstance(scale, Mapping):
        return dict.fromkeys(devices, scale)
    scales = cast("Mapping[int, Any]", scale)
    missing = [device for device in devices if device not in scales]
    if missing:
        raise TileError(f"scale has nothing for the devices {missing[:8]}; give one number or array for each")
    return scales


def _run_reorder(step: Reorder, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    if step.order.aliases:
        return {device: tile.reshape(tuple(shape)) for device, tile in tiles.items()}
    digits, order = step.order
    turned = {device: tile.reshape(digits).transpose(order) for device, tile in tiles.items()}
    return {device: _new_tile(memory, device, tile, shape) for device, tile in turned.items()}


def _run_take(step: TakePart, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    return {device: _new_tile(memory, device, tile[_view_block(step.spans)], shape) for device, tile in tiles.items()}


def _run_put(step: PutPart, tiles: Tiles, shape: Sequence[int], memory: Account, more: Extras) -> Tiles:
    result = {device: more.into[device].reshape(tuple(shape)) for device in tiles}
    for device, tile in tiles.items():
        result[device][_view_block(step.spans)] = tile
    return result


def _run_cast(step: CastTiles, tiles: Tiles, shape: Sequence[int], memory: Account, more: Extras) -> Tiles:
    narrows = dtypes.bits(step.dtype) < dtypes.bits(memory.dtype)
    memory.cast(step.dtype)
    result: Tiles = {}
    for device, tile in tiles.items():
        scale = more.scale.get(device)
        dtype = numpy_dtype(step.dtype) if more.casts else tile.dtype
        try:
            result[device] = scale_tile(tile, dtype, scale, narrows)
        except (ValueError, TypeError, MemoryError) as error:
            raise TileError(
                f"device {device}'s scale {quoted(scale)} does not fit its tile of shape {tile.shape}: {error}; give a "
                f"number, or an array that broadcasts to the tile"
            ) from None
        memory.take(device, tile.size)
    return result


def scale_tile(tile: Array, dtype: np.dtype[Any], scale: Any, narrows: bool) -> Array:
    """A tile cast, divided by a scale before where the dtype narrows, multiplied by it after where it widens.

    >>> scale_tile(np.array([2.0, 4.0]), np.dtype("float32"), 2, narrows=True)
    array([1., 2.], dtype=float32)
    """
    if scale is None:
        return tile.astype(dtype)
    if narrows:
        factor = np.broadcast_to(np.asarray(scale, tile.dtype), tile.shape)
        return (tile / factor).astype(dtype)
    wide = tile.astype(dtype)
    return wide * np.broadcast_to(np.asarray(scale, dtype), wide.shape)


def _view_block(spans: Spans) -> tuple[slice, ...]:
    return tuple(slice(start, start + extent) for start, extent in spans)


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
    _take_tiles(memory, checked)
    for device, tile in more.into.items():
        memory.take(device, tile.size, last_dtype(program.instructions))
    return _run_launches(program, [checked], memory, more)[0]


def _run_launches(
    program: AnyProgram, sources: Sequence[Tiles], memory: Account, more: Extras = NO_EXTRAS
) -> list[Tiles]:
    """Runs the launches of one array or of several that share them; the sources are counted already.

    What is given may never be written to, nor returned as a result: `given` has, for each array, the tiles that still
    share memory with its source.
    """
    given, after = list(sources), list(sources)
    for number, joint in enumerate(program.joint):
        before, dtype = after, memory.dtype
        steps = [one.instructions[number] for one in program.programs]
        shapes = [one.tile_shapes[number] for one in program.programs]
        if isinstance(joint, JointExchange):
            after = _run_exchanges(joint.each, before, shapes, memory, more)
        elif isinstance(joint, PackedCollective):
            after = _packed_and_moved(joint, before, shapes, memory)
        else:
            each = zip(steps, before, shapes, strict=True)
            after = [run_instruction(step, tiles, shape, memory, more) for step, tiles, shape in each]
        for at, (one, step) in enumerate(zip(program.programs, steps, strict=True)):
            if is_alias(step):  # The same memory in another shape: it is still the source's if it was before.
                given[at] = after[at] if before[at] is given[at] else given[at]
            elif not overwrites_operand(step) and (before[at] is not given[at] or not one.keep_source):
                for device, tile in before[at].items():
                    memory.free(device, tile.size, dtype)
    return [
        {device: tile.copy() if tiles is source else tile for device, tile in tiles.items()}
        for tiles, source in zip(after, given, strict=True)
    ]


def run_instruction(
    instruction: Instruction, tiles: Tiles, shape: Sequence[int], memory: Account, more: Extras = NO_EXTRAS
) -> Tiles:
    """Runs one instruction on a tile for each device; returns the tiles after it, which have this shape."""
    if (run_with := _RUN_WITH_EXTRAS.get(type(instruction))) is not None:
        return run_with(instruction, tiles, shape, memory, more)
    return _RUN[type(instruction)](instruction, tiles, shape, memory)


def _run_slice(step: Slice, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    result: Tiles = {}
    for device, tile in tiles.items():
        block = number_blocks(step.send, split_digits(step.send, tile))[step.block[device]]
        result[device] = _new_tile(memory, device, merge_digits(step.receive, block), shape)
    return result


def _run_all_gather(step: AllGather, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    memory.launches += 1
    result: Tiles = {}
    for group in step.groups:
        for device in group:
            buffer = _arrival_buffer(memory, device, step.receive, tiles[device].dtype)
            for at, peer in enumerate(group):
                _receive_block(memory, device, peer, buffer, at, tiles[peer])
            result[device] = _unpack_blocks(memory, device, step.receive, buffer, shape)
    return result


def _run_all_to_all(step: AllToAll, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    memory.launches += 1
    result: Tiles = {}
    for group in step.groups:
        packed = {device: _pack_blocks(memory, device, step.send, tiles[device]) for device in group}
        arrived: Tiles = {}
        for to, device in enumerate(group):
            arrived[device] = _arrival_buffer(memory, device, step.receive, tiles[device].dtype)
            for at, peer in enumerate(group):
                _receive_block(memory, device, peer, arrived[device], at, packed[peer][to])
        for device in group:
            _free_packed(memory, device, step.send)
            result[device] = _unpack_blocks(memory, device, step.receive, arrived[device], shape)
    return result


def _run_reduce_scatter(step: ReduceScatter, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    memory.launches += 1
    result: Tiles = {}
    for group in step.groups:
        packed = {device: _pack_blocks(memory, device, step.send, tiles[device]) for device in group}
        for to, device in enumerate(group):
            total = _combine_parts(step.reduction, [packed[peer][to] for peer in group])
            result[device] = _new_tile(memory, device, merge_digits(step.receive, total), shape)
            memory.receive(device, (len(group) - 1) * packed[device][to].size)
        for device in group:
            _free_packed(memory, device, step.send)
    return result


def _run_all_reduce(step: AllReduce, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    memory.launches += 1
    result: Tiles = {}
    for group in step.groups:
        total = _combine_parts(step.reduction, [tiles[peer] for peer in group])
        for device in group:
            result[device] = _new_tile(memory, device, total, shape)
            memory.receive(device, all_reduce_elements(total.size, len(group)))
    return result


def _run_split_sum(step: SplitSum, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    result: Tiles = {}
    for device, tile in tiles.items():
        blocks = identities(step.reduction, (step.receive.count, *step.receive.block_shape), tile.dtype)
        place = step.place[device]
        if place is not None:
            kept = number_blocks(step.send, split_digits(step.send, tile))[step.keep[device]]
            blocks[place] = kept.reshape(step.receive.block_shape)
        result[device] = _new_tile(memory, device, merge_digits(step.receive, blocks), shape)
    return result


def _run_permute(step: Permute, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    memory.launches += 1
    result: Tiles = {}
    for sender, receiver in step.pairs:
        if sender != receiver:
            memory.receive(receiver, tiles[sender].size)
        result[receiver] = _new_tile(memory, receiver, tiles[sender], shape)
    return result


def _run_exchange(step: Exchange, tiles: Tiles, shape: Sequence[int], memory: Account, more: Extras) -> Tiles:
    return _run_exchanges([step], [tiles], [shape], memory, more)[0]


def _run_exchanges(
    steps: Sequence[Exchange],
    before: Sequence[Tiles],
    shapes: Sequence[Sequence[int]],
    memory: Account,
    more: Extras,
) -> list[Tiles]:
    """The rounds of one exchange, or of several together: then each message holds the blocks of all arrays, packed."""
    results: list[Tiles] = []
    for step, tiles, shape in zip(steps, before, shapes, strict=True):
        if step.fills:
            results.append({device: more.into[device].reshape(tuple(shape)) for device in step.receivers})
        else:
            dtype = next(iter(tiles.values())).dtype
            results.append({device: np.zeros(tuple(shape), dtype) for device in step.receivers})
            _take_tiles(memory, results[-1])
    sides = [(_flat_tiles(tiles), _flat_tiles(result)) for tiles, result in zip(before, results, strict=True)]
    for step, side in zip(steps, sides, strict=True):
        for transfer in step.local:
            copy_blocks(transfer, *side)
    staged = len(steps) > 1 or steps[0].staged
    for turn in zip(*(step.rounds for step in steps), strict=True):
        memory.launches += 1
        messages = list(zip(*turn, strict=True))
        # Both ends of all messages of a round are live at once; what stays on its device crosses no wire.
        ends: list[tuple[int, int]] = []
        for sender, receiver, size in ((m[0].sender, m[0].receiver, sum(t.elements for t in m)) for m in messages):
            if sender != receiver:
                memory.receive(receiver, size)
                ends += [(sender, size), (receiver, size)] if staged else []
        for end in ends:
            memory.take(*end)
        for message in messages:
            for transfer, side in zip(message, sides, strict=True):
                copy_blocks(transfer, *side)
        for end in ends:
            memory.free(*end)
    return results


def _flat_tiles(tiles: Tiles) -> Tiles:
    """The tiles in row-major order; those that are so already are not copied, and share their memory."""
    return {device: np.ascontiguousarray(tile).reshape(-1) for device, tile in tiles.items()}


def copy_blocks(transfer: Transfer, flat: Mapping[int, Array], filled: Mapping[int, Array]) -> None:
    """Copies the blocks of a message from the sender's flat tile to the receiver's."""
    source, target = (filled if transfer.relayed else flat)[transfer.sender], filled[transfer.receiver]
    for src, dst, axes in transfer.blocks:
        there = _stride_tile(target, dst, [(extent, stride) for extent, _, stride in axes])
        there[...] = _stride_tile(source, src, [(extent, stride) for extent, stride, _ in axes])


def _stride_tile(flat: Array, place: int, axes: Sequence[tuple[int, int]]) -> Array:
    """The elements of one end of a block in a flat tile; raises `TileError` if some lie outside of it."""
    extents = [extent for extent, _ in axes]
    last = place + sum([(extent - 1) * stride for extent, stride in axes])
    if math.prod(extents) and not 0 <= place <= last < flat.size:
        raise TileError(f"a block from {place} to {last} leaves a tile of {flat.size} elements")
    # numpy strides no dtypes but its own (a float8_e5m2 says that it is "<f1"); as bytes, they are copied all the same.
    words = flat if flat.dtype.isbuiltin == 1 else flat.view(f"V{flat.itemsize}")
    return as_strided(words[place:], extents, [stride * flat.itemsize for _, stride in axes])


def _run_in_parts(step: InParts, tiles: Tiles, shape: Sequence[int], memory: Account) -> Tiles:
    """One part after another; one part of the operand and one of the result live beside both tiles, or two each."""
    if step.in_place:
        return run_parts_over_operand(step, tiles, shape, memory, run_instruction)
    result: Tiles = {}
    for device, tile in tiles.items():
        memory.take(device, math.prod(shape))
        result[device] = np.empty(tuple(shape), tile.dtype)
    waiting: list[tuple[int, Tiles, Tiles]] = []
    for number in range(step.take.parts):
        parts = {
            device: _new_tile(memory, device, *_cut_part(step.take, tile, number)) for device, tile in tiles.items()
        }
        part_shape = _cut_part(step.put, result[next(iter(result))], number)[1]
        waiting.append((number, parts, run_instruction(step.each, parts, part_shape, memory)))
        if not step.overlap or number:
            _put_part(step.put, result, *waiting.pop(0), memory)
    for last in waiting:
        _put_part(step.put, result, *last, memory)
    return result


def _put_part(put: Cut, result: Tiles, number: int, parts: Tiles, moved: Tiles, memory: Account) -> None:
    """Copies a part of every device into the results, and frees it with the part that it was made of."""
    for device, part in moved.items():
        place = _parts_in_middle(put, result[device])[:, number]
        place[...] = part.reshape(place.shape)
        memory.free(device, part.size)
        memory.free(device, parts[device].size)


def _parts_in_middle(cut: Cut, tile: Array) -> Array:
    """A view of a tile with its parts along axis 1, and everything before them as axis 0."""
    rest = tile.shape[cut.axis + 1 :]
    return tile.reshape(math.prod(tile.shape[: cut.axis]) * cut.outer, cut.parts, cut.inner, *rest)


def _cut_part(cut: Cut, tile: Array, number: int) -> tuple[Array, tuple[int, ...]]:
    """One part of a tile, and its shape."""
    shape = (*tile.shape[: cut.axis], cut.outer * cut.inner, *tile.shape[cut.axis + 1 :])
    return _parts_in_middle(cut, tile)[:, number].reshape(shape), shape


def _new_tile(memory: Account, device: int, content: Array, shape: Sequence[int]) -> Array:
    memory.take(device, content.size)
    return content.reshape(tuple(shape)).copy()


def _pack_blocks(memory: Account, device: int, view: TileView, tile: Array) -> Array:
    """The blocks one after another; the tile itself, which costs no memory, if they lie so already."""
    if not view.in_place:
        memory.take(device, view.elements)
    return np.ascontiguousarray(number_blocks(view, split_digits(view, tile)))


def _free_packed(memory: Account, device: int, view: TileView) -> None:
    if not view.in_place:
        memory.free(device, view.elements)


def _arrival_buffer(memory: Account, device: int, view: TileView, dtype: np.dtype[Any]) -> Array:
    """The buffer in which blocks arrive; it becomes the result itself if they lie there in the same order."""
    memory.take(device, view.elements)
    return np.empty((view.count, *view.block_shape), dtype)


def _receive_block(memory: Account, device: int, peer: int, buffer: Array, at: int, block: Array) -> None:
    if device != peer:
        memory.receive(device, block.size)
    buffer[at] = block.reshape(buffer.shape[1:])


def _unpack_blocks(memory: Account, device: int, view: TileView, buffer: Array, shape: Sequence[int]) -> Array:
    if view.in_place:
        return buffer.reshape(tuple(shape))
    result = _new_tile(memory, device, merge_digits(view, buffer), shape)
    memory.free(device, view.elements)
    return result


def _combine_parts(reduction: str, parts: Sequence[Array]) -> Array:
    total = reduce(ufunc(reduction), parts)
    return total / np.asarray(len(parts), total.dtype) if reduction == "mean" else total


# Steps that overwrite their operand: exchanges slot by slot, and steps whose parts take each other's place. A copy of
# the given tile stands for its own memory. It is counted once, and nothing else is as large.


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


_RUN: dict[type[Instruction], Callable[[Any, Tiles, Sequence[int], Account], Tiles]] = {
    Slice: _run_slice,
    AllGather: _run_all_gather,
    AllToAll: _run_all_to_all,
    ReduceScatter: _run_reduce_scatter,
    AllReduce: _run_all_reduce,
    SplitSum: _run_split_sum,
    Permute: _run_permute,
    ExchangeInPlace: run_exchange_in_place,
    InParts: _run_in_parts,
    Reorder: _run_reorder,
    TakePart: _run_take,
}

_RUN_WITH_EXTRAS: dict[type[Instruction], Callable[[Any, Tiles, Sequence[int], Account, Extras], Tiles]] = {
    Exchange: _run_exchange,
    PutPart: _run_put,
    CastTiles: _run_cast,
}


# A tile's digits and blocks as numpy arrays, by the `TileView` that an instruction gives.
#
# view of tile (4, 4), digits (4, 2, 2), blocks (1,)     opened: shape (4, 2, 2)     numbered: 2 blocks of (4, 2)


def split_digits(view: TileView, tile: Array) -> Array:
    """A tile, padded and reshaped to its digits; a view of it if nothing is padded."""
    if view.tile != view.padded:
        tile = np.pad(tile, [(0, p - t) for t, p in zip(view.tile, view.padded, strict=True)])
    return tile.reshape(view.digits)


def number_blocks(view: TileView, digits: Array) -> Array:
    """The blocks of a tile that is reshaped to its digits, numbered along a new first axis."""
    rest = [axis for axis in range(digits.ndim) if axis not in view.blocks]
    return digits.transpose(*view.blocks, *rest).reshape(view.count, *view.block_shape)


def merge_digits(view: TileView, blocks: Array) -> Array:
    """The tile that numbered blocks make up, cut to its true shape."""
    rest = [axis for axis in range(len(view.digits)) if axis not in view.blocks]
    order = [*view.blocks, *rest]
    spread = blocks.reshape([view.digits[axis] for axis in order])
    whole = spread.transpose(np.argsort(order)).reshape(view.padded)
    return whole[tuple(slice(extent) for extent in view.tile)]


# Launches of several arrays: blocks are packed side by side, one collective moves them, and they are unpacked.


def _take_tiles(memory: Account, tiles: Tiles) -> None:
    for device, tile in tiles.items():
        memory.take(device, tile.size)


def _free_tiles(memory: Account, tiles: Tiles) -> None:
    for device, tile in tiles.items():
        memory.free(device, tile.size)


def _packed_and_moved(
    step: PackedCollective, before: Sequence[Tiles], shapes: Sequence[tuple[int, ...]], memory: Account
) -> list[Tiles]:
    """Packs the blocks of all arrays, moves them by one collective, and unpacks them."""
    packed = {device: _pack_jointly(step.send, [tiles[device] for tiles in before]) for device in before[0]}
    _take_tiles(memory, packed)
    size = sum(view.elements for view in step.receive) or next(iter(packed.values())).size
    arrived = run_instruction(step.packed, packed, (size,), memory)
    _free_tiles(memory, packed)
    results = [dict[int, Array]() for _ in before]
    for device, tile in arrived.items():
        for result, part in zip(results, _unpack_joint(step.receive, tile, shapes), strict=True):
            result[device] = part
            memory.take(device, part.size)
    _free_tiles(memory, arrived)
    return results


def _pack_jointly(views: Sequence[TileView], tiles: Sequence[Array]) -> Array:
    """The blocks of the same number side by side, number after number; whole tiles if there are no views."""
    if not views:
        return np.concatenate([tile.reshape(-1) for tile in tiles])
    blocks = [number_blocks(view, split_digits(view, tile)) for view, tile in zip(views, tiles, strict=True)]
    return np.concatenate([each.reshape(len(each), -1) for each in blocks], axis=1).reshape(-1)


def _unpack_joint(views: Sequence[TileView], packed: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    sizes = [view.elements // view.count for view in views] or [int(np.prod(shape)) for shape in shapes]
    rows = packed.reshape(views[0].count if views else 1, sum(sizes))
    parts = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
    if not views:
        return [part.reshape(shape).copy() for part, shape in zip(parts, shapes, strict=True)]
    closed_parts = [merge_digits(view, part.copy()) for view, part in zip(views, parts, strict=True)]
    return [part.reshape(shape).copy() for part, shape in zip(closed_parts, shapes, strict=True)]


# `simulate`: a plan of one array or of many, run on numpy.


@overload
def simulate(
    plan: Plan,
    tiles: Mapping[int, Array],
    memory: Account | None = None,
    *,
    padded: bool = True,
    into: Mapping[int, Array] | None = None,
    scale: Any = None,
) -> Tiles: ...


@overload
def simulate(
    plan: TreePlan, tiles: Mapping[str, Mapping[int, Array]], memory: Account | None = None, *, padded: bool = True
) -> dict[str, Tiles]: ...


def simulate(
    plan: Plan | TreePlan,
    tiles: Mapping[Any, Any],
    memory: Account | None = None,
    *,
    padded: bool = True,
    into: Mapping[int, Array] | None = None,
    scale: Any = None,
) -> Tiles | dict[str, Tiles]:
    """Runs a plan on numpy arrays, all devices in this process; returns the target's tiles by device id.

    Tiles have their layout's tile shape, padding included, or `tile_shape_of(device)` without it, and its dtype. With
    `padded=False` the result has no padding either. The given tiles are not written to. `memory` is updated with the
    bytes live and received. A tree of plans takes and returns {name: {device id: tile}}, and a `memory` in bytes,
    `Account("uint8")`. For a plan of a `Move`, `into` has the target's tiles of which it fills a part, and `scale` is
    what its cast divides by where it narrows, and multiplies by where it widens: a number, or by device id an array
    that broadcasts to the wider tile. Raises `TileError` for tiles that do not fit the source.

    >>> import numpy as np, reshard as rs
    >>> mesh = rs.Mesh(x=2)
    >>> plan = rs.plan(rs.Layout.parse("int64[{x}2]", mesh), rs.Layout.parse("int64[4]", mesh))
    >>> rs.simulate(plan, {0: np.array([0, 1]), 1: np.array([2, 3])})[1]
    array([0, 1, 2, 3])
    """
    padded = checked_flag(padded, "padded")
    if isinstance(plan, Plan):
        program, given = lower_plan(plan), _source_tiles(plan.source, tiles)
        # A plan that fills part of its target needs the target's tiles, and no other may be given any.
        wanted = plan.view is not None and plan.view.into
        if wanted != (into is not None):
            need = (
                "fills part of the target: give the target's tiles with into=" if wanted else "fills all of the target"
            )
            raise TileError(f"the move {plan.source} -> {plan.target} {need}; got into={quoted(into)}")
        moved = run(
            program,
            given,
            memory,
            Extras(_existing_tiles(plan, into) if wanted else {}, _scales_by_device(plan, scale)),
        )
        return moved if padded else _trim_padding(plan, moved)
    if not isinstance(plan, TreePlan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"{quoted(plan)} is a {type(plan).__name__}, not a plan; give what reshard.plan() returns")
    if into is not None or scale is not None:
        raise TileError("into and scale are of one move: run the plan of its name alone, tree.plans[name]")
    live = _tiles_by_name(plan, tiles)
    account = begin_account("uint8", memory)  # Arrays differ in dtype, so that bytes are counted.
    for name, one in plan.plans.items():
        _take_tiles(InBytes(one.source.dtype, account), live[name])
    for batch in plan.batches:
        in_bytes = InBytes(batch.plans[0].source.dtype, account)
        results = _run_launches(lower_batch(batch), [live[name] for name in batch.names], in_bytes)
        account.launches += in_bytes.launches
        live.update(zip(batch.names, results, strict=True))
    return live if padded else {name: _trim_padding(plan.plans[name], moved) for name, moved in live.items()}


def _trim_padding(plan: Plan, moved: Tiles) -> Tiles:
    return {device: without_padding(plan.target, device, tile) for device, tile in moved.items()}


def _tiles_by_name(tree: TreePlan, tiles: object) -> dict[str, Tiles]:
    """The tiles of all arrays with padding, each by device; errors name the array."""
    if not isinstance(tiles, Mapping):
        raise TileError(f"tiles are a {type(tiles).__name__}; give a dict with the tiles of each array, by its name")
    given = cast("Mapping[str, object]", tiles)
    missing = (name for name in tree.names if name not in given)
    unknown = (name for name in given if name not in tree.plans)
    wrong = list(itertools.islice(itertools.chain(missing, unknown), 4))
    if wrong:
        raise TileError(
            f"tiles are given for {len(given)} arrays, the tree has {len(tree.names)}; {quoted(wrong)} are missing "
            f"or unknown; give the tiles of each array by its name"
        )
    live: dict[str, Tiles] = {}
    for name, plan in tree.plans.items():
        source = plan.source
        try:
            padded = _source_tiles(source, given[name])
            live[name] = checked_tiles(source.mesh.devices, source.tile_shape, source.dtype, padded)
        except TileError as error:
            raise TileError(f"{name}: {error}") from None
    return live


def _source_tiles(source: Layout, tiles: object) -> Tiles:
    """The tiles of a source with padding, given with or without it."""
    shapes = {device: (source.tile_shape, source.tile_shape_of(device)) for device in source.mesh.devices}
    return {device: with_padding(source, device, tile) for device, tile in tile_per_device(shapes, tiles).items()}
