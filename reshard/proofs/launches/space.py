"""Layouts as choices: which digit of the array each prime factor of the mesh holds.

    mesh <x=2, y=3>, shape (6, 6)      x may hold a digit of radix 2, at place 1 or 3 of a dim; y one of radix 3
    f32[{x}3, {y}2]                    x holds place 3 of dim 0, y holds place 2 of dim 1
    f32[3{x}, 6]                       x holds place 1 of dim 0, y holds nothing

Every even layout on these factors is one choice per factor such that the digits of a dim nest. All other digits are
local.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from reshard.errors import UndecidedError
from reshard.plans.plan import Plan
from reshard.types import dtypes
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.mesh import Mesh, SubAxis, places


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
        return tuple(tuple(self._digits(factor.size)) for factor in self.factors)

    def _digits(self, radix: int) -> Iterator[Hold]:
        for dim, size in enumerate(self.shape):
            yield from (Hold(dim, low) for low in range(size // radix, 0, -1) if size % (low * radix) == 0)

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
        dims = tuple(self._dim(at, size, state) for at, size in enumerate(self.shape))
        partial = tuple(self._axis(f) for f, hold in zip(self.factors, state, strict=True) if hold == PARTIAL)
        return Layout(self.mesh, dims, self.dtype, self.reduction if partial else None, partial)

    def _dim(self, at: int, size: int, state: State) -> Dim:
        held = [(hold.low, f) for f, hold in zip(self.factors, state, strict=True) if hold.dim == at]
        digits: list[Digit] = []
        high = size
        for low, factor in sorted(held, reverse=True):
            digits += [Digit(high // (low * factor.size), None), Digit(factor.size, self._axis(factor))]
            high = low
        return Dim((*digits, Digit(high, None)), size)

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
    factors = _factors(source.mesh, layouts[:2])
    strides = [(source.mesh.stride(axis), axis.size) for axis in source.partial]
    summed = frozenset(f for low, size in strides for f in factors if low <= f.stride < low * size)
    return Space(source.mesh, source.shape, source.dtype, source.reduction, factors, summed)


def _factors(mesh: Mesh, layouts: Sequence[Layout]) -> tuple[PrimeFactor, ...]:
    """The prime factors of the positions, major first, cut where axes and the sub-axes in use end."""
    axes = [SubAxis(name, 1, size) for name, size in mesh.axes.items()]
    used = [axis for layout in layouts for axis in (*layout.held, *layout.partial)]
    ends = sorted({1} | {end for a in (*axes, *used) for end in (mesh.stride(a), mesh.stride(a) * a.size)})
    if any(high % low for low, high in itertools.pairwise(ends)):
        raise UndecidedError("sub-axes that overlap are not searched")
    factors = [PrimeFactor(*place) for low, high in itertools.pairwise(ends) for place in places(low, high // low)]
    return tuple(sorted(factors, reverse=True))
