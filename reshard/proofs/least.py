"""The least that the worst device must receive, worked out from the two layouts alone, with the argument."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.proofs.symbolic import Form
from reshard.proofs.symbolic.form import FormDigit, step_digits
from reshard.types.layout import Dim, Layout
from reshard.types.mesh import Mesh, SubAxis, merged_spans

Ints = NDArray[np.int64]


class Floor(NamedTuple):
    """Elements that some device receives in any plan, and why."""

    elements: int
    argument: str


class _IndexRuns(NamedTuple):
    """Runs of neighbouring indices, all of one length, in order."""

    starts: Ints
    length: int

    def below(self, index: Ints) -> Ints:
        """How many of the runs' indices are below each index."""
        at = np.searchsorted(self.starts, index, side="right") - 1
        inside = np.clip(index - self.starts[np.maximum(at, 0)], 0, self.length)
        return np.where(at < 0, 0, at * self.length + inside)


def floor(source: Layout, target: Layout, form: Form) -> Floor:
    """The bound in elements at these sizes; for others it grows with the sizes that vary."""
    if source.partial != target.partial:
        return _reduction(source, target)
    atoms = step_digits(source, target, form)
    if atoms is not None and source.even and target.even:
        return _even(atoms)
    return _counted(source, target)


def _even(atoms: tuple[FormDigit, ...]) -> Floor:
    """Digit by digit: which part of its target tile a device holds already."""
    tile = math.prod(a.radix for a in atoms if a.dst is None)
    pieces = math.prod(a.radix for a in atoms if a.src is not None and a.dst is None)
    moved = [a for a in atoms if a.src is not None and a.dst is not None and a.src != a.dst]
    if moved:
        a = moved[0]
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


def _counted(source: Layout, target: Layout) -> Floor:
    """Device by device, dim by dim: a tile and what two tiles share are products over the dims."""
    devices = np.array(target.mesh.devices, np.int64)
    need = np.ones(len(devices), np.int64)
    have = np.ones(len(devices), np.int64)
    for a, b in zip(source.dims, target.dims, strict=True):
        rows = np.stack([_held(a, source, devices), _held(b, target, devices)], axis=1)
        kinds, which = np.unique(rows, axis=0, return_inverse=True)
        before, after = _local(a), _local(b)
        counts = np.array([_shared(before, p, after, q, b.size) for p, q in kinds], np.int64).reshape(-1, 2)
        need *= counts[which.ravel(), 0]
        have *= counts[which.ravel(), 1]
    worst = int(np.argmax(need - have))
    return Floor(
        int((need - have)[worst]),
        f"device {devices[worst]} needs {need[worst]} elements, of which it holds {have[worst]} before; no other "
        f"device lacks more",
    )


def _shared(before: _IndexRuns, p: int, after: _IndexRuns, q: int, size: int) -> tuple[int, int]:
    """Elements that a piece of the target has, and those of them that a piece of the source has."""
    low = np.minimum(after.starts + q, size)
    high = np.minimum(after.starts + q + after.length, size)
    return int((high - low).sum()), int((before.below(high - p) - before.below(low - p)).sum())


def _held(dim: Dim, layout: Layout, devices: Ints) -> Ints:
    """What each device's coordinates add to a dim's index."""
    known = np.array(layout.mesh.devices, np.int64)
    order = np.argsort(known)
    at = order[np.searchsorted(known[order], devices)]
    found, low = np.zeros_like(at), 1
    for radix, axis in reversed(dim.digits):
        if axis is not None:
            found += at // layout.mesh.stride(axis) % radix * low
        low *= radix
    return found


def _local(dim: Dim) -> _IndexRuns:
    """What the local indices add to a dim's index, as runs."""
    starts, length, low = np.zeros(1, np.int64), 1, 1
    for radix, axis in reversed(dim.digits):
        if axis is None and len(starts) == 1 and low == length:
            length *= radix
        elif axis is None:
            starts = (np.arange(radix)[:, None] * low + starts[None]).reshape(-1)
        low *= radix
    return _IndexRuns(starts, length)


def _reduction(source: Layout, target: Layout) -> Floor:
    """A sum's bound: the mean over a team of devices, or one target tile, whichever is more.

    A team makes one sum of the target's: its devices differ along sub-axes that some layout uses, but not along those
    that stay partial. The argument is one about such teams; that no team helps another is assumed.
    """
    mesh, at = source.mesh, np.arange(source.mesh.size)
    used = (*source.held, *source.partial, *target.held, *target.partial)
    outside = at - _along(mesh, used, at)
    first = (outside == 0) & (_along(mesh, target.partial, at) == 0)
    devices = int(first.sum())
    summands = len(np.unique(_along(mesh, source.partial, at[first])))
    holders = devices // len(np.unique(_along(mesh, target.held, at[first])))
    receipts = (summands - 1) + (holders - 1)
    mean = -(-math.prod(source.shape) * receipts // devices)
    tile = math.prod(_true(_local(dim), dim.size) for dim in target.dims)
    return Floor(
        max(mean, tile),
        f"when some device has an element's sum of {summands} summands, {summands - 1} were received for it, and each "
        f"of its other {holders - 1} holders receives once more: {receipts} receipts for each of "
        f"{math.prod(source.shape)} elements, of which one of {devices} devices has {mean} or more; and no device has "
        f"a finished element before it receives something for it, so that it receives its target tile at least, "
        f"{tile} elements; devices along sub-axes that neither layout uses are taken to work by themselves",
    )


def _along(mesh: Mesh, axes: Sequence[SubAxis], at: Ints) -> Ints:
    """Positions with every coordinate set to 0 but those along some sub-axes, and what lies between."""
    found = np.zeros_like(at)
    for low, high in merged_spans([(mesh.stride(axis), mesh.stride(axis) * axis.size) for axis in axes]):
        found += at // low % (high // low) * low
    return found


def _true(runs: _IndexRuns, size: int) -> int:
    """Elements of the piece at coordinates zero, which has the most."""
    return int((np.minimum(runs.starts + runs.length, size) - np.minimum(runs.starts, size)).sum())
