"""A program as the function that every device of a JAX mesh runs on its own tile.

The function is for the inside of `jax.shard_map`, manual over all `axes`: each instruction becomes one
`jax.lax` collective, an exchange one `ppermute` a round, between local slices and transposes. What differs
from device to device (which block, which box) is looked up in small tables by the device's position, so
that all devices run one program.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from reshard.errors import PlanError
from reshard.lower.exchange_in_place import ExchangeInPlace
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
)
from reshard.lower.to_shard_map import collectives
from reshard.lower.to_shard_map.exchange import exchange
from reshard.lower.to_shard_map.exchange_in_place import exchange_in_place
from reshard.lower.to_shard_map.exchange_in_place import shares_lie_in_order as shares_lie_in_order
from reshard.lower.to_shard_map.parts import run_in_parts
from reshard.lower.to_shard_map.place import Place

Array = jax.Array


def tile_function(program: Program, axes: Mapping[str, int]) -> Callable[[Array], Array]:
    """The function from a device's tile of the source to its tile of the target.

    `axes` are the mesh axes in order, sizes in devices; the program's devices are those of the mesh by
    position. Raises `PlanError` if the sizes do not multiply to the program's devices.
    """
    if math.prod(axes.values()) != len(program.devices):
        raise PlanError(f"mesh axes {dict(axes)} have {math.prod(axes.values())} devices, not {len(program.devices)}")

    def run(tile: Array) -> Array:
        place = Place(program.devices, axes)
        for instruction, shape in zip(program.instructions, program.tile_shapes, strict=True):
            tile = _run(instruction, place, tile, shape)
        return tile

    return run


def _run(instruction: Instruction, place: Place, tile: Array, shape: Sequence[int]) -> Array:
    if not isinstance(instruction, InParts):
        return _RUN[type(instruction)](instruction, place, tile, shape)
    each = instruction.each

    def one(part: Array, part_shape: Sequence[int]) -> Array:
        return _RUN[type(each)](each, Place(place.devices, place.axes), part, part_shape)  # traced anew in the loop

    return run_in_parts(instruction, one, tile, shape)


_RUN: dict[type[Plain], Callable[[Any, Place, Array, Sequence[int]], Array]] = {
    Slice: collectives.slice_,
    AllGather: collectives.all_gather,
    AllToAll: collectives.all_to_all,
    ReduceScatter: collectives.reduce_scatter,
    AllReduce: collectives.all_reduce,
    Permute: collectives.permute,
    Exchange: exchange,
    ExchangeInPlace: exchange_in_place,
}
