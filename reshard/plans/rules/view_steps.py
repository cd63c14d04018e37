"""`view`: the same elements on the same devices, under other indices. Nothing is sent.

    mesh <x=4>, view "(three h) d -> h three d", f32[3{x}2, 5] -> f32[{x}2, 3, 5]

    atom    digits          in the operand's tile   in the result's
    three   3 local         0                       1
    h       {x} held, 2     1                       0
    d       5 local         2                       2

Both layouts, written on the view's atoms, must be the same. Where the local digits come in the same order, the tile's
memory is that of the result and nothing is copied; else, as here, the tile is transposed into a new one.

`take` keeps part of dims that lie whole in every tile, and `put` writes into such a part of a tile that is there:

    take   f32[3, {x}2] -> f32[1, {x}2]      one of three
    put    f32[1, {x}2] -> f32[3, {x}2]      the other two stay as they are

`cast` keeps the layout and changes the dtype.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from reshard.errors import StepError
from reshard.geometry.remesh import remesh
from reshard.geometry.view_layouts import is_local, layout_over, split_over_atoms
from reshard.plans.rules.step_mode import FREE, Cost, StepMode, refuse_step
from reshard.types.layout import Dim, Layout
from reshard.types.view import Groups, View


class TileOrder(NamedTuple):
    """How a tile becomes another: reshaped to `digits`, transposed to `order`, reshaped to the result's shape."""

    digits: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def aliases(self) -> bool:
        """Whether the memory stays as it is."""
        moved = [at for at in self.order if self.digits[at] != 1]
        return moved == sorted(moved) or 0 in self.digits


def check_view(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Both layouts are the same one over the atoms of the view."""
    tile_order(operand, result, view_of("view", operand, result, mode))
    return FREE


@lru_cache(maxsize=4096)  # Memory is counted for each of thousands of equal moves.
def tile_order(operand: Layout, result: Layout, view: View) -> TileOrder:
    """How a tile of the operand becomes one of the result; raises `StepError` if devices would have to send.

    >>> from reshard.types import Mesh
    >>> from reshard.types.view import Atom
    >>> view = View((Atom("three", 3), Atom("h", 8)), ((0, 1),), ((1,), (0,)))
    >>> layouts = [Layout.parse(text, Mesh(x=4)) for text in ("f32[3{x}2]", "f32[{x}2, 3]")]
    >>> tile_order(*layouts, view)
    TileOrder(digits=(3, 2), order=(1, 0))
    """
    if view.taken or view.into:
        raise refuse_step("view", operand, result, f"{view}: a view step moves all elements; take and put choose some")
    # Both layouts spelled on the mesh of one of them; None if neither mesh can spell the other's.
    here, there = remesh(result, operand.mesh), remesh(operand, result.mesh)
    spelled = (operand, here) if here is not None else None if there is None else (there, result)
    if spelled is None or operand.dtype != result.dtype or not spelled[0].partial_as(spelled[1]):
        raise refuse_step("view", operand, result, f"{view}: devices, dtype and reduction must stay")
    before, after = _dims_on_atoms(spelled[0], view.source, view), _dims_on_atoms(spelled[1], view.target, view)
    if before is None or after is None:
        raise refuse_step("view", operand, result, f"{view}: a digit lies across two atoms")
    if _atom_layout(spelled[0], before) != _atom_layout(spelled[0], after):
        raise refuse_step("view", operand, result, f"{view}: the two are different layouts of its atoms")
    both = before.keys() & after.keys()
    digits, order = ([at for at in itertools.chain(*groups) if at in both] for groups in (view.source, view.target))
    return TileOrder(tuple(before[at].tile for at in digits), tuple(digits.index(at) for at in order))


def _dims_on_atoms(layout: Layout, groups: Groups, view: View) -> dict[int, Dim] | None:
    return split_over_atoms(layout, groups, lambda at: view.atoms[at].size)


def _atom_layout(like: Layout, atoms: Mapping[int, Dim]) -> Layout:
    """The atoms by number as an array; those of one element, which may be on one side only, are left out."""
    dims = tuple(atoms[at] for at in sorted(atoms) if atoms[at].padded != 1)
    return Layout(like.mesh, dims, like.dtype, like.reduction, like.partial)


def check_take(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """The dims that `take` cuts are local; all others stay as they are."""
    view = view_of("take", operand, result, mode)
    if view.into or not _is_part_of(operand, result, view):
        raise refuse_step("take", operand, result, f"{view}: part of a dim is taken where each tile has all of it")
    return FREE


def check_put(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """The dims that `put` fills in part are local; all others stay as they are."""
    view = view_of("put", operand, result, mode)
    if view.taken or not _is_part_of(result, operand, view):
        raise refuse_step("put", operand, result, f"{view}: part of a dim is filled where each tile has all of it")
    return FREE


def check_cast(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """The same digits, and nothing left to reduce: the sum of rounded values is not the rounded sum."""
    if (
        mode != StepMode()
        or operand.dtype == result.dtype
        or layout_over(operand, operand.dims, result.dtype) != result
    ):
        raise refuse_step("cast", operand, result, "a cast changes the dtype, and nothing else")
    if operand.partial:
        raise refuse_step("cast", operand, result, "a sum is finished before it is cast")
    return FREE


def view_of(kind: str, operand: Layout, result: Layout, mode: StepMode) -> View:
    """The view of a step; refuses a step without one, or between arrays of other shapes."""
    view = mode.view
    if view is None or mode != StepMode(view=view):
        raise refuse_step(kind, operand, result, f"{mode}: this step needs a view, and no other options")
    if (view.source_shape, view.target_shape) != (operand.shape, result.shape):
        raise refuse_step(
            kind, operand, result, f"the view {view} is of arrays {view.source_shape} -> {view.target_shape}"
        )
    return view


def _is_part_of(full: Layout, part: Layout, view: View) -> bool:
    """Whether a layout is another one with some local dims made smaller, dim by dim."""
    each = tuple((at,) for at in range(len(view.atoms)))
    if (view.source, view.target) != (each, each) or full.dtype != part.dtype:
        return False
    whole = [atom.taken is None and atom.into is None for atom in view.atoms]
    if any(not same and not is_local(dim) for same, dim in zip(whole, full.dims, strict=True)):
        return False
    dims = [a if same else b for same, a, b in zip(whole, full.dims, part.dims, strict=True)]
    local = all(same or is_local(b) for same, b in zip(whole, part.dims, strict=True))
    return local and layout_over(full, dims) == part


def keeps_memory(kind: str, operand: Layout, result: Layout, mode: StepMode) -> bool:
    """Whether a step leaves every tile's memory as it is: a view that keeps the order of the local digits."""
    if kind != "view" or mode.view is None or math.prod(operand.tile_shape) != math.prod(result.tile_shape):
        return False
    try:
        return tile_order(operand, result, mode.view).aliases
    except StepError:
        return False
