"""Chains that a fragment could replace: where the data enters, which values it must yield, and the move between.

    %s = f32[8,64] fusion(...)                     source: the operand of the first collective
    %g = f32[64,64] all-gather(%s)
    %f = f32[64,8] fusion(%g, %id), calls=%body    use: %d inside of %f, the slice that each device takes
      %d = f32[64,8] dynamic-slice(%p0, ...)

The move is f32[{d0}8, 64] -> f32[64, {d0}8]; a plan for it, given %s, yields %d. What is found here is a proposal: the
rewritten module is traced again, and must take every element from where it came before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reshard.doctor.chains import REDUCTIONS, Chain
from reshard.doctor.dataflow.conversions import Unconvertible, conversion
from reshard.doctor.dataflow.flow import Flow, HloValue, Scope
from reshard.doctor.dataflow.index_maps import COLLECTIVES, IndexMaps, Untraceable
from reshard.doctor.dataflow.numbering import Numbering
from reshard.doctor.dataflow.sums import is_sum, summed_digits
from reshard.doctor.dataflow.trace import Tracer
from reshard.doctor.infer_layouts import InferredMove, Pick, infer_layouts, infer_pick
from reshard.doctor.shifts import Shift, infer_shift
from reshard.hlo import Array, Collective
from reshard.hlo.splice import Use
from reshard.types.mesh import Mesh

_FORMS = ("convert", "copy", "bitcast", "reshape", "transpose")


class Unfit(Exception):
    """Why a chain cannot be replaced."""


@dataclass(frozen=True)
class Replacement:
    """A value to make from `source`, an instruction of the chain's region, and the `uses` that it replaces.

    `leaf` is what the source yields, or the sum of that over devices if the chain begins with a reduction. `before` and
    `after` are the arrays of one device, with their memory layouts. With a `pick`, the move is that of a part of it.
    Either the `move` is known, or the `shift` that yields the value, whose data is moved as `dtype`.
    """

    source: str
    uses: tuple[Use, ...]
    values: tuple[HloValue, ...]
    leaf: HloValue
    before: Array
    after: Array
    move: InferredMove | None
    pick: Pick | None = None
    shift: Shift | None = None
    dtype: str = ""

    @property
    def is_summed(self) -> bool:
        """Whether the move adds up tiles."""
        return self.move is not None and bool(self.move.source.partial)


class Finder:
    """Finds the replacements for the chains of a module; `mesh` is the program's, if it is known."""

    def __init__(self, flow: Flow, maps: IndexMaps, numbering: Numbering, mesh: Mesh | None) -> None:
        self.flow = flow
        self.maps = maps
        self.numbering = numbering
        self.mesh = mesh
        self._regions: dict[Scope, dict[HloValue, str]] = {}

    def replacements(self, chain: Chain) -> tuple[Replacement, ...]:
        """What has to be made for the chain's results; raises `Unfit` with the reason if that is not known."""
        source, leaf = self._summed(chain) if chain.reduces else self._moved(chain)
        before = leaf.array
        if before is None:
            raise Unfit(f"{source} is not an array")
        groups: dict[int, list[HloValue]] = {}
        for value in self._wanted(chain):
            groups.setdefault(self.numbering.of(value), []).append(value)
        if not groups:
            raise Unfit("nothing uses its results")
        return tuple(self._replacement(chain, source, leaf, before, values) for values in groups.values())

    def _replacement(
        self, chain: Chain, source: str, leaf: HloValue, before: Array, values: Sequence[HloValue]
    ) -> Replacement:
        value = values[0]
        after = value.array
        if after is None or value.path:
            raise Unfit(f"{value.name} is part of a tuple")
        if any(one.array != after for one in values):
            raise Unfit(f"{value.name} is used in several memory layouts")
        tracer = Tracer(self.maps, self.numbering, frozenset({leaf}))
        summed = self._summed_digits(leaf) if chain.reduces else []
        dtype = self._dtype(value, leaf, bool(summed))
        move, pick = infer_layouts(tracer, value, self.mesh, dtype, summed), None
        if move is None and not summed:
            move, pick = infer_pick(tracer, value, dtype) or (None, None)
        shift = infer_shift(tracer, value) if move is None and not summed else None
        if move is None and shift is None:
            raise Unfit(f"no two layouts describe how {value.name} comes from {source}")
        uses = tuple(use_of(chain.region, one) for one in values)
        return Replacement(source, uses, tuple(values), leaf, before, after, move, pick, shift, dtype)

    def _dtype(self, value: HloValue, leaf: HloValue, summed: bool) -> str:
        """The dtype to move: the narrowest on the way, or that of the sum."""
        try:
            one = conversion(self.maps, value, leaf)
        except Unconvertible as why:
            raise Unfit(str(why)) from None
        if summed and one.narrowest not in (one.before, one.after):
            raise Unfit(f"it rounds the sum to {one.narrowest} on the way")
        return one.before if summed else one.narrowest

    def _summed_digits(self, leaf: HloValue) -> list[tuple[int, int]]:
        try:
            return summed_digits(self.maps, leaf)
        except Untraceable as error:
            raise Unfit(str(error)) from None

    def _wanted(self, chain: Chain) -> Iterator[HloValue]:
        """The values to replace: each result or, if only parts of it are used, these parts."""
        for value, used in chain.results.items():
            if value.array is None:
                raise Unfit(f"{value.name} is not an array")
            whole = not used or any(
                one.array is not None and one.array.elements >= value.array.elements for one in used
            )
            yield from map(self._before_widening, (value,) if whole else used)

    def _before_widening(self, value: HloValue) -> HloValue:
        """The same elements in a narrower dtype, if the value is that converted."""
        while value.opcode == "convert":  # ends: each step goes back to an operand
            (before,) = self.flow.operands(value)
            if before.array is None or value.array is None or before.array.nbytes >= value.array.nbytes:
                break
            if self.maps.sources(before) is None or before.opcode in COLLECTIVES:
                break
            value = before
        return value

    def _moved(self, chain: Chain) -> tuple[str, HloValue]:
        """The source of a chain that only moves data, and what it yields."""
        if not all(map(_is_known, chain.collectives)):
            raise Unfit("it has a collective whose index map is not known")
        source = self._source(chain)
        return source, self.flow.origin(HloValue(chain.region, source))

    def _summed(self, chain: Chain) -> tuple[str, HloValue]:
        """The source of a chain that begins with a sum over devices, and the sum."""
        sums = [one for one in chain.collectives if one.kind in REDUCTIONS]
        if len(sums) != 1 or not all(map(_is_known, [one for one in chain.collectives if one not in sums])):
            raise Unfit("it has a collective whose index map is not known")
        leaf = HloValue(chain.region, sums[0].name)
        if sums[0].computation != chain.region.computation.name:
            raise Unfit(f"{leaf.name} runs inside another instruction")
        if leaf.opcode != "all-reduce" or not is_sum(self.flow, leaf):
            raise Unfit(f"{leaf.name} is not the sum of one array")
        return leaf.instruction.operands[0], leaf

    def _source(self, chain: Chain) -> str:
        """The instruction of the region that has the data before the chain's first collectives."""
        moved = set(chain.values)
        first: dict[int, str] = {}
        for collective in chain.collectives:
            if collective.computation != chain.region.computation.name:
                raise Unfit(f"{collective.name} runs inside another instruction")
            for name in chain.region.computation.by_name[collective.name].operands:
                origin = self.flow.origin(HloValue(chain.region, name))
                if origin not in moved:
                    first.setdefault(self.numbering.of(origin), name)
        if len(first) == 1:
            return self._narrower(chain.region, next(iter(first.values())))
        return self._stored_leaf(chain)

    def _narrower(self, region: Scope, name: str) -> str:
        """The instruction that has the same elements in a narrower dtype, before a conversion; else the one given."""
        value = self.flow.origin(HloValue(region, name))
        while value.array is not None and value.opcode in _FORMS:  # ends: each step goes back to an operand
            (before,) = self.flow.operands(value)
            if before.array is not None and before.array.nbytes < value.array.nbytes and before.opcode != "constant":
                return self._stored(region).get(before, name)
            value = before
        return name

    def _stored_leaf(self, chain: Chain) -> str:
        """The instruction of the region that yields the chain's only leaf."""
        if len({self.numbering.of(leaf) for leaf in chain.leaves}) != 1:
            raise Unfit(f"it joins {len(chain.leaves)} arrays")
        return self.stored_name(chain.region, *chain.leaves)

    def stored_name(self, region: Scope, *leaves: HloValue) -> str:
        """The instruction of a region that yields one of these values."""
        for value, name in self._stored(region).items():
            if value in leaves:
                return name
        raise Unfit("its source is made inside a fusion")

    def _stored(self, region: Scope) -> dict[HloValue, str]:
        """The arrays that the instructions of a region yield."""
        if region not in self._regions:
            known: dict[HloValue, str] = {}
            for instruction in region.computation.instructions:
                value = HloValue(region, instruction.name)
                if value.array is not None:
                    known.setdefault(self.flow.origin(value), instruction.name)
            self._regions[region] = known
        return self._regions[region]


def _is_known(collective: Collective) -> bool:
    return collective.opcode.removesuffix("-start") in COLLECTIVES


def use_of(region: Scope, value: HloValue) -> Use:
    """The value as seen from the region: the instructions to enter, then its own."""
    path: list[str] = []
    scope = value.scope
    while scope is not region:  # ends: scopes are nested in their callers
        if scope.caller is None or not scope.opened:
            raise Unfit(f"{value.name} is used outside of its region")
        path.append(scope.caller.instruction.name)
        scope = scope.caller.scope
    return Use(tuple(reversed(path)), finished(value))


def finished(value: HloValue) -> str:
    """The instruction that yields the value: for the start of an asynchronous pair, its end."""
    if not value.instruction.opcode.endswith("-start"):
        return value.name
    users = value.scope.computation.users.get(value.name, ())
    ends = [user.name for user in users if user.opcode.endswith("-done")]
    if len(ends) != 1:
        raise Unfit(f"{value.name} has {len(ends)} ends")
    return ends[0]
