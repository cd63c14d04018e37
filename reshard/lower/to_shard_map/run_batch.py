"""A batch on one device's tiles: each launch moves the packed blocks of all arrays."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from reshard.errors import PlanError
from reshard.lower.batch import BatchProgram, Joint, JointExchange, PackedCollective
from reshard.lower.program import Instruction
from reshard.lower.to_shard_map.exchange import joint_exchange
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.run_program import run_instruction
from reshard.lower.to_shard_map.tiles import blocks_of, closed
from reshard.lower.to_shard_map.views import run_view
from reshard.lower.views import VIEW_INSTRUCTIONS
from reshard.types.rules.tile_view import TileView

Array = jax.Array
Shapes = Sequence[Sequence[int]]


def batch_function(program: BatchProgram, axes: Mapping[str, int]) -> Callable[..., tuple[Array, ...]]:
    """The function from a device's tiles of the sources to its tiles of the targets; `axes` as in `tile_function`.

    >>> from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
    >>> import reshard as rs
    >>> from reshard.lower.batch import lower_batch
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
                tiles = tuple(_run(joint, place, tiles, shapes))
        return tiles

    return run


def _run_alone(step: Instruction, place: MeshPlace, tile: Array, shape: Sequence[int]) -> Array:
    if isinstance(step, VIEW_INSTRUCTIONS):
        return run_view(step, place, tile, shape)
    return run_instruction(step, place, tile, shape)


def _run(joint: Joint, place: MeshPlace, tiles: Sequence[Array], shapes: Shapes) -> list[Array]:
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
