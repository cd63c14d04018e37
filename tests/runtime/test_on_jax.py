"""Plans on global JAX arrays: what is cut, padded, done in parts, and where the result lies.

Moves of whole programs, and what XLA compiles, are tested in tests/jax.
"""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.errors import LayoutError, MeshError
from reshard.runtime import on_jax
from reshard.types import Layout, Mesh
from reshard.types.plan import Plan, StepSpec, chain
from reshard.types.rules.cost import StepMode
from tests.oracle import PADDING, check, tiles_of

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
    cut = on_jax.cut(mesh, (before, after))
    sharding = NamedSharding(cut, on_jax.spec(after, on_jax.free_axes(cut)))
    moved = jax.jit(lambda x: on_jax.apply(plan, mesh, x), out_shardings=sharding)(indices(before))
    assert np.array_equal(moved, indices(before))
    if after.even:
        check_shards(after, moved, mesh)


@pytest.mark.parametrize("target", ["f32[{z}4, 6]", "f32[8, {w}3]", "f32[{z}{w}2, 6]"])
def test_a_move_onto_another_mesh_of_the_same_devices(target: str):
    """The target counts the devices in another order and by other axes."""
    order = random.Random(3).sample(range(4), 4)
    source_mesh, target_mesh = jax_mesh({"x": 4}), jax_mesh({"z": 2, "w": 2}, order)
    before = Layout.parse("f32[{x}2, 6]", Mesh(x=4))
    after = Layout.parse(target, Mesh({"z": 2, "w": 2}, device_ids=order))
    array = jax.device_put(indices(before), NamedSharding(source_mesh, P("x")))
    sharding = NamedSharding(target_mesh, on_jax.spec(after, Mesh(z=2, w=2)))
    moved = on_jax.apply_across(rs.plan(before, after), source_mesh, array, sharding)
    assert np.array_equal(moved, indices(before))
    assert moved.sharding == sharding
    check_shards(after, moved, target_mesh)


def test_uneven_arrays_move_on_one_mesh_only():
    before = Layout.parse("f32[{x}3/10]", Mesh(x=4))
    after = Layout.parse("f32[10]", Mesh({"x": 4}, device_ids=[3, 2, 1, 0]))
    with pytest.raises(MeshError, match="uneven arrays move on one mesh only"):
        on_jax.apply_across(rs.plan(before, after), jax_mesh({"x": 4}), jax.numpy.zeros(10), None)


def test_a_reduction_that_jax_cannot_express_is_refused():
    before, after = Layout.parse("f32[16] + mean{x}", Mesh(x=4)), Layout.parse("f32[16]", Mesh(x=4))
    with pytest.raises(LayoutError, match="no unreduced arrays of kind mean; finish the reduction first"):
        on_jax.apply(rs.plan(before, after), jax_mesh({"x": 4}), jax.numpy.zeros(16))


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
        cut = on_jax.cut(mesh, parsed)
        assert dict(cut.shape) == sizes
        if isinstance(cut, jax.sharding.Mesh):
            assert list(cut.devices.flat) == list(mesh.devices.flat)


def test_axes_of_a_cut_mesh_are_major_to_minor():
    cut = on_jax.cut(AbstractMesh((12, 5), ("x", "y")), [Layout.parse("f32[{x:(1)3}4]", Mesh(x=12, y=5))])
    assert tuple(cut.shape.values()) == (3, 4, 5)


def test_cuts_that_do_not_divide_each_other_are_refused():
    mesh = Mesh(x=12)
    halves, thirds = (Layout.parse(text, mesh) for text in ("f32[{x:(1)2}6]", "f32[{x:(1)3}4]"))
    with pytest.raises(MeshError, match=r"would have to be cut at \[1, 4, 6, 12\], which do not divide each other"):
        on_jax.cut(AbstractMesh((12,), ("x",)), (halves, thirds))


def test_no_axis_is_cut_beside_a_manual_one():
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Manual))
    assert on_jax.free_axes(mesh) == Mesh(x=4)
    whole, half = (Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4]", "f32[{x:(1)2}8]"))
    assert on_jax.cut(mesh, [whole]) is mesh
    with pytest.raises(MeshError, match="manual over other axes; use layouts of whole axes there"):
        on_jax.cut(mesh, [half])


# ---- parts -----------------------------------------------------------------------------------------


def modes(plan: Plan) -> list[tuple[str, int]]:
    return [(step.kind, step.mode.parts) for step in plan.steps]


def planned(source: str, target: str, mesh: Mesh = M42) -> Plan:
    return rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh))


def test_small_steps_stay_whole():
    plan = planned("f32[{x}64, 64]", "f32[256, {x}16]")
    assert on_jax.in_parts(plan) == plan
    limit = plan.source.tile_bytes + plan.target.tile_bytes
    assert modes(on_jax.in_parts(plan, limit)) == [("all_to_all", 8)]
    assert modes(on_jax.in_parts(plan, limit + 1)) == [("all_to_all", 1)]


@pytest.mark.parametrize(
    ("source", "target", "mode"),
    [
        ("f32[{x}64, 8]", "f32[256, {x}2]", ("all_to_all", 8)),
        ("f32[{x}11, 8]", "f32[44, {x}2]", ("all_to_all", 11)),  # from 8 to 32
        ("f32[{x}6, 8]", "f32[24, {x}2]", ("all_to_all", 6)),  # the most there are
        ("f32[{x}1, 1280]", "f32[4, 1280]", ("all_gather", 10)),  # ten of 128 lanes, rather than eight of 160
        ("f32[{x}1, 8]", "f32[4, {x}2]", ("exchange", 1)),  # two parts at most, but three rounds
    ],
)
def test_the_number_of_parts(source: str, target: str, mode: tuple[str, int]):
    plan = planned(source, target)
    in_parts = on_jax.in_parts(plan, least=0)
    assert modes(in_parts) == [mode]
    check(in_parts)


def test_only_a_slice_that_takes_every_n_th_element_of_the_minor_dim_is_in_parts():
    for target, parts in (("f32[{x}16, 64]", 1), ("f32[64, {x}16]", 1), ("f32[16{x}, 64]", 1), ("f32[64, 16{x}]", 8)):
        assert modes(on_jax.in_parts(planned("f32[64, 64]", target), least=0)) == [("slice", parts)]


@pytest.mark.parametrize(
    ("source", "target", "parts"),
    [
        ("bf16[512, 512, {x}64]", "bf16[512, {x}64, 512]", 4),  # 128 rows a part: eight would leave 64
        ("bf16[256, 512, {x}64]", "bf16[256, {x}64, 512]", 8),  # two parts would, but are too large
        ("bf16[512, {x}64, 512]", "bf16[{x}64, 512, 512]", 8),  # the minor dim has full lanes in any case
        ("bf16[64, 64, {x}64]", "bf16[64, {x}8, 512]", 8),  # nothing has
    ],
)
def test_an_all_to_all_keeps_full_lanes(source: str, target: str, parts: int):
    plan = planned(source, target, Mesh(x=8))
    assert modes(on_jax.in_parts(plan, least=0)) == [("all_to_all", parts)]


def test_a_gather_with_too_few_parts_is_an_exchange_of_smaller_messages():
    """Three parts receive more at once than each of an exchange's 15 rounds; 63 rounds are too many."""
    for size, kind in ((16, "exchange"), (64, "all_gather")):
        in_parts = on_jax.in_parts(planned("f32[{x}1, 3]", f"f32[{size}, 3]", Mesh(x=size)), least=0)
        assert [step.kind for step in in_parts.steps] == [kind]
        check(in_parts)


def test_peaks_count_the_target_from_the_start():
    mesh = Mesh(x=2, y=2, z=2)
    plan = planned("f32[{x}4, {z}4, 8, 8]", "f32[8, 8, {z}4, {y}4]", mesh)
    assert len(plan.steps) == 3
    later = [step.live_bytes + plan.target.tile_bytes for step in plan.steps[:-1]]
    assert on_jax.peak_bytes(plan) == max(plan.peak_bytes, *later) > plan.peak_bytes
    # A permute, then a gather: source, operand and target. The target is live from the start, but only once.
    two = planned("f32[{x}{y}2]", "f32[{y}8]")
    assert [step.kind for step in two.steps] == ["permute", "all_gather"]
    assert on_jax.peak_bytes(two) == two.peak_bytes == 8 + 8 + 32
    single = planned("f32[{x}4, 8]", "f32[16, 8]")
    assert on_jax.peak_bytes(single) == single.peak_bytes


@pytest.mark.parametrize(
    ("source", "target", "overwrites"),
    [
        ("f32[{x}4]", "f32[{y}8]", False),
        ("f32[2{x}2]", "f32[2{x:(2)2}{x:(1)2}2]", True),
    ],
)
def test_what_xla_can_overwrite(source: str, target: str, overwrites: bool):
    before, after = Layout.parse(source, M42), Layout.parse(target, M42)
    plan = chain(before, after, [StepSpec("exchange", after, StepMode(None, in_place=True))], donate=True)
    assert on_jax.overwrites(plan) is overwrites
    assert on_jax.overwrites(rs.plan(before, after))
