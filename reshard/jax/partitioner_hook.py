"""Moves whose source is not known when they are traced: planned while XLA's partitioner compiles.

`custom_partitioning` calls back with the sharding that propagation found. It is there on CPU and GPU; on
TPU it is not (jax-ml/jax#38196), and in a whole program under `reshard.jax.jit` it is not needed, since
there the pass sees every move.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding

from reshard.errors import LayoutError
from reshard.jax.request import Request, plan_of
from reshard.lower import lower
from reshard.lower.to_shard_map import tile_function
from reshard.runtime import on_jax

_AS_CONSTRAINTS = ContextVar("as_constraints", default=False)


@contextmanager
def as_constraints() -> Generator[None]:
    """Moves of unknown source that are lowered in here become sharding constraints, for a pass to plan."""
    token = _AS_CONSTRAINTS.set(True)
    try:
        yield
    finally:
        _AS_CONSTRAINTS.reset(token)


def left_to_a_pass() -> bool:
    """Whether moves of unknown source are now lowered as sharding constraints."""
    return _AS_CONSTRAINTS.get()


def check_platforms(platforms: Sequence[str], request: Request, shape: tuple[int, ...]) -> None:
    """Raises `LayoutError` on a platform whose partitioner cannot be asked."""
    if "tpu" in platforms:
        raise LayoutError(
            f"redistribute to {request.target.spec} on mesh {dict(request.target.mesh.shape)}, array of shape {shape}: "
            f"its source sharding is not known under jit with auto axes, and XLA on TPU cannot be asked for it; give "
            f"source=, use explicit axes, or compile the program with reshard.jax.jit"
        )


def moved_late(x: jax.Array, request: Request) -> jax.Array:
    """The move, to be traced; planned when the partitioner says where the array is."""
    return _hook(request, x.ndim)(x)


@lru_cache(maxsize=1024)
def _hook(request: Request, rank: int) -> Any:
    """The identity, whose partitioning is the move; per rank, since the rule that XLA reads spells it out."""

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
    # Factors of their own on either side: whatever the operand's sharding is, it says nothing of the result's.
    move.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=f"{before} -> {after}")
    return move


def _tile_move(request: Request, operand: Any, target: NamedSharding) -> tuple[Any, NamedSharding]:
    """What each device runs on its tile, and the source that it is for.

    Uneven arrays are left to XLA: its hook hands over tiles that it cannot cut evenly.
    """
    source = operand.sharding
    if isinstance(source, NamedSharding) and source.mesh.shape == target.mesh.shape:
        source = NamedSharding(target.mesh, source.spec)
        plan = plan_of(replace(request, source=source, target=target), operand.shape, operand.dtype.name)
        if plan.source.even and plan.target.even:
            return tile_function(lower(plan), on_jax.free_axes(target.mesh).axes), source
    return _as_it_is, target


def _as_it_is(tile: jax.Array) -> jax.Array:
    return tile
