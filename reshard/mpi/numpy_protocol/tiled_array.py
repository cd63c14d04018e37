"""What numpy's functions need of a distributed array, and elementwise functions, which each rank applies to its part.

A rank's tiles hold the same elements of every operand if their dims are equal, or have one element that every rank has,
which broadcasts as in numpy. Then no rank needs to communicate:

    a             f64[{x}2/7, 5]
    a.mean(0)     f64[5]            broadcasts: every rank has all 5
    a.T           f64[5, {x}2/7]    refused: a rank's tiles hold other elements than those of a

numpy's own arrays, and lists, are whole arrays: every rank gives the same one, and uses the part that lies like `a`.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn, Self, TypeVar, cast

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from reshard.errors import LayoutError, TileError
from reshard.lower.to_mpi import devices_by_id
from reshard.mpi.tile_checks import RAW, check_not_partial, has_layout_name
from reshard.runtime.numpy_tiles import without_mask
from reshard.runtime.on_mpi.global_array import global_indices
from reshard.runtime.on_mpi.team import Comm
from reshard.types import Digit, Dim, Layout, dtypes

Array = NDArray[Any]

SINGLE = Dim((), 1)
"""A dim of one element that every rank holds: it broadcasts against any other dim."""

INSTEAD = "use a.to_global(root=None) for the whole array on every rank, or each rank's a.tile"

ROWS = "a.gather_rows([0, 5]), each rank its own"
"""What to use for what numpy takes by a list of indices."""


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


@lru_cache(maxsize=512)
def measure_extents(layout: Layout, rank: int) -> tuple[int, ...]:
    """How many elements of each dim a rank's tile holds; they come first in the tile, padding last.

    >>> from reshard.types import Mesh
    >>> [measure_extents(Layout.parse("f32[2{x}2/7]", Mesh(x=2)), rank) for rank in (0, 1)]
    [(4,), (3,)]
    """
    return layout.tile_shape_of(devices_by_id(layout.mesh)[rank])


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
    layout, tile = array.layout, take_tile(array)
    # Most layouts have no padding, and looking extents up takes longer than a small ufunc.
    return tile if layout.even else tile[(*map(slice, measure_extents(layout, array.comm.rank)), ...)]


def wrap_true_part(array: TiledArray, layout: Layout, values: Any) -> TiledArray:
    """A new array whose true part on this rank is `values`, which also name its dtype; padding is zero."""
    part = np.asarray(values)
    named = layout_of_dtype(layout, part.dtype)
    if part.shape == named.tile_shape:
        return array.with_tile(named, part)
    # Zeros, and not what the memory held: plans send padding along with the elements.
    tile = np.zeros(named.tile_shape, part.dtype)
    tile[tuple(map(slice, part.shape))] = part
    return array.with_tile(named, tile)


# To make a layout takes ten times as long as a small ufunc: those that numpy's functions make are kept.
replaced: Callable[..., Layout] = lru_cache(maxsize=4096)(cast(Any, replace))


@lru_cache(maxsize=1024)
def layout_of_dtype(layout: Layout, dtype: np.dtype[Any]) -> Layout:
    """A layout for elements of a numpy dtype."""
    return replace(layout, dtype=name_dtype(dtype))


@lru_cache
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
    if has_layout_name(dtype):
        return dtypes.canonical(dtype)
    # Dates and the like move as words of their size; `check_arithmetic` sees to it that nothing is computed with these.
    words = [word for word in RAW if dtypes.bits(word) == 8 * dtype.itemsize]
    if dtype.hasobject or not words:
        raise TypeError(f"the result has dtype {dtype}, which a DistArray cannot hold; {INSTEAD}")
    return words[0]


def check_arithmetic(name: str, array: TiledArray) -> None:
    """Raises `TypeError` for elements such as dates, whose layout dtype does not tell how to compute with them."""
    if not has_layout_name(take_tile(array).dtype):
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
    return array.redistribute(replaced(array.layout, partial=())) if array.layout.partial else array


def unwrap_scalar(array: TiledArray) -> Any:
    """The element of a 0-d array as numpy's scalar, as numpy's functions return it; other arrays as they are."""
    return array if array.layout.dims else take_tile(finish_sum(array))[()]


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


# Elementwise functions.

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
    for out in outs:
        if not isinstance(out, TiledArray):
            raise TileError(f"{name}: out is a {type(out).__name__}; give a DistArray of the result's layout")
    if not outs:
        return apply_elementwise(name, lambda *parts: ufunc(*parts, **options), *inputs)
    # Without an array among the inputs, as in np.add(1, 2, out=a), the first output gives the layout.
    inputs = lay_operands(name, inputs, outs[0])
    layout = align_layouts(name, [each for each in inputs if isinstance(each, TiledArray)] or outs)
    for out in outs:
        if replace(out.layout, dtype=layout.dtype) != layout:
            raise LayoutError(
                f"{name}: out has layout {out.layout}, the result {layout}; redistribute one of them, or leave out out="
            )
    # Into views of the tiles: the padding of `out` stays what it is.
    ufunc(*map(_cut_operand, inputs), out=tuple(map(_cut_operand, outs)), **options)
    return outs[0] if len(outs) == 1 else outs


def apply_elementwise(name: str, function: Callable[..., Any], *operands: Any) -> Any:
    """Applies a function to the true parts of distributed arrays, and to numbers; a tuple of results stays one."""
    laid = lay_operands(name, operands)
    arrays = [each for each in laid if isinstance(each, TiledArray)]
    layout = align_layouts(name, arrays)
    results = function(*map(_cut_operand, laid))
    if isinstance(results, tuple):
        return tuple(wrap_true_part(arrays[0], layout, each) for each in cast("tuple[Any, ...]", results))
    return wrap_true_part(arrays[0], layout, results)


def apply_to_array(name: str, function: Callable[[Array], Any], array: TiledArray) -> TiledArray:
    """Applies a function to the true part of one array."""
    return apply_elementwise(name, function, array)


def align_layouts(name: str, arrays: Sequence[TiledArray]) -> Layout:
    """The layout of an elementwise result, of the first array's dtype.

    Raises `LayoutError` unless a rank's tiles hold the same elements of all arrays.
    """
    check_together(name, arrays)
    return _align_layouts(name, tuple([array.layout for array in arrays]))


@lru_cache(maxsize=1024)
def _align_layouts(name: str, layouts: tuple[Layout, ...]) -> Layout:
    layouts = tuple(map(check_not_partial, layouts))
    first, fits = layouts[0], all(layout.mesh == layouts[0].mesh for layout in layouts)
    common: list[Dim] = []
    for at in range(-max(len(layout.shape) for layout in layouts), 0):
        dims = {layout.dims[at] for layout in layouts if len(layout.dims) >= -at} - {SINGLE}
        if len({dim.size for dim in dims} - {1}) > 1:
            shapes = ", ".join(str(each.shape) for each in layouts)
            raise LayoutError(f"{name}: shapes {shapes} do not broadcast together")
        # A dim of one element in another layout than `SINGLE` is on some ranks alone, and does not broadcast on the
        # others.
        fits = fits and len(dims) <= 1
        common.append(dims.pop() if dims else SINGLE)
    if fits:
        with suppress(LayoutError):  # One axis holds dims of two operands.
            return replace(first, dims=tuple(common))
    shown = " and ".join(dict.fromkeys(f"{layout} on {layout.mesh!r}" for layout in layouts))
    raise LayoutError(
        f"{name} of arrays in layouts {shown}; redistribute one of them, so that the tiles of a rank have the same "
        f"elements"
    )


def lay_operands(name: str, operands: Sequence[Any], like: TiledArray | None = None) -> Sequence[Any]:
    """The operands of a function, whole arrays among them as distributed ones beside the one with most dims, or `like`.

    Raises `LayoutError` for what is neither an array nor a number.
    """
    if all([type(each) in _NUMBERS or isinstance(each, TiledArray) for each in operands]):
        return operands
    arrays = [each for each in operands if isinstance(each, TiledArray)] or [cast(TiledArray, like)]
    beside = max(arrays, key=lambda array: len(array.layout.dims))
    return [
        each if isinstance(each, TiledArray) or not np.ndim(each) else lay_whole(name, beside, each)
        for each in operands
    ]


_NUMBERS = {int, float, complex, bool, np.float64, np.int64, type(None)}
"""Types of numbers that need no second look: most are."""


def lay_whole(name: str, array: TiledArray, given: Any, split: bool = True) -> TiledArray:
    """An array that every rank has whole, as a distributed one; with `split`, dims are as those of another array."""
    if not isinstance(given, np.ndarray | list | tuple):
        raise LayoutError(
            f"{name} of a DistArray and a {type(given).__name__} of shape {np.shape(given)}; give a number, numpy's "
            f"array of all elements, or a DistArray of layout {array.layout}"
        )
    whole = without_mask(given)
    at_hand = array.layout.dims[-whole.ndim :] if split and whole.ndim else ()
    beside = [*[SINGLE] * (whole.ndim - len(at_hand)), *at_hand]
    dims = [
        SINGLE if size == 1 else dim if dim.size == size else make_local_dim(size)
        for dim, size in zip(beside, whole.shape, strict=True)
    ]
    layout = Layout(array.layout.mesh, tuple(dims), name_dtype(whole.dtype))
    for at, dim in enumerate(dims):
        if list_axes(dim):
            whole = whole.take(global_indices(layout, at, array.comm.rank), at)
    return wrap_true_part(array, layout, whole.copy() if whole is given else whole)


def _cut_operand(operand: Any) -> Any:
    return cut_padding(operand) if isinstance(operand, TiledArray) else operand
