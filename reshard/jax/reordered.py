"""Moves with a view between meshes that list the same devices in another order, such as a transposed one.

    source on devices 0 1 2 3   the steps, one program on this mesh      a stack of the target's tiles
    target on devices 3 1 2 0   the tiles are its shards as they are     the result

A jitted program has one order of devices, so the steps run on the source's mesh. What they read by the target's tiles,
the array of which a part is filled and the scale of a cast at the end, is handed to it as shards in the same way.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding

from reshard.errors import MeshError
from reshard.jax import placement
from reshard.jax.starting import started
from reshard.lower.to_shard_map import scales
from reshard.runtime import on_jax
from reshard.types.layout import Layout
from reshard.types.plan import Plan


@lru_cache(maxsize=1024)
def reordered_program(whole: Plan, source: NamedSharding, target: NamedSharding) -> Callable[..., jax.Array]:
    """The compiled move; beside the array it takes the array of which a part is filled, and the scale of a cast.

    The scale is on all devices of the source's mesh if the first step casts, else of the target's.
    """
    mesh = source.mesh
    if not isinstance(mesh, JaxMesh):
        raise MeshError(f"the source's mesh {dict(mesh.shape)} has no devices; give a NamedSharding on a mesh of them")
    run = on_jax.to_stack(whole.source, whole.steps, mesh)
    first = on_jax.narrows(whole.steps)
    goal = whole.target
    scalar = not goal.shape

    def stack_of(x: jax.Array, tile: tuple[int, ...]) -> jax.Array:
        """The shards of an array on the target's mesh as a stack on the source's."""
        shape = (goal.mesh.size * tile[0], *tile[1:]) if tile else ()
        sharding = NamedSharding(mesh, on_jax.stack_spec(mesh, goal))
        return jax.make_array_from_single_device_arrays(shape, sharding, _shards(x), dtype=x.dtype)

    def moved(x: jax.Array, into: jax.Array | None = None, scale: jax.Array | None = None) -> jax.Array:
        tiles: dict[str, jax.Array] = {}
        if into is not None:
            tiles["into"] = stack_of(into, goal.tile_shape)
        if scale is not None and not first:
            parts = _by_tiles(scale, goal, target)
            tiles["scale"] = stack_of(parts, () if scalar else parts.sharding.shard_shape(parts.shape))
        stack = started(run, x, scale if first else None, tiles)
        return jax.make_array_from_single_device_arrays(goal.shape, target, _shards(stack), dtype=stack.dtype)

    return moved


def _by_tiles(scale: jax.Array, layout: Layout, target: NamedSharding) -> jax.Array:
    """The scale of the target's elements, which is on all its devices, each with its part."""
    blocks, held = scales.spread(scale, layout, target.spec)
    return jax.jit(jnp.asarray, out_shardings=NamedSharding(placement.of_auto_axes(target.mesh), held))(blocks)


def _shards(x: Any) -> list[jax.Array]:
    return [shard.data for shard in x.addressable_shards]
