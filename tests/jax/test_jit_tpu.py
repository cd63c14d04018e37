"""`jit` ahead of time for TPUs, by their real compiler: the executable has our collectives, and no others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reshard import hlo
from reshard.jax.jit import jit
from reshard.jax.redistribute import redistribute

pytest.importorskip("libtpu", reason="install jax[tpu] to compile for TPUs")
from jax.experimental import topologies

SIZE = 256  # at 64 a plan's gains are less than what TPU's compiler keeps aside


@pytest.fixture(scope="module")
def mesh() -> JaxMesh:
    topology = topologies.get_topology_desc("v5p:2x2x2", platform="tpu")
    return JaxMesh(np.array(topology.devices).reshape(4, 2), ("x", "y"))


def argument(mesh: JaxMesh, *spec: Any, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((SIZE,) * 3, dtype, sharding=NamedSharding(mesh, P(*spec)))


def kinds(compiled: Any) -> Counter[str]:
    return Counter(one.kind for one in hlo.collectives(hlo.parse(compiled.as_text())))


@pytest.mark.slow
def test_a_rebuilt_array(mesh: JaxMesh) -> None:
    """jax-ml/jax#21562: XLA gathers the array in one collective, eight times the bytes of ours."""
    after = NamedSharding(mesh, P(None, ("x", "y")))
    f = jit(lambda v: jax.lax.with_sharding_constraint(jnp.sin(v), after) * 2)
    compiled = f.lower(argument(mesh, "y", None, "x")).compile()
    plain, ours = compiled.decision.plain, compiled.decision.ours
    assert plain is not None and ours is not None and compiled.decision.chosen == "reshard"
    (reshard,) = compiled.report.taken
    assert kinds(compiled) == {"all_to_all": 1} and ours.received_bytes == reshard.plan.received_bytes
    assert plain.received_bytes >= 8 * ours.received_bytes
    before = jax.jit(f.__wrapped__).lower(argument(mesh, "y", None, "x")).compile().memory_analysis().temp_size_in_bytes
    assert ours.temp_bytes is not None and before >= 2 * ours.temp_bytes


@pytest.mark.slow
def test_a_loop(mesh: JaxMesh) -> None:
    """Moves inside a scan run in each of its turns, and all of them are counted."""
    rows, columns = NamedSharding(mesh, P(("x", "y"))), NamedSharding(mesh, P(None, ("y", "x")))

    def turn(v: jax.Array, _: None) -> tuple[jax.Array, None]:
        v = jax.lax.with_sharding_constraint(jnp.exp(v), columns)
        return jax.lax.with_sharding_constraint(jnp.tanh(v), rows), None

    lowered = jit(lambda v: jax.lax.scan(turn, v, None, length=5)[0]).lower(argument(mesh, ("x", "y")))
    compiled = lowered.compile()
    ours = compiled.decision.ours
    assert compiled.decision.chosen == "reshard" and ours is not None and ours.loop_bytes == 0
    inside = [one for one in hlo.collectives(hlo.parse(compiled.as_text())) if one.times == 5]
    assert [one.kind for one in inside] == ["all_to_all"] * 2
    assert ours.received_bytes >= 10 * inside[0].received_bytes


@pytest.mark.slow
def test_redistribute_needs_no_source_there(mesh: JaxMesh) -> None:
    """XLA on TPU has no hook that provides the source; the pass propagates the shardings itself."""
    after = NamedSharding(mesh, P(None, ("x", "y")))
    compiled = jit(lambda v: redistribute(v * 2, after)).lower(argument(mesh, "y", None, "x")).compile()
    assert compiled.decision.chosen == "reshard" and kinds(compiled) == {"all_to_all": 1}
