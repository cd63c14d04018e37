"""A whole program on one tile: its instructions one after another, each by the function of its kind."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from reshard.errors import PlanError
from reshard.lower.exchange_in_place import ExchangeInPlace
from reshard.lower.part_loops import joined
from reshard.lower.program import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    InParts,
    Instruction,
    Permute,
    Plain,
    Program,
    ReduceScatter,
    Slice,
    SplitSum,
)
from reshard.lower.to_shard_map import collectives
from reshard.lower.to_shard_map.exchange import exchange
from reshard.lower.to_shard_map.exchange_in_place import exchange_in_place
from reshard.lower.to_shard_map.parts import PartLoop
from reshard.lower.to_shard_map.parts_in_place import PartsInPlace
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.views import ALONE, Beside, run_view
from reshard.lower.views import VIEW_INSTRUCTIONS

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
