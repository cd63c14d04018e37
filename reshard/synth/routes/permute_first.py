"""Routes over a permute, between contiguous layouts whose numerals do not nest.

    source  f32[{y}{x}2]          y = 3, x = 2: pieces of 2, six of them, counted y first
    bridge  f32[{x}{y}2]          the same six pieces, counted x first: one permute away
    target  f32[{x}6]             ... and now a gather of y away

Reordering who holds which piece makes two numerals nest, so that the structured collectives do the
rest in fewer launches than an exchange of boxes. Which order serves is guessed here in a few ways;
the planner prices them all.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise, permutations

from reshard.errors import LayoutError
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis, prime_places, primes

Prime = tuple[int, int]
"""A (stride, prime size) factor of the device positions."""

Holders = list[list[Prime]]
"""For each dim the factors that hold its leading digits, major to minor."""


def paths(source: Layout, target: Layout, thorough: bool) -> Iterator[list[Layout]]:
    """Layouts to pass through after the source, target included; neighbours nest or are permuted.

    Not `thorough` tries only the permute that lets the source count as the target does.
    """
    before, after = _holders(source), _holders(target)
    if before is None or after is None or source.mesh != target.mesh:
        return
    seen: set[tuple[Layout, ...]] = set()
    for states in _guesses(source, target, before, after, thorough):
        # Sub-axes that cannot co-exist in one layout make no bridge.
        with contextlib.suppress(LayoutError):
            path = _layouts(source, target, states)
            if tuple(path) not in seen:
                seen.add(tuple(path))
                yield path


def sliced(source: Layout, target: Layout, later: list[tuple[int, int]]) -> tuple[Layout, Layout] | None:
    """The source sliced by what only the target uses: first without the strides in `later`, then whole."""
    before, after = _holders(source), _holders(target)
    if before is None or after is None or source.mesh != target.mesh:
        return None
    whole = _sliced(source, before, after)
    part = [[p for p in dim if not any(low <= p[0] < high for low, high in later)] for dim in whole]
    return _tiled(source, part), _tiled(source, whole)


def before_gathers(source: Layout, target: Layout) -> Iterator[Layout]:
    """Layouts from which one gather leads to the target: cut further, in some dim, by what only the source uses.

    An exchange to one of these has fewer rounds than one to the target, and receives what the gather then does not.
    """
    before, after = _holders(source), _holders(target)
    if before is None or after is None or source.mesh != target.mesh or not (source.even and target.even):
        return
    used = {p for dim in after for p in dim}
    free = [p for dim in before for p in dim if p not in used]
    if not free:
        return
    for at, dim in enumerate(target.dims):
        if dim.tile % math.prod(size for _, size in free) == 0:
            # Sub-axes that cannot co-exist in one layout make none.
            with contextlib.suppress(LayoutError):
                yield _tiled(source, [held + free if n == at else held for n, held in enumerate(after)])


def _guesses(
    source: Layout, target: Layout, before: Holders, after: Holders, thorough: bool
) -> Iterator[list[Holders]]:
    whole, finest = _sliced(source, before, after), _finest(source, target, before, after)
    home = _homes(after)
    opened = [[p for p in dim if p in home] for dim in before]
    for first in _distinct([before, whole, finest, opened]):
        bridge = _following(source, first, after)
        for start in [[first]] if bridge is None else [[first, bridge], [first]]:
            yield start
            parked = _following(source, first, after, park=True) if start == [first] else None
            if parked is not None:
                for order in islice(_orders(parked, after), 2):
                    yield [first, parked, *_one_by_one(parked, after, order)]
            if not thorough:
                continue
            for order in _orders(start[-1], after):
                yield [*start, *_one_by_one(start[-1], after, order)]
            for ordered in (False, True):
                yield [*start, *_together(start[-1], after, ordered)]
    back = _following(target, after, before) if thorough else None
    if back is not None:
        yield [back]


def _distinct(states: list[Holders]) -> list[Holders]:
    return [s for at, s in enumerate(states) if s not in states[:at]]


def _holders(layout: Layout) -> Holders | None:
    """The holders of a contiguous layout, None for any other."""
    found: Holders = []
    for dim in layout.dims:
        held = [d.axis for d in dim.digits if d.axis is not None]
        if any(d.axis is None for d in dim.digits[: len(held)]):
            return None
        found.append([p for axis in held for p in prime_places(layout.mesh, axis)])
    return found


def _layouts(source: Layout, target: Layout, states: Sequence[Holders]) -> list[Layout]:
    """The layouts of these holders and the target, without those that change nothing."""
    found = [source, *(_tiled(source, state) for state in states)]
    return [after for before, after in pairwise([*found, target]) if before != after]


def _tiled(source: Layout, state: Holders) -> Layout:
    mesh = source.mesh
    axes = [[sub for stride, size in dim for sub in mesh.sub_axes(stride, size)] for dim in state]
    return Layout.tiled(mesh, source.shape, source.dtype, axes, source.partial, source.reduction)


def _sliced(source: Layout, before: Holders, after: Holders) -> Holders:
    """The source with every factor that only the target uses added where it wants it, if it divides."""
    used = {p for dim in before for p in dim}
    found: Holders = []
    for dim, held, wanted in zip(source.dims, before, after, strict=True):
        local, added = dim.tile, list[Prime]()
        for prime in wanted:
            if prime not in used and local % prime[1] == 0:
                local //= prime[1]
                added.append(prime)
        found.append(held + added)
    return found


def _finest(source: Layout, target: Layout, before: Holders, after: Holders) -> Holders:
    """The source cut towards the largest tiles that both layouts' tiles are made of, by free factors."""
    used = {p for dim in before for p in dim}
    found: Holders = []
    for held, wanted, old, new in zip(before, after, source.dims, target.dims, strict=True):
        added: list[Prime] = []
        for size in primes(old.tile // math.gcd(old.tile, new.tile)) if old.tile else []:
            free = (p for p in (*wanted, *_all_primes(source.mesh)) if p[1] == size and p not in used)
            prime = next(free, None)
            if prime is not None:
                used.add(prime)
                added.append(prime)
        found.append(held + added)
    return found


def _following(layout: Layout, held: Holders, wanted: Holders, park: bool = False) -> Holders | None:
    """As many pieces per dim as `held`, but counted by the factors of `wanted` as far as they go.

    `park` fills the rest with what other dims want, wherever it was, so that it is at hand to move on.
    """
    used: set[Prime] = set()
    found: Holders = []
    missing: list[list[int]] = []
    for dim, order in zip(held, wanted, strict=True):
        need = [size for _, size in dim]
        taken: list[Prime] = []
        for prime in order:
            if prime[1] not in need:
                break
            need.remove(prime[1])
            taken.append(prime)
        used.update(taken)
        found.append(taken)
        missing.append(need)
    home = _homes(wanted)
    for at, (dim, own, need) in enumerate(zip(found, held, missing, strict=True)):
        filled: list[Prime] = []
        ahead = [p for order in wanted for p in order if any(p in other for other in held)] if park else []
        spare = [*ahead, *own, *(p for other in held for p in other), *_all_primes(layout.mesh)]
        for size in need:
            prime = next((p for p in spare if p[1] == size and p not in used), None)
            if prime is None:
                return None
            used.add(prime)
            filled.append(prime)
        # Those that will leave for another dim come last, where an all-to-all can take them.
        dim += sorted(filled, key=lambda p: home.get(p, at) != at)
    return found if found != held else None


def _all_primes(mesh: Mesh) -> Iterator[Prime]:
    for name, size in mesh.axes.items():
        yield from prime_places(mesh, SubAxis(name, 1, size))


def _together(held: Holders, wanted: Holders, ordered: bool) -> list[Holders]:
    """permute ; all_to_all ; permute: those that leave a dim last, then moved, then in target order.

    `ordered` puts what stays into the target's order first, which may save the second permute.
    """
    home = _homes(wanted)
    leaving = [[p for p in dim if home.get(p, at) != at] for at, dim in enumerate(held)]
    staying = [[p for p in dim if home.get(p, at) == at] for at, dim in enumerate(held)]
    if ordered:
        rank = {p: n for dim in wanted for n, p in enumerate(dim)}
        staying = [sorted(dim, key=lambda p: rank.get(p, len(rank))) for dim in staying]
    moved = [p for dim in leaving for p in dim]
    landed = [dim + [p for p in moved if home[p] == at] for at, dim in enumerate(staying)]
    return [held, [s + gone for s, gone in zip(staying, leaving, strict=True)], landed, _final(landed, wanted)]


Trip = tuple[int, int]
"""The dims that some factors leave and join."""


def _orders(held: Holders, wanted: Holders) -> Iterator[Sequence[Trip]]:
    """The orders in which to move factors between dims; more than six are not tried."""
    home = _homes(wanted)
    trips = list(dict.fromkeys((at, home.get(p, at)) for at, dim in enumerate(held) for p in dim))
    return islice(permutations([t for t in trips if t[0] != t[1]]), 6)


def _one_by_one(held: Holders, wanted: Holders, order: Sequence[Trip]) -> Iterator[Holders]:
    """(permute ; all_to_all) for each trip, then permute: a dim is left before, or after, it is joined."""
    home = _homes(wanted)
    now = held
    for start, end in order:
        going = [p for p in now[start] if home.get(p, start) == end]
        staying = [p for p in now[start] if p not in going]
        now = [staying + going if at == start else dim for at, dim in enumerate(now)]
        yield now
        now = [staying if at == start else dim + going if at == end else dim for at, dim in enumerate(now)]
        yield now
    yield _final(now, wanted)


def _final(held: Holders, wanted: Holders) -> Holders:
    """Every dim in the target's order, with what the target does not use last, to be gathered."""
    used = _homes(wanted)
    return [
        [p for p in order if p in dim] + [p for p in dim if p not in used]
        for dim, order in zip(held, wanted, strict=True)
    ]


def _homes(wanted: Holders) -> dict[Prime, int]:
    return {p: at for at, dim in enumerate(wanted) for p in dim}
