"""A layout with some sub-axes released: the digits that they held become local.

    f32[{x}{y}2] on <x=4, y=2>     without x: f32[4{y}2], without x:(1)2: f32[2{x:(2)2}{y}2]

Devices that differ only along these sub-axes have such a tile among them: what a sum that is split along them may be
made of, with no data received.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from reshard.types.layout import Digit, Layout, fitted
from reshard.types.mesh import Mesh, is_chain
from reshard.types.pair.refine import Factor


def released(layout: Layout, factors: Iterable[Factor]) -> Layout:
    """The layout in which no digit is held along these factors of the device positions; its partial sub-axes stay.

    >>> from reshard.types import Mesh
    >>> print(released(Layout.parse("f32[{x}3/10, {y}2]", Mesh(x=4, y=2)), [Factor(2, 4)]))
    f32[10, {y}2]
    """
    spans = [(factor.stride, factor.stride * factor.size) for factor in factors]
    dims = tuple(fitted(_digits(layout, dim.digits, spans), dim.size) for dim in layout.dims)
    return Layout(layout.mesh, dims, layout.dtype, layout.reduction, layout.partial)


def _digits(layout: Layout, digits: Iterable[Digit], spans: list[tuple[int, int]]) -> Iterator[Digit]:
    for digit in digits:
        if digit.axis is None:
            yield digit
        else:
            yield from _parts(layout.mesh, *layout.mesh.span(digit.axis), spans)


def _parts(mesh: Mesh, low: int, high: int, spans: list[tuple[int, int]]) -> Iterator[Digit]:
    """The parts of a held digit, major first; the whole of it is local if a factor does not nest with its holder."""
    if not all(is_chain(sorted({low, high, *span})) for span in spans):
        yield Digit(high // low, None)
        return
    inside = [(max(low, start), min(high, end)) for start, end in spans if start < high and low < end]
    cuts = sorted({low, high, *(end for part in inside for end in part)})
    for lower, upper in [*pairwise(cuts)][::-1]:
        if any(start <= lower < end for start, end in inside):
            yield Digit(upper // lower, None)
        else:
            yield from (Digit(axis.size, axis) for axis in mesh.sub_axes(lower, upper // lower))
