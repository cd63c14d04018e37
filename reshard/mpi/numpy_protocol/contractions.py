"""Products of arrays: one operand moves to where its tiles can be multiplied with the other's.

    a @ b on <x=2, y=2>

    a           f64[{x}4, {y}3]            the larger operand stays
    b           f64[{x}3, {y}5]            moves to f64[{y}3, 10]: the contracted dim as a has it, others on free axes
    tiles       f64[{x}4, 10] + sum{y}     each rank's product
    finished    f64[{x}4, {y}5]            a reduce-scatter, as b's columns were

Equal dims hold the same elements in a rank's tiles, padding included, so the true parts are what is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from reshard.errors import LayoutError
from reshard.mpi.numpy_protocol.elementwise import apply_elementwise
from reshard.mpi.numpy_protocol.tiled import (
    SINGLE,
    Array,
    TiledArray,
    check_arithmetic,
    check_together,
    compute_together,
    cut_padding,
    finish_sum,
    list_axes,
    make_local_dim,
    normalize_axis,
    unwrap_scalar,
    wrap_true_part,
)
from reshard.types import Dim, Layout

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
    ndims = len(one.layout.shape), len(other.layout.shape)
    if 0 in ndims:
        raise LayoutError(f"matmul of shapes {one.layout.shape} and {other.layout.shape}; give arrays of 1 dim or more")
    rows, columns = ["m"] * (ndims[0] > 1), ["n"] * (ndims[1] > 1)
    stacked = _label_stacked(one.layout.shape[:-2], other.layout.shape[:-2])
    labels = (*stacked[0], *rows, "k"), (*stacked[1], "k", *columns)
    return _contract_arrays(Contraction("matmul", *labels, (*stacked[2], *rows, *columns), np.matmul), one, other)


def dot(left: Any, right: Any) -> Any:
    """numpy's `dot`: a product by a number, or a sum over the last dim of one and the last but one of the other."""
    if not np.ndim(left) or not np.ndim(right):
        return apply_elementwise("dot", np.dot, [left, right])  # np.dot takes a number's own dtype, unlike ufuncs
    _, other = _check_operands("dot", left, right)
    return tensordot(left, right, ([-1], [max(-2, -len(other.layout.shape))]))


def tensordot(left: Any, right: Any, axes: Any = 2) -> Any:
    """numpy's `tensordot`: sums over pairs of dims."""
    one, other = _check_operands("tensordot", left, right)
    ndims = len(one.layout.shape), len(other.layout.shape)
    pairs = _pair_dims(axes, *ndims)
    labels = [[f"{side}{at}" for at in range(ndim)] for side, ndim in zip("lr", ndims, strict=True)]
    for number, (at, to) in enumerate(pairs):
        labels[0][at] = labels[1][to] = f"k{number}"
    out = tuple(label for label in (*labels[0], *labels[1]) if not label.startswith("k"))
    sides = [at for at, _ in pairs], [to for _, to in pairs]

    def multiply(one: Array, other: Array) -> Any:
        return np.tensordot(one, other, sides)

    return _contract_arrays(Contraction("tensordot", tuple(labels[0]), tuple(labels[1]), out, multiply), one, other)


def _check_operands(name: str, left: Any, right: Any) -> tuple[TiledArray, TiledArray]:
    for operand in (left, right):
        if not isinstance(operand, TiledArray):
            raise LayoutError(
                f"{name} of a DistArray and a {type(operand).__name__}; give a DistArray (DistArray.from_global with "
                f"root=None takes an array that every rank has)"
            )
        check_arithmetic(name, operand)
    check_together(name, [left, right])
    return finish_sum(left), finish_sum(right)


def _label_stacked(left: Sequence[int], right: Sequence[int]) -> tuple[list[Label], list[Label], list[str]]:
    """The labels of stacked dims of both operands, aligned from the end, and of the result."""
    labels = [f"s{at}" for at in range(max(len(left), len(right)), 0, -1)]
    # Stacked dims are aligned from the end, as numpy broadcasts.
    sizes = [dict(zip(labels[len(labels) - len(shape) :], shape, strict=True)) for shape in (left, right)]
    wide = {label for each in sizes for label, size in each.items() if size != 1}

    def of(shape: Sequence[int]) -> list[Label]:
        own = labels[len(labels) - len(shape) :]
        return [None if size == 1 and name in wide else name for name, size in zip(own, shape, strict=True)]

    return of(left), of(right), labels


def _pair_dims(axes: Any, left: int, right: int) -> list[tuple[int, int]]:
    """The pairs of dims that numpy's `axes` names."""
    if isinstance(axes, int):
        given = list(range(left - axes, left)), list(range(axes))
        if not 0 <= axes <= min(left, right):
            raise LayoutError(f"tensordot over {axes} dims of arrays with {left} and {right} dims")
    else:
        one, other = axes
        given = _sequence(one), _sequence(other)
    ones = [normalize_axis(at, left) for at in given[0]]
    others = [normalize_axis(at, right) for at in given[1]]
    if len(ones) != len(others) or len(set(ones)) != len(ones) or len(set(others)) != len(others):
        raise LayoutError(f"tensordot with axes={axes}: give as many dims of one array as of the other, each once")
    return list(zip(ones, others, strict=True))


def _sequence(axes: Any) -> list[Any]:
    return list(cast("Sequence[Any]", axes)) if isinstance(axes, list | tuple) else [axes]


def _contract_arrays(contraction: Contraction, left: TiledArray, right: TiledArray) -> Any:
    _check_sizes(contraction, left.layout, right.layout)
    # Every rank decides by the layouts alone, and so alike: the operand with smaller tiles moves.
    swap = left.layout.tile_bytes < right.layout.tile_bytes
    (home, home_labels), (guest, guest_labels) = (
        [(right, contraction.right), (left, contraction.left)]
        if swap
        else [(left, contraction.left), (right, contraction.right)]
    )
    # The larger operand stays: a dim that broadcasts comes to every rank, which moves one element.
    labelled = zip(home_labels, home.layout.dims, strict=True)
    stays = replace(home.layout, dims=tuple(SINGLE if label is None else dim for label, dim in labelled))
    comes = _place_guest(stays, home_labels, guest.layout, guest_labels)
    # On another mesh, its axes say nothing about where the result could be.
    own = _dims_by_label(guest.layout.dims, guest_labels) if guest.layout.mesh == stays.mesh else {}
    home, guest = home.redistribute(stays), guest.redistribute(comes)
    one, other = (guest, home) if swap else (home, guest)
    dims = {**_dims_by_label(comes.dims, guest_labels), **_dims_by_label(stays.dims, home_labels)}
    out = tuple(dims[label] for label in contraction.out)
    summed = [axis for label, dim in dims.items() if label not in contraction.out for axis in list_axes(dim)]
    parts = cut_padding(one), cut_padding(other)
    product = compute_together(home, bool(summed), lambda: np.asarray(contraction.multiply(*parts)))
    # Products of booleans are added by `or`, which is their maximum.
    operation = "max" if product.dtype == bool else "sum"
    layout = Layout(stays.mesh, out, product.dtype.name, operation if summed else None, tuple(summed))
    result = wrap_true_part(home, layout, product)
    if not layout.partial:
        return unwrap_scalar(result)
    # One plan adds the summands and splits the result: a reduce-scatter receives half of what an all-reduce does.
    return unwrap_scalar(result.redistribute(_spread_result(layout, contraction.out, own)))


def _check_sizes(contraction: Contraction, left: Layout, right: Layout) -> None:
    sizes: dict[str, int] = {}
    for labels, layout in ((contraction.left, left), (contraction.right, right)):
        for label, size in zip(labels, layout.shape, strict=True):
            if label is not None and sizes.setdefault(label, size) != size:
                raise LayoutError(
                    f"{contraction.name} of shapes {left.shape} and {right.shape}: sizes {sizes[label]} and {size} do "
                    f"not match"
                )


def _dims_by_label(dims: Sequence[Dim], labels: Sequence[Label]) -> dict[str, Dim]:
    return {label: dim for label, dim in zip(labels, dims, strict=True) if label is not None}


def _place_guest(home: Layout, home_labels: Sequence[Label], guest: Layout, labels: Sequence[Label]) -> Layout:
    """Where the operand that moves must be: common dims as the other has them, its own ones on axes that are free."""
    common = _dims_by_label(home.dims, home_labels)
    used = {axis.axis for axis in home.held}

    def placed(dim: Dim, label: Label) -> Dim:
        if label is None:
            return SINGLE
        if label in common:
            return common[label]
        # An axis that holds a dim of the operand that stays has no room for a dim of the other one.
        free = guest.mesh == home.mesh and used.isdisjoint(axis.axis for axis in list_axes(dim))
        return dim if free else make_local_dim(dim.size)

    dims = tuple(placed(dim, label) for dim, label in zip(guest.dims, labels, strict=True))
    return Layout(home.mesh, dims, guest.dtype)


def _spread_result(layout: Layout, labels: Sequence[str], original: dict[str, Dim]) -> Layout:
    """The finished layout: dims of the operand that moved are split again as they were, where the axes are free."""
    dims = list(layout.dims)
    used = {axis.axis for axis in layout.held}
    for at, label in enumerate(labels):
        names = {axis.axis for axis in list_axes(original.get(label, SINGLE))}
        if names and not list_axes(dims[at]) and used.isdisjoint(names):
            dims[at] = original[label]
            used |= names
    return replace(layout, dims=tuple(dims), partial=())
