"""Parts of a donated tile that take each other's place on a TPU: in how many a step is fastest, and how small it gets.

    bf16[{x}32, 256, 768] -> bf16[256, {x}32, 768] on <x=8>, tiles of 12 MiB, v5p:

    parts   along        slots that change places   peak over a tile   ms by libtpu's own estimates, without wires
     6      rows         none                       1.33               0.08
    16      dim 0        16 x 8                     1.13               0.28
     8      not donated                             2.25               0.16

A part is read and written over by two kernels, beside those that pack and unpack what it sends. Each takes 1.2 us
whatever it moves, and slots that change places are read and written once more, one by one. So small tiles are done in
few parts, along digits for which no slots change places, and large ones in many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from reshard.geometry.figures import exchange_figures
from reshard.geometry.remesh import one_set
from reshard.lower.program import (
    KERNEL,
    AllToAll,
    InParts,
    count_transposing_cycles,
    lower_steps,
    transposing_passes,
)
from reshard.lower.to_shard_map import (
    choose_memory_order,
    count_padded_bytes,
    find_regions_on_tpu,
    lie_in_turn,
    writes_blocks_over,
)
from reshard.plans.plan import Plan, Step, StepSpec, chain
from reshard.plans.rules.split_steps import possible_counts, split_step
from reshard.plans.rules.step_mode import PLAIN, StepMode
from reshard.types.layout import Layout

READ, WRITTEN = 1 / 370, 1 / 290
"""Cycles of a byte that a kernel reads into on-chip memory, and of one that it writes to HBM: libtpu's estimates for
v5p (`benchmarks/tpu_traffic.py`)."""
HERTZ, WIRE = 1.75e9, 180e9
"""Cycles a second, and bytes that a chip receives, of v5p."""
MOST = 64
"""The most parts that are considered."""
SLOWER = 1.2
"""How many times as long as a step at once its form in place may take."""
LARGE = 256 << 20
"""Above so many bytes of a tile memory matters more than time: it is not received at once."""


class Overwriting(NamedTuple):
    """A step in parts that take each other's place, what it takes in cycles of the chip, and its peak over a tile."""

    move: StepSpec
    cycles: float
    peak: float


def list_overwritings(step: Step) -> Iterator[Overwriting]:
    """The numbers of parts in which a step that keeps the size of its tiles can overwrite them, with what they take."""
    tiles, size = (step.operand.tile_shape, step.result.tile_shape), step.operand.tile_bytes
    for parts in possible_counts(step.operand, step.result):
        part = split_step(step.operand, step.result, parts, in_place=True) if 2 < parts <= MOST else None
        where = None if part is None else find_regions_on_tpu(part.take, tiles[0], part.put, tiles[1])
        if part is None or where is None:
            continue
        slot = size // (where.outer * where.parts)
        passes = (
            *transposing_passes(where.outer, where.before, where.parts, slot // where.before),
            *transposing_passes(where.outer, where.parts, where.after, slot // where.after),
        )
        kernels, copies = count_copies(step.kind, part.operand, part.result, step)
        move, buffers = StepSpec(step.kind, step.result, StepMode(parts=parts, in_place=True)), 2
        (program,) = lower_steps(
            step.operand, [Step(step.kind, step.operand, step.result, move.mode)], donate=True
        ).instructions
        if isinstance(program, InParts) and writes_blocks_over(program, *tiles, step.operand.dtype):
            assert isinstance(program.each, AllToAll)
            kernels, copies, buffers = kernels + program.each.receive.count - 2, copies - WRITTEN, 1
        padded = count_padded_bytes(part.block, step.operand.dtype) / part.operand.nbytes(math.prod(part.block))
        cycles = parts * (2 + kernels) * KERNEL + size * (READ + WRITTEN + copies * max(1.0, padded))
        yield Overwriting(move, cycles + count_transposing_cycles(passes, size), 1 + buffers / parts)


def count_copies(kind: str, operand: Layout, result: Layout, whole: Step) -> tuple[float, float]:
    """The kernels that pack and unpack what a step sends, or a part of the `whole` one, whose tiles say how parts lie
    in memory; and the cycles of a byte of the tile in them."""
    if kind == "permute":
        return 0.0, 0.0
    if kind == "exchange":  # A message is cut out, and written where it belongs.
        return 2.0 * (exchange_figures(operand, result).rounds + 1), READ + WRITTEN
    each = lower_steps(operand, [Step(kind, operand, result)]).instructions[0]
    assert isinstance(each, AllToAll)
    orders = [choose_memory_order(end.tile_shape, end.dtype) for end in (whole.operand, whole.result)]
    copies = int(orders[0][-1] != orders[1][-1])
    for view, order in zip((each.send, each.receive), orders, strict=True):
        # Where blocks are side by side along the lanes, rows are rearranged, too.
        minor = any(view.dims[axis] == order[-1] for axis in view.blocks)
        copies += 0 if lie_in_turn(view, order) else 1 + minor
    return copies, copies * WRITTEN


def estimate_at_once(step: Step) -> float:
    """The cycles of the wires and of the chip for a step at once, of which XLA copies the result in any case."""
    kernels, copies = count_copies(step.kind, step.operand, step.result, step)
    if step.kind != "all_to_all":
        kernels, copies = kernels + 1, copies + WRITTEN
    local = max(1.0, kernels) * KERNEL + max(copies, WRITTEN) * step.operand.tile_bytes
    return HERTZ * (step.seconds or step.received_bytes / WIRE) + local


def overwrite_plan(plan: Plan, least: int) -> Plan | None:
    """A plan that donates with all of its steps in place, each in the smallest form that takes little longer than the
    step at once; None where some step is none, or has none.

    Steps of fewer than `least` bytes of operand and result have none. Large tiles, those that are not received at once,
    are overwritten however long it takes: by the smallest form that takes little longer than the fastest in place.
    """
    moves = [_choose_overwriting(step, least) for step in plan.steps]
    if not moves or None in moves:
        return None
    chosen = [move for move in moves if move is not None]
    return chain(plan.source, plan.target, chosen, True, [step.seconds for step in plan.steps], plan.view)


def _choose_overwriting(step: Step, least: int) -> StepSpec | None:
    size = step.operand.tile_bytes
    even = step.mode == PLAIN and size == step.result.tile_bytes and one_set(step.operand.mesh, step.result.mesh)
    if not even or step.kind not in ("all_to_all", "exchange", "permute") or 2 * size < least:
        return None
    forms = sorted(list_overwritings(step), key=lambda form: form.peak)
    wires, quick = HERTZ * (step.seconds or step.received_bytes / WIRE), estimate_at_once(step)
    if size > LARGE and forms:
        quick = max(quick, wires + min(form.cycles for form in forms))
    return next((form.move for form in forms if wires + form.cycles <= SLOWER * quick), None)
