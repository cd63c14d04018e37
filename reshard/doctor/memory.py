"""What a device holds while a chain runs: the arrays that it makes, by the order of the module's text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from reshard.doctor.chains import Chain
from reshard.doctor.flow import Flow, Scope, Site, Value
from reshard.doctor.numbering import Numbering
from reshard.hlo import Array, Computation

_VIEWS = ("tuple", "get-tuple-element", "bitcast", "opt-barrier", "optimization-barrier", "parameter")


class Held(NamedTuple):
    """An array, the instruction that makes it and the one that uses it last, by their places in the text."""

    array: Array
    made: int
    used: int


class Memory(NamedTuple):
    """What a chain holds on a device.

    `peak_bytes` are all that is live at once, the source and the result included; `temp_bytes` those without these
    two. `on_the_way` is the largest array that is made between them.
    """

    peak_bytes: int
    temp_bytes: int
    on_the_way: Array | None


class _Stored(NamedTuple):
    """A region's instructions by their places, and its values that are stored, by the instructions that yield them."""

    places: dict[str, int]
    values: dict[Value, str]


class Ledger:
    """What the chains of a module hold; the source of each stays to its end."""

    def __init__(self, flow: Flow, numbering: Numbering) -> None:
        self.flow = flow
        self.numbering = numbering
        self._regions: dict[Scope, _Stored] = {}

    def of(self, chain: Chain) -> Memory:
        """What a device holds while a chain runs."""
        made = self._made(chain)
        results = {self.numbering.of(value): value for value in chain.results}
        kept = [held for value, held in made.items() if self.numbering.of(value) not in results]
        found = [*kept, *(self._result(value, made, chain) for value in results.values())]
        before = _bytes({self.numbering.of(leaf): leaf for leaf in chain.leaves}.values())
        after = _bytes(results.values())
        live = [sum(h.array.nbytes for h in found if h.made <= one.made <= h.used) for one in found]
        peak = before + max(live, default=0)
        on_the_way = max((held.array for held in kept), key=lambda array: array.nbytes, default=None)
        return Memory(peak, max(0, peak - before - after), on_the_way)

    def _made(self, chain: Chain) -> dict[Value, Held]:
        """The values of a chain that are stored."""
        stored = self._stored(chain.region)
        found: dict[Value, Held] = {}
        for value in chain.values:
            if value in stored.values and value.array is not None:
                name = stored.values[value]
                last = _last_use(chain.region.computation, stored.places, name)
                found[value] = Held(value.array, stored.places[name], last)
        return found

    def _stored(self, region: Scope) -> _Stored:
        if region not in self._regions:
            instructions = region.computation.instructions
            values: dict[Value, str] = {}
            for instruction in instructions:
                if instruction.opcode not in _VIEWS:
                    for value in self.flow.parts(Value(region, instruction.name)):
                        values.setdefault(value, instruction.name)
            places = {instruction.name: at for at, instruction in enumerate(instructions)}
            self._regions[region] = _Stored(places, values)
        return self._regions[region]

    def _result(self, value: Value, made: dict[Value, Held], chain: Chain) -> Held:
        """A result; one that is used where it is made, inside of a fusion, counts where that stands."""
        places = self._stored(chain.region).places
        if value in made:
            return made[value]._replace(used=len(places))
        return Held(value.array or Array("pred", ()), places[_outermost(value.site, chain.region)], len(places))


def _last_use(computation: Computation, places: dict[str, int], name: str) -> int:
    """The place of the last instruction that uses one, through views of it."""
    last, queue, seen = places[name], [name], {name}
    while queue:  # ends: each instruction is looked at once
        for user in computation.users.get(queue.pop(), ()):
            last = max(last, places[user.name])
            if user.opcode in _VIEWS and user.name not in seen:
                seen.add(user.name)
                queue.append(user.name)
    return last


def _outermost(site: Site, region: Scope) -> str:
    """The region's own instruction that a site is inside of."""
    while site.scope is not region and site.scope.caller is not None:  # ends: scopes are nested in their callers
        site = site.scope.caller
    return site.instruction.name


def _bytes(values: Iterable[Value]) -> int:
    return sum(value.array.nbytes for value in values if value.array is not None)
