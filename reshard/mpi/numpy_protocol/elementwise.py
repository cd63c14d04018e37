"""Elementwise functions: each rank applies them to its own true parts, without communication.

That is right if a rank's tiles hold the same elements of every operand, which is so for equal dims, and for dims of one
element that every rank has: these broadcast as in numpy.

    a             f64[{x}2/7, 5]
    a.mean(0)     f64[5]            broadcasts: every rank has all 5
    a.T           f64[5, {x}2/7]    refused: a rank's tiles hold other elements than those of a
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from reshard.errors import LayoutError, TileError
from reshard.mpi.numpy_protocol.tiled import (
    INSTEAD,
    SINGLE,
    Array,
    TiledArray,
    check_together,
    cut_padding,
    wrap_true_part,
)
from reshard.mpi.tiles import check_not_partial
from reshard.types import Layout

_OPTIONS = {"out", "dtype", "casting", "order", "subok", "where"}


def call_ufunc(ufunc: np.ufunc, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
    """A ufunc on distributed arrays and numbers; with `out`, into arrays of the result's layout."""
    name = ufunc.__name__
    if ufunc.signature is not None:
        raise TypeError(f"{name} of DistArrays is not implemented: it combines whole rows of tiles; {INSTEAD}")
    if unknown := sorted(set(options) - _OPTIONS):
        raise TypeError(f"{name} of DistArrays does not take {', '.join(unknown)}; {INSTEAD}")
    # Where a mask is false, numpy leaves what memory holds: other elements on each rank that has a copy.
    if options.pop("where", True) is not True:
        raise TypeError(f"{name} of DistArrays does not take where; use np.where, or {INSTEAD}")
    outs = cast("tuple[Any, ...]", options.pop("out", ()))
    if not outs:
        return apply_elementwise(name, lambda *parts: ufunc(*parts, **options), inputs)
    for out in outs:
        if not isinstance(out, TiledArray):
            raise TileError(f"{name}: out is a {type(out).__name__}; give a DistArray of the result's layout")
    _check_outs(name, inputs, cast("tuple[TiledArray, ...]", outs))
    # Into views of the tiles: the padding of `out` stays what it is.
    ufunc(*map(_cut_operand, inputs), out=tuple(map(_cut_operand, outs)), **options)
    return outs[0] if len(outs) == 1 else outs


def apply_elementwise(name: str, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """Applies a function to the true parts of distributed arrays, and to numbers; a tuple of results stays one."""
    arrays = _list_arrays(name, operands)
    layout = align_layouts(name, arrays)
    results = function(*map(_cut_operand, operands))
    if isinstance(results, tuple):
        return tuple(wrap_true_part(arrays[0], layout, each) for each in cast("tuple[Any, ...]", results))
    return wrap_true_part(arrays[0], layout, results)


def apply_to_array(name: str, function: Callable[[Array], Any], array: TiledArray) -> TiledArray:
    """Applies a function to the true part of one array."""
    return apply_elementwise(name, function, [array])


def align_layouts(name: str, arrays: Sequence[TiledArray]) -> Layout:
    """The layout of an elementwise result, of the first array's dtype.

    Raises `LayoutError` unless a rank's tiles hold the same elements of all arrays.
    """
    check_together(name, arrays)
    layouts = [check_not_partial(array.layout) for array in arrays]
    first = layouts[0]
    ndim = max(len(layout.shape) for layout in layouts)
    dims = tuple(_find_common_dim(name, layouts, at) for at in range(-ndim, 0))
    if any(layout.mesh != first.mesh for layout in layouts):
        raise _mismatch_error(name, layouts)
    try:
        return replace(first, dims=dims)
    except LayoutError:  # One axis holds dims of two operands.
        raise _mismatch_error(name, layouts) from None


def _find_common_dim(name: str, layouts: Sequence[Layout], at: int) -> Any:
    """The dim at `at`, counted from the end, that all layouts have or broadcast to."""
    dims = {layout.dims[at] for layout in layouts if len(layout.dims) >= -at} - {SINGLE}
    sizes = {dim.size for dim in dims}
    if len(sizes - {1}) > 1:
        raise LayoutError(f"{name}: shapes {', '.join(str(each.shape) for each in layouts)} do not broadcast together")
    # A dim of one element in another layout than `SINGLE` is on some ranks alone, and does not broadcast on the others.
    if len(dims) > 1:
        raise _mismatch_error(name, layouts)
    return dims.pop() if dims else SINGLE


def _mismatch_error(name: str, layouts: Sequence[Layout]) -> LayoutError:
    shown = " and ".join(dict.fromkeys(f"{layout} on {layout.mesh!r}" for layout in layouts))
    return LayoutError(
        f"{name} of arrays in layouts {shown}; redistribute one of them, so that the tiles of a rank have the same "
        f"elements"
    )


def _check_outs(name: str, inputs: Sequence[Any], outs: Sequence[TiledArray]) -> None:
    arrays = [each for each in inputs if isinstance(each, TiledArray)]
    # Without an array among the inputs, as in np.add(1, 2, out=a), the first output gives the layout.
    layout = align_layouts(name, _list_arrays(name, [*inputs, *outs]) if not arrays else _list_arrays(name, inputs))
    for out in outs:
        if replace(out.layout, dtype=layout.dtype) != layout:
            raise LayoutError(
                f"{name}: out has layout {out.layout}, the result {layout}; redistribute one of them, or leave out out="
            )


def _list_arrays(name: str, operands: Sequence[Any]) -> list[TiledArray]:
    """The distributed arrays among operands; raises `LayoutError` for other arrays than numbers."""
    arrays = [operand for operand in operands if isinstance(operand, TiledArray)]
    for operand in operands:
        if not isinstance(operand, TiledArray) and np.ndim(operand):
            raise LayoutError(
                f"{name} of a DistArray and an array of shape {np.shape(operand)}; give a number, or a DistArray of "
                f"layout {arrays[0].layout}"
            )
    return arrays


def _cut_operand(operand: Any) -> Any:
    return cut_padding(operand) if isinstance(operand, TiledArray) else operand
