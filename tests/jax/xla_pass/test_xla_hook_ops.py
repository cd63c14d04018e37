"""Operations that XLA runs on whole arrays: with the pass they run on the rows that each device has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard.jax
from reshard.jax.xla_pass import fragments, xla_hook
from tests.jax.xla_pass.test_xla_hook import both, mesh, received

ROWS, COLUMNS, MIXED = P(("y", "x")), P(None, ("y", "x")), P("y", "x")


def put(a, spec):
    return jax.lax.with_sharding_constraint(a, NamedSharding(mesh(), spec))


def given(shape, dtype, spec):
    return jax.device_put(numbers(shape, dtype), NamedSharding(mesh(), spec))


def numbers(shape, dtype):
    values = np.random.default_rng(0).normal(size=(2, *shape))
    return (values[0] + 1j * values[1]).astype(dtype) if dtype == "complex64" else values[0].astype(dtype)


def pencil(a):
    """An FFT over three dims, one at a time, with constraints in between that make that dim whole on each device."""
    a = put(jnp.fft.fft(a, axis=0), P("y", None, "x"))
    a = put(jnp.fft.fft(a, axis=1), P("y", "x"))
    return put(jnp.fft.fft(a, axis=2), P(None, "y", "x"))


def by_hand(a):
    def local(tile):
        tile = jax.lax.all_to_all(jnp.fft.fft(tile, axis=0), "y", 0, 1, tiled=True)
        tile = jax.lax.all_to_all(jnp.fft.fft(tile, axis=1), "x", 1, 2, tiled=True)
        return jnp.fft.fft(tile, axis=2)

    local = jax.shard_map(local, mesh=mesh(), in_specs=P(None, "y", "x"), out_specs=P("y", "x"))
    return reshard.jax.redistribute(local(a), NamedSharding(mesh(), P(None, "y", "x")))


@pytest.mark.slow
def test_a_pencil_fft_receives_what_it_does_by_hand():
    shape = jax.ShapeDtypeStruct((64, 64, 64), "complex64", sharding=NamedSharding(mesh(), P(None, "y", "x")))
    plain, ours, log = both(pencil, shape)
    tile = 64**3 * 8 // 8
    assert received(plain) == 3 * 7 * tile
    assert received(ours) == tile * 9 // 4 <= 1.2 * received(jax.jit(by_hand).lower(shape).compile())
    temp = [one.memory_analysis().temp_size_in_bytes for one in (plain, ours)]
    assert temp[1] < temp[0] / 4
    (report,) = log.reports
    assert len(report.replaced) == len(report.places) == 3
    a = given((64, 64, 64), "complex64", P(None, "y", "x"))
    assert np.asarray(plain(a)).tobytes() == np.asarray(ours(a)).tobytes()
    assert np.allclose(ours(a), np.fft.fftn(numbers((64, 64, 64), "complex64")), atol=1e-2)


def positive(a):
    return a @ a.transpose(0, 2, 1) + 30 * jnp.eye(a.shape[-1])


def cholesky(a):
    return put(jax.lax.linalg.cholesky(positive(a)), ROWS)


def each(f):
    return lambda a: jax.tree.map(lambda one: put(one, ROWS), f(a))


SLABS = P(None, None, ("y", "x"))
PROGRAMS = {
    "irfft": (lambda a: put(jnp.fft.irfft(a), COLUMNS), ROWS, (64, 33), "complex64", 1),
    "top_k": (each(lambda a: jax.lax.top_k(a, 8)), ROWS, (64, 64), "float32", 0),
    "top_k, values whole": (lambda a: put(jax.lax.top_k(a, 8)[0], P()), ROWS, (64, 64), "float32", 1),
    "top_k of columns": (each(lambda a: jax.lax.top_k(a, 8)), COLUMNS, (64, 64), "float32", 1.8),
    "argsort": (lambda a: put(jnp.argsort(a, axis=-1), COLUMNS), ROWS, (64, 64), "float32", 1),
    "argsort of whole rows": (lambda a: put(jnp.argsort(a, axis=-1), MIXED), ROWS, (64, 64), "float32", 1),
    "cholesky": (cholesky, P("y", None, "x"), (16, 16, 16), "float32", 4),
    "lu": (each(jax.lax.linalg.lu), SLABS, (16, 16, 16), "float32", 1),
    "qr": (lambda a: put(jnp.linalg.qr(a)[0], ROWS), SLABS, (16, 16, 16), "float32", 1),
}  # fmt: skip


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    """Received bytes are at most so many tiles, fewer than without the pass, and results are the same bits."""
    f, spec, shape, dtype, tiles = PROGRAMS[name]
    a = given(shape, dtype, spec)
    plain, ours, log = both(f, a)
    assert [report.why for report in log.reports if report.why] == []
    assert received(ours) < received(plain) and received(ours) <= tiles * a.nbytes / 8, log
    peaks = [one.memory_analysis().temp_size_in_bytes for one in (plain, ours)]
    assert peaks[1] <= peaks[0]
    for was, is_now in zip(jax.tree.leaves(plain(a)), jax.tree.leaves(ours(a)), strict=True):
        assert was.sharding == is_now.sharding and np.asarray(was).tobytes() == np.asarray(is_now).tobytes()


def loop(a):
    def turn(carry, _):
        return put(put(jnp.fft.fft(carry, axis=-1), COLUMNS) * 0.5, ROWS), None

    return jax.lax.scan(turn, a, None, length=3)[0]


@pytest.mark.slow
def test_inside_a_loop():
    a = given((64, 64), "complex64", ROWS)
    plain, ours, log = both(loop, a)
    assert received(ours) < received(plain) / 3, log
    assert np.asarray(plain(a)).tobytes() == np.asarray(ours(a)).tobytes()


LEFT = {
    "used whole and taken by others": lambda a: put(jnp.fft.fft(put(a, P())), COLUMNS) + put(put(a, P()) * 2, COLUMNS),
    "a source in parts, a result in parts": lambda a: put(jnp.fft.fft(put(a, COLUMNS)), COLUMNS),
}


@pytest.mark.parametrize("name", LEFT)
def test_never_worse(name):
    a = given((64, 64), "complex64", ROWS)
    plain, ours, _ = both(LEFT[name], a)
    assert received(ours) <= received(plain)
    assert np.asarray(plain(a)).tobytes() == np.asarray(ours(a)).tobytes()


# ---- planted faults: fragments that are wrong, and must be refused --------------------------------------------------

laid_out, in_places, on_rows = fragments._lay_out_result, fragments.in_places, fragments.rows_function


def backwards(op, indices):
    return on_rows(op._replace(target="IFFT"), indices)


def of_other_rows(tile, places):
    return jnp.roll(in_places(tile, places), 1, 0)


def of_another_digit(tile, places):
    return jnp.flip(in_places(tile, places), -1)


def shifted(tile, output):
    return jnp.roll(laid_out(tile, output), 1, 0)


def turned(tile, output):
    return jnp.flip(laid_out(tile, output), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("rows_function", backwards),
        ("in_places", of_other_rows),
        ("in_places", of_another_digit),
        ("_lay_out_result", shifted),
        ("_lay_out_result", turned),
    ],
)
def test_planted_faults_are_refused(monkeypatch, name, fault):
    monkeypatch.setattr(xla_hook._state, "fragments", {})
    monkeypatch.setattr(fragments, name, fault)
    a = given((16, 16, 16), "complex64", P(None, "y", "x"))
    plain, ours, log = both(pencil, a)
    places = [place for report in log.reports for place in report.places]
    assert any(place.why_left for place in places), str(log)
    assert not any("fft" in place.does_with_op for place in places if place.replaced), str(log)
    assert np.asarray(plain(a)).tobytes() == np.asarray(ours(a)).tobytes()
