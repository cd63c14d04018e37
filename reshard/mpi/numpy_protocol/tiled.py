"""What numpy's functions need of a distributed array, and the part of a tile that holds elements."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn, Self, TypeVar, cast

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from reshard.errors import LayoutError, TileError
from reshard.mpi.tiles import RAW
from reshard.runtime.on_mpi.indices import index_ranges
from reshard.runtime.on_mpi.team import Comm
from reshard.types import Digit, Dim, Layout, dtypes

Array = NDArray[Any]

SINGLE = Dim((), 1)
"""A dim of one element that every rank holds: it broadcasts against any other dim."""

INSTEAD = "use a.to_global(root=None) for the whole array on every rank, or each rank's a.tile"


class TiledArray(ABC):
    """An array in tiles, one per rank, that can be moved and made anew."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """The layout: which rank has which elements."""

    @property
    @abstractmethod
    def tile(self) -> Array:
        """This rank's tile, padding included."""

    @property
    @abstractmethod
    def comm(self) -> Comm:
        """The communicator."""

    @abstractmethod
    def redistribute(self, target: Layout) -> Self:
        """The same array in another layout; collective."""

    @abstractmethod
    def refuse(self, error: Exception) -> NoReturn:
        """Raises this rank's error on all ranks, in place of the collective call that the others make next."""
        raise error

    @abstractmethod
    def with_tile(self, layout: Layout, tile: Array) -> Self:
        """Another array on the same communicator, with a private tile."""


T = TypeVar("T")


def compute_together(array: TiledArray, waited_for: bool, function: Callable[[], T]) -> T:
    """What `function` makes of this rank's elements. If the other ranks go on to a collective call, so that they would
    wait for this one (`waited_for`), an exception is raised on all of them.

    Which ranks raise depends on their elements, for example where an overflow is an error (`np.errstate`).
    """
    try:
        return function()
    except Exception as error:
        # The others are on their way into a collective call, and would wait there until their time limit.
        if waited_for:
            array.refuse(error)
        raise


def is_split(layout: Layout, dims: Sequence[int]) -> bool:
    """Whether ranks combine what they make of these dims: an axis holds one of them, or the array is partial."""
    return bool(layout.partial) or any(list_axes(layout.dims[at]) for at in dims)


def measure_extents(layout: Layout, rank: int) -> tuple[int, ...]:
    """How many elements of each dim a rank's tile holds; they come first in the tile, padding last.

    The global index grows with the local one, so the indices past the end of a dim are the last ones of a tile.

    >>> from reshard.types import Mesh
    >>> [measure_extents(Layout.parse("f32[2{x}2/7]", Mesh(x=2)), rank) for rank in (0, 1)]
    [(4,), (3,)]
    """
    # Most layouts have no padding, and listing ranges takes longer than a small ufunc.
    return layout.tile_shape if layout.even else _extents(layout, rank)


@lru_cache(maxsize=512)
def _extents(layout: Layout, rank: int) -> tuple[int, ...]:
    return tuple(sum(map(len, ranges)) for ranges in index_ranges(layout, rank))


def take_tile(array: TiledArray) -> Array:
    """This rank's tile, padding included. Raises `TypeError` on all ranks if some have none."""
    if array.layout.mesh.size != array.comm.size:
        raise TypeError(
            f"numpy's functions take arrays with a tile on each of the {array.comm.size} ranks, and {array!r} is on "
            f"{array.layout.mesh}; move it to a layout on all ranks, or wrap its tiles with a communicator of its ranks"
        )
    return array.tile


def cut_padding(array: TiledArray) -> Array:
    """A view of this rank's tile without padding."""
    return take_tile(array)[(*map(slice, measure_extents(array.layout, array.comm.rank)), ...)]


def wrap_true_part(array: TiledArray, layout: Layout, values: Any) -> TiledArray:
    """A new array whose true part on this rank is `values`, which also name its dtype; padding is zero."""
    part = np.asarray(values)
    named = replace(layout, dtype=name_dtype(part.dtype))
    if part.shape == named.tile_shape:
        return array.with_tile(named, part)
    # Zeros, and not what the memory held: plans send padding along with the elements.
    tile = np.zeros(named.tile_shape, part.dtype)
    tile[tuple(map(slice, part.shape))] = part
    return array.with_tile(named, tile)


def name_dtype(dtype: np.dtype[Any]) -> str:
    """The layout dtype of a numpy dtype: its name, or the plain words of its size if it has no name in layouts.

    >>> name_dtype(np.dtype("float32")), name_dtype(np.dtype("M8[s]"))
    ('float32', 'uint64')
    """
    if not dtype.isnative:
        raise TileError(
            f"dtype {dtype} is not in this machine's byte order; take {dtype.newbyteorder('=')}, and cast it first or "
            f"afterwards where another order is needed"
        )
    if is_named(dtype):
        return dtypes.canonical(dtype)
    # Dates and the like move as words of their size; `check_arithmetic` sees to it that nothing is computed with these.
    words = [word for word in RAW if dtypes.bits(word) == 8 * dtype.itemsize]
    if dtype.hasobject or not words:
        raise TypeError(f"the result has dtype {dtype}, which a DistArray cannot hold; {INSTEAD}")
    return words[0]


def is_named(dtype: np.dtype[Any]) -> bool:
    """Whether layouts have a name for a numpy dtype."""
    try:
        dtypes.canonical(dtype)
    except LayoutError:
        return False
    return True


def check_arithmetic(name: str, array: TiledArray) -> None:
    """Raises `TypeError` for elements such as dates, whose layout dtype does not tell how to compute with them."""
    if not is_named(take_tile(array).dtype):
        raise TypeError(f"{name} of a DistArray of dtype {take_tile(array).dtype} is not implemented; {INSTEAD}")


def check_together(name: str, arrays: Sequence[TiledArray]) -> None:
    """Raises `LayoutError` unless the arrays are on one communicator, or on copies of one."""
    first = arrays[0].comm
    for other in arrays[1:]:
        # A congruent communicator has the same ranks in the same order, so tiles are where they are expected.
        if first is not other.comm and MPI.Comm.Compare(first, other.comm) not in (MPI.IDENT, MPI.CONGRUENT):
            raise LayoutError(f"{name} of arrays on different communicators; make both on one")


def finish_sum(array: TiledArray) -> TiledArray:
    """The array with its summands combined; itself if it is not partial."""
    return array.redistribute(replace(array.layout, partial=())) if array.layout.partial else array


def unwrap_scalar(array: TiledArray) -> Any:
    """The element of a 0-d array as numpy's scalar, as numpy's functions return it; other arrays as they are."""
    return take_tile(finish_sum(array))[()] if not array.layout.shape else array


def make_local_dim(size: int) -> Dim:
    """A dim that every rank holds whole."""
    return Dim((Digit(size, None),), size)


def list_axes(dim: Dim) -> list[Any]:
    """The sub-axes that hold digits of a dim, major first."""
    return [digit.axis for digit in dim.digits if digit.axis is not None]


def normalize_axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """numpy's `axis` as dims in ascending order: None means all. Raises numpy's errors.

    >>> normalize_axes(None, 2), normalize_axes((-1, 0), 3)
    ((0, 1), (0, 2))
    """
    if axis is None:
        return tuple(range(ndim))
    given = cast("tuple[Any, ...]", axis) if isinstance(axis, tuple) else (axis,)
    dims = [normalize_axis(each, ndim) for each in given]
    if len(set(dims)) != len(dims):
        raise ValueError(f"duplicate value in 'axis': {axis}")
    return tuple(sorted(dims))


def normalize_axis(axis: Any, ndim: int) -> int:
    """One axis as a dim from 0."""
    number = operator.index(axis)
    if not -ndim <= number < ndim:
        raise np.exceptions.AxisError(number, ndim)
    return number % ndim
