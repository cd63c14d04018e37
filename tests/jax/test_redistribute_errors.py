"""Wrong uses of `redistribute`: each error names the mesh axes and the global shape, what is wrong and what to do; the
array is left intact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.sharding_impls import GSPMDSharding  # what XLA chose; no public name
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.errors import BudgetError, LayoutError, MeshError, NetworkError, PlanError, ReshardError
from reshard.jax import redistribute, reshard_pytree
from tests.jax.oracle import AUTO, EXPLICIT, assert_exact, filled, mesh_of

SIZES = {"x": 4, "y": 2}
VALUES = filled((8, 8))
BEFORE, AFTER = P("x", "y"), P(None, ("y", "x"))
AXES = rs.Mesh(x=4, y=2)


def on(spec: P, kind: AxisType = AUTO) -> NamedSharding:
    return NamedSharding(mesh_of(SIZES, kind), spec)


def other(sizes: dict[str, int], *spec: Any, **options: Any) -> NamedSharding:
    return NamedSharding(mesh_of(sizes, **options), P(*spec))


def put(sharding: NamedSharding) -> jax.Array:
    return jax.device_put(VALUES, sharding)


def refused(run: Callable[[Any], Any], x: Any, kind: type[Exception], *words: str) -> Exception:
    """Runs it, and returns the error, which has all the words; `x` is intact afterwards."""
    with pytest.raises(kind) as caught:
        run(x)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"no {missing} in: {caught.value}"
    assert "OrderedDict" not in str(caught.value)
    if isinstance(x, jax.Array):
        assert_exact(x, None, VALUES)
    return caught.value


def eager(target: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda x: redistribute(x, target, **options)


def jitted(target: Any, **options: Any) -> Callable[[Any], Any]:
    return jax.jit(lambda x: redistribute(x, target, **options))


# ---- the mesh --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "one device"])
@pytest.mark.parametrize("how", [eager, jitted])
def test_a_spec_without_a_mesh(how: Any, make: Any):
    refused(how(P("x")), make(VALUES), MeshError, "'x'", "no mesh", "set_mesh")


def test_a_budget_on_other_devices():
    eight = other({"x": 2, "y": 4}, "x")
    four = NamedSharding(mesh_of({"x": 4}), P("x"))
    refused(eager(four, budget=100), put(eight), BudgetError, "100 B", "(8, 8)", "the smallest that works is")


def test_as_many_other_devices_under_jit():
    one, two = other({"x": 4}, "x", order=range(4)), other({"x": 4}, "x", order=range(4, 8))
    refused(jitted(two, source=one), put(one), ReshardError, "different devices", "x=4")


def test_other_devices_under_jit():
    half = other({"x": 4}, "x")
    refused(jitted(half, source=on(BEFORE)), put(on(BEFORE)), ReshardError, "<x=4, y=2>", "<x=4>", "different devices")
    # An unknown source is only known when the program compiles; JAX checks the devices then.
    refused(jitted(half), put(on(BEFORE)), ValueError, "devices")


@pytest.mark.parametrize("known", [True, False], ids=["source=", "unknown"])
def test_another_order_of_the_devices_under_jit(known: bool):
    """A program has one order of its devices, in which every device would get another device's tile."""
    target = NamedSharding(mesh_of(SIZES, order=range(7, -1, -1)), P("y", "x"))
    refused(jitted(target, source=on(BEFORE) if known else None), put(on(BEFORE)), ValueError, "devices")


def test_a_source_on_explicit_axes_of_an_array_that_is_not():
    f = jitted(on(AFTER, EXPLICIT), source=on(BEFORE, EXPLICIT))
    refused(f, put(on(BEFORE)), MeshError, "(8, 8)", "(Auto, Auto)", "Explicit", "own mesh")


# ---- the target ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: put(on(BEFORE)), lambda: VALUES], ids=["sharded", "numpy"])
@pytest.mark.parametrize("how", [eager, jitted])
def test_more_entries_than_dims(how: Any, make: Any):
    words = ("3 entries", "rank 2", "(8, 8)", "x=4", "at most one per dim")
    refused(how(on(P(None, None, "x"))), make(), LayoutError, *words)


def test_a_source_of_more_entries_than_dims():
    words = ("3 entries", "rank 2", "(8, 8)", "x=4", "at most one per dim")
    refused(jitted(on(AFTER), source=on(P(None, None, "y"))), put(on(BEFORE)), LayoutError, *words)


@pytest.mark.parametrize("how", [eager, jitted])
def test_a_strided_layout(how: Any):
    strided = rs.Layout.parse("f32[2{x}1, 8]", AXES)
    refused(how(strided, source=on(BEFORE)), put(on(BEFORE)), LayoutError, "f32[2{x}, 8]", "NamedSharding", "reshape")


@pytest.mark.parametrize("how", [eager, jitted])
def test_a_layout_of_parts_of_axes(how: Any):
    part = rs.Layout.parse("f32[{x:(1)2}4, 8]", AXES)
    words = ("x:(1)2", "x=4", "NamedSharding", "axes are cut there")
    refused(how(part, source=on(BEFORE)), put(on(BEFORE)), LayoutError, *words)


@pytest.mark.parametrize("how", [eager, jitted])
@pytest.mark.parametrize(
    ("text", "word"), [("f32[16, {y}{x}1]", "(16, 8)"), ("bf16[8, {y}{x}1]", "bf16"), ("f32[8]", "(8,)")]
)
def test_a_layout_of_another_array(how: Any, text: str, word: str):
    layout = rs.Layout.parse(text, AXES)
    refused(how(layout, source=on(BEFORE)), put(on(BEFORE)), ReshardError, word, "(8, 8)")


def test_a_dim_left_to_the_compiler_on_explicit_axes():
    with jax.set_mesh(mesh_of(SIZES, EXPLICIT)):
        refused(eager(P(P.UNCONSTRAINED, "x")), put(on(BEFORE, EXPLICIT)), MeshError, "UNCONSTRAINED", "(UNC", "'x': 4")


def test_a_dim_left_to_the_compiler_of_an_array_of_fewer_dims():
    refused(eager(on(P(None, "x", P.UNCONSTRAINED))), VALUES, LayoutError, "UNCONSTRAINED", "(8, 8)", "'x': 4")


TEXT, NOTHING = np.array(["a", "b"]), np.array([None, 1], dtype=object)


@pytest.mark.parametrize(
    "how", [eager, lambda target: lambda x: jax.jit(lambda: redistribute(x, target))()], ids=["eager", "jit"]
)
@pytest.mark.parametrize(
    "x",
    [TEXT, NOTHING, "abc", 2**40, np.zeros(3, [("a", "i4")]), object()],
    ids=["texts", "objects", "text", "long", "structures", "object"],
)
def test_what_jax_makes_no_array_of(how: Any, x: Any):
    with pytest.raises(LayoutError, match=r"JAX makes no array.*give arrays of numbers"):
        how(on(P()))(x)


@pytest.mark.parametrize("x", [TEXT, NOTHING, "abc", 2**40], ids=repr)
def test_what_jax_makes_no_array_of_for_a_device(x: Any):
    with pytest.raises(LayoutError, match=r"JAX makes no array"):
        redistribute(x, jax.devices()[0])


def test_uneven_shards_eagerly():
    """JAX itself supports them only under jit."""
    x = jax.device_put(filled((8, 7)), on(P("x")))
    for given in (x, filled((8, 7))):
        with pytest.raises(ValueError, match=r"(?s)'x'.*7.*divi"):
            redistribute(given, on(P(None, "x")))
    assert_exact(x, on(P("x")), filled((8, 7)))


@pytest.mark.parametrize("how", [eager, jitted])
def test_more_entries_than_dims_of_random_keys(how: Any):
    """The integers of a key are not a dim that can be sharded."""
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), on(P("x")))
    with pytest.raises(LayoutError, match=r"2 entries .* rank 1"):
        how(on(P(None, "y")), source=on(P("x")))(keys)


def test_a_mesh_without_devices_for_what_is_not_sharded_yet():
    target = NamedSharding(AbstractMesh((4, 2), ("x", "y"), axis_types=(AUTO,) * 2), AFTER)
    refused(eager(target), VALUES, MeshError, "'x': 4", "devices")


def test_explicit_and_auto_axes_of_one_mesh():
    """A type has half of the source."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), tuple(SIZES), axis_types=(EXPLICIT, AUTO))
    x = put(NamedSharding(mesh, BEFORE))
    with jax.set_mesh(mesh):
        refused(jitted(P("y"), source=P("y")), x, PlanError, "P('x', None)", "P('y'", "the type is right")


def test_a_target_that_is_partial():
    with jax.set_mesh(mesh_of(SIZES, EXPLICIT)):
        x = jax.device_put(np.zeros((8, 8), bool), P("x"))
        with pytest.raises(LayoutError, match=r"\(8, 8\): bool has no sum reduction; for bool use max"):
            redistribute(x, P("x", unreduced={"y"}))


# ---- the source ------------------------------------------------------------------------------------


def test_a_source_that_contradicts_the_type():
    words = ("(8, 8)", "'x', 'y'", "'y', 'x'", "source")
    f = jitted(on(AFTER, EXPLICIT), source=on(P("y", "x"), EXPLICIT))
    refused(f, put(on(BEFORE, EXPLICIT)), ReshardError, *words)


def test_an_equivalent_source_is_fine():
    same = other({"p": 4, "q": 2}, "p", "q")
    assert_exact(redistribute(put(on(BEFORE)), on(AFTER), source=same), on(AFTER), VALUES)


def test_a_budget_for_an_array_whose_sharding_has_no_names():
    sharding = GSPMDSharding(jax.devices(), on(P("x"))._to_xla_hlo_sharding(2))
    x = jax.device_put(VALUES, sharding)
    refused(eager(on(AFTER), budget=10**6), x, MeshError, "(8, 8)", "GSPMDSharding", "jax.device_put", "budget")


def test_a_deleted_array():
    x = put(on(BEFORE))
    x.delete()
    calls: list[Callable[[], Any]] = [
        lambda: redistribute(x, on(AFTER)),
        lambda: redistribute(x, on(BEFORE)),
        lambda: redistribute(x, None),
        lambda: redistribute({"a": put(on(BEFORE)), "b": x}, on(AFTER)),
        lambda: redistribute({"a": put(on(BEFORE)), "b": x}, on(BEFORE)),
        lambda: redistribute(put(on(BEFORE)), on(BEFORE), into={0: (0, 8)}, out=x),
    ]
    for call in calls:
        with pytest.raises(PlanError, match=r"the array of shape \(8, 8\) and dtype float32 has been deleted"):
            call()


def test_an_array_that_is_donated_twice():
    x = put(on(BEFORE))
    redistribute(x, on(AFTER), donate=True)
    with pytest.raises(PlanError, match="use the result of that call"):
        redistribute(x, on(AFTER), donate=True)


# ---- trees -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["target", "source"])
@pytest.mark.parametrize("how", ["fewer keys", "longer", "a list for an array", "a leaf without one"])
def test_a_tree_that_does_not_fit(how: str, what: str):
    x, fits = put(on(BEFORE)), on(AFTER) if what == "target" else on(BEFORE)
    tree, given = {
        "fewer keys": ({"a": x, "b": x}, {"a": fits}),
        "longer": ([x, x], [fits, fits, fits]),
        "a list for an array": (x, [fits]),
        "a leaf without one": ([x, [x]], [fits, [fits, fits]]),
    }[how]
    target, source = (given, None) if what == "target" else (on(AFTER), given)
    names = {"fewer keys": "only the arrays have b", "longer": f"only the {what} shardings have 2"}
    words = (f"tree of {what} shardings", "prefix", names.get(how, f"only the {what}"), "one sharding for all")
    refused(lambda tree: redistribute(tree, target, source=source), tree, PlanError, *words)
    assert_exact(x, on(BEFORE), VALUES)


# ---- budgets and networks --------------------------------------------------------------------------

TILE = 8 * 8 * 4 // 8


@pytest.mark.parametrize("how", [eager, jitted])
@pytest.mark.parametrize("budget", [0, 1, TILE, 2 * TILE - 1])
def test_a_budget_below_the_floor(how: Any, budget: int):
    words = (f"budget {budget} B", "(8, 8)", "(2, 4)", "<x=4, y=2>", f"{2 * TILE} B")
    error = refused(how(on(AFTER), source=on(BEFORE), budget=budget), put(on(BEFORE)), BudgetError, *words)
    assert isinstance(error, BudgetError)
    x = put(on(BEFORE))
    assert_exact(redistribute(x, on(AFTER), budget=error.smallest), on(AFTER), VALUES)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_a_budget_below_the_floor_is_refused_when_traced(kind: AxisType):
    """With the user's line on the stack."""
    x, source = put(on(BEFORE, kind)), on(BEFORE, kind)
    refused(jax.make_jaxpr(eager(on(AFTER, kind), source=source, budget=1)), x, BudgetError, "budget 1 B")


def test_a_budget_below_the_floor_of_a_source_that_is_not_known():
    """The check runs while XLA compiles, and XLA's error carries ours."""
    x = put(on(BEFORE))
    refused(jitted(on(AFTER), budget=TILE), x, Exception, f"budget {TILE} B", f"smallest that works is {2 * TILE} B")


@pytest.mark.parametrize(("before", "after"), [(BEFORE, P("y", "x")), (P("x"), P(None, "x")), (P("x"), P("y"))])
def test_the_smallest_budget_of_a_donation_works(before: P, after: P):
    """Copies that XLA would make are counted, and a refused array is not deleted."""
    x = put(on(before))
    with pytest.raises(BudgetError) as caught:
        redistribute(x, on(after), budget=0, donate=True)
    smallest = caught.value.smallest
    for _ in range(2):  # The planner does not know what XLA copies, so the first answer may be the plan's alone.
        assert_exact(x, on(before), VALUES)
        try:
            moved = redistribute(x, on(after), budget=smallest, donate=True)
            break
        except BudgetError as error:
            assert error.smallest > smallest, error
            smallest = error.smallest
    assert_exact(moved, on(after), VALUES)


@pytest.mark.parametrize("source_of", [on, None], ids=["source=", "unknown"])
@pytest.mark.parametrize("how", [eager, jitted])
@pytest.mark.parametrize(
    ("options", "kind", "word"),
    [
        ({"budget": -1}, PlanError, "budget -1"),
        ({"budget": "64 apples"}, PlanError, "'64 apples'"),
        ({"budget": 1.5}, PlanError, "1.5"),
        ({"network": "nope"}, NetworkError, "tpu-v5p"),
        ({"network": 3}, PlanError, "network 3"),
    ],
    ids=str,
)
def test_invalid_options(how: Any, options: dict[str, Any], kind: type[Exception], word: str, source_of: Any):
    source = None if source_of is None else source_of(BEFORE)
    refused(how(on(AFTER), source=source, **options), put(on(BEFORE)), kind, word)


# ---- inside shard_map ------------------------------------------------------------------------------

CUBE = {"x": 2, "y": 2, "z": 2}


def inside(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.jit(jax.shard_map(body, mesh=mesh_of(CUBE), in_specs=P("z"), out_specs=P("z"), axis_names={"z"}))


def test_an_axis_that_is_manual():
    words = ("'z'", "x=2, y=2")
    refused(inside(lambda x: redistribute(x, P("z"), source=P("x"))), VALUES, ReshardError, *words)


def test_a_region_that_is_manual_over_all_axes():
    f = jax.jit(jax.shard_map(lambda x: redistribute(x, P("x")), mesh=mesh_of(CUBE), in_specs=P("x"), out_specs=P("x")))
    refused(f, put(other(CUBE, "x")), ReshardError, "'x'")


def test_a_manual_axis_in_a_target_of_unknown_source():
    refused(inside(lambda x: redistribute(x, P("z", "x"))), put(other(CUBE, "z", "x")), ReshardError, "'z'", "x=2, y=2")


def test_a_platform_is_read_from_the_device_of_an_abstract_mesh():
    """A mesh without devices has no platform, and does not count as a TPU's."""
    target = NamedSharding(AbstractMesh((4, 2), ("x", "y"), axis_types=(AUTO,) * 2), AFTER)
    f = jax.jit(lambda x: redistribute(x, target, source=on(BEFORE)))
    assert_exact(f(put(on(BEFORE))), on(AFTER), VALUES)


@pytest.mark.parametrize("width", [1, 2])
def test_a_tree_that_contains_itself(width: int):
    """JAX would recurse until the stack is full."""
    endless: list[Any] = []
    endless += [endless] * width
    x = np.ones(8, "float32")
    for call in (
        lambda: redistribute([x], endless),
        lambda: redistribute({"w": x}, {"w": endless}),
        lambda: redistribute(endless, None),
        lambda: redistribute([x], None, source=endless),
        lambda: reshard_pytree([x], endless),
    ):
        with pytest.raises(PlanError, match="contains itself"):
            call()
