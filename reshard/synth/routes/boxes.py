"""Routes for layouts that have no common refinement, or whose pieces are uneven.

The move itself is one exchange of boxes, or a permute if the tiles are the same. Around it, dims
that do refine are sliced before and gathered after, which saves the exchange its rounds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from reshard.errors import LayoutError, StepError
from reshard.synth.routes.normal import Atoms, Route
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.pair.refine import refine
from reshard.types.plan import StepSpec
from reshard.types.rules.checker import check_step


def routes(source: Layout, target: Layout) -> Iterator[Route]:
    """A permute if one does it, the exchange alone, and the exchange between slices and gathers."""
    if permutes(source, target):
        yield (StepSpec("permute", target),)
    if source.mesh == target.mesh:
        # Sub-axes of the two that cannot co-exist in one layout leave nothing to peel.
        with contextlib.suppress(LayoutError):
            yield from _peeled(source, target)
    yield (StepSpec("exchange", target),)


def permutes(operand: Layout, result: Layout) -> bool:
    """Whether one permute leads from operand to result."""
    try:
        check_step("permute", operand, result)
    except StepError:
        return False
    return True


def _peeled(source: Layout, target: Layout) -> Iterator[Route]:
    """slice ; exchange ; gather, with the slices and gathers of the dims that refine."""
    before, after = list(source.dims), list(target.dims)
    used_before, used_after = _axes(source), _axes(target)
    for at in range(len(before)):
        one, other = _only(source, at), _only(target, at)
        r = refine(one, other)
        if r is None:
            continue
        atoms = Atoms(one, other, r)
        free = {a.dst for a in r.digits if not _overlaps(a.dst, a.radix, used_before)}
        done = {a.src for a in r.digits if not _overlaps(a.src, a.radix, used_after)}
        first = tuple(d if s is None and d in free else s for s, d in zip(atoms.start, atoms.end, strict=True))
        last = tuple(s if d is None and s in done else d for s, d in zip(atoms.start, atoms.end, strict=True))
        before[at] = atoms.layout(first).dims[0]
        after[at] = atoms.layout(last).dims[0]
    first_layout, last_layout = _with(source, before), _with(target, after)
    if first_layout == source and last_layout == target:
        return
    moves: list[StepSpec] = []
    for kind, at, to in (
        ("slice", source, first_layout),
        ("exchange", first_layout, last_layout),
        ("all_gather", last_layout, target),
    ):
        if at != to:
            moves.append(StepSpec(kind, to))
    yield tuple(moves)


def dealt(layout: Layout, other: Layout) -> Layout | None:
    """The layout with its pieces dealt out one element a round, in the dims where its numeral does not nest in another.

    layout  f32[{x}3]     x = 2, y = 3: the other, f32[{y}2], counts y first
    dealt   f32[3{x}]     ... and here x comes last, where y can stand before it
    """
    if layout.mesh != other.mesh or not (layout.even and other.even):
        return None
    nest = [refine(_only(layout, at), _only(other, at)) is not None for at in range(len(layout.dims))]
    dims = [dim if fits else _dealt(dim) for dim, fits in zip(layout.dims, nest, strict=True)]
    return _with(layout, dims)


def _dealt(dim: Dim) -> Dim:
    return Dim((Digit(dim.tile, None), *(digit for digit in dim.digits if digit.axis is not None)), dim.size)


def _only(layout: Layout, at: int) -> Layout:
    """One dim of a layout, as an array of its own."""
    return Layout(layout.mesh, (layout.dims[at],), layout.dtype)


def _with(layout: Layout, dims: list[Dim]) -> Layout:
    return Layout(layout.mesh, tuple(dims), layout.dtype, layout.reduction, layout.partial)


def _axes(layout: Layout) -> list[tuple[int, int]]:
    held = (*layout.held, *layout.partial)
    return [(layout.mesh.stride(s), layout.mesh.stride(s) * s.size) for s in held]


def _overlaps(stride: int | None, radix: int, spans: list[tuple[int, int]]) -> bool:
    return stride is None or any(low < stride * radix and stride < high for low, high in spans)
