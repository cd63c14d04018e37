"""Which rank takes which tile of the target, so that the most bytes stay where they are."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.errors import PlanError
from reshard.lower.to_mpi import ranks
from reshard.types import Layout, Mesh
from reshard.types.pair.overlap import piece, shares


def relabelled(source: Layout, target: Layout) -> Layout:
    """The target with its tiles dealt to other ranks: on a mesh of the same axes with other `device_ids`.

    No other assignment keeps more elements in place (scipy's `linear_sum_assignment`). Raises `PlanError`
    without scipy.

    >>> source = Layout.parse("f32[{x}4, 4]", Mesh(x=2))
    >>> target = Layout.parse("f32[{x}4, 4]", Mesh({"x": 2}, device_ids=[1, 0]))
    >>> relabelled(source, target) == source
    True
    """
    try:
        assign: Any = import_module("scipy.optimize").linear_sum_assignment
    except ImportError:
        raise PlanError("relabel=True needs scipy: pip install scipy") from None
    kept = kept_elements(source, target)
    size = len(kept)
    # Of assignments that keep as much, that which moves the fewest tiles to another rank.
    weights = kept * (size + 1) + np.eye(size, dtype=kept.dtype)
    seats: list[int] = assign(weights, maximize=True)[1].tolist()
    devices = ranks(target.mesh)
    taker = {devices[seat]: devices[rank] for rank, seat in enumerate(seats)}
    mesh = Mesh(target.mesh.axes, device_ids=[taker[device] for device in target.mesh.devices])
    return replace(target, mesh=mesh)


def kept_elements(source: Layout, target: Layout) -> NDArray[np.int64]:
    """How many elements rank r holds of the target's tile number s, at [r, s]."""
    before, after = ([layout.mesh.position(d) for d in ranks(layout.mesh)] for layout in (source, target))
    found = np.ones((len(before), len(after)), np.int64)
    for s, t in zip(source.dims, target.dims, strict=True):
        common = shares(s, t)
        lengths = [{p: sum(run.length for run in runs) for p, runs in by.items()} for by in common]
        rows = [piece(s, source.mesh, position) for position in before]
        columns = [piece(t, target.mesh, position) for position in after]
        found *= np.array([[lengths[q].get(p, 0) for q in columns] for p in rows], np.int64)
    return found
