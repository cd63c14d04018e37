"""Traced moves that tracing alone decides: values on no mesh, other axes and types, open dims, devices and memories."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding, UnreducedKind
from jax.sharding import PartitionSpec as P

from reshard.jax import redistribute
from tests.jax.oracle import AUTO, EXPLICIT, as_plan, assert_exact, executed, filled, mesh_of, promised
from tests.sampling import sampled

SIZES = {"x": 4, "y": 2}
BEFORE, AFTER = P("x", "y"), P(None, ("y", "x"))
VALUES = filled((8, 8))


def on(spec: P, kind: AxisType = AUTO, sizes: dict[str, int] = SIZES) -> NamedSharding:
    return NamedSharding(mesh_of(sizes, kind), spec)


def put(spec: P, kind: AxisType = AUTO) -> jax.Array:
    return jax.device_put(VALUES, on(spec, kind))


# ---- values on no mesh -----------------------------------------------------------------------------

MADE: dict[str, Callable[[Any], Any]] = {
    "argument": lambda v: v,
    "argument after arithmetic": lambda v: v * 1,
    "iota": lambda v: jnp.arange(64, dtype=jnp.float32).reshape(8, 8),
    "zeros": lambda v: jnp.zeros((8, 8), jnp.float32) + VALUES,
    "random": lambda v: jax.random.normal(jax.random.key(0), (8, 8)) * 0 + VALUES,
    "constant": lambda v: VALUES,
    "constant on a device": lambda v: jnp.asarray(VALUES),
}


@pytest.mark.fast(2, slow=2)
@pytest.mark.parametrize("is_set", [AUTO, EXPLICIT, None], ids=str)
@pytest.mark.parametrize("made", sampled(list(MADE), "argument", "iota", "constant"))
def test_a_value_that_is_on_no_mesh(made: str, is_set: AxisType | None) -> None:
    """Any numpy argument, and what the program makes itself, with a mesh that is set or one in the target."""
    kind = is_set or AUTO
    target = AFTER if is_set else on(AFTER)
    f = jax.jit(lambda v: redistribute(MADE[made](v), target))
    derive = jax.jit(jax.grad(lambda v: (redistribute(MADE[made](v) + v * 0, target) ** 2).sum()))
    if is_set:
        with jax.set_mesh(mesh_of(SIZES, kind)):
            moved, gradient = f(VALUES), derive(VALUES)
    else:
        moved, gradient = f(VALUES), derive(VALUES)
    assert_exact(moved, on(AFTER, kind), VALUES)
    assert np.array_equal(gradient, 2 * VALUES if made.startswith("argument") else 0 * VALUES)


def test_a_value_that_is_on_no_mesh_is_made_where_it_is_wanted() -> None:
    """Not made whole on each device, to be cut there: no device has an array of 64 elements."""
    with jax.set_mesh(mesh_of(SIZES)):
        f = jax.jit(lambda: redistribute(jnp.arange(64, dtype=jnp.float32) * 2, P(("x", "y"))))
        compiled = f.lower().compile()
    assert not executed(compiled) and "f32[8]" in compiled.as_text() and "f32[64]" not in compiled.as_text()


# ---- other axes and types --------------------------------------------------------------------------

OTHERS = [
    (AUTO, EXPLICIT, SIZES, P("y")),
    (AUTO, EXPLICIT, {"a": 4, "b": 2}, P(None, "b")),
    (AUTO, EXPLICIT, {"k": 8}, P(None, "k")),
    (EXPLICIT, AUTO, SIZES, P("y")),
    (EXPLICIT, AUTO, {"a": 4, "b": 2}, P("b", "a")),
    (EXPLICIT, AUTO, {"k": 8}, P(None, "k")),
    (EXPLICIT, EXPLICIT, {"a": 4, "b": 2}, P("b", "a")),
    (EXPLICIT, EXPLICIT, {"k": 8}, P(None, "k")),
    (EXPLICIT, EXPLICIT, {"a": 2, "b": 2, "c": 2}, P("a", "c")),
    (AUTO, AUTO, {"a": 4, "b": 2}, P("b", "a")),
]


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize("is_set", sampled([True, False], True), ids=["set", "not set"])
@pytest.mark.parametrize(("here", "there", "sizes", "spec"), OTHERS, ids=str)
def test_other_axes_and_types(here: AxisType, there: AxisType, sizes: dict[str, int], spec: P, is_set: bool) -> None:
    source, target = on(BEFORE, here), on(spec, there, sizes)
    x = put(BEFORE, here)
    for given in (source, None):
        f = jax.jit(lambda x, s=given: redistribute(x, target, source=s))
        if is_set:
            with jax.set_mesh(source.mesh):
                moved = f(x)
        else:
            moved = f(x)
        same = moved.sharding.is_equivalent_to(target, 2)
        # By itself, XLA spells a result on the axes of the argument's mesh.
        assert same or there == AUTO, moved.sharding
        assert_exact(moved, target if same else None, VALUES)
        if there == EXPLICIT:
            assert dict(moved.sharding.mesh.shape) == sizes and moved.sharding.mesh.axis_types[0] == EXPLICIT
    assert_exact(redistribute(x, target), target, VALUES)


KINDS = {
    "auto": (AUTO, AUTO),
    "explicit": (EXPLICIT,) * 2,
    "x explicit": (EXPLICIT, AUTO),
    "y explicit": (AUTO, EXPLICIT),
}


def of_kinds(name: str, spec: P) -> NamedSharding:
    grid = np.array(jax.devices()).reshape(4, 2)
    return NamedSharding(jax.sharding.Mesh(grid, tuple(SIZES), axis_types=KINDS[name]), spec)


@pytest.mark.fast(4, slow=3)
@pytest.mark.parametrize("is_set", ["no mesh", "here", "there"])
@pytest.mark.parametrize("there", KINDS)
@pytest.mark.parametrize("here", ["host", *KINDS])
def test_the_type_is_that_of_jax(here: str, there: str, is_set: str) -> None:
    """On meshes of all kinds of axes: the next operation is checked by the type that the move leaves."""
    target = of_kinds(there, P("y", "x"))
    x = VALUES if here == "host" else jax.device_put(VALUES, of_kinds(here, BEFORE))
    mesh = {"here": getattr(x, "sharding", target).mesh, "there": target.mesh}.get(is_set)
    types: list[Any] = []

    def typed(v: Any) -> Any:
        types.append(jax.typeof(v))
        return v

    for known in (False, True):
        source = x.sharding if known and here != "host" else None
        with nullcontext() if mesh is None else jax.set_mesh(mesh):
            jax.jit(lambda v: typed(jax.device_put(v, target)))(x)
            moved = jax.jit(lambda v, s=source: typed(redistribute(v, target, source=s)))(x)
        theirs, ours = types[-2:]
        assert ours == theirs and repr(ours.sharding) == repr(theirs.sharding)
        assert_exact(moved, target, VALUES)


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
@pytest.mark.parametrize("x", [VALUES, jnp.asarray(VALUES)], ids=["host", "one device"])
def test_a_spec_on_the_mesh_of_a_with_statement(x: Any) -> None:
    with mesh_of(SIZES):
        for run in (lambda f: f, jax.jit):
            ours, theirs = (
                run(lambda v, f=f: f(v, AFTER))(x) for f in (redistribute, jax.lax.with_sharding_constraint)
            )
            assert ours.sharding == theirs.sharding == on(AFTER)
            assert_exact(ours, on(AFTER), VALUES)


@pytest.mark.parametrize("target", [P(), P("x"), P("y")], ids=str)
def test_an_array_that_a_maximum_is_still_to_be_taken_of(target: P) -> None:
    """Its type says which reduction, and so does the source that is read from the type."""
    pending = P(None, unreduced={"x"}, unreduced_kind=UnreducedKind.max)
    with jax.set_mesh(mesh_of({"x": 2, "y": 2}, EXPLICIT)):
        x = jax.device_put(VALUES, P(None, "x"))
        start = partial(jax.lax.reduce_max, axes=[1], out_sharding=pending)
        ours, theirs = (jax.jit(lambda v, f=f: f(start(v), target))(x) for f in (redistribute, jax.sharding.reshard))
    assert ours.sharding == theirs.sharding and jax.typeof(ours) == jax.typeof(theirs)
    assert np.array_equal(ours, VALUES.max(1)) and np.array_equal(theirs, VALUES.max(1))


def test_to_explicit_axes_the_collectives_are_the_plans() -> None:
    """The change of the type itself moves nothing."""
    source, target = on(BEFORE), on(AFTER, EXPLICIT)
    f = jax.jit(lambda x: redistribute(x, target, source=source), in_shardings=source)
    compiled = f.lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).compile()
    assert executed(compiled) == promised(as_plan(source, on(AFTER), (8, 8), "float32"))
    x = put(BEFORE, EXPLICIT)
    f = jax.jit(lambda x: redistribute(x, on(P("b", "a"), EXPLICIT, {"a": 4, "b": 2})))
    assert executed(f.lower(x).compile()) == promised(as_plan(source, on(P("y", "x")), (8, 8), "float32"))


# ---- vmap ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [P(None), P("y")], ids=str)
def test_spmd_axis_name_over_explicit_axes(spec: P) -> None:
    """The name is of an explicit axis there: the type says where the batch is, as in `jax.sharding.reshard`."""
    with jax.set_mesh(mesh_of(SIZES)):
        for move in (lambda v: redistribute(v, P("y")), lambda v: jax.sharding.reshard(v, P("y"))):
            over = jax.sharding.explicit_axes(move, in_sharding=spec)
            moved = jax.jit(jax.vmap(over, spmd_axis_name="x"))(put(P("x")))
            assert_exact(moved, on(P(None, "y")), VALUES)
            inside = jax.sharding.explicit_axes(jax.vmap(move, spmd_axis_name="x"), in_sharding=P("x"))
            assert_exact(jax.jit(inside)(put(P("x"))), on(P("x", "y")), VALUES)


def test_spmd_axis_name_of_auto_axes_beside_explicit_ones() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"), axis_types=(AUTO, EXPLICIT))
    with jax.set_mesh(mesh):
        x = jax.device_put(VALUES, NamedSharding(mesh, P("x", "y")))
        f = jax.vmap(lambda v: redistribute(v, P(None), source=P("y")), spmd_axis_name="x")
        assert_exact(jax.jit(f)(x), NamedSharding(mesh, P("x")), VALUES)


# ---- open dims -------------------------------------------------------------------------------------


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("make", [lambda: put(P("x")), lambda: VALUES, lambda: jnp.asarray(VALUES)])
def test_a_dim_left_to_the_compiler(make: Callable[[], Any], jitted: bool) -> None:
    """As in `with_sharding_constraint`, on a mesh that is set or not."""
    target = on(P(P.UNCONSTRAINED, "y"))
    for given in (target, P(P.UNCONSTRAINED, "y")):
        moves = [lambda v, g=given: redistribute(v, g), lambda v, g=given: jax.lax.with_sharding_constraint(v, g)]
        with jax.set_mesh(target.mesh):
            ours, theirs = ((jax.jit(f) if jitted else f)(make()) for f in moves)
        assert_exact(ours, theirs.sharding, VALUES)
        assert ours.sharding.spec[1] == "y"


def test_a_dim_left_to_the_compiler_inside_a_manual_region() -> None:
    mesh = mesh_of({"x": 2, "y": 2, "z": 2})

    def body(v: jax.Array) -> jax.Array:
        return redistribute(v, P(P.UNCONSTRAINED, "y"))

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("z"), out_specs=P("z"), axis_names={"z"}))
    assert_exact(f(VALUES), None, VALUES)


# ---- partly manual regions -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_an_unknown_source_inside_a_manual_region(kind: AxisType) -> None:
    """XLA moves it, as for `with_sharding_constraint`; on explicit axes the type says where it is."""
    mesh = mesh_of({"x": 2, "y": 2, "z": 2}, kind)
    for move in (lambda v: redistribute(v, P("y", "x")), lambda v: redistribute(v * 2, P("y", "x")) / 2):
        f = jax.jit(jax.shard_map(move, mesh=mesh, in_specs=P("z"), out_specs=P("z"), axis_names={"z"}))
        x = jax.device_put(VALUES, NamedSharding(mesh, P("z", "x")))
        assert_exact(f(x), NamedSharding(mesh, P(("z", "y"), "x")), VALUES)
        derived = jax.jit(jax.grad(lambda x, f=f: (f(x) ** 2).sum()))
        assert np.array_equal(derived(x), 2 * VALUES)


# ---- devices and memories --------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: put(P("x")), lambda: put(P("x"), EXPLICIT), lambda: VALUES, lambda: 2.5])
@pytest.mark.parametrize(
    "target",
    [
        lambda: SingleDeviceSharding(jax.devices()[3]),
        lambda: jax.devices()[3],
        lambda: None,
        lambda: jax.memory.Space.Host,
    ],
    ids=["SingleDeviceSharding", "Device", "None", "memory"],
)
def test_targets_that_have_no_layout(target: Callable[[], Any], make: Callable[[], Any]) -> None:
    """They are those of `jax.device_put`, with its results."""
    x = make()
    ours, theirs = redistribute(x, target()), jax.device_put(x, target())
    assert np.array_equal(ours, theirs) and ours.sharding == theirs.sharding
    assert (ours.dtype, ours.weak_type, ours.committed) == (theirs.dtype, theirs.weak_type, theirs.committed)
    tree = redistribute({"a": x, "b": [x]}, {"a": target(), "b": target()})
    assert np.array_equal(tree["b"][0], theirs)


@pytest.mark.parametrize(
    "target",
    [lambda: None, lambda: SingleDeviceSharding(jax.devices()[3]), jax.devices],
    ids=["none", "one device", "list"],
)
def test_targets_that_have_no_layout_under_jit(target: Callable[[], Any]) -> None:
    given = target()[0] if isinstance(target(), list) else target()
    moved = jax.jit(lambda v: redistribute(v * 2, given))(VALUES)
    wanted = jax.jit(lambda v: jax.device_put(v * 2, given))(VALUES)
    assert np.array_equal(moved, VALUES * 2) and moved.sharding == wanted.sharding


def test_a_mix_of_targets_in_one_tree() -> None:
    x = put(P("x"))
    moved = redistribute([x, x, x, 3], [None, on(AFTER), jax.devices()[1], on(P())])
    assert moved[0] is x and moved[2].sharding.device_set == {jax.devices()[1]}
    assert_exact(moved[1], on(AFTER), VALUES)
    assert moved[3].weak_type and int(moved[3]) == 3


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host", "device"])
def test_the_memory_of_the_target(kind: str, jitted: bool) -> None:
    target = NamedSharding(mesh_of(SIZES), P("y", "x"), memory_kind=kind)
    move = lambda v: redistribute(v, target, source=on(BEFORE))  # noqa: E731
    moved = (jax.jit(move, out_shardings=target) if jitted else move)(put(BEFORE))
    assert moved.sharding.memory_kind == kind and np.array_equal(moved, VALUES)
    back = redistribute(moved, on(BEFORE))
    assert_exact(back, on(BEFORE), VALUES)
