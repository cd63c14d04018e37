"""What a proposal costs, by the figures of its plans alone; the pass measures it by compiling.

A compiler may send more bytes than the plan has. XLA:CPU is known to: it has no collectives of 16-bit floats, and sends
32 bits for each. A program is assumed to come from such a compiler if none of its own collectives sends 16-bit floats.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.doctor.dataflow.index_maps import IndexMaps, device_groups
from reshard.doctor.dataflow.sums import is_exact
from reshard.doctor.moves import holds_whole_array
from reshard.doctor.op_layouts import OpReplacement
from reshard.doctor.places import ArrayMove
from reshard.doctor.proposals import Measure, Proposal, ProposalCost
from reshard.doctor.replacements import Replacement, Unfit
from reshard.hlo import Array, Collective
from reshard.lower import lower_plan
from reshard.lower.program import AllReduce, InParts, Instruction, ReduceScatter
from reshard.types.plan import Plan
from reshard.types.rules.bounds import lower_bound

_SHORT = frozenset({"bf16", "f16", "bfloat16", "float16"})  # as HLO names them, and as layouts do


def prediction(collectives: Sequence[Collective], maps: IndexMaps) -> Measure:
    """The costs of proposals for a program with these collectives; raises `Unfit` for sums in another order."""
    sent = {array.dtype for one in collectives for array in one.results}
    wide = sent.isdisjoint(_SHORT)

    def predicted(one: Proposal) -> ProposalCost:
        _check_sums(one, maps)
        received = sum(_sent(plan, wide) for plan in one.fate.plans)
        shifts = [(each, each.shift) for each in one.replacements if isinstance(each, Replacement) and each.shift]
        received += sum(shift.received_bytes(each.dtype) for each, shift in shifts)
        launches = sum(plan.launches for plan in one.fate.plans) + one.fate.permutes
        return ProposalCost(received, max((_peak(one, each) for each in one.replacements), default=0), launches)

    return predicted


def _check_sums(one: Proposal, maps: IndexMaps) -> None:
    """Raises `Unfit` where floats would be added up in several rounds, or in another order of devices."""
    for each, plan in zip(one.replacements, one.fate.plans, strict=False):
        if not isinstance(each, Replacement) or not each.is_summed or is_exact(each.before.dtype):
            continue
        sums = [groups for step in lower_plan(plan).instructions if (groups := _summed(step)) is not None]
        if len(sums) != 1 or set(sums[0]) != set(map(tuple, device_groups(maps, each.leaf))):
            raise Unfit("its elements would be added up in another order")


def _summed(instruction: Instruction) -> tuple[tuple[int, ...], ...] | None:
    """The groups of a reduction; None for any other instruction."""
    if isinstance(instruction, InParts):
        return _summed(instruction.each)
    return instruction.groups if isinstance(instruction, ReduceScatter | AllReduce) else None


def planned_temp_bytes(one: Proposal) -> int:
    """The most bytes live at once beside source and results while what is proposed runs."""
    first = one.replacements[0]
    results = [each.after for each in one.replacements if isinstance(each, Replacement)]
    if isinstance(first, OpReplacement):
        results = [output.after for output in first.outputs]
    ends = first.before.nbytes + sum(array.nbytes for array in results)
    return max(0, max(_peak(one, each) for each in one.replacements) - ends)


def proposed_moves(one: Proposal) -> tuple[ArrayMove, ...]:
    """The moves of a proposal's plans and shifts, or of an operation's rows: there and back."""
    moves: list[ArrayMove] = []
    plans = iter(one.fate.plans)
    for each in one.replacements:
        if isinstance(each, OpReplacement):
            moves += _op_moves(each, one.fate.plans)
        elif each.move is not None:
            moves.append(_planned(each.before, each.after, next(plans)))
        elif each.shift is not None:
            moves.append(ArrayMove(each.before, each.after, each.shift.received_bytes(each.dtype), False))
    return tuple(moves)


def _op_moves(each: OpReplacement, plans: Sequence[Plan]) -> list[ArrayMove]:
    gather, *others = plans
    rows = [_planned(each.before, None, gather)] if gather.source != gather.target else []
    return rows + [_planned(None, output.after, plan) for output, plan in zip(each.outputs, others, strict=True)]


def _planned(before: Array | None, after: Array | None, plan: Plan) -> ArrayMove:
    """The move of a plan; a tile that the program does not have is that of the plan's layout."""
    tile = after or Array(before.dtype if before else plan.target.dtype, plan.target.tile_shape)
    whole = holds_whole_array(plan.source)
    return ArrayMove(before, tile, lower_bound(plan.source, plan.target), True, plan.source, plan.target, whole, plan)


def _temp_bytes(plan: Plan) -> int:
    """The most bytes live at once beside source and target."""
    return plan.peak_bytes - plan.floor_bytes


def _sent(plan: Plan, wide: bool) -> int:
    return plan.received_bytes * (2 if wide and plan.source.dtype in _SHORT else 1)


def _peak(one: Proposal, each: Replacement | OpReplacement) -> int:
    """The most that a device holds while what is proposed runs, with source and results."""
    if isinstance(each, OpReplacement):
        return _op_peak(one, each)
    if each.shift is not None:
        alike = [other for other in one.replacements if isinstance(other, Replacement) and other.shift is not None]
        received = sum(other.shift.received_bytes(other.dtype) for other in alike if other.shift is not None)
        return each.before.nbytes + sum(other.after.nbytes for other in alike) + received
    plans = [plan for plan in one.fate.plans if each.move is not None and plan.source == each.move.source]
    return each.before.nbytes + each.after.nbytes + max(map(_temp_bytes, plans), default=0)


def _op_peak(one: Proposal, each: OpReplacement) -> int:
    gather, *moves = one.fate.plans
    rows, results = gather.target.tile_bytes, sum(plan.source.tile_bytes for plan in moves)
    after = sum(plan.target.tile_bytes for plan in moves)
    while_moved = results + after + max(map(_temp_bytes, moves), default=0)
    return each.before.nbytes + max(rows + _temp_bytes(gather), rows + results, while_moved)
