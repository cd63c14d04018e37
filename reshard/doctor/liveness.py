"""Liveness: the memory that a device holds while a chain runs, from the order of the module's text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from reshard.doctor.chains import Chain
from reshard.doctor.dataflow.flow import Flow, HloValue, Scope, Site
from reshard.doctor.dataflow.numbering import Numbering
from reshard.hlo import Array, Computation

_VIEWS = ("tuple", "get-tuple-element", "bitcast", "opt-barrier", "optimization-barrier", "parameter")


class LiveRange(NamedTuple):
    """An array, and the positions in the text of the instructions that make it and that use it last."""

    array: Array
    made: int
    used: int


class MemoryUse(NamedTuple):
    """The memory of a device while a chain runs.

    `peak_bytes` is the most that is live at once, source and result included; `temp_bytes` leaves these two out.
    `largest` is the largest array made between them.
    """

    peak_bytes: int
    temp_bytes: int
    largest: Array | None


class _Stored(NamedTuple):
    """A region's instructions by their positions, and its stored values by the instructions that yield them."""

    positions: dict[str, int]
    values: dict[HloValue, str]


class Liveness:
    """The memory that the chains of a module hold. The source of a chain counts until the chain ends."""

    def __init__(self, flow: Flow, numbering: Numbering) -> None:
        self.flow = flow
        self.numbering = numbering
        self._regions: dict[Scope, _Stored] = {}

    def of(self, chain: Chain) -> MemoryUse:
        """The memory that a device holds while a chain runs."""
        made = self._made(chain)
        results = {self.numbering.of(value): value for value in chain.results}
        between = [one for value, one in made.items() if self.numbering.of(value) not in results]
        ranges = [*between, *(self._result(value, made, chain) for value in results.values())]
        before = _bytes({self.numbering.of(leaf): leaf for leaf in chain.leaves}.values())
        after = _bytes(results.values())
        live = [sum(r.array.nbytes for r in ranges if r.made <= one.made <= r.used) for one in ranges]
        peak = before + max(live, default=0)
        largest = max((one.array for one in between), key=lambda array: array.nbytes, default=None)
        return MemoryUse(peak, max(0, peak - before - after), largest)

    def stored(self, chain: Chain) -> list[HloValue]:
        """The values of a chain that are in memory, and not only inside a fusion."""
        return list(self._made(chain))

    def _made(self, chain: Chain) -> dict[HloValue, LiveRange]:
        """The values of a chain that are stored, and how long."""
        stored = self._stored(chain.region)
        ranges: dict[HloValue, LiveRange] = {}
        for value in chain.values:
            if value in stored.values and value.array is not None:
                name = stored.values[value]
                last = _last_use(chain.region.computation, stored.positions, name)
                ranges[value] = LiveRange(value.array, stored.positions[name], last)
        return ranges

    def _stored(self, region: Scope) -> _Stored:
        if region not in self._regions:
            instructions = region.computation.instructions
            values: dict[HloValue, str] = {}
            for instruction in instructions:
                if instruction.opcode not in _VIEWS:
                    for value in self.flow.array_origins(HloValue(region, instruction.name)):
                        values.setdefault(value, instruction.name)
            positions = {instruction.name: at for at, instruction in enumerate(instructions)}
            self._regions[region] = _Stored(positions, values)
        return self._regions[region]

    def _result(self, value: HloValue, made: dict[HloValue, LiveRange], chain: Chain) -> LiveRange:
        """The live range of a result; one that is made and used inside a fusion counts at the fusion."""
        positions = self._stored(chain.region).positions
        if value in made:
            return made[value]._replace(used=len(positions))
        at = positions[_outermost(value.site, chain.region)]
        return LiveRange(value.array or Array("pred", ()), at, len(positions))


def _last_use(computation: Computation, positions: dict[str, int], name: str) -> int:
    """The position of the last instruction that uses `name`, also through views."""
    last, queue, seen = positions[name], [name], {name}
    while queue:  # ends: each instruction is looked at once
        for user in computation.users.get(queue.pop(), ()):
            last = max(last, positions[user.name])
            if user.opcode in _VIEWS and user.name not in seen:
                seen.add(user.name)
                queue.append(user.name)
    return last


def _outermost(site: Site, region: Scope) -> str:
    """The region's own instruction that contains a site."""
    while site.scope is not region and site.scope.caller is not None:  # ends: scopes are nested in their callers
        site = site.scope.caller
    return site.instruction.name


def _bytes(values: Iterable[HloValue]) -> int:
    return sum(value.array.nbytes for value in values if value.array is not None)
