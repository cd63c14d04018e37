"""The typing rules as conditions on choices, for z3: layouts as unknowns, and steps between them.

    f32[{x}4, 8] -> f32[8, 8] on <x=2>     before: "x holds place 4 of dim 0" is true; after: "x is unused" is true
                                           cells of dim 0: [4, 8) gathered, [2, 4) and [1, 2) stay local

An *unknown layout* has, for each factor of the mesh and each digit that it can hold, a bit that says whether it does.
Between two unknown layouts there is a slice, which is free, or a step that moves data. What a step costs follows from
the cells of the array (`Space.cells`): each is held or local before, and after. Bytes, launches and tiles are those of
the rules, counted in elements.

Two kinds of step are underpriced on purpose, so that no plan is missed. A step in pieces (parts, chunks, in place)
needs no scratch and twice the launches. An exchange between numerals that do not nest receives only as much as the
tile grows, in one launch. The rules price what z3 finds, and `Search.learn` adds what was underpriced as a condition.

The typing rules are written here a second time because z3 needs them as formulas, where `plans.rules` computes numbers.
The tests compare the two on all pairs of small layouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from reshard.proofs.launches.space import PARTIAL, UNUSED, Hold, PlaceSpan, PrimeFactor, Space, State
from reshard.proofs.symbolic.claims import z3


class Price(NamedTuple):
    """What a step costs, as expressions of z3: elements received, launches and elements of scratch."""

    received: Any
    launches: Any
    scratch: Any


class UnknownLayout:
    """One layout as unknowns: a bit for each factor and each digit that it can hold."""

    def __init__(self, space: Space, name: str, add: Callable[..., None]) -> None:
        self.space = space
        self.bits = [self._bits(name, f, holds) for f, holds in zip(space.factors, space.holds, strict=True)]
        covering = self._covering()
        self._add_nesting(covering, add)
        self.covered = [z3().Or(*bits) for bits in covering]
        self.held = [z3().Or(*(b for h, b in bits.items() if h.dim >= 0)) for bits in self.bits]
        self.tile, sizes = divided(f"{name}:tile", math.prod(space.shape), self.held, space)
        add(*sizes)
        ranks = {hold: rank for rank, hold in enumerate(order(space))}
        self.rank = [z3().Sum(*(z3().If(b, ranks[h], 0) for h, b in bits.items() if h.dim >= 0)) for bits in self.bits]

    def _bits(self, name: str, factor: PrimeFactor, holds: Sequence[Hold]) -> dict[Hold, Any]:
        """The bits of one factor: unused, partial where that is possible, and each digit."""
        partial = (PARTIAL,) if factor in self.space.summed else ()
        return {h: z3().Bool(f"{name}:{factor.stride}:{h.dim}.{h.low}") for h in (UNUSED, *partial, *holds)}

    def _covering(self) -> list[list[Any]]:
        """For each cell, the bits of the digits that cover it."""
        covering: list[list[Any]] = [[] for _ in self.space.cells]
        for at, hold, bit in self._digits():
            for cell in self.space.covered(at, hold):
                covering[cell].append(bit)
        return covering

    def _add_nesting(self, covering: Sequence[Sequence[Any]], add: Callable[..., None]) -> None:
        """Adds that each factor holds one thing, no cell is held twice, and digits nest."""
        lib = z3()
        for bits in self.bits:
            add(lib.PbEq([(b, 1) for b in bits.values()], 1))
        for bits in covering:
            if len(bits) > 1:
                add(lib.AtMost(*bits, 1))
        for (f, h), (g, other) in clashes(self.space):
            add(lib.Or(lib.Not(self.bits[f][h]), lib.Not(self.bits[g][other])))

    def _digits(self) -> Iterator[tuple[int, Hold, Any]]:
        for at, bits in enumerate(self.bits):
            yield from ((at, hold, bit) for hold, bit in bits.items() if hold.dim >= 0)

    def partial(self, at: int) -> Any:
        """The bit that says that a factor's summands are still to be combined."""
        return self.bits[at].get(PARTIAL, z3().BoolVal(False))

    def unused(self, at: int) -> Any:
        """The bit that says that a factor holds nothing."""
        return self.bits[at][UNUSED]

    def equals(self, state: State) -> list[Any]:
        """The bits that are set if this is the given layout."""
        return [bits[hold] for bits, hold in zip(self.bits, state, strict=True)]

    def read(self, model: Any) -> State:
        """The layout that z3 chose."""
        return tuple(next(h for h, b in bits.items() if z3().is_true(model.eval(b, True))) for bits in self.bits)


def order(space: Space) -> list[Hold]:
    """All digits that some factor can hold, major first."""
    every = {hold for holds in space.holds for hold in holds}
    return sorted(every, key=lambda h: (h.dim, -h.low))


def divided(name: str, whole: Any, flags: Sequence[Any], space: Space) -> tuple[Any, list[Any]]:
    """An unknown that is `whole` divided by the sizes of the flagged factors, and the conditions that make it so."""
    lib, quotient = z3(), whole
    conditions: list[Any] = []
    for factor, flag in zip(space.factors, flags, strict=True):
        part = lib.Int(f"{name}:{factor.stride}")
        conditions += [lib.If(flag, quotient == factor.size * part, quotient == part), part >= 1]
        quotient = part
    return quotient, conditions


@lru_cache(maxsize=16)
def clashes(space: Space) -> list[tuple[tuple[int, Hold], tuple[int, Hold]]]:
    """Pairs of digits that do not overlap but cannot be in one numeral, such as places 2 to 4 and 6 to 12."""
    return [
        (a, b)
        for a, b in _pairs(space)
        if not bool(set(space.covered(*a)) & set(space.covered(*b))) and not nest(space.span(*a), space.span(*b))
    ]


@lru_cache(maxsize=16)
def crossings(space: Space) -> list[tuple[tuple[int, Hold], tuple[int, Hold]]]:
    """Pairs of digits that two layouts with a common refinement cannot hold: different ones that do not nest."""
    ends = [(a, b, space.span(*a), space.span(*b)) for a, b in _pairs(space)]
    return [(a, b) for a, b, one, other in ends if one != other and not nest(one, other)]


def nest(one: PlaceSpan, other: PlaceSpan) -> bool:
    """Whether two digits can be digits of one numeral."""
    return one.dim != other.dim or other.low % one.high == 0 or one.low % other.high == 0


def _pairs(space: Space) -> Iterator[tuple[tuple[int, Hold], tuple[int, Hold]]]:
    every = [(at, hold) for at, holds in enumerate(space.holds) for hold in holds]
    return itertools.product(every, every)


class Between:
    """Two unknown layouts, and what happens to the cells and the factors between them."""

    def __init__(self, before: UnknownLayout, after: UnknownLayout, name: str) -> None:
        lib = z3()
        self.space, self.before, self.after, self.name = before.space, before, after, name
        self.factors = range(len(self.space.factors))
        self.kept = [lib.And(*(b == after.bits[at][h] for h, b in bits.items())) for at, bits in enumerate(before.bits)]
        pairs = list(zip(before.covered, after.covered, strict=True))
        self.stays = [lib.And(lib.Not(b), lib.Not(a)) for b, a in pairs]
        self.gathered = [lib.And(b, lib.Not(a)) for b, a in pairs]
        self.sliced = [lib.And(lib.Not(b), a) for b, a in pairs]

    def scattered(self, cells: Sequence[Any]) -> Any:
        """Whether a cell that stays local comes before one of these, so that blocks are not contiguous in a tile."""
        lib = z3()
        preceded: list[Any] = []
        seen: Any = lib.BoolVal(False)
        for stays, cell in zip(self.stays, cells, strict=True):
            preceded.append(lib.And(seen, cell))
            seen = lib.Or(seen, stays)
        return lib.Or(*preceded)

    def summands_stay(self) -> Any:
        """Whether the same factors are partial before and after."""
        return z3().And(*(self.before.partial(at) == self.after.partial(at) for at in self.factors))

    def each(self, change: Callable[[int], Any]) -> Any:
        """Whether every factor keeps what it has or makes the given change."""
        return z3().And(*(z3().Or(self.kept[at], change(at)) for at in self.factors))

    def some(self) -> Any:
        """Whether some factor changes."""
        return z3().Not(z3().And(*self.kept))

    @cached_property
    def nested(self) -> Any:
        """Whether the two numerals have a common refinement."""
        lib = z3()
        return lib.And(
            *(
                lib.Not(lib.And(self.before.bits[a][h], self.after.bits[b][g]))
                for (a, h), (b, g) in crossings(self.space)
            )
        )


def slices(at: Between) -> Any:
    """Unused factors come to hold local digits; all others keep what they have."""
    return at.each(lambda f: z3().And(at.before.unused(f), at.after.held[f]))


def _all_gather(at: Between) -> tuple[Any, Price]:
    typed = at.each(lambda f: z3().And(at.before.held[f], at.after.unused(f)))
    scratch = z3().If(at.scattered(at.gathered), at.after.tile, 0)
    return typed, Price(at.after.tile - at.before.tile, 1, scratch)


def _all_to_all(at: Between) -> tuple[Any, Price]:
    lib = z3()
    typed = [at.summands_stay(), *(at.before.held[f] == at.after.held[f] for f in at.factors), at.nested]
    for one, other in ((at.before, at.after), (at.after, at.before)):
        for f, bits in enumerate(one.bits):
            for hold, bit in bits.items():
                free = [lib.Not(other.covered[c]) for c in at.space.covered(f, hold)] if hold.dim >= 0 else []
                typed.append(lib.Or(lib.Not(bit), at.kept[f], lib.And(*free)))
    moved = [lib.Not(kept) for kept in at.kept]
    share, sizes = divided(f"{at.name}:share", at.before.tile, moved, at.space)
    turned = [
        lib.And(moved[f], moved[g], (at.before.rank[f] < at.before.rank[g]) != (at.after.rank[f] < at.after.rank[g]))
        for f, g in itertools.combinations(at.factors, 2)
    ]
    staged = lib.Or(at.scattered(at.gathered), at.scattered(at.sliced), *turned)
    return lib.And(*typed, *sizes), Price(at.before.tile - share, 1, lib.If(staged, at.before.tile, 0))


def _permute(at: Between) -> tuple[Any, Price]:
    same = (b == a for b, a in zip(at.before.covered, at.after.covered, strict=True))
    return z3().And(at.summands_stay(), *same), Price(at.before.tile, 1, 0)


def _exchange(at: Between) -> tuple[Any, Price]:
    """A round per share of the result; unless some digit changes holders, each device has one of the shares already."""
    lib = z3()
    given = [
        lib.Or(
            *(
                lib.And(bit, at.gathered[at.space.covered(f, h)[0]])
                for h, bit in at.before.bits[f].items()
                if h.dim >= 0
            )
        )
        for f in at.factors
    ]
    message, sizes = divided(f"{at.name}:message", at.after.tile, given, at.space)
    pieces: Any = 1
    for f, flag in zip(at.space.factors, given, strict=True):
        pieces = lib.If(flag, f.size * pieces, pieces)
    swapped = lib.Or(*_swaps(at))
    staged = lib.Or(at.scattered(at.gathered), at.scattered(at.sliced))
    received = lib.If(swapped, at.after.tile, at.after.tile - message)
    rounds = lib.If(swapped, pieces, pieces - 1)
    typed = lib.And(at.summands_stay(), at.nested, *sizes)
    return typed, Price(received, rounds, lib.If(staged, 2 * message, 0))


def _swaps(at: Between) -> Iterator[Any]:
    """For each digit, that one factor holds it before and another one after."""
    for (a, h), (b, g) in _pairs(at.space):
        if a != b and at.space.span(a, h) == at.space.span(b, g):
            yield z3().And(at.before.bits[a][h], at.after.bits[b][g])


def _boxes(at: Between) -> tuple[Any, Price]:
    lib = z3()
    grown = lib.If(at.after.tile > at.before.tile, at.after.tile - at.before.tile, 0)
    return lib.And(at.summands_stay(), lib.Not(at.nested)), Price(grown, 1, 0)


def _reduce_scatter(at: Between) -> tuple[Any, Price]:
    typed = z3().And(at.some(), at.each(lambda f: z3().And(at.before.partial(f), at.after.held[f])))
    scratch = z3().If(at.scattered(at.sliced), at.before.tile, 0)
    return typed, Price(at.before.tile - at.after.tile, 1, scratch)


def _all_reduce(at: Between) -> tuple[Any, Price]:
    lib = z3()
    typed = lib.And(at.some(), at.each(lambda f: lib.And(at.before.partial(f), at.after.unused(f))))
    summed = [n for n, f in enumerate(at.space.factors) if f in at.space.summed]
    received: Any = 0
    for count in range(1, len(summed) + 1):
        for some in itertools.combinations(summed, count):
            size = math.prod(at.space.factors[n].size for n in some)
            these = lib.And(*((lib.Not(at.kept[n]) if n in some else at.kept[n]) for n in summed))
            received = lib.If(these, (2 * (size - 1) * at.before.tile + size - 1) / size, received)
    return typed, Price(received, 1, 0)


RULES: Mapping[str, Callable[[Between], tuple[Any, Price]]] = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "permute": _permute,
    "exchange": _exchange,
    "boxes": _boxes,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
}
"""The typing rules of the steps that move data; "boxes" are exchanges between numerals that do not nest."""


def kinds(space: Space) -> list[str]:
    """The kinds of step that can occur: reductions need partial factors, boxes need numerals that can cross."""
    some = {"boxes": bool(crossings(space)), "reduce_scatter": bool(space.summed), "all_reduce": bool(space.summed)}
    return [kind for kind in RULES if some.get(kind, True)]
