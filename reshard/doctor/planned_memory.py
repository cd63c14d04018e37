"""The memory of a program after plans have replaced chains, and instructions that became dead are gone.

%g = f32[64,64] all-gather(%s)                                    %s: live until the fragment
%f = f32[64,8] fusion(%g, %id), calls=%slice_and_add     at %f:   the fragment's result and temporary memory
                                                                  %g is dead: nothing else takes it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from reshard.doctor.dataflow.flow import Flow, HloValue, Scope, parameter_number
from reshard.doctor.memory import Edits
from reshard.doctor.op_layouts import OpReplacement
from reshard.doctor.proposals import Proposal, planned_temp_bytes

_Instruction = tuple[Scope, str]


def edits(flow: Flow, proposals: Iterable[Proposal]) -> dict[Scope, Edits]:
    """How the regions of a module change when these proposals replace their chains."""
    by_region: dict[Scope, list[Proposal]] = {}
    for one in proposals:
        if one.replacements:
            by_region.setdefault(one.chain.region, []).append(one)
    return {region: _edits(flow, region, those) for region, those in by_region.items()}


def _edits(flow: Flow, region: Scope, proposals: list[Proposal]) -> Edits:
    replaced = {(value.scope, value.name): one.replacements[0].source for one in proposals for value in _replaced(one)}
    before, after = _NeededHere(flow, region, {}), _NeededHere(flow, region, replaced)
    positions = {one.name: at for at, one in enumerate(region.computation.instructions)}
    extra: list[tuple[int, int, int]] = []
    runs: list[tuple[int, int]] = []
    for one in proposals:
        at = min(positions[_outermost(value, region)] for value in _replaced(one))
        source = one.replacements[0].before.nbytes if _is_last(one, at, after, positions) else 0
        extra += [*_used_inside(one, region, positions), (at, at, -source)]
        runs.append((at, max(source, planned_temp_bytes(one))))
    return Edits(
        frozenset(before.names - after.names),
        {name: tuple(taken) for name, taken in after.taken.items()},
        tuple(extra),
        tuple(runs),
    )


def _is_last(one: Proposal, at: int, after: _NeededHere, positions: Mapping[str, int]) -> bool:
    """Whether nothing after the plans uses their source, so that its memory is free while they run."""
    source = one.replacements[0].source
    computation = after.region.computation
    users = [positions[name] for name, taken in after.taken.items() if source in taken]
    kept = computation.by_name[source].opcode in ("parameter", "bitcast", "get-tuple-element")
    return not kept and max(users, default=at) <= at and computation.root is not computation.by_name[source]


def _replaced(one: Proposal) -> Iterator[HloValue]:
    """The values that the proposal yields."""
    for each in one.replacements:
        if isinstance(each, OpReplacement):
            yield from (value for output in each.outputs for value in output.values)
        else:
            yield from each.values


def _used_inside(one: Proposal, region: Scope, positions: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
    """The live ranges of results that fusions used to make inside, and that are stored now."""
    used = [(positions[_outermost(value, region)], value) for value in _replaced(one) if value.scope is not region]
    sizes = {value.array.nbytes for _, value in used if value.array is not None}
    if sizes:
        yield min(at for at, _ in used), max(at for at, _ in used), sum(sizes)


def _outermost(value: HloValue, region: Scope) -> str:
    """The region's own instruction that contains the one that makes a value."""
    site = value.site
    while site.scope is not region and site.scope.caller is not None:  # ends: scopes are nested in their callers
        site = site.scope.caller
    return site.instruction.name


class _NeededHere:
    """The instructions that a region's result depends on, and the operands that each takes.

    Those that are `replaced` take their source instead.
    """

    def __init__(self, flow: Flow, region: Scope, replaced: Mapping[_Instruction, str]) -> None:
        self.flow = flow
        self.region = region
        self.replaced = replaced
        self.names: set[str] = set()
        self.taken: dict[str, dict[str, None]] = {}
        root = region.computation.root
        seen: set[_Instruction] = set()
        queue = [] if root is None else [(region, root.name)]
        while queue:  # ends: each instruction is looked at once
            one = queue.pop()
            if one not in seen:
                seen.add(one)
                queue += self._before(*one)

    def _before(self, scope: Scope, name: str) -> list[_Instruction]:
        """What an instruction needs."""
        if scope is self.region:
            self.names.add(name)
            self.taken.setdefault(name, {})
        source = self.replaced.get((scope, name))
        if source is not None:
            return [
                self._take(
                    self.region,
                    name if scope is self.region else _outermost(HloValue(scope, name), self.region),
                    source,
                )
            ]
        instruction = scope.computation.by_name[name]
        inner = self.flow.inner(scope, instruction)
        if inner is not None and inner.computation.root is not None:
            return [(inner, inner.computation.root.name)]
        if instruction.opcode == "parameter" and scope.opened and scope.caller is not None:
            operands, number = scope.caller.instruction.operands, parameter_number(instruction)
            chosen = operands[number : number + 1] or operands
            return [self._take(scope.caller.scope, scope.caller.instruction.name, operand) for operand in chosen]
        return [self._take(scope, name, operand) for operand in instruction.operands]

    def _take(self, scope: Scope, name: str, operand: str) -> _Instruction:
        """Records that an instruction takes an operand."""
        if scope is self.region:
            self.taken.setdefault(name, {})[operand] = None
        return scope, operand
