"""Moves whose source is unknown while they are traced: planned when XLA's partitioner compiles the program.

`custom_partitioning` calls back with the sharding that propagation gave the array. XLA has this hook on CPU and GPU,
but not on TPU (jax-ml/jax#38196). A whole program under `reshard.jax.jit` does not need it: the pass sees every move.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding

from reshard.errors import LayoutError
from reshard.jax.request import ReshardRequest, plan_request
from reshard.lower import lower_plan
from reshard.lower.to_shard_map import tile_function
from reshard.runtime import on_jax


def check_platforms(platforms: Sequence[str], request: ReshardRequest, shape: tuple[int, ...]) -> None:
    """Raises `LayoutError` on a platform whose partitioner has no hook."""
    if "tpu" in platforms:
        raise LayoutError(
            f"redistribute to {request.target.spec} on mesh {dict(request.target.mesh.shape)}, array of shape {shape}: "
            f"its source sharding is not known under jit with auto axes, and XLA on TPU cannot be asked for it; give "
            f"source=, use explicit axes, or compile the program with reshard.jax.jit"
        )


def has_hook(axis_context: Any) -> bool:
    """Whether the hook is told the mesh of the program that is lowered, without which it cannot name a sharding.

    It is not if nothing in the program is on a mesh yet: its arrays are made where the constraints want them.
    """
    return getattr(axis_context, "abstract_mesh", None) is not None or not hasattr(axis_context, "abstract_mesh")


def moved_by_partitioner(x: jax.Array, request: ReshardRequest) -> jax.Array:
    """The move, to be traced; it is planned when the partitioner knows the array's sharding."""
    return _hook(request, x.ndim)(x)


@lru_cache(maxsize=1024)
def _hook(request: ReshardRequest, rank: int) -> Any:
    """An identity function whose partitioning is the move; one per rank, because its sharding rule names each dim."""

    @custom_partitioning
    def move(x: Any) -> Any:
        return x

    def infer(mesh: Any, operands: Any, result: Any) -> NamedSharding:
        return NamedSharding(mesh, request.target.spec)

    def partition(mesh: Any, operands: Any, result: Any) -> tuple[Any, Any, NamedSharding, tuple[NamedSharding]]:
        target = NamedSharding(mesh, request.target.spec)
        run, source = _tile_move(request, operands[0], target)
        return mesh, run, target, (source,)

    before = " ".join(f"i{at}" for at in range(rank))
    after = " ".join(f"o{at}" for at in range(rank))
    # "i0 i1 -> o0 o1": different factors on both sides, so that the operand's sharding never becomes the result's.
    move.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=f"{before} -> {after}")
    return move


def _tile_move(request: ReshardRequest, operand: Any, target: NamedSharding) -> tuple[Any, NamedSharding]:
    """The function that each device runs on its tile, and the source sharding that it requires.

    Uneven arrays are left to XLA, because its hook hands over tiles that it cannot cut evenly.
    """
    source = operand.sharding
    if isinstance(source, NamedSharding) and source.mesh.shape == target.mesh.shape:
        source = NamedSharding(target.mesh, source.spec)
        plan = plan_request(replace(request, source=source, target=target), operand.shape, operand.dtype.name)
        if plan.source.even and plan.target.even:
            return tile_function(lower_plan(plan), on_jax.free_axes(target.mesh).axes), source
    return _unchanged, target


def _unchanged(tile: jax.Array) -> jax.Array:
    return tile
