"""`simulate`: a plan, or a tree of plans, run on numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from numpy.typing import NDArray

from reshard.errors import TileError
from reshard.lower import lower_plan
from reshard.runtime.account import Account
from reshard.runtime.given_tiles import tile_per_device, with_padding, without_padding
from reshard.runtime.numpy_trees import simulate_tree
from reshard.runtime.numpy_views import extras
from reshard.runtime.on_numpy import run
from reshard.types.flags import checked_flag
from reshard.types.plan import Plan
from reshard.types.plan_tree import TreePlan

Array = NDArray[Any]
Tiles = dict[int, Array]


@overload
def simulate(
    plan: Plan,
    tiles: Mapping[int, Array],
    memory: Account | None = None,
    *,
    padded: bool = True,
    into: Mapping[int, Array] | None = None,
    scale: Any = None,
) -> Tiles: ...


@overload
def simulate(
    plan: TreePlan, tiles: Mapping[str, Mapping[int, Array]], memory: Account | None = None, *, padded: bool = True
) -> dict[str, Tiles]: ...


def simulate(
    plan: Plan | TreePlan,
    tiles: Mapping[Any, Any],
    memory: Account | None = None,
    *,
    padded: bool = True,
    into: Mapping[int, Array] | None = None,
    scale: Any = None,
) -> Tiles | dict[str, Tiles]:
    """Runs a plan on numpy arrays, all devices in this process; returns the target's tiles by device id.

    Tiles have their layout's tile shape, padding included, or `tile_shape_of(device)` without it, and its dtype. With
    `padded=False` the result has no padding either. The given tiles are not written to. `memory` is updated with the
    bytes live and received. A tree of plans takes and returns {name: {device id: tile}}, and a `memory` in bytes,
    `Account("uint8")`. For a plan of a `Move`, `into` has the target's tiles of which it fills a part, and `scale` is
    what its cast divides by where it narrows, and multiplies by where it widens: a number, or by device id an array
    that broadcasts to the wider tile. Raises `TileError` for tiles that do not fit the source.

    >>> import numpy as np, reshard as rs
    >>> mesh = rs.Mesh(x=2)
    >>> plan = rs.plan(rs.Layout.parse("int64[{x}2]", mesh), rs.Layout.parse("int64[4]", mesh))
    >>> rs.simulate(plan, {0: np.array([0, 1]), 1: np.array([2, 3])})[1]
    array([0, 1, 2, 3])
    """
    padded = checked_flag(padded, "padded")
    if not isinstance(plan, TreePlan):
        moved = _run(plan, tiles, memory, into, scale)
        return moved if padded else {d: without_padding(plan.target, d, tile) for d, tile in moved.items()}
    if into is not None or scale is not None:
        raise TileError("into and scale are of one move: run the plan of its name alone, tree.plans[name]")
    return simulate_tree(plan, tiles, memory, padded=padded)


def _run(
    plan: Plan, tiles: Mapping[int, Array], memory: Account | None, into: Mapping[int, Array] | None, scale: Any
) -> Tiles:
    """The target's tiles of one plan, with padding, from the source's with or without it."""
    program, source = lower_plan(plan), plan.source
    shapes = {device: (source.tile_shape, source.tile_shape_of(device)) for device in program.devices}
    given = {d: with_padding(source, d, tile) for d, tile in tile_per_device(shapes, tiles).items()}
    more = extras(plan, into, scale)
    return run(program, given, memory, more)
