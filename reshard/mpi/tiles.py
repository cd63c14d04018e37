"""Tiles that callers give: whether they fit their layout."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from reshard.errors import LayoutError, PlanError, TileError
from reshard.runtime.numpy_dtypes import numpy_dtype
from reshard.types import Layout, dtypes

RAW = ("uint8", "uint16", "uint32", "uint64", "complex128")
"""The dtypes of layouts of elements that have no name in layouts (structured, dates, text): those of 1, 2, 4, 8
and 16 bytes, as which they are moved."""


def stands_for(layout: Layout, dtype: np.dtype[Any]) -> bool:
    """Whether elements of this numpy dtype are those of the layout, or have no name and its size."""
    if dtype.name == layout.dtype:
        return dtype.isnative
    if layout.dtype not in RAW or dtype.hasobject or dtype.itemsize * 8 != dtypes.bits(layout.dtype):
        return False
    return not _named(dtype)


def _named(dtype: np.dtype[Any]) -> bool:
    try:
        dtypes.canonical(dtype)
    except LayoutError:
        return False
    return True


def checked(given: Any, layout: Layout, what: str) -> NDArray[Any]:
    """The array if it is a tile of the layout, else `TileError`."""
    array = np.asarray(given)
    if array.shape != layout.tile_shape:
        raise TileError(
            f"the {what} has shape {array.shape}, but tiles of {layout} (global {layout.shape}, mesh {layout.mesh}) "
            f"have {layout.tile_shape}; give this rank's tile, padding included"
        )
    if not stands_for(layout, array.dtype):
        raise TileError(f"the {what} is {array.dtype}, but {layout} is {layout.dtype}; cast it first")
    return array


def checked_out(out: object, layout: Layout, given: NDArray[Any]) -> NDArray[Any]:
    """The array if the result for this tile can be written to it, else `TileError`."""
    if not isinstance(out, np.ndarray):
        raise TileError(f"out is a {type(out).__name__}; give a numpy array")
    array = checked(cast("NDArray[Any]", out), layout, "out")
    if array.dtype != given.dtype:
        raise TileError(f"out is {array.dtype}, the tile {given.dtype}; give one dtype")
    if not array.flags.writeable:
        raise TileError("out is read-only; give an array that can be written to")
    if np.may_share_memory(array, given):
        raise TileError("out overlaps the tile; give memory of its own, or donate=True and no out")
    return array


def kind(layout: Layout, dtype: DTypeLike | None) -> np.dtype[Any]:
    """The numpy dtype of a layout's elements: the given one, if there is one and it fits."""
    found = numpy_dtype(layout.dtype) if dtype is None else np.dtype(dtype)
    if not stands_for(layout, found):
        raise TileError(f"dtype {found} does not fit {layout}, which is {layout.dtype}")
    return found


def check_root(root: int | None, size: int) -> None:
    """Raises `PlanError` for a root that is no rank."""
    if root is not None and not 0 <= root < size:
        raise PlanError(f"root {root} is no rank of a communicator of {size}; give 0 to {size - 1}, or None for all")


def check_whole(given: Any, layout: Layout, dtype: np.dtype[Any]) -> None:
    """Raises `TileError` unless an array is the whole array of a layout."""
    array = np.asarray(given)
    if given is None or array.shape != layout.shape or array.dtype != dtype:
        said = "None" if given is None else f"of shape {array.shape} and dtype {array.dtype}"
        raise TileError(f"the array is {said}, but {layout} is one of shape {layout.shape} and dtype {dtype}")


def finished(layout: Layout) -> Layout:
    """The layout itself, unless it is still to be summed: then `LayoutError`."""
    if layout.partial:
        raise LayoutError(f"{layout} is still to be summed: redistribute it to a layout that is not partial first")
    return layout


def replicated(layout: Layout) -> Layout:
    """The layout with everything everywhere."""
    return Layout.tiled(layout.mesh, layout.shape, layout.dtype, [[] for _ in layout.shape])


def aligned(layout: Layout, dim: int) -> Layout:
    """The layout with one dim local, and what held it holding the last dim that nothing held.

    >>> from reshard.types import Mesh
    >>> str(aligned(Layout.parse("f32[{x}4, {y}8, 16]", Mesh(x=4, y=2)), 0))
    'f32[16, {y}8, {x}4]'
    """
    if not -len(layout.shape) <= dim < len(layout.shape):
        raise LayoutError(f"dim {dim} of {layout}, which has {len(layout.shape)} dims")
    dim %= len(layout.shape)
    held = [[d.axis for d in of.digits if d.axis is not None] for of in layout.dims]
    if not held[dim]:
        return layout
    free = [at for at, axes in enumerate(held) if not axes]
    if not free:
        raise LayoutError(f"no dim of {layout} is local, so dim {dim} has none to change places with; give a layout")
    held[free[-1]], held[dim] = held[dim], []
    return Layout.tiled(layout.mesh, layout.shape, layout.dtype, held, layout.partial, layout.reduction)
