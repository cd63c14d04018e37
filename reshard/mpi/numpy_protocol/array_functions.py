"""`__array_function__`: numpy's functions that distributed arrays have; all others are refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from reshard.mpi.numpy_protocol import contractions, reductions, views
from reshard.mpi.numpy_protocol.elementwise import apply_elementwise, apply_to_array
from reshard.mpi.numpy_protocol.reductions import ReductionKind
from reshard.mpi.numpy_protocol.tiled import (
    INSTEAD,
    TiledArray,
    compute_together,
    cut_padding,
    finish_sum,
    is_split,
    name_dtype,
    take_tile,
    wrap_true_part,
)
from reshard.mpi.tiles import check_not_partial


def call_function(function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Runs numpy's `function` on distributed arrays. Raises `TypeError` if there is no such function for them, or if it
    does not have one of the options.
    """
    name = f"{function.__module__}.{function.__name__}"
    run = FUNCTIONS.get(function)
    if run is None:
        raise TypeError(f"{name} is not implemented for DistArrays; {INSTEAD}")
    # numpy's own functions pass on options that have no effect.
    nothing = np._NoValue  # pyright: ignore
    given = {key: value for key, value in options.items() if value is not nothing and (key, value) != ("out", None)}
    try:
        # Binding first: a wrong option is refused before any rank communicates.
        bound = inspect.signature(run).bind(*arguments, **given)
    except TypeError as error:
        taken = ", ".join(inspect.signature(run).parameters)
        raise TypeError(f"{name} of a DistArray takes {taken} only ({error}); {INSTEAD}") from None
    return run(*bound.args, **bound.kwargs)


def _make_reduction(kind: ReductionKind, typed: bool) -> Callable[..., Any]:
    def plain(a: TiledArray, axis: Any = None, *, keepdims: bool = False) -> Any:
        return reductions.reduce_array(kind, a, axis, None, keepdims)

    def with_dtype(a: TiledArray, axis: Any = None, dtype: DTypeLike | None = None, *, keepdims: bool = False) -> Any:
        return reductions.reduce_array(kind, a, axis, dtype, keepdims)

    return with_dtype if typed else plain


def where(condition: Any, x: Any, y: Any) -> Any:
    """numpy's `where` with three arguments: with one, the shape of the result would depend on the data."""
    return apply_elementwise("where", np.where, [condition, x, y])


def isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """numpy's `isclose`."""

    def compare(one: Any, other: Any) -> Any:
        return np.isclose(one, other, rtol, atol, equal_nan)

    return apply_elementwise("isclose", compare, [a, b])


def allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """numpy's `allclose`; arrays of one shape may have different layouts."""
    one, other = _alike(a, b)
    first = one if isinstance(one, TiledArray) else other
    waited_for = is_split(first.layout, range(len(first.layout.shape)))
    # Where an overflow is an error, one rank's elements may raise it, before a reduction that the others enter.
    close = compute_together(first, waited_for, lambda: isclose(one, other, rtol, atol, equal_nan))
    return bool(reductions.reduce_array(reductions.ALL, close))


def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> bool:
    """numpy's `array_equal` of two distributed arrays, in any layouts."""
    if not isinstance(a1, TiledArray) or not isinstance(a2, TiledArray):
        raise TypeError(
            f"array_equal of a {type(a1).__name__} and a {type(a2).__name__}: give two DistArrays; {INSTEAD}"
        )
    if a1.layout.shape != a2.layout.shape:
        return False
    one, other = _alike(a1, a2)
    local = np.array_equal(cut_padding(one), cut_padding(other), equal_nan)
    # One flag for each element of the part, so that a rank without elements counts as equal.
    equal = wrap_true_part(one, replace(one.layout, dtype="bool"), np.full(cut_padding(one).shape, local))
    return bool(reductions.reduce_array(reductions.ALL, equal))


def _alike(one: Any, other: Any) -> tuple[Any, Any]:
    """Both arrays finished, and the second in the first one's layout if they have one shape."""
    one, other = (finish_sum(each) if isinstance(each, TiledArray) else each for each in (one, other))
    if isinstance(one, TiledArray) and isinstance(other, TiledArray) and one.layout.shape == other.layout.shape:
        other = other.redistribute(replace(one.layout, dtype=other.layout.dtype))
    return one, other


def copy_array(a: TiledArray) -> TiledArray:
    """A copy, in private memory."""
    return a.with_tile(a.layout, take_tile(a).copy())


def cast_array(a: TiledArray, dtype: DTypeLike) -> TiledArray:
    """The array with elements of another dtype; always a copy."""
    check_not_partial(a.layout)
    return wrap_true_part(a, a.layout, cut_padding(a).astype(dtype))


def full_like(a: TiledArray, fill_value: Any, dtype: DTypeLike | None = None) -> TiledArray:
    """An array of one value, in the layout of another one."""
    check_not_partial(a.layout)
    element = take_tile(a).dtype if dtype is None else np.dtype(dtype)
    tile = np.full(a.layout.tile_shape, fill_value, element)
    return a.with_tile(replace(a.layout, dtype=name_dtype(element)), tile)


def zeros_like(a: TiledArray, dtype: DTypeLike | None = None) -> TiledArray:
    """An array of zeros, in the layout of another one."""
    return full_like(a, 0, dtype)


def ones_like(a: TiledArray, dtype: DTypeLike | None = None) -> TiledArray:
    """An array of ones, in the layout of another one."""
    return full_like(a, 1, dtype)


def shape_of(a: TiledArray) -> tuple[int, ...]:
    """The global shape."""
    return a.layout.shape


def ndim_of(a: TiledArray) -> int:
    """The number of dims."""
    return len(a.layout.shape)


def size_of(a: TiledArray, axis: int | None = None) -> int:
    """The number of elements of the whole array, or of a dim."""
    return int(np.prod(a.layout.shape, dtype=object)) if axis is None else a.layout.shape[axis]


def real(val: TiledArray) -> Any:
    """The real parts."""
    return apply_to_array("real", lambda part: np.real(part).copy(), val)


def imag(val: TiledArray) -> Any:
    """The imaginary parts."""
    return apply_to_array("imag", lambda part: np.imag(part).copy(), val)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.sum: _make_reduction(reductions.SUM, typed=True),
    np.prod: _make_reduction(reductions.PRODUCT, typed=True),
    np.min: _make_reduction(reductions.MINIMUM, typed=False),
    np.max: _make_reduction(reductions.MAXIMUM, typed=False),
    np.any: _make_reduction(reductions.ANY, typed=False),
    np.all: _make_reduction(reductions.ALL, typed=False),
    np.mean: reductions.mean,
    np.linalg.norm: reductions.norm,
    np.dot: contractions.dot,
    np.tensordot: contractions.tensordot,
    np.transpose: views.transpose,
    np.reshape: views.reshape,
    np.concatenate: views.concatenate,
    np.where: where,
    np.isclose: isclose,
    np.allclose: allclose,
    np.array_equal: array_equal,
    np.copy: copy_array,
    np.full_like: full_like,
    np.zeros_like: zeros_like,
    np.ones_like: ones_like,
    np.shape: shape_of,
    np.ndim: ndim_of,
    np.size: size_of,
    np.real: real,
    np.imag: imag,
}
"""numpy's functions that distributed arrays have."""
