"""Plans on global JAX arrays: what is cut, padded, done in parts, and where the result lies.

Moves of whole programs, and what XLA compiles, are tested in tests/jax.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

import reshard as rs
from reshard.errors import LayoutError, MeshError
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from reshard.runtime import on_jax
from reshard.types import Layout, Mesh
from tests.oracle import PADDING, tiles_of

M42 = Mesh(x=4, y=2)


def jax_mesh(sizes: dict[str, int], order: list[int] | None = None) -> jax.sharding.Mesh:
    devices = np.array(jax.devices())[order if order is not None else range(int(np.prod(list(sizes.values()))))]
    return jax.sharding.Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


def indices(layout: Layout) -> np.ndarray:
    return np.arange(np.prod(layout.shape, dtype=int)).reshape(layout.shape).astype(layout.dtype)


def check_shards(layout: Layout, array: jax.Array, mesh: jax.sharding.Mesh) -> None:
    """Every device's shard has the elements of its tile, without padding."""
    shards = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
    for device, tile in tiles_of(layout).items():
        at = layout.mesh.position(device)
        real = tile[tile != PADDING]
        assert np.array_equal(shards[mesh.devices.flat[at]].reshape(-1), real), f"position {at}"


# ---- applying plans --------------------------------------------------------------------------------


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("f32[{x}4, 8]", "f32[16, {x}2]"),
        ("f32[{x}{y}2, 6]", "f32[{y}8, 6]"),
        ("f32[16, {y}4]", "f32[{x}4, {y}4]"),
        ("f32[{x:(1)2}8]", "f32[{x:(2)2}8]"),  # the mesh is cut
        ("f32[{x}3/10, 3]", "f32[{y}5, 3]"),  # padded and trimmed
        ("f32[7]", "f32[7]"),  # nothing to do
    ],
)
def test_shards_are_the_targets_tiles(source: str, target: str):
    before, after = Layout.parse(source, M42), Layout.parse(target, M42)
    mesh, plan = jax_mesh({"x": 4, "y": 2}), rs.plan(before, after)
    cut = on_jax.cut_mesh(mesh, (before, after))
    sharding = NamedSharding(cut, on_jax.spell_spec(after, on_jax.list_free_axes(cut)))
    moved = jax.jit(lambda x: on_jax.apply_plan(plan, mesh, x), out_shardings=sharding)(indices(before))
    assert np.array_equal(moved, indices(before))
    if after.even:
        check_shards(after, moved, mesh)


def test_a_reduction_that_jax_cannot_express_is_refused():
    before, after = Layout.parse("f32[16] + mean{x}", Mesh(x=4)), Layout.parse("f32[16]", Mesh(x=4))
    with pytest.raises(LayoutError, match="no unreduced arrays of kind mean; finish the reduction first"):
        on_jax.apply_plan(rs.plan(before, after), jax_mesh({"x": 4}), jax.numpy.zeros(16))


@pytest.mark.fast(4)
@pytest.mark.parametrize(("before", "after"), [("f32", "bf16"), ("bf16", "f32")])
def test_a_cast_on_the_way(before: str, after: str):
    """With a scale of the wider side, one number a row, and messages in pieces."""
    mesh = Mesh(x=2)
    source, target = Layout.parse(f"{before}[{{x}}4, 4]", mesh), Layout.parse(f"{after}[8, {{x}}2]", mesh)
    plan = rs.plan(rs.Move(source, target, cast=True), budget=source.tile_bytes + target.tile_bytes + 16)
    assert [(step.kind, step.mode.chunk) for step in plan.steps] == [("exchange", 4)]
    values, rows = np.arange(32).reshape(8, 4).astype(source.dtype), 1 + np.arange(8.0).reshape(8, 1)
    move = jax.jit(lambda x, scale: on_jax.apply_plan(plan, jax_mesh({"x": 2}), x, None, scale))
    moved = move(values, rows)
    divided, multiplied = (values / rows.astype(source.dtype)).astype(target.dtype), values.astype("float32") * rows
    wanted = divided if before == "f32" else multiplied
    assert moved.dtype == target.dtype and np.array_equal(moved, wanted)


# ---- meshes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layouts", "sizes"),
    [
        (["f32[{x}4]", "f32[{y}8]"], {"x": 4, "y": 2}),  # whole axes: the mesh itself
        (["f32[16]"], {"x": 4, "y": 2}),
        (["f32[{x:(1)2}8]"], {"axis0": 2, "axis1": 2, "axis2": 2}),
        (["f32[{y}8] + sum{x:(2)2}"], {"axis0": 2, "axis1": 2, "axis2": 2}),
    ],
)
def test_axes_are_cut_where_layouts_cut_them(layouts: list[str], sizes: dict[str, int]):
    parsed = [Layout.parse(text, M42) for text in layouts]
    for mesh in (AbstractMesh((4, 2), ("x", "y")), jax_mesh({"x": 4, "y": 2})):
        cut = on_jax.cut_mesh(mesh, parsed)
        assert dict(cut.shape) == sizes
        if isinstance(cut, jax.sharding.Mesh):
            assert list(cut.devices.flat) == list(mesh.devices.flat)


def test_axes_of_a_cut_mesh_are_major_to_minor():
    cut = on_jax.cut_mesh(AbstractMesh((12, 5), ("x", "y")), [Layout.parse("f32[{x:(1)3}4]", Mesh(x=12, y=5))])
    assert tuple(cut.shape.values()) == (3, 4, 5)


def test_cuts_that_do_not_divide_each_other_are_refused():
    mesh = Mesh(x=12)
    halves, thirds = (Layout.parse(text, mesh) for text in ("f32[{x:(1)2}6]", "f32[{x:(1)3}4]"))
    with pytest.raises(MeshError, match=r"would have to be cut at \[1, 4, 6, 12\], which do not divide each other"):
        on_jax.cut_mesh(AbstractMesh((12,), ("x",)), (halves, thirds))


def test_no_axis_is_cut_beside_a_manual_one():
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Manual))
    assert on_jax.list_free_axes(mesh) == Mesh(x=4)
    whole, half = (Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4]", "f32[{x:(1)2}8]"))
    assert on_jax.cut_mesh(mesh, [whole]) is mesh
    with pytest.raises(MeshError, match="manual over other axes; use layouts of whole axes there"):
        on_jax.cut_mesh(mesh, [half])


@pytest.mark.parametrize(
    ("source", "target", "overwrites"),
    [
        ("f32[{x}4]", "f32[{y}8]", False),
        ("f32[{x}4, {y}8]", "f32[{y}8, {x}4]", False),  # columns do not lie in one run
        ("f32[2{x}2]", "f32[2{x:(2)2}{x:(1)2}2]", True),
    ],
)
def test_what_xla_can_overwrite(source: str, target: str, overwrites: bool):
    """Plans whose slots in order are the tile; for others XLA would hold the tile twice."""
    before, after = Layout.parse(source, M42), Layout.parse(target, M42)
    plan = chain(before, after, [StepSpec("exchange", after, StepMode(None, in_place=True))], donate=True)
    assert on_jax.overwrites_source(plan) is overwrites
    assert on_jax.overwrites_source(rs.plan(before, after))
