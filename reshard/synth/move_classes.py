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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from functools import partial as partial_call
from itertools import count, pairwise
from typing import NamedTuple

from reshard.errors import PlanError
from reshard.geometry.refine import Refinement
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.step_mode import PLAIN, StepMode
from reshard.synth import cost
from reshard.synth.network import Links
from reshard.synth.routes import Pair, Route, idle, list_routes, normal
from reshard.synth.routes.route import hold_digits
from reshard.synth.wires import Wires
from reshard.types import dtypes
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.mesh import Mesh, SubAxis, is_chain, places
from reshard.types.reductions import identity
from reshard.types.whole import primes

_MOST_BYTES = 1 << 60
"""Of an array that has a class: on more, seconds lose their last digits."""


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
        self._edges = [1.0, *least, float(_MOST_BYTES)]
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
        if bits % 8 or not 0 < nbytes < _MOST_BYTES or (partial and elements % self._mesh.size):
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


class _CutStep(NamedTuple):
    """A step of a route of a class: after it, the digits of each held one, and the sub-axis that holds each part of the
    local one, None if it's local."""

    kind: str
    mode: StepMode
    sums: tuple[tuple[SubAxis, ...], str | None]
    held: tuple[tuple[Digit, ...], ...]
    parts: tuple[SubAxis | None, ...]


class _CutRoute(NamedTuple):
    """The parts that a route cuts off the local digit, major first, and its steps."""

    parts: tuple[int, ...]
    steps: tuple[_CutStep, ...]


_Found = tuple[list[cost.StepTime], Callable[[], _CutRoute | None]]
"""The seconds of the steps of a route for a byte of the array, and what finds the route."""


class ClassRoutes:
    """The routes of a class that are fastest at some size for which the wires are."""

    def __init__(self, mesh: Mesh, kind: MoveClass, wires: Wires) -> None:
        # More than all cuts of all devices, so that the end of the last part that is cut off is inside the digit.
        room = mesh.size * next(more for more in count(2) if mesh.size % more)
        find_routes = _find_kept if kind.sums[0] == kind.sums[1] else _find_sums
        found = list(find_routes(mesh, kind, wires, room))
        low, high = wires.sizes or (1.0, float(_MOST_BYTES))
        self._found = [found[at] for at in cost.pick_fastest([times for times, _ in found], low, high)]
        self._cut: dict[int, _CutRoute | None] = {}
        self._received: dict[tuple[int, ...], tuple[int, int]] = {}

    def list_fastest(self, nbytes: int, local: Sequence[int]) -> tuple[float, tuple[int, ...]]:
        """The seconds of arrays of so many bytes, and the numbers of the routes that take them, without those for which
        too little is local."""
        seconds = [sum(time.at(nbytes) for time in times) for times, _ in self._found]
        least = min(seconds)
        fastest = (at for at, time in enumerate(seconds) if cost.is_as_fast(time, least))
        return least, tuple(at for at in fastest if _allot_parts(self._cut_route(at), local) is not None)

    def count_received(self, fastest: tuple[int, ...], move: ClassedMove) -> int:
        """The bytes that the busiest device receives in a move on the best of these routes."""
        if fastest not in self._received:
            plans = (chain(move.pair.source, move.pair.target, self.spell(at, move)) for at in fastest)
            self._received[fastest] = min(plan.received_bytes for plan in plans), move.nbytes
        received, nbytes = self._received[fastest]
        return received * move.nbytes // nbytes

    def spell(self, at: int, move: ClassedMove) -> Route:
        """One of the routes, with the layouts of a move."""
        route = self._cut_route(at)
        source, mesh = move.pair.source, move.pair.source.mesh
        parts = _allot_parts(route, move.local)
        if route is None or parts is None:
            raise PlanError(f"{move.pair.source} -> {move.pair.target} has too little that stays local for a route")
        allotted = iter(parts)
        pieces = [next(allotted) if d.src is d.dst is None else [] for d in move.refinement.digits]
        whole = tuple(Dim((Digit(size, None),), size) for size in source.shape)

        def find_stride(axis: SubAxis | None) -> int | None:
            return axis and mesh.stride(axis._replace(axis=move.axes[axis.axis]))

        steps: list[StepSpec] = []
        for step in route.steps:
            digits: list[tuple[int, int, int | None]] = []
            for (dim, radix, src, dst), cuts in zip(move.refinement.digits, pieces, strict=True):
                if src is None and dst is None:
                    for part, size, place in cuts:
                        stride = find_stride(step.parts[part])
                        digits.append((dim, size, stride and stride * place))
                        radix //= size
                    digits.append((dim, radix, None))
                else:
                    digits += [(dim, size, find_stride(axis)) for size, axis in step.held[move.places[src, dst]]]
            partial = tuple(axis._replace(axis=move.axes[axis.axis]) for axis in step.sums[0])
            like = Layout(mesh, whole, source.dtype, step.sums[1], partial)
            steps.append(StepSpec(step.kind, hold_digits(like, digits), step.mode))
        return (*steps[:-1], steps[-1]._replace(result=move.pair.target)) if steps else ()

    def _cut_route(self, at: int) -> _CutRoute | None:
        if at not in self._cut:
            self._cut[at] = self._found[at][1]()
        return self._cut[at]


def _find_kept(mesh: Mesh, kind: MoveClass, wires: Wires, room: int) -> Iterator[_Found]:
    """The fastest routes that keep all sums, as states, over each prefix of the idle axes: few are ever spelled."""
    partial, reduction = kind.sums[0]
    like = Layout(mesh, (), kind.dtype or "f32", reduction, partial)
    held = [(radix, src or None, dst or None) for radix, src, dst in kind.held]
    used = [axis for radix, *ends in held for end in ends if end for axis in mesh.sub_axes(end, radix)]
    used += partial
    over: list[tuple[int, int, None]] = []
    for axis in (None, *idle.sort_idle_axes(mesh, used, wires)):
        if axis is not None:
            used.append(axis)
            over.append((axis.size, mesh.stride(axis), None))
            # Parts of an axis that do not nest cannot be in one layout.
            ends = {end for each in used if each.axis == axis.axis for end in (each.pre, each.pre * each.size)}
            if not is_chain(sorted(ends)):
                return
        for way in normal.find_ways((*held, *over, (room, None, None)), like, wires):
            yield way.times, partial_call(_cut_states, mesh, kind, way)
            if not any(way.times):
                return


def _cut_states(mesh: Mesh, kind: MoveClass, way: normal.TimedWay) -> _CutRoute:
    """The route that visits the states of a way, which start once the idle axes are sliced."""
    digits, states, _ = way
    many = len(kind.held)
    start = tuple(digit.src for digit in digits)
    end = tuple(digit.dst for digit in digits)
    bare = tuple(digit.src if digit.dim < many else None for digit in digits)
    path = [bare, end] if states is None else [bare, start, *states, end]
    cut = [at for at, digit in enumerate(digits) if digit.dim >= many and any(state[at] for state in path)]
    steps: list[_CutStep] = []
    for before, after in pairwise(path):
        if before != after:
            laid: list[list[Digit]] = [[] for _ in kind.held]
            for digit, stride in zip(digits, after, strict=True):
                if digit.dim < many:
                    axes = mesh.sub_axes(stride, digit.radix) if stride else ()
                    laid[digit.dim] += [Digit(axis.size, axis) for axis in axes] or [Digit(digit.radix, None)]
            parts = [(after[at], digits[at].radix) for at in cut]
            holders = (mesh.sub_axes(stride, radix)[0] if stride else None for stride, radix in parts)
            kept = "exchange" if states is None else normal.kind_between(before, after)
            steps.append(_CutStep(kept, PLAIN, kind.sums[0], tuple(map(tuple, laid)), tuple(holders)))
    return _CutRoute(tuple(digits[at].radix for at in cut), tuple(steps))


def _find_sums(mesh: Mesh, kind: MoveClass, wires: Wires, room: int) -> Iterator[_Found]:
    """The fastest routes that finish or start a sum."""
    ends: list[Layout] = []
    for at, (partial, reduction) in enumerate(kind.sums):
        dims = [Dim((Digit(room, None),), room)]
        for radix, *strides in kind.held:
            held = [Digit(axis.size, axis) for axis in mesh.sub_axes(strides[at], radix)] if strides[at] else []
            dims.append(Dim(tuple(held or [Digit(radix, None)]), radix))
        ends.append(Layout(mesh, tuple(dims), kind.dtype, reduction, partial))
    pair = Pair(*ends)
    check_start(pair)
    nbytes = pair.source.nbytes(math.prod(pair.source.shape))
    known: cost.Known = {}
    for route in find_fastest(pair, list_routes(pair, wires), wires)[0]:
        times = cost.list_times(route, pair.source, wires, known)
        yield [time.scaled(1 / nbytes) for time in times], partial_call(_cut_layouts, pair.source, tuple(route))


def _cut_layouts(source: Layout, route: Route) -> _CutRoute | None:
    """A route of layouts whose first dim is the local digit; None if its steps cut that in ways that do not nest."""
    laid: list[list[tuple[int, int, SubAxis | None]]] = []  # Digits from one count of major parts to another.
    for layout in (source, *(step.result for step in route)):
        laid.append([])
        low = 1
        for radix, axis in layout.dims[0].digits:
            laid[-1].append((low, low * radix, axis))
            low *= radix
    chain = sorted({end for digits in laid for low, high, _ in digits for end in (low, high)})
    if not is_chain(chain):
        return None
    every: list[list[SubAxis | None]] = []
    for low, high in pairwise(chain):
        holders: list[SubAxis | None] = []
        for digits in laid:
            start, axis = next((start, axis) for start, end, axis in digits if start <= low < end)
            holders.append(axis and SubAxis(axis.axis, axis.pre * (low // start), high // low))
        every.append(holders)
    cut = [(high // low, holders) for (low, high), holders in zip(pairwise(chain), every, strict=True) if any(holders)]
    after = zip(*(holders[1:] for _, holders in cut), strict=True) if cut else ((),) * len(route)
    steps = tuple(
        _CutStep(kind, mode, (to.partial, to.reduction), tuple(dim.digits for dim in to.dims[1:]), parts)
        for (kind, to, mode), parts in zip(route, after, strict=True)
    )
    return _CutRoute(tuple(size for size, _ in cut), steps)


def _allot_parts(cut: _CutRoute | None, local: Sequence[int]) -> list[list[tuple[int, int, int]]] | None:
    """For each local digit what is cut off it, as (number of the part, size, how many times the part's stride); parts
    that no digit has room for are cut to primes. None if there is too little."""
    if cut is None:
        return None
    left, taken = list(local), [list[tuple[int, int, int]]() for _ in local]
    for number, part in enumerate(cut.parts):
        whole = any(radix % part == 0 for radix in left)
        for place, size in [(1, part)] if whole else places(1, part):
            at = next((at for at, radix in enumerate(left) if radix % size == 0), None)
            if at is None:
                return None
            left[at] //= size
            taken[at].append((number, size, place))
    return taken
