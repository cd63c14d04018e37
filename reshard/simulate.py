"""Runs a plan on all devices in this process: the numpy reference, and the embedded default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from reshard.lower import lower
from reshard.runtime import Memory, run
from reshard.types.plan import Plan


def simulate(plan: Plan, tiles: Mapping[int, NDArray[Any]], memory: Memory | None = None) -> dict[int, NDArray[Any]]:
    """The target's tiles, by device id, from the source's; `memory` is filled with what it took.

    Tiles have the layout's tile shape, padding included, and its dtype; the given ones are not
    written to. Raises `TileError` if they are not the source's.

    >>> import numpy as np, reshard as rs
    >>> mesh = rs.Mesh(x=2)
    >>> plan = rs.plan(rs.Layout.parse("int64[{x}2]", mesh), rs.Layout.parse("int64[4]", mesh))
    >>> rs.simulate(plan, {0: np.array([0, 1]), 1: np.array([2, 3])})[1]
    array([0, 1, 2, 3])
    """
    return run(lower(plan), tiles, memory)
