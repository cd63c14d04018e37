"""Fewest launches: a bounded search shows that no shorter plan exists within the same bytes and memory, or finds one.

The search knows the typing rules but nothing of the planner. z3 searches for steps from the source to the target with
fewer launches, and with at most the plan's bytes and memory. What it finds is priced by the rules themselves and built
as a plan, which is checked like every plan. If it finds nothing, its conditions are the proof: they have no solution.

    layouts as choices    which digit of the array each prime factor of the mesh holds
    rules as conditions   the typing rules, for z3: layouts as unknowns, and steps between them
    the search            a limited number of steps from a source to a target, as unknowns of one set of conditions
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from textwrap import indent
from typing import Any, NamedTuple

from reshard.errors import PlanError, ReshardError, StepError, UndecidedError, quoted
from reshard.geometry.figures import exchange_figures
from reshard.plans.plan import Plan, Step, chain
from reshard.plans.rules import split_steps
from reshard.plans.rules.step_mode import PLAIN, StepMode
from reshard.proofs import symbolic
from reshard.proofs.proof import Fewest
from reshard.proofs.symbolic.claims import z3
from reshard.types import dtypes
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.mesh import Mesh, SubAxis, places

# Layouts as choices.
#
#     mesh <x=2, y=3>, shape (6, 6)      x may hold a digit of radix 2, at place 1 or 3 of a dim; y one of radix 3
#     f32[{x}3, {y}2]                    x holds place 3 of dim 0, y holds place 2 of dim 1
#     f32[3{x}, 6]                       x holds place 1 of dim 0, y holds nothing
#
# Every even layout on these factors is one choice per factor such that the digits of a dim nest. All other digits are
# local.


class PrimeFactor(NamedTuple):
    """A prime factor of the device positions: `size` positions that are `stride` apart."""

    stride: int
    size: int


class Hold(NamedTuple):
    """The digit that a factor holds: a dim and a place value in it."""

    dim: int
    low: int


UNUSED = Hold(-1, 0)
PARTIAL = Hold(-2, 0)
State = tuple[Hold, ...]
"""A layout: what each factor holds."""


class PlaceSpan(NamedTuple):
    """The place values of a dim from `low` to `high`: those of a digit, or of a cell that no digit cuts."""

    dim: int
    low: int
    high: int


@dataclass(frozen=True)
class Space:
    """The layouts of a search: those of an array on the factors of a mesh, `summed` of which may be partial."""

    mesh: Mesh
    shape: tuple[int, ...]
    dtype: str
    reduction: str | None
    factors: tuple[PrimeFactor, ...]
    summed: frozenset[PrimeFactor]

    @cached_property
    def holds(self) -> tuple[tuple[Hold, ...], ...]:
        """The digits that each factor can hold, dim by dim and the major ones first."""
        holds: list[tuple[Hold, ...]] = []
        for _, radix in self.factors:
            sizes = [(dim, low) for dim, size in enumerate(self.shape) for low in range(size // radix, 0, -1)]
            holds.append(tuple(Hold(dim, low) for dim, low in sizes if self.shape[dim] % (low * radix) == 0))
        return tuple(holds)

    @cached_property
    def cells(self) -> tuple[PlaceSpan, ...]:
        """The dims cut wherever a digit may begin or end, major first."""
        cells: list[PlaceSpan] = []
        for dim, size in enumerate(self.shape):
            spans = [self.span(at, h) for at, holds in enumerate(self.holds) for h in holds if h.dim == dim]
            ends = sorted({1, size} | {end for _, low, high in spans for end in (low, high)})
            cells += [PlaceSpan(dim, low, high) for low, high in itertools.pairwise(ends)][::-1]
        return tuple(cells)

    def span(self, at: int, hold: Hold) -> PlaceSpan:
        """The place values of the digit that a factor holds."""
        return PlaceSpan(hold.dim, hold.low, hold.low * self.factors[at].size)

    def covered(self, at: int, hold: Hold) -> list[int]:
        """The numbers of the cells of the digit that a factor holds."""
        span = self.span(at, hold)
        return [n for n, c in enumerate(self.cells) if c.dim == span.dim and span.low <= c.low and c.high <= span.high]

    def state(self, layout: Layout) -> State:
        """The choices that make up a layout."""
        state = dict.fromkeys(self.factors, UNUSED)
        for axis in layout.partial:
            state |= {f: PARTIAL for f in self._within(layout.mesh.stride(axis), axis.size)}
        for at, dim in enumerate(layout.dims):
            low = dim.padded
            for radix, axis in dim.digits:
                low //= radix
                stride = 0 if axis is None else layout.mesh.stride(axis)
                for f in self._within(stride, radix) if stride else ():
                    state[f] = Hold(at, low * (f.stride // stride))
        return tuple(state.values())

    def _within(self, stride: int, size: int) -> list[PrimeFactor]:
        return [f for f in self.factors if stride <= f.stride < stride * size]

    def layout(self, state: State) -> Layout:
        """The layout that choices make up."""
        dims: list[Dim] = []
        for at, size in enumerate(self.shape):
            held = [(hold.low, f) for f, hold in zip(self.factors, state, strict=True) if hold.dim == at]
            digits: list[Digit] = []
            high = size
            for low, factor in sorted(held, reverse=True):
                digits += [Digit(high // (low * factor.size), None), Digit(factor.size, self._axis(factor))]
                high = low
            dims.append(Dim((*digits, Digit(high, None)), size))
        partial = tuple(self._axis(f) for f, hold in zip(self.factors, state, strict=True) if hold == PARTIAL)
        return Layout(self.mesh, tuple(dims), self.dtype, self.reduction if partial else None, partial)

    def _axis(self, factor: PrimeFactor) -> SubAxis:
        return self.mesh.sub_axes(factor.stride, factor.size)[0]

    def __str__(self) -> str:
        return ", ".join(f"{self.mesh.spell(self._axis(f))} ({f.size})" for f in self.factors)


def space_of(plan: Plan) -> Space:
    """The layouts among which a shorter plan is sought; raises `UndecidedError` if the plan's own are not among them.

    >>> print(space_of(Plan(*[Layout.parse("f32[{x}2, 4]", Mesh(x=6))] * 2, ())))
    x:(1)2 (2), x:(2)3 (3)
    """
    source, layouts = plan.source, [plan.source, plan.target, *(step.result for step in plan.steps)]
    if any(layout.mesh != source.mesh for layout in layouts):
        raise UndecidedError("the layouts are on several meshes")
    if not (source.even and plan.target.even) or 0 in source.shape:
        raise UndecidedError("only layouts that are even, and not empty, are searched")
    if dtypes.bits(source.dtype) < 8:
        raise UndecidedError("elements below a byte are not searched")
    if any(step.kind == "split_sum" for step in plan.steps):
        raise UndecidedError("plans that start a sum are not searched")
    # The prime factors of the positions, major first, cut where axes and the sub-axes in use end.
    mesh = source.mesh
    axes = [SubAxis(name, 1, size) for name, size in mesh.axes.items()]
    used = [axis for layout in layouts[:2] for axis in (*layout.held, *layout.partial)]
    ends = sorted({1} | {end for a in (*axes, *used) for end in (mesh.stride(a), mesh.stride(a) * a.size)})
    if any(high % low for low, high in itertools.pairwise(ends)):
        raise UndecidedError("sub-axes that overlap are not searched")
    factors = [PrimeFactor(*place) for low, high in itertools.pairwise(ends) for place in places(low, high // low)]
    strides = [(mesh.stride(axis), axis.size) for axis in source.partial]
    summed = frozenset(f for low, size in strides for f in factors if low <= f.stride < low * size)
    return Space(mesh, source.shape, source.dtype, source.reduction, tuple(sorted(factors, reverse=True)), summed)


# The typing rules as conditions.
#
#     f32[{x}4, 8] -> f32[8, 8] on <x=2>     before: "x holds place 4 of dim 0" is true; after: "x is unused" is true
#                                            cells of dim 0: [4, 8) gathered, [2, 4) and [1, 2) stay local
#
# An *unknown layout* has, for each factor of the mesh and each digit that it can hold, a bit that says whether it does.
# Between two unknown layouts there is a slice, which is free, or a step that moves data. What a step costs follows from
# the cells of the array (`Space.cells`): each is held or local before, and after. Bytes, launches and tiles are those
# of the rules, counted in elements.
#
# Two kinds of step are underpriced on purpose, so that no plan is missed. A step in pieces (parts, chunks, in place)
# needs no scratch and twice the launches. An exchange between numerals that do not nest receives only as much as the
# tile grows, in one launch. The rules price what z3 finds, and `Search.learn` adds what was underpriced as a condition.
#
# The typing rules are written here a second time because z3 needs them as formulas, where `plans.rules` computes
# numbers. The tests compare the two on all pairs of small layouts.


class Price(NamedTuple):
    """What a step costs, as expressions of z3: elements received, launches and elements of scratch."""

    received: Any
    launches: Any
    scratch: Any


class UnknownLayout:
    """One layout as unknowns: a bit for each factor and each digit that it can hold."""

    def __init__(self, space: Space, name: str, add: Callable[..., None]) -> None:
        lib, self.space = z3(), space
        # The bits of a factor: unused, partial where that is possible, and each digit.
        self.bits: list[dict[Hold, Any]] = []
        for factor, holds in zip(space.factors, space.holds, strict=True):
            every = (UNUSED, *((PARTIAL,) if factor in space.summed else ()), *holds)
            self.bits.append({h: lib.Bool(f"{name}:{factor.stride}:{h.dim}.{h.low}") for h in every})
        digits = [{h: b for h, b in bits.items() if h.dim >= 0} for bits in self.bits]
        covering: list[list[Any]] = [[] for _ in space.cells]  # for each cell, the bits of the digits that cover it
        for at, bits in enumerate(digits):
            for hold, bit in bits.items():
                for cell in space.covered(at, hold):
                    covering[cell].append(bit)
        # Each factor holds one thing, no cell is held twice, and digits nest.
        for bits in self.bits:
            add(lib.PbEq([(b, 1) for b in bits.values()], 1))
        for bits in covering:
            if len(bits) > 1:
                add(lib.AtMost(*bits, 1))
        for (f, h), (g, other) in clashes(space):
            add(lib.Or(lib.Not(self.bits[f][h]), lib.Not(self.bits[g][other])))
        self.covered = [lib.Or(*bits) for bits in covering]
        self.held = [lib.Or(*bits.values()) for bits in digits]
        self.tile, sizes = divide_by_flags(f"{name}:tile", math.prod(space.shape), self.held, space)
        add(*sizes)
        ranks = {hold: rank for rank, hold in enumerate(order_holds(space))}
        self.rank = [lib.Sum(*(lib.If(b, ranks[h], 0) for h, b in bits.items())) for bits in digits]

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


def order_holds(space: Space) -> list[Hold]:
    """All digits that some factor can hold, major first."""
    every = {hold for holds in space.holds for hold in holds}
    return sorted(every, key=lambda h: (h.dim, -h.low))


def divide_by_flags(name: str, whole: Any, flags: Sequence[Any], space: Space) -> tuple[Any, list[Any]]:
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
        if not bool(set(space.covered(*a)) & set(space.covered(*b))) and not can_nest(space.span(*a), space.span(*b))
    ]


@lru_cache(maxsize=16)
def crossings(space: Space) -> list[tuple[tuple[int, Hold], tuple[int, Hold]]]:
    """Pairs of digits that two layouts with a common refinement cannot hold: different ones that do not nest."""
    ends = [(a, b, space.span(*a), space.span(*b)) for a, b in _pairs(space)]
    return [(a, b) for a, b, one, other in ends if one != other and not can_nest(one, other)]


def can_nest(one: PlaceSpan, other: PlaceSpan) -> bool:
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
        before, after, lib = self.before.bits, self.after.bits, z3()
        return lib.And(*(lib.Not(lib.And(before[a][h], after[b][g])) for (a, h), (b, g) in crossings(self.space)))


def slice_condition(at: Between) -> Any:
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
    share, sizes = divide_by_flags(f"{at.name}:share", at.before.tile, moved, at.space)
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
    message, sizes = divide_by_flags(f"{at.name}:message", at.after.tile, given, at.space)
    pieces: Any = 1
    for f, flag in zip(at.space.factors, given, strict=True):
        pieces = lib.If(flag, f.size * pieces, pieces)
    swapped = lib.Or(  # One factor holds a digit before, and another one after.
        *(
            lib.And(at.before.bits[a][h], at.after.bits[b][g])
            for (a, h), (b, g) in _pairs(at.space)
            if a != b and at.space.span(a, h) == at.space.span(b, g)
        )
    )
    staged = lib.Or(at.scattered(at.gathered), at.scattered(at.sliced))
    received = lib.If(swapped, at.after.tile, at.after.tile - message)
    rounds = lib.If(swapped, pieces, pieces - 1)
    typed = lib.And(at.summands_stay(), at.nested, *sizes)
    return typed, Price(received, rounds, lib.If(lib.And(staged, rounds > 0), 2 * message, 0))


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


def step_kinds(space: Space) -> list[str]:
    """The kinds of step that can occur: reductions need partial factors, boxes need numerals that can cross."""
    some = {"boxes": bool(crossings(space)), "reduce_scatter": bool(space.summed), "all_reduce": bool(space.summed)}
    return [kind for kind in RULES if some.get(kind, True)]


# The search.
#
#     layouts     s0        s1        s2        s3        ...        source = s0, target = the last
#     steps          slice     move      slice     move              a slice or a move may also change nothing

_LONGEST = 1e6
"""Seconds; z3 counts milliseconds in 32 bits."""


class Goal(NamedTuple):
    """What a plan must meet: at most these elements received and live on the worst device, and these launches."""

    source: State
    target: State
    received: int
    live: int
    launches: int
    donate: bool


class Chosen(NamedTuple):
    """A step that z3 chose, and whether the source is kept beside it."""

    number: int
    kind: str
    before: State
    after: State
    retained: bool


class _UnknownStep(NamedTuple):
    """A step between two unknown layouts: its kind and costs, and whether an earlier step has left the source."""

    before: UnknownLayout
    after: UnknownLayout
    kinds: dict[str, Any]
    received: Any
    launches: Any
    begun: Any


class Search:
    """The conditions on plans of at most `length` steps that move data, with slices before, between and after them."""

    def __init__(self, space: Space, goal: Goal, length: int) -> None:
        lib = z3()
        self.space, self.goal = space, goal
        self.solver = lib.Solver()
        self.layouts = [UnknownLayout(space, f"s{n}", self.solver.add) for n in range(2 * length + 2)]
        self.steps: list[_UnknownStep] = []
        begun: Any = lib.BoolVal(False)
        for n in range(2 * length + 1):
            step = self._slice(n, begun) if n % 2 == 0 else self._move(n, begun)
            begun = lib.Or(begun, step.kinds["slice"] if n % 2 == 0 else lib.Not(step.kinds["none"]))
            self.steps.append(step)
        for one, other in zip(self.steps[1::2], self.steps[3::2], strict=False):
            self.solver.add(lib.Implies(one.kinds["none"], other.kinds["none"]))
        self.solver.add(*self.layouts[0].equals(goal.source), *self.layouts[-1].equals(goal.target))
        self.solver.add(lib.Sum([s.received for s in self.steps]) <= goal.received)
        self.solver.add(lib.Sum([s.launches for s in self.steps]) <= goal.launches)

    def _slice(self, n: int, begun: Any) -> _UnknownStep:
        at = Between(self.layouts[n], self.layouts[n + 1], f"t{n}")
        changed = at.some()
        self.solver.add(slice_condition(at))
        self._fits(changed, at, begun, 0, z3().BoolVal(True))
        return _UnknownStep(at.before, at.after, {"slice": changed}, z3().IntVal(0), z3().IntVal(0), begun)

    def _move(self, n: int, begun: Any) -> _UnknownStep:
        """A step of one of the kinds that move data, or none."""
        lib, add = z3(), self.solver.add
        at = Between(self.layouts[n], self.layouts[n + 1], f"t{n}")
        received, launches, scratch = (lib.Int(f"{at.name}:{what}") for what in ("received", "launches", "scratch"))
        chosen = {kind: lib.Bool(f"{at.name}:{kind}") for kind in ("none", *step_kinds(self.space))}
        add(lib.PbEq([(c, 1) for c in chosen.values()], 1))
        add(lib.Implies(chosen["none"], lib.And(*at.kept, received == 0, launches == 0)))
        add(lib.Or(chosen["none"], lib.And(at.some(), launches >= 1)))
        for kind in step_kinds(self.space):
            typed, price = RULES[kind](at)
            if kind == "boxes":  # priced later
                cost = lib.And(launches >= price.launches, scratch >= 0)
            else:  # As a whole, or in pieces: without scratch in twice the launches.
                whole = lib.And(launches >= price.launches, scratch == price.scratch)
                cost = lib.Or(whole, lib.And(launches >= 2 * price.launches, scratch == 0))
            add(lib.Implies(chosen[kind], lib.And(typed, received >= price.received, cost)))
        # Parts take each other's place in tiles of one size: beside the tile, two of at most as many as launches.
        tile, goal = at.before.tile, self.goal
        parts_fit = lib.And(tile == at.after.tile, launches >= 2, 2 * tile <= (goal.live - tile) * goal.launches)
        self._fits(lib.Not(chosen["none"]), at, begun, scratch, lib.Or(chosen["exchange"], parts_fit))
        return _UnknownStep(at.before, at.after, chosen, received, launches, begun)

    def _fits(self, changed: Any, at: Between, begun: Any, scratch: Any, in_place: Any) -> None:
        """Adds the condition that a step that changes something is within the memory.

        Live are the source if it is kept, operand, result and scratch. Where a step can run in place over a donated
        source, the larger of the two tiles is enough.
        """
        lib = z3()
        kept = 0 if self.goal.donate else lib.If(begun, self.layouts[0].tile, 0)
        fits = kept + at.before.tile + at.after.tile + scratch <= self.goal.live
        if self.goal.donate:
            tiles = [tile <= self.goal.live for tile in (at.before.tile, at.after.tile)]
            fits = lib.Or(fits, lib.And(in_place, *tiles))
        self.solver.add(lib.Implies(changed, fits))

    def find(self, seconds: float) -> list[Chosen] | None:
        """Steps that meet all conditions, None if there are none; raises `TimeoutError` if z3 does not say."""
        self.solver.set("timeout", max(1, int(min(seconds, _LONGEST) * 1000)))
        verdict = self.solver.check()
        if verdict == z3().unsat:
            return None
        if verdict != z3().sat:
            raise TimeoutError(self.solver.reason_unknown())
        model = self.solver.model()
        choices: list[Chosen] = []
        for n, step in enumerate(self.steps):
            kind = next((k for k, chosen in step.kinds.items() if z3().is_true(model.eval(chosen, True))), "none")
            if kind != "none":
                retained = z3().is_true(model.eval(step.begun, True)) and not self.goal.donate
                choices.append(Chosen(n, kind, step.before.read(model), step.after.read(model), retained))
        return choices

    def learn(self, step: Chosen, price: tuple[int, int] | None) -> None:
        """Adds that a step receives and launches at least its price, at every place; None: it cannot be done."""
        lib = z3()
        for other in self.steps[step.number % 2 :: 2]:
            this = [other.kinds[step.kind], *other.before.equals(step.before), *other.after.equals(step.after)]
            if not self.goal.donate:
                this.append(other.begun == step.retained)
            then = lib.BoolVal(False)
            if price is not None:
                then = lib.And(other.received >= price[0], other.launches >= price[1])
            self.solver.add(lib.Implies(lib.And(*this), then))


MOST_ELEMENTS = 1 << 12
"""A larger message is not tried in chunks of every size, so whether some chunk fits is undecided."""


def cheapest_step(
    kind: str, operand: Layout, result: Layout, retained: int, live: int, most: int, donate: bool
) -> Step | None:
    """The step with the fewest launches, within `most` launches and `live` bytes; None if there is none.

    `retained` bytes are live beside it. Only if the source is donated may it run in place.

    >>> from reshard.types import Mesh
    >>> operand, result = (Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4, 16]", "f32[16, {x}4]"))
    >>> [cheapest_step("all_to_all", operand, result, 0, live, 4, donate=False).launches for live in (768, 767)]
    [1, 4]
    """

    def list_modes() -> Iterator[tuple[str, StepMode]]:
        """As a whole and in parts; an exchange also in chunks of all sizes; and in place, which a slice can be."""
        yield kind, PLAIN
        for count in split_steps.possible_counts(operand, result):
            if count <= most:
                yield from ((kind, StepMode(parts=count, in_place=in_place)) for in_place in {False, donate})
        if kind == "slice" and donate:
            yield "exchange", StepMode(in_place=True)
        if kind != "exchange":
            return
        size = exchange_figures(operand, result)
        for count in range(1, most + 1) if donate else ():
            yield kind, StepMode(-(-size.message // count), in_place=True)
        if size.message > MOST_ELEMENTS:
            raise UndecidedError(f"messages of {size.message} elements are not cut in all ways")
        for cap in range(size.message - 1, 0, -1):  # The larger the chunks, the fewer the launches.
            if size.cut(cap)[0] > most:
                return
            yield kind, StepMode(chunk=cap)

    fitting: list[Step] = []
    for name, mode in list_modes():
        try:
            step = Step(name, operand, result, mode, retained)
        except StepError:
            continue
        if step.live_bytes <= live and step.launches <= most:
            fitting.append(step)
            if mode == PLAIN:  # Pieces only add launches.
                break
    return min(fitting, key=lambda step: step.launches, default=None)


MOST_CHOICES = 400_000
"""A search over more pairs of digits, layout by layout, is not started: writing its conditions would take too long."""


def fewest(plan: Plan, limit: float = 30.0) -> Fewest:
    """Searches for a plan with fewer launches that receives as few bytes in the same memory, for `limit` seconds.

    >>> import reshard as rs
    >>> mesh = rs.Mesh(x=2, y=2)
    >>> plan = rs.plan(rs.Layout.parse("f32[{x}4, 8]", mesh), rs.Layout.parse("f32[{y}4, {x}4]", mesh))
    >>> fewest(plan).argument
    ('some device receives 64 bytes in any plan, and nothing is received without a launch',)
    """
    if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"{quoted(plan)} is a {type(plan).__name__}, not a Plan; give what reshard.plan() returns")
    check_limit(limit)
    if (known := _without_search(plan)) is not None:
        return known
    deadline = time.monotonic() + limit
    try:
        if not _ONE_SEARCH.acquire(timeout=min(max(0.0, limit), threading.TIMEOUT_MAX)):
            raise TimeoutError("another thread searches")
        try:
            # A shorter plan, then one that is shorter still, until there is none.
            space, best = space_of(plan), plan
            verdict: Fewest | None = None
            try:
                while verdict is None and best.launches > min(1, best.lower_bound_bytes):
                    shorter, verdict = _search_once(plan, space, best.launches, deadline)
                    best = shorter or best
            except (TimeoutError, UndecidedError):
                if best is plan:
                    raise
                verdict = _undecided("whether there are fewer still")
            if best is plan and verdict is not None:
                return verdict
            fewer = verdict or _without_search(best) or _undecided("whether there are fewer still")
            statement = f"fewer launches exist:\n{indent(str(best), '    ')}"
            return Fewest(statement, (fewer.statement, *fewer.argument), fewer.claims, holds=False, better=best)
        finally:
            _ONE_SEARCH.release()
    except TimeoutError:
        return _undecided(f"the search was ended after {limit:g} s")
    except UndecidedError as error:
        return _undecided(str(error))


def check_limit(limit: object) -> None:
    """Raises `PlanError` for what is not a number of seconds, at least 0, that the search may take."""
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        raise PlanError(f"limit {quoted(limit)}: give the seconds that the search may take, a number of at least 0")


_ONE_SEARCH = threading.Lock()
"""Searches share z3's main context, in which two threads at once would end the process."""


def _undecided(why: str) -> Fewest:
    return Fewest(f"not decided: {why}", (), holds=False)


def _count_launches(count: int) -> str:
    return f"{count} launch{'' if count == 1 else 'es'}"


def _no_fewer(plan: Plan, launches: int) -> str:
    """The statement that no plan has fewer launches."""
    return (
        f"no plan with fewer than {_count_launches(launches)} receives at most {plan.received_bytes} bytes on the "
        f"worst device within {plan.peak_bytes} bytes"
    )


def _without_search(plan: Plan) -> Fewest | None:
    """The verdict on a plan of no launches, and on one of a single launch that has something to receive."""
    if plan.launches == 0:
        return Fewest("nothing is launched", ())
    if plan.launches > 1 or plan.lower_bound_bytes == 0:
        return None
    why = f"some device receives {plan.lower_bound_bytes} bytes in any plan, and nothing is received without a launch"
    return Fewest(_no_fewer(plan, 1), (why,))


def _search_once(plan: Plan, space: Space, launches: int, deadline: float) -> tuple[Plan | None, Fewest | None]:
    """A plan with fewer than `launches` launches, or else the verdict that there is none."""
    size = sum(map(len, space.holds)) ** 2 * launches
    if size > MOST_CHOICES:
        raise UndecidedError(f"a search over {launches - 1} steps on {len(space.factors)} sub-axes is too large")
    one = plan.source.nbytes(1)  # The plan's figures are in elements: every buffer has a whole number of them.
    ends, figures = (space.state(plan.source), space.state(plan.target)), (plan.received_bytes, plan.peak_bytes)
    goal = Goal(*ends, figures[0] // one, figures[1] // one, launches - 1, plan.donate)
    priced, conditions = 0, ""
    for length in range(min(1, launches - 1), launches):
        if time.monotonic() > deadline:
            raise TimeoutError
        search = Search(space, goal, length)
        better, learnt = _first_found(plan, launches, search, deadline)
        priced += learnt
        if better is not None:
            return better, None
        conditions = search.solver.to_smt2()
    moves = ", ".join(kind for kind in step_kinds(space) if kind != "boxes")
    argument = [
        f"searched: slices, and at most {launches - 1} of {moves}, in any order, whole or in pieces, between any even "
        f"layouts of shape {space.shape} on the sub-axes {space}",
        "an exchange counts a launch for each of its rounds; what a step costs is what its typing rule says",
    ]
    if priced:
        argument.append(f"{priced} steps that z3 chose were priced by their rules, and turned out too expensive")
    claim = symbolic.Absent(f"{_count_launches(launches - 1)} or fewer", conditions)
    return None, Fewest(_no_fewer(plan, launches), tuple(argument), (claim,))


def _first_found(plan: Plan, launches: int, search: Search, deadline: float) -> tuple[Plan | None, int]:
    """The first plan that the search finds, if any, and the number of steps that had to be priced.

    Each iteration excludes a step between two layouts or makes it more expensive, so the loop ends.
    """
    learnt, one, space = 0, plan.source.nbytes(1), search.space
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        choices = search.find(left)
        if choices is None:
            return None, learnt
        steps: list[Step | None] = []  # Each as its typing rule prices it, with the fewest launches that fit.
        for chosen in choices:
            kind = "exchange" if chosen.kind == "boxes" else chosen.kind
            operand, result = space.layout(chosen.before), space.layout(chosen.after)
            kept = plan.source.tile_bytes if chosen.retained else 0
            steps.append(cheapest_step(kind, operand, result, kept, plan.peak_bytes, launches - 1, plan.donate))
        if None not in steps:
            specs = [step.spec for step in steps if step is not None]
            try:
                better = chain(plan.source, plan.target, specs, plan.donate)
            except ReshardError:
                better = plan
            fits = better.received_bytes <= plan.received_bytes and better.peak_bytes <= plan.peak_bytes
            if fits and better.launches < launches and better is not plan:
                return better, learnt
        for chosen, step in zip(choices, steps, strict=True):
            search.learn(chosen, None if step is None else (step.received_bytes // one, step.launches))
        learnt += len(choices)
