"""Counterexamples: a program run by the numpy runtime on marked elements, until one is in the wrong place.

Every element, and every summand of a partial array, is a random number of 63 bits, so that what a device
ends with says where it came from. The run needs the whole array in this process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.lower import Program
from reshard.lower.exchange_in_place import ExchangeInPlace
from reshard.lower.program import Exchange
from reshard.runtime import Account, run
from reshard.types.layout import Layout
from reshard.types.meaning import meaning
from reshard.types.plan import Plan

MOST_ELEMENTS = 1 << 24
_SEEDS = 16
_COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply, "mean": np.add}

Array = NDArray[Any]


@dataclass(frozen=True)
class Counterexample:
    """What goes wrong, for which part of the proof, and where: device, local index, the element that belongs
    there and the one that is there (None where it is none), and the sizes of the layouts' tiles.
    """

    part: str
    what: str
    device: int | None = None
    index: tuple[int, ...] | None = None
    element: tuple[int, ...] | None = None
    found: tuple[int, ...] | None = None
    sizes: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        return self.what


def refute(plan: Plan, program: Program) -> Counterexample | None:
    """Runs a program and compares it with the meaning of its layouts and with the plan's promises.

    A maximum shows one of its summands only, so that it is run on several markings.
    """
    runs = range(_SEEDS if plan.source.reduction in ("max", "min") else 1)
    return next((found for seed in runs if (found := _refute(plan, program, seed)) is not None), None)


def _refute(plan: Plan, program: Program, seed: int) -> Counterexample | None:
    sizes = (plan.source.shape, plan.source.tile_shape, plan.target.tile_shape)
    marks = _marks(plan.source, seed)
    kind = str(marks.dtype)
    tiles = {d: _tile(plan.source, d, marks) for d in plan.source.mesh.devices}
    given = {d: tile.copy() for d, tile in tiles.items()}
    memory = Account(plan.source.dtype)
    if program.dtype != plan.source.dtype:
        return Counterexample("right", f"the program is one for {program.dtype}, not {plan.source.dtype}", sizes=sizes)
    try:
        with np.errstate(over="ignore"):
            result = run(replace(program, dtype=kind), tiles, memory)
    except (LookupError, ValueError, TypeError) as error:
        return Counterexample("right", f"the program does not run ({type(error).__name__}: {error})", sizes=sizes)
    for device in plan.target.mesh.devices:
        if not np.array_equal(tiles[device], given[device]):
            return Counterexample("right", f"device {device}'s source is written to", device, sizes=sizes)
    wanted = _combined(plan.source, plan.target, marks)
    for device in plan.target.mesh.devices:
        found = _wrong(plan.target, device, result.get(device), wanted, marks, sizes)
        if found is not None:
            return found
    return _broken_promise(plan, program, memory, sizes)


def fits(plan: Plan) -> bool:
    """Whether the array and all its tiles are small enough to run here."""
    tiles = (math.prod(lay.tile_shape) for lay in (plan.source, *(s.result for s in plan.steps)))
    planes = math.prod(a.size for a in plan.source.partial)
    return max(*tiles, 1) * plan.source.mesh.size * planes <= MOST_ELEMENTS


def _marks(layout: Layout, seed: int) -> Array:
    """A random number per summand of each element."""
    planes = math.prod(a.size for a in layout.partial)
    rng = np.random.default_rng(seed)
    shape = (planes, *layout.shape)
    if layout.reduction == "mean":
        return rng.integers(1, 1 << 20, shape).astype(np.float64)
    odd = layout.reduction == "product"
    return rng.integers(-(1 << 62), 1 << 62, shape) | int(odd)


def _tile(layout: Layout, device: int, marks: Array) -> Array:
    """A device's tile of a marked array; padding is 0."""
    index = meaning(layout, device)
    at = [np.minimum(np.array(i, np.int64), max(n - 1, 0)) for i, n in zip(index, layout.shape, strict=True)]
    real = [np.array(i, np.int64) < n for i, n in zip(index, layout.shape, strict=True)]
    plane = marks[_plane(layout, device)]
    tile = plane[np.ix_(*at)] if plane.size else np.zeros([len(i) for i in index], marks.dtype)
    return np.where(_outer(real), tile, np.zeros((), marks.dtype))


def _outer(masks: list[Any]) -> Array:
    found: Array = np.ones((), bool)
    for mask in masks:
        found = found[..., None] & mask
    return found


def _plane(layout: Layout, device: int) -> int:
    """Which summand a device holds, the partial sub-axes as the digits of a number."""
    position = layout.mesh.position(device)
    found = 0
    for axis in layout.partial:
        found = found * axis.size + layout.mesh.coordinate(position, axis)
    return found


def _combined(source: Layout, target: Layout, marks: Array) -> dict[int, Array]:
    """What the target's summands must be, by their number: those of the source that it combines.

    A target that is partial keeps the coordinates along its own sub-axes.
    """
    groups: dict[int, dict[int, Array]] = {}
    for device in source.mesh.devices:
        groups.setdefault(_plane(target, device), {})[_plane(source, device)] = marks[_plane(source, device)]
    return {plane: _total(source.reduction, list(parts.values())) for plane, parts in groups.items()}


def _total(reduction: str | None, parts: list[Array]) -> Array:
    if len(parts) == 1:
        return parts[0]
    total = parts[0]
    with np.errstate(over="ignore"):
        for part in parts[1:]:
            total = _COMBINE[reduction or "sum"](total, part)
    return total / len(parts) if reduction == "mean" else total


def _wrong(
    target: Layout,
    device: int,
    tile: Array | None,
    wanted: Mapping[int, Array],
    marks: Array,
    sizes: tuple[tuple[int, ...], ...],
) -> Counterexample | None:
    """The first element of a device that is not what the target's meaning demands."""
    if tile is None or tile.shape != target.tile_shape:
        what = "no tile" if tile is None else f"a tile of shape {tile.shape}, not {target.tile_shape}"
        return Counterexample("right", f"device {device} ends with {what}", device, sizes=sizes)
    plane = wanted[_plane(target, device)]
    should = _tile(replace(target, partial=(), reduction=None), device, plane[None])
    index = meaning(target, device)
    real = _outer([np.array(i, np.int64) < n for i, n in zip(index, target.shape, strict=True)])
    same = np.isclose(tile, should, rtol=1e-9) if tile.dtype.kind == "f" else tile == should
    bad = np.argwhere(real & ~same)
    if not len(bad):
        return None
    at = tuple(int(i) for i in bad[0])
    element = tuple(dim[i] for dim, i in zip(index, at, strict=True))
    hits = np.argwhere(marks == tile[at])
    found = tuple(int(i) for i in hits[0][1:]) if len(hits) else None
    there = f"element {found} of the array is there" if found is not None and found != element else "it is not"
    what = (
        f"device {device} must hold element {element} at local index {at}, but {there} (tiles {sizes[1]} to {sizes[2]})"
    )
    return Counterexample("right", what, device, at, element, found, sizes)


def _exchanges(program: Program) -> list[Exchange | ExchangeInPlace]:
    return [i for i in program.instructions if isinstance(i, Exchange | ExchangeInPlace)]


def _broken_promise(
    plan: Plan, program: Program, memory: Account, sizes: tuple[tuple[int, ...], ...]
) -> Counterexample | None:
    """Memory, bytes or launches above what the plan says, or messages without the buffers that they need."""
    if memory.peak_bytes > plan.peak_bytes:
        device = max(memory.peak, key=lambda d: memory.peak[d])
        what = f"device {device} has {memory.peak_bytes} bytes live, the plan promises at most {plan.peak_bytes}"
        return Counterexample("bounded", what, device, sizes=sizes)
    if memory.peak_bytes < plan.peak_bytes and any(not i.staged for i in _exchanges(program)):
        what = f"{memory.peak_bytes} bytes are live where messages need {plan.peak_bytes}: they are sent unstaged"
        return Counterexample("bounded", what, sizes=sizes)
    if memory.received_bytes > plan.received_bytes:
        device = max(memory.elements, key=lambda d: memory.elements[d])
        what = f"device {device} receives {memory.received_bytes} bytes, the plan says {plan.received_bytes}"
        return Counterexample("minimal", what, device, sizes=sizes)
    if memory.launches != plan.launches:
        return Counterexample("minimal", f"{memory.launches} launches, the plan says {plan.launches}", sizes=sizes)
    return None
