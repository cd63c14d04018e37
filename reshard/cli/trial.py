"""Random data for a simulation, and the check of what comes out, by `types.meaning` alone.

A partial source is made of random summands, one global array for each coordinate along its partial
axes; what is expected combines them in double precision, and is compared within the rounding of
the dtype. All else is compared exactly. Padding is filled with noise and never compared.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.runtime.numpy_dtypes import numpy_dtype
from reshard.types import Layout, dtypes
from reshard.types.meaning import meaning

Array = NDArray[Any]
Key = tuple[int, ...]
"""A device's coordinates along the partial axes of a layout: which summand it holds."""

_COMBINE: dict[str | None, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
}


@dataclass(frozen=True)
class Fault:
    """A device with wrong elements: how many, and the first of them."""

    device: int
    count: int
    at: tuple[int, ...]
    got: str
    wanted: str

    def __str__(self) -> str:
        return f"device {self.device}: {self.count} wrong, first at global {self.at}: {self.got}, not {self.wanted}"


class Trial:
    """Random data for one run from a source to a target, and the check of its result."""

    def __init__(self, source: Layout, target: Layout, seed: int) -> None:
        self.source, self.target = source, target
        self.random = np.random.default_rng(seed)
        self.dtype = numpy_dtype(source.dtype)
        keys = sorted({key(source, device) for device in source.mesh.devices})
        self.summands: dict[Key, Array] = {k: self._numbers(source.shape, len(keys)) for k in keys}

    def _numbers(self, shape: tuple[int, ...], summands: int) -> Array:
        """Random numbers of the dtype; summands are such that they neither cancel out nor overflow."""
        name = self.source.dtype
        if name == "bool":
            return self.random.integers(0, 2, shape).astype(self.dtype)
        if name.startswith(("int", "uint")):
            signed, bits = name.startswith("int"), dtypes.bits(name)
            low = -(1 << bits - 1) if signed and summands == 1 else 0
            high = 4 if summands > 1 else 1 << (bits - 1 if signed else bits)
            kind = np.int64 if signed else np.uint64
            return self.random.integers(low, min(high, 1 << bits), shape, dtype=kind).astype(self.dtype)
        if summands == 1:
            numbers = self.random.standard_normal(shape)
        else:
            numbers = self.random.uniform(0.5, 1.5, shape) / (summands if self.source.reduction == "sum" else 1)
        if name.startswith("complex"):
            numbers = numbers + 1j * self.random.uniform(0, 0.1, shape)
        return (np.abs(numbers) if name == "float8_e8m0fnu" else numbers).astype(self.dtype)

    def source_tiles(self) -> dict[int, Array]:
        """The source's tiles, cut from the global arrays; noise where there is padding."""
        source = self.source
        tiles: dict[int, Array] = {}
        for device in source.mesh.devices:
            noise = self._numbers(source.tile_shape, 1)
            where, index, _ = places(source, device)
            noise[where] = self.summands[key(source, device)][index]
            tiles[device] = noise
        return tiles

    def faults(self, tiles: Mapping[int, Array]) -> list[Fault]:
        """The devices whose tiles are not what the target means."""
        wanted = self._wanted()
        found = [self._fault(device, tiles.get(device), wanted) for device in self.target.mesh.devices]
        return [fault for fault in found if fault is not None]

    def _wanted(self) -> dict[Key, Array]:
        """The target's summands (one, if it is not partial), combined from the source's."""
        source, target = self.source, self.target
        parts: dict[Key, dict[Key, Array]] = {}
        for device in source.mesh.devices:
            mine = key(source, device)
            parts.setdefault(key(target, device), {})[mine] = self.summands[mine]
        return {k: self._combined(list(group.values())) for k, group in parts.items()}

    def _combined(self, parts: list[Array]) -> Array:
        if len(parts) == 1:
            return parts[0]
        reduction = self.source.reduction
        wide = [part if self.dtype.kind in "biu" or _small_int(part) else part.astype(_wide(part)) for part in parts]
        total = reduce(_COMBINE[reduction], wide)
        return total / len(parts) if reduction == "mean" else total

    def _fault(self, device: int, tile: Array | None, wanted: Mapping[Key, Array]) -> Fault | None:
        target = self.target
        if tile is None or tile.shape != target.tile_shape:
            return Fault(device, 1, (), "no tile" if tile is None else f"shape {tile.shape}", str(target.tile_shape))
        where, index, clear = places(target, device)
        got, right = tile[where], wanted[key(target, device)][index]
        wrong = np.argwhere(~self._close(got, right))
        if not len(wrong):
            return None
        first = tuple(int(i) for i in wrong[0])
        at = tuple(clear[axis][i] for axis, i in enumerate(first))
        return Fault(device, len(wrong), at, str(got[first]), str(right[first]))

    def _close(self, got: Array, right: Array) -> Array:
        if got.dtype == right.dtype:
            return np.asarray(got == right)
        wide = got.astype(right.dtype)
        rounding = 2 * len(self.summands) * _epsilon(self.source.dtype)
        return np.asarray(np.abs(wide - right) <= rounding * np.abs(right))


def key(layout: Layout, device: int) -> Key:
    """Which summand of a partial array a device holds."""
    position = layout.mesh.position(device)
    return layout.mesh.coordinates(position, layout.partial)


def places(layout: Layout, device: int) -> tuple[tuple[Array, ...], tuple[Array, ...], list[list[int]]]:
    """Where in its tile a device has elements, where those are in the global array, and these as lists."""
    local: list[list[int]] = []
    clear: list[list[int]] = []
    for size, found in zip(layout.shape, meaning(layout, device), strict=True):
        kept = [i for i, index in enumerate(found) if index < size]
        local.append(kept)
        clear.append([found[i] for i in kept])
    return _mesh_grid(local), _mesh_grid(clear), clear


def _mesh_grid(indices: list[list[int]]) -> tuple[Array, ...]:
    return np.ix_(*(np.asarray(i, np.int64) for i in indices))


def _small_int(part: Array) -> bool:
    """Whether these are ml_dtypes' int2 or int4, which wrap like all integers."""
    return part.dtype.name.startswith(("int", "uint"))


def _wide(part: Array) -> type[np.float64] | type[np.complex128]:
    return np.complex128 if part.dtype.kind == "c" else np.float64


def _epsilon(name: str) -> float:
    dtype = numpy_dtype(name)
    if hasattr(np, name):
        return float(np.finfo(dtype).eps)
    return float(importlib.import_module("ml_dtypes").finfo(dtype).eps)
