"""The pass over a compiled module: chains of collectives that receive too much are replaced by plans.

    find       the doctor's data flow: chains, where their data comes from, and which values they yield
    plan       the cheapest plan for each; kept if it receives fewer bytes and needs no more memory
    compile    each plan to a fragment, for the same devices, dtype and memory layouts
    splice     fragments in, dead instructions out
    check      the module's structure, and that every element comes from where it came before

Whatever fails, that chain stays as it was, and its outcome says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from reshard import hlo
from reshard.doctor.chain_reader import Replacement, Unfit
from reshard.doctor.chains import Chain
from reshard.doctor.checks.equivalence import Spliced, Traced, check_equivalent, check_same_rows
from reshard.doctor.dataflow.flow import Flow
from reshard.doctor.dataflow.replicas import Replicas
from reshard.doctor.examination import find_mesh
from reshard.doctor.memory import add_up_program
from reshard.doctor.op_layouts import OpReplacement
from reshard.doctor.places import Place
from reshard.doctor.proposals import (
    ALIGNMENT,
    Proposal,
    ProposalCost,
    ProposalOptions,
    Proposals,
    explain_excess,
    explain_no_better,
    explain_unmeasured,
)
from reshard.errors import ReshardError, SpliceError
from reshard.hlo import integrity
from reshard.hlo.proto import ModuleProto
from reshard.hlo.proto_reader import read_proto
from reshard.hlo.splice import Splice, Splicer, Use
from reshard.jax.xla_pass.fragments import (
    Fragment,
    FragmentKey,
    Fragments,
    Key,
    OpFragmentKey,
    OutputKey,
    ShiftKey,
    parameter_shardings,
)
from reshard.jax.xla_pass.program_peaks import Peaks

_ROUNDS = 4
_COLLECTIVES = (b"all-gather", b"all-to-all", b"all-reduce", b"collective-permute", b"reduce-scatter")


class Improved(NamedTuple):
    """The name of a module, the rewritten one, None if nothing changed, and the place of each chain.

    `flows` are the data flows of both, if it was rewritten.
    """

    name: str
    module: bytes | None
    places: tuple[Place, ...]
    flows: tuple[Flow, Flow] | None = None


def has_collectives(module: bytes) -> bool:
    """Whether a serialized module has any collective; a search for their names, without decoding.

    To count is up to ten times faster than `in`, which is slow where much of a long text looks like a name.
    """
    return any(module.count(name) for name in _COLLECTIVES)


def improve_module(
    module: bytes, fragments: Fragments, options: ProposalOptions, peaks: Peaks | None = None
) -> Improved:
    """Replaces what receives too much in a serialized HloModuleProto.

    Where an estimate does not show that the program's peak is lower than before,
    `peaks` says whether it is better; without it, plans that need more memory than their chains are left out. On CPU
    the estimate is enough: a module that is handed back unchanged already moves the peak there.
    """
    options = options._replace(platform=fragments.platform)
    improved = _improve_in_rounds(module, fragments, options, options.platform == "cpu" or peaks is not None)
    if improved.module is None or peaks is None:
        return improved
    why = explain_unmeasured(improved.places, options, lambda: _estimate_peaks(improved))
    if why is not None:
        return _given_up(improved, why) if why else improved
    try:
        before, after = peaks.of(None), peaks.of(improved.module)
        if after.peak_bytes > before.peak_bytes:
            improved = _improve_in_rounds(module, fragments, options, False)
            after = peaks.of(improved.module)
        why = explain_no_better(before, after, options)
        if not why:
            return improved
    except SpliceError as error:
        why = str(error)
    return _given_up(improved, why)


def _given_up(improved: Improved, why: str) -> Improved:
    left = (place if place.why_left else place.left(why) for place in improved.places)
    return Improved(improved.name, None, tuple(left))


def _estimate_peaks(improved: Improved) -> tuple[int, int]:
    """The peaks of both programs, by the order of the modules' text."""
    if improved.flows is None:
        return 0, 0
    before, after = (add_up_program(flow).peak_bytes for flow in improved.flows)
    return before, after


def _improve_in_rounds(module: bytes, fragments: Fragments, options: ProposalOptions, may_exceed: bool) -> Improved:
    """Replaces chains in several rounds, since some depend on others.

    One that could not be spliced in beside others is tried once more where those have been. Where it `may_exceed`, a
    plan may need more memory than its chain if the program's own peak is elsewhere.
    """
    places: list[Place] = []
    changed, name = False, ""
    flows: list[Flow] = []
    for _ in range(_ROUNDS):
        one = _Round(module, fragments, options, may_exceed)
        better, name = one.run(), one.module.name
        places = _merge_places(places, one.places) if changed else one.places
        if better is not None:
            module, changed = better, True
            flows += [one.traced.flow, *one.rewritten]
        if better is None or not one.has_failed:
            break
    return Improved(name, module if changed else None, tuple(places), (flows[0], flows[-1]) if flows else None)


def _merge_places(places: Sequence[Place], later: Sequence[Place]) -> list[Place]:
    """The places after another round: what it replaced is not left any more."""
    replaced = [place for place in later if place.replaced]
    gone = {collective.name for place in replaced for collective in place.collectives}
    stay = (place for place in places if place.replaced or not gone.issuperset(one.name for one in place.collectives))
    return [*stay, *replaced]


class _Failure(NamedTuple):
    """A candidate that cannot take its chain's place, and why."""

    candidate: Proposal
    why: str


class _Round:
    """One search through a module."""

    def __init__(self, module: bytes, fragments: Fragments, options: ProposalOptions, may_exceed: bool) -> None:
        self.data = module
        self.proto = ModuleProto.decode(module)  # to be read; what is changed is a fresh one
        self.fragments = fragments
        self.options = options
        self.may_exceed = may_exceed
        self.devices = len(fragments.devices)
        self.module = replace(read_proto(self.proto), num_partitions=self.devices, replica_count=1)
        self.traced = Traced(self.module, self.devices)
        self.collectives = hlo.collectives(self.module, every_branch=True)
        self.places: list[Place] = []
        self.has_failed = False
        self.rewritten: list[Flow] = []
        self._pieces: dict[Key, Fragment] = {}

    def run(self) -> bytes | None:
        """The better module, None if there is none; sets the places."""
        candidates = sorted(self._candidates(), key=self._position)
        while candidates:  # ends: each failure takes a candidate away, or makes it need less memory, once
            failures, better = self._spliced(candidates)
            if not failures:
                self.places += [candidate.place for candidate in candidates]
                return better
            self.has_failed = True
            for failed, why in failures:
                candidates.remove(failed)
                smaller = self.proposals.smaller(failed)
                if smaller is None:
                    self.places.append(failed.left(why).place)
                else:
                    candidates.append(smaller)
        return None

    def _position(self, candidate: Proposal) -> int:
        """Where a candidate stands in the program: what others take is replaced first."""
        return self.collectives.index(candidate.chain.collectives[0])

    @cached_property
    def proposals(self) -> Proposals:
        """What could take the place of the module's chains."""
        flow, maps, numbering = self.traced.flow, self.traced.maps, self.traced.numbering
        mesh = find_mesh(self.collectives, self.devices)
        return Proposals(
            flow, maps, numbering, self.collectives, mesh, self.options, self._compiled, self.may_exceed
        )  # fmt: skip

    def _candidates(self) -> Iterator[Proposal]:
        """The chains with a better plan; the places of the others are recorded."""
        for one in self.proposals:
            if one.replacements:
                yield one
            else:
                self.places.append(one.place)

    def _compiled(self, one: Proposal) -> ProposalCost:
        """The cost of what is proposed, as the compiler spells it."""
        pieces = [self._piece(key) for key, _ in asked_fragments(one)]
        return ProposalCost(
            sum(piece.received_bytes for piece in pieces),
            max(piece.peak_bytes for piece in pieces),
            sum(piece.launches for piece in pieces),
        )

    def _piece(self, key: Key) -> Fragment:
        """The fragment, which is compiled when it is first asked for."""
        if key not in self._pieces:
            self._pieces[key] = self.fragments.get(key)
        return self._pieces[key]

    def _changes(self, one: Proposal) -> Iterator[Splice]:
        """What to splice in for a proposal."""
        region, source = one.chain.region.computation.name, one.replacements[0].source
        metadata = self._metadata(one.chain)
        for key, uses in asked_fragments(one):
            yield Splice(region, source, uses, self._piece(key).module, metadata)

    def _metadata(self, chain: Chain) -> bytes:
        """The name and line of the chain's first collective, for what takes its place."""
        region = self.proto.computation_named(chain.region.computation.name)
        return region.named(chain.collectives[0].name).metadata

    def _spliced(self, candidates: list[Proposal]) -> tuple[list[_Failure], bytes]:
        """The candidates that cannot be spliced in and why, and the module with all of them if there are none.

        Of those that the splicer itself refuses, only the first is known: the module is half changed then.
        """
        module = self.proto.fresh()
        splicer = Splicer(module)
        changes: list[integrity.Change] = []
        regions: dict[str, dict[str, str]] = {}
        current = candidates[0]
        try:
            for current in candidates:
                for change in self._changes(current):
                    stand_ins = regions.setdefault(change.region, {})
                    placed = replace(change, source=stand_ins.get(change.source, change.source))
                    changes.append(integrity.Change(placed, splicer.splice(placed)))
                    stand_ins.update(changes[-1].linked.stand_ins)
            splicer.finish()
            data = module.encode()
            # Computations that are as before are those of the old module, and are not read again.
            rewritten = ModuleProto.decode(data, like=self.proto)
            integrity.check_splices(self.proto, rewritten, changes)
            after = Traced(replace(read_proto(rewritten), num_partitions=self.devices), self.devices, spliced=True)
            if failures := list(self._unlike(candidates, after, regions)):
                return failures, b""
            current = max(candidates, key=lambda candidate: candidate.excess_bytes)
            self._check_memory(current, after)
            self.rewritten = [after.flow]
        except (Unfit, ReshardError) as error:
            return [_Failure(current, str(error).splitlines()[0])], b""
        return [], data

    def _unlike(
        self, candidates: Sequence[Proposal], after: Traced, regions: Mapping[str, Mapping[str, str]]
    ) -> Iterator[_Failure]:
        """The candidates of which an element would come from elsewhere."""
        replicas = Replicas(self.traced.maps, lambda: parameter_shardings(self.data))
        for candidate in candidates:
            region = candidate.chain.region.computation.name
            try:
                for one in candidate.replacements:
                    _check(Spliced(self.traced, after, region, regions[region], self.fragments.proofs), one, replicas)
            except (Unfit, ReshardError) as error:
                yield _Failure(candidate, str(error).splitlines()[0])

    def _check_memory(self, largest: Proposal, after: Traced) -> None:
        """Raises `Unfit` if plans that need more memory than their chains raise the peak of the program."""
        if not largest.excess_bytes:
            return
        if add_up_program(after.flow).peak_bytes > self.proposals.peak_bytes + ALIGNMENT:
            raise Unfit(explain_excess(largest))


def _check(spliced: Spliced, one: Replacement | OpReplacement, replicas: Replicas) -> None:
    if isinstance(one, OpReplacement):
        check_same_rows(spliced, one, replicas)
    else:
        check_equivalent(spliced, one, replicas)


# The fragments that a proposal asks for: its plans, shifts and operations, with what each is used for.


def asked_fragments(one: Proposal) -> list[tuple[Key, tuple[Use, ...]]]:
    """The fragments that a proposal asks for, and what each is used for: all shifts of a dtype are one fragment."""
    if one.moves is not None:
        return [_op_key(one, each) for each in one.replacements if isinstance(each, OpReplacement)]
    replacements = [each for each in one.replacements if isinstance(each, Replacement)]
    keys: list[tuple[Key, tuple[Use, ...]]] = []
    plans = iter(one.outcome.plans)
    for each in replacements:
        if each.move is not None:
            keys.append((FragmentKey(next(plans), each.before, each.after, each.move.places, each.pick), each.uses))
    return keys + _shift_keys(replacements)


def _shift_keys(replacements: list[Replacement]) -> list[tuple[Key, tuple[Use, ...]]]:
    """The fragments that shift, one for each dtype."""
    keys: list[tuple[Key, tuple[Use, ...]]] = []
    for dtype in dict.fromkeys(each.dtype for each in replacements if each.shift is not None):
        alike = [(each, each.shift) for each in replacements if each.shift is not None and each.dtype == dtype]
        afters = tuple(each.after for each, _ in alike)
        key = ShiftKey(tuple(shift for _, shift in alike), alike[0][0].before, afters, dtype)
        uses = (replace(use, output=at) for at, (each, _) in enumerate(alike) for use in each.uses)
        keys.append((key, tuple(uses)))
    return keys


def _op_key(one: Proposal, each: OpReplacement) -> tuple[Key, tuple[Use, ...]]:
    """The fragment that runs an operation on rows, and what it is used for."""
    gather, *moves = one.outcome.plans
    outputs = tuple(
        OutputKey(output.number, plan, output.order, output.after)
        for output, plan in zip(each.outputs, moves, strict=True)
    )
    indices = tuple(operand.index_dim for operand in each.inputs)
    uses = tuple(replace(use, output=at) for at, output in enumerate(each.outputs) for use in output.uses)
    return OpFragmentKey(each.op, indices, gather, each.before, each.places, outputs), uses
