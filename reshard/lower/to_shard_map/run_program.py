"""A whole program on one tile: its instructions one after another, each by the function of its kind."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from reshard.errors import PlanError
from reshard.lower.exchange_in_place import ExchangeInPlace
from reshard.lower.program import (
    AllGather,
    AllReduce,
    AllToAll,
    BatchProgram,
    Exchange,
    InParts,
    Instruction,
    Joint,
    JointExchange,
    PackedCollective,
    Permute,
    Plain,
    Program,
    ReduceScatter,
    Slice,
    SplitSum,
)
from reshard.lower.to_shard_map import collectives, scales
from reshard.lower.to_shard_map.exchange import StridedMessages, exchange, joint_exchange, kinds_of
from reshard.lower.to_shard_map.exchange_in_place import exchange_in_place
from reshard.lower.to_shard_map.parts import PartLoop, joined
from reshard.lower.to_shard_map.parts_in_place import PartsInPlace
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.tiles import blocks_of, closed, resized
from reshard.lower.views import (
    VIEW_INSTRUCTIONS,
    CastTiles,
    PutPart,
    Reorder,
    StridedTransfer,
    TakePart,
    ViewExchange,
    ViewInstruction,
    fills,
)
from reshard.plans.rules.tile_view import TileView
from reshard.types import dtypes

Array = jax.Array


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
    if math.prod(axes.values()) != len(program.devices):
        raise PlanError(f"mesh axes {dict(axes)} have {math.prod(axes.values())} devices, not {len(program.devices)}")

    def run(tile: Array, beside: Beside = ALONE) -> Array:
        place = MeshPlace(program.devices, axes)
        for numbers in joined(program.instructions):
            steps = [program.instructions[at] for at in numbers]
            tile = _run(steps, place, tile, [program.tile_shapes[at] for at in numbers], beside)
        return tile

    return run


def _run(
    steps: Sequence[Instruction], place: MeshPlace, tile: Array, shapes: Sequence[Sequence[int]], beside: Beside
) -> Array:
    """One instruction, or several in parts that share a loop."""
    step = steps[0]
    if isinstance(step, VIEW_INSTRUCTIONS):
        return run_view(step, place, tile, shapes[0], beside)
    if isinstance(step, InParts) and step.in_place:
        return PartsInPlace(step, shapes[0], place, _on_part).on(tile)
    if isinstance(step, InParts):
        return PartLoop([step for step in steps if isinstance(step, InParts)], shapes, place, _on_part).on(tile)
    return _RUN[type(step)](step, place, tile, shapes[0])


def run_instruction(instruction: Plain | InParts, place: MeshPlace, tile: Array, shape: Sequence[int]) -> Array:
    """One instruction on a device's tile, in parts if it says so; the tile after it has this shape."""
    return _run([instruction], place, tile, [shape], ALONE)


def _on_part(step: Plain, place: MeshPlace, tile: Array, shape: Sequence[int]) -> Array:
    """One instruction on a part of a tile."""
    if isinstance(step, Exchange):
        return exchange(step, place, tile, shape, in_part=True)
    return _RUN[type(step)](step, place, tile, shape)


_RUN: dict[type[Plain], Callable[[Any, MeshPlace, Array, Sequence[int]], Array]] = {
    Slice: collectives.slice_,
    AllGather: collectives.all_gather,
    AllToAll: collectives.all_to_all,
    ReduceScatter: collectives.reduce_scatter,
    AllReduce: collectives.all_reduce,
    SplitSum: collectives.split_sum,
    Permute: collectives.permute,
    Exchange: exchange,
    ExchangeInPlace: exchange_in_place,
}


# A batch on one device's tiles: each launch moves the packed blocks of all arrays.


Shapes = Sequence[Sequence[int]]


def batch_function(program: BatchProgram, axes: Mapping[str, int]) -> Callable[..., tuple[Array, ...]]:
    """The function from a device's tiles of the sources to its tiles of the targets; `axes` as in `tile_function`.

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
    devices = program.programs[0].devices
    if math.prod(axes.values()) != len(devices):
        raise PlanError(f"mesh axes {dict(axes)} have {math.prod(axes.values())} devices, not {len(devices)}")

    def run(*tiles: Array) -> tuple[Array, ...]:
        place = MeshPlace(devices, axes)
        for number, joint in enumerate(program.joint):
            shapes = [each.tile_shapes[number] for each in program.programs]
            if joint is None:
                steps = [each.instructions[number] for each in program.programs]
                each = zip(steps, tiles, shapes, strict=True)
                tiles = tuple(_run_alone(step, place, tile, shape) for step, tile, shape in each)
            else:
                tiles = tuple(_run_instruction_batch(joint, place, tiles, shapes))
        return tiles

    return run


def _run_alone(step: Instruction, place: MeshPlace, tile: Array, shape: Sequence[int]) -> Array:
    if isinstance(step, VIEW_INSTRUCTIONS):
        return run_view(step, place, tile, shape)
    return run_instruction(step, place, tile, shape)


def _run_instruction_batch(joint: Joint, place: MeshPlace, tiles: Sequence[Array], shapes: Shapes) -> list[Array]:
    if isinstance(joint, JointExchange):
        return joint_exchange(joint, place, tiles, shapes)
    packed = _packed(joint.send, tiles)
    size = sum(view.elements for view in joint.receive) or packed.size
    return _unpacked(joint, run_instruction(joint.packed, place, packed, (size,)), shapes)


def _packed(views: Sequence[TileView], tiles: Sequence[Array]) -> Array:
    """The blocks of the same number side by side, number after number; whole tiles if there are no views."""
    if not views:
        return jnp.concatenate([tile.reshape(-1) for tile in tiles])
    blocks = [blocks_of(view, tile).reshape(view.count, -1) for view, tile in zip(views, tiles, strict=True)]
    return jnp.concatenate(blocks, axis=1).reshape(-1)


def _unpacked(joint: PackedCollective, packed: Array, shapes: Shapes) -> list[Array]:
    views = joint.receive
    sizes = [view.elements // view.count for view in views] or [math.prod(shape) for shape in shapes]
    rows = packed.reshape(views[0].count if views else 1, sum(sizes))
    ends = itertools.accumulate(sizes)
    parts = [rows[:, end - size : end] for size, end in zip(sizes, ends, strict=True)]
    tiles = [closed(view, part) for view, part in zip(views, parts, strict=True)] if views else parts
    return [tile.reshape(shape) for tile, shape in zip(tiles, shapes, strict=True)]


# The steps of a move with a view on a device's tile: reshapes, transposes, slices, casts, and exchanges of boxes.


class Beside(NamedTuple):
    """What a program needs beside the source's tile: the target's, of which it fills a part, and a cast's scale."""

    into: Array | None = None
    scale: Array | None = None


ALONE = Beside()


def run_view(
    step: ViewInstruction, place: MeshPlace, tile: Array, shape: Sequence[int], beside: Beside = ALONE
) -> Array:
    """Runs one instruction on a device's tile; the tile after it has this shape."""
    if fills(step) and beside.into is None:
        raise PlanError("the move fills part of its target: give the target's array")
    return _RUN_VIEW_INSTRUCTION[type(step)](step, place, tile, tuple(shape), beside)


def _reorder(step: Reorder, place: MeshPlace, tile: Array, shape: tuple[int, ...], beside: Beside) -> Array:
    return tile.reshape(step.order.digits).transpose(step.order.order).reshape(shape)


def _take(step: TakePart, place: MeshPlace, tile: Array, shape: tuple[int, ...], beside: Beside) -> Array:
    starts = [start for start, _ in step.spans]
    return lax.slice(tile, starts, [start + extent for start, extent in step.spans])


def _put(step: PutPart, place: MeshPlace, tile: Array, shape: tuple[int, ...], beside: Beside) -> Array:
    into = cast("Array", beside.into).reshape(shape)
    return lax.dynamic_update_slice(into, tile, [start for start, _ in step.spans])


def _cast(step: CastTiles, place: MeshPlace, tile: Array, shape: tuple[int, ...], beside: Beside) -> Array:
    if beside.scale is None:
        return tile.astype(step.dtype)
    scale = scales.of_tile(beside.scale, shape)
    if dtypes.bits(step.dtype) < dtypes.bits(tile.dtype.name):
        return (tile / scale.astype(tile.dtype)).astype(step.dtype)
    return tile.astype(step.dtype) * scale.astype(step.dtype)


def _exchange(step: ViewExchange, place: MeshPlace, tile: Array, shape: tuple[int, ...], beside: Beside) -> Array:
    flat = tile.reshape(-1)
    into = beside.into
    filled = jnp.zeros(math.prod(shape), tile.dtype) if into is None or not step.fills else into.reshape(-1)
    for kind in kinds_of(step.local):
        boxes = StridedMessages([kind], place)
        filled = boxes.put(filled, boxes.take(flat))
    for number, turn in enumerate(step.rounds):
        filled = place.after(filled) if number else filled
        filled = _turn(turn, place, flat, filled)
    return filled.reshape(shape)


def _turn(turn: Sequence[StridedTransfer], place: MeshPlace, flat: Array, filled: Array) -> Array:
    """One round: each device packs the boxes that it sends, if any, and writes those that it receives."""
    kinds = [StridedMessages([kind], place) for kind in kinds_of(turn)]
    size = (max(kind.elements for kind in kinds),)
    message = jnp.zeros(size, flat.dtype)
    for kind in kinds:
        message = lax.select(jnp.broadcast_to(kind.sends(), size), resized(kind.take(flat), size), message)
    message = place.permute(message, [(t.sender, t.receiver) for t in turn])
    for kind in kinds:
        filled = kind.put(filled, message[: kind.elements])
    return filled


_RUN_VIEW_INSTRUCTION: dict[type[ViewInstruction], Callable[..., Array]] = {
    Reorder: _reorder,
    TakePart: _take,
    PutPart: _put,
    CastTiles: _cast,
    ViewExchange: _exchange,
}
