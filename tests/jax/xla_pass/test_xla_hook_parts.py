"""Parts of fused arrays, and arrays that are joined: with the pass, what is used moves, each array by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.jax.xla_pass import fragments, xla_hook
from tests.jax.xla_pass.test_xla_hook import both, received


def put(a, *spec):
    return jax.lax.with_sharding_constraint(a, NamedSharding(JaxMesh(np.array(jax.devices()[:8]), ("x",)), P(*spec)))


def fused(a):
    """A product that stays as it is stored: XLA fuses no slices into it."""
    return a @ jnp.linspace(-1, 1, a.shape[-1] ** 2, dtype=a.dtype).reshape(a.shape[-1], -1)


def halves(h):
    return put(h[:, :16], None, "x") * 2, put(h[:, 16:], None, "x") + 1


def thirds(h):
    return tuple(put(one, None, "x") * 2 for one in jnp.split(h, 3, axis=1))


def window(h):
    return put(h[:, 8:40], None, "x") * 2


def known_offsets(h):
    return put(jax.lax.dynamic_slice(h, (2, 0, 8), (4, 64, 16)), None, None, "x") * 2


# What a device receives is seven eighths of its part of what is used.
CASES = {
    halves: ((256, 32), 8 * 448, 2),
    thirds: ((256, 48), 12 * 448, 3),
    window: ((256, 48), 8 * 448, 1),
    known_offsets: ((8, 64, 32), 4 * 448, 1),
}


def given(shape):
    spec = P(*[None] * (len(shape) - 2), "x")
    values = np.random.default_rng(0).normal(size=shape).astype("float32")
    return jax.device_put(values, NamedSharding(JaxMesh(np.array(jax.devices()[:8]), ("x",)), spec))


def compiled(part):
    a = given(CASES[part][0])
    return a, *both(lambda a: part(fused(a)), a)


@pytest.mark.fast(1)
@pytest.mark.parametrize("part", CASES, ids=lambda part: part.__name__)
def test_only_the_part_that_is_used_moves(part):
    a, plain, ours, log = compiled(part)
    _, least, launches = CASES[part]
    assert received(ours) == least < received(plain), str(log)
    assert ours.as_text().count(" all-to-all(") + ours.as_text().count(" collective-permute(") == launches
    for one, other in zip(jax.tree.leaves(plain(a)), jax.tree.leaves(ours(a)), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_parts_of_what_several_fusions_compute_move_alone():
    """XLA makes the sine once for each window and once whole, which stands after the first window that is used."""
    a = given((64, 48))
    plain, ours, log = both(lambda a: thirds(jnp.sin(a)), a)
    assert received(ours) == 3 * 448 < received(plain), str(log)
    for one, other in zip(jax.tree.leaves(plain(a)), jax.tree.leaves(ours(a)), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-6)


find_part_cuts = fragments.find_part_cuts


def of_the_other_half(places, start, elements):
    return find_part_cuts(places, 16 - start, elements)


def of_the_column_before(places, start, elements):
    return find_part_cuts(places, start - 1, elements)


@pytest.mark.parametrize(("part", "fault"), [(halves, of_the_other_half), (window, of_the_column_before)])
def test_another_part_is_refused(monkeypatch, part, fault):
    monkeypatch.setattr(xla_hook._state, "fragments", {})
    monkeypatch.setattr(fragments, "find_part_cuts", fault)
    a, plain, ours, log = compiled(part)
    places = [place for report in log.reports for place in report.places]
    assert any("would come from place" in (place.why_left or "") for place in places), str(log)
    for one, other in zip(jax.tree.leaves(plain(a)), jax.tree.leaves(ours(a)), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


# ---- arrays that are joined -----------------------------------------------------------------------------------------


def place(*spec):
    return NamedSharding(JaxMesh(np.array(jax.devices()[:8]).reshape(2, 4), ("y", "x")), P(*spec))


def moved(a):
    return jax.lax.with_sharding_constraint(a, place(None, ("x", "y")))


def joined_before(a, b):
    return moved(jnp.concatenate([a + a, b * 2], 0)) * 3


def joined_in_the_dim_that_was_split(a, b):
    return moved(jnp.concatenate([a + a, b * 2], 2)) * 3


def joined_afterwards(a, b):
    return moved(jnp.concatenate([moved(a + a), moved(b * 2)], 0)) * 3


JOINS = [joined_before, joined_in_the_dim_that_was_split, joined_afterwards]


def compiled_join(join, *sizes):
    arrays = [
        jax.device_put(np.random.default_rng(at).normal(size=(size, 16, 16)).astype("float32"), place("y", None, "x"))
        for at, size in enumerate(sizes)
    ]
    return arrays, *both(lambda *arrays: join(*arrays), *arrays)


@pytest.mark.fast(2)
@pytest.mark.parametrize("join", JOINS, ids=lambda join: join.__name__)
def test_joined_arrays_move_by_themselves(join):
    arrays, plain, ours, log = compiled_join(join, 16, 16)
    tile = 16 * 2 * 16 * 4
    assert received(plain) == 2 * 7 * tile and received(ours) == 2 * tile * 7 // 8, str(log)
    assert np.asarray(plain(*arrays)).tobytes() == np.asarray(ours(*arrays)).tobytes()


def test_joined_arrays_of_other_sizes():
    arrays, plain, ours, log = compiled_join(joined_before, 8, 16)
    assert received(ours) == received(plain) // 8, str(log)
    assert np.asarray(plain(*arrays)).tobytes() == np.asarray(ours(*arrays)).tobytes()


@pytest.mark.parametrize("join", JOINS[:2], ids=lambda join: join.__name__)
def test_swapped_arrays_are_refused(monkeypatch, join):
    """The parts are joined in another order: shapes fit, and only the check sees it."""
    monkeypatch.setattr(xla_hook._state, "fragments", {})
    join_cells = fragments.join_cells
    monkeypatch.setattr(fragments, "join_cells", lambda cells, cuts: join_cells(cells[::-1], cuts))
    arrays, plain, ours, log = compiled_join(join, 16, 16)
    places = [one for report in log.reports for one in report.places]
    assert any("would not come from" in (one.why_left or "") for one in places), str(log)
    assert np.asarray(plain(*arrays)).tobytes() == np.asarray(ours(*arrays)).tobytes()
