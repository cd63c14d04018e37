"""Runs lowered programs inside `jax.shard_map` on tiles of indices, and checks them by the oracle.

Tiles are stacked along a new first dim, one for each device, so that any layout can be run: strided, block-cyclic and
padded ones, parts of axes, and partial ones of every reduction, whether or not a `NamedSharding` can express them.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.lower import Program, lower_plan
from reshard.lower.to_shard_map import tile_function
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from reshard.types import Layout, Mesh
from tests.oracle import check_target, source_tiles

MESH = Mesh(x=4, y=2)


def one_step(kind: str, source: str, target: str, mode: StepMode | None = None, donate: bool = False) -> Plan:
    """A plan of one step on `MESH`."""
    before, after = Layout.parse(source, MESH), Layout.parse(target, MESH)
    return chain(before, after, [StepSpec(kind, after, mode or StepMode())], donate)


def stacked(program: Program, axes: Mapping[str, int]) -> tuple[jax.stages.Wrapped, NamedSharding]:
    """The program as a function of all tiles, one after another in the order of its devices."""
    names, sizes = tuple(axes) or ("one",), tuple(axes.values()) or (1,)
    grid = np.array(jax.devices()[: len(program.devices)]).reshape(sizes)
    sharding = NamedSharding(jax.sharding.Mesh(grid, names), P(names))
    run = tile_function(program, dict(zip(names, sizes, strict=True)))
    spec = sharding.spec
    whole = jax.shard_map(
        lambda tile: run(tile[0])[None], mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(whole, in_shardings=sharding), sharding


def check_on_xla(plan: Plan, program: Program | None = None) -> jax.stages.Compiled:
    """Every device ends with what the target means; returns what was compiled and run."""
    program, tiles = program or lower_plan(plan), source_tiles(plan)
    f, sharding = stacked(program, plan.source.mesh.axes)
    given = jax.device_put(np.stack([tiles[device] for device in program.devices]), sharding)
    compiled = f.lower(given).compile()
    check_target(plan, dict(zip(program.devices, np.asarray(compiled(given)), strict=True)))
    return compiled
