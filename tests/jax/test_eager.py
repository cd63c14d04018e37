"""Moves of concrete arrays: across meshes and orders of devices, from one device, and with donation.

Each result is compared with the oracle's tiles, shard by shard.
"""

from __future__ import annotations

import random
import warnings

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.jax import redistribute
from tests.jax.oracle import AUTO, EXPLICIT, as_plan, assert_exact, executed, filled, mesh_of, refactored, specs
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("both_ways")
SIZES = {"x": 4, "y": 2}
SHAPE = (8, 8)
VALUES = filled(SHAPE)
SPECS = specs(SIZES, 2)
THERE, BACK = P(None, ("y", "x")), P("x", "y")
WIDE = filled((64, 64))


def put(sharding: NamedSharding, values: np.ndarray = VALUES) -> jax.Array:
    return jax.device_put(values, sharding)


def test_to_the_sharding_that_it_has():
    """As `jax.device_put`, it returns the array itself; under jit no collective runs."""
    source = NamedSharding(mesh_of(SIZES), BACK)
    x = put(source)
    assert redistribute(x, source) is x and redistribute([x, x], source) == [x, x]
    compiled = jax.jit(lambda x: redistribute(x, source, source=source), in_shardings=source).lower(x).compile()
    assert not executed(compiled)


def test_to_where_it_is_under_another_name():
    source, target = NamedSharding(mesh_of(SIZES), P("x")), NamedSharding(mesh_of({"a": 4, "b": 2}), P("a"))
    moved = redistribute(put(source), target)
    assert_exact(moved, target, VALUES)
    assert moved.sharding == target


def test_nothing_is_there_before_a_pending_sum_is_finished():
    """JAX's own comparison of shardings takes no notice of pending sums."""
    with jax.set_mesh(mesh_of(SIZES, EXPLICIT)):
        left, right = (jax.device_put(VALUES % 5, P(*spec)) for spec in ([None, "x"], ["x"]))
        summands = jax.numpy.einsum("ij,jk->ik", left, right, out_sharding=P(unreduced={"x"}))
        target = NamedSharding(mesh_of(SIZES, EXPLICIT), P())
        assert_exact(redistribute(summands, target), target, (VALUES % 5) @ (VALUES % 5))


@pytest.mark.slow
def test_explicit_meshes_of_other_axes_eagerly():
    for source, target in refactored(4, 8):
        source = NamedSharding(mesh_of(dict(source.mesh.shape), EXPLICIT), source.spec)
        assert_exact(redistribute(put(source), target), target, VALUES)
        target = NamedSharding(mesh_of(dict(target.mesh.shape), EXPLICIT), target.spec)
        assert_exact(redistribute(put(source), target), target, VALUES)


@pytest.mark.parametrize(("kind", "times"), sampled([(AUTO, 1), (EXPLICIT, 2)], (AUTO, 1)), ids=str)
def test_devices_in_another_order(kind: AxisType, times: int):
    choose = random.Random(5)
    for sizes in ({"x": 4, "y": 2}, {"x": 2, "y": 4}, {"k": 8}) * times:
        order = choose.sample(range(8), 8)
        here = NamedSharding(mesh_of(SIZES, kind), choose.choice(SPECS))
        there = NamedSharding(mesh_of(sizes, kind, order), choose.choice(specs(sizes, 2)))
        for source, target in ((here, there), (there, here)):
            assert_exact(redistribute(put(source), target), target, VALUES)


@pytest.mark.parametrize("donate", [False, True])
def test_a_move_of_nothing_between_orders_of_devices_gives_a_new_array(donate: bool):
    source, target = NamedSharding(mesh_of(SIZES), P()), NamedSharding(mesh_of(SIZES, order=range(7, -1, -1)), P())
    x = put(source)
    y = redistribute(x, target, donate=donate)
    assert_exact(y, target, VALUES)
    assert x.is_deleted() == donate
    if not donate:
        y.delete()
        assert_exact(x, source, VALUES)


def test_devices_in_another_order_than_those_of_the_mesh_that_is_set():
    source, target = NamedSharding(mesh_of(SIZES), BACK), NamedSharding(mesh_of(SIZES, order=range(7, -1, -1)), P("y"))
    with jax.set_mesh(mesh_of({"k": 8})):
        assert_exact(redistribute(put(source), target), target, VALUES)


def test_a_mesh_without_devices_takes_those_of_the_array():
    source = NamedSharding(mesh_of(SIZES), BACK)
    abstract = jax.sharding.AbstractMesh((2, 4), ("p", "q"), axis_types=(AUTO,) * 2)
    moved = redistribute(put(source), NamedSharding(abstract, P("q", "p")))
    assert_exact(moved, NamedSharding(mesh_of({"p": 2, "q": 4}), P("q", "p")), VALUES)


@pytest.mark.parametrize(
    ("before", "after"), [(BACK, THERE), (P("x"), P()), (P(), P("x")), (BACK, BACK), (P(("x", "y")), P(("y", "x")))]
)
def test_donation_gives_the_source_up(before: P, after: P):
    mesh = mesh_of(SIZES)
    x, target = put(NamedSharding(mesh, before)), NamedSharding(mesh, after)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved = redistribute(x, target, donate=True)
    assert_exact(moved, target, VALUES)
    assert x.is_deleted()


def test_without_donation_the_source_stays():
    x, target = put(NamedSharding(mesh_of(SIZES), BACK)), NamedSharding(mesh_of(SIZES), THERE)
    redistribute(x, target).delete()
    assert_exact(x, x.sharding, VALUES)


def addresses(x: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


def overwritten(x: jax.Array) -> jax.Array:
    """What a program leaves of an array that it may overwrite."""
    return jax.jit(lambda v: v * 0 - 7, donate_argnums=0)(x)


@pytest.mark.parametrize(
    ("before", "after"), [(P(), P("x")), (P("x"), P("x", "y")), (P("x"), P(("x", "y"))), (P(("x", "y")), P(("y", "x")))]
)
def test_slices_share_the_memory_of_the_source_and_nobody_overwrites_it(
    request: pytest.FixtureRequest, before: P, after: P
):
    """Whoever is donated first, as with `jax.device_put`; and if the source is donated to the move itself."""
    source, target = (NamedSharding(mesh_of(SIZES), spec) for spec in (before, after))
    made = jax.jit(lambda: jax.numpy.asarray(WIDE), out_shardings=source)
    x = made()
    y, first = redistribute(x, target), addresses(x)
    copies = "copies" in request.node.name
    if copies and after != P("x", "y"):
        ends = [at + x.addressable_shards[0].data.nbytes for at in first]
        assert all(any(at <= here < end for at, end in zip(first, ends, strict=True)) for here in addresses(y))
    assert np.array_equal(overwritten(x), WIDE * 0 - 7)
    assert_exact(y, target, WIDE)
    x = made()
    y = redistribute(x, target)
    assert np.array_equal(overwritten(y), WIDE * 0 - 7)
    assert_exact(x, source, WIDE)
    y = redistribute(x, target, donate=True)
    assert x.is_deleted()
    others = [made() + 1 for _ in range(20)]
    assert_exact(y, target, WIDE)
    del others


def test_replicas_share_one_memory_that_nobody_overwrites(request: pytest.FixtureRequest):
    target = NamedSharding(mesh_of(SIZES), P())
    y = redistribute(put(NamedSharding(mesh_of(SIZES), P("x")), WIDE), target)
    assert len(set(addresses(y))) == (1 if "copies" in request.node.name else 8)
    z = redistribute(y, NamedSharding(mesh_of(SIZES), P("y")))
    assert np.array_equal(overwritten(y), WIDE * 0 - 7)
    assert_exact(z, z.sharding, WIDE)


@pytest.mark.parametrize("after", [P(), P(None, ("y", "x")), P(("y", "x"))])
def test_what_jax_has_kept_on_the_host_is_read(after: P):
    """The array as a whole, once somebody has read it; of another dtype too."""
    target = NamedSharding(mesh_of(SIZES), after)
    for values in (WIDE, WIDE.astype(jax.numpy.bfloat16)):
        x = put(NamedSharding(mesh_of(SIZES), P("x", "y")), values)
        assert np.array_equal(np.asarray(x), values)
        for donate in (False, True):
            assert_exact(redistribute(x, target, donate=donate), target, values)


@pytest.mark.slow
def test_donated_budgets():
    """With a budget below source plus target the move overwrites its source, unless XLA would copy it first."""
    mesh, donated = mesh_of(SIZES), 0
    for before, after in ((P("x"), P("y")), (BACK, P("y", "x")), (P("x"), P(None, "x")), (BACK, THERE)):
        source, target = NamedSharding(mesh, before), NamedSharding(mesh, after)
        x = put(source, WIDE)
        floor = as_plan(source, target, (64, 64), "float32", donate=True).floor_bytes
        try:
            moved = redistribute(x, target, budget=floor, donate=True)
        except rs.errors.BudgetError as error:
            assert_exact(x, source, WIDE)
            moved = redistribute(x, target, budget=error.smallest, donate=True)
        donated += x.is_deleted()
        assert_exact(moved, target, WIDE)
    assert donated == 4
