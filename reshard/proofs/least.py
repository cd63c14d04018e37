"""The lower bound on what the worst device receives in any plan, from the two layouts alone, with its argument.

    f32[{x}3/10] -> f32[{y}5] on <x=4, y=2>

    device           0      1      2      3      4      5      6      7
    x, y             0, 0   0, 1   1, 0   1, 1   2, 0   2, 1   3, 0   3, 1
    holds            0-2    0-2    3-5    3-5    6-8    6-8    9      9
    needs            0-4    5-9    0-4    5-9    0-4    5-9    0-4    5-9
    lacks            2      5      3      4      5      2      5      4       the bound is 5 elements

`plans.rules.bounds` computes the same bound for the planner, by refinements and runs of `geometry`. None of that is
used here, because a fault in it would make a plan look minimal: this module counts digits of the prover's own form, or
indices device by device. The tests compare the two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reshard.plans.plan import Plan
from reshard.proofs.symbolic import Form
from reshard.proofs.symbolic.contract import (
    Factors,
    Ints,
    coordinate_along,
    find_positions,
    list_ids,
    list_indices,
    offset_of_held,
)
from reshard.proofs.symbolic.form import FormDigit, step_digits
from reshard.types.layout import Dim, Layout
from reshard.types.mesh import Mesh, SubAxis, merged_spans


class Floor(NamedTuple):
    """A number of elements that some device receives in any plan, and why."""

    elements: int
    argument: str


class _IndexRuns(NamedTuple):
    """Runs of neighbouring indices, all of the same length, in order."""

    starts: Ints
    length: int

    def below(self, index: Ints) -> Ints:
        """How many indices of the runs are below each given index."""
        at = np.searchsorted(self.starts, index, side="right") - 1
        inside = np.clip(index - self.starts[np.maximum(at, 0)], 0, self.length)
        return np.where(at < 0, 0, at * self.length + inside)


def plans_meant(plan: Plan) -> str:
    """The plans among which the bound holds, after "any" in a statement.

    A sum that stays unfinished could also be finished on the way and started anew, for fewer bytes in some cases; its
    summands, and how they round, would then be others. Along an axis that neither layout uses, devices have equal
    summands; to finish a part each and to gather the parts can receive fewer bytes, too.

    >>> import reshard as rs
    >>> mesh, texts = rs.Mesh(x=4, y=2), ("f32[{x}4] + sum{y}", "f32[16] + sum{y}", "f32[16] + sum{x}", "f32[{x}4]")
    >>> a, b, c, d = (Layout.parse(text, mesh) for text in texts)
    >>> plans_meant(rs.plan(a, b)), plans_meant(rs.plan(c, d)), plans_meant(rs.plan(a, d))
    ('plan that moves each summand as it is', 'plan without idle axes', 'plan')
    """
    source, target = plan.source, plan.target
    if not source.partial:
        return "plan"
    if _summands_stay(source, target):
        return "plan that moves each summand as it is"
    # Whether devices of the mesh differ along sub-axes that neither layout uses.
    used = (*source.held, *source.partial, *target.held, *target.partial)
    spans = merged_spans([source.mesh.span(axis) for axis in used]) if source.mesh == target.mesh else []
    idle = math.prod(high // low for low, high in spans) < source.mesh.size
    return "plan without idle axes" if source.mesh == target.mesh and idle else "plan"


def least_steps_bytes(source: Layout, target: Layout, form: Form) -> Floor:
    """The bound in elements at these sizes; at other sizes of the form it grows with their product.

    >>> from reshard.proofs.symbolic.form import form_of
    >>> pair = [Layout.parse(text, Mesh(x=4, y=2)) for text in ("f32[{x}3/10]", "f32[{y}5]")]
    >>> least_steps_bytes(*pair, form_of(pair, (), ())).elements
    5
    """
    one = source.mesh.size, source.mesh.device_ids
    if one != (target.mesh.size, target.mesh.device_ids) and set(source.mesh.devices) != set(target.mesh.devices):
        return _elsewhere(source, target)
    if not _summands_stay(source, target):
        kept, started = _target_factors(source, target)
        if math.prod(size for _, size in kept) == math.prod(axis.size for axis in source.partial):
            return _started(source, target, started)
        return _reduction(source, target, kept, started)
    digits = step_digits(source, target, form)
    if digits is not None and source.even and target.even:
        return _even(digits)
    return _counted(source, target)


def _summands_stay(source: Layout, target: Layout) -> bool:
    """Whether each device has the same summand, if any, of its tile after as before."""
    if not source.partial_as(target):
        return False
    if not source.partial or source.mesh == target.mesh:
        return True
    return source.mesh.device_ids == target.mesh.device_ids and _spans(source) == _spans(target)


def _even(digits: tuple[FormDigit, ...]) -> Floor:
    """The bound, digit by digit, from the part of its target tile that a device already holds."""
    tile = math.prod(a.radix for a in digits if a.dst is None)
    pieces = math.prod(a.radix for a in digits if a.src is not None and a.dst is None)
    swapped = [a for a in digits if a.src is not None and a.dst not in (None, a.src)]
    if swapped:
        a = swapped[0]
        return Floor(
            tile,
            f"a digit of dim {a.dim} is held along stride {a.src} of the devices before, and along stride {a.dst} "
            f"after: a device whose coordinates along the two differ holds no element of its target tile, and "
            f"receives all of it",
        )
    share = "all of" if pieces == 1 else f"1/{pieces} of"
    return Floor(
        tile - tile // pieces,
        f"every digit that stays held keeps its holder, and digits of {pieces} values in all are held before and "
        f"local after: each device holds {share} its target tile, and receives the rest",
    )


def _elsewhere(source: Layout, target: Layout) -> Floor:
    """The bound on another set of devices: what a tile's devices lack, which is all of it if the source is a sum to be
    finished.
    """
    if not source.partial and not target.partial:
        return _counted(source, target)
    summands = math.prod(axis.size for axis in target.partial)
    tile = math.prod(map(_real, target.dims))
    if not source.partial and not set(source.mesh.devices).isdisjoint(target.mesh.devices):
        return Floor(0, "a device of both sets may hold all of its target tile before; no more is counted")
    return Floor(
        -(-tile // summands),
        f"no device has a finished element of its target tile, of {tile} elements, before it receives something for "
        f"it, and {summands} devices share what is received for a tile",
    )


def _counted(source: Layout, target: Layout) -> Floor:
    """Device by device: the size of a tile, and of what two tiles share, is a product over the dims."""
    devices = list_ids(target.mesh)
    holding = np.isin(devices, list_ids(source.mesh))
    before = np.zeros_like(devices)
    before[holding] = find_positions(source.mesh, devices[holding])
    at = before, find_positions(target.mesh, devices)
    need = np.ones(len(devices), np.int64)
    have = holding.astype(np.int64)
    for a, b in zip(source.dims, target.dims, strict=True):
        # Devices with the same pair of offsets need and hold the same indices.
        ps, at_p = _distinct(offset_of_held(a, source, at[0]))
        qs, at_q = _distinct(offset_of_held(b, target, at[1]))
        pairs, which = _distinct(at_p * len(qs) + at_q)
        needed, held = _shared(a, ps[pairs // len(qs)], b, qs[pairs % len(qs)])
        need *= needed[which]
        have *= held[which]
    worst = int(np.argmax(need - have))
    return Floor(
        int((need - have)[worst]),
        f"device {devices[worst]} needs {need[worst]} elements, of which it holds {have[worst]} before; no other "
        f"device lacks more",
    )


def _distinct(numbers: Ints) -> tuple[Ints, Ints]:
    """The different numbers, ascending, and which of them each one is; sorted only where they are far apart."""
    most = int(numbers.max())
    if most > 8 * len(numbers):
        return np.unique(numbers, return_inverse=True)
    occurs = np.zeros(most + 1, bool)
    occurs[numbers] = True
    return np.flatnonzero(occurs), (np.cumsum(occurs) - 1)[numbers]


_CELLS = 1 << 20
"""Runs of pieces that are compared at once."""


def _shared(source: Dim, p: Ints, target: Dim, q: Ints) -> tuple[Ints, Ints]:
    """The number of elements in each piece of the target, and how many of them are in the piece of the source."""
    needed, held, size = np.empty_like(q), np.empty_like(q), target.size
    if source.pieces is not None or target.pieces is not None:
        # Index by index: the piece that has it on either side.
        sides: list[tuple[Ints, Ints]] = []
        for dim, offsets in ((source, p), (target, q)):
            owners, (distinct, which) = np.full(size, -1), np.unique(offsets, return_inverse=True)
            for number, offset in enumerate(distinct.tolist()):
                indices = list_indices(dim, offset)
                owners[indices[indices < size]] = number
            sides.append((owners, which))
        (before, p), (after, q) = sides
        pairs, counts = np.unique(before * size + after, return_counts=True)
        both = dict(zip(pairs.tolist(), counts.tolist(), strict=True))
        shared = [both.get(number, 0) for number in (p * size + q).tolist()]
        return np.bincount(after[after >= 0], minlength=len(q))[q], np.array(shared, np.int64)
    before, after = _local(source), _local(target)
    step = max(1, _CELLS // max(1, len(after.starts)))
    for first in range(0, len(q), step):
        some = slice(first, first + step)
        low = np.minimum(after.starts + q[some, None], size)
        high = np.minimum(after.starts + q[some, None] + after.length, size)
        needed[some] = (high - low).sum(axis=1)
        held[some] = (before.below(high - p[some, None]) - before.below(low - p[some, None])).sum(axis=1)
    return needed, held


def _local(dim: Dim) -> _IndexRuns:
    """What the local indices add to the global index of a dim, as runs."""
    starts, length, low = np.zeros(1, np.int64), 1, 1
    for radix, axis in reversed(dim.digits):
        if axis is None and len(starts) == 1 and low == length:
            length *= radix
        elif axis is None:
            starts = (np.arange(radix)[:, None] * low + starts[None]).reshape(-1)
        low *= radix
    return _IndexRuns(starts, length)


def _target_factors(source: Layout, target: Layout) -> tuple[Factors, Factors]:
    """The factors of the positions along which the target is partial as the source is, and those that are new."""
    before, after = _spans(source), _spans(target)
    if source.mesh != target.mesh or source.reduction != target.reduction:
        before = []
    ends = sorted({end for span in (*before, *after) for end in span})
    if any(high % low for low, high in itertools.pairwise(ends)):
        return (), [(low, high // low) for low, high in after]
    pieces = [
        (low, high // low) for low, high in itertools.pairwise(ends) if any(one <= low < other for one, other in after)
    ]
    kept = [piece for piece in pieces if any(low <= piece[0] < high for low, high in before)]
    return kept, [piece for piece in pieces if piece not in kept]


def _spans(layout: Layout) -> list[tuple[int, int]]:
    return [layout.mesh.span(axis) for axis in layout.partial]


def _started(source: Layout, target: Layout, started: Factors) -> Floor:
    """Group by group: the devices along the factors that become partial need their tile once among all of them.

    What a group has of a tile is a product over the dims, of pieces that do not overlap.
    """
    devices = np.array(target.mesh.devices, np.int64)
    after = find_positions(target.mesh, devices)
    first = after - sum((coordinate_along(after, *f) * f[0] for f in started), np.zeros_like(after))
    order = np.argsort(first, kind="stable").reshape(-1, math.prod(size for _, size in started))
    before = find_positions(source.mesh, devices)[order]
    need, have = (np.ones(len(order), np.int64) for _ in range(2))
    for a, b in zip(source.dims, target.dims, strict=True):
        rows = np.sort(offset_of_held(a, source, before), axis=1)
        rows = np.concatenate([offset_of_held(b, target, after[order[:, :1]]), rows], axis=1)
        kinds, which = np.unique(rows, axis=0, return_inverse=True)
        counts: list[tuple[int, int]] = []
        for row in kinds:  # the target's piece, then those of the source that some device of the group has
            pieces = np.unique(row[1:])
            needed, held = _shared(a, pieces, b, np.full_like(pieces, row[0]))
            counts.append((int(needed[0]), int(held.sum())))
        needs, haves = np.array(counts, np.int64).reshape(-1, 2).T
        need, have = need * needs[which.ravel()], have * haves[which.ravel()]
    lacks = need - have
    worst, group = int(np.argmax(lacks)), order.shape[1]
    elements = -(-int(lacks[worst]) // group)
    return Floor(
        elements,
        f"{group} devices have the summands of a tile of {need[worst]} elements, of which they hold {have[worst]} "
        f"before: they receive the others, and one of them at least {elements}",
    )


def _reduction(source: Layout, target: Layout, kept: Factors, started: Factors) -> Floor:
    """The bound of a reduction: the mean over a team of devices, or one target tile, whichever is larger.

    A team makes one of the target's sums. Its devices differ along sub-axes that some layout uses, but not along those
    that stay partial; between meshes without common sub-axes, all devices are one team. The argument is about one
    team, and assumes that no team helps another. Along factors that become partial, a group of devices has the tile.
    """
    every = np.array(source.mesh.devices, np.int64)
    before, after = find_positions(source.mesh, every), find_positions(target.mesh, every)
    first = np.ones(len(every), bool)
    for factor in kept:
        first &= coordinate_along(after, *factor) == 0
    if source.mesh == target.mesh:
        used = (*source.held, *source.partial, *target.held, *target.partial)
        first &= _along(source.mesh, used, before) == before
    devices = int(first.sum())
    summands = len(np.unique(_along(source.mesh, source.partial, before[first])))
    group = math.prod(size for _, size in started)
    holders = devices // len(np.unique(_along(target.mesh, target.held, after[first]))) // group
    receipts = (summands - 1) + (holders - 1)
    mean = -(-math.prod(source.shape) * receipts // devices)
    tile = -(-math.prod(map(_real, target.dims)) // group)
    return Floor(
        max(mean, tile),
        f"when some device has an element's sum of {summands} summands, {summands - 1} were received for it, and each "
        f"of its other {holders - 1} holders receives once more: {receipts} receipts for each of "
        f"{math.prod(source.shape)} elements, of which one of {devices} devices has {mean} or more; and no device has "
        f"a finished element before it receives something for it, so that it receives its share of the target tile at "
        f"least, {tile} elements; devices along sub-axes that neither layout uses are taken to work by themselves",
    )


def _along(mesh: Mesh, axes: Sequence[SubAxis], at: Ints) -> Ints:
    """The positions with all coordinates set to 0 except those along some sub-axes and between them."""
    kept = np.zeros_like(at)
    for low, high in merged_spans([(mesh.stride(axis), mesh.stride(axis) * axis.size) for axis in axes]):
        kept += coordinate_along(at, low, high // low) * low
    return kept


def _real(dim: Dim) -> int:
    """The number of elements, without padding, in the largest piece: of a numeral, the one at coordinates 0."""
    if dim.pieces is not None:
        return dim.pieces.largest
    runs, size = _local(dim), dim.size
    return int((np.minimum(runs.starts + runs.length, size) - np.minimum(runs.starts, size)).sum())
