"""Compiles cases of the corpus by plain JAX and after the pass, and says for each stage what came of it.

    python -m tests.jax.stablehlo.worker cpu inline fft+sort case-nested ...

Cases joined by + are one program. Each line of the output is JSON: group, stage ("plain", "ours") and outcome: "begun",
then "ok" or the error. A compiler that ends the process leaves a stage begun.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

# Tests that import this have flags of their own, which must stay.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.errors import ProgramError
from reshard.jax.stablehlo_pass.shardy import SHARDING
from reshard.lower.to_stablehlo import list_operations
from tests.jax.moving import lowered_twice
from tests.jax.programs.base import assert_same
from tests.jax.stablehlo import BY_TITLE
from tests.jax.stablehlo.base import SHAPE, OpCase

# JAX's own ways to write shardings; what else a program has is its author's.
USUAL = {"sdy.mesh", "sdy.manual_computation", "sdy.return", "sdy.sharding_constraint", '"public" function'}


def mesh_on(platform: str) -> Mesh:
    """4 x 2 devices: of the host, or TPUs that are not there."""
    devices = jax.devices() if platform == "cpu" else topologies.get_topology_desc("v5p:2x2x2", platform="tpu").devices
    return Mesh(np.array(devices[:8]).reshape(4, 2), ("x", "y"))


def program(cases: Sequence[OpCase], context: str, mesh: Mesh) -> Callable[[jax.Array], Any]:
    """The cases between two reshards: as they stand and in functions of their own, or in a loop and a branch."""
    columns, rows = NamedSharding(mesh, P(None, ("y", "x"))), NamedSharding(mesh, P(("x", "y")))

    def function(x: jax.Array) -> Any:
        return tuple(case.function(x, mesh) if case.needs_mesh else case.function(x) for case in cases)

    def after(x: Any) -> Any:
        even = x.ndim == 2 and x.shape[0] % 8 == 0
        return lax.with_sharding_constraint(x, rows) if even else x

    def inline(x: jax.Array) -> Any:
        x = lax.with_sharding_constraint(x, columns)
        return jax.tree.map(after, (function(x), jax.jit(function)(x)))

    def nested(x: jax.Array) -> Any:
        x = lax.with_sharding_constraint(x, columns)
        _, looped = lax.scan(lambda c, _: (c.T, function(c)), x, None, length=2)
        branched = lax.cond(x[0, 0] > 2, lambda v: jax.tree.map(jnp.ones_like, function(v)), function, x)
        return jax.tree.map(after, (looped, branched))

    return inline if context == "inline" else nested


class Trial:
    """Some cases in one program, compiled by plain JAX and after the pass, and run on the host."""

    def __init__(self, platform: str, context: str, cases: Sequence[OpCase], mesh: Mesh) -> None:
        self.cases, self.f, self.runs = cases, program(cases, context, mesh), platform == "cpu"
        self.given = jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=NamedSharding(mesh, P("x", "y")))

    def plain(self) -> dict[str, Any]:
        """Compiles the program without the pass; `lacks` are operations that it should have and has not."""
        lowered = jax.jit(self.f).lower(self.given)
        module = lowered.compiler_ir("stablehlo")
        names = {op.name for op in list_operations(module.operation)}
        self.forms = sharding_forms(module)
        self.expected = self._result(lowered.compile())
        on_host = self.cases if self.runs else ()  # Callbacks are sends and receives for TPUs.
        return {"lacks": [case.title for case in on_host if case.operation not in names]}

    def ours(self) -> dict[str, Any]:
        """Compiles it after the pass; `new` are ways to write shardings that JAX does not use for it."""
        try:
            lowered = lowered_twice(self.f, self.given)
        except ProgramError as error:
            return {"taken": 0, "why": str(error), "new": []}
        new = sharding_forms(lowered.ours.compiler_ir("stablehlo")) - self.forms - USUAL
        result = self._result(lowered.ours.compile())
        assert_same(result, self.expected, max(case.tolerance for case in self.cases))
        return {"taken": len(lowered.report.taken), "why": "", "new": sorted(new)}

    def _result(self, executable: Any) -> Any:
        if not self.runs or any(case.waits for case in self.cases):
            return ()
        x = np.random.default_rng(0).uniform(0.01, 1, SHAPE).astype(np.float32)
        return jax.tree.map(np.asarray, executable(jax.device_put(x, self.given.sharding)))


def sharding_forms(module: Any) -> set[str]:
    """The operations of Shardy in a module, and where it has shardings as attributes."""
    forms: set[str] = set()
    for op in list_operations(module.operation):
        if op.name.startswith("sdy.") or SHARDING in op.attributes:
            forms.add(op.name)
        if op.name == "func.func" and SHARDING in str([op.attributes.get(name) for name in ("arg_attrs", "res_attrs")]):
            forms.add(f"{op.attributes.get('sym_visibility')} function")
    return forms


def main(platform: str, context: str, *groups: str) -> None:
    mesh = mesh_on(platform)
    for group in groups:
        trial = Trial(platform, context, [BY_TITLE[title] for title in group.split("+")], mesh)
        for stage in (trial.plain, trial.ours):
            line: dict[str, Any] = {"group": group, "stage": stage.__name__}
            print(json.dumps(line | {"outcome": "begun"}), flush=True)
            try:
                line |= {"outcome": "ok"} | stage()
            except Exception as error:
                line["outcome"] = f"{type(error).__name__}: {error}"[:2000]
            print(json.dumps(line), flush=True)
            if line["outcome"] != "ok":
                break


if __name__ == "__main__":
    main(*sys.argv[1:])
