"""The drop-in function against what it replaces: random values, targets and contexts.

`jax.device_put`, `with_sharding_constraint` and `jax.sharding.reshard` say what the result is: its elements, dtype,
weak type and sharding. Where they refuse a move, ours may make it, but what they take, ours takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from reshard.jax import redistribute
from tests.jax.oracle import AUTO, EXPLICIT, assert_exact, filled, mesh_of

SIZES = {"x": 4, "y": 2}
SPECS = [P(), P("x"), P("y"), P(None, "x"), P("x", "y"), P("y", "x"), P(("x", "y")), P(None, ("y", "x"))]
DTYPES = ["float32", "int8", "bfloat16", "bool", "complex64", "uint32"]
SHAPES = [(8, 8), (8, 16), (16, 8, 3), (24, 8)]

Move = Callable[[Any], Any]


def on(spec: P, kind: AxisType = AUTO) -> NamedSharding:
    return NamedSharding(mesh_of(SIZES, kind), spec)


def array(shape: tuple[int, ...], dtype: str, source: Any) -> Any:
    """A value: on the host, on one device, or sharded; weakly typed if `dtype` is "weak"."""
    x = jnp.full(shape, 3.0) if dtype == "weak" else (filled(shape) % 5).astype(dtype)
    if source == "host":
        return np.asarray(x) if dtype != "weak" else x
    return jax.device_put(x, jax.devices()[2] if source == "device" else source)


def assert_same(ours: Any, theirs: Any) -> None:
    assert_exact(ours, theirs.sharding if isinstance(theirs.sharding, NamedSharding) else None, np.asarray(theirs))
    assert (ours.dtype, ours.weak_type, ours.committed) == (theirs.dtype, theirs.weak_type, theirs.committed)
    # Not only equivalent: jit takes another spelling of a spec, or another type, for another argument.
    assert ours.sharding == theirs.sharding and repr(ours.sharding) == repr(theirs.sharding)
    assert not isinstance(ours.sharding, NamedSharding) or jax.typeof(ours) == jax.typeof(theirs)


values = st.tuples(
    st.sampled_from(SHAPES),
    st.sampled_from([*DTYPES, "weak"]),
    st.sampled_from(["host", "device", *SPECS]),
)
targets = st.sampled_from(SPECS)
sources = st.sampled_from(["host", *SPECS])
kinds = st.sampled_from([AUTO, EXPLICIT])


def counts(few: int, many: int) -> Any:
    """How many examples a test tries: a few always, many in a full run."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])


def explore(count: int, check: Callable[..., None], *strategies: Any) -> None:
    settings(max_examples=count)(given(*strategies)(check))()


@counts(2, 20)
def test_eagerly(count: int) -> None:
    check_eagerly(((8, 8), "weak", P("x", "y")), P(None, ("y", "x")), AUTO, AUTO, False)
    explore(count, check_eagerly, values, targets, kinds, kinds, st.booleans())


def check_eagerly(value: Any, spec: P, here: AxisType, there: AxisType, is_set: bool) -> None:
    shape, dtype, source = value
    x = array(shape, dtype, on(source, here) if isinstance(source, P) else source)
    target = on(spec, there)
    theirs = jax.device_put(x, target)
    if is_set:
        with jax.set_mesh(target.mesh):
            assert_same(redistribute(x, target), theirs)
            typed = isinstance(source, P) and (here, there) == (EXPLICIT, EXPLICIT)
            assert_same(redistribute(x, spec), jax.sharding.reshard(x, spec) if typed else theirs)
    else:
        assert_same(redistribute(x, target), theirs)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_jit_compiles_once_for_our_result_and_that_of_jax(kind: AxisType) -> None:
    """Of random keys, too, whose integers have a sharding of their own."""
    for x in (filled((8, 8)), jax.random.split(jax.random.key(0), (8, 8))):
        held = jax.device_put(x, on(P("y"), kind))
        for spec in (P(), P("x"), P(("x", "y"), None), P(None, "y")):
            f = jax.jit(lambda v: v)
            f(jax.device_put(held, on(spec, kind)))
            f(redistribute(held, on(spec, kind)))
            assert f._cache_size() == 1, (x.dtype, spec)


OTHERS: dict[str, Callable[[], Any]] = {
    "a device": lambda: jax.devices()[5],
    "one device": lambda: SingleDeviceSharding(jax.devices()[1]),
    "nothing": lambda: None,
    "host memory": lambda: jax.memory.Space.Host,
    "fewer devices": lambda: NamedSharding(mesh_of({"k": 4}), P("k")),
    "devices in another order": lambda: NamedSharding(mesh_of(SIZES, order=[5, 2, 7, 0, 1, 6, 3, 4]), P("y", "x")),
    "other axes": lambda: NamedSharding(mesh_of({"a": 2, "b": 2, "c": 2}), P("c", ("a", "b"))),
}


@counts(3, 20)
def test_eagerly_to_other_targets(count: int) -> None:
    explore(count, check_other_target, values, st.sampled_from(sorted(OTHERS)), kinds)


def check_other_target(value: Any, name: str, here: AxisType) -> None:
    shape, dtype, source = value
    x = array(shape, dtype, on(source, here) if isinstance(source, P) else source)
    assert_same(redistribute(x, OTHERS[name]()), jax.device_put(x, OTHERS[name]()))


def cubed(move: Move) -> Move:
    return lambda v: (move(v * 2) ** 3).sum()


def scanned(move: Move) -> Move:
    return lambda v: jax.lax.scan(lambda c, t: (move(c + t), None), v, jnp.arange(2, dtype=v.dtype))[0]


CONTEXTS: dict[str, Callable[[Move], Move]] = {
    "jit": lambda move: lambda v: move(v),
    "jit after arithmetic": lambda move: lambda v: move(v + v),
    "grad": lambda move: jax.grad(cubed(move)),
    "jvp": lambda move: lambda v: jax.jvp(move, (v,), (v + v,)),
    "vmap": lambda move: jax.vmap(move, in_axes=2, out_axes=2),
    "scan": scanned,
    "remat": lambda move: jax.grad(cubed(jax.checkpoint(move))),
}


def check_traced(context: str, theirs: Move, ours: Move, x: Any) -> None:
    results = [jax.tree.leaves(jax.jit(CONTEXTS[context](move))(x)) for move in (ours, theirs)]
    for a, b in zip(*results, strict=True):
        assert np.array_equal(a, b) and (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
        # What a program's compiler chooses freely, such as where a gradient or a loop's result is, may differ.
        assert context in ("grad", "remat", "vmap", "scan") or a.sharding.is_equivalent_to(b.sharding, a.ndim)


traced_values = st.tuples(st.sampled_from([(8, 8), (16, 8)]), st.sampled_from(["float32", "weak"]))
contexts = st.sampled_from(sorted(CONTEXTS))


@counts(1, 12)
def test_under_jit_on_auto_axes(count: int) -> None:
    for context in ("jit after arithmetic", "vmap"):
        check_auto(((8, 8), "float32"), "host", P("x"), context, True, False)
    explore(count, check_auto, traced_values, sources, targets, contexts, st.booleans(), st.booleans())


def check_auto(value: Any, source: Any, spec: P, context: str, is_set: bool, known: bool) -> None:
    shape, dtype = value
    shape = (*shape, 3) if context == "vmap" else shape
    x = array(shape, dtype, on(source) if isinstance(source, P) else source)
    before = on(source) if known and isinstance(source, P) else None
    target: Any = spec if is_set else on(spec)

    def run() -> None:
        check_traced(
            context,
            lambda v: jax.lax.with_sharding_constraint(v, target),
            lambda v: redistribute(v, target, source=before),
            x,
        )

    if not is_set:
        return run()
    with jax.set_mesh(mesh_of(SIZES)):
        run()


@counts(1, 12)
def test_under_jit_on_explicit_axes(count: int) -> None:
    explore(count, check_explicit, traced_values, targets, targets, contexts)


def check_explicit(value: Any, source: P, spec: P, context: str) -> None:
    shape, dtype = value
    shape = (*shape, 3) if context == "vmap" else shape
    back = P(*source.partitions, *[None] * (2 - len(source.partitions)))
    with jax.set_mesh(mesh_of(SIZES, EXPLICIT)):
        x = array(shape, dtype, on(source, EXPLICIT))

        def moves(move: Callable[[Any, P], Any]) -> Move:  # A loop's carry keeps its type.
            return (lambda v: move(move(v, spec), back)) if context == "scan" else (lambda v: move(v, spec))

        check_traced(context, moves(jax.sharding.reshard), moves(redistribute), x)


CUBE = {"x": 2, "y": 2, "z": 2}
INSIDE = [P(), P("x"), P("y", "x"), P(("x", "y")), P(None, ("y", "x"))]


@counts(1, 10)
def test_inside_a_partly_manual_shard_map(count: int) -> None:
    explore(count, check_manual, kinds, st.sampled_from(INSIDE), st.sampled_from(INSIDE), st.booleans())


def check_manual(kind: AxisType, before: P, spec: P, known: bool) -> None:
    mesh = mesh_of(CUBE, kind)
    theirs = jax.lax.with_sharding_constraint if kind == AUTO else jax.sharding.reshard
    x = jax.device_put(filled((16, 16)), NamedSharding(mesh, P("z")))
    results: list[Any] = []
    for move in (lambda v, to: redistribute(v, to, source=before if known else None), theirs):

        def body(v: Any, move: Any = move) -> Any:
            return move(theirs(v, before), spec)

        f = jax.shard_map(body, mesh=mesh, in_specs=P("z"), out_specs=P("z"), axis_names={"z"})
        results.append(jax.jit(f)(x))
    assert_same(*results)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_a_format_says_where_an_array_goes_and_how_it_lies(wrap: Any) -> None:
    there = Format(Layout((1, 0)), on(P("y", "x")))
    moved = wrap(lambda x: redistribute(x, there))(array((8, 16), "float32", on(P("x", "y"))))
    assert moved.sharding == there.sharding and moved.format.layout.major_to_minor == (1, 0)
    np.testing.assert_array_equal(moved, array((8, 16), "float32", "host"))
