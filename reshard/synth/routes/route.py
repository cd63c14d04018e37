"""What every module of routes is given, and what it returns.

    routes(pair: Pair, links: Links | None) -> Iterator[Route]

A route is a sequence of unchecked steps that leads from `pair.source` to `pair.target`; `()` does nothing. `links` are
those of the source's mesh; without them only bytes and launches count. A module yields nothing for a pair that it does
not handle. Its routes need not be good, only right: the planner checks, prices and compares them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from reshard.geometry.refine import Refinement, partial_change, refine
from reshard.geometry.remesh import one_set
from reshard.plans.plan import StepSpec
from reshard.types.layout import Digit, Dim, Layout, fit_digits

Route = tuple[StepSpec, ...]
"""Steps that are not checked yet."""


@dataclass(frozen=True)
class Pair:
    """Two layouts of one array, on one mesh if they have spellings on one.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4, y=2)
    >>> pair = Pair(Layout.parse("f32[{y}8] + sum{x}", mesh), Layout.parse("f32[{y}8]", mesh))
    >>> pair.reduces, [(digit.radix, digit.src, digit.dst) for digit in pair.refinement.digits]
    (True, [(2, 1, 1), (8, None, None)])
    """

    source: Layout
    target: Layout

    @property
    def crosses(self) -> bool:
        """Whether the target is on another set of devices."""
        return not one_set(self.source.mesh, self.target.mesh)

    @property
    def reduces(self) -> bool:
        """Whether the target is not partial as the source is, so that a sum must be finished or started."""
        source, target = self.source, self.target
        return not source.partial_as(target) or (bool(target.partial) and source.mesh != target.mesh)

    @cached_property
    def starts(self) -> bool:
        """Whether the target is partial along sub-axes along which the source is not, or by another operation.

        A sum can be kept only on one mesh; on another one, or if the two cut an axis in ways that do not nest, it is
        finished and started again.
        """
        if not self.reduces or not self.target.partial:
            return False
        change = partial_change(self.source, self.target) if self.source.mesh == self.target.mesh else None
        return change is None or bool(change.started)

    @cached_property
    def refinement(self) -> Refinement | None:
        """The common refinement, None if the numerals do not nest."""
        return refine(self.source, self.target)


def hold_digits(like: Layout, digits: Iterable[tuple[int, int, int | None]]) -> Layout:
    """The array of a layout with other digits, dim by dim, each (dim, radix, device stride that holds it or None).

    A stride may span several axes of the mesh, of which each holds its part of the digit. Dims in pieces keep them.
    Raises `LayoutError` where sub-axes cannot coexist in one layout.
    """
    dims: list[list[Digit]] = [[] for _ in like.dims]
    for dim, radix, stride in digits:
        if stride is None:
            dims[dim].append(Digit(radix, None))
        else:
            dims[dim] += [Digit(axis.size, axis) for axis in like.mesh.sub_axes(stride, radix)]
    fitted = tuple(
        fit_digits(each, dim.size)
        if dim.pieces is None
        else Dim((*(d for d in each if d.axis), Digit(dim.pieces.largest, None)), dim.size, dim.pieces)
        for each, dim in zip(dims, like.dims, strict=True)
    )
    return Layout(like.mesh, fitted, like.dtype, like.reduction, like.partial)
