"""Counterexamples: the numpy runtime runs a program on marked elements, and the first one in a wrong place is reported.

Every element, and every summand of a partial array, is a random number of 63 bits, so the value that a device ends with
tells where it came from. The run needs the whole array in this process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.lower import Program
from reshard.lower.exchange_rounds import ExchangeInPlace
from reshard.lower.program import Exchange
from reshard.plans.plan import Plan
from reshard.runtime import Account, oracle, run
from reshard.runtime.on_numpy import Extras
from reshard.types.layout import Layout

MOST_ELEMENTS = 1 << 24
"""A larger array, over all devices, is not run."""

_SEEDS = 16
"""Markings of a maximum or a minimum."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Counterexample:
    """What goes wrong, which part of the proof it contradicts, and where.

    The place is a device and a local index; `element` belongs there, and `actual` is there (None if it is not an
    element). `sizes` are the shapes of the array, the source's tiles and the target's tiles.
    """

    part: str
    what: str
    device: int | None = None
    index: tuple[int, ...] | None = None
    element: tuple[int, ...] | None = None
    actual: tuple[int, ...] | None = None
    sizes: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        return self.what


def refute(plan: Plan, program: Program) -> Counterexample | None:
    """Runs a program, compares it with the meaning of its layouts and with the plan's promises; None if all hold.

    A maximum shows only one of its summands, so it is run on several markings.

    >>> import reshard as rs
    >>> from reshard.lower import lower_plan
    >>> mesh = rs.Mesh(x=3)
    >>> plan = rs.plan(rs.Layout.parse("f32[{x}]", mesh), rs.Layout.parse("f32[3]", mesh))
    >>> program = lower_plan(plan)
    >>> print(refute(plan, program))
    None
    >>> gather = replace(program.instructions[0], groups=((1, 0, 2),))
    >>> print(refute(plan, replace(program, instructions=(gather,))))
    device 0 must hold element (0,) at local index (0,), but element (1,) of the array is there (tiles (1,) to (3,))
    """
    extremes = {plan.source.reduction, plan.target.reduction} & {"max", "min"}
    markings = range(_SEEDS if extremes else 1)
    return next((wrong for seed in markings if (wrong := _refute(plan, program, seed)) is not None), None)


def _refute(plan: Plan, program: Program, seed: int) -> Counterexample | None:
    sizes = (plan.source.shape, plan.source.tile_shape, plan.target.tile_shape)
    marks = _marks(plan.source, seed)
    kind = str(next(iter(marks.values())).dtype)
    tiles = oracle.cut_tiles(plan.source, marks, lambda: np.zeros(plan.source.tile_shape, kind))
    given = {d: tile.copy() for d, tile in tiles.items()}
    memory = Account(plan.source.dtype)
    if program.dtype != plan.source.dtype:
        return Counterexample("right", f"the program is for {program.dtype}, not {plan.source.dtype}", sizes=sizes)
    try:
        with np.errstate(over="ignore"):
            result = run(replace(program, dtype=kind), tiles, memory, *_extras(plan, kind))
    except (LookupError, ValueError, TypeError) as error:
        return Counterexample("right", f"the program does not run ({type(error).__name__}: {error})", sizes=sizes)
    for device in plan.source.mesh.devices:
        if not np.array_equal(tiles[device], given[device]):
            return Counterexample("right", f"device {device}'s source is written to", device, sizes=sizes)
    target = plan.target
    with np.errstate(over="ignore"):
        if all(device in result and result[device].shape == target.tile_shape for device in target.mesh.devices):
            target, result = oracle.finished(plan.source, target, result)
        wanted = _viewed(plan, oracle.combine_summands(plan.source, target, marks))
    for device in plan.target.mesh.devices:
        wrong = _wrong(target, device, result.get(device), wanted, marks, sizes)
        if wrong is not None:
            return wrong
    return _broken_promise(plan, program, memory, sizes)


def _extras(plan: Plan, kind: str) -> tuple[Extras, ...]:
    """Marks in what the target holds already, where only part of it is filled; nothing for a plan without a view."""
    if plan.view is None and plan.source.dtype == plan.target.dtype:
        return ()
    if plan.view is None or not plan.view.into:
        return (Extras(casts=False),)
    target = plan.target
    held = {(): _held(plan, kind)}
    return (Extras(oracle.cut_tiles(target, held, lambda: np.zeros(target.tile_shape, kind)), casts=False),)


def _held(plan: Plan, kind: str) -> Array:
    """What the target holds before the move."""
    return np.random.default_rng(_SEEDS).integers(0, 1 << 20, plan.target.shape).astype(kind)


def _viewed(plan: Plan, arrays: oracle.Arrays) -> oracle.Arrays:
    """The source's arrays as the target's: the pairs of row-major indices that the plan's view relates, one by one."""
    if plan.view is None:
        return arrays
    view = plan.view
    return {summand: oracle.view_marks(view, array, _held(plan, str(array.dtype))) for summand, array in arrays.items()}


def fits(plan: Plan) -> bool:
    """Whether the array and all its tiles are small enough to run in this process."""
    tiles = (math.prod(lay.tile_shape) for lay in (plan.source, *(s.result for s in plan.steps)))
    planes = math.prod(a.size for a in (*plan.source.partial, *plan.target.partial))
    return max(*tiles, 1) * max(plan.source.mesh.size, plan.target.mesh.size) * planes <= MOST_ELEMENTS


def _marks(layout: Layout, seed: int) -> dict[oracle.Summand, Array]:
    """A random number for each summand of each element; products stay invertible, since all of them are odd."""
    summands = oracle.summands(layout)
    rng = np.random.default_rng(seed)
    shape = (len(summands), *layout.shape)
    if layout.reduction == "mean":
        marks = rng.integers(1, 1 << 20, shape).astype(np.float64)
    else:
        odd = layout.reduction == "product"
        marks = rng.integers(-(1 << 62), 1 << 62, shape) | int(odd)
    return dict(zip(summands, marks, strict=True))


def _wrong(
    target: Layout,
    device: int,
    tile: Array | None,
    wanted: oracle.Arrays,
    marks: oracle.Arrays,
    sizes: tuple[tuple[int, ...], ...],
) -> Counterexample | None:
    """The first element of a device's tile that is not what the target's meaning demands."""
    if tile is None or tile.shape != target.tile_shape:
        what = "no tile" if tile is None else f"a tile of shape {tile.shape}, not {target.tile_shape}"
        return Counterexample("right", f"device {device} ends with {what}", device, sizes=sizes)
    wrong = oracle.first_mismatch(target, device, tile, wanted, _same)
    if wrong is None:
        return None
    # The global index of the element that has this mark, if any has.
    hits = (hit for array in marks.values() for hit in np.argwhere(array == wrong.got))
    origin = next((tuple(int(i) for i in hit) for hit in hits), None)
    there = f"element {origin} of the array is there" if origin not in (None, wrong.element) else "it is not"
    what = (
        f"device {device} must hold element {wrong.element} at local index {wrong.local}, but {there} "
        f"(tiles {sizes[1]} to {sizes[2]})"
    )
    return Counterexample("right", what, device, wrong.local, wrong.element, origin, sizes)


def _same(got: Array, wanted: Array) -> Array:
    return np.isclose(got, wanted, rtol=1e-9) if got.dtype.kind == "f" else np.equal(got, wanted)


def _exchanges(program: Program) -> list[Exchange | ExchangeInPlace]:
    return [i for i in program.instructions if isinstance(i, Exchange | ExchangeInPlace)]


def _broken_promise(
    plan: Plan, program: Program, memory: Account, sizes: tuple[tuple[int, ...], ...]
) -> Counterexample | None:
    """Memory, bytes or launches beyond what the plan promises, or messages without the buffers that they need."""
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
