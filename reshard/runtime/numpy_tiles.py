"""numpy's terms for the dtypes and reductions of layouts, and tiles as its arrays."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence, Sized
from contextlib import suppress
from functools import lru_cache, reduce
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from reshard.errors import ReshardError, TileError, quoted
from reshard.geometry.holders import Tile, tile_of
from reshard.types.dims import Dim, number_piece
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.reductions import UFUNCS, identity
from reshard.types.whole import count_items


@lru_cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype of this name, or that of ml_dtypes (bfloat16, float8 and the like).

    Raises `ReshardError` for a dtype that numpy lacks if ml_dtypes is not installed, or too old to have it.

    >>> numpy_dtype("float32")
    dtype('float32')
    """
    if name == "bool" or hasattr(np, name):
        return np.dtype(name)
    try:
        return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except ImportError:
        raise ReshardError(f"numpy alone has no {name}; install ml_dtypes, or take another dtype") from None
    except AttributeError:
        raise ReshardError(f"this ml_dtypes has no {name}; install a newer one, or take another dtype") from None


def as_array(device: int, tile: Any, *shapes: tuple[int, ...]) -> NDArray[Any]:
    """A device's tile as an array; `TileError` for what is not one, found before any memory is taken for it.

    `shapes` are those that it may have.

    >>> as_array(0, [1, 2], (2,)).shape
    (2,)
    """
    listed = isinstance(tile, Sized) and not hasattr(tile, "shape")
    if not listed or any(shape and count_items(tile) == shape[0] for shape in shapes):
        with suppress(Exception):  # What converts itself to an array is the caller's code.
            return without_mask(tile)
    raise TileError(
        f"device {device}'s tile {quoted(tile)} is not an array of shape {shapes[0]}, as the source's tiles are"
    )


def without_mask(given: Any) -> NDArray[Any]:
    """What is given as a plain array; raises `TypeError` for a masked array that hides elements, which would move.

    >>> without_mask(np.ma.masked_array([1, 2], [False, True]))
    Traceback (most recent call last):
    TypeError: it hides elements behind a mask: give tile.filled(...)
    """
    kind: Any = np.ma.MaskedArray
    if isinstance(given, kind) and np.any(given.mask):
        raise TypeError("it hides elements behind a mask: give tile.filled(...)")
    return np.asarray(given)


def ufunc(reduction: str) -> np.ufunc:
    """The ufunc that combines two summands; the caller divides a mean by their number.

    >>> ufunc("max"), ufunc("mean")
    (<ufunc 'maximum'>, <ufunc 'add'>)
    """
    return getattr(np, UFUNCS[reduction])


def identities(reduction: str, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A tile of the value that a reduction leaves every other with, such as a zero for a sum.

    >>> identities("max", (2,), np.dtype("int8"))
    array([-128, -128], dtype=int8)
    """
    return np.full(tuple(shape), np.asarray(identity(dtype.name, reduction)).astype(dtype), dtype)


# Tiles as users have them: without padding, or in another byte order.
#
#     f32[{x}3/5] on <x=2>       device 1 has elements 3 and 4: a tile of 2, or of 3 with padding at the end
#
# A runtime works on tiles of one shape, padding included, in the machine's byte order. What is given otherwise is
# copied to such a tile. A tile without padding is a view of one with it.


Array = NDArray[Any]


def with_padding(layout: Layout, device: int, tile: Array) -> Array:
    """A device's tile without padding, copied to one with zeros for padding; a tile of any other shape unchanged.

    >>> from reshard.types import Mesh
    >>> with_padding(Layout.parse("f32[{x}3/5]", Mesh(x=2)), 1, np.array([3.0, 4.0]))
    array([3., 4., 0.])
    """
    if tile.shape == layout.tile_shape or tile.shape != layout.tile_shape_of(device):
        return tile
    padded = np.zeros(layout.tile_shape, tile.dtype)
    without_padding(layout, device, padded)[...] = tile
    return padded


def without_padding(layout: Layout, device: int, tile: Array) -> Array:
    """The elements of a device's tile; a view, or the tile itself if nothing of it is padding.

    >>> from reshard.types import Mesh
    >>> without_padding(Layout.parse("f32[{x}3/5]", Mesh(x=2)), 1, np.array([3.0, 4.0, 0.0]))
    array([3., 4.])
    """
    shape = layout.tile_shape_of(device)
    return tile if tile.shape == shape else tile[tuple(map(slice, shape))]


def in_native_order(array: Array) -> Array:
    """The array in the machine's byte order: itself, or a copy if it is one of numbers in the other order.

    >>> in_native_order(np.array([1, 2], ">i4")).dtype == np.dtype("i4")
    True
    """
    if array.dtype.isnative or array.dtype.kind not in "iufc":
        return array
    return array.astype(array.dtype.newbyteorder("="))


def tile_per_device(shapes: Mapping[int, Sequence[tuple[int, ...]]], tiles: object) -> dict[int, Array]:
    """The tiles, one for each device id, in the machine's byte order.

    `shapes` has those that each device's tile may have. Raises `TileError` if tiles are missing, unknown, or not
    arrays.

    >>> tile_per_device({7: [(2,)], 3: [(2,)]}, {3: [1, 2], 7: [3, 4]})
    {7: array([3, 4]), 3: array([1, 2])}
    """
    if not isinstance(tiles, Mapping):
        raise TileError(
            f"tiles are a {type(tiles).__name__}; give a dict of one tile per device id, such as layout.tiles(array)"
        )
    given = cast("Mapping[Any, Any]", tiles)
    # The keys are counted before any is read: there may be any number of them.
    if len(given) != len(shapes) or any(device not in given for device in shapes):
        missing = [device for device in shapes if device not in given]
        unknown = itertools.islice((device for device in given if device not in shapes), 8)
        raise TileError(
            f"tiles are given for {len(given)} devices, the plan has {len(shapes)} (missing {missing[:8]}, unknown "
            f"{quoted(list(unknown))}); give one tile per device id of the mesh"
        )
    return {device: in_native_order(as_array(device, given[device], *shapes[device])) for device in shapes}


def checked_tiles(devices: Sequence[int], shape: tuple[int, ...], dtype: str, tiles: object) -> dict[int, Array]:
    """The tiles of a program's source; raises `TileError` unless there is one of this shape and dtype per device.

    >>> checked_tiles((0,), (2,), "int64", {0: np.array([1, 2], ">i8")})
    {0: array([1, 2])}
    """
    checked = tile_per_device(dict.fromkeys(devices, (shape,)), tiles)
    for device, tile in checked.items():
        if tile.shape != shape:
            raise TileError(f"device {device}'s tile has shape {tile.shape}, the source's tiles have {shape}")
        if tile.dtype.name != dtype:
            raise TileError(f"device {device}'s tile is {tile.dtype.name}, the source is {dtype}; cast it first")
    return checked


def index_dim(dim: Dim, mesh: Mesh, position: int) -> NDArray[np.int64]:
    """The global index of every local index of a dim at a position of the mesh, without padding.

    >>> mesh = Mesh(x=4, y=2)
    >>> index_dim(Layout.parse("f32[2{x}2/15]", mesh).dims[0], mesh, 7)
    array([ 6,  7, 14])
    """
    if dim.pieces is None:
        index = np.zeros(1, np.int64)
        for radix, axis in dim.digits:
            values = np.arange(radix) if axis is None else mesh.coordinate(position, axis)
            index = (index[:, np.newaxis] * radix + values).reshape(-1)
        return index[index < dim.size]
    # A graph's rows by owner may be millions of runs, too many for a loop.
    mine = np.flatnonzero(np.asarray(dim.pieces.numbers) == number_piece(dim, mesh, position))
    starts, lengths = (np.asarray(table)[mine] for table in (dim.pieces.starts, dim.pieces.lengths))
    index: NDArray[np.int64] = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
    return index + np.arange(index.size)


def _locate_tile(layout: Layout, device: int) -> tuple[Any, ...]:
    """Where the elements of a device's tile are in the array: an index for numpy, of slices where that will do."""
    indices = [index_dim(dim, layout.mesh, layout.mesh.position(device)) for dim in layout.dims]
    # A slice is copied three times as fast as a list of indices.
    if all(len(index) and index[-1] - index[0] == len(index) - 1 for index in indices):
        return tuple(slice(index[0], index[-1] + 1) for index in indices)
    return np.ix_(*indices)


def cut_array(layout: Layout, array: Any, padded: bool = True) -> dict[int, Array]:
    """`Layout.tiles`."""
    whole = _check_array(array, layout.shape, layout.dtype, "the array")
    tiles: dict[int, Array] = {}
    for device in layout.mesh.devices:
        given = whole[_locate_tile(layout, device)]
        summand = layout.mesh.coordinates(layout.mesh.position(device), layout.partial)
        if any(summand) and layout.reduction in ("sum", "product"):
            given = identities(layout.reduction, given.shape, whole.dtype)
        tile = np.zeros(layout.tile_shape if padded else given.shape, whole.dtype)
        tile[tuple(map(slice, given.shape))] = given
        tiles[device] = tile
    return tiles


def assemble_array(layout: Layout, tiles: object) -> Array:
    """`Layout.assemble`."""
    shapes = {device: (layout.tile_shape, layout.tile_shape_of(device)) for device in layout.mesh.devices}
    summands: dict[tuple[int, ...], Array] = {}
    first: dict[Tile, int] = {}
    for device, given in tile_per_device(shapes, tiles).items():
        shape = layout.tile_shape if given.shape == layout.tile_shape else layout.tile_shape_of(device)
        tile = without_padding(layout, device, _check_array(given, shape, layout.dtype, f"device {device}'s tile"))
        held, at = tile_of(layout, device), _locate_tile(layout, device)
        # Each summand is an array of its own until all tiles are there.
        total = summands.setdefault(held[len(layout.dims) :], np.zeros(layout.shape, tile.dtype))
        if (holder := first.setdefault(held, device)) == device:
            total[at] = tile
        elif not np.all((total[at] == tile) | ((tile != tile) & (total[at] != total[at]))):
            raise TileError(
                f"devices {holder} and {device} both hold tile {held} of {layout}, and their elements differ; give "
                f"tiles of which copies are equal"
            )
    combined = reduce(ufunc(layout.reduction or "sum"), summands.values())
    if layout.reduction == "mean":
        combined = np.asarray(combined / len(summands)).astype(combined.dtype)
    return combined


def _check_array(given: Any, shape: tuple[int, ...], dtype: str, what: str) -> Array:
    """The array in the machine's byte order; raises `TileError` for another shape or dtype."""
    try:
        array = in_native_order(without_mask(given))
    except Exception as error:  # What converts itself to an array is the caller's code.
        raise TileError(f"{what} is a {type(given).__name__} that numpy cannot take ({error}); give an array") from None
    if array.shape != shape or array.dtype.name != dtype:
        raise TileError(f"{what} is {array.dtype.name}{[*array.shape]}; give {dtype}{[*shape]}, as the layout has it")
    return array
