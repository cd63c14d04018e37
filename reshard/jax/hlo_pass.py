"""The pass over a compiled module: chains of collectives that receive too much are replaced by plans.

    find       the doctor's data flow: chains, where their data comes from, and which values they yield
    plan       the cheapest plan for each; kept if it receives fewer bytes and needs no more memory
    compile    each plan to a fragment, for the same devices, dtype and memory layouts
    splice     fragments in, dead instructions out
    check      the module's structure, and that every element comes from where it came before

Whatever fails, that chain stays as it was, and its fate says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from reshard import hlo
from reshard.doctor.chains import Chain, chains
from reshard.doctor.equivalence import Traced, check_equivalent
from reshard.doctor.examination import named_mesh
from reshard.doctor.liveness import Liveness
from reshard.doctor.needed import is_needed
from reshard.doctor.replacements import Finder, Replacement, Unfit
from reshard.doctor.replicas import Replicas
from reshard.errors import ReshardError
from reshard.hlo import integrity
from reshard.hlo.proto import ModuleProto
from reshard.hlo.splice import Splice, splice
from reshard.jax.fragments import FragmentKey, Fragments
from reshard.synth import Network
from reshard.synth import plan as best_plan
from reshard.types.plan import Plan

_ROUNDS = 4
_ALIGNMENT = 4096  # bytes by which buffers are rounded up, and those of tables and scalars
_COLLECTIVES = (b"all-gather", b"all-to-all", b"all-reduce", b"collective-permute", b"reduce-scatter")


class HloPassOptions(NamedTuple):
    """What plans are made for: the network and the budget of `reshard.plan`."""

    network: Network | None = None
    budget: int | str | None = None


@dataclass(frozen=True)
class ChainFate:
    """A chain of collectives, and what the pass did with it.

    `where` is the user's `file:line`, `does` its collectives in short. Bytes are those that a device receives in one
    run, `planned_bytes` those of the plans, None without one. `why` is the reason why it was left, empty if replaced.
    """

    where: str
    computation: str
    does: str
    received_bytes: int
    planned_bytes: int | None
    plans: tuple[Plan, ...] = ()
    why: str = ""

    @property
    def replaced(self) -> bool:
        """Whether a plan took its place."""
        return not self.why

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "where": self.where,
            "computation": self.computation,
            "does": self.does,
            "received_bytes": self.received_bytes,
            "planned_bytes": self.planned_bytes,
            "plans": [plan.to_dict() for plan in self.plans],
            "replaced": self.replaced,
            "why": self.why,
        }

    def __str__(self) -> str:
        what = f"{self.where or self.computation}: {self.does}, {self.received_bytes} B received"
        if self.why:
            return f"{what}: left, {self.why}"
        steps = ", ".join(step.kind for plan in self.plans for step in plan.steps)
        return f"{what}: replaced by {steps or 'nothing'}, {self.planned_bytes} B"


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
    chain: Chain
    fate: ChainFate
    replacements: tuple[Replacement, ...]
    changes: tuple[Splice, ...]


def has_collectives(module: bytes) -> bool:
    """Whether a serialized module has any collective; a search for their names, without decoding."""
    return any(name in module for name in _COLLECTIVES)


def improve(module: bytes, fragments: Fragments, compiler: Reader, options: HloPassOptions) -> Improved:
    """Replaces what receives too much in a serialized HloModuleProto.

    `compiler` reads serialized modules. Chains that depend on each other are replaced in several rounds.
    """
    fates: list[ChainFate] = []
    changed, name = False, ""
    for _ in range(_ROUNDS):
        one = _Round(module, fragments, compiler, options)
        better, name = one.run(), one.module.name
        fates += one.fates if not changed else [fate for fate in one.fates if fate.replaced]
        if better is None:
            break
        module, changed = better, True
    return Improved(name, module if changed else None, tuple(fates))


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
        self.fates: list[ChainFate] = []

    def run(self) -> bytes | None:
        """The better module, None if there is none; sets the fates."""
        candidates = list(self._candidates())
        while candidates:  # ends: each failure takes a candidate away
            failed, better = self._spliced(candidates)
            if failed is None:
                self.fates += [candidate.fate for candidate in candidates]
                return better
            candidates.remove(failed)
        return None

    def _candidates(self) -> Iterator[_Candidate]:
        """The chains with a better plan; the others' fates are noted."""
        collectives = hlo.collectives(self.module, every_branch=True)
        flow, maps, numbering = self.traced.flow, self.traced.maps, self.traced.numbering
        finder = Finder(flow, maps, numbering, named_mesh(collectives, self.devices))
        liveness = Liveness(flow, numbering)
        apart = list(chains(flow, maps, collectives))
        for chain in chains(flow, maps, collectives, from_sums=True):
            parts = [one for one in apart if one.region is chain.region and _is_part(one, chain)]
            tried = [self._tried(chain, finder, liveness)]
            if len(parts) > 1 and isinstance(tried[0], ChainFate):
                why = tried[0].why
                tried = [
                    replace(_fate_of(part), why=why) if part.reduces else self._tried(part, finder, liveness)
                    for part in parts
                ]
            for one in tried:
                if isinstance(one, ChainFate):
                    self.fates.append(one)
                else:
                    yield one

    def _tried(self, chain: Chain, finder: Finder, liveness: Liveness) -> _Candidate | ChainFate:
        """The better plan for a chain; its fate, if there is none."""
        fate = _fate_of(chain)
        try:
            return self._candidate(chain, fate, finder, liveness)
        except (Unfit, ReshardError) as error:
            return replace(fate, why=str(error).splitlines()[0])

    def _candidate(self, chain: Chain, fate: ChainFate, finder: Finder, liveness: Liveness) -> _Candidate:
        if is_needed(chain, finder.flow):
            raise Unfit(f"it receives no more than is needed, {fate.received_bytes} B")
        replacements = finder.replacements(chain)
        plans = tuple(self._plan(one) for one in replacements)
        planned = sum(plan.received_bytes for plan in plans)
        if planned >= fate.received_bytes:
            raise Unfit(f"it receives no more than is needed, {planned} B")
        pieces = [
            self.fragments.get(FragmentKey(plan, one.before, one.after, one.move.places, one.pick))
            for plan, one in zip(plans, replacements, strict=True)
        ]
        compiled = sum(piece.received_bytes for piece in pieces)
        if compiled >= fate.received_bytes:
            raise Unfit(f"the plan would receive {compiled} B as compiled here, and not {planned} B")
        peak, allowed = max(piece.peak_bytes for piece in pieces), liveness.of(chain).peak_bytes
        if peak > allowed + _ALIGNMENT:
            raise Unfit(f"the plan would need {peak} B at once, and XLA needs {allowed} B")
        region = chain.region.computation.name
        changes = tuple(
            Splice(region, one.source, one.uses, piece.module, self._metadata(chain))
            for piece, one in zip(pieces, replacements, strict=True)
        )
        return _Candidate(chain, replace(fate, planned_bytes=planned, plans=plans), replacements, changes)

    def _plan(self, one: Replacement) -> Plan:
        return best_plan(one.move.source, one.move.target, network=self.options.network, budget=self.options.budget)

    def _metadata(self, chain: Chain) -> bytes:
        """The name and line of the chain's first collective, for what takes its place."""
        region = ModuleProto.decode(self.data).computation_named(chain.region.computation.name)
        return region.named(chain.collectives[0].name).metadata

    def _spliced(self, candidates: list[_Candidate]) -> tuple[_Candidate | None, bytes]:
        """The candidate that cannot be spliced in, None if all can, and the module with all of them."""
        module = ModuleProto.decode(self.data)
        changes: list[integrity.Change] = []
        current = candidates[0]
        try:
            for current in candidates:
                changes += [integrity.Change(change, splice(module, change)) for change in current.changes]
            data = module.encode()
            integrity.check(self.data, data, changes)
            text = self.compiler.text(data)
            after = Traced(replace(hlo.parse(text), num_partitions=self.devices), self.devices, spliced=True)
            replicas = Replicas(self.traced.maps, self.shardings)
            for current in candidates:
                for one in current.replacements:
                    check_equivalent(self.traced, after, current.chain.region.computation.name, one, replicas)
        except (Unfit, ReshardError) as error:
            self.fates.append(replace(current.fate, why=str(error).splitlines()[0]))
            return current, b""
        return None, data


def _is_part(one: Chain, chain: Chain) -> bool:
    names = {(each.computation, each.name) for each in chain.collectives}
    return all((each.computation, each.name) in names for each in one.collectives)


def _fate_of(chain: Chain) -> ChainFate:
    sources = [one.source for one in chain.collectives]
    source = next((one for one in sources if one.exact and one.file), sources[0])
    where = f"{source.file}:{source.line}" if source.file else source.op_name or ""
    does = ", ".join(_counted(one.kind for one in chain.collectives))
    received = sum(one.received_bytes for one in chain.collectives)
    return ChainFate(where, chain.region.computation.name, does, received, None)


def _counted(kinds: Iterable[str]) -> Iterator[str]:
    counts: dict[str, int] = {}
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
    yield from (kind if count == 1 else f"{count} {kind}" for kind, count in counts.items())
