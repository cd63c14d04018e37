"""Products of arrays: one operand moves to where its tiles can be multiplied with the other's.

    a @ b on <x=2, y=2>

    a           f64[{x}4, {y}3]            stays, or comes whole along the contracted dim, or b does: the fewest bytes
    b           f64[{x}3, {y}5]            moves to f64[{y}3, 10]: the contracted dim as a has it, others on free axes
    tiles       f64[{x}4, 10] + sum{y}     each rank's product
    finished    f64[{x}4, {y}5]            a reduce-scatter, as b's columns were

Equal dims hold the same elements in a rank's tiles, padding included, so the true parts are what is multiplied.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np

from reshard.errors import LayoutError
from reshard.mpi.numpy_protocol.tiled_array import (
    SINGLE,
    Array,
    TiledArray,
    apply_elementwise,
    check_arithmetic,
    check_together,
    compute_together,
    cut_padding,
    finish_sum,
    lay_whole,
    list_axes,
    make_local_dim,
    normalize_axis,
    unwrap_scalar,
    wrap_true_part,
)
from reshard.synth import find_plan
from reshard.synth.options import PlanOptions
from reshard.types import Dim, Layout, dtypes

Label = str | None


class Contraction(NamedTuple):
    """What a product does with the dims: those with one label are one dim, and labels not in `out` are summed over.

    A label None is a dim of one element that broadcasts. `multiply` is the product of two tiles.
    """

    name: str
    left: tuple[Label, ...]
    right: tuple[Label, ...]
    out: tuple[str, ...]
    multiply: Callable[[Array, Array], Any]


def matmul(left: Any, right: Any) -> Any:
    """numpy's `matmul`, stacked matrices and vectors included."""
    one, other = _check_operands("matmul", left, right)
    shapes = one.layout.shape, other.layout.shape
    if () in shapes:
        raise LayoutError(f"matmul of shapes {shapes[0]} and {shapes[1]}; give arrays of 1 dim or more")
    rows, columns = ["m"] * (len(shapes[0]) > 1), ["n"] * (len(shapes[1]) > 1)
    # Stacked dims are aligned from the end, as numpy broadcasts; those of one element broadcast against wider ones.
    stacked = [f"s{at}" for at in range(max(0, *(len(shape) - 2 for shape in shapes)), 0, -1)]
    own = [list(zip(stacked[len(stacked) - len(shape[:-2]) :], shape[:-2], strict=True)) for shape in shapes]
    wide = {label for pairs in own for label, size in pairs if size != 1}
    labels = [[None if size == 1 and label in wide else label for label, size in pairs] for pairs in own]
    ends = (*labels[0], *rows, "k"), (*labels[1], "k", *columns)
    return _contract_arrays(Contraction("matmul", *ends, (*stacked, *rows, *columns), np.matmul), one, other)


def dot(left: Any, right: Any) -> Any:
    """numpy's `dot`: a product by a number, or a sum over the last dim of one and the last but one of the other."""
    if not np.ndim(left) or not np.ndim(right):
        return apply_elementwise("dot", np.dot, left, right)  # np.dot takes a number's own dtype, unlike ufuncs
    _, other = _check_operands("dot", left, right)
    return tensordot(left, right, ([-1], [max(-2, -len(other.layout.shape))]))


def tensordot(left: Any, right: Any, axes: Any = 2) -> Any:
    """numpy's `tensordot`: sums over pairs of dims."""
    one, other = _check_operands("tensordot", left, right)
    ndims = len(one.layout.shape), len(other.layout.shape)
    given: Any = axes
    if isinstance(axes, int):
        if not 0 <= axes <= min(ndims):
            raise LayoutError(f"tensordot over {axes} dims of arrays with {ndims[0]} and {ndims[1]} dims")
        given = range(ndims[0] - axes, ndims[0]), range(axes)
    sides: list[list[int]] = []
    for dims, ndim in zip(given, ndims, strict=True):
        each = cast("Sequence[Any]", dims if isinstance(dims, list | tuple | range) else [dims])
        sides.append([normalize_axis(at, ndim) for at in each])
    if len(sides[0]) != len(sides[1]) or any(len(set(dims)) != len(dims) for dims in sides):
        raise LayoutError(f"tensordot with axes={axes}: give as many dims of one array as of the other, each once")
    labels = [[f"{side}{at}" for at in range(ndim)] for side, ndim in zip("lr", ndims, strict=True)]
    for number, (at, to) in enumerate(zip(*sides, strict=True)):
        labels[0][at] = labels[1][to] = f"k{number}"
    out = tuple(label for label in (*labels[0], *labels[1]) if not label.startswith("k"))

    def multiply(one: Array, other: Array) -> Any:
        return np.tensordot(one, other, (sides[0], sides[1]))

    return _contract_arrays(Contraction("tensordot", tuple(labels[0]), tuple(labels[1]), out, multiply), one, other)


def _check_operands(name: str, left: Any, right: Any) -> tuple[TiledArray, TiledArray]:
    beside = left if isinstance(left, TiledArray) else cast(TiledArray, right)
    operands = [
        each if isinstance(each, TiledArray) else lay_whole(name, beside, each, False) for each in (left, right)
    ]
    for operand in operands:
        check_arithmetic(name, operand)
    check_together(name, operands)
    return finish_sum(operands[0]), finish_sum(operands[1])


def _contract_arrays(contraction: Contraction, left: TiledArray, right: TiledArray) -> Any:
    operands = [(left, contraction.left), (right, contraction.right)]
    sizes: dict[str, int] = {}
    for array, labels in operands:
        for label, size in zip(labels, array.layout.shape, strict=True):
            if label is not None and sizes.setdefault(label, size) != size:
                raise LayoutError(
                    f"{contraction.name} of shapes {left.layout.shape} and {right.layout.shape}: sizes {sizes[label]} "
                    f"and {size} do not match"
                )
    ends = place_operands(left.layout, right.layout, contraction.left, contraction.right, contraction.out)
    left, right = left.redistribute(ends.left), right.redistribute(ends.right)
    parts = cut_padding(left), cut_padding(right)
    partial = ends.product.partial
    product = compute_together(left, bool(partial), lambda: np.asarray(contraction.multiply(*parts)))
    # Products of booleans are added by `or`, which is their maximum.
    operation = ("max" if product.dtype == bool else "sum") if partial else None
    layout = replace(ends.product, dtype=product.dtype.name, reduction=operation)
    result = wrap_true_part(left, layout, product)
    return unwrap_scalar(result.redistribute(replace(layout, dims=ends.result.dims, partial=())) if partial else result)


class Placement(NamedTuple):
    """Where tiles of two operands are multiplied, the layout of the products, and that of the result."""

    left: Layout
    right: Layout
    product: Layout
    result: Layout

    def count_devices(self) -> int:
        """How many devices share the multiplications."""
        dims = (*self.left.dims, *self.right.dims)
        return math.prod(axis.size for axis in {axis for dim in dims for axis in list_axes(dim)})


@lru_cache(maxsize=256)
def place_operands(
    left: Layout, right: Layout, left_labels: tuple[Label, ...], right_labels: tuple[Label, ...], out: tuple[str, ...]
) -> Placement:
    """Where operands are multiplied so that most devices share that, and of such ways one that receives fewest bytes.

    One operand stays as it is, but for the dims that are summed over: these stay, and the products are added up, or
    come to each device whole. With rows and columns of both operands on a grid, the latter is SUMMA:

        f64[{x}4, {y}2] @ f64[{x}2, {y}4]
            the first stays           f64[{x}4, {y}2] @ f64[{y}2, 8]    then f64[{x}4, 8] + sum{y} -> f64[{x}4, {y}4]
            but comes whole along k   f64[{x}4, 4] @ f64[4, {y}4]       then f64[{x}4, {y}4]

    Every rank decides by the layouts alone, and so alike.
    """
    operands = (left, left_labels), (right, right_labels)
    larger = left.tile_bytes < right.tile_bytes
    # Where the meshes differ, the larger operand says on which of them the result is.
    homes = [larger, not larger] if left.mesh == right.mesh else [larger]
    dtype = max(left.dtype, right.dtype, key=dtypes.bits)
    reduction = "max" if dtype == "bool" else "sum"
    ways: list[Placement] = []
    for whole, swap in itertools.product((False, True), homes):
        (home, home_labels), (guest, guest_labels) = reversed(operands) if swap else operands
        # A dim that broadcasts comes to every rank, which moves one element.
        dims = [
            SINGLE if label is None else make_local_dim(dim.size) if whole and label not in out else dim
            for label, dim in zip(home_labels, home.dims, strict=True)
        ]
        stays = replace(home, dims=tuple(dims))
        fixed = _dims_by_label(dims, home_labels)
        # On another mesh, the axes of the operand that moves say nothing about where the result could be.
        own = _dims_by_label(guest.dims, guest_labels) if guest.mesh == stays.mesh else {}
        used = {axis.axis for axis in stays.held}
        placed: list[Dim] = []
        for dim, label in zip(guest.dims, guest_labels, strict=True):
            if label is None:
                placed.append(SINGLE)
            elif label in fixed:  # A common dim is needed as the other operand has it.
                placed.append(fixed[label])
            else:  # An axis that holds a dim of the operand that stays has no room for a dim of the other one.
                free = label in own and used.isdisjoint(axis.axis for axis in list_axes(dim))
                placed.append(dim if free else make_local_dim(dim.size))
        comes = Layout(stays.mesh, tuple(placed), guest.dtype)
        by_label = {**_dims_by_label(comes.dims, guest_labels), **fixed}
        result = [by_label[label] for label in out]
        summed = [axis for label, dim in by_label.items() if label not in out for axis in list_axes(dim)]
        product = Layout(stays.mesh, tuple(result), dtype, reduction if summed else None, tuple(summed))
        if summed:
            # One plan adds the summands and splits the result: a reduce-scatter receives half of what an all-reduce
            # does. Dims of the operand that moved are split again as they were, where the axes are free.
            used = {axis.axis for axis in product.held}
            for at, label in enumerate(out):
                names = {axis.axis for axis in list_axes(own.get(label, SINGLE))}
                if names and not list_axes(result[at]) and used.isdisjoint(names):
                    result[at] = own[label]
                    used |= names
        ends = (comes, stays) if swap else (stays, comes)
        ways.append(Placement(*ends, product, replace(product, dims=tuple(result), partial=(), reduction=None)))
    most = max(way.count_devices() for way in ways)
    best = [*dict.fromkeys(way for way in ways if way.count_devices() == most)]
    if len(best) == 1:  # Plans for long tables of owners take a while.
        return best[0]

    def count_received(way: Placement) -> int:
        moves = (left, way.left), (right, way.right), (way.product, way.result)
        return sum(find_plan(*move, PlanOptions()).received_bytes for move in moves)

    return min(best, key=count_received)


def _dims_by_label(dims: Sequence[Dim], labels: Sequence[Label]) -> dict[str, Dim]:
    return {label: dim for label, dim in zip(labels, dims, strict=True) if label is not None}
