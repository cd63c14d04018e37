"""The partitioner's hook: moves whose source only compilation knows, where XLA has the hook and where it has not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.errors import LayoutError
from reshard.jax import redistribute
from reshard.jax.partitioner_hook import check_platforms, moved_by_partitioner
from reshard.jax.request import ReshardRequest
from tests.jax.oracle import assert_exact, executed, filled, mesh_of, on, promised
from tests.layouts import sample_pairs

SIZES = {"x": 4, "y": 2}
BEFORE, AFTER = P("x", "y"), P(None, ("y", "x"))
VALUES = filled((8, 8))


@pytest.mark.slow
def test_a_source_known_at_compile_time_gives_the_same_collectives():
    """The collectives are those of a move whose source is known when it is traced."""
    pairs = [*sample_pairs(rs.Mesh(SIZES), 2, 5, seed=1), *sample_pairs(rs.Mesh(x=2, y=3), 2, 5, seed=2)]
    for pair in pairs:
        mesh = mesh_of(dict(pair[0].mesh.axes))
        source, target = on(mesh, pair[0]), on(mesh, pair[1])
        f = jax.jit(lambda x, t=target: redistribute(x, t), in_shardings=source, out_shardings=target)
        compiled = f.lower(jax.ShapeDtypeStruct(pair[0].shape, jnp.float32)).compile()
        assert executed(compiled) == promised(rs.plan(*pair)), rs.plan(*pair)


def test_on_tpu_an_unknown_source_is_refused_when_lowered(tpu_mesh: jax.sharding.Mesh):
    target = NamedSharding(tpu_mesh, AFTER)
    before = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(tpu_mesh, BEFORE))
    with pytest.raises(LayoutError) as caught:
        jax.jit(lambda x: redistribute(x, target)).lower(before)
    for word in ("(8, 8)", "'x'", "4", "TPU", "source=", "explicit axes", "reshard.jax.jit"):
        assert word in str(caught.value)


def test_a_hook_alone_moves_exactly() -> None:
    source, target = NamedSharding(mesh_of(SIZES), BEFORE), NamedSharding(mesh_of(SIZES), AFTER)
    request = ReshardRequest(target)
    f = jax.jit(lambda x: moved_by_partitioner(x, request), in_shardings=source, out_shardings=target)
    assert_exact(f(jax.device_put(VALUES, source)), target, VALUES)


def test_the_hook_does_not_pass_the_operands_sharding_on() -> None:
    """Left to itself, propagation must not conclude that the result is sharded as the operand is."""
    source = NamedSharding(mesh_of(SIZES), BEFORE)
    request = ReshardRequest(NamedSharding(mesh_of(SIZES), AFTER))
    out = jax.jit(lambda x: moved_by_partitioner(x, request), in_shardings=source)(jax.device_put(VALUES, source))
    assert not out.sharding.is_equivalent_to(source, 2)
    assert_exact(out, None, VALUES)


def test_uneven_arrays_are_left_to_xla() -> None:
    """7 x 5 in 8 pieces: the result is right, and the program has no permute or all-to-all of ours."""
    mesh, values = mesh_of(SIZES), filled((7, 5))
    source, target, everywhere = (NamedSharding(mesh, spec) for spec in (P("x"), P(None, "y"), P()))
    pin = jax.lax.with_sharding_constraint
    f = jax.jit(lambda x: pin(redistribute(pin(x, source), target), everywhere), in_shardings=everywhere)
    assert_exact(f(jax.device_put(values, everywhere)), everywhere, values)


def test_platforms_without_the_hook() -> None:
    request = ReshardRequest(NamedSharding(mesh_of(SIZES), AFTER))
    check_platforms(["cpu", "cuda"], request, (8, 8))
    with pytest.raises(LayoutError, match=r"array of shape \(8, 8\).*XLA on TPU .*give source="):
        check_platforms(["cpu", "tpu"], request, (8, 8))


@pytest.fixture
def tpu_mesh() -> jax.sharding.Mesh:
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    devices = topologies.get_topology_desc("v5p:2x2x2", platform="tpu").devices
    return jax.sharding.Mesh(np.array(devices).reshape(4, 2), tuple(SIZES))
