"""A simulation: what it may cost, its random data, the check of its result by `runtime.oracle`, and what is printed.

A tile whose elements only moved must hold them exactly. A combined one, such as a sum over x, is compared with the
same combination in double precision, within the rounding of its dtype. Padding holds noise and is never compared.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from reshard.errors import ReshardError
from reshard.plans.plan import Plan
from reshard.runtime import oracle
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.show import terminal
from reshard.types import Layout, dtypes
from reshard.types.units import bytes_text, counted
from reshard.types.view import View

Array = NDArray[Any]

MOST_BYTES = 1 << 30
MOST_DEVICES = 4096
MOST_ROUNDS = 100_000
_MOST_FAULTS = 8  # Lines printed, one for each device with wrong elements.


def check_simulated_size(plan: Plan) -> None:
    """Raises `ReshardError` for a plan that would not fit this machine, before anything is allocated."""
    mesh = max(plan.source.mesh, plan.target.mesh, key=lambda mesh: mesh.size)
    if mesh.size > MOST_DEVICES:
        raise ReshardError(
            f"{mesh.size} devices on mesh {mesh} are too many to simulate in one process (at most {MOST_DEVICES}); "
            f"use smaller axes, or `reshard plan`, which takes any size"
        )
    if plan.launches > MOST_ROUNDS:
        raise ReshardError(
            f"{plan.launches} launches are too many to simulate (at most {MOST_ROUNDS}); give a larger --budget"
        )
    # The bytes of all tiles at the peak, and of the global arrays that they are cut from.
    summands = math.prod(axis.size for axis in plan.source.partial)
    whole = plan.source.nbytes(math.prod(plan.source.shape))
    unpacked = max(1, 8 // dtypes.bits(plan.source.dtype))  # numpy stores an int4 in a byte.
    needed = unpacked * (max(plan.source.mesh.size, plan.target.mesh.size) * plan.peak_bytes + summands * whole)
    if needed > MOST_BYTES:
        fewer = -(-needed // MOST_BYTES)
        raise ReshardError(
            f"an array of global shape {plan.source.shape} needs {bytes_text(needed)} on "
            f"{counted(mesh.size, 'device')} of mesh {mesh}, and at most {bytes_text(MOST_BYTES)} are simulated; "
            f"give a shape with {fewer} times fewer elements, or use `reshard plan`, which takes any size"
        )


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
            # All values of the dtype for a single summand, else 0 to 3, as far as the dtype has them.
            signed, bits = name.startswith("int"), dtypes.bits(name)
            low = -(1 << bits - 1) if signed and summands == 1 else 0
            high = 4 if summands > 1 else 1 << (bits - 1 if signed else bits)
            kind = np.int64 if signed else np.uint64
            return self.random.integers(low, min(high, 1 << bits), shape, dtype=kind).astype(self.dtype)
        if summands == 1:
            numbers = self.random.standard_normal(shape)
        else:  # Positive ones; those of a sum add up to about 1.
            numbers = self.random.uniform(0.5, 1.5, shape) / (summands if self.source.reduction == "sum" else 1)
        if name.startswith("complex"):
            numbers = numbers + 1j * self.random.uniform(0, 0.1, shape)
        return (np.abs(numbers) if name == "float8_e8m0fnu" else numbers).astype(self.dtype)

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
        summands = self.summands
        # Integers wrap around, so their sums are exact; numpy counts int2 and int4 of ml_dtypes as no kind of integer.
        exact = self.dtype.kind in "biu" or self.dtype.name.startswith(("int", "uint"))
        if len(summands) > len(oracle.summands(target)) and not exact:
            wide = np.complex128 if self.dtype.kind == "c" else np.float64
            summands = {at: array.astype(wide) for at, array in summands.items()}
        wanted = oracle.combine_summands(self.source, target, summands)
        casts = self.source.dtype != self.target.dtype and len(self.summands) == 1
        if casts:
            wanted = {at: array.astype(numpy_dtype(self.target.dtype)) for at, array in wanted.items()}
        if casts or self.view is not None:
            view = View.identity(self.source.shape) if self.view is None else self.view
            shape = self.target.shape
            wanted = {at: oracle.view_marks(view, each, np.zeros(shape, each.dtype)) for at, each in wanted.items()}
        faults: list[Fault] = []
        for device in target.mesh.devices:
            tile = tiles.get(device)
            if tile is None or tile.shape != target.tile_shape:
                got = "no tile" if tile is None else f"shape {tile.shape}"
                faults.append(Fault(device, 1, (), got, str(target.tile_shape)))
            elif wrong := oracle.first_mismatch(target, device, tile, wanted, self._close):
                faults.append(Fault(device, wrong.total, wrong.element, str(wrong.got), str(wrong.wanted)))
        return faults

    def _close(self, got: Array, right: Array) -> Array:
        if got.dtype == right.dtype:
            return np.asarray(got == right)
        wide = got.astype(right.dtype)
        # numpy knows the spacing of its own dtypes only. Each of n summands may be rounded twice on the way.
        finfo = np.finfo if hasattr(np, self.source.dtype) else importlib.import_module("ml_dtypes").finfo
        rounding = 2 * len(self.summands) * float(finfo(self.dtype).eps)
        return np.asarray(np.abs(wide - right) <= rounding * np.abs(right))


class Promise(NamedTuple):
    """A figure of a plan on its worst device, and what was measured."""

    name: str
    measured: int
    promised: int
    text: Callable[[int], str]

    @property
    def kept(self) -> bool:
        """Whether no more was measured than promised."""
        return self.measured <= self.promised


def show_promises(out: Console, rows: Sequence[Promise]) -> None:
    """Prints what was measured beside what the plan promised."""
    table = terminal.make_table("a device, at worst", "measured", "promised", "", right=["measured", "promised"])
    for row in rows:
        mark = Text("kept", terminal.GOOD) if row.kept else Text("BROKEN", terminal.BAD)
        table.add_row(Text(row.name), Text(row.text(row.measured)), Text(row.text(row.promised)), mark)
    terminal.print_table(out, table, indent=2)
    out.print()


def show_verdict(out: Console, plan: Plan, faults: Sequence[Fault], kept: bool) -> None:
    """Prints that all devices hold what the target says, or which do not."""
    devices = counted(plan.target.mesh.size, "device")
    if not faults:
        exact = "" if plan.source.partial_as(plan.target) else ", within rounding"
        line = f"right: each of the {devices} holds what the target says{exact}"
        terminal.print_paragraph(out, line, style=terminal.GOOD if kept else terminal.BAD)
        return
    wrong = sum(fault.count for fault in faults)
    line = f"WRONG: {counted(wrong, 'element')} on {len(faults)} of {devices}"
    terminal.print_paragraph(out, line, style=terminal.BAD)
    for fault in faults[:_MOST_FAULTS]:
        terminal.print_paragraph(out, str(fault), "  ")
