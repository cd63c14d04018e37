"""What each device must hold: tiles cut from a known array, and the first element of a tile that is wrong.

    array 0 1 2 3 4 on <x=2>, source f32[{x}3/5]       device 0: 0 1 2, device 1: 3 4 and padding

The caller fills an array with values that tell its elements apart, cuts the source's tiles from it, runs a program
and compares what comes out with the same array, cut by the target. `reshard simulate` does so with random numbers
of the layout's dtype, and the prover's search for a counterexample with 63-bit marks.

A partial array is a sum (or another reduction) of *summands*, one global array for each coordinate along its
partial axes; the target's arrays are then the source's, combined. A target that starts a sum may split the array into
summands in any way, so its tiles are combined before they are compared.

Indices come from `types.meaning` alone: nothing of the planner, of the lowering or of a runtime is used. The tests
have an oracle of their own (`tests/oracle.py`), and the two share no code on purpose: this one is shipped, so it is
itself tested against that one, and a mistake in either cannot hide the same mistake in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.remesh import one_set
from reshard.runtime.numpy_tiles import ufunc
from reshard.types.index_set import Holding
from reshard.types.layout import Layout
from reshard.types.meaning import meaning
from reshard.types.view import View

Array = NDArray[Any]
Summand = tuple[int, ...]
"""A device's coordinates along the partial axes of a layout; () if there are none."""
Arrays = Mapping[Summand, Array]
"""The global array of every summand."""


class Mismatch(NamedTuple):
    """How many elements of a tile are wrong, and the first: its local and global index, and both values."""

    total: int
    local: tuple[int, ...]
    element: tuple[int, ...]
    got: Any
    wanted: Any


def summands(layout: Layout) -> list[Summand]:
    """The summands of an array, in order; a single one if the layout is not partial."""
    return sorted({summand(layout, device) for device in layout.mesh.devices})


def summand(layout: Layout, device: int) -> Summand:
    """The summand that a device holds a tile of."""
    return layout.mesh.coordinates(layout.mesh.position(device), layout.partial)


def cut_tiles(layout: Layout, arrays: Arrays, padding: Callable[[], Array]) -> dict[int, Array]:
    """Every device's tile; `padding` makes the new tile into which its elements are written.

    >>> from reshard.types import Mesh
    >>> layout = Layout.parse("int64[{x}3/5]", Mesh(x=2))
    >>> cut_tiles(layout, {(): np.arange(5)}, lambda: np.full(3, -1))
    {0: array([0, 1, 2]), 1: array([ 3,  4, -1])}
    """
    tiles: dict[int, Array] = {}
    for device in layout.mesh.devices:
        local, of_array = map(_index_grid, _true_indices(layout, device))
        tiles[device] = padding()
        tiles[device][local] = arrays[summand(layout, device)][of_array]
    return tiles


def combine_summands(source: Layout, target: Layout, arrays: Arrays) -> dict[Summand, Array]:
    """The target's global arrays: for each of its summands, those of the source that it combines.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2)
    >>> both = Layout.parse("f32[2] + sum{x}", mesh), Layout.parse("f32[2]", mesh)
    >>> combine_summands(*both, {(0,): [1, 2], (1,): [3, 4]})
    {(): array([4, 6])}
    """
    groups: dict[Summand, dict[Summand, Array]] = {}
    if not one_set(source.mesh, target.mesh):
        return {(): combine(source.reduction, [arrays[own] for own in summands(source)])}
    for device in source.mesh.devices:
        own = summand(source, device)
        groups.setdefault(summand(target, device), {})[own] = arrays[own]
    return {to: combine(source.reduction, list(group.values())) for to, group in groups.items()}


def index_pairs(view: View) -> tuple[Array, Array]:
    """The row-major indices of the source and of the target that a view relates, in one order.

    >>> [index.tolist() for index in index_pairs(View.identity((3,)))]
    [[0, 1, 2], [0, 1, 2]]
    """
    src, dst = np.full((), view.map.start, np.int64), np.full((), view.map.end, np.int64)
    for count, source, target in view.map.digits:
        src = src[..., None] + np.arange(count) * source
        dst = dst[..., None] + np.arange(count) * target
    return src.reshape(-1), dst.reshape(-1)


def view_marks(view: View, array: Array, held: Array) -> Array:
    """The target's array of a source's, seen through a view; `held` is what the target holds before.

    >>> view_marks(View.identity((3,)), np.arange(3), np.zeros(3))
    array([0., 1., 2.])
    """
    src, dst = index_pairs(view)
    full = held.reshape(-1).copy()
    full[dst] = array.reshape(-1)[src]
    return full.reshape(held.shape)


def stale_marks(holding: Holding) -> Array:
    """Which elements of the source are stale in what devices hold, one by one.

    >>> from reshard.types import Mesh
    >>> from reshard.types.index_set import IndexSet
    >>> layout = Layout.parse("f32[4]", Mesh(x=2))
    >>> stale_marks(Holding(layout, IndexSet.read([1, 2], (4,))))
    array([False,  True,  True, False])
    """
    stale = np.zeros(holding.stale.shape, bool)
    for product in holding.stale.products:
        stale[np.ix_(*(np.concatenate([np.arange(*run) for run in runs]) for runs in product))] = True
    return stale


def finished(source: Layout, target: Layout, tiles: Mapping[int, Array]) -> tuple[Layout, Mapping[int, Array]]:
    """The target and its tiles, with its sum finished if the source is not such a sum.

    >>> from reshard.types import Mesh
    >>> source, target = (Layout.parse(text, Mesh(x=2)) for text in ("int64[{x}1]", "int64[2] + sum{x}"))
    >>> layout, tiles = finished(source, target, {0: np.array([5, 0]), 1: np.array([0, 6])})
    >>> str(layout), tiles[1]
    ('s64[2]', array([5, 6]))
    """
    if not target.partial:
        return target, tiles
    same = one_set(source.mesh, target.mesh)
    pairs = {(summand(source, device), summand(target, device)) for device in source.mesh.devices if same}
    if len(pairs) == len(summands(source)) and (not target.partial or source.reduction == target.reduction):
        return target, tiles
    groups: dict[int, list[int]] = {}
    for device in target.mesh.devices:
        first = at = target.mesh.position(device)
        for axis in target.partial:
            first -= target.mesh.coordinate(at, axis) * target.mesh.stride(axis)
        groups.setdefault(first, []).append(device)
    totals = [(group, combine(target.reduction, [tiles[device] for device in group])) for group in groups.values()]
    return replace(target, partial=()), {device: total for group, total in totals for device in group}


def combine(reduction: str | None, parts: list[Array]) -> Array:
    """The parts combined element by element; a single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    total = reduce(ufunc(reduction or "sum"), parts)
    return total / len(parts) if reduction == "mean" else total


def first_mismatch(
    layout: Layout, device: int, tile: Array, arrays: Arrays, same: Callable[[Array, Array], Array]
) -> Mismatch | None:
    """The first element of a device's tile that is not its layout's, in row-major order; padding is not compared.

    `same` compares values element by element.

    >>> from reshard.types import Mesh
    >>> layout = Layout.parse("int64[{x}3/5]", Mesh(x=2))
    >>> first_mismatch(layout, 1, np.array([3, 3, 7]), {(): np.arange(5)}, np.equal)[:3]
    (1, (1,), (4,))
    """
    elements = _true_indices(layout, device)
    local_grid, array_grid = map(_index_grid, elements)
    got, wanted = tile[local_grid], arrays[summand(layout, device)][array_grid]
    wrong = np.argwhere(np.logical_not(same(got, wanted)))
    if not len(wrong):
        return None
    first = tuple(int(i) for i in wrong[0])
    local, element = (tuple(dim[i] for dim, i in zip(dims, first, strict=True)) for dims in elements)
    return Mismatch(len(wrong), local, element, got[first], wanted[first])


def _true_indices(layout: Layout, device: int) -> tuple[list[list[int]], list[list[int]]]:
    """A device's true elements, dim by dim: their local and their global indices, padding left out."""
    along = list(zip(layout.shape, meaning(layout, device), strict=True))
    local = [[at for at, index in enumerate(indices) if index < size] for size, indices in along]
    return local, [[index for index in indices if index < size] for size, indices in along]


def _index_grid(indices: list[list[int]]) -> tuple[Array, ...]:
    return np.ix_(*(np.asarray(dim, np.int64) for dim in indices))
