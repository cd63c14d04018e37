"""Reductions: each rank reduces its true part, and a plan combines the partial results.

    a                          f64[{x}3/10, {y}4]
    sum of each true part      f64[1, {y}4] + sum{x}
    finished by its plan       f64[1, {y}4], an all-reduce; then the dim of one element is dropped

A rank whose part is empty gives the identity of the operation. Results without dims are numpy's scalars, on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from reshard.errors import TileError
from reshard.mpi.numpy_protocol.tiled_array import (
    INSTEAD,
    SINGLE,
    Array,
    TiledArray,
    apply_to_array,
    check_arithmetic,
    compute_together,
    cut_padding,
    finish_sum,
    is_split,
    list_axes,
    make_local_dim,
    normalize_axes,
    normalize_axis,
    replaced,
    take_tile,
    unwrap_scalar,
    wrap_true_part,
)
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
    if has_reduction(local.dtype.name, kind.operation):
        return finish_sum(wrap_true_part(array, _lay_reduced(array.layout, dims, local.dtype, kind.operation), local))
    # No partial layout has the operation (the largest complex number): every rank gathers the reductions of all, and
    # reduces them. The second reduction keeps the dtype of the first, which may be wider than the elements.
    dtype = local.dtype if kind in (SUM, PRODUCT) else None
    gathered = gather_reduced(array, dims, local)
    return wrap_true_part(array, _lay_reduced(array.layout, dims), _reduce_part(kind, gathered, dims, dtype))


def gather_reduced(array: TiledArray, dims: tuple[int, ...], local: Array) -> TiledArray:
    """What ranks have reduced, on all of them: one element for each rank along the axes of the reduced dims."""
    held, every = list(array.layout.dims), list(array.layout.dims)
    for at in dims:
        digits = tuple(Digit(axis.size, axis) for axis in list_axes(array.layout.dims[at]))
        held[at] = Dim(digits, math.prod(digit.radix for digit in digits))
        every[at] = make_local_dim(held[at].size)
    gathered = wrap_true_part(array, replace(array.layout, dims=tuple(held)), local)
    return gathered.redistribute(replace(gathered.layout, dims=tuple(every)))


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
