"""A program on a device's tiles: its launches one after another, each of one array's instruction or of several joined.

A loop runs steps in parts that share one; everything else is one `jax.lax` collective a launch, between local slices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from reshard.errors import LayoutError, PlanError
from reshard.lower.exchange_rounds import ExchangeInPlace
from reshard.lower.program import (
    AllToAll,
    CastTiles,
    Exchange,
    InParts,
    Instruction,
    PackedCollective,
    Plain,
    Program,
    PutPart,
    Reorder,
    TakePart,
    join_launches,
)
from reshard.lower.to_shard_map.part_loops import group_instructions, run_part_loop, run_parts_in_place
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.run_collectives import run_collective
from reshard.lower.to_shard_map.run_exchange import run_exchange, run_exchange_in_place
from reshard.lower.to_shard_map.tile_memory import choose_memory_order, fix_layout, join_blocks, number_blocks
from reshard.types import dtypes
from reshard.types.layout import Layout

Array = jax.Array
Shapes = Sequence[Sequence[int]]


class Beside(NamedTuple):
    """What a program needs beside the source's tile: the target's, of which it fills a part, and a cast's scale."""

    into: Array | None = None
    scale: Array | None = None


ALONE = Beside()


def tile_function(program: Program, axes: Mapping[str, int]) -> Callable[..., Array]:
    """The function from a device's tile of the source to its tile of the target.

    A program that fills part of its target, or casts by a scale, takes these `Beside` the tile.

    `axes` are the mesh axes in order, with their sizes; the n-th device of the program is the n-th of the mesh.
    Raises `PlanError` if the sizes do not multiply to the number of the program's devices.

    >>> from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
    >>> from reshard.lower import lower_plan
    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> rows, columns = (Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}2, 4]", "f32[4, {x}2]"))
    >>> tile = tile_function(lower_plan(plan(rows, columns)), {"x": 2})
    >>> mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    >>> moved = jax.shard_map(tile, mesh=mesh, in_specs=P("x"), out_specs=P(None, "x"), check_vma=False)
    >>> "all_to_all" in str(jax.make_jaxpr(moved)(jax.ShapeDtypeStruct((4, 4), "float32")))
    True
    """
    tiles = batch_function([program], axes)

    def run(tile: Array, beside: Beside = ALONE) -> Array:
        return tiles(tile, beside=beside)[0]

    return run


def batch_function(
    programs: Sequence[Program], axes: Mapping[str, int], platform: str | None = None
) -> Callable[..., tuple[Array, ...]]:
    """The function from a device's tiles of the sources to its tiles of the targets; `axes` as in `tile_function`, and
    `platform` that of the devices, if it is known.

    >>> from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
    >>> import reshard as rs
    >>> from reshard.lower.program import lower_batch
    >>> rows, whole = (rs.Layout.parse(text, rs.Mesh(x=2)) for text in ("f32[{x}2]", "f32[4]"))
    >>> batch = rs.plan_tree({"a": (rows, whole), "b": (rows, whole)}).batches[0]
    >>> mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    >>> tiles = batch_function(lower_batch(batch), {"x": 2})
    >>> moved = jax.shard_map(tiles, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    >>> str(jax.make_jaxpr(moved)(*[jax.ShapeDtypeStruct((4,), "float32")] * 2)).count("all_gather[")
    1
    """
    devices = programs[0].devices
    if math.prod(axes.values()) != len(devices):
        raise PlanError(f"mesh axes {dict(axes)} have {math.prod(axes.values())} devices, not {len(devices)}")
    joint_launches = join_launches(programs)
    # Steps in parts share loops where one array moves alone; those of several arrays go launch by launch.
    alone = len(programs) == 1
    launches = group_instructions(programs[0].instructions) if alone else [[at] for at in range(len(joint_launches))]

    def run(*tiles: Array, beside: Beside = ALONE) -> tuple[Array, ...]:
        place = MeshPlace(devices, axes, platform=platform)
        for numbers in launches:
            joint = joint_launches[numbers[0]]
            shapes = [[each.tile_shapes[at] for at in numbers] for each in programs]
            if joint is None:
                steps = [[each.instructions[at] for at in numbers] for each in programs]
                each = zip(steps, tiles, shapes, strict=True)
                tiles = tuple(_run_alone(together, place, tile, after, beside) for together, tile, after in each)
                # Joined before the next step: libtpu would send blocks on in an order that it rearranges twice.
                if numbers[-1] + 1 < len(joint_launches) and any(isinstance(step[0], AllToAll) for step in steps):
                    tiles = tuple(fix_layout(tile, choose_memory_order(tile.shape, tile.dtype.name)) for tile in tiles)
            elif isinstance(joint, PackedCollective):
                tiles = _run_packed_collective(joint, place, tiles, [after for (after,) in shapes])
            else:
                tiles = tuple(run_exchange(joint, place, tiles, [after for (after,) in shapes]))
        return tiles

    return run


def _run_alone(steps: Sequence[Instruction], place: MeshPlace, tile: Array, shapes: Shapes, beside: Beside) -> Array:
    """The tile of one array after an instruction, or after several in parts that share a loop."""
    step, shape = steps[0], tuple(shapes[0])
    fills = isinstance(step, PutPart) or (isinstance(step, Exchange) and step.fills)
    if fills and beside.into is None:
        raise PlanError("the move fills part of its target: give the target's array")
    match step:
        case InParts(in_place=True):
            return run_parts_in_place(step, shape, place, partial(run_plain, in_part=True), tile)
        case InParts():
            in_parts = [each for each in steps if isinstance(each, InParts)]
            return run_part_loop(in_parts, shapes, place, partial(run_plain, in_part=True), tile)
        case Exchange(dtype=str()) if beside.scale is not None:
            return _exchange_and_scale(step, place, tile, shape, beside.scale, beside.into)
        case Exchange(viewed=True):
            return run_exchange([step], place, [tile], [shape], into=beside.into)[0]
        case Reorder(order=order):
            return tile.reshape(order.digits).transpose(order.order).reshape(shape)
        case TakePart(spans=spans):
            return lax.slice(tile, [start for start, _ in spans], [start + extent for start, extent in spans])
        case PutPart(spans=spans):
            into = jnp.asarray(beside.into).reshape(shape)
            return lax.dynamic_update_slice(into, tile, [start for start, _ in spans])
        case CastTiles(dtype=dtype):
            if beside.scale is None:
                return tile.astype(dtype)
            # A scale belongs to the narrow side: what becomes narrow is divided by it before it is rounded, and what
            # becomes wide is multiplied after.
            scale = expand_scale(beside.scale, shape)
            if is_narrower(dtype, tile):
                return (tile / scale.astype(tile.dtype)).astype(dtype)
            return tile.astype(dtype) * scale.astype(dtype)
        case _:
            return run_plain(step, place, tile, shape)


def is_narrower(dtype: str, tile: Array) -> bool:
    """Whether a cast to a dtype narrows a tile."""
    return dtypes.bits(dtype) < dtypes.bits(tile.dtype.name)


def _exchange_and_scale(
    step: Exchange, place: MeshPlace, tile: Array, shape: tuple[int, ...], scale: Array, into: Array | None
) -> Array:
    """The tile after an exchange that casts, divided before or multiplied after by the scale of the wider tile.

    What a part of a target is filled with is scaled, and nothing around it: where that is, marks say.
    """
    if is_narrower(str(step.dtype), tile):
        tile = tile / expand_scale(scale, tile.shape).astype(tile.dtype)
        return run_exchange([step], place, [tile], [shape], into=into)[0]
    alone = replace(step, fills=False)
    moved = run_exchange([alone], place, [tile], [shape])[0]
    moved = moved * expand_scale(scale, shape).astype(moved.dtype)
    if into is None or not step.fills:
        return moved
    marks = run_exchange([replace(alone, dtype=None)], place, [jnp.ones_like(tile, bool)], [shape])[0]
    return jnp.where(marks, moved, into.reshape(shape))


def run_plain(step: Plain, place: MeshPlace, tile: Array, shape: Sequence[int], in_part: bool = False) -> Array:
    """The tile, or a part of one, after an instruction that moves it whole."""
    if isinstance(step, Exchange):
        return run_exchange([step], place, [tile], [shape], in_part=in_part)[0]
    if isinstance(step, ExchangeInPlace):
        return run_exchange_in_place(step, place, tile, shape)
    return run_collective(step, place, tile, shape)


def _run_packed_collective(
    joint: PackedCollective, place: MeshPlace, tiles: Sequence[Array], shapes: Shapes
) -> tuple[Array, ...]:
    """The tiles after one collective: blocks of the same number lie side by side, number after number.

    Where a collective has no views, whole tiles do.
    """
    if joint.send:
        blocks = [
            number_blocks(view, tile).reshape(view.count, -1) for view, tile in zip(joint.send, tiles, strict=True)
        ]
        packed = jnp.concatenate(blocks, axis=1).reshape(-1)
    else:
        packed = jnp.concatenate([tile.reshape(-1) for tile in tiles])
    views = joint.receive
    size = sum(view.elements for view in views) or packed.size
    packed = run_collective(joint.packed, place, packed, (size,))
    sizes = [view.elements // view.count for view in views] or [math.prod(shape) for shape in shapes]
    rows = packed.reshape(views[0].count if views else 1, sum(sizes))
    ends = itertools.accumulate(sizes)
    parts = [rows[:, end - size : end] for size, end in zip(sizes, ends, strict=True)]
    moved = [join_blocks(view, part) for view, part in zip(views, parts, strict=True)] if views else parts
    return tuple(tile.reshape(tuple(shape)) for tile, shape in zip(moved, shapes, strict=True))


# The scale of a cast, beside the array that it scales: one number, or one for each channel, block or tile.
#
#     array f32[{x}4, 256] on <x=2>, shape 8 x 256
#
#     scale   shape 1 x 1      one number
#             8 x 1            one for each row
#             8 x 2            one for each 1 x 128 block
#             2 x 1            one for each tile
#
# Each dim of a scale divides that of the array, and cuts its indices into that many equal blocks. The devices that hold
# a part of the array are given the part of the scale that belongs to it, so nothing is as large as the array.


def check_scale(scale: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raises `LayoutError` for a scale of a shape that does not divide the array's, dim by dim, from the last on.

    >>> check_scale((4, 1), (8, 256))
    >>> check_scale((3, 1), (8, 256))
    Traceback (most recent call last):
    reshard.errors.LayoutError: the scale has shape (3, 1), whose dims do not divide those of an array of (8, 256)
    """
    own = shape[len(shape) - len(scale) :] if len(scale) <= len(shape) else None
    if own is None or any(blocks < 1 or size % blocks for blocks, size in zip(scale, own, strict=True)):
        raise LayoutError(f"the scale has shape {scale}, whose dims do not divide those of an array of {shape}")


def spread_scale(scale: Array, layout: Layout, spec: PartitionSpec) -> tuple[Array, PartitionSpec]:
    """The scale in blocks that the tiles of a layout divide, and the spec that gives each tile its own."""
    check_scale(scale.shape, layout.shape)
    scale = scale.reshape((1,) * (len(layout.shape) - scale.ndim) + scale.shape)
    entries = [*spec, *[None] * (len(layout.shape) - len(spec))]
    held: list[object] = []
    for at, (size, padded, tile) in enumerate(zip(layout.shape, layout.padded_shape, layout.tile_shape, strict=True)):
        blocks = scale.shape[at]
        held.append(None if blocks == 1 else entries[at])
        if blocks > 1:
            # As few as both the scale's blocks and the tiles can be cut into.
            tiles, both = padded // tile, size
            if size % tiles == 0 and blocks % tiles == 0:
                both = blocks
            elif size % tiles == 0 and tiles % blocks == 0:
                both = tiles
            scale = jnp.repeat(scale, both // blocks, axis=at)
        if blocks > 1 and padded > size:
            more = (*scale.shape[:at], padded - size, *scale.shape[at + 1 :])
            scale = jnp.concatenate([scale, jnp.ones_like(scale, shape=more)], axis=at)
    return scale, PartitionSpec(*held)


def expand_scale(scale: Array, shape: Sequence[int]) -> Array:
    """A tile's part of the scale, as an array that broadcasts to a tile of this shape."""
    for at, size in enumerate(shape):
        if 1 < scale.shape[at] < size:
            scale = jnp.repeat(scale, size // scale.shape[at], axis=at)
    return scale
