"""Assigns the target's tiles to ranks so that as many bytes as possible stay where they are."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.errors import PlanError
from reshard.geometry.overlap import piece, shared_elements
from reshard.lower.to_mpi import devices_by_id
from reshard.mpi.tile_checks import check_layout
from reshard.types import Layout, Mesh


def relabelled(source: Layout, target: Layout) -> Layout:
    """The target with its tiles assigned to other ranks: the same mesh axes with other `device_ids`.

    No other assignment leaves more elements in place (scipy's `linear_sum_assignment`). Raises `PlanError` without
    scipy. In this example both ranks hold each other's tile of the target, so that swapping the ids saves the move:

    >>> source = Layout.parse("f32[{x}4, 4]", Mesh(x=2))
    >>> target = Layout.parse("f32[{x}4, 4]", Mesh({"x": 2}, device_ids=[1, 0]))
    >>> relabelled(source, target) == source
    True
    """
    check_layout(source, "source")
    check_layout(target, "target")
    if source.shape != target.shape:
        raise PlanError(
            f"source {source} has global shape {source.shape}, target {target} has {target.shape}; give two layouts of "
            f"one array"
        )
    try:
        assign: Any = import_module("scipy.optimize").linear_sum_assignment
    except ImportError:
        raise PlanError("relabel=True needs scipy: pip install scipy") from None
    kept = count_retained(source, target)
    size = len(kept)
    # Among assignments that keep equally many elements, prefer the one that moves the fewest tiles to another rank.
    weights = kept * (size + 1) + np.eye(size, dtype=kept.dtype)
    tiles: list[int] = assign(weights, maximize=True)[1].tolist()
    devices = devices_by_id(target.mesh)
    taker = {devices[tile]: devices[rank] for rank, tile in enumerate(tiles)}
    mesh = Mesh(target.mesh.axes, device_ids=[taker[device] for device in target.mesh.devices])
    return replace(target, mesh=mesh)


def count_retained(source: Layout, target: Layout) -> NDArray[np.int64]:
    """At [r, t], how many elements of the target's tile t its r-th device already holds, by ascending device id.

    >>> rows, columns = (Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}4, 6]", "f32[8, {x}3]"))
    >>> count_retained(rows, rows).tolist(), count_retained(rows, columns).tolist()
    ([[24, 0], [0, 24]], [[12, 12], [12, 12]])
    """
    devices, held = devices_by_id(target.mesh), set(source.mesh.devices)
    before = [source.mesh.position(device) for device in devices if device in held]
    after = [target.mesh.position(device) for device in devices]
    counts = np.ones((len(before), len(after)), np.int64)
    for s, t in zip(source.dims, target.dims, strict=True):
        common = shared_elements(s, t)
        rows = [piece(s, source.mesh, position) for position in before]
        columns = [piece(t, target.mesh, position) for position in after]
        counts *= np.array([[common[column].get(row, 0) for column in columns] for row in rows], np.int64).reshape(
            counts.shape
        )
    kept = np.zeros((len(after), len(after)), np.int64)
    kept[[device in held for device in devices]] = counts
    return kept
