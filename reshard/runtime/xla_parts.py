"""Plans in parts for XLA, which stages whole tiles of a collective, and what they need of memory there.

bf16[512, {x}64, 512] -> bf16[{x}64, 512, 512]     at once: twice source and target; in 8 parts: 1.06 times
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from reshard.geometry.refine import refine
from reshard.geometry.remesh import one_set
from reshard.lower import lower_plan
from reshard.lower.program import Exchange, lower_steps
from reshard.lower.to_shard_map import LANES, SUBLANES, joins_in_one_copy, regions_on_tpu, sent_as_it_lies
from reshard.lower.to_shard_map.parts import loops, share_loop
from reshard.plans.plan import Plan, Step, StepSpec, chain
from reshard.plans.rules.collectives import OVERLAPPING, VIEW_RULES
from reshard.plans.rules.cost import PLAIN, StepMode
from reshard.plans.rules.exchange import exchange_size
from reshard.plans.rules.parts import Part, Regions, counts, split_step
from reshard.runtime import tpu_memory

LEAST = 16 << 20
"""A step is done in parts from this many bytes of operand and result on a device."""
PARTS = 8
"""The number of parts aimed at; twice as many where the source is donated."""
OVERLAPPED = 256 << 20
"""Parts may overlap from this many bytes of operand and result on a device: twice as many parts start twice as many
collectives, and below it the copies that these hide take less time than that."""


def in_parts(plan: Plan, least: int = LEAST, count: int = PARTS, overlap: bool = False, *, lanes: bool = True) -> Plan:
    """The plan with its large collectives in parts, so that their buffers are a fraction of the tiles.

    With `overlap`, the largest are in twice as many parts, of which two live at once, and each is written while the
    next one is on its way. With `lanes`, as on a TPU, blocks that it pads to twice their bytes are in twice as many.

    XLA stages a collective's operand and result beside the tiles themselves: on TPU an all-to-all peaks at twice
    source and target, an all-gather at 1.9 times. In a loop it reuses the buffers of one part. A slice before a step
    in parts is in as many if it can share the loop.

    A donated source whose steps all keep the size of the tiles is overwritten, part by part. Of another size, XLA
    cannot use its memory: then there are more parts, which need less of it.
    """
    if plan.donate:
        overwriting = [_overwriting(step, least, 2 * count) for step in plan.steps]
        if all(overwriting):
            return _with_steps(plan, [move for move in overwriting if move is not None])
        if not overlap and not any(map(tpu_memory.padding_of, (plan.source, plan.target))):
            count *= 2  # Narrower parts of padded tiles would be padded more.
    moves = [_parted(step, least, count, overlap, lanes) for step in plan.steps]
    if len(moves) > 1:
        moves[-1] = _finer(plan.steps[-2], plan.steps[-1], moves[-1], 2 * count)
    for at in reversed(range(len(moves) - 1)):
        moves[at] = _joining(plan.steps[at], moves[at], plan.steps[at + 1], moves[at + 1].mode.parts)
    return _with_steps(plan, moves)


def _with_steps(plan: Plan, moves: Sequence[StepSpec]) -> Plan:
    return chain(plan.source, plan.target, moves, plan.donate, [step.seconds for step in plan.steps], plan.view)


def _overwriting(step: Step, least: int, count: int) -> StepSpec | None:
    """The step in parts that take each other's place, in the tiles' own memory; None if that cannot be.

    Among the numbers of parts from half of `count` up, one for which no slots are rearranged is preferred.
    """
    if not _has_parts(step, least) or step.operand.tile_bytes != step.result.tile_bytes:
        return None
    possible = counts(step.operand, step.result)
    enough = [number for number in possible if count <= number <= 4 * count]
    preferred = [*enough, *reversed([number for number in possible if count // 4 <= number < count])]
    slots = {number: _regions(step, number) for number in preferred}
    suited = {number: where.transpositions for number, where in slots.items() if where is not None}
    at_once = (number for number, transpositions in suited.items() if not transpositions and 2 * number >= count)
    parts = next(at_once, next(iter(suited), None))
    return None if parts is None else StepSpec(step.kind, step.result, StepMode(parts=parts, in_place=True))


def _regions(step: Step, parts: int) -> Regions | None:
    part = split_step(step.operand, step.result, parts, in_place=True)
    if part is None:
        return None
    return regions_on_tpu(part.take, step.operand.tile_shape, part.put, step.result.tile_shape)


def _has_parts(step: Step, least: int) -> bool:
    """Whether a step is large enough for parts, and can be cut into them."""
    if step.kind in VIEW_RULES or not one_set(step.operand.mesh, step.result.mesh):
        return False  # Messages to other devices are cut where they are carried.
    return step.mode == PLAIN and step.operand.tile_bytes + step.result.tile_bytes >= least


def _parted(step: Step, least: int, count: int, overlap: bool, lanes: bool) -> StepSpec:
    """The step in parts; as an exchange where it has too few parts and the exchange's messages are smaller."""
    as_it_is = StepSpec(step.kind, step.result, step.mode)
    if not _has_parts(step, least):
        return as_it_is
    if step.kind == "slice" and _read_alone(step):
        return as_it_is  # TPU copies the whole operand only for every n-th element, or for another minor dim.
    if step.kind == "exchange" and step.launches >= count:
        return as_it_is  # Its rounds are parts already.
    possible = counts(step.operand, step.result)
    double = _overlapping(step, 2 * count) if overlap else None
    if double is not None:
        return as_it_is._replace(mode=StepMode(parts=double, overlap=True))
    parts = _in_parts(step, possible, count, lanes)
    if 2 * parts < count and step.kind in ("all_gather", "all_to_all"):
        rounds = exchange_size(step.operand, step.result).rounds
        if parts < rounds <= 4 * count:
            return StepSpec("exchange", step.result)
    return as_it_is._replace(mode=StepMode(parts=parts))


def _finer(step: Step, following: Step, move: StepSpec, most: int) -> StepSpec:
    """The step after a slice, in at most `most` parts if the slice reads whole parts of a far larger tile."""
    if step.kind != "slice" or move.mode.parts == 1 or move.mode.overlap:
        return move
    if 4 * step.result.tile_bytes > step.operand.tile_bytes or tpu_memory.one_range(step.operand, step.result):
        return move
    able = [number for number in counts(following.operand, following.result) if move.mode.parts < number <= most]
    parts = next((number for number in reversed(able) if can_share_loop(step, following, number)), move.mode.parts)
    return move._replace(mode=StepMode(parts=parts))


def _joining(step: Step, move: StepSpec, following: Step, parts: int) -> StepSpec:
    """A slice in the parts of the step that follows, if these are its own."""
    if step.kind != "slice" or parts == 1:
        return move
    return move._replace(mode=StepMode(parts=parts)) if can_share_loop(step, following, parts) else move


def can_share_loop(step: Step, following: Step, parts: int) -> bool:
    """Whether two steps in so many parts would share a loop."""
    splits = [split_step(each.operand, each.result, parts) for each in (step, following)]
    return share_loop(*splits)


def _read_alone(step: Step) -> bool:
    """Whether a TPU reads little more than a slice: it is one range of indices of the minor dim, which stays minor or
    is not much wider than the slice in memory."""
    return (
        tpu_memory.one_range(step.operand, step.result) and 4 * tpu_memory.relaid_bytes(step) <= step.operand.tile_bytes
    )


def _in_parts(step: Step, possible: Sequence[int], count: int, lanes: bool) -> int:
    """The number of parts, one of `possible`: between `count` and four times that, with aligned parts where possible.

    An all-to-all whose blocks would then no longer have full lanes is cut into fewer parts, at least half of `count`.
    With `lanes`, blocks that a TPU pads to twice their bytes travel in twice as many parts.
    """
    enough = [number for number in possible if count <= number <= 4 * count]
    preferred = [*enough, *reversed([number for number in possible if number < count])]
    suited = _aligned(step, preferred, count)
    padded = _unpadded(suited, count) if lanes else None
    return padded or next(iter(suited), next(iter(preferred), 1))


def _aligned(step: Step, preferred: Sequence[int], count: int) -> dict[int, Part]:
    """The parts by the preferred numbers of them that are aligned; of an all-to-all, those with full lanes if any."""
    parts = {number: split_step(step.operand, step.result, number) for number in preferred}
    suited = {number: part for number, part in parts.items() if part is not None and part.aligned}
    if step.kind != "all_to_all":
        return suited
    return {number: part for number, part in suited.items() if 2 * number >= count and _fills_lanes(part)} or suited


def _unpadded(parts: Mapping[int, Part], count: int) -> int | None:
    """The first number of parts from `count` up that is twice as large where a TPU pads blocks to twice their bytes."""
    able = (number for number, part in parts.items() if math.prod(part.block) >= SUBLANES * LANES)
    return next((n for n in able if n >= count * (1 + (tpu_memory.padding_of_block(parts[n]) >= 2))), None)


def _overlapping(step: Step, count: int) -> int | None:
    if step.kind not in OVERLAPPING or step.operand.tile_bytes + step.result.tile_bytes < OVERLAPPED:
        return None
    return overlapping_parts(step, count)


def overlapping_parts(step: Step, count: int) -> int | None:
    """The number of parts that overlap, from `count` to twice that, aligned ones if there are such; None if a step has
    no such number."""
    enough = [number for number in counts(step.operand, step.result) if count <= number <= 2 * count]
    parts = {number: split_step(step.operand, step.result, number) for number in enough}
    aligned = [number for number, part in parts.items() if part is not None and part.aligned]
    return next(iter((*aligned, *enough)), None)


def _fills_lanes(part: Part) -> bool:
    """Whether the blocks of a part have full lanes in some dim."""
    return any(extent % LANES == 0 for extent in part.block)


def peak_bytes(plan: Plan, padded: bool = False) -> int:
    """The plan's peak bytes on XLA, which allocates the result, the target's tile, before it runs anything.

    Between steps that share a loop there are parts only. On a TPU tiles are `padded`, see `tpu_memory`.
    """
    live = max((_live(plan, loop) for loop in loops(plan.steps)), default=plan.peak_bytes)
    return live + tpu_memory.padding_bytes(plan) if padded else live


def _live(plan: Plan, loop: Sequence[Step]) -> int:
    first, last = loop[0], loop[-1]
    overwritten = all(step.mode.in_place for step in plan.steps[plan.steps.index(last) + 1 :])
    target = 0 if overwritten else plan.target.tile_bytes
    if len(loop) == 1:
        return first.live_bytes + target + _scratch(first) - first.cost.scratch
    ends = first.retained_bytes + first.operand.tile_bytes + last.result.tile_bytes
    before = max(map(_scratch, loop[:-1])) if last.mode.overlap else 0
    return ends + target + (_scratch(last) + before if before else max(map(_scratch, loop)))


def _scratch(step: Step) -> int:
    """Buffers; XLA packs the messages of a part's next round while those of one are on their way."""
    return step.cost.scratch + (tpu_memory.message_bytes(step) if step.kind == "exchange" else 0)


# The forms of a plan's steps that a TPU runs fastest, where XLA's modelled time is that of bytes received and copied.
#
# bf16[512, {x}64, 512] -> bf16[{x}64, 512, 512]     an all-to-all, sent as it lies: a part would be cut out first
#
# A part of a tile is read and cut out before it is sent, and what a collective receives is read and written once more:
# local bytes of 1.5 times source and target. A whole operand is sent from where it is, which leaves 1.0, for a buffer
# as large as the result. Two devices keep half of what they have, which an exchange copies straight into the result:
# 1.25.
#
# Permutes are the only collectives beside which libtpu runs copies.


AT_ONCE = 256 << 20
"""The most bytes of a result that is received at once: its buffer is as large."""
TPU_OVERLAPPED = 32 << 20
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
    small = last.operand.tile_bytes + last.result.tile_bytes < TPU_OVERLAPPED
    if small or last.kind != "permute" or last.mode.parts == 1 or any(step.kind != "slice" for step in slices):
        return as_they_are
    parts = overlapping_parts(last, 2 * PARTS)
    if parts is None or not all(can_share_loop(*two, parts) for two in pairwise(loop)):
        return as_they_are
    in_turn = [move._replace(mode=StepMode(parts=parts)) for move in as_they_are[:-1]]
    return [*in_turn, as_they_are[-1]._replace(mode=StepMode(parts=parts, overlap=True))]


# Plans for XLA:CPU, where large all-to-alls are faster as rounds of permutes.
#
# XLA:CPU packs, sends and joins all blocks of an all-to-all, also the one that stays on its device: three copies of the
# tile. In rounds, that block is copied twice and needs no buffers, but each round is a launch.


LEAST_MESSAGE = 1 << 20
"""From this many bytes of a message, a round saves more than its launch costs. In more rounds than `FEW_ROUNDS` it is
twice as many bytes: they save a smaller share."""
FEW_ROUNDS = 3
MOST_ROUNDS = 15
"""The most rounds of an exchange that takes the place of an all-to-all."""


def in_rounds(plan: Plan, least: int = LEAST_MESSAGE) -> Plan:
    """The plan with its all-to-alls as exchanges where messages have `least` bytes or more, twice that in many rounds.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> rows, columns = (Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}2, 4]", "f32[4, {x}2]"))
    >>> [step.kind for step in in_rounds(plan(rows, columns), least=16).steps]
    ['exchange']
    """
    specs = [
        StepSpec("exchange", step.result) if _faster(step, least) else StepSpec(step.kind, step.result, step.mode)
        for step in plan.steps
    ]
    if all(spec.kind == step.kind for spec, step in zip(specs, plan.steps, strict=True)):
        return plan
    return chain(plan.source, plan.target, specs, plan.donate, [step.seconds for step in plan.steps], plan.view)


def _faster(step: Step, least: int) -> bool:
    """Whether a step is an all-to-all that takes less time in rounds."""
    if step.kind != "all_to_all" or step.mode != PLAIN:
        return False
    size = exchange_size(step.operand, step.result)
    enough = least if size.rounds <= FEW_ROUNDS else 2 * least
    if step.operand.nbytes(size.message) < enough or size.rounds > MOST_ROUNDS:
        return False
    (exchange,) = lower_steps(step.operand, [Step("exchange", step.operand, step.result)]).instructions
    return isinstance(exchange, Exchange) and joins_in_one_copy(exchange)
