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
from reshard.proofs.symbolic import broken_rule
from reshard.runtime import Account, oracle, run
from reshard.runtime.on_numpy import Extras, hold_tiles
from reshard.types.view import View

MOST_ELEMENTS = 1 << 24
"""A larger array, over all devices, is not run."""

MALFORMED = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, MemoryError, StopIteration)
"""What a program raises whose lists and views do not fit each other."""

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

    An array that is too large is not run; rules that no run shows are looked at in any case (`broken_rule`). A maximum
    shows only one of its summands, so it is run on several markings.

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
    if (broken := broken_rule(plan, program)) is not None:
        sizes = (plan.source.shape, plan.source.tile_shape, plan.target.tile_shape)
        return Counterexample("right", broken, sizes=sizes)
    extremes = {plan.source.reduction, plan.target.reduction} & {"max", "min"}
    seeds = range(_SEEDS if extremes else 1) if fits_in_memory(plan) else ()
    return next((wrong for seed in seeds if (wrong := _run_marked(plan, program, seed)) is not None), None)


def _run_marked(plan: Plan, program: Program, seed: int) -> Counterexample | None:
    """Marks every element, and every summand of it, runs the program, and looks at what every device ends with."""
    source, target, view = plan.source, plan.target, plan.view
    sizes = (source.shape, source.tile_shape, target.tile_shape)
    summands = oracle.summands(source)
    rng = np.random.default_rng(seed)
    shape = (len(summands), *source.shape)
    if source.reduction == "mean":
        random = rng.integers(1, 1 << 20, shape).astype(np.float64)
    else:  # Products stay invertible, since all of their factors are odd.
        random = rng.integers(-(1 << 62), 1 << 62, shape) | int(source.reduction == "product")
    marks: dict[oracle.Summand, Array] = dict(zip(summands, random, strict=True))
    kind = str(random.dtype)
    # What a target that is only filled in part holds before the move.
    before = np.random.default_rng(_SEEDS).integers(0, 1 << 20, target.shape).astype(kind) if plan.fills else None
    extras: tuple[Extras, ...] = ()
    if view is not None or source.dtype != target.dtype or before is not None:
        extra = Extras()
        if plan.holding is not None and before is not None:
            # What is held is what the target means, and where that is stale, another mark.
            stale = oracle.stale_marks(plan.holding)
            same = view or View.identity(source.shape)
            other = np.random.default_rng(_SEEDS + 1).integers(1, 1 << 20, stale.shape)
            fresh = oracle.view_marks(same, np.where(stale, other, random[0]), before)
            marked = [replace(layout, dtype=kind) for layout in (plan.holding.layout, target)]
            held = oracle.cut_tiles(marked[0], {(): fresh}, lambda: np.zeros(marked[0].tile_shape, kind))
            extra = hold_tiles(marked[0], marked[1], held)
        elif before is not None:
            extra = Extras(oracle.cut_tiles(target, {(): before}, lambda: np.zeros(target.tile_shape, kind)))
        extras = (replace(extra, casts=False),)
    tiles = oracle.cut_tiles(source, marks, lambda: np.zeros(source.tile_shape, kind))
    given = {d: tile.copy() for d, tile in tiles.items()}
    memory = Account(source.dtype)
    try:
        with np.errstate(over="ignore"):
            result = run(replace(program, dtype=kind), tiles, memory, *extras)
    except MALFORMED as error:
        return Counterexample("right", f"the program does not run ({type(error).__name__}: {error})", sizes=sizes)
    for device in source.mesh.devices:
        if not np.array_equal(tiles[device], given[device]):
            return Counterexample("right", f"device {device}'s source is written to", device, sizes=sizes)
    if strangers := sorted(set(result) - set(target.mesh.devices)):
        what = f"device {strangers[0]} ends with a tile, and {target} has none there"
        return Counterexample("right", what, strangers[0], sizes=sizes)
    for device in target.mesh.devices:
        tile = result.get(device)
        if tile is None or tile.shape != target.tile_shape:
            what = "no tile" if tile is None else f"a tile of shape {tile.shape}, not {target.tile_shape}"
            return Counterexample("right", f"device {device} ends with {what}", device, sizes=sizes)
    with np.errstate(over="ignore"):
        meant, ended = oracle.finished(source, target, result)
        wanted = oracle.combine_summands(source, meant, marks)
        if view is not None:
            base = np.zeros(target.shape, kind) if before is None else before
            wanted = {one: oracle.view_marks(view, array, base.astype(array.dtype)) for one, array in wanted.items()}
    for device in target.mesh.devices:
        wrong = oracle.first_mismatch(meant, device, ended[device], wanted, _same)
        if wrong is None:
            continue
        # The global index of the element that has this mark, if any has.
        hits = (hit for array in marks.values() for hit in np.argwhere(array == wrong.got))
        origin = next((tuple(int(i) for i in hit) for hit in hits), None)
        there = f"element {origin} of the array is there" if origin not in (None, wrong.element) else "it is not"
        what = (
            f"device {device} must hold element {wrong.element} at local index {wrong.local}, but {there} "
            f"(tiles {sizes[1]} to {sizes[2]})"
        )
        return Counterexample("right", what, device, wrong.local, wrong.element, origin, sizes)
    return _broken_promise(plan, program, memory, sizes)


def fits_in_memory(plan: Plan) -> bool:
    """Whether the array and all its tiles are small enough to run in this process."""
    layouts = plan.source, *(step.result for step in plan.steps), *([] if plan.have is None else [plan.have])
    tiles = (math.prod(lay.tile_shape) for lay in layouts)
    planes = math.prod(a.size for a in (*plan.source.partial, *plan.target.partial))
    return max(*tiles, 1) * max(plan.source.mesh.size, plan.target.mesh.size) * planes <= MOST_ELEMENTS


def _same(got: Array, wanted: Array) -> Array:
    return np.isclose(got, wanted, rtol=1e-9) if got.dtype.kind == "f" else np.equal(got, wanted)


def _broken_promise(
    plan: Plan, program: Program, memory: Account, sizes: tuple[tuple[int, ...], ...]
) -> Counterexample | None:
    """Memory, bytes or launches beyond what the plan promises, or messages without the buffers that they need."""
    if memory.peak_bytes > plan.peak_bytes:
        device = max(memory.peak, key=lambda d: memory.peak[d])
        what = f"device {device} has {memory.peak_bytes} bytes live, the plan promises at most {plan.peak_bytes}"
        return Counterexample("bounded", what, device, sizes=sizes)
    exchanges = [i for i in program.instructions if isinstance(i, Exchange | ExchangeInPlace)]
    # A promise may be above what a run takes for other reasons, such as tiles that share memory.
    buffered = sum(step.kind == "exchange" and step.cost.scratch > 0 for step in plan.steps)
    if memory.peak_bytes < plan.peak_bytes and sum(i.staged for i in exchanges) < buffered:
        what = f"{memory.peak_bytes} bytes are live where messages need {plan.peak_bytes}: they are sent unstaged"
        return Counterexample("bounded", what, sizes=sizes)
    if memory.received_bytes > plan.received_bytes:
        device = max(memory.elements, key=lambda d: memory.elements[d])
        what = f"device {device} receives {memory.received_bytes} bytes, the plan says {plan.received_bytes}"
        return Counterexample("minimal", what, device, sizes=sizes)
    if memory.launches != plan.launches:
        return Counterexample("minimal", f"{memory.launches} launches, the plan says {plan.launches}", sizes=sizes)
    return None
