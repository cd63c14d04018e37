"""A move to other devices in parts: each is gathered on the target's devices while the next one crosses.

    source's devices      take 0  take 1          take 2          take 3
    between the two               messages 0      messages 1      messages 2      messages 3
    target's devices                              gather 0, put   gather 1, put   gather 2, put

JAX starts programs and copies and does not wait for them. Part c + 1 is started right after the gather of part c, and
the one after it once that gather is done: a device has two parts at once beside its tile. Copies between devices of one
process run beside programs on accelerators; between processes a crossing is a program of its own on the target's
devices, and on CPUs it is the same memory, so neither has anything to overlap.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from reshard.errors import LayoutError
from reshard.jax.crossing.plans import layout_on, numbered
from reshard.jax.crossing.stages import StagedExchange, flat, run_stages, stack_shape, stack_spec, stacked, staged
from reshard.jax.crossing.transports import InProcess
from reshard.jax.starting import started
from reshard.lower import lower_plan
from reshard.lower.program import Exchange
from reshard.runtime import on_jax
from reshard.synth import Network, overlapped
from reshard.types.layout import Layout
from reshard.types.pipeline import Pipeline
from reshard.types.plan import Plan, StepSpec, chain
from reshard.types.rules.parts import Cut


@lru_cache(maxsize=1024)
def pipeline_across(
    source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], dtype: str, network: Network | str | None
) -> Pipeline | None:
    """The pipeline of least predicted seconds on a network that a caller gives; None if there is none."""
    if not isinstance(network, Network):
        return None
    numbers = numbered(source.mesh, target.mesh)
    near, far = layout_on(numbers, source, shape, dtype), layout_on(numbers, target, shape, dtype)
    return overlapped(near, far, network)


def run_pipeline(
    pipeline: Pipeline, source: NamedSharding, target: NamedSharding, donate: bool
) -> Callable[[jax.Array], jax.Array]:
    """The compiled move; it deletes a donated source."""
    whole, each = pipeline.plan, pipeline.each
    far, after = each.steps[0].result, each.steps[1:]
    meshes = flat(source.mesh), flat(target.mesh)
    dtype = jnp.dtype(whole.source.dtype)
    crossing = _crossing(each, meshes, list(numbered(source.mesh, target.mesh)), dtype)
    gather, sharding = on_jax.from_stack(far, after, target.mesh, target)
    take, put = _take(pipeline, meshes[0]), _put(pipeline, meshes[1])
    stack = NamedSharding(meshes[1], stack_spec(whole.target))
    start = jax.jit(lambda: jnp.zeros(stack_shape(whole.target), dtype), out_shardings=stack)

    def moved(x: jax.Array) -> jax.Array:
        near = stacked(_shards(x), meshes[0], whole.source, dtype)
        goal, arriving = started(start), _crossed(crossing, started(take, near, np.int32(0)))
        for number in range(pipeline.parts):
            tiles = jax.make_array_from_single_device_arrays(stack_shape(far), sharding, _shards(arriving))
            part = stacked(_shards(started(gather, tiles)), meshes[1], each.target, dtype)
            goal = started(put, goal, part, np.int32(number))
            del part, tiles
            if number + 1 < pipeline.parts:
                arriving = _crossed(crossing, started(take, near, np.int32(number + 1)))
            elif donate:
                _delete(near, x)
            _wait(goal)
        return jax.make_array_from_single_device_arrays(whole.target.shape, target, _shards(goal), dtype=dtype)

    return moved


def _crossing(each: Plan, meshes: tuple[JaxMesh, JaxMesh], devices: list[Any], dtype: Any) -> StagedExchange:
    """The first step of a part in messages, whole tiles too."""
    result = each.steps[0].result
    (step,) = lower_plan(chain(each.source, result, [StepSpec("exchange", result)], donate=True)).instructions
    if not isinstance(step, Exchange):
        raise LayoutError(f"{each.source} -> {result} does not go in messages; report this")
    return staged(step, each.source, result, meshes, InProcess(meshes, devices), dtype)


def _crossed(exchange: StagedExchange, part: jax.Array) -> Any:
    """The tiles of a part on the target's devices, under way; the part is freed once it is packed."""
    return run_stages(exchange, part, donate=True)


def _wait(goal: jax.Array) -> None:
    goal.block_until_ready()


def _take(pipeline: Pipeline, mesh: JaxMesh) -> Callable[..., jax.Array]:
    """The program that cuts a part, of a given number, out of the tiles of the source."""
    cut, _ = pipeline.cuts
    before, after = pipeline.plan.source, pipeline.each.source

    def take(tile: jax.Array, number: jax.Array) -> jax.Array:
        part = lax.dynamic_index_in_dim(tile.reshape(_opened(before, cut)), number, cut.axis + 1, keepdims=False)
        return part.reshape(after.tile_shape)

    specs = (stack_spec(before), PartitionSpec())
    return jax.jit(jax.shard_map(take, mesh=mesh, in_specs=specs, out_specs=stack_spec(after), check_vma=False))


def _put(pipeline: Pipeline, mesh: JaxMesh) -> Callable[..., jax.Array]:
    """The program that writes a part, of a given number, into the tiles of the target, in place."""
    _, cut = pipeline.cuts
    goal = pipeline.plan.target

    def put(tile: jax.Array, part: jax.Array, number: jax.Array) -> jax.Array:
        opened = tile.reshape(_opened(goal, cut))
        fitting = part.reshape((*opened.shape[: cut.axis + 1], *opened.shape[cut.axis + 2 :]))
        return lax.dynamic_update_index_in_dim(opened, fitting, number, cut.axis + 1).reshape(tile.shape)

    specs = (stack_spec(goal), stack_spec(pipeline.each.target), PartitionSpec())
    run = jax.shard_map(put, mesh=mesh, in_specs=specs, out_specs=stack_spec(goal), check_vma=False)
    return jax.jit(run, donate_argnums=0)


def _opened(layout: Layout, cut: Cut) -> tuple[int, ...]:
    """The shape of a tile with its cut axis in three: outer, parts, inner."""
    tile = layout.tile_shape
    return (*tile[: cut.axis], cut.outer, cut.parts, cut.inner, *tile[cut.axis + 1 :])


def _shards(x: jax.Array) -> list[jax.Array]:
    return [shard.data for shard in x.addressable_shards]


def _delete(*arrays: jax.Array) -> None:
    for x in arrays:
        if not x.is_deleted():
            x.delete()
