"""Routes that permute tiles first, between contiguous layouts whose numerals do not nest.

    source    f32[{y}{x}2]          y = 3, x = 2: pieces of 2, six of them, counted y first
    permuted  f32[{x}{y}2]          the same six pieces, counted x first
    target    f32[{x}6]             now a gather of y

Once the holders of the pieces are reordered, the two numerals nest, and structured collectives do the rest in fewer
launches than an exchange of boxes. Which order helps is guessed here in a few ways; the planner prices them all.

A contiguous layout is written here as its `Holders`: for each dim, the prime factors of the device positions that
hold its leading digits, major to minor. On <y=3, x=2>, f32[{y}{x}2] is [[(2, 3), (1, 2)]].
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import islice, pairwise, permutations

from reshard.errors import LayoutError, StepError
from reshard.plans.plan import StepSpec
from reshard.plans.rules.collectives import check_step
from reshard.synth import cost
from reshard.synth.network import Links
from reshard.synth.routes import normal
from reshard.synth.routes.route import Pair, Route, hold_digits
from reshard.synth.wires import Wires
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis, prime_places
from reshard.types.whole import primes

MOST_DEVICES = 4096
"""Devices up to which pairs that nest are also routed over a permute: on more, pricing these takes too long."""

Prime = tuple[int, int]
"""A (stride, prime size) factor of the device positions."""

Holders = list[list[Prime]]
"""For each dim the factors that hold its leading digits, major to minor."""

Trip = tuple[int, int]
"""The dims that some factors leave and join."""


def routes(pair: Pair, links: Links | None) -> Iterator[Route]:
    """Routes over permutes for pairs that do not nest; with a network, a few for pairs that do.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2, y=3)
    >>> pair = Pair(Layout.parse("f32[{y}{x}]", mesh), Layout.parse("f32[{x}3]", mesh))
    >>> [[step.kind for step in route] for route in routes(pair, None)]
    [['permute', 'all_gather']]
    """
    if pair.reduces:
        return
    refinement = pair.refinement
    if refinement is not None:
        if links is None or pair.source.mesh.size > MOST_DEVICES:
            return
        if not (refinement.swapped or refinement.gathered):
            return
        # No permute of an even array with room for every cut (`move_classes`), or on links that are all alike, is worth
        # more than what `normal` has.
        roomy = isinstance(links, Wires) and links.sizes is not None
        if refinement.exact and (roomy or len({link.bandwidth for link in links.values()}) == 1):
            return
    holders = _holders_of_both(pair.source, pair.target)
    if holders is None:
        return
    seen: set[tuple[Layout, ...]] = set()
    make = cache(partial(_make_layout, pair.source))  # Guesses have most of their states in common.
    # Without a common refinement all guesses are tried, else permutes that let the source count as the target does.
    for states in _guess_states(pair.source, pair.target, *holders, thorough=refinement is None):
        try:
            layouts = [make(tuple(map(tuple, state))) for state in states]
        except LayoutError:  # sub-axes that cannot coexist in one layout
            continue
        path = [after for before, after in pairwise([pair.source, *layouts, pair.target]) if before != after]
        if tuple(path) not in seen:
            seen.add(tuple(path))
            yield from _follow_path(pair.source, path, links)


def _follow_path(source: Layout, path: list[Layout], links: Links | None) -> list[Route]:
    """The best steps from each layout of the path to the next, for each size; none if two neighbours do not nest."""
    routes: list[Route] = [()]
    for before, after in pairwise([source, *path]):
        stretch = Pair(before, after)
        if is_permute(before, after):
            best: list[Sequence[StepSpec]] = [(StepSpec("permute", after),)]
        elif stretch.refinement is None:
            return []
        elif links is None:
            best = [next(normal.routes(stretch, None))]
        else:
            best = cost.keep_fastest(normal.routes(stretch, links), before, links, ties=False)
        routes = [(*route, *steps) for route in routes for steps in best]
    return routes


def is_permute(operand: Layout, result: Layout) -> bool:
    """Whether one permute leads from operand to result."""
    try:
        check_step("permute", operand, result)
    except StepError:
        return False
    return True


def slice_source(source: Layout, target: Layout, later: list[tuple[int, int]]) -> tuple[Layout, Layout] | None:
    """The source sliced by what only the target uses, without the spans `later` and by all; None if not contiguous."""
    holders = _holders_of_both(source, target)
    if holders is None:
        return None
    full = _slice_holders(source, *holders)
    part = [[p for p in dim if not any(low <= p[0] < high for low, high in later)] for dim in full]
    # What is sliced later comes last in its dim: before another holder, it would move that one's place.
    every = [[*first, *(p for p in dim if p not in first)] for first, dim in zip(part, full, strict=True)]
    return _make_layout(source, part), _make_layout(source, every)


def list_before_gathers(source: Layout, target: Layout) -> Iterator[Layout]:
    """Layouts from which one gather leads to the target: one dim is cut further, by what only the source uses.

    An exchange to one of these has fewer rounds than one to the target, and receives fewer bytes by what the gather
    receives instead.
    """
    holders = _holders_of_both(source, target)
    if holders is None:
        return
    before, after = holders
    used = set(_flatten_dims(after))
    spent = [p for p in _flatten_dims(before) if p not in used]
    if not spent:
        return
    for at, dim in enumerate(target.dims):
        if dim.tile % math.prod(size for _, size in spent) == 0:
            with contextlib.suppress(LayoutError):  # sub-axes that cannot coexist in one layout
                yield _make_layout(source, [held + spent if n == at else held for n, held in enumerate(after)])


def gather_in_part(source: Layout, target: Layout) -> Iterator[list[Layout]]:
    """Layouts to pass through before the exchange between uneven layouts, so that it takes fewer rounds.

    f32[{y}{x}786/50257] to f32[{x}6283/50257], x = y = 8: permuted to f32[{x}{y}786/50257], and gathered to
    f32[1{x}{y:(1)2}3144/50257], whose pieces meet few of the target's.
    """
    holders = _holders_of_both(source, target)
    if holders is None or (source.even and target.even):
        return
    before, after = holders
    used = set(_flatten_dims(after))
    fine = _count_like(source, before, after) or before
    spent = [len(dim) - max((n for n, p in enumerate(dim, 1) if p in used), default=0) for dim in fine]
    for count in range(1, max(spent, default=0) + 1):
        kept = [dim[: len(dim) - min(count, most)] for dim, most in zip(fine, spent, strict=True)]
        # The pieces of the coarse layout are made of whole pieces of the fine one.
        digits: list[tuple[int, int, int | None]] = []
        for at, (held, major) in enumerate(zip(fine, kept, strict=True)):
            digits += [(at, size, stride) for stride, size in major]
            digits.append((at, source.dims[at].tile * math.prod(size for _, size in held[len(major) :]), None))
        with contextlib.suppress(LayoutError):  # sub-axes that cannot coexist in one layout
            yield [_make_layout(source, fine), hold_digits(source, digits)]


# ---- paths: layouts to pass through ----------------------------------------------------------------


def _guess_states(
    source: Layout, target: Layout, before: Holders, after: Holders, thorough: bool
) -> Iterator[list[Holders]]:
    """States to pass through: first slices or gathers, then permutes that count as the target does."""
    home = _home_dims(after)
    opened = [[p for p in dim if p in home] for dim in before]
    slices = (_slice_holders(source, before, after), _refine_holders(source, target, before, after))
    every = [before, *slices, opened]
    for first in (state for at, state in enumerate(every) if state not in every[:at]):
        permuted = _count_like(source, first, after)
        for start in [[first]] if permuted is None else [[first, permuted], [first]]:
            yield start
            if start == [first]:
                # One permute that puts every factor at hand for where it goes saves the permutes between the trips.
                parked = _count_like(source, first, after, park=True)
                if parked is not None:
                    for order in islice(_list_orders(parked, after), 2):
                        yield [first, parked, *_move_one_by_one(parked, after, order)]
            if thorough:
                for order in _list_orders(start[-1], after):
                    yield [*start, *_move_one_by_one(start[-1], after, order)]
    back = _count_like(target, after, before) if thorough else None
    if back is not None:
        yield [back]


# ---- states that slice -----------------------------------------------------------------------------


def _slice_holders(source: Layout, before: Holders, after: Holders) -> Holders:
    """The source's holders, with every factor that only the target uses added where the target has it, if it divides.

    A source [[x]] of tile 6, a target [[y, x]]: y of 2 is added, [[x, y]], one of 5 is not.
    """
    used = set(_flatten_dims(before))
    state: Holders = []
    for dim, held, wanted in zip(source.dims, before, after, strict=True):
        local, added = dim.tile, list[Prime]()
        for prime in wanted:
            if prime not in used and local % prime[1] == 0:
                local //= prime[1]
                added.append(prime)
        state.append(held + added)
    return state


def _refine_holders(source: Layout, target: Layout, before: Holders, after: Holders) -> Holders:
    """The source cut, by free factors, towards the largest tiles that divide the tiles of both layouts."""
    used = set(_flatten_dims(before))
    state: Holders = []
    for held, wanted, old, new in zip(before, after, source.dims, target.dims, strict=True):
        added: list[Prime] = []
        # Only prime factors that the old tile has and the new one has not: cut by others, it would not divide it.
        for size in primes(old.tile // math.gcd(old.tile, new.tile)) if old.tile else []:
            candidates = (p for p in (*wanted, *_all_primes(source.mesh)) if p[1] == size and p not in used)
            prime = next(candidates, None)
            if prime is not None:
                used.add(prime)
                added.append(prime)
        state.append(held + added)
    return state


# ---- states that permute ---------------------------------------------------------------------------


def _count_like(layout: Layout, held: Holders, wanted: Holders, park: bool = False) -> Holders | None:
    """As many pieces per dim as `held`, but counted by the factors of `wanted` as far as they go.

    The rest is filled with the dim's own factors, then any; with `park` first with what other dims want, so that it
    is at hand to move on. None if nothing changes or no factor of some size is left.
    """
    home = _home_dims(wanted)
    agreed: list[tuple[list[Prime], list[int]]] = []  # The leading factors of each dim, and the sizes left over.
    for own, order in zip(held, wanted, strict=True):
        taken, missing = list[Prime](), [size for _, size in own]
        for prime in order:
            if prime[1] not in missing:
                break
            missing.remove(prime[1])
            taken.append(prime)
        agreed.append((taken, missing))
    used = {p for taken, _ in agreed for p in taken}
    at_hand = set(_flatten_dims(held))
    ahead = [p for p in _flatten_dims(wanted) if p in at_hand] if park else []
    state: Holders = []
    for at, (own, (taken, missing)) in enumerate(zip(held, agreed, strict=True)):
        spare = [*ahead, *own, *_flatten_dims(held), *_all_primes(layout.mesh)]
        filled: list[Prime] = []
        for size in missing:
            prime = next((p for p in spare if p[1] == size and p not in used), None)
            if prime is None:
                return None
            used.add(prime)
            filled.append(prime)
        # Factors that will leave for another dim come last, where an all-to-all can take them.
        state.append(taken + sorted(filled, key=lambda p: home.get(p, at) != at))
    return state if state != held else None


def _list_orders(held: Holders, wanted: Holders) -> Iterator[Sequence[Trip]]:
    """The orders in which to move factors between dims; at most six are tried."""
    home = _home_dims(wanted)
    trips = list(dict.fromkeys((at, home.get(p, at)) for at, dim in enumerate(held) for p in dim))
    return islice(permutations([t for t in trips if t[0] != t[1]]), 6)


def _move_one_by_one(held: Holders, wanted: Holders, order: Sequence[Trip]) -> Iterator[Holders]:
    """(permute ; all_to_all) for each trip, then a permute: a permute puts what leaves last, an all-to-all takes it."""
    home = _home_dims(wanted)
    now = held
    for start, end in order:
        going = [p for p in now[start] if home.get(p, start) == end]
        staying = [p for p in now[start] if p not in going]
        now = [staying + going if at == start else dim for at, dim in enumerate(now)]
        yield now
        now = [staying if at == start else dim + going if at == end else dim for at, dim in enumerate(now)]
        yield now
    yield _end_holders(now, wanted)


def _end_holders(held: Holders, wanted: Holders) -> Holders:
    """Every dim in the target's order, with what the target does not use last, to be gathered."""
    used = _home_dims(wanted)
    return [
        [p for p in order if p in dim] + [p for p in dim if p not in used]
        for dim, order in zip(held, wanted, strict=True)
    ]


# ---- holders and layouts ---------------------------------------------------------------------------


def _holders_of_both(source: Layout, target: Layout) -> tuple[Holders, Holders] | None:
    """The holders of both layouts, None unless both are contiguous numerals and on one mesh."""
    if source.ragged or target.ragged:
        return None
    ends: list[Holders] = []
    for layout in (source, target):
        holders: Holders = []
        for dim in layout.dims:
            axes = [d.axis for d in dim.digits if d.axis is not None]
            if source.mesh != target.mesh or any(d.axis is None for d in dim.digits[: len(axes)]):
                return None
            holders.append([p for axis in axes for p in prime_places(layout.mesh, axis)])
        ends.append(holders)
    return ends[0], ends[1]


def _make_layout(source: Layout, state: Sequence[Sequence[Prime]]) -> Layout:
    """The contiguous layout with these holders."""
    mesh = source.mesh
    axes = [[sub for stride, size in dim for sub in mesh.sub_axes(stride, size)] for dim in state]
    return Layout.tiled(mesh, source.shape, source.dtype, axes, source.partial, source.reduction)


def _home_dims(wanted: Holders) -> dict[Prime, int]:
    """The dim that each factor holds in the target."""
    return {p: at for at, dim in enumerate(wanted) for p in dim}


def _flatten_dims(dims: Iterable[list[Prime]]) -> list[Prime]:
    return [p for dim in dims for p in dim]


def _all_primes(mesh: Mesh) -> Iterator[Prime]:
    for name, size in mesh.axes.items():
        yield from prime_places(mesh, SubAxis(name, 1, size))
