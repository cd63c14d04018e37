"""What a move must do, for `benchmarks/fuzz.py`: tiles, bytes and memory worked out from `Given` alone.

Nothing of `reshard.types`, `synth` or `lower` is used to compute it. Every element carries its own mark; a partial
array is made of random summands that combine to the marks.
"""

from __future__ import annotations

import math
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np

import reshard as rs
from benchmarks.fuzz_layouts import Digits, Factor, Given, Grid, Indices, Table, meant
from reshard.lower import Program
from reshard.lower import program as instructions
from reshard.lower.exchange_rounds import ExchangeInPlace

BITS = {"int4": 4, "uint8": 8, "bfloat16": 16, "int32": 32, "float32": 32, "int64": 64}
COMBINE = {"sum": np.add, "product": np.multiply, "max": np.maximum, "min": np.minimum}


class WrongError(Exception):
    """What the package did is wrong; the text says how."""


def must(holds: object, text: str, *values: object) -> None:
    """Raises `WrongError` unless something holds. The text is formatted only then: printing arrays takes long."""
    if not holds:
        raise WrongError(text.format(*values))


def marks(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """The array of which every move is made: an own value for each element, as far as the dtype has so many."""
    count = math.prod(shape)
    flat = np.arange(1, count + 1)
    if dtype.itemsize == 1 or dtype.name == "bfloat16":  # int4: 0 to 7; the others hold whole numbers up to 127.
        flat = flat * 37 % (8 if dtype.name == "int4" else 127)
    return flat.reshape(shape).astype(dtype)


def summands(choose: random.Random, whole: np.ndarray, count: int, reduction: str) -> list[np.ndarray]:
    """Arrays that combine to the whole one."""
    numpy_random = np.random.default_rng(choose.getrandbits(32))

    def noise(low: int, high: int) -> np.ndarray:
        return numpy_random.integers(low, high, whole.shape).astype(whole.dtype)

    if reduction == "sum":
        rest = [noise(-9, 9) for _ in range(count - 1)]
        parts = [whole - sum(rest, np.zeros_like(whole)), *rest]
    elif reduction == "product":
        signs = [noise(0, 2) * 2 - 1 for _ in range(count - 1)]
        parts = [reduce(np.multiply, signs, whole), *signs]
    else:
        worse = -1 if reduction == "max" else 1
        winner = noise(0, count)
        parts = [np.where(winner == n, whole, whole + worse * noise(1, 9)) for n in range(count)]
    choose.shuffle(parts)
    return [part.astype(whole.dtype) for part in parts]


def fitted(indices: Indices, tile: tuple[int, ...]) -> Indices:
    """The indices along a tile of this shape, without the rounds that hold no element and that the package drops."""
    must(len(indices) == len(tile), "tiles of rank {}, not {}", len(tile), len(indices))
    for index, extent in zip(indices, tile, strict=True):
        if len(index) != extent:
            must((index[extent:] == -1).all(), "a tile of {} is too small for {}", extent, index)
            must(len(index) >= extent, "a tile of {} is too large for {}", extent, index)
    return tuple(index[:extent] for index, extent in zip(indices, tile, strict=True))


def cut(whole: np.ndarray, indices: Indices, padding: int = 3) -> np.ndarray:
    """The tile of these indices, padded with a value of its own."""
    tile = np.full([len(index) for index in indices], padding, whole.dtype)
    here = np.ix_(*(np.flatnonzero(index >= 0) for index in indices))
    tile[here] = whole[np.ix_(*(index[index >= 0] for index in indices))]
    return tile


def source_tiles(
    choose: random.Random, source: Given, tile: tuple[int, ...], whole: np.ndarray
) -> dict[int, np.ndarray]:
    """Every device's tile of the array."""
    count = len(source.groups[0])
    parts = summands(choose, whole, count, source.reduction or "sum") if count > 1 else [whole]
    place = {device: number for group in source.groups for number, device in enumerate(group)}
    return {d: cut(parts[place[d]], fitted(source.indices[d], tile)) for d in source.indices}


def check_tiles(target: Given, tile: tuple[int, ...], whole: np.ndarray, tiles: Mapping[int, np.ndarray]) -> None:
    """Raises `WrongError` unless the tiles are the target's of the array; padding is not looked at."""
    must(set(tiles) == set(target.indices), "tiles of devices {}", sorted(tiles))
    for device, array in tiles.items():
        must(array.shape == tile and array.dtype == whole.dtype, "device {}: {} {}", device, array.dtype, array.shape)
    for group in target.groups:
        total = reduce(COMBINE[target.reduction or "sum"], [tiles[device] for device in group])
        indices = fitted(target.indices[group[0]], tile)
        here = np.ix_(*(np.flatnonzero(index >= 0) for index in indices))
        wanted = whole[np.ix_(*(index[index >= 0] for index in indices))]
        must(np.array_equal(total[here], wanted), "device {} has {}, not {}", group[0], total[here], wanted)


def needed(source: Given, target: Given) -> int:
    """The most elements that a device of the target lacks; the indices of a tile are a product of those of its dims."""
    most = 0
    for device, wanted in target.indices.items():
        here = [set(index[index >= 0].tolist()) for index in wanted]
        there = [set(index[index >= 0].tolist()) for index in source.indices[device]]
        shared = math.prod(len(a & b) for a, b in zip(here, there, strict=True))
        most = max(most, math.prod(map(len, here)) - shared)
    return most


def own(layout: rs.Layout) -> Given:
    """A layout that the package made, by its digits."""
    grid = Grid(dict(layout.mesh.axes), layout.mesh.devices)
    dims: list[Digits] = []
    for dim in layout.dims:
        digits = [(d.radix, None if d.axis is None else Factor(*d.axis)) for d in dim.digits]
        if dim.pieces is not None:
            owners = np.repeat(np.asarray(dim.pieces.numbers), np.asarray(dim.pieces.lengths))
            dims.append(Table([factor for _, factor in digits if factor is not None], owners))
        else:
            dims.append(digits)
    partial = [Factor(*axis) for axis in layout.partial]
    return meant(grid, layout.shape, dims, partial, layout.reduction, "", lambda: layout)


def check_figures(plan: rs.Plan) -> None:
    """Compares each step's figures with what its two layouts say."""
    bits = BITS[plan.source.dtype]
    given = [own(plan.source), *(own(step.result) for step in plan.steps)]
    for step, before, after in zip(plan.steps, given, given[1:], strict=False):
        sizes = [-(-math.prod(lay.tile_shape) * bits // 8) for lay in (step.operand, step.result)]
        kept = 0 if plan.donate or step is plan.steps[0] else plan.source.tile_bytes
        live = kept + (max(sizes) if step.mode.in_place else sum(sizes))
        must(step.live_bytes >= live, "{} has {} B live, and says {}", step.kind, live, step.live_bytes)
        if (before.factors, before.reduction) == (after.factors, after.reduction) and (
            not before.factors or step.operand.mesh == step.result.mesh
        ):
            lacked = -(-needed(before, after) * bits // 8)
            must(step.received_bytes >= lacked, "{} needs {} B, and says {}", step.kind, lacked, step.received_bytes)


def wire(program: Program) -> dict[int, int]:
    """The elements that each device receives, counted from the program's lists."""
    received: Counter[int] = Counter()
    sizes = [math.prod(program.tile_shape), *(math.prod(shape) for shape in program.tile_shapes)]
    for instruction, tile in zip(program.instructions, sizes, strict=False):
        parts = 1
        if isinstance(instruction, instructions.InParts):
            parts, instruction = instruction.take.parts, instruction.each
        _count(instruction, tile // parts, parts, received)
    return received


def _count(instruction: Any, tile: int, parts: int, received: Counter[int]) -> None:
    packed = math.prod(instruction.send.padded) if hasattr(instruction, "send") else tile
    each: dict[type, Callable[[int], int]] = {
        instructions.AllGather: lambda k: (k - 1) * tile,
        instructions.AllToAll: lambda k: packed - packed // k,
        instructions.ReduceScatter: lambda k: packed - packed // k,
        instructions.AllReduce: lambda k: -(-2 * (k - 1) * tile // k),
    }
    if type(instruction) in each:
        for group in instruction.groups:
            for device in group:
                received[device] += parts * each[type(instruction)](len(group))
    elif isinstance(instruction, instructions.Permute):
        received.update({to: parts * tile for sender, to in instruction.pairs if sender != to})
    elif isinstance(instruction, instructions.Exchange):
        for transfer in (t for turn in instruction.rounds for t in turn):
            elements = sum(math.prod(extent for extent, _, _ in block.axes) for block in transfer.blocks)
            received[transfer.receiver] += 0 if transfer.sender == transfer.receiver else parts * elements
    elif isinstance(instruction, ExchangeInPlace):
        for slot in (t for turn in instruction.rounds for t in turn):
            received[slot.receiver] += 0 if slot.sender == slot.receiver else slot.length


def traced(run: Callable[[], Any]) -> int:
    """The most bytes that Python's allocator had given out during a call, beyond those before it."""
    tracemalloc.start(1)
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
