"""The pass over a compiled module: chains of collectives that receive too much are replaced by plans.

    find       the doctor's data flow: chains, where their data comes from, and which values they yield
    plan       the cheapest plan for each; kept if it receives fewer bytes and needs no more memory
    compile    each plan to a fragment, for the same devices, dtype and memory layouts
    splice     fragments in, dead instructions out
    check      the module's structure, and that every element comes from where it came before

Whatever fails, that chain stays as it was, and its outcome says why.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from reshard import hlo
from reshard.doctor.batch_ops import OpReplacement
from reshard.doctor.chain_reader import Replacement, Unfit
from reshard.doctor.dataflow.flow import Flow
from reshard.doctor.dataflow.replicas import Replicas
from reshard.doctor.equivalence import Spliced, Traced, check_equivalent, check_same_rows
from reshard.doctor.examination import find_mesh
from reshard.doctor.live_bytes import add_up_program
from reshard.doctor.places import Place
from reshard.doctor.proposals import (
    ALIGNMENT,
    ProgramCost,
    Proposal,
    ProposalCost,
    ProposalOptions,
    Proposals,
    Room,
    explain_excess,
    explain_no_better,
    explain_unmeasured,
)
from reshard.errors import ReshardError, SpliceError
from reshard.hlo import Module, integrity
from reshard.hlo.combined import open_sums
from reshard.hlo.proto import ModuleProto
from reshard.hlo.splice import Exposed, Splice, Splicer, Use
from reshard.jax.xla_pass.fragments import (
    FragmentKey,
    Fragments,
    JoinKey,
    Key,
    MoveKey,
    OpFragmentKey,
    OutputKey,
    ShiftKey,
    parameter_shardings,
    read_module,
)
from reshard.jax.xla_pass.program_peaks import ProgramPeaks
from reshard.runtime.xla import in_parts

_ROUNDS = 4
_LEAST, _PARTS = 64 << 10, (8, 16, 32)
"""Steps from so many bytes on are done in so many parts where memory is short."""
_TRIES, _FEWER_TRIES, _LARGE = 6, 2, 1 << 17
"""Compilations that look for the chains that raise a peak; each takes seconds on TPU and GPU, and in large modules."""
_COLLECTIVES = (b"all-gather", b"all-to-all", b"all-reduce", b"collective-permute", b"reduce-scatter")


class Improved(NamedTuple):
    """The name of a module, the rewritten one, None if nothing changed, and the place of each chain.

    `flows` are the data flows of both, if it was rewritten. `has_excess` is whether a plan needs more memory than its
    chain, or shifts results that there may be a smaller plan for.
    """

    name: str
    module: bytes | None
    places: tuple[Place, ...]
    flows: tuple[Flow, Flow] | None = None
    has_excess: bool = False

    def leave(self, why: str) -> Improved:
        """The same with the module as it was, because of `why`."""
        return Improved(self.name, None, tuple(one if one.why_left else one.left(why) for one in self.places))

    def measure(self, peaks: ProgramPeaks, options: ProposalOptions) -> tuple[ProgramCost, ProgramCost]:
        """What both programs need, as the compiler says.

        On CPU any module that is given back may need more, as it is put in another order. So where a rewritten one
        receives less and needs more, it is compared with the program's own module given back, if that needs more too.
        """
        before, after = (None, None) if self.flows is None else (flow.module for flow in self.flows)
        plain, ours = peaks.of(None, before), peaks.of(self.module, after)
        is_less = ours.received_bytes < plain.received_bytes and options.prefer != "memory"
        if options.platform == "cpu" and is_less and explain_no_better(plain, ours, options):
            peak = max(plain.peak_bytes, peaks.of(peaks.module, before).peak_bytes)
            plain = plain._replace(peak_bytes=peak)
        return plain, ours

    def estimate_peaks(self) -> tuple[int, int]:
        """The peaks of both programs, by the order of the modules' text."""
        if self.flows is None:
            return 0, 0
        before, after = (add_up_program(flow).peak_bytes for flow in self.flows)
        return before, after


def has_collectives(module: bytes) -> bool:
    """Whether a serialized module has any collective; a search for their names, without decoding.

    To count is up to ten times faster than `in`, which is slow where much of a long text looks like a name.
    """
    return any(module.count(name) for name in _COLLECTIVES)


def improve_module(
    module: bytes, fragments: Fragments, options: ProposalOptions, peaks: ProgramPeaks | None = None
) -> Improved:
    """Replaces what receives too much in a serialized HloModuleProto.

    Where an estimate does not show that the program's peak is lower than before, `peaks` says whether it is better, and
    chains are left out until it is no higher. Without `peaks`, plans that need more memory than their chains are left
    out, but on CPU, where the estimate decides.
    """
    options = options._replace(platform=fragments.platform, processes=fragments.processes)
    room = Room.PROGRAM if options.platform == "cpu" or peaks is not None else Room.CHAIN
    _first_read.reading = None
    try:
        improved = _improve_in_rounds(module, fragments, options, room)
        if improved.module is None or peaks is None:
            return improved
        why = explain_unmeasured(improved.places, options, improved.estimate_peaks)
        if why is None:
            try:
                before, after = improved.measure(peaks, options)
                why = explain_no_better(before, after, options)
                if why and after.peak_bytes > before.peak_bytes:
                    return _leave_out_chains(module, fragments, options, peaks, improved, why)
            except SpliceError as error:
                why = str(error)
        return improved.leave(why) if why else improved
    finally:
        _first_read.reading = None


def _leave_out_chains(
    module: bytes, fragments: Fragments, options: ProposalOptions, peaks: ProgramPeaks, whole: Improved, why: str
) -> Improved:
    """As many of the replaced chains as leave the program's peak where it is, by halves; the others are left: `why`.

    Each try is a compilation, so there are few of them: what has not been tried by then is left as well.
    """
    # Plans that need more than their chains may be what raises it: in the forms that need least, and without those.
    tried = [whole.module]
    for room in (Room.LEAST, Room.CHAIN) if whole.has_excess else ():
        best = _improve_in_rounds(module, fragments, options, room)
        if best.module is not None and best.module not in tried:
            tried.append(best.module)
            if not explain_no_better(*best.measure(peaks, options), options):
                return best
    replaced = [place for place in whole.places if place.replaced]
    replaced.sort(key=lambda place: (place.planned_bytes or 0) - place.received_bytes)
    names = [place.collectives[0].name for place in replaced]
    best, kept = whole.leave(why), set[str]()
    # Counted, and not timed: all processes that compile the program must come to the same module.
    is_quick = options.platform == "cpu" and len(module) < _LARGE
    untried, tries = _halve(names), _TRIES if is_quick else _FEWER_TRIES
    while untried and tries:
        group, tries = untried.pop(0), tries - 1
        left = {name: why for name in names if name not in kept and name not in group}
        one = _improve_in_rounds(module, fragments, options, Room.LEAST, left)
        if one.module is not None and not explain_no_better(*one.measure(peaks, options), options):
            best, kept = one, kept.union(group)
        else:
            untried[:0] = _halve(group)
    return best


def _halve(names: list[str]) -> list[list[str]]:
    half = (len(names) + 1) // 2
    return [names[:half], names[half:]] if len(names) > 1 else []


def _improve_in_rounds(
    module: bytes,
    fragments: Fragments,
    options: ProposalOptions,
    room: Room,
    left: Mapping[str, str] = MappingProxyType({}),
) -> Improved:
    """Replaces chains in several rounds, since some depend on others; not those `left`, by their first collectives.

    One that could not be spliced in beside others is tried once more where those have been. Plans that need more memory
    than their chains have the `room`.
    """
    places: list[Place] = []
    changed, has_excess, name = False, False, ""
    flows: list[Flow] = []
    for _ in range(_ROUNDS):
        one = _Round(module, fragments, options, room, left)
        better, name = one.run(), one.module.name
        if changed:  # What this round replaced is not left any more.
            replaced = [place for place in one.places if place.replaced]
            gone = {collective.name for place in replaced for collective in place.collectives}
            names = [{collective.name for collective in place.collectives} for place in places]
            stay = [place for place, own in zip(places, names, strict=True) if place.replaced or not own <= gone]
            places = [*stay, *replaced]
        else:
            places = one.places
        if better is not None:
            module, changed, has_excess = better, True, has_excess or one.has_excess
            flows += [one.traced.flow, *one.rewritten]
        if better is None or not one.has_failed:
            break
    both = (flows[0], flows[-1]) if flows else None
    return Improved(name, module if changed else None, tuple(places), both, has_excess)


class _Failure(NamedTuple):
    """A candidate that cannot take its chain's place, and why."""

    candidate: Proposal
    why: str


def _open_module(module: bytes, devices: int, platform: str) -> Module:
    """What a serialized module says, combined sums opened, for these devices."""
    in_place = platform != "cpu"
    return replace(open_sums(read_module(module)), num_partitions=devices, replica_count=1, sums_in_place=in_place)


class _Reading:
    """A module as it was read, and what is proposed for it: the same in every try to leave chains out."""

    def __init__(self, module: bytes, devices: int, platform: str) -> None:
        self.data = module
        self.proto = ModuleProto.decode(module)  # to be read; what is changed is a fresh one
        self.proto.keep()
        self.module = _open_module(module, devices, platform)
        self.traced = Traced(self.module, devices)
        self.collectives = hlo.collectives(self.module, every_branch=True)
        self.proposed: dict[Room, tuple[Proposals, tuple[Proposal, ...]]] = {}


_first_read = threading.local()
"""The `reading` of the module that this thread improves, which each try begins with."""


class _Round:
    """One search through a module."""

    def __init__(
        self, module: bytes, fragments: Fragments, options: ProposalOptions, room: Room, left: Mapping[str, str]
    ) -> None:
        self.data, self.left, self.options = module, left, options
        self.fragments = fragments
        self.devices = len(fragments.devices)
        reading: _Reading | None = getattr(_first_read, "reading", None)
        if reading is None or reading.data is not module:
            before, reading = reading, _Reading(module, self.devices, options.platform)
            _first_read.reading = before or reading
        self.proto, self.module, self.traced = reading.proto, reading.module, reading.traced
        self.collectives = reading.collectives
        # TPUs and GPUs move in loops, in buffers of a part each.
        parts = () if self.fragments.platform == "cpu" else _PARTS
        if room not in reading.proposed:
            proposals = Proposals(
                self.traced.flow, self.traced.maps, self.traced.numbering, self.collectives,
                find_mesh(self.collectives, self.devices), options, self._measure, room,
                lambda plan: [in_parts(plan, _LEAST, count) for count in parts],
            )  # fmt: skip
            reading.proposed[room] = proposals, tuple(proposals)
        self.proposals, self.proposed = reading.proposed[room]
        self.places: list[Place] = []
        self.has_failed = self.has_excess = False
        self.rewritten: list[Flow] = []

    def run(self) -> bytes | None:
        """The better module, None if there is none; sets the places."""
        proposed = list(self.proposed)
        for at, one in enumerate(proposed):
            if one.replacements and (why := self.left.get(one.chain.collectives[0].name)):
                proposed[at] = one.left(why)
        self.places = [one.place for one in proposed if not one.replacements]
        # In the order of the program: what is replaced first may be what another chain takes.
        candidates = [one for one in proposed if one.replacements]
        candidates.sort(key=lambda one: self.collectives.index(one.chain.collectives[0]))
        while candidates:  # ends: each failure takes a candidate away, or makes it need less memory, once
            failures, data = self._splice_all(candidates)
            if not failures:
                self.has_excess = any(candidate.excess_bytes or candidate.shifts for candidate in candidates)
                self.places += [candidate.place for candidate in candidates]
                return data
            self.has_failed = True
            for failed, why in failures:
                candidates.remove(failed)
                smaller = self.proposals.smaller(failed) if why == explain_excess(failed) else None
                if smaller is None:
                    self.places.append(failed.left(why).place)
                else:
                    candidates.append(smaller)
        return None

    def _measure(self, one: Proposal) -> ProposalCost:
        """The cost of what is proposed, as the compiler spells it."""
        pieces = [self.fragments.get(key) for key, *_ in asked_fragments(one)]
        return ProposalCost(
            sum(piece.received_bytes for piece in pieces),
            max(piece.peak_bytes for piece in pieces),
            sum(piece.launches for piece in pieces),
        )

    def _splice_all(self, candidates: list[Proposal]) -> tuple[list[_Failure], bytes]:
        """The candidates that cannot be spliced in and why, and the module with all of them if there are none.

        Of those that the splicer itself refuses, only the first is known: the module is half changed then.
        """
        module = self.proto.fresh()
        splicer = Splicer(module)
        changes: list[integrity.DoneSplice] = []
        exposed: dict[Exposed, str] = {}
        regions: dict[str, dict[str, str]] = {}
        current = candidates[0]
        try:
            for current in candidates:
                region = current.chain.region.computation.name
                stand_ins = regions.setdefault(region, {})
                # What takes a chain's place has the name and the line of its first collective.
                metadata = self.proto.computation_named(region).named(current.chain.collectives[0].name).metadata
                for each in (Exposed.read(region, source) for source in current.sources):
                    if each is not None and each not in exposed:
                        exposed[each] = stand_ins[each.source] = splicer.expose_value(each)
                for key, sources, uses in asked_fragments(current):
                    placed = tuple(stand_ins.get(source, source) for source in sources)
                    change = Splice(region, placed, uses, self.fragments.get(key).module, metadata)
                    changes.append(integrity.DoneSplice(change, splicer.splice(change)))
                    stand_ins.update(changes[-1].linked.stand_ins)
            splicer.finish()
            data = module.encode()
            rewritten = ModuleProto.decode(data, like=self.proto)
            integrity.check_splices(self.proto, rewritten, changes, exposed)
            opened = _open_module(data, self.devices, self.options.platform)
            # The loops of plans in parts are followed turn by turn; in memory they are regions, as all loops are.
            loops = any(b"while" in change.splice.fragment for change in changes)
            known = {one.name for one in self.proto.computations} if loops else set[str]()
            unrolled = {one.name for one in rewritten.computations if one.name not in known} if loops else set[str]()
            after = Traced(opened, self.devices, spliced=True, unrolled=unrolled)
            memory = Flow(opened) if loops else after.flow
            replicas = Replicas(self.traced.maps, lambda: parameter_shardings(self.data))
            failures: list[_Failure] = []
            for candidate in candidates:
                region = candidate.chain.region.computation.name
                spliced = Spliced(
                    self.traced, after, region, regions[region], self.fragments.proofs, self.options.any_order
                )
                try:  # Every element must come from where it came before.
                    for one in candidate.replacements:
                        if isinstance(one, OpReplacement):
                            check_same_rows(spliced, one, replicas)
                        else:
                            check_equivalent(spliced, one, replicas)
                except (Unfit, ReshardError) as error:
                    failures.append(_Failure(candidate, str(error).splitlines()[0]))
            if failures:
                return failures, b""
            current = max(candidates, key=lambda candidate: candidate.excess_bytes)
            # Plans that need more memory than their chains must not raise the peak of the program.
            if current.excess_bytes:
                peak = add_up_program(memory).peak_bytes
                if peak > self.proposals.peak_bytes + ALIGNMENT:
                    raise Unfit(explain_excess(current))
            self.rewritten = [memory]
        except (Unfit, ReshardError) as error:
            return [_Failure(current, str(error).splitlines()[0])], b""
        return [], data


# The fragments that a proposal asks for: its plans, shifts and operations, with what each is used for.


Asked = tuple[Key, tuple[str, ...], tuple[Use, ...]]
"""A fragment, the sources that it takes, and the uses of what it yields."""


def asked_fragments(one: Proposal) -> list[Asked]:
    """The fragments that a proposal asks for: all shifts of a dtype are one."""
    keys: list[Asked] = []
    if one.moves is not None:  # An operation on rows, between its moves.
        for each in one.replacements:
            if not isinstance(each, OpReplacement):
                continue
            gather, *moves = one.outcome.plans
            results = zip(each.outputs, moves, strict=True)
            outputs = tuple(OutputKey(result.number, plan, result.order, result.after) for result, plan in results)
            uses = tuple(replace(use, output=at) for at, output in enumerate(each.outputs) for use in output.uses)
            keys.append(
                (OpFragmentKey(each.op, each.indices, gather, each.befores, each.places, outputs), each.sources, uses)
            )
        return keys
    plans = iter(one.outcome.plans)
    for each in one.replacements:
        if isinstance(each, Replacement) and each.move is not None:
            move = MoveKey(next(plans), each.after, *each.move[3:])
            keys.append((FragmentKey(each.befores, (move,)), each.sources, each.uses))
        if isinstance(each, Replacement) and each.parts:
            moves = tuple(
                MoveKey(next(plans), part.after, *part.move[3:], each.sources.index(part.sources[0]))
                for part in each.parts
                if part.move is not None
            )
            joins = (JoinKey(each.after, each.cuts, 0),)
            keys.append((FragmentKey(each.befores, moves, joins), each.sources, each.uses))
    for dtype, alike in one.shifts.items():
        afters = tuple(each.after for each, _ in alike)
        key = ShiftKey(tuple(shift for _, shift in alike), alike[0][0].befores[:1], afters, dtype)
        uses = tuple(replace(use, output=at) for at, (each, _) in enumerate(alike) for use in each.uses)
        keys.append((key, alike[0][0].sources, uses))
    return keys
