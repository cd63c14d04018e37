"""Random data for a simulation, and the check of its result by `runtime.oracle`.

A tile whose elements only moved must hold them exactly. A combined one, such as a sum over x, is compared with the
same combination in double precision, within the rounding of its dtype. Padding holds noise and is never compared.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.runtime import oracle
from reshard.runtime.numpy_dtypes import numpy_dtype
from reshard.types import Layout, dtypes
from reshard.types.view import View

Array = NDArray[Any]


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
    """Random data for one run from a source to a target, and the check of its result.

    >>> from reshard.types import Mesh
    >>> layout = Layout.parse("float32[{x}3/5]", Mesh(x=2))
    >>> trial = Trial(layout, layout, seed=0)
    >>> tiles = trial.source_tiles()
    >>> trial.faults(tiles)
    []
    >>> tiles[1][1] = 7  # Element 4 of the array; the one after it is padding.
    >>> print(trial.faults(tiles)[0])  # doctest: +ELLIPSIS
    device 1: 1 wrong, first at global (4,): 7.0, not ...
    """

    def __init__(self, source: Layout, target: Layout, seed: int, view: View | None = None) -> None:
        self.source, self.target, self.view = source, target, view
        self.random = np.random.default_rng(seed)
        self.dtype = numpy_dtype(source.dtype)
        summands = oracle.summands(source)
        self.summands = {at: self._numbers(source.shape, len(summands)) for at in summands}

    def _numbers(self, shape: tuple[int, ...], summands: int) -> Array:
        """Random numbers of the dtype; several summands neither cancel out nor overflow."""
        name = self.source.dtype
        if name == "bool":
            return self.random.integers(0, 2, shape).astype(self.dtype)
        if name.startswith(("int", "uint")):
            return self._integers(shape, summands)
        numbers = self._floats(shape, summands)
        if name.startswith("complex"):
            numbers = numbers + 1j * self.random.uniform(0, 0.1, shape)
        return (np.abs(numbers) if name == "float8_e8m0fnu" else numbers).astype(self.dtype)

    def _integers(self, shape: tuple[int, ...], summands: int) -> Array:
        """All values of the dtype for a single summand, else 0 to 3, as far as the dtype has them."""
        name = self.source.dtype
        signed, bits = name.startswith("int"), dtypes.bits(name)
        low = -(1 << bits - 1) if signed and summands == 1 else 0
        high = 4 if summands > 1 else 1 << (bits - 1 if signed else bits)
        kind = np.int64 if signed else np.uint64
        return self.random.integers(low, min(high, 1 << bits), shape, dtype=kind).astype(self.dtype)

    def _floats(self, shape: tuple[int, ...], summands: int) -> Array:
        """Normal numbers for a single summand, else positive ones; those of a sum add up to about 1."""
        if summands == 1:
            return self.random.standard_normal(shape)
        return self.random.uniform(0.5, 1.5, shape) / (summands if self.source.reduction == "sum" else 1)

    def source_tiles(self) -> dict[int, Array]:
        """The source's tiles, cut from the global arrays, with noise as padding."""
        return oracle.cut_tiles(self.source, self.summands, lambda: self._numbers(self.source.tile_shape, 1))

    def target_tiles(self) -> dict[int, Array] | None:
        """The target's tiles before a move that fills part of them: zeros; None for other moves."""
        if self.view is None or not self.view.into:
            return None
        zeros = {(): np.zeros(self.target.shape, numpy_dtype(self.target.dtype))}
        return oracle.cut_tiles(
            self.target, zeros, lambda: np.zeros(self.target.tile_shape, numpy_dtype(self.target.dtype))
        )

    def faults(self, tiles: Mapping[int, Array]) -> list[Fault]:
        """The devices whose tiles differ from what the target demands."""
        target = self.target
        if all(device in tiles and tiles[device].shape == target.tile_shape for device in target.mesh.devices):
            target, tiles = oracle.finished(self.source, target, tiles)
        wanted = self._seen(oracle.combined(self.source, target, self._in_double_precision(target)))
        faults = [self._fault(target, device, tiles.get(device), wanted) for device in target.mesh.devices]
        return [fault for fault in faults if fault is not None]

    def _seen(self, arrays: oracle.Arrays) -> oracle.Arrays:
        """The arrays through the view, cast if the target has another dtype and nothing was combined."""
        dtype = numpy_dtype(self.target.dtype)
        casts = self.source.dtype != self.target.dtype and len(self.summands) == 1
        if self.view is None and not casts:
            return arrays
        view = View.identity(self.source.shape) if self.view is None else self.view
        each = {at: array.astype(dtype) if casts else array for at, array in arrays.items()}
        zeros = {at: np.zeros(self.target.shape, array.dtype) for at, array in each.items()}
        return {at: oracle.viewed(view, array, zeros[at]) for at, array in each.items()}

    def _in_double_precision(self, target: Layout) -> oracle.Arrays:
        """The summands, as doubles if they are floats and will be combined."""
        combines = len(self.summands) > len(oracle.summands(target))
        if not combines or self.dtype.kind in "biu" or _is_small_int(self.dtype):
            return self.summands
        return {at: array.astype(_wide(array)) for at, array in self.summands.items()}

    def _fault(self, target: Layout, device: int, tile: Array | None, wanted: oracle.Arrays) -> Fault | None:
        if tile is None or tile.shape != target.tile_shape:
            return Fault(device, 1, (), "no tile" if tile is None else f"shape {tile.shape}", str(target.tile_shape))
        wrong = oracle.first_mismatch(target, device, tile, wanted, self._close)
        return None if wrong is None else Fault(device, wrong.total, wrong.element, str(wrong.got), str(wrong.wanted))

    def _close(self, got: Array, right: Array) -> Array:
        if got.dtype == right.dtype:
            return np.asarray(got == right)
        wide = got.astype(right.dtype)
        rounding = 2 * len(self.summands) * _epsilon(self.source.dtype)
        return np.asarray(np.abs(wide - right) <= rounding * np.abs(right))


def _is_small_int(dtype: np.dtype[Any]) -> bool:
    """Whether this is int2 or int4 of ml_dtypes, which wrap around like all integers."""
    return dtype.name.startswith(("int", "uint"))


def _wide(part: Array) -> type[np.float64] | type[np.complex128]:
    return np.complex128 if part.dtype.kind == "c" else np.float64


def _epsilon(name: str) -> float:
    """The relative spacing of a dtype's numbers, which numpy knows only for its own dtypes."""
    dtype = numpy_dtype(name)
    if hasattr(np, name):
        return float(np.finfo(dtype).eps)
    return float(importlib.import_module("ml_dtypes").finfo(dtype).eps)
