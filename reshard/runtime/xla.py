"""Plans as XLA runs them: large steps in parts, what these need of memory, and the forms of steps that run fastest.

    in_parts            large collectives in parts, since XLA stages whole tiles of them
    list_forms          the forms in which a TPU may run a plan
    choose_form         the one of least memory among those that are about as fast as any, by `form_costs`
    in_parts_on_tpu     the form that a TPU is given
    in_parts_on_gpu     parts, but for steps that a GPU copies less for at once
    slice_exchanges     exchanges of rows as one ragged all-to-all, where it takes less time than rounds of permutes
    in_rounds           large all-to-alls as exchanges, and gathers dim by dim, for XLA:CPU
    peak_bytes          what a plan needs of memory, on a TPU with the padding of its tiles

bf16[512, {x}64, 512] -> bf16[{x}64, 512, 512]     at once: twice source and target; in 8 parts: 1.06 times
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from reshard.geometry.figures import exchange_figures
from reshard.geometry.refine import refine
from reshard.geometry.remesh import one_set
from reshard.lower import lower_plan
from reshard.lower.program import (
    KERNEL,
    AllGather,
    AllToAll,
    Exchange,
    InParts,
    Program,
    ReduceScatter,
    count_transposing_cycles,
    lower_steps,
    part_of,
    transposing_passes,
)
from reshard.lower.to_shard_map import (
    LANES,
    SUBLANES,
    choose_memory_order,
    choose_part_form,
    count_padded_bytes,
    find_regions_on_tpu,
    is_cut_in_place,
    lie_in_turn,
    measure_padding,
    sent_as_it_lies,
    writes_parts_over,
)
from reshard.lower.to_shard_map.part_loops import group_steps, share_loop
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.run_rows import MOST_SLICES, choose_row, find_group_axes, find_rows
from reshard.plans.plan import Plan, Step, StepSpec, chain
from reshard.plans.rules.collectives import OVERLAPPING, VIEW_RULES
from reshard.plans.rules.split_steps import Part, possible_counts, split_step
from reshard.plans.rules.step_mode import PLAIN, StepMode, wire_layout
from reshard.runtime.form_costs import TPU_COSTS, estimate_form_seconds, find_minor_dim, sum_wire_seconds
from reshard.synth.network import Network
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.mesh import SubAxis

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

    >>> from reshard.synth import plan
    >>> from reshard.types import Mesh
    >>> ends = (Layout.parse(text, Mesh(x=8)) for text in ("bf16[512, {x}64, 512]", "bf16[{x}64, 512, 512]"))
    >>> [(step.kind, step.mode.parts) for step in in_parts(plan(*ends)).steps]
    [('all_to_all', 8)]
    """
    if plan.donate:
        overwriting = [_overwrite_in_parts(step, least, 2 * count) for step in plan.steps]
        if all(overwriting):
            return _replace_steps(plan, [move for move in overwriting if move is not None])
        if not overlap and not any(map(count_tile_padding, (plan.source, plan.target))):
            count *= 2  # Narrower parts of padded tiles would be padded more.
    moves = [_put_in_parts(step, least, count, overlap, lanes) for step in plan.steps]
    if len(moves) > 1:
        moves[-1] = _cut_finer_after_slice(plan.steps[-2], plan.steps[-1], moves[-1], 2 * count)
    for at in reversed(range(len(moves) - 1)):
        step, parts = plan.steps[at], moves[at + 1].mode.parts
        if step.kind == "slice" and parts > 1 and can_share_loop(step, plan.steps[at + 1], parts):
            moves[at] = moves[at]._replace(mode=StepMode(parts=parts))
    return _replace_steps(plan, moves)


def _replace_steps(plan: Plan, moves: Sequence[StepSpec]) -> Plan:
    return chain(plan.source, plan.target, moves, plan.donate, [step.seconds for step in plan.steps], plan.view)


def _overwrite_in_parts(step: Step, least: int, count: int) -> StepSpec | None:
    """The step in parts that take each other's place, in the tiles' own memory; None if that cannot be.

    Among the numbers of parts from half of `count` up, one for which no slots are rearranged is preferred.
    """
    if not _is_large_collective(step, least) or step.operand.tile_bytes != step.result.tile_bytes:
        return None
    possible = possible_counts(step.operand, step.result)
    enough = [number for number in possible if count <= number <= 4 * count]
    suited: dict[int, int] = {}
    for number in (*enough, *reversed([number for number in possible if count // 4 <= number < count])):
        part = split_step(step.operand, step.result, number, in_place=True)
        tiles = step.operand.tile_shape, step.result.tile_shape
        where = None if part is None else find_regions_on_tpu(part.take, tiles[0], part.put, tiles[1])
        if where is not None:
            suited[number] = where.transpositions
    # Rearranging slots reads and writes the tile once more, so fewer parts that need none of it are better.
    at_once = (number for number, transpositions in suited.items() if not transpositions and 2 * number >= count)
    parts = next(at_once, next(iter(suited), None))
    return None if parts is None else StepSpec(step.kind, step.result, StepMode(parts=parts, in_place=True))


def _is_large_collective(step: Step, least: int) -> bool:
    """Whether a step is large enough for parts, and can be cut into them."""
    casts = step.operand.dtype != step.result.dtype
    if step.kind in VIEW_RULES or casts or not one_set(step.operand.mesh, step.result.mesh):
        return False  # The transport cuts messages to other devices, and a step that casts cannot run in parts.
    return step.mode == PLAIN and step.operand.tile_bytes + step.result.tile_bytes >= least


def _put_in_parts(step: Step, least: int, count: int, overlap: bool, lanes: bool) -> StepSpec:
    """The step in parts; as an exchange where it has too few parts and the exchange's messages are smaller."""
    as_it_is = step.spec
    if not _is_large_collective(step, least):
        return as_it_is
    # A TPU copies the whole operand of a slice only for every n-th element of the minor dim, or where another dim
    # becomes minor that is much wider in memory.
    ends = step.operand, step.result
    if step.kind == "slice" and keeps_one_range(*ends) and 4 * count_relaid_bytes(*ends) <= ends[0].tile_bytes:
        return as_it_is
    if step.kind == "exchange" and step.launches >= count:
        return as_it_is  # Its rounds are parts already.
    large = step.operand.tile_bytes + step.result.tile_bytes >= OVERLAPPED
    if overlap and large and step.kind in OVERLAPPING:
        # From twice as many parts on, aligned ones if there are such.
        enough = [n for n in possible_counts(step.operand, step.result) if 2 * count <= n <= 4 * count]
        splits = {number: split_step(step.operand, step.result, number) for number in enough}
        aligned = [number for number, part in splits.items() if part is not None and part.aligned]
        if enough:
            return as_it_is._replace(mode=StepMode(parts=[*aligned, *enough][0], overlap=True))
    parts = _count_parts(step, count, lanes)
    if 2 * parts < count and step.kind in ("all_gather", "all_to_all"):
        rounds = exchange_figures(step.operand, step.result).rounds
        if parts < rounds <= 4 * count:
            return StepSpec("exchange", step.result)
    return as_it_is._replace(mode=StepMode(parts=parts))


def _cut_finer_after_slice(step: Step, following: Step, move: StepSpec, most: int) -> StepSpec:
    """The step after a slice, in at most `most` parts if the slice reads whole parts of a far larger tile."""
    if step.kind != "slice" or move.mode.parts == 1 or move.mode.overlap:
        return move
    if 4 * step.result.tile_bytes > step.operand.tile_bytes or keeps_one_range(step.operand, step.result):
        return move
    able = [
        number for number in possible_counts(following.operand, following.result) if move.mode.parts < number <= most
    ]
    parts = next((number for number in reversed(able) if can_share_loop(step, following, number)), move.mode.parts)
    return move._replace(mode=StepMode(parts=parts))


def can_share_loop(step: Step, following: Step, parts: int) -> bool:
    """Whether two steps in so many parts would share a loop."""
    splits = [split_step(each.operand, each.result, parts) for each in (step, following)]
    return share_loop(*splits)


def _count_parts(step: Step, count: int, lanes: bool) -> int:
    """The number of parts: between `count` and four times that, with aligned parts where possible.

    An all-to-all whose blocks would then no longer have full lanes is cut into fewer parts, at least half of `count`.
    With `lanes`, blocks that a TPU pads to twice their bytes travel in twice as many parts.
    """
    possible = possible_counts(step.operand, step.result)
    enough = [number for number in possible if count <= number <= 4 * count]
    preferred = [*enough, *reversed([number for number in possible if number < count])]
    splits = {number: split_step(step.operand, step.result, number) for number in preferred}
    suited = {number: part for number, part in splits.items() if part is not None and part.aligned}
    if step.kind == "all_to_all":
        full = {number: part for number, part in suited.items() if any(n % LANES == 0 for n in part.block)}
        suited = {number: part for number, part in full.items() if 2 * number >= count} or suited
    for number, part in suited.items() if lanes else ():
        # A block of less than one tile is padded to it, whatever the number of parts.
        whole = math.prod(part.block) >= SUBLANES * LANES
        if whole and number >= count * (1 + (count_block_padding(part) >= 2)):
            return number
    return next(iter(suited), next(iter(preferred), 1))


# The forms of a plan on a TPU: at once, in parts, or with messages in pieces. `form_costs` says what each takes.
#
# bf16[{y}{x}64, 768, 384] -> bf16[{x}128, {y}384, 384]     an exchange, with its messages in 4 pieces
#
# A piece is cut out of the tile and written where it belongs, so pieces cost kernels and no passes over memory. A part
# of a step costs a pass, to cut it out. What is faster by a few percent may need twice the memory, so that of all forms
# that are about as fast as any the one of the lowest peak is taken.


COUNTS = 4, 8
"""Into how many parts a step is cut, and messages into pieces: of fewer XLA keeps more than one in memory."""
LEAST_ON_TPU = 4 << 20
"""Forms differ from this many bytes of operand and result on a device; of smaller ones kernels take most of the time.
"""
ABOUT = 0.03
"""Forms that take up to so much more than the fastest one are about as fast."""
XLA_TAKES = 0.1
"""The same for a move for which XLA needs two collectives: these take it 1.3 times as long or more."""
TRANSPOSED_AT_ONCE = 1 << 30
"""The most bytes of a result that is received at once and then transposed: of parts, libtpu writes each to memory after
it is transposed and reads it again to write it where it belongs, which takes 1.3 times as long in all."""
SMALL_GATHER = 64 << 20
"""Up to this many bytes of its result a gather is in half as many parts: a kernel takes at least 1 us."""


def list_forms(plan: Plan, least: int = LEAST_ON_TPU) -> list[Plan]:
    """The plan as it is, and the other forms in which a TPU may run it, for steps of at least `least` bytes.

    >>> from reshard.synth import plan
    >>> from reshard.types import Mesh
    >>> ends = (Layout.parse(text, Mesh(x=8)) for text in ("bf16[512, {x}64, 512]", "bf16[{x}64, 512, 512]"))
    >>> [step.mode.parts for form in list_forms(plan(*ends)) for step in form.steps]
    [1, 4, 8]
    """
    kinds, forms = {step.kind for step in plan.steps}, [plan]
    # A part whose minor dim changes is rearranged in more passes than a whole tile.
    ends = [(step.operand, step.result) for step in plan.steps if step.kind == "all_to_all"]
    turns = any(len({find_minor_dim(end) for end in two}) > 1 for two in ends)
    if kinds & {"all_to_all", "all_gather"} and "exchange" not in kinds and not turns:
        forms += [shape_gathers(in_parts(plan, least, count)) for count in COUNTS]
    one = plan.source.partial_as(plan.target) and one_set(plan.source.mesh, plan.target.mesh)
    r = refine(plan.source, plan.target) if one and not plan.donate and plan.view is None else None
    if r is None or plan.source.tile_bytes + plan.target.tile_bytes < least:
        return list(dict.fromkeys(forms))
    # An exchange from end to end, with its messages whole, or in pieces if these keep full lanes. In place of one
    # all-to-all its rounds, one after another, would leave wires idle that this uses.
    figures = exchange_figures(plan.source, plan.target)
    received = plan.source.nbytes(figures.rounds * figures.message)
    swaps = sum(step.kind == "all_to_all" for step in plan.steps)
    # A gather after one other step uses more wires than the rounds of an exchange do.
    several = len(plan.steps) > 1 and ("all_gather" not in kinds or swaps > 1)
    apt = "exchange" in kinds or (swaps and figures.rounds == 1) or several
    if not apt or figures.rounds > 2 * PARTS or received > plan.received_bytes:
        return list(dict.fromkeys(forms))
    known = [step.seconds for step in plan.steps if step.seconds is not None]
    wires = [sum(known) if len(known) == len(plan.steps) else None]
    minor = find_minor_dim(plan.source)
    # They are ranges of the first dim.
    first = next((dim for dim, extent in enumerate(r.box) if extent > 1), minor)
    pieces = COUNTS if r.exact and r.box[minor] % LANES == 0 and minor != first else ()
    for chunk in (None, *(-(-figures.message // count) for count in pieces)):
        move = StepSpec("exchange", plan.target, StepMode(chunk=chunk))
        forms.append(chain(plan.source, plan.target, [move], seconds=wires))
    return list(dict.fromkeys(forms))


def choose_form(forms: Sequence[Plan], network: Network | None = None, slack: float = ABOUT) -> Plan:
    """Of the forms that take a TPU at most `slack` more than the fastest, that of the lowest peak."""
    if len(forms) == 1:
        return forms[0]  # An estimate lowers the form: of 256 rounds on 4,096 devices that takes 7 s.
    seconds = {form: estimate_form_seconds(form, network) for form in forms}
    limit = (1 + slack) * min(seconds.values())
    # What is little beside the two ends counts as nothing.
    low = 1.1 * (forms[0].source.tile_bytes + forms[0].target.tile_bytes)
    fast = [form for form in forms if seconds[form] <= limit]
    return min(fast, key=lambda form: (max(low, peak_bytes(form, padded=True)), seconds[form]))


def in_parts_on_tpu(
    plan: Plan, least: int = LEAST_ON_TPU, others: Sequence[Plan] = (), network: Network | None = None
) -> Plan:
    """The plan in the form of least memory among those that a TPU runs about as fast as any; it receives no more bytes.

    Gathers are in parts, as `in_parts` says. Of `others`, plans of the same move by other steps, the forms compete too;
    a network says what the wires of each take.
    """
    if plan.donate:
        # XLA has the result in a donated source's memory: what is not worth doing in parts there needs two tiles.
        kept = [step.spec for step in plan.steps]
        seconds = [step.seconds for step in plan.steps]
        undonated = chain(plan.source, plan.target, kept, seconds=seconds, view=plan.view)
        kept = in_parts_on_tpu(undonated, least)
        return overwrite_plan(plan, max(least, LEAST), estimate_form_seconds(kept)) or kept
    kinds = {step.kind for step in plan.steps}
    if plan.view is not None or kinds == {"all_gather"} or kinds & {"reduce_scatter", "all_reduce", "split_sum"}:
        return shape_gathers(in_parts(plan, max(least, LEAST)))
    gathers = plan.target.tile_bytes > plan.source.tile_bytes
    forms = list(dict.fromkeys(form for each in (plan, *others) for form in list_forms(each, least)))
    if not gathers and "all_gather" not in kinds and not _is_one_of_xla(plan):
        return choose_form(forms, network, XLA_TAKES)
    # As fast as XLA's own are only parts that are cut out and packed, and put together and written, in one pass each.
    fused = [form for form in forms if len(form.steps) > 1 or _is_fused(form)]
    return choose_form(fused, network)


def _is_fused(form: Plan) -> bool:
    """Whether a part of each all-to-all in parts is cut out and packed in one pass over memory, and written in one."""
    program = lower_plan(form)
    for instruction, shape in zip(program.instructions, program.tile_shapes, strict=True):
        if isinstance(instruction, InParts) and isinstance(instruction.each, AllToAll):
            part = choose_part_form(instruction, shape, program.dtype)
            if part.packed or part.joined or part.turns:
                return False
    return True


def shape_gathers(parted: Plan) -> Plan:
    """A plan in parts, with steps at once where a TPU gains nothing by parts of them, as XLA has them.

    All collectives of a plan with a gather, where a loop makes another dim the minor one in memory, for tiles of up to
    `TRANSPOSED_AT_ONCE` bytes; and those before another loop, which reads what they receive where it lies. Small
    gathers are in fewer parts.
    """
    loops = group_steps(parted.steps)
    minors = [
        {choose_memory_order(end.tile_shape, end.dtype)[-1:] for step in loop for end in (step.operand, step.result)}
        for loop in loops
    ]
    gathers = any(step.kind == "all_gather" for step in parted.steps)
    large = max((step.result.tile_bytes for step in parted.steps), default=0) > TRANSPOSED_AT_ONCE
    turned = gathers and not large and any(len(each) > 1 for each in minors)
    moves: list[StepSpec] = []
    for at, loop in enumerate(loops):
        last, count = loop[-1], loop[-1].mode.parts // 2
        ahead = gathers and len(loop) == 1 and at + 1 < len(loops) and last.kind in ("permute", "all_to_all")
        whole = ahead or (turned and all(step.kind != "exchange" for step in loop))
        small = last.kind == "all_gather" and last.result.tile_bytes <= SMALL_GATHER and count >= COUNTS[0]
        able = small and count in possible_counts(last.operand, last.result)
        fewer = able and all(can_share_loop(*two, count) for two in itertools.pairwise(loop))
        modes = (PLAIN if whole else StepMode(parts=count) if fewer else step.mode for step in loop)
        moves += [StepSpec(step.kind, step.result, mode) for step, mode in zip(loop, modes, strict=True)]
    return _replace_steps(parted, moves)


def _is_one_of_xla(plan: Plan) -> bool:
    """Whether XLA spells a move as an all-to-all, permutes and slices: the axes that come last in one dim come last in
    another, dim by dim."""
    if any(step.kind == "exchange" for step in plan.steps):
        return False
    # What only one end has is sliced, or gathered.
    both = {*plan.source.held} & {*plan.target.held}
    before, after = (
        [[d.axis for d in dim.digits if d.axis and d.axis in both] for dim in end.dims]
        for end in (plan.source, plan.target)
    )
    left: list[list[SubAxis]] = []
    come: list[list[SubAxis]] = []
    for one, two in zip(before, after, strict=True):
        same = len(list(itertools.takewhile(lambda each: each[0] == each[1], zip(one, two, strict=False))))
        if one[same:] and two[same:]:
            return False
        left += [one[same:]] if one[same:] else []
        come += [two[same:]] if two[same:] else []
    return all(axes in left for axes in come)


# The forms of a plan's steps on a GPU, by what each copies in memory.
#
#                              at once                                    in parts
# all_gather along dim 0       nothing: the tiles arrive where they go    a part is cut out, and written
# all_gather along another     the result, to put it together             the same
# all_to_all, reduce_scatter   what does not lie block after block        a part is packed, and written
# permute                      nothing                                    a part is cut out, and written
# exchange                     messages, cut out and written              the same, and the parts
#
# Copies of parts that overlap run beside the next part's collective. Then a form may copy more and take less time.


GPU_WIRE, GPU_MEMORY = 450e9, 3.35e12
"""Bytes a second of an H100: NVLink, each way, and memory (its data sheet)."""
GPU_HIDES = 2 << 30
"""From this many copied bytes, 1 GiB of source and target, the wires hide more than the loop over the parts costs."""


def in_parts_on_gpu(plan: Plan, least: int = LEAST) -> Plan:
    """`in_parts`, but for steps that copy less at once: these stay whole, unless what overlaps takes less time.

    >>> from reshard.synth import plan
    >>> from reshard.types import Mesh
    >>> texts = ("f32[{x}8, 64, 64]", "f32[64, 64, 64]", "f32[64, {x}8, 64]"), ("f32[8, {x}8, 64]", "f32[8, 64, {x}8]")
    >>> for source, *targets in ([Layout.parse(text, Mesh(x=8)) for text in move] for move in texts):
    ...     print([in_parts_on_gpu(plan(source, target), least=0).steps[0].mode.parts for target in targets])
    [1, 1]
    [8]
    """
    parted = in_parts(plan, least, overlap=True, lanes=False)
    moves = [step.spec for step in parted.steps]
    for at in reversed(range(len(moves))):
        step, mode = plan.steps[at], parted.steps[at].mode
        if mode.in_place or (mode.parts == 1 and parted.steps[at].kind == step.kind):
            continue
        at_once, copied = count_copied_bytes(step), 2 * (step.operand.tile_bytes + step.result.tile_bytes)
        wires = step.seconds or step.received_bytes / GPU_WIRE
        beside = max(wires, copied / GPU_MEMORY)
        pays = mode.overlap and copied >= GPU_HIDES and beside < 0.95 * (wires + at_once / GPU_MEMORY)
        part = part_of(parted.steps[at])
        if part is not None and part.put.outer > 1:
            pays, at_once = False, 0  # XLA copies the whole result for each part that is several pieces of it.
        shares = at + 1 < len(moves) and moves[at + 1].mode.parts == mode.parts
        if not (shares if step.kind == "slice" else pays or copied <= at_once):
            moves[at] = step.spec
    return _replace_steps(plan, moves)


def count_copied_bytes(step: Step) -> int:
    """The bytes that a GPU reads and writes in its memory beside the collective of a step at once."""
    operand, result = step.operand.tile_bytes, step.result.tile_bytes
    (each,) = lower_steps(step.operand, [step]).instructions
    match each:
        case AllGather(receive=view):
            return 0 if lie_in_turn(view, range(len(view.tile))) else 2 * result
        case AllToAll(send=send, receive=receive) | ReduceScatter(send=send, receive=receive):
            turns = [lie_in_turn(view, range(len(view.tile))) for view in (send, receive)]
            return 2 * ((not turns[0]) * operand + (not turns[1]) * result)
        case Exchange():
            return operand + result
        case _:
            return 0


# Exchanges of rows, such as those between pieces of any size, in one ragged all-to-all.
#
#                  rounds of permutes                              one ragged all-to-all
#
#     in memory    each form of message is cut out and written     on a TPU the result is put in order, and in a pass
#                  by code of its own, as long as the longest      more its padding is zeros; on a GPU only the latter
#     on wires     in each round as long as the longest            what the busiest device sends or receives
#     starts       one a round                                     one; on a GPU one more for each empty peer, where
#                                                                  there are more than XLA's own kernel writes to


START = 12e-6
"""Seconds that a collective takes at least among GPUs, and NCCL for a peer that is sent nothing."""
KERNEL_PEERS = 8
"""The most peers that XLA's kernel for a ragged all-to-all among GPUs of one host has; NCCL sends to more."""


def slice_exchanges(plan: Plan, program: Program) -> Program:
    """The program of a plan, with its exchanges as one ragged all-to-all on the platforms where that is faster.

    >>> from reshard.synth import plan
    >>> from reshard.types import Mesh
    >>> sizes = "(900,100,1400,200,1300,4000,96,196)"
    >>> ends = [Layout.parse(f"f32[{{x}}{piece}, 1024]", Mesh(x=8)) for piece in ("1024", sizes)]
    >>> move = plan(*ends)
    >>> [step.sliced_on for step in slice_exchanges(move, lower_plan(move)).instructions]
    [('tpu', 'cuda')]
    """
    made = list(program.instructions)
    for at, step in enumerate(plan.steps):
        exchange, dtype = made[at], wire_layout(step.operand, step.result).dtype
        if not isinstance(exchange, Exchange) or step.mode != PLAIN or not (step.operand.ragged or step.result.ragged):
            continue
        moves = find_rows(exchange)
        if moves is not None and moves.slices <= MOST_SLICES:
            axes = step.operand.mesh.axes
            group = math.prod(axes[name] for name in find_group_axes(moves, MeshPlace(program.devices, axes)))
            each = {name: _estimate_exchange(exchange, dtype, group, name) for name in ("tpu", "cuda")}
            if choose_row(moves.width, dtype) is None:
                del each["tpu"]
            faster = [name for name, (rounds, one) in each.items() if one < rounds]
            made[at] = replace(exchange, sliced_on=tuple(faster))
    return replace(program, instructions=tuple(made))


def _estimate_exchange(step: Exchange, dtype: str, group: int, platform: str) -> tuple[float, float]:
    """The seconds of an exchange in rounds of permutes, and as one ragged all-to-all in groups of so many devices."""
    if platform == "tpu":
        costs = TPU_COSTS
        wire, memory, start = costs.wire, costs.copy * costs.hertz, costs.kernel / costs.hertz
    else:
        wire, memory, start = GPU_WIRE, GPU_MEMORY, START
    each = dtypes.bits(dtype) / 8
    rounds, sent, received = 0.0, Counter[int](), Counter[int]()
    peers: dict[int, set[int]] = {}
    for one in (step.local, *step.rounds):
        forms, longest = {t.form: t.elements for t in one}, max((t.elements for t in one), default=0)
        # Every device packs each form as long as the longest, and takes its own; then it reads, chooses and writes.
        rounds += sum((2 * longest + 3 * size) * each / memory + 2 * start * len(form) for form, size in forms.items())
        remote = [t for t in one if t.sender != t.receiver]
        rounds += start + longest * each / wire if remote else 0.0
        for t in remote:
            sent[t.sender] += t.elements
            received[t.receiver] += t.elements
            peers.setdefault(t.sender, set()).add(t.receiver)
    busiest = max([*sent.values(), *received.values()], default=0)
    fewest = min((len(peers.get(device, ())) for device in step.receivers), default=0)
    empty = group - 1 - fewest if platform == "cuda" and group > KERNEL_PEERS else 0
    ends = [math.prod(view.tile) for view in (step.send, step.receive)]
    passes = (ends[0] * 2 + ends[1] * 4) if platform == "tpu" else ends[1] * 2
    return rounds, start * (1 + empty) + busiest * each / wire + passes * each / memory


# Plans for XLA:CPU, where what counts is how often a device copies its bytes, and how many launches there are.
#
#     an all-to-all                   packs, sends and joins all blocks, the one that stays too: three copies of a tile
#     rounds of permutes              the block that stays is copied twice, and needs no buffers; a launch for each
#     a gather along dim 0            one copy, into the result
#     one along other dims            a copy into a buffer, and one that joins the tiles: three times the result's bytes
#     one of several dims             the others first, and dim 0 last: only what the former gather is joined
#
# `python benchmarks/xla.py` measures what the constants say: the bytes that a device copies in the time of a launch.


LEAST_JOINED = 64 << 10
"""From this many bytes that need not be joined, a gather in two launches takes less time than one in one."""
LEAST_MESSAGE = 1 << 20
"""From this many bytes of a message, a round saves more than its launch costs. In more rounds than `FEW_ROUNDS` it is
twice as many bytes: they save a smaller share."""
FEW_ROUNDS = 3
MOST_ROUNDS = 15
"""The most rounds of an exchange that takes the place of an all-to-all."""


def in_rounds(plan: Plan, least: int = LEAST_MESSAGE, least_joined: int = LEAST_JOINED) -> Plan:
    """The plan with its all-to-alls as exchanges where messages have `least` bytes or more, twice that in many rounds;
    and with its gathers of several dims in two steps.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> rows, columns = (Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}2, 4]", "f32[4, {x}2]"))
    >>> [step.kind for step in in_rounds(plan(rows, columns), least=16).steps]
    ['exchange']
    >>> tiles, whole = (Layout.parse(text, Mesh(x=2, y=2)) for text in ("f32[{x}2, {y}2]", "f32[4, 4]"))
    >>> [str(step.result) for step in in_rounds(plan(tiles, whole), least_joined=32).steps]
    ['f32[{x}2, 4]', 'f32[4, 4]']
    """
    moves: list[StepSpec] = []
    for step in plan.steps:
        move = step.spec
        if step.kind == "all_to_all" and step.mode == PLAIN:
            size = exchange_figures(step.operand, step.result)
            enough = least if size.rounds <= FEW_ROUNDS else 2 * least
            if step.operand.nbytes(size.message) >= enough and size.rounds <= MOST_ROUNDS:
                move = StepSpec("exchange", step.result)
        elif step.kind == "all_gather" and step.mode == PLAIN:
            moves += _gather_inner_dims(step, least_joined)
        moves.append(move)
    same = moves == [step.spec for step in plan.steps]
    return plan if same else chain(plan.source, plan.target, moves, plan.donate, view=plan.view)


def _gather_inner_dims(step: Step, least: int) -> list[StepSpec]:
    """The gather of all dims but the first before that of the first, which then joins nothing; none where it would, or
    where fewer bytes than `least` need not be joined."""
    ends = zip(step.operand.dims, step.result.dims, strict=True)
    first, *others = [at for at, dims in enumerate(ends) if dims[0] != dims[1]]
    dims = (*step.result.dims[:first], step.operand.dims[first], *step.result.dims[first + 1 :])
    joined = replace(step.result, dims=dims)
    if not others or step.result.tile_bytes - joined.tile_bytes < least:
        return []
    return [] if Step("all_gather", joined, step.result).cost.scratch else [StepSpec("all_gather", joined)]


# What plans need of memory. Of a loop, its ends and the buffers of one part live at once.


def peak_bytes(plan: Plan, padded: bool = False) -> int:
    """The plan's peak bytes on XLA, which allocates the result, the target's tile, before it runs anything.

    Between steps that share a loop there are parts only. On a TPU tiles are `padded`: the two minor dims of an array
    to 8 x 128 elements.

        bf16[64, 64, 32, 64]     64 lanes of 128: twice its bytes, whichever dim is minor
        bf16[16, 128, 128, 64]   its bytes: XLA makes a dim of 128 the minor one
    """
    every = group_steps(plan.steps)
    live = max((_count_live_bytes(plan, loop) for loop in every), default=plan.peak_bytes)
    if not padded:
        return live
    # XLA may give the parts of another loop other addresses, where sizes differ.
    parted = (loop for loop in every if loop[0].mode.parts > 1)
    elsewhere = sorted(max(step.cost.scratch for step in loop) for loop in parted)[-2:-1]
    padding = max((_count_padding(plan, loop) for loop in every), default=count_tile_padding(plan.source))
    *_, last = plan.steps or [None]
    if last is not None and last.mode == PLAIN and last.kind in ("all_gather", "permute") and not last.cost.scratch:
        # A TPU receives it in a buffer where all chips know it, and copies it to the result.
        live = max(live, _count_live_bytes(plan, every[-1]) + last.result.tile_bytes)
    return live + padding + sum(elsewhere)


def _is_overwritten(plan: Plan, last: Step) -> bool:
    """Whether all steps after this one, the last of a loop, overwrite its result, which is then the target's memory."""
    return all(step.mode.in_place for step in plan.steps[plan.steps.index(last) + 1 :])


def _count_live_bytes(plan: Plan, loop: Sequence[Step]) -> int:
    first, last = loop[0], loop[-1]
    target = 0 if _is_overwritten(plan, last) else plan.target.tile_bytes
    # XLA packs the messages of a part's next round while those of one are on their way.
    packed = [step.kind == "exchange" and step.mode.view is None for step in loop]
    each = zip(loop, packed, strict=True)
    buffers = [step.cost.scratch + (count_message_bytes(step) if also else 0) for step, also in each]
    if len(loop) == 1:
        return first.live_bytes + target + buffers[0] - first.cost.scratch
    ends = first.retained_bytes + first.operand.tile_bytes + last.result.tile_bytes
    # What overlaps is packed by the steps before it while a part of it is on its way; others take turns.
    together = buffers[-1] + max(buffers[:-1]) if last.mode.overlap else max(buffers)
    return ends + target + together


def _count_padding(plan: Plan, loop: Sequence[Step]) -> int:
    """What padding adds to the bytes that live at once in a loop: that of tiles and buffers."""
    first, last = loop[0], loop[-1]
    tiles = [last.result] if last.mode.in_place else [first.operand, last.result]
    if first is not plan.steps[0] and first.retained_bytes:
        tiles.append(plan.source)
    if not _is_overwritten(plan, last):
        tiles.append(plan.target)  # XLA has its memory from the start.
    # XLA has the buffers of the smaller steps beside those of the largest; ends they share once.
    scratch = [step.cost.scratch for step in loop]
    shared = sum(part.result.tile_bytes for part in map(part_of, loop[:-1]) if part is not None)
    beside = max(0, sum(scratch) - max(scratch) - shared)
    return sum(map(count_tile_padding, tiles)) + sum(map(_count_buffer_padding, loop)) + beside


def count_tile_padding(layout: Layout) -> int:
    """The bytes that padding adds to a tile."""
    return count_padded_bytes(layout.tile_shape, layout.dtype) - layout.tile_bytes


def _count_buffer_padding(step: Step) -> int:
    """Buffers are padded like the more padded of the two tiles; a slice at once has a buffer if another dim becomes
    minor.
    """
    part, (operand, result), dtype = part_of(step), (step.operand, step.result), step.operand.dtype
    if step.kind == "slice":
        return count_relaid_bytes(operand, result) if part is None else _count_slice_padding(part)
    if part is not None:
        return _count_part_padding(step, part)
    plain = step.kind == "exchange" and step.mode.view is None and one_set(operand.mesh, result.mesh)
    r = refine(operand, result) if plain else None
    if step.mode == PLAIN and r is not None and r.exact and step.launches:
        # Two messages, the wider one in the order of dims of an end; and the copies of ends that messages do not fit.
        own = count_padded_bytes(r.box, dtype)
        widest, copies = own, 0
        for tile in (operand.tile_shape, result.tile_shape):
            if is_cut_in_place(tile, r.box, dtype):
                widest = max(widest, count_padded_bytes(r.box, dtype, choose_memory_order(tile, dtype)))
            else:
                copies += count_padded_bytes(tile, dtype, choose_memory_order(r.box, dtype))
        return max(0, own + widest + copies - step.cost.scratch)
    if step.kind == "all_to_all" and step.mode == PLAIN and not sent_as_it_lies(lower_steps(operand, (step,))):
        # All blocks are packed before they are sent, and received before they are put together, each padded.
        block = tuple(map(min, operand.tile_shape, result.tile_shape))
        return int(2 * measure_padding(block, dtype) * result.tile_bytes) - step.cost.scratch
    times = max(1.0, *(measure_padding(end.tile_shape, end.dtype) for end in (operand, result)))
    return int((times - 1) * step.cost.scratch)


def _count_slice_padding(part: Part) -> int:
    """A slice in parts reads a whole part if it keeps several ranges of the minor dim, and rearranges it in memory to
    cut out narrow ones.
    """
    ends = count_tile_padding(part.operand) + count_tile_padding(part.result)
    ends += count_relaid_bytes(part.operand, part.result)
    if keeps_one_range(part.operand, part.result):
        return ends
    minor = find_minor_dim(part.operand)
    local = itertools.takewhile(lambda digit: digit.axis is None, reversed(part.result.dims[minor].digits))
    full = math.prod(digit.radix for digit in local) % LANES == 0
    return ends + (1 if full else 2) * part.operand.tile_bytes


def _count_part_padding(step: Step, part: Part) -> int:
    """Messages of narrow boxes are packed, sent, and rearranged; so are tiles whose dims lie in another order than
    theirs.
    """
    dtype, order = part.operand.dtype, choose_memory_order(part.block, part.operand.dtype)
    times, messages = count_block_padding(part), count_message_bytes(step)
    ends = count_tile_padding(part.operand) + count_tile_padding(part.result)
    if step.mode.in_place:
        return ends + int((times - 1) * messages)
    copies, relaid = 2 if times > 1 else 1, [part.result] if step.kind == "all_gather" else []
    if step.kind == "exchange":
        copies, relaid = 3, [part.operand, part.result]
        if not _count_staged_bytes(step, part):
            copies = max(copies, step.launches // step.mode.parts)  # XLA sends all of them at once.
    shapes = [end.tile_shape for end in relaid if choose_memory_order(end.tile_shape, dtype)[-1] != order[-1]]
    return (
        ends + sum(count_padded_bytes(shape, dtype, order) for shape in shapes) + int((times * copies - 1) * messages)
    )


def count_block_padding(part: Part) -> float:
    """How many times its own bytes a block that travels in a part needs; a block of fewer than 8 x 128 elements is
    padded to that many.
    """
    return max(measure_padding(part.block, part.operand.dtype), SUBLANES * LANES / math.prod(part.block))


def keeps_one_range(operand: Layout, result: Layout) -> bool:
    """Whether a slice keeps one range of indices of the dim that a TPU has minor in the operand.

    >>> from reshard.types import Mesh
    >>> ends = [Layout.parse(text, Mesh(x=2)) for text in ("f32[256, 256]", "f32[256, {x}128]", "f32[256, 128{x}]")]
    >>> keeps_one_range(ends[0], ends[1]), keeps_one_range(ends[0], ends[2])
    (True, False)
    """
    minor = find_minor_dim(operand)
    held = [[digit.axis is not None for digit in end.dims[minor].digits] for end in (operand, result)]
    return all(flags == sorted(flags, reverse=True) for flags in held)


def count_message_bytes(step: Step) -> int:
    """The bytes of the messages that a part of a step packs and receives; 0 for a step at once.

    XLA has buffers even for those of an exchange that are one run of memory in both tiles.
    """
    part = part_of(step)
    staged = 0 if part is None else _count_staged_bytes(step, part)
    if part is None or staged or step.mode.in_place or step.kind != "exchange":
        return staged
    return 2 * step.received_bytes // max(1, step.launches)  # An exchange may have nothing to send.


def _count_staged_bytes(step: Step, part: Part) -> int:
    """The bytes of messages that the step's rule counts: none for those that are one run of memory in both tiles."""
    return step.cost.scratch - part.operand.tile_bytes - part.result.tile_bytes


def count_relaid_bytes(operand: Layout, result: Layout) -> int:
    """The bytes of a slice that a TPU copies because its order of dims is not the operand's; 0 if they agree.

    >>> from reshard.types import Mesh
    >>> ends = [Layout.parse(text, Mesh(x=8)) for text in ("bf16[512, 512, 512]", "bf16[512, 512, {x}64]")]
    >>> count_relaid_bytes(*ends) // ends[1].tile_bytes
    2
    """
    order, shape = choose_memory_order(operand.tile_shape, operand.dtype), result.tile_shape
    return 0 if order == choose_memory_order(shape, result.dtype) else count_padded_bytes(shape, result.dtype, order)


# Parts of a donated tile that take each other's place on a TPU: in how many a step is fastest, and how small it gets.
#
#     bf16[{x}32, 256, 768] -> bf16[256, {x}32, 768] on <x=8>, tiles of 12 MiB, v5p:
#
#     parts   along        slots that change places   peak over a tile   ms by libtpu's own estimates, without wires
#      4      dim 2        none                       1.25               0.05
#     16      dim 0        16 x 8                     1.13               0.28
#      4      not donated                             2.25               0.05
#
# A part is read and written over by two kernels, beside those that pack and unpack what it sends, where these cannot do
# that as well. Each takes 1.2 us whatever it moves, and slots that change places are read and written once more, one by
# one. So small tiles are done in few parts, along digits for which no slots change places, and large ones in many.


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
    costs = TPU_COSTS
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
