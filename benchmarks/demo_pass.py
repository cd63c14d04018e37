"""A part of `make demo`: jax-ml/jax#21562's program under plain `jax.jit`, before and after `reshard.jax.enable()`.

It is compiled for 8 virtual CPU devices in a process of its own, and run at the size of the report: the results must be
equal bit for bit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.xla_identity import XlaError, _environment

SMALL, LARGE = 16, 1024
DEVICES = 8

_PROGRAM = """
import json, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import reshard.jax
from reshard import hlo

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
before, after = NamedSharding(mesh, P("y", None, "x")), NamedSharding(mesh, P(None, ("x", "y")))

@jax.jit
def step(a, b):
    return jnp.tanh(jax.lax.with_sharding_constraint(a + b, after))

def compiled(size):
    argument = jax.ShapeDtypeStruct((size,) * 3, "float32", sharding=before)
    return step.lower(argument, argument).compile()

def figures(program):
    traffic = hlo.traffic(hlo.parse(program.as_text()))
    kinds = {kind: total.launches for kind, total in traffic.by_kind.items()}
    return {
        "received": traffic.received_bytes, "collectives": kinds, "temp": program.memory_analysis().temp_size_in_bytes
    }

data = np.random.default_rng(0).normal(size=(SMALL,) * 3).astype("float32")
data = jax.device_put(data, before)
plain, large = compiled(SMALL)(data, data), figures(compiled(LARGE))
reshard.jax.enable()
ours = compiled(SMALL)(data, data)
equal = np.asarray(plain).tobytes() == np.asarray(ours).tobytes()
print(json.dumps({"before": large, "after": figures(compiled(LARGE)), "equal": equal}))
"""


@dataclass(frozen=True)
class Compiled:
    """What one device receives and needs for temporaries in one run of a compiled program, in bytes."""

    received: int
    collectives: dict[str, int]
    temp: int


@dataclass(frozen=True)
class Enabled:
    """The program before and after `enable()`, and whether its results are equal."""

    before: Compiled
    after: Compiled
    equal: bool


def enabled(timeout: float = 300) -> Enabled:
    """The figures. Raises `XlaError` if the process fails."""
    source = f"SMALL, LARGE = {SMALL}, {LARGE}\n{_PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=_environment(DEVICES),
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
        check=False,
    )
    if done.returncode != 0:
        raise XlaError(f"the process that compiles with the pass failed: {done.stderr.strip()[-500:]}")
    return read(json.loads(done.stdout.splitlines()[-1]))


def read(data: dict[str, Any]) -> Enabled:
    """The figures as the process prints them."""
    return Enabled(Compiled(**data["before"]), Compiled(**data["after"]), data["equal"])


def disagreements(figures: Enabled) -> list[str]:
    """What the pass must never do: change a result, or receive or need more."""
    problems: list[str] = []
    if not figures.equal:
        problems.append("the results before and after enable() differ")
    if figures.after.received >= figures.before.received:
        problems.append(f"{figures.after.received} B are received after enable(), {figures.before.received} B before")
    if figures.after.temp > figures.before.temp:
        problems.append(f"{figures.after.temp} B of temporaries after enable(), {figures.before.temp} B before")
    return problems
