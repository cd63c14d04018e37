"""The pass over a compiled module: chains of collectives that receive too much are replaced by plans.

    find       the doctor's data flow: chains, where their data comes from, and which values they yield
    plan       the cheapest plan for each; kept if it receives fewer bytes and needs no more memory
    compile    each plan to a fragment, for the same devices, dtype and memory layouts
    splice     fragments in, dead instructions out
    check      the module's structure, and that every element comes from where it came before

Whatever fails, that chain stays as it was, and its fate says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, Protocol

from reshard import hlo
from reshard.doctor.batch_ops import BatchOp, batch_ops
from reshard.doctor.chains import REDUCTIONS, Chain, chains
from reshard.doctor.equivalence import Spliced, Traced, check_equivalent
from reshard.doctor.examination import named_mesh
from reshard.doctor.liveness import Liveness
from reshard.doctor.memory import program_memory
from reshard.doctor.needed import is_needed
from reshard.doctor.op_choices import OpMoves
from reshard.doctor.op_equivalence import check_same_rows
from reshard.doctor.op_layouts import OpFinder, OpReplacement
from reshard.doctor.replacements import Finder, Replacement, Unfit
from reshard.doctor.replicas import Replicas
from reshard.errors import ReshardError
from reshard.hlo import Collective, integrity
from reshard.hlo.proto import ModuleProto
from reshard.hlo.splice import Splice, Use, splice
from reshard.jax.chain_fate import ChainFate, fate_of
from reshard.jax.fragments import FragmentKey, Fragments
from reshard.jax.op_fragments import OpFragmentKey, OutputKey
from reshard.jax.shift_fragments import ShiftKey
from reshard.synth import Network
from reshard.synth import plan as best_plan
from reshard.types.layout import Layout
from reshard.types.plan import Plan

_ROUNDS = 4
_ALIGNMENT = 4096  # bytes by which buffers are rounded up, and those of tables and scalars
_COLLECTIVES = (b"all-gather", b"all-to-all", b"all-reduce", b"collective-permute", b"reduce-scatter")


class HloPassOptions(NamedTuple):
    """What plans are made for: the network and the budget of `reshard.plan`."""

    network: Network | None = None
    budget: int | str | None = None


class Improved(NamedTuple):
    """The name of a module, the rewritten one, None if nothing changed, and the fate of each chain."""

    name: str
    module: bytes | None
    fates: tuple[ChainFate, ...]


class Reader(Protocol):
    """The compiler's own reader of serialized modules."""

    def text(self, module: bytes) -> str:
        """The text of a module, large constants included."""
        ...

    def shardings(self, module: bytes) -> tuple[str, ...]:
        """The shardings of the entry's parameters, in HLO's notation; empty if the module does not say."""
        ...


class _Candidate(NamedTuple):
    """What could take a chain's place.

    `excess_bytes` is what it needs beyond `allowed_bytes`, which the chain needs: it fits only where the program's own
    peak is elsewhere.
    """

    chain: Chain
    fate: ChainFate
    replacements: tuple[Replacement | OpReplacement, ...]
    changes: tuple[Splice, ...]
    allowed_bytes: int
    excess_bytes: int


def has_collectives(module: bytes) -> bool:
    """Whether a serialized module has any collective; a search for their names, without decoding.

    To count is up to ten times faster than `in`, which is slow where much of a long text looks like a name.
    """
    return any(module.count(name) for name in _COLLECTIVES)


def improve(module: bytes, fragments: Fragments, compiler: Reader, options: HloPassOptions) -> Improved:
    """Replaces what receives too much in a serialized HloModuleProto.

    `compiler` reads serialized modules. Chains that depend on each other are replaced in several rounds: one that could
    not be spliced in beside others is tried once more where those have been.
    """
    fates: list[ChainFate] = []
    changed, name = False, ""
    for _ in range(_ROUNDS):
        one = _Round(module, fragments, compiler, options)
        better, name = one.run(), one.module.name
        fates = _with(fates, one.fates) if changed else one.fates
        if better is not None:
            module, changed = better, True
        if better is None or not one.has_failed:
            break
    return Improved(name, module if changed else None, tuple(fates))


def _with(fates: Sequence[ChainFate], later: Sequence[ChainFate]) -> list[ChainFate]:
    """The fates of chains after another round: what it replaced is not left any more."""
    replaced = [fate for fate in later if fate.replaced]
    gone = frozenset[str]().union(*(fate.collectives for fate in replaced))
    return [*(fate for fate in fates if fate.replaced or not fate.collectives <= gone), *replaced]


class _Round:
    """One search through a module."""

    def __init__(self, module: bytes, fragments: Fragments, compiler: Reader, options: HloPassOptions) -> None:
        self.data = module
        self.fragments = fragments
        self.compiler = compiler
        self.options = options
        self.devices = len(fragments.devices)
        self.shardings = compiler.shardings(module)
        self.module = replace(hlo.parse(compiler.text(module)), num_partitions=self.devices, replica_count=1)
        self.traced = Traced(self.module, self.devices)
        self.collectives = hlo.collectives(self.module, every_branch=True)
        self.fates: list[ChainFate] = []
        self.has_failed = False

    @cached_property
    def proto(self) -> ModuleProto:
        """The module, to be read; what is changed is a fresh one."""
        return ModuleProto.decode(self.data)

    def run(self) -> bytes | None:
        """The better module, None if there is none; sets the fates."""
        candidates = sorted(self._candidates(), key=self._position)
        while candidates:  # ends: each failure takes a candidate away, or makes it need less memory, once
            failed, why, better = self._spliced(candidates)
            if failed is None:
                self.fates += [candidate.fate for candidate in candidates]
                return better
            candidates.remove(failed)
            self.has_failed = True
            smaller = self._smaller(failed)
            if smaller is None:
                self.fates.append(replace(failed.fate, why=why))
            else:
                candidates.append(smaller)
        return None

    def _position(self, candidate: _Candidate) -> int:
        """Where a candidate stands in the program: what others take is replaced first."""
        return self.collectives.index(candidate.chain.collectives[0])

    def _candidates(self) -> Iterator[_Candidate]:
        """The chains with a better plan; the others' fates are noted."""
        collectives = self.collectives
        flow, maps, numbering = self.traced.flow, self.traced.maps, self.traced.numbering
        finder = Finder(flow, maps, numbering, named_mesh(collectives, self.devices))
        liveness = Liveness(flow, numbering)
        ops = _Ops(self, OpFinder(finder), liveness)
        yield from ops.candidates
        for chain in chains(flow, maps, collectives, from_sums=True):
            if ops.are_taken(chain):
                continue
            whole = self._tried(chain, finder, liveness)
            tried = [whole]
            if isinstance(whole, ChainFate) and len(parts := self._parts(chain)) > 1:
                tried = [
                    replace(fate_of(part), why=whole.why) if part.reduces else self._tried(part, finder, liveness)
                    for part in parts
                ]
            for one in tried:
                if isinstance(one, ChainFate):
                    self.fates.append(replace(one, why=ops.why.get(chain.collectives[0].name, one.why)))
                else:
                    yield one

    @cached_property
    def apart(self) -> tuple[Chain, ...]:
        """The chains of the module, each sum as one of its own."""
        return tuple(chains(self.traced.flow, self.traced.maps, self.collectives))

    def _parts(self, chain: Chain) -> list[Chain]:
        """The chains that a chain that begins with a sum consists of."""
        if not chain.reduces or len(chain.collectives) < 2:
            return []
        return [one for one in self.apart if one.region is chain.region and one.is_part_of(chain)]

    def _tried(self, chain: Chain, finder: Finder, liveness: Liveness) -> _Candidate | ChainFate:
        """The better plan for a chain; its fate, if there is none."""
        fate = fate_of(chain)
        try:
            return self._candidate(chain, fate, finder, liveness)
        except (Unfit, ReshardError) as error:
            return replace(fate, why=str(error).splitlines()[0])

    def _candidate(self, chain: Chain, fate: ChainFate, finder: Finder, liveness: Liveness) -> _Candidate:
        if is_needed(chain, finder.flow):
            raise Unfit(f"it receives no more than is needed, {fate.received_bytes} B")
        one = self._planned(chain, fate, finder.replacements(chain), lambda: _allowed_bytes(chain, liveness))
        if not one.excess_bytes or one.allowed_bytes + one.excess_bytes <= self.peak_bytes:
            return one
        smaller = self._smaller(one)
        if smaller is None:
            raise Unfit(_too_large(one))
        return smaller

    @cached_property
    def peak_bytes(self) -> int:
        """What a device holds at the peak of the program, in the order of its text."""
        return program_memory(self.traced.flow, {}).peak_bytes

    def _planned(
        self, chain: Chain, fate: ChainFate, replacements: tuple[Replacement, ...], allowed_bytes: Callable[[], int],
        budget: int | None = None,
    ) -> _Candidate:  # fmt: skip
        """The plans for a chain under a budget, compiled; raises `Unfit` if they do not receive less.

        What the chain is allowed to need is asked for last: most chains receive no more than is needed.
        """
        keys, uses = self._keys(replacements, budget)
        planned = sum(key.received_bytes for key in keys)
        permutes = sum(len(key.boxes) for key in keys if isinstance(key, ShiftKey))
        if permutes > len(chain.collectives):
            raise Unfit(f"the plan would need {permutes} permutes to receive {planned} B")
        if planned >= fate.received_bytes:
            raise Unfit(f"it receives no more than is needed, {planned} B")
        pieces = [self.fragments.get(key) for key in keys]
        compiled = sum(piece.received_bytes for piece in pieces)
        if compiled >= fate.received_bytes:
            raise Unfit(f"the plan would receive {compiled} B as compiled here, and not {planned} B")
        allowed = allowed_bytes()
        excess = max(0, max(piece.peak_bytes for piece in pieces) - allowed - _ALIGNMENT)
        region, source = chain.region.computation.name, replacements[0].source
        changes = tuple(
            Splice(region, source, used, piece.module, self._metadata(chain))
            for piece, used in zip(pieces, uses, strict=True)
        )
        plans = tuple(key.plan for key in keys if isinstance(key, FragmentKey))
        fate = replace(fate, planned_bytes=planned, plans=plans, permutes=permutes)
        return _Candidate(chain, fate, replacements, changes, allowed, excess)

    def _keys(
        self, replacements: Sequence[Replacement], budget: int | None
    ) -> tuple[list[FragmentKey | ShiftKey], list[tuple[Use, ...]]]:
        """The fragments that replacements ask for, and what each is used for: all shifts are one fragment."""
        keys: list[FragmentKey | ShiftKey] = []
        uses: list[tuple[Use, ...]] = []
        for one in replacements:
            if one.move is not None:
                plan = self._plan(one.move.source, one.move.target, budget)
                keys.append(FragmentKey(plan, one.before, one.after, one.move.places, one.pick))
                uses.append(one.uses)
        for dtype in dict.fromkeys(one.dtype for one in replacements if one.shift is not None):
            alike = [(one, one.shift) for one in replacements if one.shift is not None and one.dtype == dtype]
            afters = tuple(one.after for one, _ in alike)
            keys.append(ShiftKey(tuple(shift for _, shift in alike), alike[0][0].before, afters, dtype))
            uses.append(tuple(replace(use, output=at) for at, (one, _) in enumerate(alike) for use in one.uses))
        return keys, uses

    def op_candidate(
        self, chain: Chain, instruction: hlo.Instruction, op: BatchOp, finder: OpFinder, liveness: Liveness
    ) -> _Candidate:
        """The operation that a chain brings whole rows for, run on each device's rows; raises `Unfit`."""
        fate = fate_of(chain)
        fate = replace(fate, does=f"{fate.does}, {op.kind if op.kind != 'ffi' else op.target}")
        one = finder.replacement(chain, instruction, op)
        key = min((self._op_key(one, moves) for moves in one.choices), key=lambda key: key.received_bytes)
        planned = key.received_bytes
        if planned >= fate.received_bytes:
            raise Unfit(f"it receives no more than is needed, {planned} B")
        piece = self.fragments.get(key)
        if piece.received_bytes >= fate.received_bytes:
            raise Unfit(f"the plan would receive {piece.received_bytes} B as compiled here, and not {planned} B")
        allowed = max(liveness.of(chain).peak_bytes, sum(array.nbytes for array in (*op.operands, *op.results)))
        if piece.peak_bytes > allowed + _ALIGNMENT:
            raise Unfit(f"the plan would need {piece.peak_bytes} B at once, and XLA needs {allowed} B")
        uses = tuple(replace(use, output=at) for at, output in enumerate(one.outputs) for use in output.uses)
        change = Splice(chain.region.computation.name, one.source, uses, piece.module, self._metadata(chain))
        plans = (key.plan, *(output.plan for output in key.outputs))
        return _Candidate(chain, replace(fate, planned_bytes=planned, plans=plans), (one,), (change,), allowed, 0)

    def _op_key(self, one: OpReplacement, moves: OpMoves) -> OpFragmentKey:
        outputs = tuple(
            OutputKey(output.number, self._plan(*pair), output.order, output.after)
            for output, pair in zip(one.outputs, moves.outputs, strict=True)
        )
        indices = tuple(operand.index_dim for operand in one.inputs)
        plan = self._plan(moves.source, moves.rows)
        return OpFragmentKey(one.op, indices, plan, one.before, one.places, outputs)

    def _smaller(self, large: _Candidate) -> _Candidate | None:
        """The candidate with plans that need no more memory than its chain, if it needs more and there are such."""
        if not large.excess_bytes:
            return None
        fate = replace(large.fate, planned_bytes=None, plans=())
        moves = tuple(one for one in large.replacements if isinstance(one, Replacement))
        try:
            pairs = [one.move for one in moves if one.move is not None]
            if tuple(self._plan(one.source, one.target, large.allowed_bytes) for one in pairs) == large.fate.plans:
                return None
            one = self._planned(large.chain, fate, moves, lambda: large.allowed_bytes, large.allowed_bytes)
        except (Unfit, ReshardError):
            return None
        return None if one.excess_bytes else one

    def _plan(self, source: Layout, target: Layout, budget: int | None = None) -> Plan:
        most = self.options.budget if budget is None else budget
        return best_plan(source, target, network=self.options.network, budget=most)

    def _metadata(self, chain: Chain) -> bytes:
        """The name and line of the chain's first collective, for what takes its place."""
        region = self.proto.computation_named(chain.region.computation.name)
        return region.named(chain.collectives[0].name).metadata

    def _spliced(self, candidates: list[_Candidate]) -> tuple[_Candidate | None, str, bytes]:
        """The candidate that cannot be spliced in and why, None if all can, and the module with all of them."""
        module = self.proto.fresh()
        changes: list[integrity.Change] = []
        regions: dict[str, dict[str, str]] = {}
        current = candidates[0]
        try:
            for current in candidates:
                for change in current.changes:
                    stand_ins = regions.setdefault(change.region, {})
                    placed = replace(change, source=stand_ins.get(change.source, change.source))
                    changes.append(integrity.Change(placed, splice(module, placed)))
                    stand_ins.update(changes[-1].linked.stand_ins)
            data = module.encode()
            integrity.check(self.proto, data, changes)
            text = self.compiler.text(data)
            after = Traced(replace(hlo.parse(text), num_partitions=self.devices), self.devices, spliced=True)
            replicas = Replicas(self.traced.maps, self.shardings)
            for current in candidates:
                region = current.chain.region.computation.name
                for one in current.replacements:
                    _check(Spliced(self.traced, after, region, regions[region]), one, replicas)
            current = max(candidates, key=lambda candidate: candidate.excess_bytes)
            self._check_memory(current, after)
        except (Unfit, ReshardError) as error:
            return current, str(error).splitlines()[0], b""
        return None, "", data

    def _check_memory(self, largest: _Candidate, after: Traced) -> None:
        """Raises `Unfit` if plans that need more memory than their chains raise the peak of the program."""
        if not largest.excess_bytes:
            return
        if program_memory(after.flow, {}).peak_bytes > self.peak_bytes + _ALIGNMENT:
            raise Unfit(_too_large(largest))


class _Ops:
    """The operations that may run on the rows that each device has, and the chains that they take.

    `why` has the reasons why others stay, by the first collective that brings their operands.
    """

    def __init__(self, of: _Round, finder: OpFinder, liveness: Liveness) -> None:
        self.candidates: list[_Candidate] = []
        self.why: dict[str, str] = {}
        self._taken: set[Collective] = set()
        known = next(batch_ops(finder.flow), None) is not None
        for chain, instruction, op in finder.joined(of.apart) if known else ():
            try:
                self.candidates.append(of.op_candidate(chain, instruction, op, finder, liveness))
                self._taken.update(chain.collectives)
            except (Unfit, ReshardError) as error:
                self.why[chain.collectives[0].name] = str(error).splitlines()[0]

    def are_taken(self, chain: Chain) -> bool:
        """Whether the operations take all that a chain moves."""
        return self._taken.issuperset(chain.collectives)


def _allowed_bytes(chain: Chain, liveness: Liveness) -> int:
    """The memory that a chain needs; XLA adds up sums where the summands are."""
    sums = [one for one in chain.collectives if one.kind in REDUCTIONS]
    return liveness.of(chain).peak_bytes - sum(array.nbytes for one in sums for array in one.results)


def _too_large(one: _Candidate) -> str:
    peak = one.allowed_bytes + one.excess_bytes + _ALIGNMENT
    return f"the plan would need {peak} B at once, and XLA needs {one.allowed_bytes} B"


def _check(spliced: Spliced, one: Replacement | OpReplacement, replicas: Replicas) -> None:
    if isinstance(one, OpReplacement):
        check_same_rows(spliced, one, replicas)
    else:
        check_equivalent(spliced, one, replicas)
