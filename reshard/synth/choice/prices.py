"""What moves cost: the seconds, the bytes and the memory of the plan from one layout to another, for many pairs.

A choice of layouts asks for the prices of thousands of moves, most of which differ in size alone. What decides the plan
between even layouts, beside their bytes, is who holds which digit before and after, and by how many devices what stays
local can be cut on the way. So all moves of one *form* are planned once, on the smallest arrays that have it:

    on <x=4, y=2>   bf16[{x}1024, 4096, 128] -> bf16[4096, {x}1024, 128]
    refined         4 by x -> -    1024    4 - -> by x    1024    128
    form            4 by x -> -    8       4 - -> by x                       8 devices cannot cut more than 8 parts

The routes of a form that are fastest at some size take seconds that are known functions of it (`cost.StepTime`), and
their bytes and memory grow with it. Moves of uneven layouts, and of digits that do not nest, are planned one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from reshard.errors import PlanError, quoted
from reshard.geometry.refine import RefinedDigit, Refinement, refine
from reshard.plans.plan import Plan, chain
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
"""Of an array whose form is studied."""


class MovePrice(NamedTuple):
    """What the plan from one layout to another takes: predicted seconds, bytes that the busiest device receives, and
    bytes that it holds at most, source and target included."""

    seconds: float
    received_bytes: int
    peak_bytes: int


class MovePrices:
    """The prices of moves between layouts on a mesh, whose axes have the links of a network.

    >>> mesh = Mesh(x=4, y=2)
    >>> prices = MovePrices(mesh, "h100")
    >>> rows, whole = (Layout.parse(text, mesh) for text in ("f32[{x}256, 512]", "f32[1024, 512]"))
    >>> price = prices.price(rows, whole)
    >>> price.received_bytes, price.seconds == prices.plan(rows, whole).seconds
    (1572864, True)
    """

    def __init__(self, mesh: Mesh, network: Network | str) -> None:
        self.mesh = mesh
        self._options = PlanOptions.read(network=network)
        if self._options.network is None:
            raise PlanError(
                f"network {quoted(network)}: moves are priced in seconds; give a network, such as 'tpu-v5p'"
            )
        links = self._options.network.links(mesh)
        self._prices: dict[tuple[Layout, Layout], MovePrice] = {}
        self._forms: dict[object, _Form] = {}
        # Tiles below some size are never cut for lending: which of the tiles on the way are decides the routes.
        worth = least_lent(links)
        parts = [parts for parts in range(1, mesh.size + 1) if mesh.size % parts == 0]
        several = len({link.bandwidth for link in links.values()}) > 1
        self._edges = [1.0, *(worth * each for each in parts if several and worth * each > 1), float(_MOST_BYTES)]
        self._alike = {name: names for names in links.list_alike(mesh) for name in names}
        self._wires = [links.for_sizes(low * (1 + 1e-9), high) for low, high in pairwise(self._edges)]

    def price(self, source: Layout, target: Layout) -> MovePrice:
        """The price of one move; of none, if source and target are equal, its memory alone."""
        known = self._prices.get((source, target))
        if known is None:
            known = self._prices[source, target] = self._price_form(source, target)
        return known

    def price_pairs(self, pairs: Iterable[tuple[Layout, Layout]]) -> list[MovePrice]:
        """The price of each move, in their order."""
        return [self.price(source, target) for source, target in pairs]

    def plan(self, source: Layout, target: Layout) -> Plan:
        """The plan that the price of a move is of."""
        return find_plan(source, target, self._options)

    def _price_form(self, source: Layout, target: Layout) -> MovePrice:
        one_array = source.mesh == target.mesh == self.mesh and (source.shape, source.dtype) == (
            target.shape,
            target.dtype,
        )
        named = self._rename_axes(source, target) if one_array else None
        refinement = None if named is None else refine(*named)
        bits, elements = dtypes.bits(source.dtype), math.prod(source.shape)
        # Sums of elements that devices cannot share evenly are rounded up.
        whole = elements and not (elements % self.mesh.size and (source.partial or target.partial))
        even = refinement is not None and refinement.exact and whole and not bits % 8
        nbytes = elements * bits // 8
        if named is None or refinement is None or not even or nbytes >= _MOST_BYTES:
            plan = self.plan(source, target)
            return MovePrice(plan.seconds or 0.0, plan.received_bytes, plan.peak_bytes)
        source, target = named
        digits = _shrink_digits(refinement, self.mesh.size)
        stretch = sum(edge <= nbytes for edge in self._edges) - 1
        # Only the operations of sums tell dtypes apart.
        sums = [(end.dtype, end.reduction, end.partial) for end in (source, target) if end.partial]
        key = digits, stretch, source.partial, target.partial, tuple(sums)
        form = self._forms.get(key)
        if form is None:
            dtype = source.dtype if sums else "f32"
            ends = (
                Layout(self.mesh, dims, dtype, end.reduction, end.partial)
                for end, dims in zip((source, target), _list_dims(digits, self.mesh), strict=True)
            )
            form = self._forms[key] = _Form(Pair(*ends), self._wires[stretch])
        return form.price(nbytes)

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


def _shrink_digits(refinement: Refinement, devices: int) -> tuple[RefinedDigit, ...]:
    """The digits of the smallest arrays of the same form. What stays local is cut into as many parts as there are
    devices, at most; dims that nothing splits are cut only if no digit before them suffices."""
    digits: list[RefinedDigit] = []
    # What is left of a digit: where it stands decides whether blocks lie in order.
    rest = next(number for number in (2, 3, 5, 7, 11, 13) if devices % number)
    split = {digit.dim for digit in refinement.digits if digit.src is not None or digit.dst is not None}
    number, last, enough = -1, -1, False
    for dim, radix, src, dst in refinement.digits:
        if src is None and dst is None:
            cut = 1 if enough and dim not in split else math.gcd(radix, devices)
            enough = enough or cut == devices
            radix = cut if radix == cut else cut * rest
        if radix > 1:
            number += dim != last
            last = dim
            digits.append(RefinedDigit(number, radix, src, dst))
    return tuple(digits)


def _list_dims(digits: Sequence[RefinedDigit], mesh: Mesh) -> list[tuple[Dim, ...]]:
    """The dims of source and target that have these digits."""
    ends: list[tuple[Dim, ...]] = []
    for end in ("src", "dst"):
        dims: list[list[Digit]] = [[] for _ in range(digits[-1].dim + 1 if digits else 0)]
        for digit in digits:
            stride = getattr(digit, end)
            axes = [] if stride is None else mesh.sub_axes(stride, digit.radix)
            dims[digit.dim] += [Digit(axis.size, axis) for axis in axes] or [Digit(digit.radix, None)]
        ends.append(tuple(Dim(tuple(each), math.prod(digit.radix for digit in each)) for each in dims))
    return ends


class _Form:
    """The moves of one form: the routes that are fastest at some size for which the wires are."""

    def __init__(self, pair: Pair, wires: Wires) -> None:
        check_start(pair)
        self._pair = pair
        self._bytes = math.prod(pair.source.shape) * dtypes.bits(pair.source.dtype) // 8
        known: cost.Known = {}
        self._routes, _ = find_fastest(pair, list_routes(pair, wires), wires)
        self._times = [cost.list_times(route, pair.source, wires, known) for route in self._routes]
        self._chosen: dict[tuple[int, ...], Plan] = {}

    def price(self, nbytes: int) -> MovePrice:
        """The price of the move of an array of so many bytes."""
        scale = nbytes / self._bytes
        seconds = [sum(time.at(scale) for time in times) for times in self._times]
        least = min(seconds)
        fastest = tuple(at for at, time in enumerate(seconds) if cost.is_as_fast(time, least))
        if fastest not in self._chosen:
            source, target = self._pair.source, self._pair.target
            self._chosen[fastest] = choose_plan([chain(source, target, self._routes[at]) for at in fastest], 0.0)
        plan = self._chosen[fastest]
        return MovePrice(least, plan.received_bytes * nbytes // self._bytes, plan.peak_bytes * nbytes // self._bytes)
