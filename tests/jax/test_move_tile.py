"""`move_tile` inside the caller's own `shard_map`: tiles of layouts in pieces, against tables of owners in numpy."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.errors import LayoutError, MeshError, PlanError, TileError
from reshard.jax import move_tile, redistribute
from tests.owners import PADDING, Owned

AXES = {"x": 4, "y": 2}
MESH = rs.Mesh(AXES)


def jax_mesh(devices: Any = None) -> jax.sharding.Mesh:
    grid = np.array(jax.devices() if devices is None else devices)[:8].reshape(tuple(AXES.values()))
    return jax.sharding.Mesh(grid, tuple(AXES))


def on_stacks(source: rs.Layout, target: rs.Layout, mesh: jax.sharding.Mesh | None = None) -> Callable[..., jax.Array]:
    """The move on stacks of tiles, in the order of devices."""

    def move(tile: jax.Array) -> jax.Array:
        return move_tile(tile[0], source, target)[None]

    spec = P(tuple(AXES))
    return jax.jit(jax.shard_map(move, mesh=mesh or jax_mesh(), in_specs=spec, out_specs=spec, check_vma=False))


def stack(owned: Owned, whole: np.ndarray) -> np.ndarray:
    return np.stack([*owned.tiles(whole).values()])


def own_rows(sizes: Any, columns: str = "6", sums: str = "") -> rs.Layout:
    """`sizes` rows along x."""
    return rs.Layout.parse(f"f32[{{x}}({','.join(map(str, sizes))}), {columns}]{sums}", MESH)


STEPS = [
    ("f32[{x}(3,5,0,2), {y}3]", "f32[{x}(3,5,0,2), 6]", "all_gather"),
    ("f32[{x}(3,5,0,2), 6]", "f32[{x}(3,5,0,2), {y}3]", "slice"),
    ("f32[{x}(3,5,0,2), {y}3, 2]", "f32[{x}(3,5,0,2), 6, {y}1]", "all_to_all"),
    ("f32[{x}(3,5,0,2), 6] + sum{y}", "f32[{x}(3,5,0,2), 6]", "all_reduce"),
    ("f32[{x}(3,5,0,2), 6] + sum{y}", "f32[{x}(3,5,0,2), {y}3]", "reduce_scatter"),
    ("f32[{x}(3,5,0,2), 6]", "f32[{x}(3,5,0,2), 6] + sum{y}", "split_sum"),
    ("f32[{x}(3,5,0,2), {y}3]", "f32[{x}~10, {y}(2,4)]", "exchange"),
]


@pytest.mark.parametrize(("before", "after", "kind"), STEPS)
def test_steps_of_every_kind(before: str, after: str, kind: str):
    """Collectives along other dims leave pieces as they are; what is beyond a tile's true extent is no data."""
    source, target = (rs.Layout.parse(text, MESH) for text in (before, after))
    assert [step.kind for step in rs.plan(source, target).steps] == [kind]
    whole = np.arange(1, 1 + np.prod(source.shape), dtype="float32").reshape(source.shape)
    parts = {True: (whole * 3, whole * -2), False: (whole, whole)}
    given = np.full((8, *source.tile_shape), np.nan, "float32")
    for device, index in enumerate(source_indices(source)):
        part = parts[bool(source.partial)][device % 2][index]
        given[device][tuple(map(slice, part.shape))] = part
    moved = np.asarray(on_stacks(source, target)(given))
    trues = [moved[device][tuple(map(slice, target.tile_shape_of(device)))] for device in range(8)]
    if target.partial:
        trues = [trues[device] + trues[device ^ 1] for device in range(8)]
    for device, index in enumerate(source_indices(target)):
        np.testing.assert_array_equal(trues[device], whole[index])


def source_indices(layout: rs.Layout) -> Iterator[Any]:
    """By device, the indices of its tile, by hand for the layouts of `STEPS`."""
    rows = {"(3,5,0,2)": [0, 3, 8, 8, 10], "~10": [0, 3, 6, 8, 10]}
    ends = next(ends for text, ends in rows.items() if text in str(layout))
    for device in range(8):
        x, y = divmod(device, 2)
        index = [np.arange(ends[x], ends[x + 1])]
        for dim, size in zip(layout.dims[1:], layout.shape[1:], strict=True):
            split = any(digit.axis is not None for digit in dim.digits)
            cut = [0, 2, 6] if "(2,4)" in str(layout) else [0, size // 2, size]
            index.append(np.arange(cut[y], cut[y + 1]) if split else np.arange(size))
        yield np.ix_(*index)


@pytest.mark.slow
def test_random_moves_and_their_derivatives():
    """The cotangent of an element comes back to it from every device that has it; padding has none."""
    choose = random.Random(720)
    for _ in range(2):
        source, target = (Owned.random(choose, MESH, (10, 3), "float32") for _ in range(2))
        whole = np.arange(1, 31, dtype="float32").reshape(10, 3)
        move, given = on_stacks(source.layout, target.layout), stack(source, whole)
        wanted = stack(target, whole)
        moved = np.asarray(move(given))
        np.testing.assert_array_equal(moved[wanted != PADDING], wanted[wanted != PADDING])
        weights = np.random.default_rng(7).random(wanted.shape).astype("float32")
        _, transpose = jax.vjp(move, given)
        (gradient,) = transpose(weights)
        # A linear map and its transpose: <move(x), w> = <x, transpose(w)>, and so for a tangent.
        assert np.isclose((moved * weights).sum(), (np.asarray(gradient) * given).sum(), rtol=1e-5)
        assert not np.asarray(gradient)[given == PADDING].any()
        _, tangent = jax.jvp(move, (given,), (given,))
        np.testing.assert_array_equal(tangent, moved)


@pytest.mark.slow
def test_batches_and_gradients_of_what_may_be_one_collective():
    """JAX traces the forms of all platforms, so the ragged all-to-all of others has to have its rules as well."""
    source, target = (
        Owned(own_rows(sizes), [["x"], []], [np.repeat(np.arange(4), sizes), np.zeros(6, int)])
        for sizes in ((3, 5, 0, 2), (1, 2, 3, 4))
    )
    whole = np.arange(1, 61, dtype="float32").reshape(10, 6)
    move, given = on_stacks(source.layout, target.layout), stack(source, whole)
    moved = np.asarray(jax.vmap(move)(np.stack([given, 2 * given])))
    wanted = stack(target, whole)
    np.testing.assert_array_equal(moved[1][wanted != PADDING], 2 * wanted[wanted != PADDING])
    gradient = np.asarray(jax.jit(jax.grad(lambda x: move(x).sum()))(given))
    # Of two devices that have a row, any sends it.
    both = (gradient.reshape(4, 2, -1).sum(axis=1), 2 * (given != PADDING).reshape(4, 2, -1)[:, 0])
    np.testing.assert_array_equal(*both)


def test_experts_inside_a_program():
    """Tokens to experts and back, by a plan for each set of sizes: what the experts make of them comes back."""
    mesh, devices = rs.Mesh(x=8), jax.sharding.Mesh(jax.devices(), ("x",))
    sizes = np.array([5, 0, 9, 1, 1, 0, 6, 2])
    blocks = rs.Layout.from_sizes([3] * 8, mesh, (24, 4), "f32")
    experts = rs.Layout.from_sizes(sizes, mesh, (24, 4), "f32")

    def step(tokens: jax.Array) -> jax.Array:
        mine = move_tile(tokens, blocks, experts)
        made = jax.lax.ragged_dot(
            mine, jnp.eye(4)[None] * jax.lax.axis_index("x"), jnp.asarray(sizes)[None, jax.lax.axis_index("x")]
        )
        return move_tile(made, experts, blocks)

    tokens = np.arange(96, dtype="float32").reshape(24, 4)
    run = jax.jit(jax.shard_map(step, mesh=devices, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    np.testing.assert_array_equal(run(tokens), tokens * np.repeat(np.arange(8), sizes)[:, None])


@pytest.mark.slow
def test_global_arrays_are_their_tiles_side_by_side():
    """Now and under jit, there and back, with their gradient: padding is zeros, and is not read."""
    layout = rs.Layout.parse("f32[{x}(3,5,0,2), 4]", rs.Mesh(x=4))
    owned = Owned(layout, [["x"], []], [np.repeat(np.arange(4), (3, 5, 0, 2)), np.zeros(4, int)])
    whole, mesh = np.arange(1, 41, dtype="float32").reshape(10, 4), jax.sharding.Mesh(jax.devices()[:4], ("x",))
    before, after = (NamedSharding(mesh, spec) for spec in (P(None, "x"), P(None, ("x",))))
    array = jax.device_put(whole, before)
    tiles = redistribute(array, owned.layout)
    assert (tiles.shape, tiles.sharding.spec) == ((20, 4), P("x", None))
    wanted = np.concatenate([*owned.tiles(whole).values()])
    np.testing.assert_array_equal(tiles, np.where(wanted == PADDING, 0, wanted))
    dirty = jax.device_put(wanted, tiles.sharding)
    np.testing.assert_array_equal(redistribute(dirty, after, source=owned.layout), whole)

    def through(x: jax.Array) -> jax.Array:
        there = redistribute(2 * x, owned.layout, source=before)
        return redistribute(there + 1, after, source=owned.layout)

    np.testing.assert_array_equal(jax.jit(through)(array), 2 * whole + 1)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: through(x).sum()))(array), np.full_like(whole, 2))
    redistribute(array, owned.layout, donate=True)
    assert array.is_deleted()


def test_what_is_refused_says_what_to_do():
    source, target = own_rows((3, 5, 0, 2)), own_rows((1, 2, 3, 4))
    tile = jnp.zeros(source.tile_shape)
    with pytest.raises(MeshError, match="outside of any shard_map"):
        move_tile(tile, source, target)
    with pytest.raises(TileError, match=r"\(2, 6\).*room for the largest piece"):
        on_stacks(source, target)(jnp.zeros((8, 2, 6)))
    with pytest.raises(TileError, match="int32"):
        on_stacks(source, target)(jnp.zeros((8, 5, 6), "int32"))
    with pytest.raises(MeshError, match="in a shard_map over"):
        half = rs.Layout.parse("f32[{x}(3,7), 6]", rs.Mesh(x=2))
        on_stacks(half, half)(jnp.zeros((8, 7, 6)))
    with pytest.raises(LayoutError, match=r"source P\(.* give a reshard.Layout"):
        on_stacks(P("x"), target)(jnp.zeros((8, 5, 6)))  # pyright: ignore[reportArgumentType]
    array = jax.device_put(np.zeros((10, 6), "float32"), NamedSharding(jax_mesh(), P()))
    with pytest.raises(LayoutError, match=r"reshard\.jax\.move_tile in a shard_map"):
        target.to_jax(jax_mesh())
    with pytest.raises(LayoutError, match=r"shape \(10, 6\), where \(20, 6\) moves"):
        redistribute(array, target, source=source)
    with pytest.raises(PlanError, match="source of the array"):
        jax.jit(lambda x: redistribute(x, target))(array)
    with pytest.raises(MeshError, match="known by their positions"):
        redistribute(array, rs.Layout.from_sizes([3, 7], rs.Mesh(x=2), (10, 6), "f32"))
    with pytest.raises(LayoutError, match="pieces of any size"):
        redistribute(array, target, have=array)
    with pytest.raises(LayoutError, match="give a sharding or"):
        redistribute(array, jax.devices()[0], source=target)
    both = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    turned = rs.Layout.from_sizes([0, 2, 0, 0], rs.Mesh(x=2, y=2), (2, 6), "f32", axes=["y", "x"])
    tiles = jax.device_put(np.zeros((8, 6), "float32"), NamedSharding(both, P(("y", "x"))))
    with pytest.raises(PlanError, match=r"sharded as P\(\('y', 'x'\).* in P\(\('x', 'y'\)"):
        redistribute(tiles, NamedSharding(both, P("x")), source=turned)
    with pytest.raises(LayoutError, match="give ints"):  # Sizes that only the program knows.
        jax.jit(lambda sizes: rs.Layout.from_sizes(sizes, MESH, (10, 6), "f32"))(jnp.arange(4))


@pytest.mark.slow
def test_one_ragged_all_to_all_on_a_tpu():
    """Ahead of time: one collective along the axes of the move, and none for rows that a TPU would rearrange."""
    pytest.importorskip("libtpu", reason="ahead-of-time compiles for TPU need libtpu: pip install 'jax[tpu]'")
    from jax.experimental import topologies

    mesh = jax_mesh(topologies.get_topology_desc("v5p:2x2x2", platform="tpu").devices)

    def compiled(*texts: str) -> str:
        source, target = (rs.Layout.parse(text, MESH) for text in texts)
        given = NamedSharding(mesh, P(tuple(AXES)))
        shape = jax.ShapeDtypeStruct((8, *source.tile_shape), source.dtype, sharding=given)
        return on_stacks(source, target, mesh).lower(shape).compile().as_text() or ""

    move = ("bf16[{x}512, 1024]", "bf16[{x}(700,47,1100,201), 1024]")
    text = compiled(*move)
    assert text.count(" ragged-all-to-all(") == 1 and "collective-permute-start(" not in text
    (groups,) = re.findall(r" ragged-all-to-all\(.*replica_groups=(\S+?),? ", text)
    assert groups == "{{0,2,4,6},{1,3,5,7}}"  # Those along x alone.
    narrow = [each.replace("1024", "100") for each in move]
    assert "ragged-all-to-all(" not in compiled(*narrow)
