"""Fragments that put results together from boxes of neighbours' tiles: a permute for each box, and concatenations."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from reshard.doctor.shifts import Shift, ShiftSource
from reshard.hlo import Array
from reshard.types import dtypes
from reshard.types.mesh import Mesh

Box = tuple[ShiftSource, tuple[int, ...]]
"""Where a box comes from, and its sizes."""


@dataclass(frozen=True)
class ShiftKey:
    """What such a fragment is compiled for: the shifts of one tile, what each yields, and the dtype that is moved."""

    shifts: tuple[Shift, ...]
    before: Array
    afters: tuple[Array, ...]
    dtype: str

    @property
    def mesh(self) -> Mesh:
        """All devices, along one axis."""
        return Mesh(devices=self.shifts[0].devices)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes that come from other devices; one that several results have comes once."""
        boxes = {
            (source, shift.sizes(at)): None
            for shift in self.shifts
            for at, sources in enumerate(shift.cells)
            for source in sources
            if not source.is_local
        }
        return tuple(boxes)

    @property
    def received_bytes(self) -> int:
        """The bytes that a device receives."""
        return sum(Array(self.dtype, (math.prod(sizes),)).nbytes for _, sizes in self.boxes)

    def __str__(self) -> str:
        return f"{len(self.shifts)} shifts of {self.dtype}{list(self.before.dims)}"

    def function(self, axes: dict[str, int]) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
        """From the tile before to those afterwards, for code inside a `shard_map` over one axis."""
        (axis,) = axes

        def moved(tile: jax.Array) -> tuple[jax.Array, ...]:
            tile = tile.astype(dtypes.canonical(self.dtype))
            boxes = {(source, sizes): _permuted(tile, axis, source, sizes) for source, sizes in self.boxes}
            results = (_result(tile, axis, shift, boxes) for shift in self.shifts)
            pairs = zip(results, self.afters, strict=True)
            return tuple(result.astype(dtypes.canonical(after.dtype)) for result, after in pairs)

        return moved


def _box(tile: jax.Array, source: ShiftSource, sizes: tuple[int, ...]) -> jax.Array:
    ends = [first + size for first, size in zip(source.start, sizes, strict=True)]
    return jax.lax.slice(tile, source.start, ends)


def _permuted(tile: jax.Array, axis: str, source: ShiftSource, sizes: tuple[int, ...]) -> jax.Array:
    pairs = [(device, target) for target, device in enumerate(source.devices) if device >= 0]
    return jax.lax.ppermute(_box(tile, source, sizes), axis, pairs)


def _result(tile: jax.Array, axis: str, shift: Shift, boxes: dict[Box, jax.Array]) -> jax.Array:
    """A result: its cells, joined along one dim after another, the last one first."""
    parts = [_cell(tile, axis, shift.sizes(at), sources, boxes) for at, sources in enumerate(shift.cells)]
    for dim in reversed(range(len(shift.cuts))):
        count = len(shift.cuts[dim]) - 1
        rows = [parts[at : at + count] for at in range(0, len(parts), count)]
        parts = [row[0] if count == 1 else jnp.concatenate(row, dim) for row in rows]
    return parts[0]


def _cell(
    tile: jax.Array, axis: str, sizes: tuple[int, ...], sources: tuple[ShiftSource, ...], boxes: dict[Box, jax.Array]
) -> jax.Array:
    """One cell: what the first source brings, but on the devices that others bring it to."""
    brought = [_box(tile, one, sizes) if one.is_local else boxes[one, sizes] for one in sources]
    cell = brought[0]
    for one, box in zip(sources[1:], brought[1:], strict=True):
        here = jnp.asarray(np.array(one.devices) >= 0)[jax.lax.axis_index(axis)]
        cell = jnp.where(here, box, cell)
    return cell
