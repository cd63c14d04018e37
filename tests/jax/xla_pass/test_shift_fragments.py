"""Halos and rolls that XLA makes of many collectives: one permute for each part of a neighbour's tile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard.jax
from reshard import hlo
from reshard.jax.xla_pass import fragments, xla_hook


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


@pytest.mark.fast(1)
@pytest.mark.parametrize(("first", "last"), [(1, 1), (2, 1)])
def test_a_periodic_halo_takes_what_the_neighbour_has(first, last):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("y", "x"))
    plain, ours, log = both(lambda a: differences(a, first, last), P("y", "x"), (16, 32), mesh)
    assert ours.received_bytes <= plain.received_bytes and ours.launches <= plain.launches, str(log)
    assert any(place.outcome.permutes for report in log.reports for place in report.replaced), str(log)


def test_a_roll_of_an_uneven_part():
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    plain, ours, log = both(lambda a: jnp.roll(a, 3, 0) + jnp.roll(a, -5, 0), P("x"), (64, 3), mesh)
    assert ours.received_bytes <= plain.received_bytes, str(log)


# ---- planted faults: fragments that are wrong, and must be refused --------------------------------------------------

permuted, box, cell = fragments._permute_box, fragments._cut_box, fragments._make_cell


def from_the_next_neighbour(tile, axis, source, sizes):
    return permuted(tile, axis, replaced(source, devices=(*source.devices[1:], source.devices[0])), sizes)


def to_nobody(tile, axis, source, sizes):
    return permuted(tile, axis, replaced(source, devices=(-1,) * len(source.devices)), sizes)


def one_off(tile, source, sizes):
    moved = [(at + 1) % (have - size + 1) for at, have, size in zip(source.start, tile.shape, sizes, strict=True)]
    return box(tile, replaced(source, start=tuple(moved)), sizes)


def along_another_dim(tile, source, sizes):
    return jnp.swapaxes(box(tile, replaced(source, start=source.start[::-1]), sizes[::-1]), 0, 1)


def upside_down(tile, axis, sizes, sources, boxes):
    return jnp.flip(cell(tile, axis, sizes, sources, boxes), 0)


def of_another_dtype(tile, axis, source, sizes):
    return permuted(tile.astype("bfloat16"), axis, source, sizes).astype(tile.dtype)


def replaced(source, **fields):
    return fragments.ShiftSource(**{"start": source.start, "devices": source.devices, **fields})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("_permuted", from_the_next_neighbour),
        ("_permuted", to_nobody),
        ("_permuted", of_another_dtype),
        ("_box", one_off),
        ("_box", along_another_dim),
        ("_cell", upside_down),
    ],
)
def test_planted_faults_are_refused(monkeypatch, name, fault):
    monkeypatch.setattr(xla_hook._state, "fragments", {})
    monkeypatch.setattr(fragments, name, fault)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("y", "x"))
    plain, ours, log = both(edges, P("y", "x"), (16, 16), mesh)
    assert ours.received_bytes == plain.received_bytes, str(log)
    places = [place for report in log.reports for place in report.places]
    assert any(place.why_left for place in places), str(log)
    assert not any(place.outcome.permutes for place in places if place.replaced), str(log)


def edges(a):
    """Parts of neighbours' tiles along both dims; at the edges of the array it is the array's own."""
    wide = jnp.pad(a, [(2, 1), (2, 1)], mode="wrap")
    return wide[3:, 2:-1] - wide[: a.shape[0], 2:-1] + wide[2:-1, : a.shape[1]]


def test_without_faults_it_is_replaced():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("y", "x"))
    _, _, log = both(edges, P("y", "x"), (16, 16), mesh)
    assert any(place.outcome.permutes for report in log.reports for place in report.replaced), str(log)
