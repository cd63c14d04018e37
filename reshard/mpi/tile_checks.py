"""Checks the arrays that callers give against their layouts, and derives the layouts that a call needs from them."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from reshard.errors import LayoutError, PlanError, ReshardError, TileError, quoted, shortened
from reshard.geometry.detect import as_layout, as_layouts
from reshard.geometry.overlap import shared_elements
from reshard.lower.to_mpi import devices_by_id, rank_of_devices, seat_of
from reshard.mpi.sparse_rows import is_sparse
from reshard.runtime import Account
from reshard.runtime.numpy_tiles import (
    as_array,
    in_native_order,
    numpy_dtype,
    with_padding,
    without_mask,
    without_padding,
)
from reshard.runtime.on_mpi.copies.strided_copy import overlaps_itself
from reshard.runtime.on_mpi.gpu import is_on_gpu
from reshard.runtime.on_mpi.run_plan import can_combine
from reshard.runtime.on_mpi.window_tiles import absent_tile
from reshard.types import Layout, Mesh, dtypes
from reshard.types.dims import number_piece
from reshard.types.move import Move
from reshard.types.whole import checked_flag, count_items, whole

RAW = ("uint8", "uint16", "uint32", "uint64", "complex128")
"""The layout dtypes of 1, 2, 4, 8 and 16 bytes; they also stand for numpy dtypes of that size without a layout name.

For example, a structured array with 8 bytes per element moves as "uint64"."""


def represents_dtype(layout: Layout, dtype: np.dtype[Any]) -> bool:
    """Whether the layout's dtype stands for this numpy dtype: by its name, or by its size if the dtype has no name.

    >>> from reshard.types import Mesh
    >>> words = Layout.parse("u64[8]", Mesh())
    >>> [represents_dtype(words, np.dtype(name)) for name in ("uint64", "M8[s]", "f8")]
    [True, True, False]
    """
    return _is_represented(layout.dtype, dtype)


@lru_cache(maxsize=256)
def _is_represented(name: str, dtype: np.dtype[Any]) -> bool:
    if dtype.name == name:
        return dtype.isnative
    is_raw = name in RAW and not dtype.hasobject and dtype.itemsize * 8 == dtypes.bits(name)
    return is_raw and not has_layout_name(dtype)


@lru_cache
def has_layout_name(dtype: np.dtype[Any]) -> bool:
    """Whether layouts have a name for a numpy dtype."""
    with suppress(LayoutError):
        return bool(dtypes.canonical(dtype))
    return False


def _array_of(given: Any, what: str) -> NDArray[Any]:
    try:
        return without_mask(given)
    except Exception as error:  # Such as ragged lists, tensors on other devices, and the caller's own `__array__`.
        raise TileError(
            f"the {what} is a {type(given).__name__} that numpy cannot take ({shortened(str(error))}); give an array"
        ) from None


def check_tile(tile: Any, layout: Layout, what: str) -> NDArray[Any]:
    """The array `tile` if it fits the layout; else raises a `TileError` that calls it `what`, "tile" or "out"."""
    array = _array_of(tile, what)
    if array.shape != layout.tile_shape:
        raise TileError(
            f"the {what} has shape {array.shape}, but tiles of {layout} (global {layout.shape}, mesh {layout.mesh}) "
            f"have {layout.tile_shape}; give this rank's tile{', padding included' if not layout.even else ''}"
        )
    if not represents_dtype(layout, array.dtype):
        raise TileError(f"the {what} is {array.dtype}, but {layout} is {layout.dtype}; cast it first")
    _check_combines(layout, array.dtype)
    return array


def check_given_tile(tile: Any, layout: Layout, seat: int, budget: object = None) -> NDArray[Any]:
    """The tile of a seat with padding and in the machine's byte order: the array itself, or a copy that has both.

    Raises `TileError` for a tile that does not fit, or that a budget leaves no room to copy.

    >>> from reshard.types import Mesh
    >>> check_given_tile([[3.0], [4.0]], Layout.parse("f64[{x}3/5, 1]", Mesh(x=2)), 1).tolist()
    [[3.0], [4.0], [0.0]]
    """
    device = devices_by_id(layout.mesh)[seat]
    if tile is None:
        raise TileError(
            f"the tile is None, but {layout} on {layout.mesh!r} has one here (device {device}); give an array of shape "
            f"{layout.tile_shape}"
        )
    if is_sparse(tile):
        raise TileError(
            f"the tile is a {type(tile).__name__}, which `redistribute` moves by rows in a call of its own; make it or "
            f"give a dense array of shape {layout.tile_shape}"
        )
    given = as_array(device, tile, layout.tile_shape, layout.tile_shape_of(device))
    array = with_padding(layout, device, in_native_order(given))
    if array is not given and budget is not None:
        raise TileError(
            f"the tile, of shape {given.shape} and dtype {given.dtype}, would be copied beside the budget; give one of "
            f"shape {layout.tile_shape}, padding included, in the byte order of this machine"
        )
    return check_tile(array, layout, "tile")


def check_nothing(given: object, what: str, layout: Layout, rank: int) -> None:
    """Raises `TileError` if a rank outside a layout's mesh gives a tile of it, or an array for one."""
    if given is not None:
        raise TileError(
            f"the {what} is a {type(given).__name__}, but rank {rank} is not in {layout.mesh!r}, the mesh of {layout}, "
            f"and has no tile there; give None"
        )


def check_source(tile: Any, layout: Layout, rank: int, size: int, budget: object = None) -> NDArray[Any]:
    """The C-ordered tile of a rank of a communicator of `size`, or an array without elements if it has none there.

    Raises `TileError` for a tile that does not fit, that is missing, or that has no place.
    """
    seat = seat_of(layout.mesh, rank, size)
    if seat is not None and _fits_as_it_is(tile, layout):
        return tile
    if is_on_gpu(tile):
        raise TileError(f"the tile of {layout} is in a GPU's memory: copy it to the host, or move it by `redistribute`")
    if seat is None:
        check_nothing(tile, "tile", layout, rank)
        return absent_tile(layout, numpy_dtype(layout.dtype)).tile
    return np.ascontiguousarray(check_given_tile(tile, layout, seat, budget)).reshape(layout.tile_shape)


def _fits_as_it_is(given: Any, layout: Layout) -> bool:
    """Whether what is given is a C-ordered tile of the layout, of the dtype that the layout names: most are, and
    checking this takes less time than finding out what is wrong.
    """
    plain = type(given) is np.ndarray and given.shape == layout.tile_shape
    return plain and given.dtype == numpy_dtype(layout.dtype) and given.flags.c_contiguous


def check_filled(out: object, layout: Layout, tile: NDArray[Any], rank: int, size: int) -> NDArray[Any]:
    """The C-ordered array for this rank's tile of a layout, or one without elements if it has none there."""
    if seat_of(layout.mesh, rank, size) is None:
        check_nothing(out, "out", layout, rank)
        return absent_tile(layout, numpy_dtype(layout.dtype)).tile
    array = _numpy_array(out)
    if not _fits_as_it_is(array, layout):
        array = check_tile(array, layout, "out")
        if not array.flags.c_contiguous:
            raise TileError(f"out, of shape {array.shape}, is not C-ordered; give a C-ordered array")
    return _check_memory(array, tile)


def dtype_without_tile(layout: Layout, out: object) -> np.dtype[Any]:
    """The dtype of the elements on a rank that gives no tile: that of `out` if it fits, else the layout's."""
    if isinstance(out, np.ndarray) and represents_dtype(layout, cast("NDArray[Any]", out).dtype):
        return cast("NDArray[Any]", out).dtype
    return numpy_dtype(layout.dtype)


def true_part(tile: NDArray[Any], layout: Layout, seat: int) -> NDArray[Any]:
    """The tile of a seat without padding; a view.

    >>> from reshard.types import Mesh
    >>> true_part(np.arange(3), Layout.parse("s64[{x}3/5]", Mesh(x=2)), 1)
    array([0, 1])
    """
    return without_padding(layout, devices_by_id(layout.mesh)[seat], tile)


def _check_combines(layout: Layout, dtype: np.dtype[Any]) -> None:
    """Raises `TileError` if a layout is partial and numpy cannot combine the summands."""
    if layout.partial and not has_layout_name(dtype) and not can_combine(dtype, str(layout.reduction)):
        raise TileError(
            f"{layout} is still to be reduced ({layout.reduction}), but elements of dtype {dtype} cannot be; give "
            f"numbers, or a layout that is not partial"
        )


def check_out(out: object, layout: Layout, tile: NDArray[Any]) -> NDArray[Any]:
    """The array `out` if the result for this tile can be written to it; else raises `TileError`."""
    return _check_memory(check_tile(_numpy_array(out), layout, "out"), tile, tile.dtype)


def check_true_out(out: object, layout: Layout, seat: int, tile: NDArray[Any], budget: object) -> NDArray[Any]:
    """The array `out` if the result without padding can be copied to it; else raises `TileError`."""
    array, shape = _numpy_array(out), layout.tile_shape_of(devices_by_id(layout.mesh)[seat])
    if array.shape != shape:
        raise TileError(
            f"the out has shape {array.shape}, but without padding this rank's tile of {layout} has {shape}"
        )
    if budget is not None:
        raise TileError("out is without padding, so the result would be copied beside the budget; give no out")
    return _check_memory(array, tile, tile.dtype)


def _numpy_array(out: object) -> NDArray[Any]:
    if not isinstance(out, np.ndarray):
        raise TileError(f"out is a {type(out).__name__}; give a numpy array")
    return cast("NDArray[Any]", out)


def _check_memory(array: NDArray[Any], tile: NDArray[Any], dtype: np.dtype[Any] | None = None) -> NDArray[Any]:
    """An array for the result, which must be writeable and not the tile's memory, and of this dtype if one is given."""
    if dtype is not None and array.dtype != dtype:
        raise TileError(f"out is {array.dtype}, the tile {dtype}; give one dtype")
    if not array.flags.writeable:
        raise TileError("out is read-only; give an array that can be written to")
    if overlaps_itself(array):
        raise TileError(f"out has strides {array.strides}, so its elements share memory; give an array of its own")
    if np.may_share_memory(array, tile):
        raise TileError("out overlaps the tile; give memory of its own, or donate=True and no out")
    return array


def element_dtype(layout: Layout, dtype: DTypeLike | None) -> np.dtype[Any]:
    """The numpy dtype of a layout's elements: `dtype`, if it is given and fits, else the one of the layout's name.

    >>> from reshard.types import Mesh
    >>> element_dtype(Layout.parse("u64[8]", Mesh()), "M8[s]")
    dtype('<M8[s]')
    """
    try:
        element = numpy_dtype(layout.dtype) if dtype is None else np.dtype(dtype)
    except Exception as error:  # numpy asks what is given, which may be the caller's code.
        raise TileError(f"dtype {quoted(dtype)} is not one of numpy's ({error}); leave it out, or give one") from None
    if not represents_dtype(layout, element):
        advice = "" if element.isnative else "; give it in the byte order of this machine"
        raise TileError(f"dtype {element} does not fit {layout}, which is {layout.dtype}{advice}")
    _check_combines(layout, element)
    return element


def check_layout(layout: object, what: str) -> Layout:
    """The layout that is given, in any form that says all of it; raises `LayoutError` for anything else."""
    if isinstance(layout, Layout):
        return layout
    if not isinstance(layout, str) and hasattr(layout, "__array__") and not hasattr(layout, "sharding"):
        raise LayoutError(
            f"the {what} {quoted(layout)} is a {type(layout).__name__}, not a Layout; write redistribute(tile, source, "
            f"target, comm), or DistArray(layout, tile, comm)"
        )
    try:
        return as_layout(layout)
    except ReshardError as error:
        raise LayoutError(f"the {what} {error}") from None


def read_ends(source: Any, target: Any) -> tuple[Any, Any]:
    """Source and target as layouts, each with what the other one says of mesh, shape and dtype; what is no layout, or
    a tree of them, as it is: the ranks agree on an error before one is raised.
    """
    if any(isinstance(end, Mapping | Move | None) for end in (source, target)):
        return source, target
    with suppress(ReshardError):
        return as_layouts(source, target)
    return source, target


def check_options(
    donate: object, relabel: object, memory: object, cuda_aware: object = None, padded: object = True
) -> None:
    """Raises `PlanError` for options of a move that are not of their type."""
    if type(donate) is type(relabel) is type(padded) is bool and memory is None and cuda_aware is None:
        return
    for name, value in (("donate", donate), ("relabel", relabel), ("padded", padded), ("cuda_aware", cuda_aware)):
        if value is not None or name != "cuda_aware":
            checked_flag(value, name)
    if not isinstance(memory, Account | None):
        raise PlanError(
            f"memory={quoted(memory)} is a {type(memory).__name__}; give a reshard.runtime.Account, or None"
        )


def check_root(root: object, size: int) -> None:
    """Raises `PlanError` unless `root` is a rank of a communicator of `size`, or None."""
    if root is not None and whole(root, 0, size - 1) is None:
        raise PlanError(
            f"root {quoted(root)} is not a rank of a communicator of {size}; give 0 to {size - 1}, or None for all"
        )


def check_fill(value: object, layout: Layout, dtype: np.dtype[Any]) -> None:
    """Raises `TileError` unless the elements of a tile can be set to `value`."""
    if isinstance(value, Sized) and not hasattr(value, "shape") and count_items(value) not in (1, *layout.tile_shape):
        raise TileError(f"the value {quoted(value)} does not broadcast to tiles of {layout}; give a number")
    try:
        shape = np.shape(cast("Any", value))
        np.empty(shape, dtype)[...] = value
        fits = np.broadcast_shapes(shape, layout.tile_shape) == layout.tile_shape
    except Exception as error:  # What converts itself to an array is the caller's code.
        raise TileError(f"the value {quoted(value)} is not one of dtype {dtype}: {error}") from None
    if not fits:
        raise TileError(f"the value has shape {shape}, but tiles of {layout} have {layout.tile_shape}; give a number")


def check_global(array: Any, layout: Layout, dtype: np.dtype[Any]) -> None:
    """Raises `TileError` unless `array` has the layout's global shape and this dtype, in any byte order."""
    whole = in_native_order(_array_of(array, "array"))
    if array is None or whole.shape != layout.shape or whole.dtype != dtype:
        actual = "None" if array is None else f"of shape {whole.shape} and dtype {whole.dtype}"
        raise TileError(f"the array is {actual}, but {layout} is one of shape {layout.shape} and dtype {dtype}")


def check_not_partial(layout: Layout) -> Layout:
    """The layout itself; raises `LayoutError` if it is partial, so that a tile's values are not yet the array's."""
    if layout.partial:
        raise LayoutError(f"{layout} is still to be summed: redistribute it to a layout that is not partial first")
    return layout


def replicate_layout(layout: Layout, mesh: Mesh) -> Layout:
    """The layout of the same array, whole on every device of a mesh."""
    return Layout.tiled(mesh, layout.shape, layout.dtype, [[] for _ in layout.shape])


def with_ranks_as_ids(layout: Layout, size: int) -> Layout:
    """The same layout on devices that are called as the ranks of a communicator of `size` that have their tiles.

    >>> from reshard.types import Mesh
    >>> with_ranks_as_ids(Layout.parse("f32[{x}2]", Mesh({"x": 2}, device_ids=[7, 2])), 2).mesh.devices
    (1, 0)
    """
    ranks = rank_of_devices((layout.mesh,), size)
    ids = [ranks[device] for device in layout.mesh.devices]
    return replace(layout, mesh=Mesh(layout.mesh.axes, device_ids=ids))


def relabelled(source: Layout, target: Layout) -> Layout:
    """The target with its tiles assigned to other ranks: the same mesh axes with other `device_ids`.

    No other assignment leaves more elements in place (scipy's `linear_sum_assignment`). Raises `PlanError` without
    scipy. In this example both ranks hold each other's tile of the target, so that swapping the ids saves the move:

    >>> source = Layout.parse("f32[{x}4, 4]", Mesh(x=2))
    >>> target = Layout.parse("f32[{x}4, 4]", Mesh({"x": 2}, device_ids=[1, 0]))
    >>> relabelled(source, target) == source
    True
    """
    check_layout(source, "source")
    check_layout(target, "target")
    if source.shape != target.shape:
        raise PlanError(
            f"source {source} has global shape {source.shape}, target {target} has {target.shape}; give two layouts of "
            f"one array"
        )
    try:
        assign: Any = import_module("scipy.optimize").linear_sum_assignment
    except ImportError:
        raise PlanError("relabel=True needs scipy: pip install scipy") from None
    kept = count_retained(source, target)
    size = len(kept)
    # Among assignments that keep equally many elements, prefer the one that moves the fewest tiles to another rank.
    weights = kept * (size + 1) + np.eye(size, dtype=kept.dtype)
    tiles: list[int] = assign(weights, maximize=True)[1].tolist()
    devices = devices_by_id(target.mesh)
    taker = {devices[tile]: devices[rank] for rank, tile in enumerate(tiles)}
    mesh = Mesh(target.mesh.axes, device_ids=[taker[device] for device in target.mesh.devices])
    return replace(target, mesh=mesh)


def count_retained(source: Layout, target: Layout) -> NDArray[np.int64]:
    """At [r, t], how many elements of the target's tile t its r-th device already holds, by ascending device id.

    >>> rows, columns = (Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}4, 6]", "f32[8, {x}3]"))
    >>> count_retained(rows, rows).tolist(), count_retained(rows, columns).tolist()
    ([[24, 0], [0, 24]], [[12, 12], [12, 12]])
    """
    devices, held = devices_by_id(target.mesh), set(source.mesh.devices)
    before = [source.mesh.position(device) for device in devices if device in held]
    after = [target.mesh.position(device) for device in devices]
    counts = np.ones((len(before), len(after)), np.int64)
    for s, t in zip(source.dims, target.dims, strict=True):
        common = shared_elements(s, t)
        rows = [number_piece(s, source.mesh, position) for position in before]
        columns = [number_piece(t, target.mesh, position) for position in after]
        counts *= np.array([[common[column].get(row, 0) for column in columns] for row in rows], np.int64).reshape(
            counts.shape
        )
    kept = np.zeros((len(after), len(after)), np.int64)
    kept[[device in held for device in devices]] = counts
    return kept
