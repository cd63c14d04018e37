"""Halos and rolls that XLA makes of many collectives: one permute for each part of a neighbour's tile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard.jax
from reshard import hlo
from reshard.jax.xla_hook import hook_exists

pytestmark = pytest.mark.skipif(not hook_exists(), reason="this jax has no hook for compiler passes")


def both(f, spec, shape, mesh):
    """A function compiled plain and with the pass: what both receive, and what the pass says."""
    sharding = NamedSharding(mesh, spec)
    a = jax.device_put(np.arange(np.prod(shape), dtype="float32").reshape(shape), sharding)
    plain = jax.jit(lambda x: f(x), out_shardings=sharding).lower(a).compile()
    with reshard.jax.enabled() as log:
        ours = jax.jit(lambda x: f(x), out_shardings=sharding).lower(a).compile()
    assert np.array_equal(ours(a), plain(a)), str(log)
    assert np.array_equal(ours(a), jax.device_get(f(jnp.asarray(np.asarray(a)))))
    return *(hlo.traffic(hlo.parse(one.as_text())) for one in (plain, ours)), log


def differences(a, first, last):
    """What a library of fluids does: pads a periodic array by one or two, and takes parts of that."""
    wide = jnp.pad(a, [(first, last), (first, last)], mode="wrap")
    inner = slice(first, wide.shape[1] - last)
    return wide[first + last :, inner] - wide[: a.shape[0], inner]


@pytest.mark.parametrize(("first", "last"), [(1, 1), (2, 1)])
def test_a_periodic_halo_takes_what_the_neighbour_has(first, last):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("y", "x"))
    plain, ours, log = both(lambda a: differences(a, first, last), P("y", "x"), (16, 32), mesh)
    assert ours.received_bytes <= plain.received_bytes and ours.launches <= plain.launches, str(log)
    assert any(fate.permutes for report in log.reports for fate in report.replaced), str(log)


def test_a_roll_of_an_uneven_part():
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    plain, ours, log = both(lambda a: jnp.roll(a, 3, 0) + jnp.roll(a, -5, 0), P("x"), (64, 3), mesh)
    assert ours.received_bytes <= plain.received_bytes, str(log)
