"""`__array_function__`: numpy's functions that distributed arrays have; all others are refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from reshard.mpi.numpy_protocol import contractions, reductions, views
from reshard.mpi.numpy_protocol.elementwise import elementwise, mapped, zipped
from reshard.mpi.numpy_protocol.reductions import ReductionKind
from reshard.mpi.numpy_protocol.tiled import (
    INSTEAD,
    TiledArray,
    computed,
    finished,
    is_split,
    layout_dtype,
    true_part,
    whole_tile,
    with_true_part,
)
from reshard.mpi.tiles import check_not_partial


def call(function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Runs numpy's `function` on distributed arrays. Raises `TypeError` if there is no such function for them, or if it
    does not have one of the options.
    """
    name = f"{function.__module__}.{function.__name__}"
    run = FUNCTIONS.get(function)
    if run is None:
        raise TypeError(f"{name} is not implemented for DistArrays; {INSTEAD}")
    given = {key: value for key, value in options.items() if not _is_default(key, value)}
    try:
        bound = inspect.signature(run).bind(*arguments, **given)
    except TypeError as error:
        raise TypeError(f"{name} of a DistArray takes {_options(run)} only ({error}); {INSTEAD}") from None
    return run(*bound.args, **bound.kwargs)


def _is_default(key: str, value: Any) -> bool:
    """Whether an option has no effect: numpy's own functions pass such options on."""
    return value is np._NoValue or (key == "out" and value is None)  # pyright: ignore


def _options(run: Callable[..., Any]) -> str:
    return ", ".join(inspect.signature(run).parameters)


def _of_kind(kind: ReductionKind, typed: bool) -> Callable[..., Any]:
    def plain(a: TiledArray, axis: Any = None, *, keepdims: bool = False) -> Any:
        return reductions.reduced(kind, a, axis, None, keepdims)

    def with_dtype(a: TiledArray, axis: Any = None, dtype: DTypeLike | None = None, *, keepdims: bool = False) -> Any:
        return reductions.reduced(kind, a, axis, dtype, keepdims)

    return with_dtype if typed else plain


def where(condition: Any, x: Any, y: Any) -> Any:
    """numpy's `where` with three arguments: with one, the shape of the result would depend on the data."""
    return elementwise("where", np.where, [condition, x, y])


def isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """numpy's `isclose`."""
    return zipped("isclose", lambda one, other: np.isclose(one, other, rtol, atol, equal_nan), a, b)


def allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """numpy's `allclose`; arrays of one shape may have different layouts."""
    one, other = _alike(a, b)
    first = one if isinstance(one, TiledArray) else other
    waited_for = is_split(first.layout, range(len(first.layout.shape)))
    close = computed(first, waited_for, lambda: isclose(one, other, rtol, atol, equal_nan))
    return bool(reductions.reduced(reductions.ALL, close))


def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> bool:
    """numpy's `array_equal` of two distributed arrays, in any layouts."""
    if not isinstance(a1, TiledArray) or not isinstance(a2, TiledArray):
        raise TypeError(
            f"array_equal of a {type(a1).__name__} and a {type(a2).__name__}: give two DistArrays; {INSTEAD}"
        )
    if a1.layout.shape != a2.layout.shape:
        return False
    one, other = _alike(a1, a2)
    local = np.array_equal(true_part(one), true_part(other), equal_nan)
    equal = with_true_part(one, replace(one.layout, dtype="bool"), np.full(true_part(one).shape, local))
    return bool(reductions.reduced(reductions.ALL, equal))


def _alike(one: Any, other: Any) -> tuple[Any, Any]:
    """Both arrays finished, and the second in the first one's layout if they have one shape."""
    one, other = (finished(each) if isinstance(each, TiledArray) else each for each in (one, other))
    if isinstance(one, TiledArray) and isinstance(other, TiledArray) and one.layout.shape == other.layout.shape:
        other = other.redistribute(replace(one.layout, dtype=other.layout.dtype))
    return one, other


def copied(a: TiledArray) -> TiledArray:
    """A copy, in private memory."""
    return a.with_tile(a.layout, whole_tile(a).copy())


def cast_to(a: TiledArray, dtype: DTypeLike) -> TiledArray:
    """The array with elements of another dtype; always a copy."""
    check_not_partial(a.layout)
    return with_true_part(a, a.layout, true_part(a).astype(dtype))


def full_like(a: TiledArray, fill_value: Any, dtype: DTypeLike | None = None) -> TiledArray:
    """An array of one value, in the layout of another one."""
    check_not_partial(a.layout)
    element = whole_tile(a).dtype if dtype is None else np.dtype(dtype)
    tile = np.full(a.layout.tile_shape, fill_value, element)
    return a.with_tile(replace(a.layout, dtype=layout_dtype(element)), tile)


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
    return mapped("real", lambda part: np.real(part).copy(), val)


def imag(val: TiledArray) -> Any:
    """The imaginary parts."""
    return mapped("imag", lambda part: np.imag(part).copy(), val)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.sum: _of_kind(reductions.SUM, typed=True),
    np.prod: _of_kind(reductions.PRODUCT, typed=True),
    np.min: _of_kind(reductions.MINIMUM, typed=False),
    np.max: _of_kind(reductions.MAXIMUM, typed=False),
    np.any: _of_kind(reductions.ANY, typed=False),
    np.all: _of_kind(reductions.ALL, typed=False),
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
    np.copy: copied,
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
