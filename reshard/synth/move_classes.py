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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import count, pairwise
from typing import NamedTuple

from reshard.errors import PlanError
from reshard.geometry.refine import Refinement
from reshard.plans.plan import StepSpec, chain
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


class ClassRoutes:
    """The routes of a class that are fastest at some size for which the wires are."""

    def __init__(self, mesh: Mesh, kind: MoveClass, wires: Wires) -> None:
        # More than all cuts of all devices, so that the end of the last part that is cut off is inside the digit.
        room = mesh.size * next(more for more in count(2) if mesh.size % more)
        ends: list[Layout] = []
        for at, (partial, reduction) in enumerate(kind.sums):
            dims = [Dim((Digit(room, None),), room)]
            for radix, *strides in kind.held:
                held = [Digit(axis.size, axis) for axis in mesh.sub_axes(strides[at], radix)] if strides[at] else []
                dims.append(Dim(tuple(held or [Digit(radix, None)]), radix))
            ends.append(Layout(mesh, tuple(dims), kind.dtype or "f32", reduction, partial))
        pair = Pair(*ends)
        check_start(pair)
        self._pair = pair
        self._bytes = math.prod(pair.source.shape) * dtypes.bits(pair.source.dtype) // 8
        if pair.refinement is None or pair.reduces:
            known: cost.Known = {}
            routes = [tuple(route) for route in find_fastest(pair, list_routes(pair, wires), wires)[0]]
            every = [cost.list_times(route, pair.source, wires, known) for route in routes]
            self._times = [[time.scaled(1 / self._bytes) for time in times] for times in every]
            self._find: list[Callable[[], Route]] = []
            self._found = {at: (route, _cut_local(pair.source, route)) for at, route in enumerate(routes)}
        else:
            timed = [*normal.time_routes(pair, pair.refinement, wires)]
            timed += idle.time_routes(pair, wires) if any(timed[0].times) else ()
            timed = [timed[at] for at in cost.pick_fastest([each.times for each in timed], *(wires.sizes or (1, 1)))]
            self._times, self._find = [each.times for each in timed], [each.find for each in timed]
            self._found: dict[int, tuple[Route, _LocalCut | None]] = {}
        self._received: dict[tuple[int, ...], int] = {}

    def list_fastest(self, nbytes: int, local: Sequence[int]) -> tuple[float, tuple[int, ...]]:
        """The seconds of arrays of so many bytes, and the numbers of the routes that take them, without those for which
        too little is local."""
        seconds = [sum(time.at(nbytes) for time in times) for times in self._times]
        least = min(seconds)
        fastest = (at for at, time in enumerate(seconds) if cost.is_as_fast(time, least))
        return least, tuple(at for at in fastest if _allot_parts(self._find_route(at)[1], local) is not None)

    def _find_route(self, at: int) -> tuple[Route, _LocalCut | None]:
        if at not in self._found:
            route = self._find[at]()
            self._found[at] = route, _cut_local(self._pair.source, route)
        return self._found[at]

    def count_received(self, fastest: tuple[int, ...], nbytes: int) -> int:
        """The bytes that the busiest device receives, of an array of so many, on the best of these routes."""
        if fastest not in self._received:
            plans = (chain(self._pair.source, self._pair.target, self._find_route(at)[0]) for at in fastest)
            self._received[fastest] = min(plan.received_bytes for plan in plans)
        return self._received[fastest] * nbytes // self._bytes

    def spell(self, at: int, move: ClassedMove) -> Route:
        """One of the routes, with the layouts of a move."""
        route, cut = self._find_route(at)
        source, mesh = move.pair.source, move.pair.source.mesh
        parts = _allot_parts(cut, move.local)
        if cut is None or parts is None:
            raise PlanError(f"{move.pair.source} -> {move.pair.target} has too little that stays local for a route")
        allotted = iter(parts)
        pieces = [next(allotted) if d.src is d.dst is None else [] for d in move.refinement.digits]
        whole = tuple(Dim((Digit(size, None),), size) for size in source.shape)
        steps: list[StepSpec] = []
        for (kind, result, mode), held in zip(route, cut.holders, strict=True):

            def find_stride(axis: SubAxis) -> int:
                return mesh.stride(axis._replace(axis=move.axes[axis.axis]))

            digits: list[tuple[int, int, int | None]] = []
            for (dim, radix, src, dst), cuts in zip(move.refinement.digits, pieces, strict=True):
                if src is None and dst is None:
                    for part, size, place in cuts:
                        axis = held[part]
                        digits.append((dim, size, None if axis is None else find_stride(axis) * place))
                        radix //= size
                    digits.append((dim, radix, None))
                else:
                    laid = result.dims[1 + move.places[src, dst]].digits
                    digits += [(dim, size, None if axis is None else find_stride(axis)) for size, axis in laid]
            partial = tuple(axis._replace(axis=move.axes[axis.axis]) for axis in result.partial)
            like = Layout(mesh, whole, source.dtype, result.reduction, partial)
            steps.append(StepSpec(kind, hold_digits(like, digits), mode))
        return (*steps[:-1], steps[-1]._replace(result=move.pair.target)) if steps else ()


class _LocalCut(NamedTuple):
    """The parts that a route cuts off the local dim, major first, and after each step the sub-axis that holds each of
    them, None if it's local."""

    parts: tuple[int, ...]
    holders: tuple[tuple[SubAxis | None, ...], ...]


def _cut_local(source: Layout, route: Route) -> _LocalCut | None:
    """How a route cuts the local dim; None if its steps do it in ways that do not nest."""
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
    return _LocalCut(tuple(size for size, _ in cut), tuple(after))


def _allot_parts(cut: _LocalCut | None, local: Sequence[int]) -> list[list[tuple[int, int, int]]] | None:
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
