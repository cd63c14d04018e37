"""Moves whose source is not known when they are traced: planned while XLA's partitioner compiles.

`custom_partitioning` calls back with the sharding that propagation found. It is there on CPU and GPU; on
TPU it is not (jax-ml/jax#38196), and in a whole program under `reshard.jax.jit` it is not needed, since
there the pass sees every move.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
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


def as_jaxpr(x: Any, request: Request) -> ClosedJaxpr:
    """The move as the partitioner will see it. It must be in the program from the start: JAX tells a program
    its devices, which the hook needs, only where it finds such a primitive in it.
    """
    return jax.make_jaxpr(_hook(request, x.ndim))(jax.ShapeDtypeStruct(x.shape, x.dtype))


def moved_late(hook: ClosedJaxpr, request: Request, platforms: tuple[str, ...], x: jax.Array) -> jax.Array:
    """The move, to be traced; raises `LayoutError` on a platform without the hook."""
    if _AS_CONSTRAINTS.get():
        return jax.lax.with_sharding_constraint(x, request.target)
    if "tpu" in platforms:
        raise LayoutError(
            f"redistribute to {request.target.spec} on mesh {request.target.mesh.shape}, array of shape {x.shape}: its "
            f"source sharding is not known under jit with auto axes, and XLA on TPU cannot be asked for it; give "
            f"source=, use explicit axes, or compile the program with reshard.jax.jit"
        )
    (moved,) = jaxpr_as_fun(hook)(x)
    return jax.lax.with_sharding_constraint(moved, request.target)


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
