"""Parts of a donated tile that take each other's place on a TPU: in how many a step is fastest, and how small it gets.

    bf16[{x}32, 256, 768] -> bf16[256, {x}32, 768] on <x=8>, tiles of 12 MiB, v5p:

    parts   along        slots that change places   peak over a tile   ms by libtpu's own estimates, without wires
     4      dim 2        none                       1.25               0.05
    16      dim 0        16 x 8                     1.13               0.28
     4      not donated                             2.25               0.05

A part is read and written over by two kernels, beside those that pack and unpack what it sends, where these cannot do
that as well. Each takes 1.2 us whatever it moves, and slots that change places are read and written once more, one by
one. So small tiles are done in few parts, along digits for which no slots change places, and large ones in many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from reshard.geometry.figures import exchange_figures
from reshard.geometry.remesh import one_set
from reshard.lower.program import KERNEL, AllToAll, InParts, count_transposing_cycles, lower_steps, transposing_passes
from reshard.lower.to_shard_map import (
    choose_memory_order,
    find_regions_on_tpu,
    lie_in_turn,
    measure_padding,
    writes_parts_over,
)
from reshard.plans.plan import Plan, Step, StepSpec, chain
from reshard.plans.rules.split_steps import possible_counts, split_step
from reshard.plans.rules.step_mode import PLAIN, StepMode
from reshard.runtime.form_costs import COSTS, sum_wire_seconds
from reshard.types.layout import Layout

READ, WRITTEN = 1 / 370, 1 / 290
"""Cycles of a byte that a kernel reads into on-chip memory, and of one that it writes to HBM: libtpu's estimates for
v5p (`benchmarks/tpu_traffic.py`)."""
MOST = 64
"""The most parts that are considered."""
SLOWER = 1.17
"""How many times as long as without donation a plan in place may take."""
LARGE = 256 << 20
"""Above so many bytes of a tile memory matters more than time: it is not received at once."""


class Overwriting(NamedTuple):
    """A step in parts that take each other's place, what it takes in cycles of the chip, and its peak over a tile.

    An all-to-all that is `rearranged`, whose parts are not written straight into the tile, takes more kernels than a
    model can tell.
    """

    move: StepSpec
    cycles: float
    peak: float
    rearranged: bool


def overwrite_plan(plan: Plan, least: int, seconds: float) -> Plan | None:
    """A plan that donates with all of its steps in place, in the smallest forms that take little longer than so many
    seconds, those of its best form otherwise; None where there are none.

    A step of fewer than `least` bytes of operand and result has none. Tiles that are `LARGE` are overwritten however
    long it takes: by the smallest forms that take little longer than the fastest in place.
    """
    large = plan.source.tile_bytes > LARGE
    able = (list_overwritings(step) if 2 * step.operand.tile_bytes >= least else () for step in plan.steps)
    listed = [[form for form in forms if large or not form.rearranged] for forms in able]
    if not all(listed):
        return None
    costs = COSTS["tpu"]
    wires = costs.hertz * sum_wire_seconds(plan, costs.wire)
    limit = costs.hertz * SLOWER * seconds
    if large:
        limit = max(limit, SLOWER * (wires + sum(min(form.cycles for form in forms) for forms in listed)))
    for peak in sorted({form.peak for forms in listed for form in forms}):
        small = [[form for form in forms if form.peak <= peak] for forms in listed]
        chosen = [min(forms, key=lambda form: form.cycles) for forms in small if forms]
        if len(chosen) == len(listed) and wires + sum(form.cycles for form in chosen) <= limit:
            moves = [form.move for form in chosen]
            return chain(plan.source, plan.target, moves, True, [step.seconds for step in plan.steps], plan.view)
    return None


def list_overwritings(step: Step) -> Iterator[Overwriting]:
    """The numbers of parts in which a step can overwrite its operand, with what they take."""
    tiles, size = (step.operand.tile_shape, step.result.tile_shape), step.operand.tile_bytes
    even = step.mode == PLAIN and size == step.result.tile_bytes and one_set(step.operand.mesh, step.result.mesh)
    able = even and step.kind in ("all_to_all", "exchange", "permute")
    for parts in possible_counts(step.operand, step.result) if able else ():
        part = split_step(step.operand, step.result, parts, in_place=True) if 2 < parts <= MOST else None
        where = None if part is None else find_regions_on_tpu(part.take, tiles[0], part.put, tiles[1])
        if part is None or where is None:
            continue
        move, slot = StepSpec(step.kind, step.result, StepMode(parts=parts, in_place=True)), size // where.outer
        passes = (
            *transposing_passes(where.outer, where.before, where.parts, slot // (where.before * where.parts)),
            *transposing_passes(where.outer, where.parts, where.after, slot // (where.parts * where.after)),
        )
        kernels, copies, buffers = *estimate_packing(step.kind, part.operand, part.result, step), 2
        whole = Step(step.kind, step.operand, step.result, move.mode)
        (program,) = lower_steps(step.operand, [whole], donate=True).instructions
        straight = isinstance(program, InParts) and writes_parts_over(program, *tiles, step.operand.dtype)
        if straight:
            kernels, copies, buffers = 0.0, 0.0, 1
        padded = measure_padding(part.block, step.operand.dtype)
        cycles = parts * (2 + kernels) * KERNEL + size * (READ + WRITTEN + copies * padded)
        yield Overwriting(
            move,
            cycles + count_transposing_cycles(passes, size),
            1 + buffers / parts,
            step.kind == "all_to_all" and not straight,
        )


def estimate_packing(kind: str, operand: Layout, result: Layout, whole: Step) -> tuple[float, float]:
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
