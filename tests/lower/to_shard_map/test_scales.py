"""Scales in blocks: each tile's part of them, against numpy's repeated ones."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.errors import LayoutError
from reshard.lower.to_shard_map import scales

MESH = rs.Mesh(x=4, y=2)


@pytest.mark.fast(2)
@pytest.mark.parametrize("shape", [(), (1, 1), (24, 1), (1, 16), (8, 4), (4, 2), (2, 1), (12, 16), (3, 1), (6, 8)])
@pytest.mark.parametrize(("text", "spec"), [("f32[{x}6, {y}8]", P("x", "y")), ("f32[{y}{x}3, 16]", P(("y", "x")))])
def test_each_tile_has_its_own(shape: tuple[int, ...], text: str, spec: P) -> None:
    layout = rs.Layout.parse(text, MESH)
    scale = np.arange(1, 1 + int(np.prod(shape)), dtype="float32").reshape(shape)
    full = np.broadcast_to(scale, (1, 1)) if not shape else scale
    for axis, size in enumerate(layout.shape):
        full = np.repeat(full, size // full.shape[axis], axis=axis)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    parts, held = scales.spread(jax.numpy.asarray(scale), layout, spec)

    def expanded(part: jax.Array) -> jax.Array:
        return jax.numpy.broadcast_to(scales.of_tile(part, layout.tile_shape), layout.tile_shape)

    whole = jax.shard_map(expanded, mesh=mesh, in_specs=held, out_specs=spec, check_vma=False)(parts)
    assert np.array_equal(whole, full)


def test_uneven_tiles_have_ones_where_they_are_padded() -> None:
    layout = rs.Layout.parse("f32[{x}3/10]", MESH)
    parts, held = scales.spread(jax.numpy.full(5, 2.0), layout, P("x"))
    assert parts.tolist() == [2.0] * 10 + [1.0] * 2 and held == P("x")


@pytest.mark.parametrize("shape", [(5, 1), (24, 3), (2, 2, 2), (0, 1)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="do not divide"):
        scales.check_scale(shape, (24, 16))
