"""The same elements with other indices: transposes, reshapes, slices, and arrays one after another.

A transpose permutes the numerals of a layout, a reshape cuts them elsewhere, and neither moves data:

    a                              f64[{x}4, 6] on <x=2>
    a.T                            f64[6, {x}4]
    np.reshape(a, (2, 4, 6))       f64[{x}1, 4, 6]
    np.reshape(a, (16, 3))         f64[{x}8, 3]

A slice, and a dim that arrays are joined along, must be local. If it is not, its axes go to another dim or, if there is
none, every rank gets the dim whole. In pieces of any size it stays split instead: each rank cuts, and joins, the rows
that it has.

    a                              f64[{x}(1@1,4@0,2@1), 6] on <x=2>
    a[3:]                          f64[{x}(2,2), 6]
    np.concatenate([a, a])         f64[{x}(1@1,4@0,3@1,4@0,2@1), 6]
    np.reshape(a, (42,))           f64[{x}(6@1,24@0,12@1)]
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from types import EllipsisType
from typing import Any, cast

import numpy as np

from reshard.errors import LayoutError
from reshard.mpi.numpy_protocol.tiled_array import (
    INSTEAD,
    ROWS,
    SINGLE,
    TiledArray,
    check_together,
    cut_padding,
    finish_sum,
    list_axes,
    make_local_dim,
    measure_extents,
    normalize_axes,
    normalize_axis,
    replaced,
    take_tile,
    unwrap_scalar,
    wrap_true_part,
)
from reshard.runtime.on_mpi.global_array import global_indices
from reshard.types import Digit, Dim, Layout, Mesh, Pieces
from reshard.types.dims import canonical_dim, fit_digits, tabulate_pieces
from reshard.types.mesh import SubAxis

_Span = tuple[int, int]


def transpose(array: TiledArray, axes: Any = None) -> TiledArray:
    """The array with its dims permuted; a view of the same tiles."""
    ndim = len(array.layout.shape)
    order = list(range(ndim))[::-1] if axes is None else [normalize_axis(at, ndim) for at in axes]
    if sorted(order) != list(range(ndim)):
        raise ValueError(f"axes {axes} are not a permutation of the {ndim} dims")
    return array.with_tile(
        replaced(array.layout, dims=tuple([array.layout.dims[at] for at in order])), take_tile(array).transpose(order)
    )


def reshape(array: TiledArray, shape: Any, order: str = "C") -> TiledArray:
    """The array with another shape, without communication.

    Raises `LayoutError` if the digits of its layout do not spell the new indices.
    """
    if order != "C":
        raise TypeError(f"reshape of a DistArray with order={order!r} is not implemented; {INSTEAD}")
    layout = array.layout
    several = cast("Sequence[Any]", shape) if isinstance(shape, list | tuple) else (shape,)
    given = tuple(operator.index(each) for each in several)
    total, known = math.prod(layout.shape), math.prod(size for size in given if size != -1)
    sizes = tuple(total // known if size == -1 and known else size for size in given)
    if given.count(-1) > 1 or min(sizes, default=0) < 0 or math.prod(sizes) != total:
        raise LayoutError(f"cannot reshape an array of shape {layout.shape} into {given}")
    # An array without elements has no digits to cut: all ranks have the whole of it.
    if total == 0:
        return array.with_tile(
            replace(layout, dims=tuple(map(make_local_dim, sizes))), np.empty(sizes, take_tile(array).dtype)
        )
    dims: list[Dim] = []
    for (low, high), (begin, end) in _group_dims(layout.shape, sizes):
        cut = _cut_digits(layout.mesh, layout.dims[low:high], sizes[begin:end])
        if cut is None:
            raise LayoutError(
                f"{layout} on {layout.mesh} cannot be reshaped to {sizes} in its tiles; redistribute it first so that "
                f"dims {low} to {high - 1} are local or split evenly, or {INSTEAD}"
            )
        dims += cut
    reshaped, tile = replace(layout, dims=tuple(dims)), take_tile(array)
    if tile.size != math.prod(reshaped.tile_shape):  # Pieces have less padding than a numeral of rounds.
        return wrap_true_part(array, reshaped, cut_padding(array).reshape(measure_extents(reshaped, array.comm.rank)))
    return array.with_tile(reshaped, tile.reshape(reshaped.tile_shape))


def slice_array(array: TiledArray, key: Any) -> Any:
    """A copy of the part that numbers, slices, `...` and None select; collective if a split dim is cut.

    Raises `TypeError` for arrays of indices, and numpy's `IndexError`.
    """
    items = _list_indices(array.layout, key)
    for at, place in enumerate([place for place, item in enumerate(items) if item is not None]):
        if array.layout.dims[at].pieces is not None:
            every: Any = range(array.layout.shape[at])
            taken, items[place] = every[items[place]], slice(None)
            if isinstance(taken, int):
                taken, items[place] = range(taken, taken + 1), 0
            array = _cut_pieces(array, at, taken)
    layout = array.layout
    along = [item for item in items if item is not None]
    sizes = zip(along, layout.shape, strict=True)
    whole = [isinstance(item, slice) and item.indices(size) == (0, size, 1) for item, size in sizes]
    cut = tuple([at for at, uncut in enumerate(whole) if not uncut])
    moved = array.redistribute(make_dims_local(layout, cut)) if cut else array
    dims: list[Dim] = []
    rest = iter(zip(moved.layout.dims, whole, strict=True))
    index: list[Any] = []
    for item in items:
        dim, uncut = (SINGLE, False) if item is None else next(rest)
        # A dim that is not cut keeps its padding, too: the tile of the part is then laid out like that of the array.
        index.append(slice(None) if uncut else item)
        if uncut or item is None:
            dims.append(dim)
        elif isinstance(item, slice):
            dims.append(make_local_dim(len(range(*item.indices(dim.size)))))
    # A copy, since only some slices could be views, and whether one is must not depend on the layout.
    part = take_tile(moved)[(*index, ...)].copy()
    return unwrap_scalar(moved.with_tile(replaced(moved.layout, dims=tuple(dims)), part))


def _cut_pieces(array: TiledArray, at: int, taken: range) -> TiledArray:
    """The part of a dim in pieces at these indices, each where it is."""
    layout, dim = array.layout, array.layout.dims[at]
    if taken == range(dim.size):
        return array
    part = cut_padding(array)  # Before anything of this rank is asked for: it may have no tile.
    upward = taken if taken.step > 0 else taken[::-1]
    pieces = tabulate_pieces(dim)

    def place(index: Any) -> Any:  # The first place of the part whose index is not below this one.
        return np.clip(-((upward.start - index) // upward.step), 0, len(upward))

    lengths: Any = np.diff(place(np.append(pieces.starts, dim.size)))
    numbers: Any = np.asarray(pieces.numbers)
    index = global_indices(layout, at, array.comm.rank)
    mine = np.flatnonzero(place(index) < place(index + 1))
    if upward is not taken:
        lengths, numbers, mine = lengths[::-1].copy(), numbers[::-1].copy(), mine[::-1]
    part = part[(slice(None),) * at + (mine,)]
    dims = (*layout.dims[:at], _split_in_pieces(dim, Pieces(lengths, numbers, pieces.count)), *layout.dims[at + 1 :])
    return wrap_true_part(array, replace(layout, dims=dims), part)


def _split_in_pieces(dim: Dim, pieces: Pieces) -> Dim:
    """A dim in other pieces, along the axes of this one."""
    held = [digit for digit in dim.digits if digit.axis is not None]
    return Dim((*held, Digit(pieces.largest, None)), pieces.size, pieces)


def concatenate(arrays: Sequence[Any], axis: int | None = 0) -> TiledArray:
    """Arrays one after another along a dim, in the layout of the first one; collective if that dim is split."""
    if axis is None:
        return concatenate([reshape(each, -1) for each in arrays], 0)
    for each in arrays:
        if not isinstance(each, TiledArray):
            raise LayoutError(f"concatenate of a DistArray and a {type(each).__name__}; give DistArrays only")
    parts = [finish_sum(cast(TiledArray, each)) for each in arrays]
    check_together("concatenate", parts)
    first = parts[0].layout
    at = normalize_axis(axis, len(first.shape))
    shapes = {(*part.layout.shape[:at], *part.layout.shape[at + 1 :]) for part in parts}
    if len(shapes) > 1 or len({len(part.layout.shape) for part in parts}) > 1:
        raise LayoutError(
            f"concatenate along dim {at} of shapes {', '.join(str(part.layout.shape) for part in parts)}, which differ "
            f"in other dims"
        )
    digits, ragged = first.dims[at].digits, first.dims[at].pieces is not None
    held = [digit for digit in digits if digit.axis is not None]
    # Along a dim that is local, each rank joins its own parts; then one move splits the result as the first array was.
    # In pieces, what is held along the same axes stays where it is, and the rest is dealt out along them.
    base = first if ragged else make_dims_local(first, (at,))

    def beside(part: TiledArray) -> TiledArray:
        dim = part.layout.dims[at]
        if not ragged:
            dim = make_local_dim(dim.size)
        elif part.layout.mesh != first.mesh or list_axes(dim) != list_axes(first.dims[at]):
            dim = Dim((*held, Digit(-(-dim.size // math.prod(digit.radix for digit in held)), None)), dim.size)
        dims = (*base.dims[:at], dim, *base.dims[at + 1 :])
        return part.redistribute(replace(base, dims=dims, dtype=part.layout.dtype))

    parts = [beside(part) for part in parts]
    joined = np.concatenate([cut_padding(part) for part in parts], axis=at)
    size = sum(part.layout.shape[at] for part in parts)
    along = make_local_dim(size)
    if ragged:
        tables = [tabulate_pieces(part.layout.dims[at]) for part in parts]
        lengths: Any = np.concatenate([table.lengths for table in tables])
        numbers: Any = np.concatenate([table.numbers for table in tables])
        along = _split_in_pieces(first.dims[at], Pieces(lengths, numbers, tables[0].count))
    result = wrap_true_part(parts[0], replace(base, dims=(*base.dims[:at], along, *base.dims[at + 1 :])), joined)
    if ragged:
        return result
    if (
        held and digits[0].axis is None
    ):  # Block-cyclic dims keep their blocks, so that equal indices stay where they were.
        split = fit_digits(digits, size)
    else:
        split = Dim((*held, Digit(-(-size // math.prod(digit.radix for digit in held)), None)), size)
    return result.redistribute(replace(result.layout, dims=(*first.dims[:at], split, *first.dims[at + 1 :])))


@lru_cache(maxsize=1024)
def make_dims_local(layout: Layout, dims: tuple[int, ...]) -> Layout:
    """The layout with these dims local: their axes go to the largest other dim that is local, if it has room.

    >>> from reshard.types import Mesh
    >>> rows, line = (Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4, 3, 10]", "f32[{x}4]"))
    >>> print(make_dims_local(rows, (0,)), make_dims_local(line, (0,)))
    f32[16, 3, {x}3/10] f32[16]
    """
    changed = [make_local_dim(dim.size) if at in dims else dim for at, dim in enumerate(layout.dims)]
    freed = [Digit(axis.size, axis) for at in dims for axis in list_axes(layout.dims[at])]
    pieces = math.prod(digit.radix for digit in freed)
    others = [at for at, dim in enumerate(layout.dims) if at not in dims and not list_axes(dim) and dim.size >= pieces]
    # A gather would bring the whole dim to every rank; with the axes on another dim, an all-to-all keeps tiles small.
    if freed and others:
        to = max(others, key=lambda at: layout.shape[at])
        changed[to] = Dim((*freed, Digit(-(-layout.shape[to] // pieces), None)), layout.shape[to])
    return replace(layout, dims=tuple(changed))


def squeeze(array: TiledArray, axis: Any = None) -> Any:
    """The array without dims of one element, all of them or those of `axis`."""
    shape = array.layout.shape
    dims = [at for at, size in enumerate(shape) if size == 1] if axis is None else normalize_axes(axis, len(shape))
    if wide := [at for at in dims if shape[at] != 1]:
        raise ValueError(f"dims {wide} of shape {shape} have more than one element, and cannot be squeezed out")
    return slice_array(array, tuple(0 if at in dims else slice(None) for at in range(len(shape))))


def expand_dims(array: TiledArray, axis: Any) -> Any:
    """The array with new dims of one element, which are dims `axis` of the result."""
    ndim = len(array.layout.shape) + (len(cast("tuple[Any, ...]", axis)) if isinstance(axis, tuple) else 1)
    dims = normalize_axes(axis, ndim)
    return slice_array(array, tuple(None if at in dims else slice(None) for at in range(ndim)))


def flip(array: TiledArray, axis: Any = None) -> Any:
    """The array with dims in reverse, all of them or those of `axis`."""
    dims = normalize_axes(axis, len(array.layout.shape))
    return slice_array(
        array, tuple(slice(None, None, -1 if at in dims else 1) for at in range(len(array.layout.shape)))
    )


def moveaxis(array: TiledArray, source: Any, destination: Any) -> TiledArray:
    """The array with dims `source` at the places `destination`, the others in their order."""
    ndim = len(array.layout.shape)
    pair = (cast("list[Any]", each if isinstance(each, list | tuple) else [each]) for each in (source, destination))
    froms, tos = ([normalize_axis(at, ndim) for at in each] for each in pair)
    if len(froms) != len(tos) or len({*froms}) != len(froms) or len({*tos}) != len(tos):
        raise ValueError(f"moveaxis from {source} to {destination}: give as many dims on both sides, each once")
    order = [at for at in range(ndim) if at not in froms]
    for to, at in sorted(zip(tos, froms, strict=True)):
        order.insert(to, at)
    return transpose(array, order)


def stack(arrays: Sequence[Any], axis: int = 0) -> TiledArray:
    """Arrays beside each other along a new dim, which is local."""
    # The new dim is local in every layout, so arrays that lie alike are joined where they are.
    return concatenate([expand_dims(each, axis) for each in arrays], axis)


def _list_indices(layout: Layout, key: Any) -> list[Any]:
    """An index as one number or slice for each dim, in order, and None for each new one."""
    given = list(cast("tuple[Any, ...]", key)) if isinstance(key, tuple) else [key]
    basic = int, np.integer, slice, EllipsisType, type(None)
    if kinds := [type(item).__name__ for item in given if not isinstance(item, basic) or isinstance(item, bool)]:
        raise TypeError(
            f"a DistArray takes numbers, slices, ... and None as indices, not {', '.join(kinds)}; for rows "
            f"{ROWS}, or {INSTEAD}"
        )
    used = sum(item is not None and item is not ... for item in given)
    if used > len(layout.shape) or sum(item is ... for item in given) > 1:
        raise IndexError(f"too many indices for an array of {len(layout.shape)} dims: {key!r}")
    at = next((number for number, item in enumerate(given) if item is ...), len(given))
    given[at : at + 1] = [slice(None)] * (len(layout.shape) - used)
    sizes = iter(layout.shape)
    for number, item in enumerate(given):
        size = 0 if item is None else next(sizes)
        if isinstance(item, int | np.integer):
            given[number] = operator.index(cast("Any", item))
            if not -size <= item < size:
                raise IndexError(f"index {item} is out of bounds for a dim of size {size}")
    return given


def _group_dims(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[_Span, _Span]]:
    """The smallest groups of neighbouring dims that hold the same elements in both shapes, none of size 0.

    >>> list(_group_dims((4, 6, 5), (2, 2, 30)))
    [((0, 1), (0, 2)), ((1, 3), (2, 3))]
    """
    i = j = 0
    while i < len(old) or j < len(new):
        low, begin = i, j
        # The product of no sizes is 1: a group may have dims of one element on one side only.
        before, after = (math.prod(sizes[at : at + 1]) for sizes, at in ((old, i), (new, j)))
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while before != after:
            if before < after:
                before, i = before * old[i], i + 1
            else:
                after, j = after * new[j], j + 1
        yield (low, i), (begin, j)


def _cut_digits(mesh: Mesh, dims: Sequence[Dim], sizes: Sequence[int]) -> list[Dim] | None:
    """The digits of some dims as the digits of dims of other sizes; None if the sizes cut a digit unevenly."""
    # Dims of one element may come and go anywhere, in uneven layouts too.
    wide = [dim for dim in dims if dim != SINGLE]
    if [dim.size for dim in wide] == [size for size in sizes if size != 1]:
        rest = iter(wide)
        return [SINGLE if size == 1 else next(rest) for size in sizes]
    # Padding lies at the end of its dim. In a dim made of several it would lie between elements, which no layout says
    # unless all of it is that of the first: its pieces have room behind them, and what follows is whole on every rank.
    if any(dim.padded != dim.size or dim.pieces is not None for dim in wide):
        pieces, outer = tabulate_pieces(wide[0]), next((at for at, size in enumerate(sizes) if size != 1), None)
        if outer is None or any(list_axes(dim) for dim in wide[1:]):
            return None
        lengths: Any = np.asarray(pieces.lengths) * math.prod(dim.size for dim in wide[1:])
        inner = math.prod(sizes[outer + 1 :])
        if (lengths % inner).any():
            return None
        first = _split_in_pieces(wide[0], Pieces(lengths // inner, pieces.numbers, pieces.count))
        return [*[SINGLE] * outer, first, *map(make_local_dim, sizes[outer + 1 :])]
    every = Dim(tuple(digit for dim in dims for digit in dim.digits), math.prod(sizes))
    digits = list(canonical_dim(every, mesh, 0).digits)  # Neighbours that are one digit are merged.
    cut: list[Dim] = []
    for size in reversed(sizes):
        # The digits whose radices multiply to the size, off the end; the last of them is cut if it divides evenly.
        taken, rest = list[Digit](), size
        while rest > 1:
            digit = digits.pop()
            if rest % digit.radix:
                if digit.radix % rest:
                    return None
                major, axis = digit.radix // rest, digit.axis
                of_major, of_minor = (
                    None if axis is None else SubAxis(axis.axis, axis.pre * before, radix)
                    for before, radix in ((1, major), (major, rest))
                )
                digits.append(Digit(major, of_major))
                digit = Digit(rest, of_minor)
            rest //= digit.radix
            taken.insert(0, digit)
        cut.insert(0, Dim(tuple(taken), size))
    return cut
