"""The mixin that makes an array in tiles one that numpy's operators, functions and protocols understand."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import DTypeLike

from reshard.errors import TileError
from reshard.mpi.numpy_protocol import array_functions, contractions, reductions, views
from reshard.mpi.numpy_protocol.elementwise import call_ufunc
from reshard.mpi.numpy_protocol.tiled import INSTEAD, TiledArray, finish_sum, take_tile
from reshard.mpi.tiles import replicate_layout


class NumpyMethods(TiledArray, NDArrayOperatorsMixin):
    """numpy's operators, functions and methods; what is not here raises `TypeError`, and never runs on a tile alone.

    Reductions, products, comparisons of whole arrays, slices of split dims, and conversions to a number are collective.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.layout.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The elements' numpy dtype."""
        return self.tile.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the whole array, on all ranks."""
        return math.prod(self.shape)

    @property
    def T(self) -> Any:
        """The transpose; a view of the same tiles."""
        return views.transpose(self)

    @property
    def real(self) -> Any:
        """The real parts."""
        return array_functions.real(self)

    @property
    def imag(self) -> Any:
        """The imaginary parts."""
        return array_functions.imag(self)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """numpy's ufuncs: elementwise ones tile by tile, matmul and reductions by plans."""
        for operand in (*inputs, *options.get("out", ())):
            # An array of another kind has ufuncs of its own, which numpy asks next.
            if not isinstance(operand, TiledArray | np.ndarray | np.generic) and hasattr(operand, "__array_ufunc__"):
                return NotImplemented
        if ufunc is np.matmul and method == "__call__" and not options:
            return contractions.matmul(*inputs)
        # `np.add.reduce(a)` comes here, `np.sum(a)` to `__array_function__`.
        if method == "reduce" and ufunc in reductions.OF_UFUNCS:
            return _reduce(ufunc, *inputs, **options)
        if method != "__call__":
            raise TypeError(f"{ufunc.__name__}.{method} of a DistArray is not implemented; {INSTEAD}")
        return call_ufunc(ufunc, inputs, options)

    def __array_function__(
        self, func: Any, types: Collection[type], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """numpy's functions, those that `array_functions` lists."""
        if not all(issubclass(each, TiledArray | np.ndarray) for each in types):
            return NotImplemented
        return array_functions.call_function(func, args, kwargs)

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        """Raises `TypeError`: gathering a distributed array is never implicit."""
        raise TypeError(f"a DistArray does not turn into a numpy array by itself; {INSTEAD}")

    def sum(self, axis: Any = None, dtype: DTypeLike | None = None, *, keepdims: bool = False) -> Any:
        """numpy's sum."""
        return reductions.reduce_array(reductions.SUM, self, axis, dtype, keepdims)

    def prod(self, axis: Any = None, dtype: DTypeLike | None = None, *, keepdims: bool = False) -> Any:
        """numpy's product."""
        return reductions.reduce_array(reductions.PRODUCT, self, axis, dtype, keepdims)

    def min(self, axis: Any = None, *, keepdims: bool = False) -> Any:
        """numpy's minimum; NaN if there is one."""
        return reductions.reduce_array(reductions.MINIMUM, self, axis, None, keepdims)

    def max(self, axis: Any = None, *, keepdims: bool = False) -> Any:
        """numpy's maximum; NaN if there is one."""
        return reductions.reduce_array(reductions.MAXIMUM, self, axis, None, keepdims)

    def mean(self, axis: Any = None, dtype: DTypeLike | None = None, *, keepdims: bool = False) -> Any:
        """numpy's mean."""
        return reductions.mean(self, axis, dtype, keepdims=keepdims)

    def any(self, axis: Any = None, *, keepdims: bool = False) -> Any:
        """Whether any element is true."""
        return reductions.reduce_array(reductions.ANY, self, axis, None, keepdims)

    def all(self, axis: Any = None, *, keepdims: bool = False) -> Any:
        """Whether all elements are true."""
        return reductions.reduce_array(reductions.ALL, self, axis, None, keepdims)

    def dot(self, other: Any) -> Any:
        """numpy's dot product."""
        return contractions.dot(self, other)

    def conj(self) -> Any:
        """The complex conjugate."""
        return np.conjugate(self)

    def transpose(self, *axes: Any) -> Any:
        """The array with its dims permuted, by default reversed; a view of the same tiles."""
        return views.transpose(self, _one_or_many(axes))

    def reshape(self, *shape: Any) -> Any:
        """The array with another shape, if its layout's digits allow that without communication."""
        return views.reshape(self, _one_or_many(shape) if shape else ())

    def astype(self, dtype: DTypeLike) -> Any:
        """A copy with elements of another dtype."""
        return array_functions.cast_array(self, dtype)

    def copy(self) -> Any:
        """A copy in private memory."""
        return array_functions.copy_array(self)

    def __copy__(self) -> Any:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.copy()

    def item(self) -> Any:
        """The one element of an array as a Python number; collective."""
        return self._element("item").item()

    def __getitem__(self, key: Any) -> Any:
        """A copy of a part; collective if a split dim is cut, since the dim is made local first."""
        return views.slice_array(self, key)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise TypeError("elements of a DistArray are written to a.tile, or chosen by np.where")

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a DistArray without dims")
        return self.shape[0]

    def __iter__(self) -> NoReturn:
        raise TypeError(f"a DistArray is not iterated over, which would gather every row; {INSTEAD}")

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

    def __bool__(self) -> bool:
        if self.size != 1:
            raise TileError(
                f"the truth value of an array of shape {self.shape} is ambiguous; use a.any() or a.all(), or {INSTEAD}"
            )
        return bool(self._element("bool"))

    def __float__(self) -> float:
        return float(self._element("float"))

    def __int__(self) -> int:
        return int(self._element("int"))

    def __complex__(self) -> complex:
        return complex(self._element("complex"))

    def __index__(self) -> int:
        if self.shape or self.dtype.kind not in "iu":
            raise TypeError("only an array of integers without dims is an index")
        return int(self._element("index"))

    def _element(self, name: str) -> Any:
        """The one element, on every rank."""
        if self.size != 1:
            raise TypeError(f"{name} of a DistArray of shape {self.shape}, which is not one number; {INSTEAD}")
        # Every rank gets the element, so that `if a.sum() > 0` goes the same way on all of them.
        whole = finish_sum(self)
        return take_tile(whole.redistribute(replicate_layout(whole.layout, whole.layout.mesh))).reshape(1)[0]


def _reduce(
    ufunc: np.ufunc, array: Any, axis: Any = 0, dtype: DTypeLike | None = None, keepdims: bool = False, **rest: Any
) -> Any:
    """`ufunc.reduce`, whose default is the first dim."""
    if not isinstance(array, TiledArray) or any(value is not None and value != (None,) for value in rest.values()):
        raise TypeError(f"{ufunc.__name__}.reduce of DistArrays takes axis, dtype and keepdims only; {INSTEAD}")
    kind = reductions.OF_UFUNCS[ufunc]
    if dtype is not None and kind not in (reductions.SUM, reductions.PRODUCT):
        raise TypeError(f"{ufunc.__name__}.reduce of DistArrays takes no dtype; {INSTEAD}")
    return reductions.reduce_array(kind, array, axis, dtype, keepdims)


def _one_or_many(given: tuple[Any, ...]) -> Any:
    """The sequence of a method that takes one sequence, or several numbers; None if it has no arguments."""
    if len(given) == 1:
        return given[0]
    return given or None
