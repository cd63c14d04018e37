"""Reductions: each rank reduces its true part, and a plan combines the partial results.

    a                          f64[{x}3/10, {y}4]
    sum of each true part      f64[1, {y}4] + sum{x}
    finished by its plan       f64[1, {y}4], an all-reduce; then the dim of one element is dropped

A rank whose part is empty gives the identity of the operation. Results without dims are numpy's scalars, on every rank.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from reshard.errors import TileError
from reshard.mpi.numpy_protocol.array_views import make_dims_local, reshape
from reshard.mpi.numpy_protocol.tiled_array import (
    INSTEAD,
    SINGLE,
    Array,
    TiledArray,
    apply_elementwise,
    apply_to_array,
    check_arithmetic,
    compute_together,
    cut_padding,
    finish_sum,
    is_split,
    list_axes,
    make_local_dim,
    name_dtype,
    normalize_axes,
    normalize_axis,
    replaced,
    take_tile,
    unwrap_scalar,
    wrap_true_part,
)
from reshard.runtime.on_mpi.global_array import global_indices
from reshard.types import Digit, Dim, Layout
from reshard.types.reductions import has_reduction


class ReductionKind(NamedTuple):
    """A reduction of numpy: its function, the layout's operation, and whether it needs a start for no elements."""

    name: str
    function: Callable[..., Any]
    operation: str
    ordered: bool = False


SUM = ReductionKind("sum", np.sum, "sum")
PRODUCT = ReductionKind("prod", np.prod, "product")
MINIMUM = ReductionKind("min", np.min, "min", ordered=True)
MAXIMUM = ReductionKind("max", np.max, "max", ordered=True)
ANY = ReductionKind("any", np.any, "max")
ALL = ReductionKind("all", np.all, "min")

OF_UFUNCS: dict[Any, ReductionKind] = {
    np.add: SUM,
    np.multiply: PRODUCT,
    np.minimum: MINIMUM,
    np.maximum: MAXIMUM,
    np.logical_or: ANY,
    np.logical_and: ALL,
}
"""The ufuncs whose `reduce` is one of these."""


def reduce_array(
    kind: ReductionKind, array: TiledArray, axis: Any = None, dtype: DTypeLike | None = None, keepdims: bool = False
) -> Any:
    """The reduction along `axis` (None: all dims) as an array, or as numpy's scalar if no dim is left."""
    return unwrap_scalar(reduce_to_array(kind, array, axis, dtype, keepdims))


def reduce_to_array(
    kind: ReductionKind, array: TiledArray, axis: Any = None, dtype: DTypeLike | None = None, keepdims: bool = False
) -> TiledArray:
    """The reduction as an array, even if no dim is left."""
    check_arithmetic(kind.name, array)
    dims = normalize_axes(axis, len(array.layout.shape))
    if kind.ordered and 0 in (array.layout.shape[at] for at in dims):
        raise TileError(f"{kind.name} of {array.layout} along dims {dims}: no elements have no {kind.name}")
    if array.layout.partial:
        # Summands are reduced before they are combined where both are the same sum, in the same dtype; an extremum of
        # sums is not the sum of extrema.
        element = take_tile(array).dtype
        same = kind in (SUM, PRODUCT) and array.layout.reduction == kind.operation
        if not (same and kind.function(np.empty(0, element), dtype=dtype).dtype == element):
            array = finish_sum(array)
    local = compute_together(array, is_split(array.layout, dims), lambda: _reduce_part(kind, array, dims, dtype))
    combined = _reduce_across_ranks(kind, array, dims, local)
    return combined if keepdims else _drop_dims(combined, dims)


def mean(array: TiledArray, axis: Any = None, dtype: DTypeLike | None = None, *, keepdims: bool = False) -> Any:
    """numpy's mean: integers are averaged in float64, half precision is summed in float32."""
    check_arithmetic("mean", array)
    given = np.dtype(dtype) if dtype is not None else take_tile(array).dtype
    result = np.dtype(np.float64) if dtype is None and given.kind in "biu" else given
    # As in numpy, half precision is summed in float32, and rounded once at the end.
    summed = np.dtype(np.float32) if result.itemsize == 2 and result.kind == "f" else result
    count = math.prod(array.layout.shape[at] for at in normalize_axes(axis, len(array.layout.shape)))
    total = reduce_to_array(SUM, array, axis, summed, keepdims)
    return unwrap_scalar(apply_to_array("mean", lambda part: np.true_divide(part, count).astype(result), total))


def variance(
    array: TiledArray, axis: Any = None, dtype: DTypeLike | None = None, ddof: float = 0, keepdims: bool = False
) -> TiledArray:
    """numpy's variance, as an array even if no dim is left: the mean of squared distances from the mean."""
    array = finish_sum(array)
    dims = normalize_axes(axis, len(array.layout.shape))
    count = math.prod(array.layout.shape[at] for at in dims) - ddof
    # Half precision is computed with in float32, as numpy does, and rounded at the end.
    half = dtype is None and take_tile(array).dtype == np.float16
    # The mean first: the mean of squares less the square of the mean would cancel where the mean is large.
    center = mean(array, axis, np.float32 if half else dtype, keepdims=True)

    def square(part: Array, mid: Any) -> Any:
        distance = part - mid
        return (distance.conj() * distance).real

    squares = compute_together(
        array, is_split(array.layout, dims), lambda: apply_elementwise("var", square, array, center)
    )
    total = reduce_to_array(SUM, squares, axis, None, keepdims)

    def divide(part: Array) -> Any:
        quotient = np.true_divide(part, max(count, 0))
        return quotient.astype(np.float16) if half else quotient

    return apply_to_array("var", divide, total)


def locate_extremum(kind: ReductionKind, array: TiledArray, axis: Any = None, keepdims: bool = False) -> Any:
    """numpy's `argmin` and `argmax`: where the first smallest or largest element is, or the first NaN."""
    array = finish_sum(array)
    layout, rank = array.layout, array.comm.rank
    dims = normalize_axes(axis if axis is None else operator.index(axis), len(layout.shape))
    # Two reductions, not one of pairs: MPI's MINLOC has neither NaN nor all dtypes, and its index is of 32 bits.
    extremum = reduce_to_array(kind, array, axis, None, True)

    def place(part: Array, best: Array) -> Any:
        index: Any = 0
        count = 1
        for at in reversed(dims):
            along = global_indices(layout, at, rank).reshape(-1, *[1] * (part.ndim - at - 1))
            index, count = index + count * along, count * layout.shape[at]
        # All other elements get an index past the end, so the least index is that of the first extremum.
        hit = (part == best) | ((part != part) & (best != best))
        return np.where(hit, index, count).astype(np.intp)

    return reduce_array(MINIMUM, apply_elementwise(f"arg{kind.name}", place, array, extremum), axis, None, keepdims)


def accumulate(ufunc: np.ufunc, array: TiledArray, axis: Any = None, dtype: DTypeLike | None = None) -> TiledArray:
    """numpy's `cumsum` and the like: each rank accumulates its part, after what all ranks before it have.

    Where the elements of a rank are no interval, the dim is made local first; the result lies as the array does.
    """
    check_arithmetic(ufunc.__name__, array)
    array = finish_sum(array) if axis is not None or len(array.layout.shape) == 1 else reshape(finish_sum(array), -1)
    layout, at = array.layout, normalize_axis(0 if axis is None else axis, len(array.layout.shape))
    dim, kind = layout.dims[at], OF_UFUNCS[ufunc]
    held = [digit.axis is not None for digit in dim.digits]
    in_order = held == sorted(held, reverse=True) if dim.pieces is None else dim.pieces.is_intervals
    # Of a block-cyclic dim a rank has many intervals: to move it twice takes two messages a peer, not one a block.
    if any(held) and not in_order:
        whole = accumulate(ufunc, array.redistribute(make_dims_local(layout, (at,))), at, dtype)
        return whole.redistribute(replaced(layout, dtype=whole.layout.dtype))
    local = compute_together(array, any(held), lambda: _reduce_part(kind, array, (at,), dtype))
    below = ufunc.accumulate(cut_padding(array), axis=at, dtype=local.dtype)
    if any(held):
        gathered, mine = gather_reduced(array, (at,), local)
        # Every rank adds up the same totals in the same order, so that all copies of a part have the same bits.
        before = cut_padding(gathered)[(slice(None),) * at + (slice(0, mine[at]),)]
        below = ufunc(ufunc.reduce(before, axis=at, keepdims=True, dtype=local.dtype), below)
    return wrap_true_part(array, layout, below)


def norm(array: TiledArray, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    """numpy's `linalg.norm` of vectors, and of matrices for the orders that need no singular values."""
    check_arithmetic("norm", array)
    array = finish_sum(array)
    if take_tile(array).dtype.kind in "biu":
        array = apply_to_array("norm", lambda part: part.astype(float), array)
    ndim = len(array.layout.shape)
    along = normalize_axes(axis, ndim)

    def compute(function: Callable[[Array], Any], array: TiledArray) -> TiledArray:
        # A reduction comes next: an error on one rank (an overflow, where that is one) is raised on all of them.
        return compute_together(array, is_split(array.layout, along), lambda: apply_to_array("norm", function, array))

    size = compute(np.abs, array)
    if len(along) == 1 and ord in (np.inf, -np.inf):
        return reduce_array(_choose_extremum(ord, size, axis), size, axis, None, keepdims)
    if len(along) == 1 and ord == 0:
        return reduce_array(SUM, compute(lambda part: (part != 0).astype(part.dtype), size), axis, None, keepdims)
    if len(along) == 2 and ord in (1, -1, np.inf, -np.inf):
        # The largest or smallest sum of a column (1) or a row (inf). The order of `axis` says which dim is which.
        rows, columns = (normalize_axis(each, ndim) for each in ((-2, -1) if axis is None else axis))
        summed, across = (rows, columns) if abs(ord) == 1 else (columns, rows)
        sums = reduce_to_array(SUM, size, summed, None, True)
        extreme = reduce_to_array(_choose_extremum(ord, sums, across), sums, across, None, True)
        return extreme if keepdims else unwrap_scalar(_drop_dims(extreme, (rows, columns)))
    if len(along) == 1 and isinstance(ord, str):
        raise ValueError(f"invalid norm order {ord!r} for vectors")
    # Without an axis, a norm of any number of dims is that of all elements in a row.
    of_all = (ord is None and axis is None) or (len(along) == 2 and ord in (None, "fro"))
    if not of_all and len(along) != 1:
        raise TypeError(f"norm of a DistArray with ord={ord!r} over {len(along)} dims is not implemented; {INSTEAD}")
    power: Any = 2 if of_all or ord is None else ord
    total = reduce_to_array(SUM, size if power == 1 else compute(lambda part: part**power, size), axis, None, keepdims)
    if power == 1:
        return unwrap_scalar(total)
    # np.sqrt of a number is exact to the last bit; a power of 1/2 need not be.
    root = apply_to_array("norm", lambda part: np.sqrt(part) if power == 2 else part ** (1 / power), total)
    return unwrap_scalar(root)


def _choose_extremum(ord: Any, size: TiledArray, axis: Any) -> ReductionKind:
    """The largest (ord > 0) or smallest size; the largest of no sizes is 0 in numpy, which is their sum."""
    if ord < 0:
        return MINIMUM
    dims = normalize_axes(axis, len(size.layout.shape))
    return SUM if 0 in (size.layout.shape[at] for at in dims) else MAXIMUM


def _reduce_part(kind: ReductionKind, array: TiledArray, dims: tuple[int, ...], dtype: DTypeLike | None) -> Array:
    """The reduction of this rank's true part, with dims of one element."""
    part = cut_padding(array)
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if kind.ordered:
        options["initial"] = _find_identity(kind, part.dtype)
    return np.asarray(kind.function(part, axis=dims, keepdims=True, **options))


def _find_identity(kind: ReductionKind, dtype: np.dtype[Any]) -> Any:
    """The identity of a minimum or maximum: what a rank without elements gives."""
    least = kind is MAXIMUM
    match dtype.kind:
        case "b":
            return not least
        case "i" | "u":
            return np.iinfo(dtype).min if least else np.iinfo(dtype).max
        case "f":
            return -np.inf if least else np.inf
        case "c":
            return complex(-np.inf, -np.inf) if least else complex(np.inf, np.inf)
        case _:
            raise TypeError(f"{kind.name} of a DistArray of dtype {dtype} is not implemented; {INSTEAD}")


def _reduce_across_ranks(kind: ReductionKind, array: TiledArray, dims: tuple[int, ...], local: Array) -> TiledArray:
    """The array of all ranks' reductions, combined along the axes that held the reduced dims."""
    if not is_split(array.layout, dims):
        return wrap_true_part(array, _lay_reduced(array.layout, dims), local)
    if has_reduction(name_dtype(local.dtype), kind.operation):
        return finish_sum(wrap_true_part(array, _lay_reduced(array.layout, dims, local.dtype, kind.operation), local))
    # No partial layout has the operation (the largest complex number): every rank gathers the reductions of all, and
    # reduces them. The second reduction keeps the dtype of the first, which may be wider than the elements.
    dtype = local.dtype if kind in (SUM, PRODUCT) else None
    gathered, _ = gather_reduced(array, dims, local)
    return wrap_true_part(array, _lay_reduced(array.layout, dims), _reduce_part(kind, gathered, dims, dtype))


def gather_reduced(array: TiledArray, dims: tuple[int, ...], local: Array) -> tuple[TiledArray, dict[int, int]]:
    """What ranks have reduced, on all of them: one element for each rank along the axes of the reduced dims, and which
    of them this rank's is.
    """
    held, every = list(array.layout.dims), list(array.layout.dims)
    for at in dims:
        digits = tuple(Digit(axis.size, axis) for axis in list_axes(array.layout.dims[at]))
        held[at] = Dim(digits, math.prod(digit.radix for digit in digits))
        every[at] = make_local_dim(held[at].size)
    gathered = wrap_true_part(array, replace(array.layout, dims=tuple(held)), local)
    mine = {at: int(global_indices(gathered.layout, at, array.comm.rank)[0]) for at in dims}
    return gathered.redistribute(replace(gathered.layout, dims=tuple(every))), mine


@lru_cache(maxsize=1024)
def _lay_reduced(
    layout: Layout, dims: tuple[int, ...], dtype: np.dtype[Any] | None = None, operation: str | None = None
) -> Layout:
    """A layout with dims of one element; with an `operation`, before what ranks have reduced is combined by it."""
    kept = tuple(SINGLE if at in dims else dim for at, dim in enumerate(layout.dims))
    if operation is None or dtype is None:
        return replace(layout, dims=kept)
    partial = (*(axis for at in dims for axis in list_axes(layout.dims[at])), *layout.partial)
    return Layout(layout.mesh, kept, dtype.name, operation, partial)


def _drop_dims(array: TiledArray, dims: tuple[int, ...]) -> TiledArray:
    """The array without these dims of one element."""
    layout = replaced(array.layout, dims=tuple([dim for at, dim in enumerate(array.layout.dims) if at not in dims]))
    return array.with_tile(layout, take_tile(array).reshape(layout.tile_shape))
