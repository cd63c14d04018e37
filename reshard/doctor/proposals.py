"""The chains of a module that plans could replace, each with its outcome.

    find      chains, and operations on whole rows with the chains that bring their operands
    plan      the cheapest plan for each
    compare   with XLA's chain, in bytes, in memory, in permutes; then with less memory; then the parts of the chain

The pass inside XLA and the doctor both ask here, and differ in one thing only: the pass compiles a proposal to know its
cost, and the doctor takes the plan's own figures. So the doctor says what the pass would do, without compiling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from reshard.doctor.batch_ops import OpFinder, OpMoves, OpOutput, OpReplacement, has_batch_ops
from reshard.doctor.chain_reader import (
    REDUCTIONS,
    Chain,
    ChainReader,
    NoLayouts,
    Replacement,
    ShiftForm,
    Unfit,
    holds_whole_array,
    is_needed,
    join_chains,
    list_chains,
    place_chain,
)
from reshard.doctor.dataflow.flow import Flow, HloValue, Numbering, Scope
from reshard.doctor.dataflow.index_maps import FRAGMENT_MOVES, IndexMaps, Untraceable, device_groups, group_tables
from reshard.doctor.dataflow.trace import is_exact, summed_digits
from reshard.doctor.infer_layouts import InferredMove
from reshard.doctor.live_bytes import Liveness, PlannedChain, add_up_program
from reshard.doctor.places import ArrayMove, PassOutcome, Place
from reshard.doctor.shifts import HaloExchange, Shift, plan_exchange
from reshard.doctor.sums import join_sums, plan_rounds
from reshard.errors import BudgetError, ReshardError, quoted
from reshard.hlo import Array, Collective
from reshard.lower import lower_plan
from reshard.lower.program import AllReduce, InParts, ReduceScatter
from reshard.plans.plan import Plan
from reshard.plans.rules.bounds import lower_bound
from reshard.synth import PlanOptions, find_plan
from reshard.synth.cost import time_plan
from reshard.synth.network import launch_bytes
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

SHIFT_FORMS: tuple[ShiftForm, ...] = ("arriving", "stored", "used")
ALIGNMENT = 4096
"""Bytes by which a peak may be exceeded: buffers are rounded up, and tables and scalars take some."""
_MOST_LAUNCHES = 64
"""The most collectives that a plan is cut into."""
_SURELY = 0.5
"""An estimate below this share of the old peak needs no check: estimates have been off by up to a third."""
_TABLES = 0.01
"""The share of its peak by which a program may need more on CPU, which counts the tables of offsets in plans."""
_WORTH = 0.005
"""The share of all received bytes that plans must save on TPU and GPU to be worth compiling the program again."""
_GAIN = 0.01
"""The share of its peak that a program must save if it receives as many bytes: compiling it anew costs seconds."""


SUMS = ("exact", "any order")
"""The orders in which plans may add up floats: that of the program, or any."""


def read_sums(sums: str, same_bits: bool = False) -> str:
    """The option as it was given; raises `ReshardError` for another word, and for any order with `same_bits`.

    >>> read_sums("any order")
    'any order'
    """
    if sums not in SUMS:
        raise ReshardError(f"sums={quoted(sums)} is none of {', '.join(map(repr, SUMS))}")
    if same_bits and sums != SUMS[0]:
        raise ReshardError(
            f"sums={sums!r} changes bits of sums, and same_bits=True forbids that: leave one of them out"
        )
    return sums


class ProposalOptions(NamedTuple):
    """What the plans are made for, the platform of the devices, and how many processes share it.

    `plan.prefer` is the figure to reduce. With `same_bits`, only what surely leaves all bits of a program is proposed.
    `sums` of floats are added up in "exact"ly the program's order, or in "any order"; see `read_sums`.
    """

    plan: PlanOptions = PlanOptions()
    platform: str = "cpu"
    processes: int = 1
    same_bits: bool = False
    sums: str = SUMS[0]

    @property
    def any_order(self) -> bool:
        """Whether sums of floats may be added up in another order than the program's."""
        return self.sums != SUMS[0]

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
    where the program's own peak is elsewhere. `scattered_bytes` are those that XLA saves by itself, after the pass.
    `moves` are the layouts of an operation on rows; then the first of the outcome's plans leads to its rows, and the
    others lead from these.
    """

    chain: Chain
    outcome: PassOutcome
    replacements: tuple[Replacement | OpReplacement, ...] = ()
    allowed_bytes: int = 0
    excess_bytes: int = 0
    scattered_bytes: int = 0
    moves: OpMoves | None = None

    @property
    def place(self) -> Place:
        """The place of the chain, with its outcome."""
        return place_chain(self.chain, self.outcome)

    @property
    def received_bytes(self) -> int:
        """The bytes that a device receives in the chain as it is once compiled."""
        return sum(collective.received_bytes for collective in self.chain.collectives) - self.scattered_bytes

    @property
    def launches(self) -> int:
        """The launches that end with the chain: none of an array of a combined sum, which others share."""
        return sum(not collective.is_combined for collective in self.chain.collectives)

    @property
    def planned_chain(self) -> PlannedChain:
        """What the plans change in the memory of the program."""
        return PlannedChain(self.chain.region, self.values, self.sources, self.temp_bytes)

    @property
    def sources(self) -> dict[str, int]:
        """The instructions that yield the data before, and the bytes of each."""
        pairs = [zip(one.sources, one.befores, strict=True) for one in self.replacements]
        return {source: before.nbytes for each in pairs for source, before in each}

    @property
    def pieces(self) -> tuple[Replacement | OpReplacement, ...]:
        """What is moved by itself: replacements, or the parts that they are put together of."""
        pieces: list[Replacement | OpReplacement] = []
        for each in self.replacements:
            pieces += (each,) if isinstance(each, OpReplacement) else each.pieces
        return tuple(pieces)

    @property
    def values(self) -> tuple[HloValue, ...]:
        """The values of the program that are made anew."""
        return tuple(value for output in self._outputs for value in output.values)

    @property
    def temp_bytes(self) -> int:
        """The most bytes live at once beside source and results while what is proposed runs."""
        results = sum(output.after.nbytes for output in self._outputs)
        return max(0, self.peak_bytes - sum(self.sources.values()) - results)

    @property
    def peak_bytes(self) -> int:
        """The most that a device holds while what is proposed runs, with source and results, by the plans' figures."""
        first, plans, taken = self.replacements[0], self.outcome.plans, sum(self.sources.values())
        if isinstance(first, OpReplacement):
            # The rows are gathered, the operation makes its results of them, and then all of these move on together.
            gather, *moves = plans
            rows, results = gather.target.tile_bytes, sum(plan.source.tile_bytes for plan in moves)
            moving = (
                results + sum(plan.target.tile_bytes for plan in moves) + max(map(_count_temp_bytes, moves), default=0)
            )
            return taken + max(rows + _count_temp_bytes(gather), rows + results, moving)
        moved = [each for each in self.pieces if isinstance(each, Replacement)]
        # What is put together of parts is copied: parts and results are there at once.
        taken += sum(2 * each.after.nbytes for each in self._outputs if isinstance(each, Replacement) and each.parts)
        # All shifts of a source are one fragment, so that what they receive and what they yield is live at once.
        shifted = sum(each.after.nbytes for each in moved if each.shift is not None)
        shifted += sum(exchange.received_bytes(dtype) for exchange, dtype in self.exchanges)
        peaks = [taken + shifted] if shifted else []
        for each in moved:
            if each.shift is None:
                mine = [plan for plan in plans if each.move is not None and plan.source == each.move.source]
                peaks.append(taken + each.after.nbytes + max(map(_count_temp_bytes, mine), default=0))
        return max(peaks, default=0)

    @property
    def shifts(self) -> dict[str, list[tuple[Replacement, Shift]]]:
        """The shifts, by the dtype that is moved: those of one dtype are made together."""
        shifts: dict[str, list[tuple[Replacement, Shift]]] = {}
        for each in self.replacements:
            if isinstance(each, Replacement) and each.shift is not None:
                shifts.setdefault(each.dtype, []).append((each, each.shift))
        return shifts

    @property
    def exchanges(self) -> list[tuple[HaloExchange, str]]:
        """What devices exchange for the shifts, and the dtype of it; raises `Unfit` if that is too much."""
        exchanges: list[tuple[HaloExchange, str]] = []
        for dtype, alike in self.shifts.items():
            exchange = plan_exchange(tuple(shift for _, shift in alike), alike[0][0].befores[0].dims)
            if exchange is None:
                raise Unfit("its elements come from too many places")
            exchanges.append((exchange, dtype))
        return exchanges

    @property
    def _outputs(self) -> list[Replacement | OpOutput]:
        """What is made: a value for each replacement, or each result of an operation."""
        outputs: list[Replacement | OpOutput] = []
        for each in self.replacements:
            outputs += each.outputs if isinstance(each, OpReplacement) else (each,)
        return outputs

    def without_reorder(self, reorder_bytes: int = 0) -> Proposal:
        """The same, with other bytes that another order of addition would save."""
        return replace(self, outcome=replace(self.outcome, reorder_bytes=reorder_bytes))

    def left(self, why: str) -> Proposal:
        """The same with the chain left as it is, because of `why`."""
        return replace(self, replacements=(), moves=None, outcome=replace(self.outcome, why=why))


def _count_temp_bytes(plan: Plan) -> int:
    """The most bytes live at once beside source and target."""
    return plan.peak_bytes - plan.floor_bytes


Measure = Callable[[Proposal], ProposalCost]
"""Measures a proposal; raises `Unfit` or a `ReshardError` for one that cannot be compiled or planned."""
Cut = Callable[[Plan], Iterable[Plan]]
"""The same plan in forms that need less memory on a platform, at the same bytes."""

NEEDED = "it receives no more than is needed between these layouts"


class Room(IntEnum):
    """What plans may need that need more memory than their chains: nothing, as little as any form of them needs, or
    what the program needs elsewhere."""

    CHAIN = 0
    LEAST = 1
    PROGRAM = 2


class Proposals:
    """The proposals for a module: each of its collectives is in exactly one.

    Plans receive fewer bytes than their chain, and need no more memory, unless the `room` is that of the program, whose
    own peak may be elsewhere. If memory is preferred, they may receive as many bytes, and need less memory. If time is
    preferred, they may receive as many, and take less time, as launches and bytes cost on the network.
    """

    def __init__(
        self, flow: Flow, maps: IndexMaps, numbering: Numbering, collectives: Sequence[Collective], mesh: Mesh | None,
        options: ProposalOptions, measure: Measure, room: Room = Room.PROGRAM, cut: Cut = lambda plan: (),
    ) -> None:  # fmt: skip
        self.flow = flow
        self.maps = maps
        self.collectives = collectives
        self.options = options
        self.measure = measure
        self.room = room
        self.cut = cut
        self.reader = ChainReader(flow, maps, numbering, mesh)
        self.liveness = Liveness(flow, numbering)

    def __iter__(self) -> Iterator[Proposal]:
        taken: set[Collective] = set()
        why_not: dict[str, str] = {}
        # To look for the chains that bring an operation's rows takes long, and most modules have no such operation.
        finder = OpFinder(self.reader)
        for chain, instruction, op in finder.joined(self.apart, self.collectives) if has_batch_ops(self.flow) else ():
            try:
                one = self._propose_op(chain, finder.replacement(chain, instruction, op))
            except (Unfit, ReshardError) as error:
                why_not[chain.collectives[0].name] = str(error).splitlines()[0]
                continue
            taken.update(chain.collectives)
            yield one
        for chain in self._share_sources(taken):
            with suppress(Unfit, ReshardError):
                one = self._propose_shifts(chain)
                taken.update(chain.collectives)
                yield one
        for chain, joined in join_sums(list_chains(self.flow, self.maps, self.collectives, from_sums=True)):
            proposals = self._propose_with_sums(chain, taken)
            if len(joined) > 1 and not any(one.replacements for one in proposals):
                # The sums apart; what they would save together in another order is counted once.
                reorder = max(one.outcome.reorder_bytes for one in proposals)
                proposals = [one for part in joined for one in self._propose_with_sums(part, taken)]
                reorder -= sum(
                    one.received_bytes - (one.outcome.planned_bytes or 0) for one in proposals if one.replacements
                )
                first, *others = [one.without_reorder() for one in proposals]
                proposals = [first.without_reorder(max(0, reorder)), *others]
            for one in proposals:
                first = one.chain.collectives[0].name
                yield one.left(why_not[first]) if first in why_not and not one.replacements else one

    def _propose_with_sums(self, chain: Chain, taken: set[Collective]) -> list[Proposal]:
        """The proposals for a chain; for one with sums, as a whole or in parts.

        A sum is tried with all that is done with it first, since a reduce-scatter does both at once. If that is no
        better, what follows may be, with the sum as it is.
        """
        parts = [chain]
        if chain.reduces and len(chain.collectives) > 1:
            parts = [one for one in self.apart if one.region is chain.region and one.is_part_of(chain)]
        parts = [part for part in parts if not taken.issuperset(part.collectives)]
        whole = self._propose(chain) if parts and taken.isdisjoint(chain.collectives) else None
        if whole is not None and (whole.replacements or len(parts) == 1):
            return [whole]
        return [
            self._propose(part)
            if whole is None or not part.reduces
            else Proposal(part, replace(whole.outcome, planned_bytes=None, plans=()))
            for part in parts
        ]

    @cached_property
    def apart(self) -> tuple[Chain, ...]:
        """The chains of the module, each sum as one of its own."""
        return tuple(list_chains(self.flow, self.maps, self.collectives))

    @cached_property
    def peak_bytes(self) -> int:
        """What a device holds at the peak of the program, in the order of its text."""
        return add_up_program(self.flow).peak_bytes

    def smaller(self, large: Proposal) -> Proposal | None:
        """The next form of a proposal that needs more memory than its chain, which needs less; None if there is none.

        Forms are the same plan in parts, and plans under budgets. By falling peaks as planned, they are compiled until
        one needs less, so that the first one that fits has the fewest launches.
        """
        moves = tuple(one for one in large.replacements if isinstance(one, Replacement))
        if not large.excess_bytes or len(moves) < len(large.replacements):
            return None
        planned = [(piece, piece.move) for one in moves for piece in one.pieces if piece.move is not None]
        pairs = zip(planned, large.outcome.plans, strict=True)
        forms = [self._list_forms(*each, plan, large.allowed_bytes) for each, plan in pairs]
        for at in range(max(map(len, forms), default=0)):
            plans = tuple(each[min(at, len(each) - 1)] for each in forms if each)
            if len(plans) < len(forms):
                break  # One of the plans has no smaller form.
            try:
                one = self._accept(self._join_plans(large.chain, moves, plans), lambda: large.allowed_bytes)
            except (Unfit, ReshardError):
                continue
            if one.excess_bytes < large.excess_bytes:
                return one
        return None

    def _list_forms(self, one: Replacement, move: InferredMove, plan: Plan, budget: int) -> list[Plan]:
        """The forms of a plan that need less memory than itself, the largest first."""
        forms = list(self.cut(self._plan_move(one, move, None)))
        for most in (budget, 0):
            try:
                forms.append(self._plan_move(one, move, most))
            except BudgetError as error:
                with suppress(ReshardError):
                    forms.append(self._plan_move(one, move, error.smallest))
        able = {form for form in forms if form.peak_bytes < plan.peak_bytes and form.launches <= _MOST_LAUNCHES}
        return sorted(able, key=lambda form: (-form.peak_bytes, form.launches))

    def _share_sources(self, taken: Container[Collective]) -> Iterator[Chain]:
        """The chains that shift the same array, those of each array as one: they may exchange its parts together."""
        alike: dict[tuple[Scope, int], list[Chain]] = {}
        # Chains are listed anew for this; most modules have no permute, or only one.
        if sum(one.kind == "permute" for one in self.collectives) < 2:
            return
        for chain in self.apart:
            if not chain.reduces and any(one.kind == "permute" for one in chain.collectives):
                numbers = {self.reader.numbering.of(leaf) for leaf in chain.leaves}
                if len(numbers) == 1 and not any(one in taken for one in chain.collectives):
                    alike.setdefault((chain.region, numbers.pop()), []).append(chain)
        for chains in alike.values():
            if len(chains) > 1:
                yield join_chains(chains, self.collectives)

    def _propose_shifts(self, chain: Chain) -> Proposal:
        """The proposal that makes all results of a chain by one exchange between neighbours; raises `Unfit`.

        There are several. To make what is used saves the larger arrays that XLA may have on the way, but a result that
        XLA puts together inside the fusion that uses it becomes an array. To make what arrives leaves all that is done
        with it locally as it is, and its bits.
        """

        def allowed() -> int:
            return self.liveness.of(chain).peak_bytes

        found: list[Proposal] = []
        why = ""
        for form in SHIFT_FORMS:
            try:
                found.append(self._plan_chain(chain, self.reader.shifts(chain, form), None))
            except Unfit as error:
                why = why or str(error)
        if not found:
            raise NoLayouts(why)

        def rank(one: Proposal) -> tuple[int, int]:
            # Where plans must not need more memory than their chains, what arrives comes first.
            peak = add_up_program(self.flow, planned=[one.planned_chain]).peak_bytes if self.room == Room.PROGRAM else 0
            return one.outcome.planned_bytes or 0, peak

        for one in sorted(found, key=rank):
            try:
                one = self._accept(one, allowed)
                peak = one.allowed_bytes + one.excess_bytes
                if one.excess_bytes and (self.room == Room.CHAIN or peak > self.peak_bytes):
                    raise Unfit(explain_excess(one))
                return one
            except (Unfit, ReshardError) as error:
                why = str(error).splitlines()[0]
        raise Unfit(why)

    def _propose(self, chain: Chain) -> Proposal:
        """The proposal that replaces a chain, or one that leaves it and says why."""

        def allowed() -> int:
            # The account of a chain gives each sum a buffer of its own, though the compiler may sum in place.
            sums = [one for one in chain.collectives if one.kind in REDUCTIONS and self.flow.module.sums_in_place]
            return self.liveness.of(chain).peak_bytes - sum(array.nbytes for one in sums for array in one.results)

        try:
            if is_needed(chain, self.flow):
                raise Unfit(NEEDED)
            budget = allowed() - 1 if self.options.prefer == "memory" else None
            one = self._accept(self._plan_chain(chain, self.reader.replacements(chain), budget), allowed)
            while one.excess_bytes:  # ends: each form needs less memory than the one before
                fits = self.room > Room.CHAIN and one.allowed_bytes + one.excess_bytes <= self.peak_bytes
                smaller = None if fits and self.room == Room.PROGRAM else self.smaller(one)
                if smaller is None and not fits:
                    raise Unfit(explain_excess(one))
                if smaller is None:
                    break
                one = smaller
            return one
        except NoLayouts as error:
            try:
                return self._propose_shifts(chain)
            except (Unfit, ReshardError) as other:
                why = str(error if isinstance(other, NoLayouts) else other)
                return Proposal(chain, PassOutcome(why=why.splitlines()[0]))
        except (Unfit, ReshardError) as error:
            saved = error.saved_bytes if isinstance(error, Reordered) else 0
            return Proposal(chain, PassOutcome(why=str(error).splitlines()[0], reorder_bytes=saved))

    def _propose_op(self, chain: Chain, one: OpReplacement) -> Proposal:
        """The operation that a chain brings whole rows for, run on each device's rows; raises `Unfit`."""
        choices = [
            (tuple(self._plan(*pair) for pair in ((moves.source, moves.rows), *moves.outputs)), moves)
            for moves in one.choices
        ]
        plans, moves = min(choices, key=lambda choice: sum(plan.received_bytes for plan in choice[0]))
        planned = sum(plan.received_bytes for plan in plans)
        # The operation's own arrays are whole, and live before its chain begins or after it has ended.
        arrays = sum(array.nbytes for array in (*one.op.operands, *one.op.results))
        allowed = max(self.liveness.of(chain).peak_bytes, arrays)
        outcome = PassOutcome(planned, plans, op=one.op.kind if one.op.kind != "ffi" else one.op.target)
        proposal = self._accept(Proposal(chain, outcome, (one,), moves=moves), lambda: allowed)
        if proposal.excess_bytes:
            raise Unfit(explain_excess(proposal))
        return proposal

    def _plan_chain(self, chain: Chain, replacements: tuple[Replacement, ...], budget: int | None) -> Proposal:
        """The plans for a chain under a budget."""
        pieces = [piece for one in replacements for piece in one.pieces]
        plans = tuple(self._plan_move(one, one.move, budget) for one in pieces if one.move is not None)
        return self._join_plans(chain, replacements, plans)

    def _join_plans(self, chain: Chain, replacements: tuple[Replacement, ...], plans: tuple[Plan, ...]) -> Proposal:
        """What these plans make of a chain, one for each move, with its shifts."""
        one = Proposal(chain, PassOutcome(None, plans), replacements)
        planned = sum(plan.received_bytes for plan in plans)
        planned += sum(exchange.received_bytes(dtype) for exchange, dtype in one.exchanges)
        permutes = sum(len(exchange.launches) for exchange, _ in one.exchanges)
        scattered = count_scattered_bytes(chain, self.flow, self.maps) if self.options.platform == "gpu" else 0
        return replace(one, outcome=PassOutcome(planned, plans, permutes=permutes), scattered_bytes=scattered)

    def _plan_move(self, one: Replacement, move: InferredMove, budget: int | None) -> Plan:
        """The plan for a move; sums of floats one after another are added up in the same rounds, unless any will do."""
        source, target = move.source, move.target
        if len(one.sums) > 1 and not self.options.any_order and not is_exact(one.befores[0].dtype):
            digits = [summed_digits(self.maps, each) for each in one.sums]
            rounds = [tuple(axis for digit in each for axis in source.mesh.sub_axes(*digit)) for each in digits]
            wanted = self.options.plan
            with suppress(ReshardError):  # Else a plan in one round says what another order would save.
                plan = plan_rounds(source, target, rounds, PlanOptions(wanted.budget if budget is None else budget))
                return plan if wanted.network is None else time_plan(plan, wanted.network.links(source.mesh))
        return self._plan(source, target, budget)

    def _plan(self, source: Layout, target: Layout, budget: int | None = None) -> Plan:
        """The plan that is fastest on the network, if time is preferred; else one of the fewest bytes."""
        wanted = self.options.plan
        options = PlanOptions(wanted.budget if budget is None else budget, wanted.network)
        fastest = find_plan(source, target, options)
        if wanted.network is None:
            return fastest
        # Idle axes would carry parts of the sums of other devices, whose summands need not equal a device's own.
        others_summands = bool(source.partial and fastest.idle_axes)
        if self.options.prefer == "time" and not others_summands:
            return fastest
        fewest = find_plan(source, target, options._replace(network=None))
        if fastest.received_bytes <= fewest.received_bytes and not others_summands:
            return fastest
        return time_plan(fewest, wanted.network.links(source.mesh))

    def _accept(self, one: Proposal, allowed_bytes: Callable[[], int]) -> Proposal:
        """The proposal with the memory that it needs; raises `Unfit` if it is not better than its chain.

        What the chain is allowed to need is asked for last: most chains receive no more than is needed.
        """
        planned, launches = one.outcome.planned_bytes or 0, one.launches
        if one.outcome.permutes > launches and not self.options.launch_cost:
            raise Unfit(f"the plan would need {one.outcome.permutes} permutes to receive {planned} B")
        self._check_bytes(one, planned, "XLA makes a reduce-scatter of it by itself" if one.scattered_bytes else NEEDED)
        if why := explain_reordered(self.maps, one, self.options):
            raise Reordered(why, one.received_bytes - planned)
        if why := explain_other_bits(self.flow, one, self.options):
            raise Unfit(why)
        cost = self.measure(one)
        received = f"the plan would receive {cost.received_bytes} B as compiled here, and not {planned} B"
        self._check_bytes(one, cost.received_bytes, received)
        # To start more collectives may take longer than to receive the bytes that they save. An operation on rows saves
        # its own work as well, on all devices but one.
        more, saved = cost.launches - launches, one.received_bytes - cost.received_bytes
        if saved and one.moves is None and saved < more * self.options.launch_cost:
            raise Unfit(f"the plan would save {saved} B with {more} more collectives")
        allowed = allowed_bytes()
        if self.options.prefer == "memory" and cost.peak_bytes >= allowed:
            raise Unfit(f"the plan would need {cost.peak_bytes} B at once, no less than XLA's {allowed} B")
        outcome = replace(one.outcome, planned_bytes=cost.received_bytes)
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
        if received + launches * launch >= before + one.launches * launch:
            raise Unfit(f"the plan would take no less time, in {launches} launches")


# What would change bits. Data that is moved keeps its own; what is computed from it, and sums of it, may not.


_EXACT_ALONE = frozenset((
    "abs", "add", "ceil", "clamp", "compare", "divide", "floor", "is-finite", "maximum", "minimum", "multiply",
    "negate", "remainder", "round-nearest-afz", "round-nearest-even", "sign", "sqrt", "subtract", "and", "or", "xor",
    "not", "real", "imag", "complex", "bitcast-convert", "convert", "constant", "iota", "map", "parameter", "tuple",
    "get-tuple-element", "fusion", "call", "partition-id", "replica-id", "concatenate", "gather",
)) | (FRAGMENT_MOVES - {"reduce"})  # fmt: skip
"""Operations on floats that every machine code rounds alike: once, as IEEE 754 says, or not at all."""


def find_free_rounding(flow: Flow, scope: Scope) -> str:
    """The instruction of a fusion whose result may be rounded in another way in other machine code; empty if none.

    A product that is added to something is rounded or not, as the vectorizer likes: LLVM contracts both to one
    operation in one loop and not in the next. So do the polynomials of `tanh`, and sums of many take any order.
    """
    products: set[str] = set()
    for one in scope.computation.instructions:
        kinds = {array.dtype[0] for array in one.arrays} & {"f", "b", "c"}
        inner = flow.inner(scope, one)
        if inner is not None and (inside := find_free_rounding(flow, inner)):
            return inside
        if not kinds:
            continue
        if one.opcode not in _EXACT_ALONE or ("c" in kinds and one.opcode in ("multiply", "divide", "abs", "sign")):
            return one.name
        if one.opcode == "multiply" or not products.isdisjoint(one.operands):
            if one.opcode in ("add", "subtract"):
                return one.name
            products.add(one.name)
    return ""


class Reordered(Unfit):
    """Why a plan would add up floats in another order, and the bytes that it would save."""

    def __init__(self, why: str, saved_bytes: int) -> None:
        super().__init__(why)
        self.saved_bytes = saved_bytes


def explain_reordered(maps: IndexMaps, one: Proposal, options: ProposalOptions) -> str:
    """Why a proposal would add up floats in another order than its chain; empty if it does not, or if any will do."""
    for each, plan in zip(one.pieces, one.outcome.plans, strict=False):  # shifts come last, without plans
        if options.any_order or not isinstance(each, Replacement) or not each.sums or is_exact(each.befores[0].dtype):
            continue
        # Two summands have one order.
        summands = [math.prod(radix for _, radix in summed_digits(maps, each_sum)) for each_sum in each.sums]
        if summands == [2]:
            continue
        # The same rounds, one after another, each among the same devices in the same order.
        instructions = [step.each if isinstance(step, InParts) else step for step in lower_plan(plan).instructions]
        rounds = [set(step.groups) for step in instructions if isinstance(step, ReduceScatter | AllReduce)]
        if rounds != [set(map(tuple, device_groups(maps, each_sum))) for each_sum in each.sums]:
            return "its elements would be added up in another order"
        scatters = any(step.kind == "reduce_scatter" for step in plan.steps)
        if options.platform == "tpu" and plan.source.mesh.size in summands and scatters:
            return "a TPU would add up the plan's sum among all devices in two levels, in another order"
        if options.platform == "cpu" and options.processes > 1 and max(summands) > 2:
            return "another algorithm runs between processes, so the plan's sum would be added up in another order"
    return ""


def explain_other_bits(flow: Flow, one: Proposal, options: ProposalOptions) -> str:
    """Why a proposal might give other bits than its chain on these devices; empty if it gives the same."""
    if options.same_bits and options.platform != "cpu":
        return "it is not known what keeps bits here: what is around a move may be fused anew"
    if options.same_bits and any(
        isinstance(each, OpReplacement) and each.op.kind == "fft" for each in one.replacements
    ):
        return "an FFT of fewer rows at once may be rounded in another way"
    # A value that only a fusion has is computed by one of its own, which is other machine code.
    exposed = [leaf.scope for each in one.replacements for name, leaf in zip(each.sources, each.leaves, strict=True)
               if options.same_bits and "/" in name]  # fmt: skip
    if free := next(filter(None, (find_free_rounding(flow, scope) for scope in exposed)), ""):
        return f"{free} would be computed in a fusion of its own, and may be rounded in another way"
    # XLA:CPU has fused by now: what a fusion computes of its slice is other machine code where it takes a tile.
    for value in one.values if options.same_bits else ():
        scope = value.scope
        while scope.opened and scope.caller is not None:  # ends: scopes are nested in their callers
            is_all = scope.computation.root is not None and scope.computation.root.name == value.name
            if not is_all and (free := find_free_rounding(flow, scope)):
                return f"{free} is computed in the fusion that slices, and may be rounded in another way"
            value = HloValue(scope.caller.scope, scope.caller.instruction.name)
            scope = value.scope
    return ""


def count_scattered_bytes(chain: Chain, flow: Flow, maps: IndexMaps) -> int:
    """The bytes that XLA:GPU saves in a chain by itself, after the pass: it makes a reduce-scatter of an all-reduce
    that is used once, by a slice along one dim of which each device of a group takes the part at its own place.
    """
    saved = 0
    by_name = chain.region.computation.by_name
    for one in chain.collectives:
        made, users = by_name.get(one.name), chain.region.computation.users.get(one.name, ())
        if made is None or made.opcode != "all-reduce" or len(one.results) != 1:
            continue
        if len(users) != 1 or users[0].opcode != "dynamic-slice" or users[0].operands.count(one.name) != 1:
            continue
        whole, part = one.results[0].dims, users[0].arrays[0].dims
        cut = [dim for dim, sizes in enumerate(zip(whole, part, strict=True)) if sizes[0] != sizes[1]]
        try:
            members, ranks = group_tables(maps, HloValue(chain.region, one.name))
            if len(cut) != 1 or whole[cut[0]] != part[cut[0]] * members.shape[1]:
                continue
            offset = HloValue(chain.region, users[0].operands[1 + cut[0]])
            numbers = maps.numbers(HloValue(chain.region, users[0].name), offset)
        except Untraceable:
            continue
        if (numbers.reshape(-1) == ranks * part[cut[0]]).all():
            saved += one.received_bytes // 2
    return saved


def explain_unmeasured(
    places: Iterable[Place], options: ProposalOptions, estimates: Callable[[], tuple[int, int]]
) -> str | None:
    """Why the peak of a rewritten program need not be measured; None if it must be.

    The `estimates` are the peaks before and after, by the order of the module's text, in bytes. The reason is empty if
    the program is surely better. Otherwise it is left as it was.
    """
    before, after = estimates()
    if after < _SURELY * before:
        return ""
    received = saved = 0
    for place in places:
        received, saved = received + place.total_bytes, saved + place.saved_bytes
    # On CPU the program is compiled without its machine code, which takes a fraction of the time.
    least = 0 if options.platform == "cpu" else max(options.launch_cost, int(_WORTH * received))
    if saved >= least:
        return None
    return f"{saved} B saved in all are not worth compiling the program for its peak"


class ProgramCost(NamedTuple):
    """The peak memory of a whole compiled program and the bytes that it receives, on one device."""

    peak_bytes: int
    received_bytes: int


def explain_no_better(before: ProgramCost, after: ProgramCost, options: ProposalOptions) -> str:
    """Why a rewritten program is not taken, from what the compiler makes of both; empty if it is better.

    It may make the same of a part of both: XLA makes a reduce-scatter of a sliced sum by itself, late.

    >>> explain_no_better(ProgramCost(1000, 64), ProgramCost(995, 64), ProposalOptions())
    'as compiled it would receive as many bytes, and need 995 B at its peak instead of 1000 B'
    >>> explain_no_better(ProgramCost(1000, 64), ProgramCost(900, 64), ProposalOptions())
    ''
    >>> explain_no_better(ProgramCost(1000, 64), ProgramCost(1004, 32), ProposalOptions())
    ''
    """
    peak, best = after.peak_bytes, before.peak_bytes
    if peak > best * (1 + (_TABLES if options.platform == "cpu" else 0)):
        return f"with it the program would need {peak} B at its peak as compiled here, and XLA's needs {best} B"
    if options.prefer == "time" or after.received_bytes < before.received_bytes or peak <= (1 - _GAIN) * best:
        return ""
    if after.received_bytes > before.received_bytes:
        return f"as compiled it would receive {after.received_bytes} B, and XLA's receives {before.received_bytes} B"
    return f"as compiled it would receive as many bytes, and need {peak} B at its peak instead of {best} B"


def explain_excess(one: Proposal) -> str:
    """Why plans that need too much memory are not taken."""
    peak = one.allowed_bytes + one.excess_bytes + ALIGNMENT
    return f"the plan would need {peak} B at once, and XLA needs {one.allowed_bytes} B"


# What a proposal costs, by the figures of its plans alone; the pass measures it by compiling.
#
# A compiler may send more bytes than the plan has. XLA:CPU is known to: it has no collectives of 16-bit floats, and
# sends 32 bits for each. A program is assumed to come from such a compiler if none of its own collectives sends 16-bit
# floats.


_SHORT = frozenset({"bf16", "f16", "bfloat16", "float16"})  # as HLO names them, and as layouts do


def predict_costs(collectives: Sequence[Collective]) -> Measure:
    """The costs of proposals for a program with these collectives."""
    is_wide = {array.dtype for one in collectives for array in one.results}.isdisjoint(_SHORT)

    def predict(one: Proposal) -> ProposalCost:
        received = launches = 0
        for plan in one.outcome.plans:
            received += plan.received_bytes * (2 if is_wide and plan.source.dtype in _SHORT else 1)
            launches += plan.launches
        received += sum(exchange.received_bytes(dtype) for exchange, dtype in one.exchanges)
        return ProposalCost(received, one.peak_bytes, launches + one.outcome.permutes)

    return predict


def list_proposed_moves(one: Proposal) -> tuple[ArrayMove, ...]:
    """The moves of a proposal's plans and shifts, or of an operation's rows: there and back."""

    def describe(before: Array | None, after: Array | None, plan: Plan) -> ArrayMove:
        # A tile that the program does not have is that of the plan's layout.
        tile = after or Array(before.dtype if before else plan.target.dtype, plan.target.tile_shape)
        source, target = plan.source, plan.target
        needed = lower_bound(source, target)
        return ArrayMove(before, tile, needed, True, source, target, holds_whole_array(source), plan)

    moves: list[ArrayMove] = []
    plans = iter(one.outcome.plans)
    for each in one.pieces:
        if isinstance(each, OpReplacement):
            gather = next(plans)
            moves += [describe(each.befores[0], None, gather)] if gather.source != gather.target else []
            moves += [describe(None, output.after, next(plans)) for output in each.outputs]
        elif each.move is not None:
            moves.append(describe(each.befores[0], each.after, next(plans)))
        elif each.shift is not None:
            exchange = plan_exchange((each.shift,), each.befores[0].dims)
            needed = 0 if exchange is None else exchange.received_bytes(each.dtype)
            moves.append(ArrayMove(each.befores[0], each.after, needed, False))
    return tuple(moves)
