"""Classes of moves: those between even layouts of which the same digits are held before and after, wherever they stand.

Who holds which digit decides what a move takes on a network, and where the digits stand does not. So all moves of a
class are planned once, as a move of its own: a dim for each digit that is held, and one before them that stays local,
with room for every cut.

    on <x=2, y=2, z=2>   f32[{x}2048, {y}256] -> f32[4096, {z}{y}128]
    digits               2 x -> -    2048 - -> -    2 y -> z    2 - -> y    128 - -> -
    class                f32[24, {x}1, {y}1, 2] -> f32[24, 2, {z}1, {y}1]        all with 2 x -> -, 2 y -> z, 2 - -> y
    its route            slice f32[{z}12, {x}1, {y}1, 2] ; exchange f32[24, 2, {z}1, {y}1]
    the move's           slice f32[{x}{z}1024, {y}256] ; exchange f32[4096, {z}{y}128]

Its routes are those that are fastest at some size, which take seconds that are known functions of it
(`cost.StepTime`), and bytes that grow with it. Axes that are alike are named in an order of their own. What has no
class, or too little that stays local for what the fastest route cuts, is planned as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count, pairwise
from typing import NamedTuple

from reshard.errors import PlanError
from reshard.geometry.refine import Factor, PartialChange, RefinedDigit, Refinement, partial_change, prime_digits
from reshard.plans.plan import StepSpec
from reshard.synth import cost
from reshard.synth.network import Links
from reshard.synth.routes import Pair, Route, idle, list_routes, normal, reduction
from reshard.synth.routes.route import hold_digits
from reshard.synth.wires import Wires
from reshard.types import dtypes
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.mesh import Mesh, SubAxis, is_chain, places
from reshard.types.reductions import all_reduce_elements, identity
from reshard.types.whole import primes


def find_fastest(
    pair: Pair, routes: Iterable[Sequence[StepSpec]], links: Links
) -> tuple[list[Sequence[StepSpec]], list[Route]]:
    """The fastest of these routes and of those over idle axes, and all of the second kind that were tried."""
    known: cost.Known = {}
    fastest = cost.keep_fastest(routes, pair.source, links, known)
    least = cost.route_seconds(fastest[0], pair.source, links, known)
    # Of several sizes, the largest may take any time.
    several = isinstance(links, Wires) and links.sizes is not None
    over = list(idle.routes(pair, links, math.inf if several else least)) if least else []
    return cost.keep_fastest([*fastest, *over], pair.source, links, known) if over else fastest, over


def check_start(pair: Pair) -> None:
    """Refuses a target that is partial where the source is not, by an operation that no value leaves as it is."""
    target = pair.target
    if pair.starts and identity(target.dtype, str(target.reduction)) is None:
        # All summands but one would be zeros, or what stands for them: no values can fill the target.
        raise PlanError(
            f"target {target} is partial where source {pair.source} is not (mesh {target.mesh}), but no value of "
            f"{target.dtype} leaves a {target.reduction} as it is, so nothing can fill the other summands; give a "
            f"target that is a sum, or one that is not partial"
        )


def list_timed_routes(pair: Pair, links: Wires, every: bool) -> list[Route]:
    """The fastest routes of a pair, or every one that may be worth it: those of its class, else those of its own."""
    classes = find_classes(pair.source.mesh, links)
    move = classes.read_move(pair)
    spelled = [] if move is None else classes.spell_fastest(move)
    if spelled and not every:
        return spelled
    routes = list_routes(pair, links)
    fastest, over = find_fastest(pair, routes, links)
    return [*dict.fromkeys((*spelled, *routes, *over))] if every else [tuple(route) for route in fastest]


class MoveClass(NamedTuple):
    """The digits that are held, as (radix, source's stride, target's), 0 for local, and of the two layouts what is
    partial, by which operation and of which dtype."""

    held: tuple[tuple[int, int, int], ...]
    sums: tuple[tuple[tuple[SubAxis, ...], str | None], ...]
    dtype: str


class ClassedMove(NamedTuple):
    """A move, its class, and how it is spelled: the axis of each one of the class, and the number of each held digit
    among those of the class, by its strides."""

    pair: Pair
    kind: MoveClass
    nbytes: int
    refinement: Refinement
    axes: Mapping[str, str]
    places: Mapping[tuple[int | None, int | None], int]

    @property
    def local(self) -> list[int]:
        """The radices of the digits that stay local."""
        return [digit.radix for digit in self.refinement.digits if digit.src is digit.dst is None]


class MoveClasses:
    """The classes of the moves on a mesh with these links, and the routes of each.

    >>> from reshard.synth.network import Network
    >>> mesh = Mesh(x=2, y=2, z=2)
    >>> classes = find_classes(mesh, Network.preset("tpu-v5p").links(mesh))
    >>> ends = (Layout.parse(text, mesh) for text in ("f32[{x}2048, {y}256]", "f32[4096, {z}{y}128]"))
    >>> move = classes.read_move(Pair(*ends))
    >>> [[str(step.result) for step in route] for route in classes.spell_fastest(move)]
    [['f32[{x}{z}1024, {y}256]', 'f32[4096, {z}{y}128]']]
    """

    def __init__(self, mesh: Mesh, links: Wires) -> None:
        self._mesh = mesh
        # Tiles below some size are never cut for lending: which of the tiles on the way are decides the routes.
        worth = normal.least_lent(links)
        cuts = {1}
        for prime in primes(mesh.size) if len({link.bandwidth for link in links.values()}) > 1 else ():
            cuts |= {cut * prime for cut in cuts}
        least = [worth * cut for cut in sorted(cuts) if len(cuts) > 1 and worth * cut > 1]
        self._edges = [1.0, *least, float(normal.MOST_BYTES)]
        ranges = [*pairwise(self._edges), (self._edges[0], self._edges[-1])]
        self._wires = [links.for_sizes(low * (1 + 1e-9), high) for low, high in ranges]
        self._alike = {name: names for names in links.list_alike(mesh) for name in names}
        self._below = {name: mesh.stride(SubAxis(name, 1, size)) for name, size in mesh.axes.items()}
        self._strides: dict[int, tuple[str, int]] = {}
        self._routes: dict[tuple[MoveClass, int], ClassRoutes] = {}

    def read_move(self, pair: Pair) -> ClassedMove | None:
        """A move with its class; None for one that has none, or other devices."""
        source, target = pair.source, pair.target
        if source.mesh != self._mesh or target.mesh != self._mesh or source.dtype != target.dtype:
            return None
        elements, bits = math.prod(source.shape), dtypes.bits(source.dtype)
        nbytes, partial = elements * bits // 8, source.partial or target.partial
        # Sums of elements that devices cannot share evenly are rounded up, and so are elements of less than a byte.
        if bits % 8 or not 0 < nbytes < normal.MOST_BYTES or (partial and elements % self._mesh.size):
            return None
        refinement = pair.refinement
        if refinement is None or not refinement.exact:
            return None
        digits = [digit for digit in refinement.digits if not digit.src is digit.dst is None]
        names = self._name_axes([digit[1:] for digit in digits], (source, target))
        strides: dict[int | None, int] = {None: 0}
        for digit in digits:
            for stride in digit[2:]:
                if stride not in strides and stride is not None:
                    axis, offset = self._place_stride(stride)
                    strides[stride] = self._below[names[axis]] * offset
        held = sorted(((radix, strides[src], strides[dst]), (src, dst)) for _, radix, src, dst in digits)
        sums = tuple(
            (tuple(sorted(axis._replace(axis=names[axis.axis]) for axis in end.partial)), end.reduction)
            for end in (source, target)
        )
        # Only the operations of sums tell dtypes apart.
        kind = MoveClass(tuple(each for each, _ in held), sums, source.dtype if partial else "")
        places = {ends: number for number, (_, ends) in enumerate(held)}
        return ClassedMove(pair, kind, nbytes, refinement, {new: old for old, new in names.items()}, places)

    def count_stretch(self, nbytes: int) -> int:
        """The number of the sizes, from small to large, for which a class has routes together."""
        return sum(edge <= nbytes for edge in self._edges) - 1

    def find_routes(self, move: ClassedMove) -> ClassRoutes:
        """The routes of the class of a move, searched for the first time that it's met."""
        # Only among digits that change holders, before or after a sum, can a permute be of a cycle that lends.
        lends = move.kind.dtype or any(src and dst and src != dst for _, src, dst in move.kind.held)
        stretch = self.count_stretch(move.nbytes) if lends else -1
        if (move.kind, stretch) not in self._routes:
            self._routes[move.kind, stretch] = ClassRoutes(self._mesh, move.kind, self._wires[stretch])
        return self._routes[move.kind, stretch]

    def spell_fastest(self, move: ClassedMove) -> list[Route]:
        """The fastest routes of a move, as its class has them; none if it has too little that stays local."""
        routes = self.find_routes(move)
        return [routes.spell(at, move) for at in routes.list_fastest(move.nbytes, move.local)[1]]

    def _place_stride(self, stride: int) -> tuple[str, int]:
        """The axis of a stride, and how many times the axis' own it is."""
        if stride not in self._strides:
            axis = self._mesh.axis_at(stride)
            self._strides[stride] = axis, stride // self._below[axis]
        return self._strides[stride]

    def _name_axes(
        self, digits: Sequence[tuple[int, int | None, int | None]], ends: tuple[Layout, Layout]
    ) -> dict[str, str]:
        """The names of axes in the class: those of alike ones go by what they hold."""
        holds: dict[str, list[tuple[int, ...]]] = {}
        for radix, *strides in digits:
            placed = [(None, 0) if stride is None else self._place_stride(stride) for stride in strides]
            for at, (axis, offset) in enumerate(placed):
                if axis is not None:
                    other, beside = placed[1 - at]
                    holds.setdefault(axis, []).append((at, radix, offset, beside, other == axis))
        for at, end in enumerate(ends):
            for axis, pre, size in end.partial:
                holds.setdefault(axis, []).append((at + 2, pre, size, 0, False))
        left = {names: iter(names) for names in self._alike.values()}
        used = sorted(holds, key=lambda axis: sorted(holds[axis]))
        return {axis: next(left[self._alike[axis]]) for axis in dict.fromkeys((*used, *self._mesh.axes))}


@lru_cache(maxsize=64)
def find_classes(mesh: Mesh, links: Wires) -> MoveClasses:
    """The classes on a mesh, kept with what was found of them."""
    return MoveClasses(mesh, links)


Sums = tuple[tuple[SubAxis, ...], str | None]
"""The sub-axes along which a layout is partial, and by which operation."""


class _ClassRoute(NamedTuple):
    """A route of a class: its digits, parts of those with their numbers as dims, where the local one comes after those
    that are held; of each step the kind, who holds the digits after it, and the sums; and the seconds of those that
    take any, for a byte of the array."""

    digits: tuple[RefinedDigit, ...]
    steps: list[tuple[str, normal.State, Sums]]
    times: list[cost.StepTime]


class ClassRoutes:
    """The routes of a class that are fastest at some size for which the wires are."""

    def __init__(self, mesh: Mesh, kind: MoveClass, wires: Wires) -> None:
        # More than all cuts of all devices, so that the end of the last part that is cut off is inside the digit.
        room = mesh.size * next(more for more in count(2) if mesh.size % more)
        found = list(_list_class_routes(mesh, kind, wires, room))
        low, high = wires.sizes or (1.0, float(normal.MOST_BYTES))
        self._kind, self._devices = kind, mesh.size
        self._found = [found[at] for at in cost.pick_fastest([route.times for route in found], low, high)]
        self._parts: dict[int, list[tuple[int, int]]] = {}
        self._received: dict[tuple[int, ...], int] = {}

    def list_fastest(self, nbytes: int, local: Sequence[int]) -> tuple[float, tuple[int, ...]]:
        """The seconds of arrays of so many bytes, and the numbers of the routes that take them, without those for which
        too little is local."""
        seconds = [sum(time.at(nbytes) for time in route.times) for route in self._found]
        least = min(seconds)
        fastest = (at for at, time in enumerate(seconds) if cost.is_as_fast(time, least))
        return least, tuple(at for at in fastest if _allot_parts(self._list_parts(at), local) is not None)

    def count_received(self, fastest: tuple[int, ...], nbytes: int) -> int:
        """The bytes that the busiest device receives of an array of so many, on the best of these routes."""
        if fastest not in self._received:
            self._received[fastest] = min(self._count_parts(self._found[at]) for at in fastest)
        return self._received[fastest] * nbytes // self._devices**2

    def _count_parts(self, route: _ClassRoute) -> int:
        """What the busiest device receives on a route, in parts of an array that's as many as the square of devices."""
        total, digits = 0, route.digits
        before = tuple(digit.src if digit.dim < len(self._kind.held) else None for digit in digits)
        summands = [
            math.prod(axis.size for axis in sums[0]) for sums in (self._kind.sums[0], *(s[2] for s in route.steps))
        ]
        for (kind, after, _), (were, are) in zip(route.steps, pairwise(summands), strict=True):
            tile = self._devices**2 // normal.count_held(digits, before)
            changes = [(d.radix, b, a) for d, b, a in zip(digits, before, after, strict=True) if b != a]
            taken = math.prod(radix for radix, b, _ in changes if b is None)
            released = math.prod(radix for radix, _, a in changes if a is None)
            if kind == "all_reduce":
                total += all_reduce_elements(tile, were // are)
            elif kind == "reduce_scatter":
                total += tile - tile // taken
            elif kind != "split_sum":
                # An exchange, of which all others are cases: a message from each device of which a part is needed.
                total += tile // taken * (released - all(None in ends for _, *ends in changes))
            before = after
        return total

    def spell(self, at: int, move: ClassedMove) -> Route:
        """One of the routes, with the layouts of a move."""
        route, parts = self._found[at], _allot_parts(self._list_parts(at), move.local)
        source, mesh = move.pair.source, move.pair.source.mesh
        if parts is None:
            raise PlanError(f"{move.pair.source} -> {move.pair.target} has too little that stays local for a route")
        allotted = iter(parts)
        pieces = [next(allotted) if d.src is d.dst is None else [] for d in move.refinement.digits]
        whole = tuple(Dim((Digit(size, None),), size) for size in source.shape)
        held: dict[int, list[int]] = {}
        for number, digit in enumerate(route.digits):
            held.setdefault(digit.dim, []).append(number)
        steps: list[StepSpec] = []
        for kind, state, (partial, by) in route.steps:
            strides = [
                axis and mesh.stride(axis._replace(axis=move.axes[axis.axis]))
                for digit, stride in zip(route.digits, state, strict=True)
                for axis in (mesh.sub_axes(stride, digit.radix)[:1] if stride else [None])
            ]
            digits: list[tuple[int, int, int | None]] = []
            for (dim, radix, src, dst), cuts in zip(move.refinement.digits, pieces, strict=True):
                if src is None and dst is None:
                    for part, size, place in cuts:
                        stride = strides[part]
                        digits.append((dim, size, stride and stride * place))
                        radix //= size
                    digits.append((dim, radix, None))
                else:
                    digits += [(dim, route.digits[n].radix, strides[n]) for n in held[move.places[src, dst]]]
            sums = tuple(axis._replace(axis=move.axes[axis.axis]) for axis in partial)
            like = Layout(mesh, whole, source.dtype, by, sums)
            steps.append(StepSpec(kind, hold_digits(like, digits)))
        return (*steps[:-1], steps[-1]._replace(result=move.pair.target)) if steps else ()

    def _list_parts(self, at: int) -> list[tuple[int, int]]:
        """The digits that a route cuts off the local one, as (number, radix)."""
        if at not in self._parts:
            many, (digits, steps, _) = len(self._kind.held), self._found[at]
            cut = [n for n, digit in enumerate(digits) if digit.dim >= many and any(state[n] for _, state, _ in steps)]
            self._parts[at] = [(n, digits[n].radix) for n in cut]
        return self._parts[at]


def _list_class_routes(mesh: Mesh, kind: MoveClass, wires: Wires, room: int) -> Iterator[_ClassRoute]:
    """The routes of a class, as states; of those that start no sum also over each prefix of the idle axes."""
    source, target = (Layout(mesh, (), kind.dtype or "f32", by, partial) for partial, by in kind.sums)
    check_start(Pair(source, target))
    held = [RefinedDigit(number, radix, src or None, dst or None) for number, (radix, src, dst) in enumerate(kind.held)]
    spans = [(end, end * radix) for _, radix, *ends in held for end in ends if end]
    change = partial_change(source, target, (end for span in spans for end in span)) or PartialChange((), (), ())
    local = RefinedDigit(len(held), room, None, None)
    if change.started:
        yield from _start_sums((local, *held), source, target, change, wires)
        return
    used = [axis for low, high in spans for axis in mesh.sub_axes(low, high // low)]
    used += [*source.partial, *target.partial]
    over: list[RefinedDigit] = []
    for axis in (None, *idle.sort_idle_axes(mesh, used, wires)):
        if axis is not None:
            used.append(axis)
            over.append(RefinedDigit(len(held) + len(over), axis.size, mesh.stride(axis), None))
            # Parts of an axis that do not nest cannot be in one layout.
            ends = {end for each in used if each.axis == axis.axis for end in (each.pre, each.pre * each.size)}
            if not is_chain(sorted(ends)):
                return
        digits = (*over, local._replace(dim=len(held) + len(over)), *held)
        for route in _finish_sums(digits, source, target, change.reduced, wires):
            start = _cut_state(route.digits, [each.src for each in sorted(digits)])
            yield route._replace(steps=[("slice", start, kind.sums[0]), *route.steps]) if over else route
            if not any(route.times):
                return


def _finish_sums(
    digits: Sequence[RefinedDigit], source: Layout, target: Layout, reduced: tuple[Factor, ...], wires: Wires
) -> Iterator[_ClassRoute]:
    """The fastest routes between these digits, after sums over some factors in every way."""
    mesh = target.mesh
    starts = {reduction.SumStart(tuple(digits), tuple(digit.src for digit in digits)): None}
    if reduced:
        spans = [(digit.dst, digit.dst * digit.radix) for digit in digits if digit.dst is not None]
        chains = normal.Chains(Pair(target, target), Refinement(tuple(digits), (), True, (), ()), prime=True)
        scattered = reduction.list_sum_starts(mesh, digits, reduced, spans)
        starts = dict.fromkeys((*scattered, *reduction.list_chain_starts(chains, reduced)))
    for start in starts:
        cut, held = start
        sliced, left = start.find_cut(reduced), start.list_left(reduced)
        before = tuple(digit.src for digit in cut)
        first: list[tuple[str, normal.State, Sums]] = []
        times: list[cost.StepTime] = []
        partial = tuple(axis for factor in left for axis in mesh.sub_axes(*factor))
        stages = (
            ("slice", sliced, (source.partial, source.reduction)),
            ("reduce_scatter", held, ((*target.partial, *partial), source.reduction)),
            ("all_reduce", held, (target.partial, target.reduction)),
        )
        for (kind, after, sums), needed in zip(stages, (sliced != before, held != sliced, left), strict=True):
            if needed:
                first.append((kind, after, sums))
                changes = zip(cut, before, after, strict=True)
                changed = tuple((digit.radix, b, a) for digit, b, a in changes if b != a)
                summed = tuple(left) if kind == "all_reduce" else ()
                time = cost.time_change(kind, changed, mesh, wires.base, summed)
                times += [time.scaled(1 / normal.count_held(cut, before))] if kind != "slice" else []
                before = after
        rest = tuple((digit.radix, stride, digit.dst) for digit, stride in zip(cut, held, strict=True))
        for way in normal.find_ways(rest, target, wires):
            srcs = _cut_state(way.digits, [digit.src for digit in cut])
            laid = tuple(d._replace(dim=cut[d.dim].dim, src=src) for d, src in zip(way.digits, srcs, strict=True))
            steps = [(kind, _cut_state(way.digits, state), sums) for kind, state, sums in first]
            steps += [(kind, state, (target.partial, target.reduction)) for kind, state in way.list_steps()]
            yield _ClassRoute(laid, steps, [*times, *way.times])


def _start_sums(
    digits: tuple[RefinedDigit, ...], source: Layout, target: Layout, change: PartialChange, wires: Wires
) -> Iterator[_ClassRoute]:
    """The fastest routes between these digits that split a sum in the end."""
    sums, started = (target.partial, target.reduction), {factor.stride for factor in change.started}
    ends = tuple(digit.dst for digit in digits)
    if not change.reduced and all(d.src is None or d.src in started for d in digits if d.src != d.dst):
        yield _ClassRoute(digits, [("split_sum", ends, sums)], [])
        return
    kept = tuple(axis for factor in change.kept for axis in target.mesh.sub_axes(*factor))
    left = replace(target, partial=kept)
    # Cut as the digits are.
    reduced = tuple(Factor(*place) for factor in change.reduced for place in places(*factor))
    for cut, holders in reduction.list_split_sums(prime_digits(Refinement(digits, (), True, (), ())), change.started):
        numbered = [digit._replace(dim=at, dst=holders[at]) for at, digit in enumerate(cut)]
        for route in _finish_sums(numbered, source, left, reduced, wires):
            dsts = _cut_state(route.digits, [digit.dst for digit in cut])
            laid = tuple(d._replace(dim=cut[d.dim].dim, dst=dst) for d, dst in zip(route.digits, dsts, strict=True))
            yield _ClassRoute(laid, [*route.steps, ("split_sum", dsts, sums)], route.times)


def _cut_state(parts: Sequence[RefinedDigit], state: Sequence[int | None]) -> normal.State:
    """Who holds parts of the digits that another state is of, whose numbers they have as dims."""
    places: dict[int, int] = {}
    held: list[int | None] = []
    for _, (number, radix, _, _) in zip(parts, reversed(parts), strict=True):
        stride, place = state[number], places.get(number, 1)
        held.append(place * stride if stride else None)
        places[number] = place * radix
    return tuple(reversed(held))


def _allot_parts(parts: Sequence[tuple[int, int]], local: Sequence[int]) -> list[list[tuple[int, int, int]]] | None:
    """For each local digit what is cut off it, as (number of the part, size, how many times the part's stride); parts
    that no digit has room for are cut to primes. None if there is too little."""
    left, taken = list(local), [list[tuple[int, int, int]]() for _ in local]
    for number, part in parts:
        whole = any(radix % part == 0 for radix in left)
        for place, size in [(1, part)] if whole else places(1, part):
            at = next((at for at, radix in enumerate(left) if radix % size == 0), None)
            if at is None:
                return None
            left[at] //= size
            taken[at].append((number, size, place))
    return taken
