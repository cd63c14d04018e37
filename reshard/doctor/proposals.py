"""The chains of a module that plans could replace, each with its outcome.

    find      chains, and operations on whole rows with the chains that bring their operands
    plan      the cheapest plan for each
    compare   with XLA's chain, in bytes, in memory, in permutes; then with less memory; then the parts of the chain

The pass inside XLA and the doctor both ask here, and differ in one thing only: the pass compiles a proposal to know its
cost, and the doctor takes the plan's own figures. So the doctor says what the pass would do, without compiling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from reshard.doctor.batch_ops import BatchOp, batch_ops
from reshard.doctor.chains import REDUCTIONS, Chain, chains
from reshard.doctor.dataflow.flow import Flow, HloValue, Numbering
from reshard.doctor.dataflow.index_maps import IndexMaps, device_groups
from reshard.doctor.dataflow.sums import is_exact
from reshard.doctor.memory import Liveness, PlannedChain, program_memory
from reshard.doctor.op_layouts import OpFinder, OpMoves, OpReplacement
from reshard.doctor.places import ArrayMove, PassOutcome, Place, place_of
from reshard.doctor.replacements import Finder, Replacement, Unfit, holds_whole_array, is_needed
from reshard.errors import ReshardError
from reshard.hlo import Array, Collective, Instruction
from reshard.lower import lower_plan
from reshard.lower.program import AllReduce, InParts, ReduceScatter
from reshard.lower.program import Instruction as LoweredInstruction
from reshard.plans.plan import Plan
from reshard.plans.rules.bounds import lower_bound
from reshard.synth import PlanOptions, find_plan
from reshard.synth.cost import timed
from reshard.synth.network import launch_bytes
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

ALIGNMENT = 4096
"""Bytes by which a peak may be exceeded: buffers are rounded up, and tables and scalars take some."""
_SURELY = 0.5
"""An estimate below this share of the old peak needs no check: estimates have been off by up to a third."""
_GAIN = 0.01
"""The share of its peak that a program must save if it receives as many bytes: compiling it anew costs seconds."""


class ProposalOptions(NamedTuple):
    """What the plans are made for, and the platform of the devices; `plan.prefer` is the figure to reduce."""

    plan: PlanOptions = PlanOptions()
    platform: str = "cpu"

    @property
    def prefer(self) -> str:
        """The figure to reduce: "bytes", "memory" or "time"; see `Proposals`."""
        return self.plan.prefer or "bytes"

    @property
    def launch_cost(self) -> int:
        """What starting a collective costs, in bytes; nothing on CPU, where threads stand for real devices."""
        return 0 if self.platform == "cpu" else launch_bytes(self.plan.network)


class ProposalCost(NamedTuple):
    """What plans cost a device: bytes received in all of them, the highest peak of one, and their launches."""

    received_bytes: int
    peak_bytes: int
    launches: int = 0


@dataclass(frozen=True)
class Proposal:
    """A chain, its outcome, and what could replace it: nothing if it is to stay.

    `allowed_bytes` is the memory that the chain needs. `excess_bytes` is what the plans need beyond: they fit only
    where the program's own peak is elsewhere. `moves` are the layouts of an operation on rows; then the first of the
    outcome's plans leads to its rows, and the others lead from these.
    """

    chain: Chain
    outcome: PassOutcome
    replacements: tuple[Replacement | OpReplacement, ...] = ()
    allowed_bytes: int = 0
    excess_bytes: int = 0
    moves: OpMoves | None = None

    @property
    def place(self) -> Place:
        """The place of the chain, with its outcome."""
        return place_of(self.chain, self.outcome)

    @property
    def received_bytes(self) -> int:
        """The bytes that a device receives in the chain as it is."""
        return sum(collective.received_bytes for collective in self.chain.collectives)

    @property
    def planned_chain(self) -> PlannedChain:
        """What the plans change in the memory of the program."""
        values: list[HloValue] = []
        for each in self.replacements:
            outputs = each.outputs if isinstance(each, OpReplacement) else (each,)
            values += (value for output in outputs for value in output.values)
        first = self.replacements[0]
        return PlannedChain(
            self.chain.region, tuple(values), first.source, first.before.nbytes, planned_temp_bytes(self)
        )

    def left(self, why: str) -> Proposal:
        """The same with the chain left as it is, because of `why`."""
        return replace(self, replacements=(), moves=None, outcome=replace(self.outcome, why=why))


Measure = Callable[[Proposal], ProposalCost]
"""Measures a proposal; raises `Unfit` or a `ReshardError` for one that cannot be compiled or planned."""


class Proposals:
    """The proposals for a module: each of its collectives is in exactly one.

    Plans receive fewer bytes than their chain, and need no more memory, unless they `may_exceed` it where the program's
    own peak is elsewhere. If memory is preferred, they may receive as many bytes, and need less memory. If time is
    preferred, they may receive as many, and take less time, as launches and bytes cost on the network.
    """

    def __init__(
        self, flow: Flow, maps: IndexMaps, numbering: Numbering, collectives: Sequence[Collective], mesh: Mesh | None,
        options: ProposalOptions, measure: Measure, may_exceed: bool = True,
    ) -> None:  # fmt: skip
        self.flow = flow
        self.maps = maps
        self.collectives = collectives
        self.options = options
        self.measure = measure
        self.may_exceed = may_exceed
        self.finder = Finder(flow, maps, numbering, mesh)
        self.liveness = Liveness(flow, numbering)

    def __iter__(self) -> Iterator[Proposal]:
        ops = _Ops(self)
        yield from ops.proposals
        for chain in chains(self.flow, self.maps, self.collectives, from_sums=True):
            parts = [part for part in self._parts(chain) if not ops.are_taken(part)]
            if ops.are_taken(chain) or not parts:
                continue
            whole = self._tried(chain) if not any(map(ops.takes, chain.collectives)) else None
            if whole is not None and (whole.replacements or len(parts) == 1):
                yield ops.explained(whole)
                continue
            yield from (ops.explained(self._left(part, whole) if part.reduces else self._tried(part)) for part in parts)

    @cached_property
    def apart(self) -> tuple[Chain, ...]:
        """The chains of the module, each sum as one of its own."""
        return tuple(chains(self.flow, self.maps, self.collectives))

    @cached_property
    def peak_bytes(self) -> int:
        """What a device holds at the peak of the program, in the order of its text."""
        return program_memory(self.flow).peak_bytes

    def smaller(self, large: Proposal) -> Proposal | None:
        """A proposal that needs no more memory than its chain, for one that does; None if there is none."""
        if not large.excess_bytes:
            return None
        moves = tuple(one for one in large.replacements if isinstance(one, Replacement))
        try:
            one = self._planned(large.chain, moves, large.allowed_bytes)
            if one.outcome.plans == large.outcome.plans:
                return None
            one = self._accepted(one, lambda: large.allowed_bytes)
        except (Unfit, ReshardError):
            return None
        return None if one.excess_bytes else one

    def _parts(self, chain: Chain) -> list[Chain]:
        """The parts of a chain, each of which may begin with a sum."""
        if not chain.reduces or len(chain.collectives) < 2:
            return [chain]
        return [one for one in self.apart if one.region is chain.region and one.is_part_of(chain)]

    def _left(self, sum_: Chain, whole: Proposal | None) -> Proposal:
        """The proposal for a sum: left if its whole chain was tried or partly replaced, else tried alone."""
        return Proposal(sum_, PassOutcome(why=whole.outcome.why)) if whole is not None else self._tried(sum_)

    def _tried(self, chain: Chain) -> Proposal:
        """The proposal that replaces a chain, or one that leaves it and says why."""
        try:
            return self._better(chain)
        except (Unfit, ReshardError) as error:
            return Proposal(chain, PassOutcome(why=str(error).splitlines()[0]))

    def _better(self, chain: Chain) -> Proposal:
        if is_needed(chain, self.flow):
            raise Unfit(f"it receives no more than is needed, {place_of(chain).received_bytes} B")
        budget = self._allowed(chain) - 1 if self.options.prefer == "memory" else None
        one = self._planned(chain, self.finder.replacements(chain), budget)
        one = self._accepted(one, lambda: self._allowed(chain))
        if not one.excess_bytes or (self.may_exceed and one.allowed_bytes + one.excess_bytes <= self.peak_bytes):
            return one
        smaller = self.smaller(one)
        if smaller is None:
            raise Unfit(too_large(one))
        return smaller

    def _allowed(self, chain: Chain) -> int:
        """The memory that a chain needs; the results of sums are not counted, since XLA sums in place."""
        sums = [one for one in chain.collectives if one.kind in REDUCTIONS]
        return self.liveness.of(chain).peak_bytes - sum(array.nbytes for one in sums for array in one.results)

    def _planned(self, chain: Chain, replacements: tuple[Replacement, ...], budget: int | None) -> Proposal:
        """The plans for a chain under a budget."""
        plans = tuple(
            self._plan(one.move.source, one.move.target, budget) for one in replacements if one.move is not None
        )
        shifts = [(one.shift, one.dtype) for one in replacements if one.shift is not None]
        planned = sum(plan.received_bytes for plan in plans)
        planned += sum(shift.received_bytes(dtype) for shift, dtype in shifts)
        permutes = sum(shift.launches for shift, _ in shifts)
        return Proposal(chain, PassOutcome(planned, plans, permutes=permutes), replacements)

    def _accepted(self, one: Proposal, allowed_bytes: Callable[[], int]) -> Proposal:
        """The proposal with the memory that it needs; raises `Unfit` if it is not better than its chain.

        What the chain is allowed to need is asked for last: most chains receive no more than is needed.
        """
        outcome, planned = one.outcome, one.outcome.planned_bytes or 0
        if outcome.permutes > len(one.chain.collectives):
            raise Unfit(f"the plan would need {outcome.permutes} permutes to receive {planned} B")
        self._check_bytes(one, planned, f"it receives no more than is needed, {planned} B")
        self._check_order(one)
        cost = self.measure(one)
        received = f"the plan would receive {cost.received_bytes} B as compiled here, and not {planned} B"
        self._check_bytes(one, cost.received_bytes, received)
        if cost.received_bytes < one.received_bytes:
            self._check_launches(one, cost)
        allowed = allowed_bytes()
        if self.options.prefer == "memory" and cost.peak_bytes >= allowed:
            raise Unfit(f"the plan would need {cost.peak_bytes} B at once, no less than XLA's {allowed} B")
        outcome = replace(outcome, planned_bytes=cost.received_bytes)
        excess = max(0, cost.peak_bytes - allowed - ALIGNMENT)
        return replace(one, outcome=outcome, allowed_bytes=allowed, excess_bytes=excess)

    def _check_bytes(self, one: Proposal, received: int, why: str) -> None:
        """Raises `Unfit` unless `received` bytes are a gain: fewer, or no more if memory or time is preferred."""
        before, prefer = one.received_bytes, self.options.prefer
        if received > before or (received == before and prefer == "bytes"):
            raise Unfit(why)
        if prefer != "time":
            return
        launch = launch_bytes(self.options.plan.network)
        launches = sum(plan.launches for plan in one.outcome.plans) + one.outcome.permutes
        if received + launches * launch >= before + len(one.chain.collectives) * launch:
            raise Unfit(f"the plan would take no less time, in {launches} launches")

    def _check_order(self, one: Proposal) -> None:
        """Raises `Unfit` if a TPU rounds a sum differently: its reduce-scatter among all devices has two levels."""
        if self.options.platform != "tpu":
            return
        for source, steps in ((plan.source, plan.steps) for plan in one.outcome.plans):
            among_all = math.prod(axis.size for axis in source.partial) == source.mesh.size > 1
            if among_all and source.dtype[0] not in "su" and any(step.kind == "reduce_scatter" for step in steps):
                raise Unfit("a TPU would add up the plan's sum among all devices in two levels, in another order")

    def _check_launches(self, one: Proposal, cost: ProposalCost) -> None:
        """Raises `Unfit` if starting more collectives takes longer than the bytes that are saved."""
        more, saved = cost.launches - len(one.chain.collectives), one.received_bytes - cost.received_bytes
        if one.moves is None and saved < more * self.options.launch_cost:
            raise Unfit(f"the plan would save {saved} B with {more} more collectives")

    def op(self, chain: Chain, instruction: Instruction, op: BatchOp, finder: OpFinder) -> Proposal:
        """The operation that a chain brings whole rows for, run on each device's rows; raises `Unfit`."""
        one = finder.replacement(chain, instruction, op)
        choices = [(self._op_plans(moves), moves) for moves in one.choices]
        plans, moves = min(choices, key=lambda choice: sum(plan.received_bytes for plan in choice[0]))
        planned = sum(plan.received_bytes for plan in plans)
        arrays = sum(array.nbytes for array in (*op.operands, *op.results))
        outcome = PassOutcome(planned, plans, op=op.kind if op.kind != "ffi" else op.target)
        allowed = max(self.liveness.of(chain).peak_bytes, arrays)
        proposal = self._accepted(Proposal(chain, outcome, (one,), moves=moves), lambda: allowed)
        if proposal.excess_bytes:
            raise Unfit(too_large(proposal))
        return proposal

    def _op_plans(self, moves: OpMoves) -> tuple[Plan, ...]:
        return tuple(self._plan(*pair) for pair in ((moves.source, moves.rows), *moves.outputs))

    def _plan(self, source: Layout, target: Layout, budget: int | None = None) -> Plan:
        wanted = self.options.plan
        fastest = PlanOptions(wanted.budget if budget is None else budget, wanted.network)
        plan = find_plan(source, target, fastest)
        if wanted.network is None:
            return plan
        others_summands = bool(source.partial and plan.idle_axes)  # which need not equal a device's own
        if self.options.prefer == "time" and not others_summands:
            return plan
        fewest = find_plan(source, target, fastest._replace(network=None))
        if plan.received_bytes <= fewest.received_bytes and not others_summands:
            return plan
        return timed(fewest, wanted.network.links(source.mesh))


class _Ops:
    """The operations that may run on the rows that each device has, and the chains that they take.

    `why` has the reasons why others stay, by the first collective that brings their operands.
    """

    def __init__(self, of: Proposals) -> None:
        self.proposals: list[Proposal] = []
        self.why: dict[str, str] = {}
        self._taken: set[Collective] = set()
        finder = OpFinder(of.finder)
        known = next(batch_ops(finder.flow), None) is not None
        for chain, instruction, op in finder.joined(of.apart) if known else ():
            try:
                self.proposals.append(of.op(chain, instruction, op, finder))
                self._taken.update(chain.collectives)
            except (Unfit, ReshardError) as error:
                self.why[chain.collectives[0].name] = str(error).splitlines()[0]

    def takes(self, collective: Collective) -> bool:
        """Whether an operation takes what a collective moves."""
        return collective in self._taken

    def are_taken(self, chain: Chain) -> bool:
        """Whether the operations take all that a chain moves."""
        return self._taken.issuperset(chain.collectives)

    def explained(self, one: Proposal) -> Proposal:
        """The proposal, with the reason of the operation that it brings rows for if it is left."""
        if one.replacements:
            return one
        return one.left(self.why.get(one.chain.collectives[0].name, one.outcome.why))


def why_unmeasured(
    places: Iterable[Place], options: ProposalOptions, estimates: Callable[[], tuple[int, int]]
) -> str | None:
    """Why the peak of a rewritten program need not be measured; None if it must be.

    The `estimates` are the peaks before and after, by the order of the module's text, in bytes. The reason is empty if
    the program is surely better. Otherwise it is left as it was.
    """
    if options.platform == "cpu":
        return ""
    before, after = estimates()
    if after < _SURELY * before:
        return ""
    saved = sum(place.received_bytes - (place.planned_bytes or 0) for place in places if place.replaced)
    if saved >= options.launch_cost:
        return None
    return f"{saved} B saved in all are not worth compiling the program for its peak"


class ProgramCost(NamedTuple):
    """The peak memory of a whole compiled program and the bytes that it receives, on one device."""

    peak_bytes: int
    received_bytes: int


def why_no_better(before: ProgramCost, after: ProgramCost, options: ProposalOptions) -> str:
    """Why a rewritten program is not taken, from what the compiler makes of both; empty if it is better.

    It may make the same of a part of both: XLA makes a reduce-scatter of a sliced sum by itself, late.

    >>> why_no_better(ProgramCost(1000, 64), ProgramCost(995, 64), ProposalOptions())
    'as compiled it would receive as many bytes, and need 995 B at its peak instead of 1000 B'
    >>> why_no_better(ProgramCost(1000, 64), ProgramCost(900, 64), ProposalOptions())
    ''
    """
    peak, best = after.peak_bytes, before.peak_bytes
    if peak > best:
        return f"with it the program would need {peak} B at its peak as compiled here, and XLA's needs {best} B"
    if options.prefer == "time" or after.received_bytes < before.received_bytes or peak <= (1 - _GAIN) * best:
        return ""
    if after.received_bytes > before.received_bytes:
        return f"as compiled it would receive {after.received_bytes} B, and XLA's receives {before.received_bytes} B"
    return f"as compiled it would receive as many bytes, and need {peak} B at its peak instead of {best} B"


def too_large(one: Proposal) -> str:
    """Why plans that need too much memory are not taken."""
    peak = one.allowed_bytes + one.excess_bytes + ALIGNMENT
    return f"the plan would need {peak} B at once, and XLA needs {one.allowed_bytes} B"


# What a proposal costs, by the figures of its plans alone; the pass measures it by compiling.
#
# A compiler may send more bytes than the plan has. XLA:CPU is known to: it has no collectives of 16-bit floats, and
# sends 32 bits for each. A program is assumed to come from such a compiler if none of its own collectives sends 16-bit
# floats.


_SHORT = frozenset({"bf16", "f16", "bfloat16", "float16"})  # as HLO names them, and as layouts do


def prediction(collectives: Sequence[Collective], maps: IndexMaps) -> Measure:
    """The costs of proposals for a program with these collectives; raises `Unfit` for sums in another order."""
    sent = {array.dtype for one in collectives for array in one.results}
    wide = sent.isdisjoint(_SHORT)

    def predicted(one: Proposal) -> ProposalCost:
        _check_sums(one, maps)
        received = sum(_sent(plan, wide) for plan in one.outcome.plans)
        shifts = [(each, each.shift) for each in one.replacements if isinstance(each, Replacement) and each.shift]
        received += sum(shift.received_bytes(each.dtype) for each, shift in shifts)
        launches = sum(plan.launches for plan in one.outcome.plans) + one.outcome.permutes
        return ProposalCost(received, max((_peak(one, each) for each in one.replacements), default=0), launches)

    return predicted


def _check_sums(one: Proposal, maps: IndexMaps) -> None:
    """Raises `Unfit` where floats would be added up in several rounds, or in another order of devices."""
    for each, plan in zip(one.replacements, one.outcome.plans, strict=False):
        if not isinstance(each, Replacement) or not each.is_summed or is_exact(each.before.dtype):
            continue
        sums = [groups for step in lower_plan(plan).instructions if (groups := _summed(step)) is not None]
        if len(sums) != 1 or set(sums[0]) != set(map(tuple, device_groups(maps, each.leaf))):
            raise Unfit("its elements would be added up in another order")


def _summed(instruction: LoweredInstruction) -> tuple[tuple[int, ...], ...] | None:
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
    plans = iter(one.outcome.plans)
    for each in one.replacements:
        if isinstance(each, OpReplacement):
            moves += _op_moves(each, one.outcome.plans)
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
    plans = [plan for plan in one.outcome.plans if each.move is not None and plan.source == each.move.source]
    return each.before.nbytes + each.after.nbytes + max(map(_temp_bytes, plans), default=0)


def _op_peak(one: Proposal, each: OpReplacement) -> int:
    gather, *moves = one.outcome.plans
    rows, results = gather.target.tile_bytes, sum(plan.source.tile_bytes for plan in moves)
    after = sum(plan.target.tile_bytes for plan in moves)
    while_moved = results + after + max(map(_temp_bytes, moves), default=0)
    return each.before.nbytes + max(rows + _temp_bytes(gather), rows + results, while_moved)
