"""`Layout.from_jax` and `to_jax`: the meaning of a layout is where JAX itself says that the elements are."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from reshard.errors import LayoutError, MeshError
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from reshard.types.notation import jax_sharding
from tests.jax.oracle import EXPLICIT, mesh_of, spec_of
from tests.layouts import contiguous_layouts

SIZES = {"x": 4, "y": 2}
AXES = Mesh(x=4, y=2)
ORDERS = (None, [5, 2, 7, 0, 3, 6, 1, 4])


def where(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Device id -> indices per dim, by JAX."""
    index_map = sharding.devices_indices_map(shape)
    return {
        device.id: tuple(tuple(range(*part.indices(size))) for part, size in zip(index, shape, strict=True))
        for device, index in index_map.items()
    }


def means(layout: Layout) -> dict[int, tuple[tuple[int, ...], ...]]:
    return {device: tuple(map(tuple, meaning(layout, device))) for device in layout.mesh.devices}


# ---- from_jax --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids=["in order", "in another order"])
@pytest.mark.parametrize("sizes", [SIZES, {"x": 2, "y": 3}, {"a": 2, "b": 2, "c": 2}], ids=str)
def test_a_layout_means_what_jax_says(sizes: dict[str, int], order: list[int] | None):
    mesh = mesh_of(sizes, order=None if order is None else [o for o in order if o < math.prod(sizes.values())])
    axes = Mesh(sizes)
    every = list(contiguous_layouts(axes, (24, 24, 24)))
    for layout in random.Random(0).sample(every, min(20, len(every))):
        sharding = NamedSharding(mesh, spec_of(layout))
        layout = Layout.from_jax(sharding, (24, 24, 24), "float32")
        assert means(layout) == where(sharding, (24, 24, 24)), sharding
        assert layout.tile_shape == sharding.shard_shape((24, 24, 24))
        assert layout.mesh.devices == tuple(device.id for device in mesh.devices.flat)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (P(), "f32[10, 16]"),
        (P("x"), "f32[{x}3/10, 16]"),
        (P(None, "y"), "f32[10, {y}8]"),
        (P(("y", "x")), "f32[{y}{x}2/10, 16]"),
        (P("y", "x"), "f32[{y}5, {x}4]"),
        (P(None, ("x",)), "f32[10, {x}4]"),
        (P((), "x"), "f32[10, {x}4]"),
    ],
    ids=str,
)
def test_from_jax(spec: P, text: str):
    assert Layout.from_jax(NamedSharding(mesh_of(SIZES), spec), (10, 16), "float32") == Layout.parse(text, AXES)


def test_a_mesh_without_devices_is_numbered_by_position():
    sharding = NamedSharding(AbstractMesh((4, 2), ("x", "y")), P("y"))
    assert Layout.from_jax(sharding, (8,), "int8") == Layout.parse("s8[{y}4]", AXES)


def test_axes_of_one_device_hold_nothing():
    mesh = mesh_of({"x": 4, "one": 1, "y": 2})
    layout = Layout.from_jax(NamedSharding(mesh, P(("x", "one"))), (8, 8), "float32")
    assert layout == Layout.parse("f32[{x}2, 8]", Mesh(x=4, one=1, y=2))


def test_unreduced_axes_are_partial():
    sharding = NamedSharding(mesh_of(SIZES, EXPLICIT), P("y", unreduced={"x"}))
    assert Layout.from_jax(sharding, (8, 8), "float32") == Layout.parse("f32[{y}4, 8] + sum{x}", AXES)


@pytest.mark.parametrize("dtype", ["bfloat16", jax.numpy.bfloat16, jax.numpy.dtype("bfloat16")], ids=str)
def test_dtypes_as_jax_has_them(dtype: Any):
    assert Layout.from_jax(NamedSharding(mesh_of(SIZES), P("x")), (8,), dtype).dtype == "bfloat16"


# ---- to_jax ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids=["in order", "in another order"])
def test_jax_puts_a_layout_where_it_means(order: list[int] | None):
    mesh, axes = mesh_of(SIZES, order=order), Mesh(SIZES, device_ids=order)
    for layout in contiguous_layouts(axes, (16, 24)):
        sharding = layout.to_jax(mesh)
        assert sharding.mesh == mesh
        assert where(sharding, (16, 24)) == means(layout)
        assert Layout.from_jax(sharding, (16, 24), "float32") == layout


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [
        (SIZES, {"k": 8}, 3),  # replicated, and all of k in either dim
        ({"k": 8}, SIZES, 3),
        ({"k": 8}, {"a": 2, "b": 2, "c": 2}, 3),
        (SIZES, {"a": 2, "b": 2, "c": 2}, 11),
        ({"a": 2, "b": 2, "c": 2}, {"k": 8}, 3),
        ({"a": 2, "b": 2, "c": 2}, SIZES, 11),
    ],
)
def test_onto_other_axes_of_the_same_devices(one: dict[str, int], other: dict[str, int], count: int):
    """Axes of the other mesh may be products of the layout's, or parts of them."""
    mesh, expressed = mesh_of(other), 0
    for layout in contiguous_layouts(Mesh(one), (16, 24)):
        try:
            sharding = layout.to_jax(mesh)
        except LayoutError:
            continue
        expressed += 1
        assert where(sharding, (16, 24)) == means(layout)
    assert expressed == count


def test_to_a_mesh_without_devices():
    mesh = AbstractMesh((4, 2), ("x", "y"))
    assert Layout.parse("f32[{y}{x}2, 8]", AXES).to_jax(mesh) == NamedSharding(mesh, P(("y", "x"), None))


def test_partial_layouts_are_unreduced():
    mesh = mesh_of(SIZES, EXPLICIT)
    layout = Layout.parse("f32[{y}4, 8] + sum{x}", AXES)
    sharding = layout.to_jax(mesh)
    assert sharding.spec.unreduced == {"x"} and sharding.spec.partitions == ("y", None)
    assert Layout.from_jax(sharding, (8, 8), "float32") == layout


@pytest.mark.parametrize("reduction", ["max", "min", "mean", "product"])
def test_other_reductions_where_jax_has_them(reduction: str):
    layout = Layout.parse(f"f32[{{y}}4, 8] + {reduction}{{x}}", AXES)
    kinds = getattr(jax.sharding, "UnreducedKind", None)
    if hasattr(kinds, reduction):
        assert Layout.from_jax(layout.to_jax(mesh_of(SIZES, EXPLICIT)), (8, 8), "float32") == layout
        return
    with pytest.raises(LayoutError) as caught:
        layout.to_jax(mesh_of(SIZES, EXPLICIT))
    for word in (jax.__version__, reduction, "finish the reduction"):
        assert word in str(caught.value)


# ---- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["f32[2{x}2]", "f32[{x}2{y}]", "f32[8{x}, 4]"])
def test_what_is_not_contiguous(text: str):
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text, AXES).to_jax(mesh_of(SIZES))
    for word in ("NamedSharding", "contiguous tiles", "reshape"):
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["f32[{x:(1)2}4]", "f32[{x:(2)2}4]", "f32[{y}{x:(1)2}4]", "f32[8] + sum{x:(1)2}"])
def test_parts_of_axes(text: str):
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text, AXES).to_jax(mesh_of(SIZES, EXPLICIT))
    for word in ("x:(", "<x=4, y=2>", "names whole axes", "axes are cut there"):
        assert word in str(caught.value)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_mesh_of_a_jax_mesh(order: list[int] | None):
    made = Mesh(mesh_of(SIZES, order=order))
    assert made.device_ids == (None if order is None else tuple(order))
    assert made == jax_sharding.mesh_of(mesh_of(SIZES, order=order))
    assert dict(made.axes) == SIZES


@pytest.mark.parametrize("mesh", [{"x": 4}, {"x": 2, "y": 2}], ids=str)
def test_a_jax_mesh_of_another_size(mesh: dict[str, int]):
    with pytest.raises(MeshError, match="different devices"):
        Layout.parse("f32[{x}2, 8]", AXES).to_jax(mesh_of(mesh))


def test_a_jax_mesh_of_other_devices():
    ordered = Mesh(SIZES, device_ids=ORDERS[1])
    with pytest.raises(MeshError, match="the same order"):
        Layout.parse("f32[{x}2, 8]", ordered).to_jax(mesh_of(SIZES))


@pytest.mark.parametrize(
    ("sharding", "words"),
    [
        (SingleDeviceSharding, ("SingleDeviceSharding", "NamedSharding")),
        (P("x"), ("PartitionSpec", "NamedSharding(mesh")),
        (None, ("None", "NamedSharding")),
    ],
    ids=str,
)
def test_what_is_no_named_sharding(sharding: Any, words: tuple[str, ...]):
    given = SingleDeviceSharding(jax.devices()[0]) if sharding is SingleDeviceSharding else sharding
    with pytest.raises(LayoutError) as caught:
        Layout.from_jax(given, (8, 8), "float32")
    for word in ("(8, 8)", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (P(None, None, "x"), ("3 entries", "rank 2", "(8, 8)", "at most one per dim")),
        (P(P.UNCONSTRAINED), ("UNCONSTRAINED", "(8, 8)", "name its axes")),
    ],
    ids=str,
)
def test_specs_that_are_no_layouts(spec: P, words: tuple[str, ...]):
    with pytest.raises(LayoutError) as caught:
        Layout.from_jax(NamedSharding(mesh_of(SIZES), spec), (8, 8), "float32")
    for word in words:
        assert word in str(caught.value)


def test_what_is_no_mesh():
    for wrong in ("x=4", None, SimpleNamespace(shape=(4, 2))):
        with pytest.raises(MeshError, match="is not a jax mesh"):
            jax_sharding.mesh_of(wrong)
