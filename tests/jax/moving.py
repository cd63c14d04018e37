"""The program of jax-ml/jax#21562, the smallest that XLA does badly, for the tests of both passes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import Mesh as JaxMesh
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.jax.jit import Jitted
from reshard.jax.pass_report import PassReport
from reshard.jax.stablehlo_pass import module_pass

SIZE = 16


def mesh(kind: AxisType = AxisType.Auto) -> JaxMesh:
    return JaxMesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"), axis_types=(kind, kind))


def sharding(*spec: Any) -> NamedSharding:
    return NamedSharding(mesh(), P(*spec))


BEFORE, AFTER = sharding("y", None, "x"), sharding(None, ("x", "y"))


def numbered(place: NamedSharding = BEFORE) -> jax.Array:
    return jax.device_put(np.arange(SIZE**3, dtype=np.float32).reshape(SIZE, SIZE, SIZE), place)


def program(v: jax.Array) -> jax.Array:
    """One move, amid arithmetic: 2 v + 1, v sharded as BEFORE and the result as AFTER."""
    return jax.lax.with_sharding_constraint(v * 2, AFTER) + 1


class Lowerings(NamedTuple):
    """A program as `jax.jit` lowers it, and after the pass on its StableHLO, with the pass's report."""

    plain: Any
    ours: Any
    report: PassReport


def lowered_twice(f: Any, *args: Any, network: Any = None, budget: Any = None, **options: Any) -> Lowerings:
    """Lowers a function before and after the pass on StableHLO; `options` are those of `jax.jit`."""
    plain = jax.jit(f, **options).lower(*args)

    @functools.wraps(f)
    def anew(*args: Any, **kwargs: Any) -> Any:  # JAX keeps lowerings, and the pass changes the module.
        return f(*args, **kwargs)

    ours = jax.jit(anew, **options).lower(*args)
    planner = functools.partial(rs.plan, budget=budget, network=network)
    return Lowerings(plain, ours, module_pass.transform_module(ours.compiler_ir("stablehlo"), planner))


def kept(f: Jitted) -> list[str]:
    """What runs of each program with collectives that the function was called with."""
    return ["reshard" if report.changed else "plain" for report in f._switched.reports]
