"""Fragments that put a result together from boxes of neighbours' tiles: a permute for each, and concatenations."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from reshard.doctor.shifts import Shift, Source
from reshard.hlo import Array
from reshard.types import dtypes
from reshard.types.mesh import Mesh


@dataclass(frozen=True)
class ShiftKey:
    """What such a fragment is compiled for; the data is moved as `dtype`."""

    shift: Shift
    before: Array
    after: Array
    dtype: str

    @property
    def mesh(self) -> Mesh:
        """All devices, along one axis."""
        return Mesh(devices=self.shift.devices)

    @property
    def afters(self) -> tuple[Array, ...]:
        """The array that it yields."""
        return (self.after,)

    @property
    def received_bytes(self) -> int:
        """The bytes that a device receives."""
        return self.shift.received_bytes(self.dtype)

    def __str__(self) -> str:
        return f"a shift of {self.dtype}{list(self.before.dims)} in {len(self.shift.cells)} cells"

    def function(self, axes: dict[str, int]) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
        """From the tile before to the one afterwards, for code inside a `shard_map` over one axis."""
        (axis,) = axes
        shift = self.shift
        grid = [len(cuts) - 1 for cuts in shift.cuts]

        def joined(parts: list[jax.Array], dim: int) -> jax.Array:
            """Cells in row-major order, along the dims from `dim` on, as one array."""
            if dim == len(grid):
                return parts[0]
            each = len(parts) // grid[dim]
            rows = [joined(parts[at * each : (at + 1) * each], dim + 1) for at in range(grid[dim])]
            return rows[0] if len(rows) == 1 else jnp.concatenate(rows, dim)

        def move(tile: jax.Array) -> tuple[jax.Array, ...]:
            tile = tile.astype(dtypes.canonical(self.dtype))
            parts = [_cell(tile, axis, shift.sizes(at), sources) for at, sources in enumerate(shift.cells)]
            return (joined(parts, 0).astype(dtypes.canonical(self.after.dtype)),)

        return move


def _cell(tile: jax.Array, axis: str, sizes: tuple[int, ...], sources: tuple[Source, ...]) -> jax.Array:
    """One cell: what the first source brings, but for the devices that others bring it to."""
    made: jax.Array | None = None
    for one in sources:
        box = jax.lax.slice(tile, one.start, [first + size for first, size in zip(one.start, sizes, strict=True)])
        if not one.is_local:
            pairs = [(source, target) for target, source in enumerate(one.devices) if source >= 0]
            box = jax.lax.ppermute(box, axis, pairs)
        if made is None:
            made = box
            continue
        here = jnp.asarray(np.array(one.devices) >= 0)[jax.lax.axis_index(axis)]
        made = jnp.where(here, box, made)
    if made is None:
        raise ValueError("a cell has a source")
    return made
