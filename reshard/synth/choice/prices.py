"""What moves cost: the seconds, the bytes and the memory of the plan from one layout to another, for many pairs.

A choice of layouts asks for the prices of thousands of moves, most of which differ in sizes and in the order of dims
alone. What decides the plan between even layouts, beside their bytes, is who holds which digit before and after. So all
moves of one *form* are planned once, with room for any cut where digits stay local:

    on <x=4, y=2>   bf16[32, {x}1024, 4096] -> bf16[32, 4096, {x}1024]
    refined         32    4 by x -> -    1024    4 - -> by x    1024
    form            8     4 by x -> -       8    4 - -> by x       8        8 devices cut into 8 parts at most

The routes of a form that are fastest at some size take seconds that are known functions of it (`cost.StepTime`), and
their bytes grow with it. Moves whose fastest route cuts what the array has too little of, those of uneven layouts, and
of digits that do not nest, are planned one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from reshard.errors import PlanError, quoted
from reshard.geometry.refine import Refinement, refine
from reshard.plans.plan import Plan, chain
from reshard.plans.step import Step
from reshard.synth import cost
from reshard.synth.network import Network
from reshard.synth.options import PlanOptions
from reshard.synth.planner import check_start, choose_plan, find_fastest, find_plan
from reshard.synth.routes import Pair, list_routes
from reshard.synth.routes.normal import least_lent
from reshard.synth.wires import Wires
from reshard.types import dtypes
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.mesh import Mesh, SubAxis

_MOST_BYTES = 1 << 60
"""Of an array that has a form: on more, seconds lose their last digits."""


@dataclass(frozen=True)
class MovePrice:
    """What the plan from one layout to another takes: predicted seconds, and bytes that the busiest device receives.

    `peak` is the bytes that it holds at most, source and target included, or finds them: few moves are asked for it.
    """

    seconds: float
    received_bytes: int
    peak: int | Callable[[], int]

    @cached_property
    def peak_bytes(self) -> int:
        """Bytes that a device holds at most, source and target included."""
        return self.peak if isinstance(self.peak, int) else self.peak()


class MovePrices:
    """The prices of moves between layouts on a mesh, whose axes have the links of a network. `moved_as` has the dtypes
    that a compiler moves as wider ones; `strided` says that devices gather and scatter along any one dim without
    packing it, as TPUs do. What receives nothing is a copy of the target's tile, with so many bytes read and written
    in a second.

    >>> mesh = Mesh(x=4, y=2)
    >>> prices = MovePrices(mesh, "h100")
    >>> rows, whole = (Layout.parse(text, mesh) for text in ("f32[{x}256, 512]", "f32[1024, 512]"))
    >>> price = prices.price(rows, whole)
    >>> price.received_bytes, price.seconds == prices.plan(rows, whole).seconds
    (1572864, True)
    """

    def __init__(
        self,
        mesh: Mesh,
        network: Network | str,
        moved_as: Mapping[str, str] | None = None,
        *,
        strided: bool = False,
        copy_rate: float = math.inf,
    ) -> None:
        self.mesh, self._moved_as, self._strided, self._copy_rate = mesh, moved_as or {}, strided, copy_rate
        self._options = PlanOptions.read(network=network)
        if self._options.network is None:
            raise PlanError(
                f"network {quoted(network)}: moves are priced in seconds; give a network, such as 'tpu-v5p'"
            )
        links = self._options.network.links(mesh)
        self._prices: dict[tuple[Layout, Layout], MovePrice] = {}
        self._forms: dict[object, _Form] = {}
        # Classes of moves by number, each a set of what is held, and the number of each; what leads to a form.
        self._classes: dict[frozenset[object], int] = {frozenset(): 0}
        self._class_forms: dict[object, tuple[_Form, list[_FormDim]] | None] = {}
        # Tiles below some size are never cut for lending: which of the tiles on the way are decides the routes.
        worth = least_lent(links)
        parts = [parts for parts in range(1, mesh.size + 1) if mesh.size % parts == 0]
        several = len({link.bandwidth for link in links.values()}) > 1
        self._edges = [1.0, *(worth * each for each in parts if several and worth * each > 1), float(_MOST_BYTES)]
        self._alike = {name: names for names in links.list_alike(mesh) for name in names}
        self._wires = [links.for_sizes(low * (1 + 1e-9), high) for low, high in pairwise(self._edges)]

    def price(self, source: Layout, target: Layout, joined: int = 1) -> MovePrice:
        """The price of one move; of none, if source and target are equal, its memory alone. An all-reduce that is
        `joined` with others pays its part of what one of them waits."""
        known = self._prices.get((source, target))
        if known is None:
            known = self._price_form(*self._widen(source, target))
            if source != target and not known.received_bytes:
                known = replace(known, seconds=known.seconds + self._time_copy(target))
            self._prices[source, target] = known
        saved = self.count_joined(source, target, joined)
        return replace(known, seconds=known.seconds - saved) if saved else known

    def count_joined(self, source: Layout, target: Layout, joined: int) -> float:
        """The seconds that an all-reduce does not wait, since it is one with others; 0 for another move."""
        if joined < 2 or not source.partial or target.partial or source.dims != target.dims:
            return 0.0
        return (1 - 1 / joined) * self.price(replace(source, dims=()), replace(target, dims=())).seconds

    def _time_copy(self, target: Layout) -> float:
        return 2 * target.tile_bytes / self._copy_rate

    def _time_packing(self, packed: int) -> float:
        """A TPU packs in two passes, into the order of the blocks and into tiles of 8 x 128 elements."""
        return 4 * packed / self._copy_rate if self._strided else 0.0

    def price_pairs(self, pairs: Iterable[tuple[Layout, Layout, int]]) -> list[MovePrice]:
        """The price of each move, in their order: source, target, and how many it is joined with, itself included."""
        return [self.price(*pair) for pair in pairs]

    def estimate_seconds(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
        """Roughly the seconds of the move from each source to each target, all of one array.

        Moves are of one *class* if the same digits are held before and after, whatever their dims. Each takes what the
        first that is seen would at its size. Of Llama's moves on <x=2, y=2, z=2>, 98% take just that.
        """
        names: list[frozenset[object]] = list(self._classes)

        def number_class(held: frozenset[object]) -> int:
            if held not in self._classes:
                self._classes[held] = len(names)
                names.append(held)
            return self._classes[held]

        # Dim by dim, and sums last, the class so far and what this dim adds to it: few pairs of them are distinct.
        columns: list[tuple[list[object], list[object]]] = [
            ([one.dims[dim] for one in sources], [one.dims[dim] for one in targets])
            for dim in range(len(sources[0].dims))
        ]
        columns.append(([(e.partial, e.reduction) for e in sources], [(e.partial, e.reduction) for e in targets]))
        classes = np.zeros((len(sources), len(targets)), np.int64)
        for befores, afters in columns:
            before, after = ({each: at for at, each in enumerate(dict.fromkeys(ends))} for ends in (befores, afters))
            met = np.array([[number_class(self._meet_ends(b, a)) for a in after] for b in before], np.int64)
            added = met[np.ix_([before[each] for each in befores], [after[each] for each in afters])]
            many = len(names)
            distinct, place = np.unique(classes * many + added, return_inverse=True)
            pairs: list[int] = distinct.tolist()
            joined = [number_class(names[both // many] | names[both % many]) for both in pairs]
            classes = np.array(joined, np.int64)[place].reshape(classes.shape)
        found, first, place = np.unique(classes, return_index=True, return_inverse=True)
        seen: list[tuple[int, int]] = np.stack([found, first], axis=1).tolist()
        wide = len(targets)
        seconds = [self._estimate_class(number, sources[at // wide], targets[at % wide]) for number, at in seen]
        return np.array(seconds)[place].reshape(classes.shape)

    def _meet_ends(self, before: object, after: object) -> frozenset[object]:
        """What a dim in both layouts, or the sums of both, add to the class of a move."""
        if not (isinstance(before, Dim) and isinstance(after, Dim)):
            return frozenset(() if before == after == ((), None) else ((before, after),))
        # Digits that do not nest have no refinement, and are a class of their own.
        refined = refine(*(Layout(self.mesh, (dim,), "f32", None, ()) for dim in (before, after)))
        if refined is None or not refined.exact:
            return frozenset(((before, after),))
        return frozenset(each[1:] for each in refined.digits if each.radix > 1 and (each.src, each.dst) != (None, None))

    def _widen(self, source: Layout, target: Layout) -> tuple[Layout, Layout]:
        wide = self._moved_as.get(source.dtype)
        return (source, target) if wide is None else (replace(source, dtype=wide), replace(target, dtype=wide))

    def _estimate_class(self, number: int, source: Layout, target: Layout) -> float:
        # Every layout of a class is where it is, if one is: what stays is no copy.
        if source == target:
            return 0.0
        source, target = self._widen(source, target)
        nbytes = math.prod(source.shape) * dtypes.bits(source.dtype) // 8
        stretch = sum(edge <= nbytes for edge in self._edges)
        # Operations of sums alone tell dtypes apart.
        sums = source.dtype if source.partial or target.partial else ""
        key = number, stretch, sums
        if key not in self._class_forms:
            named = self._rename_axes(source, target)
            refinement = refine(*named)
            self._class_forms[key] = None
            if refinement is not None and refinement.exact and 0 < nbytes < _MOST_BYTES:
                held = sorted((d.radix, d.src or 0, d.dst or 0) for d in refinement.digits if d.src or d.dst)
                partial = tuple((end.partial, end.reduction) for end in named)
                # Classes that differ in the names of axes have one form.
                alike = tuple(held), partial, stretch, sums
                if alike not in self._class_forms:
                    dims = _list_form_dims(refinement, self.mesh.size)
                    self._class_forms[alike] = self._find_form(*named, dims, nbytes), dims
                self._class_forms[key] = self._class_forms[alike]
        known = self._class_forms[key]
        price = None if known is None else known[0].price(known[1], nbytes)
        if price is None:
            return self.price(source, target).seconds
        return price[0] + self._time_packing(price[2]) + (0.0 if price[1] else self._time_copy(target))

    def plan(self, source: Layout, target: Layout) -> Plan:
        """The plan that the price of a move is of."""
        return find_plan(source, target, self._options)

    def _count_peak(self, plan: Plan) -> int:
        """The bytes that a plan holds at most where it may gather and scatter without packing."""
        packed = (0 if self._strided and not _packs_along_dims(step) else step.cost.scratch for step in plan.steps)
        lives = (s.live_bytes - s.cost.scratch + more for s, more in zip(plan.steps, packed, strict=True))
        return max(lives, default=0) or plan.peak_bytes

    def _price_form(self, source: Layout, target: Layout) -> MovePrice:
        elements, bits = math.prod(source.shape), dtypes.bits(source.dtype)
        nbytes = elements * bits // 8
        # Sums of elements that devices cannot share evenly are rounded up, and so are elements of less than a byte.
        even = bits % 8 == 0 and (elements % self.mesh.size == 0 or not (source.partial or target.partial))
        one_array = (source.shape, source.dtype, source.mesh) == (target.shape, target.dtype, self.mesh)
        if even and one_array and target.mesh == self.mesh and 0 < nbytes < _MOST_BYTES:
            named = self._rename_axes(source, target)
            refinement = refine(*named)
            if refinement is not None and refinement.exact:
                dims = _list_form_dims(refinement, self.mesh.size)
                price = self._find_form(*named, dims, nbytes).price(dims, nbytes)
                if price is not None:
                    seconds, received, packed = price
                    seconds += self._time_packing(packed)
                    return MovePrice(seconds, received, lambda: self._count_peak(self.plan(source, target)))
        plan = self.plan(source, target)
        seconds = (plan.seconds or 0.0) + self._time_packing(_count_packed(plan))
        return MovePrice(seconds, plan.received_bytes, self._count_peak(plan))

    def _find_form(self, source: Layout, target: Layout, dims: Sequence[_FormDim], nbytes: int) -> _Form:
        """The form of a move, studied now if it is new; only the operations of sums tell dtypes apart."""
        stretch = sum(edge <= nbytes for edge in self._edges) - 1
        sums = tuple((end.dtype, end.reduction, end.partial) for end in (source, target) if end.partial)
        key = tuple(dim.digits for dim in dims), stretch, source.partial, target.partial, sums
        if key not in self._forms:
            ends: list[Layout] = []
            for at, end in enumerate((source, target)):
                laid: list[Dim] = []
                for dim in dims:
                    digits: list[Digit] = []
                    for radix, *strides in dim.digits:
                        axes = self.mesh.sub_axes(strides[at], radix) if strides[at] else ()
                        digits += [Digit(axis.size, axis) for axis in axes] or [Digit(radix, None)]
                    laid.append(Dim(tuple(digits), math.prod(radix for radix, _, _ in dim.digits)))
                ends.append(Layout(self.mesh, tuple(laid), source.dtype if sums else "f32", end.reduction, end.partial))
            self._forms[key] = _Form(Pair(*ends), self._wires[stretch], dims)
        return self._forms[key]

    def _rename_axes(self, source: Layout, target: Layout) -> tuple[Layout, Layout]:
        """Both layouts with their axes in the order in which they occur, where axes are alike: moves along x cost what
        those along y do."""
        sums = [[axis.axis for axis in end.partial] for end in (source, target)]
        order = dict.fromkeys(axis.axis for end in (source, target) for axis in end.held)
        order |= dict.fromkeys(sorted((*sums[0], *sums[1]), key=lambda axis: tuple(axis in each for each in sums)))
        left = {names: iter(names) for names in self._alike.values()}
        names = {axis: next(left[self._alike[axis]]) for axis in order}
        if all(axis == name for axis, name in names.items()):
            return source, target

        def rename(layout: Layout) -> Layout:
            def follow(axis: SubAxis) -> SubAxis:
                return axis._replace(axis=names[axis.axis])

            digits = (
                (digit._replace(axis=digit.axis and follow(digit.axis)) for digit in d.digits) for d in layout.dims
            )
            dims = (dim._replace(digits=tuple(each)) for dim, each in zip(layout.dims, digits, strict=True))
            return replace(layout, dims=tuple(dims), partial=tuple(map(follow, layout.partial)))

        return rename(source), rename(target)


def _packs_along_dims(step: Step) -> bool:
    """Whether a step packs even where it gathers and scatters along any one dim."""
    ends = zip(step.operand.dims, step.result.dims, strict=True)
    return step.kind not in ("all_gather", "reduce_scatter") or sum(a != b for a, b in ends) > 1


def _count_packed(plan: Plan) -> int:
    """The bytes that the steps of a plan pack, other than along one dim."""
    return sum(step.cost.scratch for step in plan.steps if _packs_along_dims(step))


class _FormDim(NamedTuple):
    """A dim of a form: its refined digits, as (radix, source's stride, target's stride), 0 for local, and the radices
    that they have in an array."""

    digits: tuple[tuple[int, int, int], ...]
    sizes: tuple[int, ...]


def _list_form_dims(refinement: Refinement, devices: int) -> list[_FormDim]:
    """The dims that are split before or after, in an order of their own, each with as much local as can be cut at all,
    after the dim that stays local and can be cut most."""
    # More than all cuts of all devices, so that the end of the last part that is cut off is inside the digit.
    room = devices * next(prime for prime in (3, 2, 5, 7, 11, 13, 17) if devices % prime)
    split: list[_FormDim] = []
    spare = (0, _FormDim((), ()))
    for _, group in groupby(refinement.digits, key=lambda digit: digit.dim):
        digits = [digit for digit in group if digit.radix > 1]
        sizes = tuple(digit.radix for digit in digits)
        marked = tuple(
            (room if digit.src is digit.dst is None else digit.radix, digit.src or 0, digit.dst or 0)
            for digit in digits
        )
        if any(src or dst for _, src, dst in marked):
            split.append(_FormDim(marked, sizes))
        elif digits:
            spare = max(spare, (math.gcd(sizes[0], devices), _FormDim(marked, sizes)), key=lambda each: each[0])
    return [*([spare[1]] if spare[0] else []), *split]


class _Form:
    """The moves of one form: the routes that are fastest at some size for which the wires are."""

    def __init__(self, pair: Pair, wires: Wires, dims: Sequence[_FormDim]) -> None:
        check_start(pair)
        self._pair = pair
        self._bytes = math.prod(pair.source.shape) * dtypes.bits(pair.source.dtype) // 8
        known: cost.Known = {}
        self._routes, _ = find_fastest(pair, list_routes(pair, wires), wires)
        self._times = [cost.list_times(route, pair.source, wires, known) for route in self._routes]
        # Into how many parts each route cuts each digit on its way.
        self._cuts: list[list[tuple[int, ...]]] = []
        for route in self._routes:
            layouts = [pair.source, *(step.result for step in route)]
            cuts = ([_list_digit_cuts(layout.dims[at], dim) for layout in layouts] for at, dim in enumerate(dims))
            self._cuts.append([tuple(math.lcm(*each) for each in zip(*every, strict=True)) for every in cuts])
        self._chosen: dict[tuple[int, ...], Plan] = {}

    def price(self, dims: Sequence[_FormDim], nbytes: int) -> tuple[float, int, int] | None:
        """Seconds, received and packed bytes of an array of so many bytes; None if the fastest routes cut what it has
        not."""
        scale = nbytes / self._bytes
        seconds = [sum(time.at(scale) for time in times) for times in self._times]
        least = min(seconds)
        fastest = tuple(
            at
            for at, time in enumerate(seconds)
            if cost.is_as_fast(time, least)
            and all(
                size % cut == 0
                for dim, cuts in zip(dims, self._cuts[at], strict=True)
                for size, cut in zip(dim.sizes, cuts, strict=True)
            )
        )
        if not fastest:
            return None
        if fastest not in self._chosen:
            ends = self._pair.source, self._pair.target
            self._chosen[fastest] = choose_plan([chain(*ends, self._routes[at]) for at in fastest], 0.0)
        plan = self._chosen[fastest]
        return least, plan.received_bytes * nbytes // self._bytes, _count_packed(plan) * nbytes // self._bytes


def _list_digit_cuts(laid: Dim, dim: _FormDim) -> list[int]:
    """Into how many parts a dim on the way cuts each digit of a form; those that are held before or after are as large
    in every array, and count as whole."""
    ends = [1]
    for radix, _ in reversed(laid.digits):
        ends.append(ends[-1] * radix)
    cuts: list[int] = []
    low = 1
    for radix, src, dst in reversed(dim.digits):
        high = low * radix
        cuts.append(1 if src or dst else math.lcm(*(high // end for end in ends if low < end < high)))
        low = high
    return cuts[::-1]
