"""The typing rules as conditions on choices, for z3: layouts as unknowns, and steps between them.

A *stage* is one layout: for each factor of the mesh and each digit that it can hold, whether it does. Between two
stages is a slice, which is free, or a step that moves data. What a step costs follows from the cells of the
array (`space.Cell`): each is held or local before, and after. Bytes, launches and tiles are those of the rules,
counted in elements.

Two kinds of step are too cheap here, so that nothing is missed. One in pieces (parts, chunks, in place) needs no
scratch and twice the launches; an exchange between numerals that do not nest receives no more than the tile
grows, in one launch. What z3 finds is priced by the rules, and what was too cheap is told to it (`Search.learn`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from reshard.proofs.launches.space import PARTIAL, UNUSED, Cell, Hold, Space, State
from reshard.proofs.symbolic.queries import z3


class Price(NamedTuple):
    """What a step costs, as z3's numbers: elements received, launches and elements of scratch."""

    received: Any
    launches: Any
    scratch: Any


class Stage:
    """One layout as unknowns."""

    def __init__(self, space: Space, name: str, put: Callable[..., None]) -> None:
        lib = z3()
        self.space = space
        self.holds = [
            (UNUSED, *((PARTIAL,) if f in space.summed else ()), *holds)
            for f, holds in zip(space.factors, space.holds, strict=True)
        ]
        self.bits: list[dict[Hold, Any]] = [
            {h: lib.Bool(f"{name}:{f.stride}:{h.dim}.{h.low}") for h in holds}
            for f, holds in zip(space.factors, self.holds, strict=True)
        ]
        for bits in self.bits:
            put(lib.PbEq([(b, 1) for b in bits.values()], 1))
        covering: list[list[Any]] = [[] for _ in space.cells]
        for at, hold, bit in self._digits():
            for cell in space.covered(at, hold):
                covering[cell].append(bit)
        for bits in covering:
            put(lib.AtMost(*bits, 1)) if len(bits) > 1 else None
        for a, b in clashes(space):
            put(lib.Or(lib.Not(self.bits[a[0]][a[1]]), lib.Not(self.bits[b[0]][b[1]])))
        self.covered = [lib.Or(*bits) for bits in covering]
        self.held = [lib.Or(*(b for h, b in bits.items() if h.dim >= 0)) for bits in self.bits]
        self.tile, sizes = divided(f"{name}:tile", math.prod(space.shape), self.held, space)
        put(*sizes)
        places = order(space)
        self.rank = [lib.Sum(*(lib.If(bits[h], n, 0) for n, h in enumerate(places) if h in bits)) for bits in self.bits]

    def _digits(self) -> Iterator[tuple[int, Hold, Any]]:
        for at, bits in enumerate(self.bits):
            yield from ((at, hold, bit) for hold, bit in bits.items() if hold.dim >= 0)

    def partial(self, at: int) -> Any:
        """Whether a factor's summands are still to be combined."""
        return self.bits[at].get(PARTIAL, z3().BoolVal(False))

    def unused(self, at: int) -> Any:
        """Whether a factor holds nothing."""
        return self.bits[at][UNUSED]

    def is_(self, state: State) -> list[Any]:
        """The bits that are set in a given layout."""
        return [bits[hold] for bits, hold in zip(self.bits, state, strict=True)]

    def read(self, model: Any) -> State:
        """The layout that z3 chose."""
        return tuple(next(h for h, b in bits.items() if z3().is_true(model.eval(b, True))) for bits in self.bits)


def order(space: Space) -> list[Hold]:
    """All places, major first."""
    every = {hold for holds in space.holds for hold in holds}
    return sorted(every, key=lambda h: (h.dim, -h.low))


def divided(name: str, whole: Any, flags: Sequence[Any], space: Space) -> tuple[Any, list[Any]]:
    """A number divided by the sizes of the factors that are flagged, and the conditions that make it so."""
    lib, found = z3(), whole
    conditions: list[Any] = []
    for factor, flag in zip(space.factors, flags, strict=True):
        part = lib.Int(f"{name}:{factor.stride}")
        conditions += [lib.If(flag, found == factor.size * part, found == part), part >= 1]
        found = part
    return found, conditions


@lru_cache(maxsize=16)
def clashes(space: Space) -> list[tuple[tuple[int, Hold], tuple[int, Hold]]]:
    """Digits that overlap nowhere, and yet nest in no numeral: 2 to 4 and 6 to 12."""
    return [(a, b) for a, b in _pairs(space) if not _overlap(space, a, b) and not nest(space.span(*a), space.span(*b))]


@lru_cache(maxsize=16)
def crossings(space: Space) -> list[tuple[tuple[int, Hold], tuple[int, Hold]]]:
    """Digits that no two layouts with a common refinement hold: they are not the same, and do not nest."""
    ends = [(a, b, space.span(*a), space.span(*b)) for a, b in _pairs(space)]
    return [(a, b) for a, b, one, other in ends if one != other and not nest(one, other)]


def nest(one: Cell, other: Cell) -> bool:
    """Whether two digits can be digits of one numeral."""
    return one.dim != other.dim or other.low % one.high == 0 or one.low % other.high == 0


def _pairs(space: Space) -> Iterator[tuple[tuple[int, Hold], tuple[int, Hold]]]:
    every = [(at, hold) for at, holds in enumerate(space.holds) for hold in holds]
    return itertools.product(every, every)


def _overlap(space: Space, a: tuple[int, Hold], b: tuple[int, Hold]) -> bool:
    return bool(set(space.covered(*a)) & set(space.covered(*b)))


class Between:
    """Two stages, and what follows for the cells and the factors between them."""

    def __init__(self, before: Stage, after: Stage, name: str) -> None:
        lib = z3()
        self.space, self.before, self.after, self.name = before.space, before, after, name
        self.factors = range(len(self.space.factors))
        self.kept = [lib.And(*(b == after.bits[at][h] for h, b in bits.items())) for at, bits in enumerate(before.bits)]
        pairs = list(zip(before.covered, after.covered, strict=True))
        self.stays = [lib.And(lib.Not(b), lib.Not(a)) for b, a in pairs]
        self.gathered = [lib.And(b, lib.Not(a)) for b, a in pairs]
        self.sliced = [lib.And(lib.Not(b), a) for b, a in pairs]

    def scattered(self, cells: Sequence[Any]) -> Any:
        """Whether a cell that stays local comes before one of these, so that blocks do not lead a tile."""
        lib = z3()
        late: list[Any] = []
        seen: Any = lib.BoolVal(False)
        for stays, cell in zip(self.stays, cells, strict=True):
            late.append(lib.And(seen, cell))
            seen = lib.Or(seen, stays)
        return lib.Or(*late)

    def summands_stay(self) -> Any:
        """The same factors are partial."""
        return z3().And(*(self.before.partial(at) == self.after.partial(at) for at in self.factors))

    def each(self, change: Callable[[int], Any]) -> Any:
        """Every factor keeps what it has, or changes so."""
        return z3().And(*(z3().Or(self.kept[at], change(at)) for at in self.factors))

    def some(self) -> Any:
        """Some factor changes."""
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
    """Unused factors take local digits, and all others keep what they have."""
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
    """Rounds are the shares of a result, less the one that every device has unless some digit changes holders."""
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
    """Digits that one factor holds before, and another one after."""
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
"""The steps that move data; "boxes" are exchanges between numerals that do not nest."""


def kinds(space: Space) -> list[str]:
    """The steps that can occur: reductions where there is something to combine, boxes where numerals can cross."""
    some = {"boxes": bool(crossings(space)), "reduce_scatter": bool(space.summed), "all_reduce": bool(space.summed)}
    return [kind for kind in RULES if some.get(kind, True)]
