"""The forms of a plan's steps that a TPU runs fastest, where XLA's modelled time is that of bytes received and copied.

bf16[512, {x}64, 512] -> bf16[{x}64, 512, 512]     an all-to-all, sent as it lies: a part would be cut out first

A part of a tile is read and cut out before it is sent, and what a collective receives is read and written once more:
local bytes of 1.5 times source and target. A whole operand is sent from where it is, which leaves 1.0, for a buffer as
large as the result. Two devices keep half of what they have, which an exchange copies straight into the result: 1.25.

Permutes are the only collectives beside which libtpu runs copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from reshard.lower import lower_plan
from reshard.lower.part_loops import loops
from reshard.lower.to_shard_map import sent_as_it_lies
from reshard.runtime.xla_parts import LEAST, PARTS, can_share_loop, in_parts, overlapping_parts, peak_bytes
from reshard.types.pair.device_sets import one_set
from reshard.types.pair.refine import refine
from reshard.types.plan import Plan, Step, StepSpec, chain
from reshard.types.rules.cost import StepMode
from reshard.types.rules.exchange import exchange_size

AT_ONCE = 256 << 20
"""The most bytes of a result that is received at once: its buffer is as large."""
OVERLAPPED = 32 << 20
"""Permutes overlap from this many bytes of operand and result on a device: there are twice as many of them."""


def in_parts_on_tpu(plan: Plan, least: int = LEAST) -> Plan:
    """`in_parts`, with what a TPU does faster, or in far less memory, in another form; it receives no more bytes.

    An all-to-all that is sent as it lies is one at once, or an exchange among two devices, and permutes overlap.

    One exchange from end to end takes the place of steps that do not share a loop, where these need more than 1.5 times
    source and target for the tiles between them, and it three quarters of that. For example, three steps from
    `bf16[{z}32, {y}64, {x}64, 64]` to `bf16[64, 128, {z}{x}32, 64]` on `<x=2, y=2, z=2>`, whose tiles have 64 lanes of
    128, need 2.73 times source and target, and an exchange 1.54.
    """
    parted = in_parts(plan, least)
    if not plan.donate and plan.view is None:
        parted = _in_one_copy(plan, parted) or _overlapped(parted)
    ends = plan.source.tile_bytes + plan.target.tile_bytes
    if len(loops(parted.steps)) == 1 or ends < least or 2 * peak_bytes(parted, padded=True) <= 3 * ends:
        return parted
    if (
        plan.donate
        or plan.view is not None
        or not plan.source.partial_as(plan.target)
        or not one_set(plan.source.mesh, plan.target.mesh)
    ):
        return parted
    if refine(plan.source, plan.target) is None or exchange_size(plan.source, plan.target).rounds > 2 * PARTS:
        return parted
    straight = in_parts(chain(plan.source, plan.target, [StepSpec("exchange", plan.target)], plan.donate), least)
    needs, otherwise = (peak_bytes(each, padded=True) for each in (straight, parted))
    return straight if 4 * needs <= 3 * otherwise else parted


def _in_one_copy(plan: Plan, parted: Plan) -> Plan | None:
    """A plan of one all-to-all that is sent as it lies, at once, or among two devices as an exchange in parts; None for
    other plans, and where the buffer would be large."""
    step = parted.steps[0] if len(plan.steps) == 1 else None
    if step is None or step.kind != "all_to_all" or step.mode.parts == 1 or not sent_as_it_lies(lower_plan(plan)):
        return None
    if exchange_size(plan.source, plan.target).rounds == 1:
        move = StepSpec("exchange", plan.target, StepMode(parts=step.mode.parts))
        return chain(plan.source, plan.target, [move], seconds=[step.seconds])
    ends = plan.source.tile_bytes + plan.target.tile_bytes
    fits = plan.target.tile_bytes <= AT_ONCE and 2 * peak_bytes(plan, padded=True) <= 3 * ends
    return plan if fits else None


def _overlapped(parted: Plan) -> Plan:
    """The plan with the parts of permutes, and of slices before them, written while the next ones are on their way."""
    moves = [move for loop in loops(parted.steps) for move in _beside(loop)]
    return chain(parted.source, parted.target, moves, seconds=[step.seconds for step in parted.steps])


def _beside(loop: Sequence[Step]) -> list[StepSpec]:
    """The steps of a loop, in parts that overlap if it ends with a permute and has nothing else but slices."""
    as_they_are = [StepSpec(step.kind, step.result, step.mode) for step in loop]
    *slices, last = loop
    small = last.operand.tile_bytes + last.result.tile_bytes < OVERLAPPED
    if small or last.kind != "permute" or last.mode.parts == 1 or any(step.kind != "slice" for step in slices):
        return as_they_are
    parts = overlapping_parts(last, 2 * PARTS)
    if parts is None or not all(can_share_loop(*two, parts) for two in pairwise(loop)):
        return as_they_are
    in_turn = [move._replace(mode=StepMode(parts=parts)) for move in as_they_are[:-1]]
    return [*in_turn, as_they_are[-1]._replace(mode=StepMode(parts=parts, overlap=True))]
