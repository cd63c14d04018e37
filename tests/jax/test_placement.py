"""Placement: which sharding a target or source means, on which mesh, and the layout of a sharding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import Mesh as JaxMesh
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.errors import LayoutError, MeshError
from reshard.jax import placement
from tests.jax.oracle import AUTO, EXPLICIT, filled, layout_of, mesh_of, specs

SIZES = {"x": 4, "y": 2}
SHAPE = (8, 8)


def on(spec: P, kind: AxisType = AUTO) -> NamedSharding:
    return NamedSharding(mesh_of(SIZES, kind), spec)


def put(spec: P, kind: AxisType = AUTO) -> jax.Array:
    return jax.device_put(filled(SHAPE), on(spec, kind))


def traced(f: Any, x: jax.Array) -> Any:
    """What a function returns for a traced array."""
    results: list[Any] = []
    jax.make_jaxpr(lambda v: results.append(f(v)))(x)
    return results[0]


# ---- targets ---------------------------------------------------------------------------------------


def test_a_spec_is_on_the_arrays_mesh_unless_another_is_set() -> None:
    x = put(P("x"))
    assert placement.resolve(P("y"), x, "target") == on(P("y"))
    with jax.set_mesh(mesh_of({"k": 8})):
        assert placement.resolve(P("k"), x, "target") == NamedSharding(mesh_of({"k": 8}), P("k"))


def test_a_layout_is_on_the_same_mesh_as_a_spec() -> None:
    layout = rs.Layout.parse("f32[{x}2, {y}4]", rs.Mesh(x=4, y=2))
    assert placement.resolve(layout, put(P()), "target").is_equivalent_to(on(P("x", "y")), 2)


@pytest.mark.parametrize(
    ("target", "kind", "text"),
    [
        ("x", LayoutError, "the target 'x' is a str; give a NamedSharding"),
        (P("z"), MeshError, "name axes of that mesh"),
        (P(("x", "y"), "x"), MeshError, "name axes of that mesh, each once"),
        (P(None, None, "x"), LayoutError, "3 entries"),
        (rs.Layout.parse("f32[{x}2, {y}2]", rs.Mesh(x=4, y=2)), LayoutError, "is for an array of shape (8, 4)"),
        (rs.Layout.parse("bf16[{x}2, {y}4]", rs.Mesh(x=4, y=2)), LayoutError, "but this array has (8, 8) and float32"),
    ],
)
def test_what_does_not_fit_is_refused(target: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        placement.resolve(target, put(P()), "target")
    assert text in str(caught.value)


def test_a_spec_without_any_mesh_is_refused() -> None:
    with pytest.raises(MeshError, match=r"names no mesh, and none is set; give NamedSharding\(mesh, spec\)"):
        placement.resolve(P("x"), filled(SHAPE), "target")


# ---- arrays ----------------------------------------------------------------------------------------


def test_the_sharding_of_an_array_is_known_if_it_is_concrete_or_typed() -> None:
    assert placement.sharding_of(put(P("x"))) == on(P("x"))
    assert placement.sharding_of(filled(SHAPE)) is None
    assert placement.sharding_of(jnp.zeros(3)) is None
    assert traced(placement.sharding_of, put(P("x"))) is None
    with jax.set_mesh(mesh_of(SIZES, EXPLICIT)):
        typed = traced(placement.sharding_of, put(P("x"), EXPLICIT))
    assert typed.spec == P("x", None) and isinstance(typed.mesh, AbstractMesh)


def test_a_type_of_explicit_and_auto_axes_is_half_of_a_sharding() -> None:
    mesh = JaxMesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"), axis_types=(EXPLICIT, AUTO))
    x = jax.device_put(filled(SHAPE), NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        assert traced(placement.sharding_of, x) is None


def test_unsharded_arrays_and_keys() -> None:
    assert placement.is_unsharded(filled(SHAPE)) and placement.is_unsharded(jnp.zeros(3))
    assert not placement.is_unsharded(put(P()))
    assert placement.is_key_array(jax.random.key(0))
    assert not placement.is_key_array(put(P())) and not placement.is_key_array(filled(SHAPE))


def test_inside_a_transformation() -> None:
    assert not placement.is_tracing()
    assert traced(lambda v: placement.is_tracing(), put(P()))


def test_the_manual_mesh_is_that_of_a_shard_map() -> None:
    assert placement.manual_mesh() is None
    seen: list[Any] = []

    def body(v: jax.Array) -> jax.Array:
        mesh = placement.manual_mesh()
        seen.append(
            (None if mesh is None else dict(mesh.shape), str(placement.layout_of(inside(mesh), (4, 8), "int8")))
        )
        return v

    def inside(mesh: Any) -> NamedSharding:
        return NamedSharding(mesh, P("y"))

    jax.make_jaxpr(jax.shard_map(body, mesh=mesh_of(SIZES), in_specs=P("x"), out_specs=P("x"), axis_names={"x"}))(
        put(P("x"))
    )
    assert seen == [(SIZES, "s8[{y}2, 8]")]


# ---- shardings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", specs(SIZES, 2), ids=str)
def test_layouts_of_shardings(spec: P) -> None:
    """Those that the specs' text says, prime sizes included."""
    for shape in (SHAPE, (13, 7)):
        assert placement.layout_of(on(spec), shape, "float32") == layout_of(on(spec), shape, "float32")


def test_layouts_by_ids_differ_where_the_order_of_devices_does() -> None:
    turned = NamedSharding(mesh_of(SIZES, order=range(7, -1, -1)), P("x"))
    assert placement.layout_of(turned, SHAPE, "int8") == placement.layout_of(on(P("x")), SHAPE, "int8")
    assert placement.layout_of(turned, SHAPE, "int8", ids=True).mesh.device_ids == tuple(range(7, -1, -1))


def test_restricted_to_a_kind_of_axes() -> None:
    mesh = JaxMesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"), axis_types=(EXPLICIT, AUTO))
    both = NamedSharding(mesh, P(("x", "y")))
    assert placement.restrict(both, EXPLICIT, 3).spec == P("x", None, None)
    assert placement.restrict(both, AUTO, 1).spec == P("y")
    split = NamedSharding(mesh, P("y", "x"))
    assert placement.restrict(split, EXPLICIT, 2).spec == P(None, "x")


def test_kinds_of_axes() -> None:
    assert placement.has_explicit(mesh_of(SIZES, EXPLICIT)) and not placement.has_explicit(mesh_of(SIZES))


def test_targets_with_and_without_a_layout() -> None:
    layout = rs.Layout.parse("f32[{x}2, 8]", rs.Mesh(x=4, y=2))
    named: list[Any] = [on(P("x")), P("x"), layout]
    others: list[Any] = [jax.devices()[0], None, jax.memory.Space.Host, jnp.zeros(3).sharding]
    assert all(placement.is_target(given) for given in named + others)
    assert all(placement.has_layout(given) for given in named)
    assert not any(placement.has_layout(given) for given in others)
    for given in ("x", [P("x")], {"a": P("x")}, 3):
        assert not placement.is_target(given) and placement.has_layout(given)


def test_targets_that_leave_dims_open() -> None:
    assert placement.leaves_open(P(P.UNCONSTRAINED)) and placement.leaves_open(on(P("x", P.UNCONSTRAINED)))
    assert not any(placement.leaves_open(given) for given in (P("x"), on(P()), None, jax.devices()[0]))


def test_meshes_of_one_type() -> None:
    mixed = JaxMesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"), axis_types=(EXPLICIT, AUTO))
    auto, explicit = mesh_of(SIZES), mesh_of(SIZES, EXPLICIT)
    assert [placement.is_explicit(mesh) for mesh in (auto, explicit, mixed, placement.NO_MESH)] == [False, True] + [
        False
    ] * 2
    assert [placement.is_of_one_type(mesh) for mesh in (auto, explicit, mixed)] == [True, True, False]
    for mesh in (explicit, mixed):
        assert placement.of_auto_axes(mesh) == auto
        assert placement.of_auto_axes(mesh.abstract_mesh) == AbstractMesh((4, 2), ("x", "y"), axis_types=(AUTO,) * 2)


def test_one_more_dim_in_front() -> None:
    assert placement.lifted(on(P("x")), None) == on(P(None, "x"))
    assert placement.lifted(on(P("x"), EXPLICIT), ("y",)) == on(P(("y",), "x"), EXPLICIT)


def test_the_mesh_that_is_set() -> None:
    abstract = NamedSharding(AbstractMesh((4, 2), ("x", "y"), axis_types=(AUTO,) * 2), P("x"))
    assert placement.on_context_mesh(abstract) and not placement.on_context_mesh(on(P("x")))
    with jax.set_mesh(mesh_of(SIZES)):
        assert placement.on_context_mesh(on(P("x")))
        assert not placement.on_context_mesh(NamedSharding(mesh_of({"k": 8}), P("k")))
        with placement.without_context_mesh():
            assert jax.sharding.get_abstract_mesh().empty


def test_devices_and_platforms() -> None:
    mesh = mesh_of({"x": 4}, order=[6, 1, 3, 0])
    assert placement.device_order(mesh) == (6, 1, 3, 0)
    assert placement.platform_of(mesh) == "cpu"
    abstract = AbstractMesh((4,), ("x",), axis_types=(AUTO,))
    assert placement.device_order(abstract) is None and placement.platform_of(abstract) is None


def test_devices_of_a_mesh_are_by_position() -> None:
    devices = [jax.devices()[5], jax.devices()[2]]
    assert placement.devices_of(JaxMesh(np.array(devices), ("a",))) == devices
    assert placement.devices_of(AbstractMesh((2,), ("a",))) == []
