"""`redistribute` moves every layout to every other exactly: eagerly and under jit, on all kinds of meshes, sizes,
dtypes and inputs. Results are compared with the oracle's tiles of an index-filled array.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.jax import redistribute
from reshard.synth.options import read_budget
from tests.jax import worker
from tests.jax.oracle import (
    AUTO,
    EXPLICIT,
    as_plan,
    assert_exact,
    executed,
    filled,
    mesh_of,
    pairs,
    promised,
    refactored,
    specs,
    tile,
)
from tests.sampling import sampled

SIZES = {"x": 4, "y": 2}
SHAPE = (8, 8)
VALUES = filled(SHAPE)
SPECS = specs(SIZES, 2)
THERE, BACK = P(None, ("y", "x")), P("x", "y")


def shardings(kind: AxisType = AUTO) -> list[NamedSharding]:
    return [NamedSharding(mesh_of(SIZES, kind), spec) for spec in SPECS]


def put(sharding: NamedSharding, values: np.ndarray = VALUES) -> jax.Array:
    return jax.device_put(values, sharding)


# ---- every pair ------------------------------------------------------------------------------------


def test_jax_and_the_oracle_mean_the_same_by_a_sharding():
    for sharding in shardings():
        for shard in put(sharding).addressable_shards:
            assert np.array_equal(tile(sharding, shard.device, VALUES), VALUES[shard.index]), sharding


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize("spec", sampled(SPECS, BACK), ids=str)
def test_every_pair_eagerly(spec: P, kind: AxisType):
    every = shardings(kind)
    source = NamedSharding(every[0].mesh, spec)
    x = put(source)
    targets = every if kind == AUTO else random.Random(str(spec)).sample(every, 3)
    for target in targets:
        assert_exact(redistribute(x, target), target, VALUES)
    assert_exact(x, source, VALUES)


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize("given", ["source=", "explicit", "unknown"])
@pytest.mark.parametrize("spec", sampled(SPECS, BACK), ids=str)
def test_every_pair_under_jit(spec: P, given: str):
    """In a program of its own, only the move determines the sharding of a result."""
    every = shardings(EXPLICIT if given == "explicit" else AUTO)
    source = NamedSharding(every[0].mesh, spec)
    known = source if given == "source=" else None
    moved = jax.jit(lambda x: [redistribute(x, target, source=known) for target in every])(put(source))
    for y, target in zip(moved, every, strict=True):
        assert_exact(y, target, VALUES)


@pytest.mark.parametrize("given", ["source=", "explicit", "unknown"])
def test_a_move_amid_other_operations(given: str):
    mesh = mesh_of(SIZES, EXPLICIT if given == "explicit" else AUTO)
    source, target = NamedSharding(mesh, BACK), NamedSharding(mesh, THERE)

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        y = redistribute(x * 2, target, source=source if given == "source=" else None)
        return redistribute(y + 1, source, source=target if given == "source=" else None) * 3

    assert_exact(f(put(source)), source, (VALUES * 2 + 1) * 3)


def test_a_source_that_is_not_the_true_one_costs_a_move_but_is_right():
    mesh = mesh_of(SIZES)
    f = jax.jit(lambda x: redistribute(x, NamedSharding(mesh, THERE), source=NamedSharding(mesh, P("y"))))
    assert_exact(f(put(NamedSharding(mesh, BACK))), NamedSharding(mesh, THERE), VALUES)


# ---- meshes ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_six_of_the_eight_devices():
    """Axes of 2 and 3, whose pieces do not nest."""
    mesh = mesh_of({"x": 2, "y": 3})
    every = [NamedSharding(mesh, spec) for spec in specs({"x": 2, "y": 3}, 2)]
    values = filled((6, 12))
    for source, target in random.Random(0).sample(list(pairs(every)), 12):
        assert_exact(redistribute(put(source, values), target), target, values)
    source = NamedSharding(mesh, P("x", "y"))
    moved = jax.jit(lambda x: [redistribute(x, target, source=source) for target in every])(put(source, values))
    for y, target in zip(moved, every, strict=True):
        assert_exact(y, target, values)


@pytest.mark.parametrize("count", sampled([3, 24], 3))
def test_the_same_devices_on_other_axes(count: int):
    for source, target in refactored(1, count):
        assert_exact(redistribute(put(source), target), target, VALUES)


@pytest.mark.parametrize("count", sampled([3, 12], 3))
def test_the_same_devices_on_other_axes_under_jit(count: int):
    for source, target in refactored(2, count):
        f = jax.jit(lambda x, s=source, t=target: redistribute(x, t, source=s), out_shardings=target)
        assert_exact(f(put(source)), target, VALUES)


def test_other_axes_under_jit_that_the_sources_mesh_cannot_express():
    """JAX needs `out_shardings` here: by itself it looks for the result's axes on the source's mesh."""
    source = NamedSharding(mesh_of({"x": 4, "y": 2}), P(None, "x"))
    target = NamedSharding(mesh_of({"a": 2, "b": 2, "c": 2}), P(("c", "a")))
    f = jax.jit(lambda x: redistribute(x, target, source=source), out_shardings=target)
    assert_exact(f(put(source)), target, VALUES)


def test_axes_of_one_device():
    mesh = mesh_of({"x": 4, "o": 1, "y": 2})
    for before, after in ((P("x", "y"), P("o", ("y", "x"))), (P(("x", "o"), "y"), P(None, ("y", "o", "x")))):
        source, target = NamedSharding(mesh, before), NamedSharding(mesh, after)
        f = jax.jit(lambda x, t=target, s=source: [redistribute(x, t, source=given) for given in (s, None)])
        for moved in (*f(put(source)), redistribute(put(source), target)):
            assert_exact(moved, target, VALUES)


def test_a_mesh_of_one_device():
    target = NamedSharding(mesh_of({"x": 1}), P("x"))
    assert_exact(redistribute(put(target), NamedSharding(target.mesh, P())), target, VALUES)
    assert_exact(jax.jit(lambda x: redistribute(x, target))(put(target)), target, VALUES)


@pytest.mark.sweep
def test_eighty_devices():
    """8 x 10, whose axes have a common factor but no common refinement."""
    worker.check(["many"], devices=80)


# ---- uneven sizes ----------------------------------------------------------------------------------


def uneven(shape: tuple[int, ...], source: NamedSharding, target: NamedSharding, known: bool) -> None:
    """Moves an array of a shape that JAX shards only inside jit, and compares it."""

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        there = jax.lax.with_sharding_constraint(x, source)
        return jax.lax.with_sharding_constraint(
            redistribute(there, target, source=source if known else None), everywhere
        )

    everywhere = NamedSharding(source.mesh, P())
    assert_exact(f(filled(shape)), everywhere, filled(shape))


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize("known", [True, False], ids=["source=", "unknown"])
@pytest.mark.parametrize("size", sampled([0, 1, 2, 3, 7, 13], 2))
def test_uneven_sizes(size: int, known: bool):
    """Prime sizes, fewer elements than pieces, one element and none."""
    ends = [NamedSharding(mesh_of(SIZES), P(*spec)) for spec in (["x"], ["y"], [("x", "y")], [("y", "x")], [])]
    every = list(pairs(ends))
    for source, target in every[::2] if size == 7 and known else random.Random(size).sample(every, 3):
        uneven((size,), source, target, known)


@pytest.mark.slow
def test_gradients_of_uneven_sizes():
    source, target = NamedSharding(mesh_of(SIZES), P("x")), NamedSharding(mesh_of(SIZES), P(None, ("y", "x")))
    everywhere, values = NamedSharding(source.mesh, P()), filled((7, 5))
    pin = jax.lax.with_sharding_constraint
    f = jax.jit(jax.grad(lambda x: (redistribute(pin(x, source), target, source=source) ** 2).sum()))
    assert_exact(f(jax.device_put(values, everywhere)), None, 2 * values)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0,)])
def test_empty_arrays(shape: tuple[int, ...]):
    """XLA chooses their shardings and shards freely."""
    source, target = NamedSharding(mesh_of(SIZES), P("x")), NamedSharding(mesh_of(SIZES), P("y"))
    x = put(source, filled(shape))
    assert redistribute(x, target).sharding.is_equivalent_to(target, x.ndim)
    for given in (source, None):
        y = jax.jit(lambda x, s=given: redistribute(x, target, source=s))(x)
        assert (y.shape, y.dtype, y.sharding.device_set) == (x.shape, x.dtype, x.sharding.device_set)


# ---- unreduced -------------------------------------------------------------------------------------

LEFT, RIGHT = filled((8, 16)) % 5, filled((16, 8)) % 7
PRODUCT = LEFT @ RIGHT


def product(over: tuple[str, ...], left: jax.Array, right: jax.Array, rows: str | None = None) -> jax.Array:
    """A matrix product whose sum over mesh axes is not finished yet."""
    return jnp.einsum("ij,jk->ik", left, right, out_sharding=P(rows, unreduced=set(over)))


def factors(over: tuple[str, ...], rows: str | None = None) -> tuple[jax.Array, jax.Array]:
    return jax.device_put(LEFT, P(rows, over)), jax.device_put(RIGHT, P(over, None))


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize(
    ("over", "rows"), [(("x",), None), (("y",), "x"), (("x", "y"), None)], ids=["x", "y with rows on x", "x and y"]
)
@pytest.mark.parametrize(
    "target", sampled([P(), P("x"), P(None, "y"), P("y", "x"), P(None, ("y", "x"))], P("y", "x")), ids=str
)
def test_unreduced_sources(over: tuple[str, ...], rows: str | None, target: P):
    with jax.set_mesh(mesh_of(SIZES, EXPLICIT)):
        left, right = factors(over, rows)
        wanted = NamedSharding(left.sharding.mesh, target)
        f = jax.jit(lambda a, b: redistribute(product(over, a, b, rows), target))
        assert_exact(f(left, right), wanted, PRODUCT)
        assert_exact(redistribute(product(over, left, right, rows), target), wanted, PRODUCT)


def test_what_stays_unreduced():
    with jax.set_mesh(mesh_of(SIZES, EXPLICIT)):
        summands = product(("y",), *factors(("y",), "x"), "x")
        moved = redistribute(summands, P(None, "x", unreduced={"y"}))
        assert moved.sharding.spec.unreduced == {"y"}
        target = NamedSharding(moved.sharding.mesh, P(None, ("x", "y")))
        assert_exact(redistribute(moved, target), target, PRODUCT)


def test_an_unreduced_source_is_reduced_by_a_reduce_scatter():
    with jax.set_mesh(mesh_of(SIZES, EXPLICIT)):
        summands = product(("x",), *factors(("x",)))
        f = jax.jit(lambda x: redistribute(x, P("x")))
        assert executed(f.lower(summands).compile()) == {("reduce_scatter", 3 * 2 * 8 * 4): 1}


STARTS = [(P(), P(unreduced={"x"})), (P("x"), P(unreduced={"x", "y"})), (P("x"), P(None, "x", unreduced={"y"}))]
STARTS += [(P("y", "x"), P("x", unreduced={"y"})), (P(None, "y"), P("y", unreduced={"x"}))]


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize(("source", "target"), sampled(STARTS, STARTS[-1]))
def test_unreduced_targets(source: P, target: P):
    """Eagerly, under jit, and from an array that is not sharded: the shards of a group add up to the array."""
    whole = filled((8, 12))
    with jax.set_mesh(mesh_of(SIZES, EXPLICIT)):
        x = jax.device_put(whole, source)
        for moved in (
            redistribute(x, target),
            jax.jit(lambda v: redistribute(v, target))(x),
            redistribute(whole, target),
        ):
            assert moved.sharding.spec.unreduced == target.unreduced
            assert np.array_equal(summed(moved), whole)
            assert_exact(redistribute(moved, P()), NamedSharding(moved.sharding.mesh, P()), whole)


def summed(x: jax.Array) -> np.ndarray:
    """The sum of an array's summands, from its shards; replicas of a summand count once."""
    spec = x.sharding.spec
    places = NamedSharding(x.sharding.mesh, P(*spec.partitions)).devices_indices_map(x.shape)
    total, count = np.zeros(x.shape, x.dtype), np.zeros(x.shape, int)
    for shard in x.addressable_shards:
        total[places[shard.device]] += np.asarray(shard.data)
        count[places[shard.device]] += 1
    return total / (count // np.prod([SIZES[name] for name in spec.unreduced]))


# ---- dtypes ----------------------------------------------------------------------------------------

DTYPES = ["bfloat16", "float16", "int8", "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2", "int4"]


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize("name", sampled(DTYPES, "bool", "int4"))
def test_dtypes(name: str):
    """Through each kind of step; the elements are numbers modulo 7, which fit narrow dtypes."""
    dtype = jnp.dtype(name)
    values = (filled(SHAPE, np.int32) % (2 if name == "bool" else 7)).astype(dtype)
    mesh = mesh_of(SIZES)
    ends = ((BACK, THERE), (P("x"), P()), (P(), P("x")), (P("x"), P("y")), (P(("x", "y")), P(("y", "x"))))
    for before, after in ends:
        source, target = NamedSharding(mesh, before), NamedSharding(mesh, after)
        assert_exact(redistribute(put(source, values), target), target, values)


def test_not_a_number_and_minus_zero_are_moved_as_they_are():
    values = np.array([np.nan, -0.0, np.inf, -1] * 16, np.float32).reshape(SHAPE)
    values.view(np.uint32)[0, 0] = 0x7FC12345  # a NaN with a payload
    for source, target in random.Random(7).sample(list(pairs(shardings())), 6):
        assert_exact(redistribute(put(source, values), target), target, values)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_random_keys(jitted: bool):
    """As in a training state; an array of keys is sharded along its own dims."""
    source, target = NamedSharding(mesh_of(SIZES), P("x")), NamedSharding(mesh_of(SIZES), P("y"))
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), source)
    f = jax.jit(lambda k: redistribute(k, target, source=source)) if jitted else lambda k: redistribute(k, target)
    moved = f(keys)
    assert moved.dtype == keys.dtype and moved.sharding.is_equivalent_to(target, 1)
    assert np.array_equal(jax.random.key_data(moved), jax.random.key_data(keys))


# ---- inputs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_an_unsharded_array_on_the_mesh_that_is_set(jitted: bool, kind: AxisType):
    mesh = mesh_of(SIZES, kind)
    with jax.set_mesh(mesh):
        for target in (THERE, NamedSharding(mesh, THERE)):
            f = partial(redistribute, sharding=target)
            assert_exact((jax.jit(f) if jitted else f)(VALUES), NamedSharding(mesh, THERE), VALUES)


@pytest.mark.parametrize("known", [True, False], ids=["source=", "unknown"])
def test_under_jit_an_unsharded_array_is_put_on_the_devices_of_the_target(known: bool):
    """As with `with_sharding_constraint`: the program is for the mesh, not for the device of its argument."""
    mesh = mesh_of(SIZES)
    target = NamedSharding(mesh, THERE)
    f = jax.jit(lambda x: redistribute(x, target, source=NamedSharding(mesh, P()) if known else None))
    assert_exact(f(VALUES), target, VALUES)
    assert_exact(f(jnp.asarray(VALUES)), target, VALUES)


# ---- forms of targets ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_a_spec_is_on_the_mesh_that_is_set(kind: AxisType):
    mesh = mesh_of(SIZES, kind)
    source, target = NamedSharding(mesh, BACK), NamedSharding(mesh, THERE)
    with jax.set_mesh(mesh):
        x = put(source)
        assert_exact(redistribute(x, THERE), target, VALUES)
        assert_exact(redistribute(x, target), target, VALUES)
        assert_exact(jax.jit(lambda x: redistribute(x * 2, THERE) + 1)(x), target, VALUES * 2 + 1)
        assert_exact(jax.jit(lambda x: redistribute(x, THERE, source=BACK))(x), target, VALUES)


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize("how", ["eager", "source=", "unknown"])
@pytest.mark.parametrize("is_set", [{"x": 4, "y": 2}, {"k": 8}], ids=str)
def test_a_sharding_need_not_be_on_the_mesh_that_is_set(is_set: dict[str, int], how: str):
    """As when weights leave the training mesh for the serving mesh."""
    xy, yx, k = ({"x": 4, "y": 2}, {"x": 2, "y": 4}, {"k": 8})
    with jax.set_mesh(mesh_of(is_set)):
        for here, before, there, after in (
            (xy, BACK, xy, THERE),
            (xy, BACK, yx, P("y", "x")),
            (xy, BACK, k, P("k")),
            (k, P("k"), yx, P("x", "y")),
        ):
            source, target = NamedSharding(mesh_of(here), before), NamedSharding(mesh_of(there), after)
            f = partial(redistribute, sharding=target, source=source if how == "source=" else None)
            f = f if how == "eager" else jax.jit(f, out_shardings=target)
            assert_exact(f(put(source)), target, VALUES)


def test_auto_axes_where_a_mesh_of_explicit_axes_is_set():
    source, target = NamedSharding(mesh_of(SIZES), BACK), NamedSharding(mesh_of(SIZES), THERE)
    with jax.set_mesh(mesh_of(SIZES, EXPLICIT)):
        assert_exact(redistribute(put(source), target), target, VALUES)
        explicit = NamedSharding(mesh_of(SIZES, EXPLICIT), THERE)
        assert_exact(redistribute(put(source), explicit), explicit, VALUES)
        other = NamedSharding(mesh_of({"k": 8}), P("k"))
        for there, given in ((target, source), (target, None), (other, source), (other, None)):
            f = jax.jit(partial(redistribute, sharding=there, source=given), out_shardings=there)
            assert_exact(f(put(source)), there, VALUES)


def test_a_mesh_of_explicit_and_auto_axes():
    """Eagerly both are known; under jit, the type has the explicit axes, and `source=` the rest."""
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = jax.sharding.Mesh(devices, ("x", "y"), axis_types=(EXPLICIT, AUTO))
    source, target = NamedSharding(mesh, BACK), NamedSharding(mesh, THERE)
    assert_exact(redistribute(put(source), target), target, VALUES)
    source, target = NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "x"))
    with jax.set_mesh(mesh):
        f = jax.jit(lambda x: redistribute(x, P(None, "x"), source=P("x")))
        assert_exact(f(put(source)), target, VALUES)
        for before, after in ((BACK, P(None, ("x", "y"))), (P("y"), P("x", "y")), (BACK, THERE)):
            source, target = NamedSharding(mesh, before), NamedSharding(mesh, after)
            f = jax.jit(partial(redistribute, sharding=after, source=before), out_shardings=target)
            assert_exact(f(put(source)), target, VALUES)
            runs = executed(f.lower(put(source)).compile())
            # jax 0.12 moves an explicit axis that lies within an auto one to the front of its dim, and back.
            assert after == THERE or runs == promised(as_plan(source, target, SHAPE, "float32"))
        assert_exact(jax.jit(lambda x: redistribute(x, P("y", "x")))(VALUES), NamedSharding(mesh, P("y", "x")), VALUES)


def test_a_layout_is_a_target():
    mesh = mesh_of(SIZES)
    source, target = NamedSharding(mesh, BACK), NamedSharding(mesh, THERE)
    for text, axes in (("f32[8, {y}{x}1]", rs.Mesh(x=4, y=2)), ("f32[8, {k:(4)2}{k:(1)4}1]", rs.Mesh(k=8))):
        layout = rs.Layout.parse(text, axes)
        assert_exact(redistribute(put(source), layout), target, VALUES)
        with jax.set_mesh(mesh):
            here = rs.Layout.parse("f32[{x}2, {y}4]", rs.Mesh(x=4, y=2))
            f = jax.jit(lambda x, t=layout, s=here: redistribute(x, t, source=s))
            assert_exact(f(put(source)), target, VALUES)


def test_trees():
    mesh = mesh_of(SIZES)
    source, one, other = (NamedSharding(mesh, spec) for spec in (BACK, THERE, P("y")))
    tree = {"a": put(source), "b": [put(source, VALUES + 1), (put(source, VALUES + 2), None)]}
    for run in (redistribute, jax.jit(redistribute, static_argnums=1)):
        moved = run(tree, one)
        assert moved["b"][1][1] is None
        assert_exact(moved["a"], one, VALUES)
        assert_exact(moved["b"][1][0], one, VALUES + 2)
    assert redistribute([], one) == [] and redistribute(None, one) is None
    moved = redistribute(tree, {"a": one, "b": other})  # a prefix
    assert_exact(moved["a"], one, VALUES)
    assert_exact(moved["b"][0], other, VALUES + 1)
    assert_exact(moved["b"][1][0], other, VALUES + 2)
    moved = redistribute(tree, {"a": one, "b": [source, (other, None)]})  # of the same structure
    assert moved["b"][1][1] is None
    assert_exact(moved["b"][0], source, VALUES + 1)
    assert_exact(moved["b"][1][0], other, VALUES + 2)
    moved = redistribute(tree, {"a": P("y"), "b": P(("x", "y"))})
    assert_exact(moved["b"][1][0], NamedSharding(mesh, P(("x", "y"))), VALUES + 2)
    f = jax.jit(lambda tree: redistribute(tree, one, source={"a": source, "b": None}))
    assert_exact(f(tree)["b"][0], one, VALUES + 1)


def test_under_jit_what_is_used_again_is_not_lost():
    source, target = NamedSharding(mesh_of(SIZES), BACK), NamedSharding(mesh_of(SIZES), THERE)
    f = jax.jit(lambda x: redistribute(x, target, source=source, donate=True) + x, out_shardings=target)
    x = put(source)
    assert_exact(f(x), target, VALUES * 2)
    assert_exact(x, source, VALUES)


# ---- budgets and networks --------------------------------------------------------------------------


TILE = 64 * 64 * 4 // 8


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize("known", [True, False], ids=["source=", "unknown"])
@pytest.mark.parametrize(
    ("budget", "rounds"),
    [(2 * TILE, 48), (f"{2 * TILE} B", 48), (2 * TILE + 1024, 3), (3 * TILE, 1)],
    ids=["floor", "floor as text", "messages", "ample"],
)
def test_the_plan_of_the_budget_is_what_runs(budget: int | str, rounds: int, known: bool):
    """At the floor, messages of 8 elements replace the all-to-all: three of its shares of 128, in 16 pieces each."""
    source, target = NamedSharding(mesh_of(SIZES), BACK), NamedSharding(mesh_of(SIZES), THERE)
    f = jax.jit(
        lambda x: redistribute(x, target, source=source if known else None, budget=budget),
        in_shardings=source,
        out_shardings=target,
    )
    compiled = f.lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile()
    plan = as_plan(source, target, (64, 64), "float32", budget=budget)
    assert plan.launches == rounds and plan.peak_bytes <= read_budget(budget)
    assert executed(compiled) == promised(plan)


@pytest.mark.slow
def test_random_budgets():
    """Between the floor and what the plan without a budget needs."""
    choose, tried = random.Random(8), Counter()
    for source, target in choose.sample(list(pairs(shardings())), 30):
        plan = as_plan(source, target, (8, 8), "float32")
        budget = choose.randint(plan.floor_bytes, plan.peak_bytes)
        tight = as_plan(source, target, (8, 8), "float32", budget=budget)
        if tight == plan:
            continue
        tried.update(step.kind for step in tight.steps)
        assert_exact(redistribute(put(source), target, budget=budget), target, VALUES)
    assert tried["exchange"] >= 5, tried


SLOW = rs.Network("lab", axes={"x": (1e-3, 1e9), "y": (1e-9, 1e12)})


@pytest.mark.parametrize("known", [True, False], ids=["source=", "unknown"])
def test_a_network_decides_the_plan(known: bool):
    """If each call along x costs a millisecond, a gather replaces two moves."""
    source, target = NamedSharding(mesh_of(SIZES), P(None, "x")), NamedSharding(mesh_of(SIZES), P(("y", "x")))
    plans = [as_plan(source, target, SHAPE, "float32", network=network) for network in (None, SLOW)]
    assert promised(plans[0]) != promised(plans[1])
    f = jax.jit(
        lambda x: redistribute(x, target, source=source if known else None, network=SLOW),
        in_shardings=source,
        out_shardings=target,
    )
    assert executed(f.lower(jax.ShapeDtypeStruct(SHAPE, jnp.float32)).compile()) == promised(plans[1])
    assert_exact(f(put(source)), target, VALUES)
