"""The program of jax-ml/jax#21562, the smallest that XLA does badly, for the tests of `jit` and its stages."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import Mesh as JaxMesh
from jax.sharding import PartitionSpec as P

from reshard.jax.jit import JittedInXla
from reshard.jax.stablehlo_pass.jitted import Jitted
from reshard.jax.stablehlo_pass.module_pass import pass_options
from reshard.jax.strict import Limits
from reshard.jax.xla_pass.xla_hook import hook_exists

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


ONLY_WITHOUT_HOOK = pytest.mark.sweep if hook_exists() else pytest.mark.slow
"""For long families of tests of `jit_without_hook`: with the hook, `jit` goes another way, and a sample is enough."""


def jit_without_hook(f: Any, network: Any = None, budget: Any = None, **options: Any) -> Jitted:
    """`jit` as it is where XLA has no hook for the pass, on every jax."""
    return Jitted(f, options, pass_options(network, budget), Limits())


def chosen(f: Any, *args: Any, **kwargs: Any) -> str:
    """The decision for these arguments."""
    return f.lower(*args, **kwargs).compile().decision.chosen


def kept(f: Any) -> list[str]:
    """The decisions for all that the function was called with; with the hook, for programs with collectives."""
    if isinstance(f, JittedInXla):
        return ["reshard" if report.changed else "plain" for report in f._switched.reports]
    return [compiled.decision.chosen for compiled in f._compiled.values()]
