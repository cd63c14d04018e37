"""Fragments that run an operation on each device's own rows: its source is moved there, and its results from there."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from reshard.doctor.batch_ops import BatchOp
from reshard.errors import SpliceError
from reshard.hlo import Array
from reshard.jax.xla_pass.fragments import in_places
from reshard.lower import lower_plan
from reshard.lower.to_shard_map import tile_function
from reshard.types import dtypes
from reshard.types.mesh import Mesh
from reshard.types.plan import Plan

_jax: Any = jax
Tiles = tuple[jax.Array, ...]


class OutputKey(NamedTuple):
    """A result of an operation: its number, its plan, the digits of the tile that the plan yields, and its array."""

    number: int
    plan: Plan
    order: tuple[tuple[int, int], ...]
    after: Array


@dataclass(frozen=True)
class OpFragmentKey:
    """What a fragment with an operation is compiled for.

    `plan` moves the tile `before`, whose digits lie at `places`, to whole rows. `indices` has the dim of which an
    operand is the index, for each operand; None for the data.
    """

    op: BatchOp
    indices: tuple[int | None, ...]
    plan: Plan
    before: Array
    places: tuple[tuple[int, int], ...]
    outputs: tuple[OutputKey, ...]

    @property
    def mesh(self) -> Mesh:
        """The mesh of its layouts."""
        return self.plan.source.mesh

    @property
    def afters(self) -> tuple[Array, ...]:
        """The arrays that it yields."""
        return tuple(output.after for output in self.outputs)

    @property
    def received_bytes(self) -> int:
        """The bytes that a device receives."""
        return self.plan.received_bytes + sum(output.plan.received_bytes for output in self.outputs)

    def __str__(self) -> str:
        return f"{self.op.target or self.op.kind} on {self.plan.target}"

    def function(self, axes: dict[str, int]) -> Callable[[jax.Array], Tiles]:
        """From the tile before to those afterwards, for code inside a `shard_map` over all axes."""
        gather, run = tile_function(lower_plan(self.plan), axes), rows_function(self.op, self.indices)
        moves = [tile_function(lower_plan(output.plan), axes) for output in self.outputs]

        def moved(tile: jax.Array) -> Tiles:
            rows = gather(in_places(tile, self.places).reshape(self.plan.source.tile_shape))
            results = run(rows)
            tiles = [move(results[one.number]) for move, one in zip(moves, self.outputs, strict=True)]
            return tuple(_laid_out(tile, one) for tile, one in zip(tiles, self.outputs, strict=True))

        return moved


def _laid_out(tile: jax.Array, output: OutputKey) -> jax.Array:
    """The tile of a layout as the array that the program uses."""
    by_place = sorted(range(len(output.order)), key=lambda at: -output.order[at][1])
    digits = tile.reshape([radix for radix, _ in output.order]).transpose(by_place)
    return digits.reshape(output.after.dims)


def rows_function(op: BatchOp, indices: Sequence[int | None]) -> Callable[[jax.Array], Tiles]:
    """The operation on some of the rows, which yields all of its results.

    >>> import jax.numpy as jnp
    >>> rows = Array("f32", (8, 4))
    >>> sort = BatchOp("sort", "", (0,), (rows, Array("s32", (8, 4))), (rows, Array("s32", (8, 4))), stable=True)
    >>> values, order = rows_function(sort, (None, 1))(jnp.array([[3.0, 1.0, 2.0, 0.0]]))
    >>> order
    Array([[3, 1, 2, 0]], dtype=int32)
    """
    return lambda tile: _KINDS[op.kind](op, _operands(op, indices, tile))


def _operands(op: BatchOp, indices: Sequence[int | None], tile: jax.Array) -> list[jax.Array]:
    return [
        tile if dim is None else jax.lax.broadcasted_iota(dtypes.canonical(array.dtype), tile.shape, dim)
        for array, dim in zip(op.operands, indices, strict=True)
    ]


def _fft(op: BatchOp, operands: list[jax.Array]) -> Tiles:
    return (_jax.lax.fft(operands[0], op.target, op.lengths),)


def _sort(op: BatchOp, operands: list[jax.Array]) -> Tiles:
    (dim,) = op.inner(op.operands[0])
    return tuple(_jax.lax.sort(tuple(operands), dimension=dim, is_stable=op.stable, num_keys=1))


def _top_k(op: BatchOp, operands: list[jax.Array]) -> Tiles:
    return tuple(_jax.lax.top_k(operands[0], op.results[0].dims[-1]))


def _ffi(op: BatchOp, operands: list[jax.Array]) -> Tiles:
    rows = dict(zip(op.batch, (operands[0].shape[dim] for dim in op.batch), strict=True))
    shapes = [
        jax.ShapeDtypeStruct(
            [rows.get(dim, size) for dim, size in enumerate(array.dims)], dtypes.canonical(array.dtype)
        )
        for array in op.results
    ]
    call = _jax.ffi.ffi_call(
        op.target,
        shapes,
        input_layouts=[_major_to_minor(array) for array in op.operands],
        output_layouts=[_major_to_minor(array) for array in op.results],
    )
    return tuple(call(*operands, **{name: np.dtype(dtype).type(value) for name, value, dtype in op.attributes}))


def _major_to_minor(array: Array) -> list[int]:
    if not re.fullmatch(r"[\d,]*", array.layout):
        raise SpliceError(f"the memory layout {array.layout} is not known")
    return [int(dim) for dim in array.layout.split(",") if dim][::-1]


_KINDS: dict[str, Callable[[BatchOp, list[jax.Array]], Tiles]] = {
    "fft": _fft,
    "sort": _sort,
    "top_k": _top_k,
    "ffi": _ffi,
}
