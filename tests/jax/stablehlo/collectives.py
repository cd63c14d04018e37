"""Collectives as users write them: in a `shard_map` between two reshards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.jax.stablehlo.base import ABORTS, OpCase, emit
from tests.jax.stablehlo.elementwise import complex_of

TILE = "tensor<4x8xf32>"
GROUPS = "replica_groups = dense<[[0, 2, 4, 6], [1, 3, 5, 7]]> : tensor<2x4xi64>"


def mapped(body: Callable[[jax.Array], Any]) -> Any:
    """The body for every tile of 4 x 8."""

    def function(x: jax.Array, mesh: Mesh) -> Any:
        return jax.shard_map(body, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=False)(x)

    return function


def _text(body: str) -> Any:
    return mapped(lambda t: emit(f"{body}\nreturn %1 : {TILE}", t, out=[("f4", 4, 8)]))


def _partly(x: jax.Array, mesh: Mesh) -> Any:
    """A shard_map that is manual over one axis, so that the other is propagated inside it."""

    def body(t: jax.Array) -> jax.Array:
        return jnp.sin(t) @ t.T + lax.psum(t @ t.T, "x")

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False)
    return mapped(x)


_ADD = """({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    })"""
_NUMBER = """%{n} = stablehlo.{name} : tensor<ui32>
    %f = stablehlo.convert %{n} : (tensor<ui32>) -> tensor<f32>
    %w = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> tensor<4x8xf32>
    %1 = stablehlo.add %0, %w : tensor<4x8xf32>"""


def _case(name: str, function: Any, variant: str = "", **options: Any) -> OpCase:
    return OpCase(name, function, variant, needs_mesh=True, **options)


CASES = (
    _case("all_gather", mapped(lambda t: lax.all_gather(t, "x", tiled=True)[:4] + t)),
    _case("all_gather", mapped(lambda t: lax.all_gather(complex_of(t), "x", tiled=True)[:4]), "complex"),
    _case("all_reduce", mapped(lambda t: lax.psum(t, "x"))),
    _case("all_reduce", mapped(lambda t: lax.psum(complex_of(t), ("x", "y"))), "complex"),
    _case("all_reduce", _partly, "partly-manual"),
    _case("all_to_all", mapped(lambda t: lax.all_to_all(t, "x", 0, 1, tiled=True).reshape(4, 8))),
    _case("collective_permute", mapped(lambda t: lax.ppermute(t, "x", [(0, 1), (1, 2), (3, 0)]))),
    _case("collective_permute", mapped(lambda t: lax.ppermute(complex_of(t), "y", [(0, 1), (1, 0)])), "complex"),
    _case(
        "collective_broadcast",
        mapped(lambda t: lax.pbroadcast(t, "x", 2)),
        refused={"cpu": "not found", "tpu": "not found"},
    ),
    _case(
        "collective_broadcast",
        _text(f'%1 = "stablehlo.collective_broadcast"(%0) {{{GROUPS}}} : ({TILE}) -> {TILE}'),
        "text",
        refused={"cpu": "not supported", "tpu": "not implemented"},
    ),
    _case("reduce_scatter", mapped(lambda t: jnp.tile(lax.psum_scatter(t, "x", tiled=True), (4, 1)))),
    _case(
        "collective_reduce",
        _text(f'%1 = "stablehlo.collective_reduce"(%0) {_ADD} {{{GROUPS}}} : ({TILE}) -> {TILE}'),
        refused=dict.fromkeys(("cpu", "tpu"), "unregistered operation|not supported|Failed to serialize"),
    ),
    _case(
        "cross-replica-sum",
        _text(f'%1 = "stablehlo.cross-replica-sum"(%0) {{{GROUPS}}} : ({TILE}) -> {TILE}'),
        refused={"cpu": "replica_count", "tpu": ABORTS},
    ),
    _case("partition_id", mapped(lambda t: t + lax.axis_index("x"))),
    _case("replica_id", _text(_NUMBER.format(n="r", name="replica_id"))),
)
