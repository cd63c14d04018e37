"""The pass inside the TPU compiler, ahead of time: a module that it does not accept would end the process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard.jax
from reshard import hlo
from tests.sampling import sampled

pytest.importorskip("libtpu", reason="install jax[tpu] to compile for TPUs")
from jax.experimental import topologies

pytestmark = [
    pytest.mark.slow,
]
SIZE = 256


@pytest.fixture(scope="module")
def shardings():
    topology = topologies.get_topology_desc("v5p:2x2x2", platform="tpu")
    mesh = JaxMesh(np.array(topology.devices).reshape(2, 4), ("y", "x"))
    return NamedSharding(mesh, P("y", None, "x")), NamedSharding(mesh, P(None, ("x", "y"), None))


def received(compiled):
    return hlo.traffic(hlo.parse(compiled.as_text())).received_bytes


def temp(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


def programs(before, after):
    constrain = jax.lax.with_sharding_constraint

    def rebuilt(a):
        return jnp.tanh(constrain(a + a, after))

    def loop(a):
        def turn(carry, _):
            return constrain(constrain(carry * 2, after) + 1, before), None

        return jax.lax.scan(turn, a, None, length=3)[0]

    def branch(a):
        return jax.lax.cond(a[0, 0, 0] > 0, lambda x: constrain(constrain(x + 1, after) * 2, before), lambda x: x, a)

    return {"rebuilt": rebuilt, "loop": loop, "branch": branch}


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled(
        [(name, dtype) for name in ("rebuilt", "loop", "branch") for dtype in ("bfloat16", "float32")],
        ("rebuilt", "bfloat16"),
        ("loop", "float32"),
        rest=pytest.mark.sweep,
    ),
)
def test_bytes_and_memory_go_down(shardings, name, dtype):
    before, after = shardings
    f = programs(before, after)[name]
    argument = jax.ShapeDtypeStruct((SIZE,) * 3, dtype, sharding=before)
    plain = jax.jit(f).lower(argument).compile()
    with reshard.jax.enabled() as log:
        ours = jax.jit(lambda a: f(a)).lower(argument).compile()
    assert any(report.changed for report in log.reports)
    assert received(ours) < received(plain) / 2
    assert temp(ours) < temp(plain)


@pytest.mark.parametrize("dtype", sampled(["bfloat16", "float32"], "bfloat16", rest=pytest.mark.sweep))
def test_one_element_does_not_take_a_gather_of_the_array(shardings, dtype):
    """A TPU gathers a few numbers as a sum with zeros, so each goes in a row of its own."""
    sharding = shardings[0]

    def scale(a):
        return jax.lax.cond(a.reshape(-1)[0] > 0, lambda x: x * 3, lambda x: x * 2, a)

    def compiled():
        argument = jax.ShapeDtypeStruct((SIZE,) * 3, dtype, sharding=sharding)
        return jax.jit(lambda a: scale(a), out_shardings=sharding).lower(argument).compile()

    plain = compiled()
    with reshard.jax.enabled() as log:
        better = compiled()
    assert log.reports[0].changed, log
    assert received(better) < 1 << 13 < received(plain)
