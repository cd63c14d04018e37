"""The mixin that makes an array in tiles one that numpy's operators, functions and protocols understand."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn, cast

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import DTypeLike

from reshard.errors import TileError, quoted
from reshard.mpi.numpy_protocol import array_reductions, array_views, contractions
from reshard.mpi.numpy_protocol.array_reductions import (
    ALL,
    ANY,
    MAXIMUM,
    MINIMUM,
    PRODUCT,
    SUM,
    reduce_array,
)
from reshard.mpi.numpy_protocol.tiled_array import (
    INSTEAD,
    ROWS,
    TiledArray,
    apply_elementwise,
    apply_to_array,
    call_ufunc,
    compute_together,
    cut_padding,
    finish_sum,
    is_split,
    lay_operands,
    lay_whole,
    layout_of_dtype,
    take_tile,
    unwrap_scalar,
    wrap_true_part,
)
from reshard.mpi.tile_checks import check_not_partial, replicate_layout


class NumpyMethods(TiledArray, NDArrayOperatorsMixin):
    """numpy's operators, functions and methods; what is not here raises `TypeError`, and never runs on a tile alone.

    Reductions, products, comparisons of whole arrays, slices of split dims, integers to the power of an array, and
    conversions to a number are collective.
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
        return array_views.transpose(self)

    @property
    def mT(self) -> Any:
        """The last two dims transposed; a view of the same tiles."""
        return array_views.moveaxis(self, -1, -2)

    @property
    def real(self) -> Any:
        """The real parts."""
        return apply_to_array("real", lambda part: np.real(part).copy(), self)

    @property
    def imag(self) -> Any:
        """The imaginary parts."""
        return apply_to_array("imag", lambda part: np.imag(part).copy(), self)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """numpy's ufuncs: elementwise ones tile by tile, matmul and reductions by plans."""
        for operand in (*inputs, *options.get("out", ())):
            # An array of another kind has ufuncs of its own, which numpy asks next.
            if not isinstance(operand, TiledArray | np.ndarray | np.generic) and hasattr(operand, "__array_ufunc__"):
                return NotImplemented
        # `np.add.reduce(a)` comes here, `np.sum(a)` to `__array_function__`.
        if method == "reduce" and ufunc in array_reductions.OF_UFUNCS:
            return _reduce(ufunc, *inputs, **options)
        if method == "accumulate" and ufunc in (np.add, np.multiply) and not options.keys() - {"axis", "dtype"}:
            return array_reductions.accumulate(ufunc, *inputs, **{"axis": 0, **options})
        if method != "__call__":
            raise TypeError(f"{ufunc.__name__}.{method} of a DistArray is not implemented; {INSTEAD}")
        if ufunc is np.matmul and not options:
            return contractions.matmul(*inputs)
        if ufunc is getattr(np, "vecdot", None) and not options.keys() - {"axis"}:
            return vecdot(*inputs, **options)
        if ufunc is np.power:
            inputs = tuple(lay_operands("power", inputs, *options.get("out", ())[:1]))
            _check_powers(inputs[0], inputs[1], options.get("dtype"))
        return call_ufunc(ufunc, inputs, options)

    def __array_function__(
        self, func: Any, types: Collection[type], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """numpy's functions, those of `FUNCTIONS`. Raises `TypeError` for others, and for options that they lack."""
        if not all(issubclass(each, TiledArray | np.ndarray) for each in types):
            return NotImplemented
        name = f"{func.__module__}.{func.__name__}"
        run = FUNCTIONS.get(func)
        if run is None:
            cure = {"take": f"for rows {ROWS}, ", **dict.fromkeys(_OF_HALOS, "for a stencil a.halo(width), ")}
            raise TypeError(f"{name} is not implemented for DistArrays; {cure.get(func.__name__, '')}{INSTEAD}")
        # numpy's own functions pass on options that have no effect.
        nothing = np._NoValue  # pyright: ignore
        given = {key: value for key, value in kwargs.items() if value is not nothing and (key, value) != ("out", None)}
        signature = _read_signature(run)
        if not args and "self" in signature.parameters:  # numpy calls the array a, x, m or val.
            args = tuple([given.pop(key) for key, value in kwargs.items() if isinstance(value, TiledArray)][:1])
        try:
            # Binding first: a wrong option is refused before any rank communicates.
            bound = signature.bind(*args, **given)
        except TypeError as error:
            taken = ", ".join(signature.parameters)
            raise TypeError(f"{name} of a DistArray takes {taken} only ({error}); {INSTEAD}") from None
        return run(*bound.args, **bound.kwargs)

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        """numpy, whose functions take distributed arrays; what it creates is whole on every rank, and goes along."""
        return np

    @property
    def device(self) -> str:
        """Where the array API standard has tiles: in the memory of the host, as numpy's arrays."""
        return "cpu"

    def to_device(self, device: str, /, *, stream: object = None) -> Any:
        """The array itself: its tiles are where the standard's "cpu" is."""
        if device != "cpu":
            raise TileError(
                f"device {quoted(device)}: the tiles of a DistArray are in the memory of the host; give 'cpu'"
            )
        return self

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        """Raises `TypeError`: gathering a distributed array is never implicit."""
        raise TypeError(f"a DistArray does not turn into a numpy array by itself; {INSTEAD}")

    def sum(self, axis: Any = None, dtype: DTypeLike | None = None, *, keepdims: bool = False) -> Any:
        """numpy's sum."""
        return reduce_array(SUM, self, axis, dtype, keepdims)

    def prod(self, axis: Any = None, dtype: DTypeLike | None = None, *, keepdims: bool = False) -> Any:
        """numpy's product."""
        return reduce_array(PRODUCT, self, axis, dtype, keepdims)

    def min(self, axis: Any = None, *, keepdims: bool = False) -> Any:
        """numpy's minimum; NaN if there is one."""
        return reduce_array(MINIMUM, self, axis, None, keepdims)

    def max(self, axis: Any = None, *, keepdims: bool = False) -> Any:
        """numpy's maximum; NaN if there is one."""
        return reduce_array(MAXIMUM, self, axis, None, keepdims)

    def mean(self, axis: Any = None, dtype: DTypeLike | None = None, *, keepdims: bool = False) -> Any:
        """numpy's mean."""
        return array_reductions.mean(self, axis, dtype, keepdims=keepdims)

    def var(
        self, axis: Any = None, dtype: DTypeLike | None = None, *, ddof: float = 0, correction: float = 0,
        keepdims: bool = False,
    ) -> Any:  # fmt: skip
        """numpy's variance."""
        return unwrap_scalar(array_reductions.variance(self, axis, dtype, ddof or correction, keepdims))

    def std(
        self, axis: Any = None, dtype: DTypeLike | None = None, *, ddof: float = 0, correction: float = 0,
        keepdims: bool = False,
    ) -> Any:  # fmt: skip
        """numpy's standard deviation."""
        spread = array_reductions.variance(self, axis, dtype, ddof or correction, keepdims)
        return unwrap_scalar(apply_to_array("std", np.sqrt, spread))

    def argmin(self, axis: int | None = None, *, keepdims: bool = False) -> Any:
        """Where the first smallest element is; NaN comes before all others."""
        return array_reductions.locate_extremum(MINIMUM, self, axis, keepdims)

    def argmax(self, axis: int | None = None, *, keepdims: bool = False) -> Any:
        """Where the first largest element is; NaN comes before all others."""
        return array_reductions.locate_extremum(MAXIMUM, self, axis, keepdims)

    def cumsum(self, axis: int | None = None, dtype: DTypeLike | None = None) -> Any:
        """numpy's sums of all elements so far, in the layout of the array."""
        return array_reductions.accumulate(np.add, self, axis, dtype)

    def cumprod(self, axis: int | None = None, dtype: DTypeLike | None = None) -> Any:
        """numpy's products of all elements so far, in the layout of the array."""
        return array_reductions.accumulate(np.multiply, self, axis, dtype)

    def clip(self, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Any:
        """The elements, none below the first bound or above the second."""
        low, high = min if a_min is None else a_min, max if a_max is None else a_max
        return apply_elementwise("clip", np.clip, self, low, high)

    def round(self, decimals: int = 0) -> Any:
        """The elements, rounded to so many decimals."""
        return apply_to_array("round", lambda part: np.round(part, decimals), self)

    def squeeze(self, axis: Any = None) -> Any:
        """A copy without dims of one element."""
        return array_views.squeeze(self, axis)

    def ravel(self) -> Any:
        """The elements in one dim, if the layout allows that without communication."""
        return array_views.reshape(self, -1)

    def any(self, axis: Any = None, *, keepdims: bool = False) -> Any:
        """Whether any element is true."""
        return reduce_array(ANY, self, axis, None, keepdims)

    def all(self, axis: Any = None, *, keepdims: bool = False) -> Any:
        """Whether all elements are true."""
        return reduce_array(ALL, self, axis, None, keepdims)

    def dot(self, other: Any) -> Any:
        """numpy's dot product."""
        return contractions.dot(self, other)

    def conj(self) -> Any:
        """The complex conjugate; of real numbers a copy, of the same dtype."""
        return apply_to_array("conj", lambda part: part.conj().copy(), self)

    def transpose(self, *axes: Any) -> Any:
        """The array with its dims permuted, by default reversed; a view of the same tiles."""
        return array_views.transpose(self, axes[0] if len(axes) == 1 else axes or None)

    def reshape(self, *shape: Any) -> Any:
        """The array with another shape, if its layout's digits allow that without communication."""
        return array_views.reshape(self, shape[0] if len(shape) == 1 else shape)

    def astype(self, dtype: DTypeLike, *, copy: bool = True) -> Any:
        """A copy with elements of another dtype; the array itself where it has it already and `copy` is False."""
        check_not_partial(self.layout)
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        return wrap_true_part(self, self.layout, cut_padding(self).astype(dtype))

    def copy(self) -> Any:
        """A copy in private memory."""
        return self.with_tile(self.layout, take_tile(self).copy())

    def __copy__(self) -> Any:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.copy()

    def take(self, *_: object, **__: object) -> NoReturn:
        """Raises `TypeError`: `gather_rows` takes rows."""
        raise TypeError(f"take is not implemented for DistArrays; for rows {ROWS}, {INSTEAD}")

    def item(self) -> Any:
        """The one element of an array as a Python number; collective."""
        return self._element("item").item()

    def __getitem__(self, key: Any) -> Any:
        """A copy of a part; collective if a split dim is cut, since the dim is made local first."""
        return array_views.slice_array(self, key)

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
    kind = array_reductions.OF_UFUNCS[ufunc]
    if dtype is not None and kind not in (SUM, PRODUCT):
        raise TypeError(f"{ufunc.__name__}.reduce of DistArrays takes no dtype; {INSTEAD}")
    return reduce_array(kind, array, axis, dtype, keepdims)


def _check_powers(base: Any, exponent: Any, dtype: Any) -> None:
    """Raises on all ranks numpy's error for negative powers of integers, of which some ranks may have none.

    Collective if an array of signed integers is the exponent.
    """
    arrays = [each for each in (base, exponent) if isinstance(each, NumpyMethods)]
    if any(0 in array.shape for array in arrays):
        return
    # Of Python's own numbers numpy takes the value: -1 as the power of unsigned integers it refuses on all ranks.
    given: list[Any] = [each.dtype if isinstance(each, NumpyMethods) else each for each in (base, exponent)]
    for each in given:
        number = np.empty((), cast("Any", each)) if isinstance(each, np.dtype) else np.asarray(each)
        if number.dtype.kind not in "biu" or number.ndim:  # An array of another kind is refused wherever it stands.
            return
    if np.result_type(*given if dtype is None else [dtype]).kind != "i":
        return
    negative = exponent < 0
    if reduce_array(ANY, negative) if isinstance(negative, TiledArray) else negative:
        raise ValueError("Integers to negative integer powers are not allowed.")


# numpy's functions.


def where(condition: Any, x: Any, y: Any) -> Any:
    """numpy's `where` with three arguments: with one, the shape of the result would depend on the data."""
    return apply_elementwise("where", np.where, condition, x, y)


def isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """numpy's `isclose`."""

    def compare(one: Any, other: Any) -> Any:
        return np.isclose(one, other, rtol, atol, equal_nan)

    return apply_elementwise("isclose", compare, a, b)


def allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """numpy's `allclose`; arrays of one shape may have different layouts."""
    one, other = _alike(a, b)
    first = one if isinstance(one, TiledArray) else other
    waited_for = is_split(first.layout, range(len(first.layout.shape)))
    # Where an overflow is an error, one rank's elements may raise it, before a reduction that the others enter.
    close = compute_together(first, waited_for, lambda: isclose(one, other, rtol, atol, equal_nan))
    return bool(reduce_array(ALL, close))


def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> bool:
    """numpy's `array_equal`, of distributed arrays in any layouts."""
    beside = a1 if isinstance(a1, TiledArray) else cast(TiledArray, a2)
    a1, a2 = (each if isinstance(each, TiledArray) else lay_whole("array_equal", beside, each) for each in (a1, a2))
    if a1.layout.shape != a2.layout.shape:
        return False
    one, other = _alike(a1, a2)
    local = np.array_equal(cut_padding(one), cut_padding(other), equal_nan)
    # One flag for each element of the part, so that a rank without elements counts as equal.
    equal = wrap_true_part(one, replace(one.layout, dtype="bool"), np.full(cut_padding(one).shape, local))
    return bool(reduce_array(ALL, equal))


def _alike(one: Any, other: Any) -> tuple[Any, Any]:
    """Both arrays finished, and the second in the first one's layout if they have one shape."""
    one, other = (finish_sum(each) if isinstance(each, TiledArray) else each for each in (one, other))
    if isinstance(one, TiledArray) and isinstance(other, TiledArray) and one.layout.shape == other.layout.shape:
        other = other.redistribute(replace(one.layout, dtype=other.layout.dtype))
    return one, other


def full_like(a: TiledArray, fill_value: Any, dtype: DTypeLike | None = None) -> TiledArray:
    """An array of one value, in the layout of another one."""
    check_not_partial(a.layout)
    element = take_tile(a).dtype if dtype is None else np.dtype(dtype)
    tile = np.full(a.layout.tile_shape, fill_value, element)
    return a.with_tile(layout_of_dtype(a.layout, element), tile)


def _zeros_like(a: TiledArray, dtype: DTypeLike | None = None) -> TiledArray:
    return full_like(a, 0, dtype)


def _ones_like(a: TiledArray, dtype: DTypeLike | None = None) -> TiledArray:
    return full_like(a, 1, dtype)


def _size_of(a: NumpyMethods, axis: int | None = None) -> int:
    return a.size if axis is None else a.shape[axis]


def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """numpy's products of vectors along a dim, of dtypes that stay, where a sum of integers has a wider one."""
    left, right = lay_operands("vecdot", (x1, x2))
    product: Any = left.conj() * right
    return product.sum(axis=axis, dtype=product.dtype)


def result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    """numpy's dtype of what is computed with arrays, dtypes and numbers."""
    given = [each.dtype if isinstance(each, NumpyMethods) else each for each in arrays_and_dtypes]
    return np.result_type(*given)


def count_nonzero(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    """numpy's number of elements that are not zero."""
    return reduce_array(SUM, a != 0, axis, None, keepdims)


def _make_reader(name: str) -> Callable[..., Any]:
    def read(self: NumpyMethods) -> Any:
        return getattr(self, name)

    return read


_read_signature = lru_cache(inspect.signature)

_OF_HALOS = ("roll", "pad", "gradient", "convolve")
"""numpy's functions of neighbours, which a wider tile serves."""

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.sum: NumpyMethods.sum,
    np.prod: NumpyMethods.prod,
    np.min: NumpyMethods.min,
    np.max: NumpyMethods.max,
    np.any: NumpyMethods.any,
    np.all: NumpyMethods.all,
    np.mean: array_reductions.mean,
    np.linalg.norm: array_reductions.norm,
    np.dot: contractions.dot,
    np.tensordot: contractions.tensordot,
    np.transpose: array_views.transpose,
    np.reshape: array_views.reshape,
    np.concatenate: array_views.concatenate,
    np.where: where,
    np.isclose: isclose,
    np.allclose: allclose,
    np.array_equal: array_equal,
    np.copy: NumpyMethods.copy,
    np.var: NumpyMethods.var,
    np.std: NumpyMethods.std,
    np.argmin: NumpyMethods.argmin,
    np.argmax: NumpyMethods.argmax,
    np.cumsum: NumpyMethods.cumsum,
    np.cumprod: NumpyMethods.cumprod,
    np.clip: NumpyMethods.clip,
    np.round: NumpyMethods.round,
    np.around: NumpyMethods.round,
    np.count_nonzero: count_nonzero,
    np.squeeze: array_views.squeeze,
    np.expand_dims: array_views.expand_dims,
    np.flip: array_views.flip,
    np.moveaxis: array_views.moveaxis,
    np.stack: array_views.stack,
    np.ravel: NumpyMethods.ravel,
    np.full_like: full_like,
    np.zeros_like: _zeros_like,
    np.ones_like: _ones_like,
    np.empty_like: _zeros_like,
    np.result_type: result_type,
    np.shape: _make_reader("shape"),
    np.ndim: _make_reader("ndim"),
    np.size: _size_of,
    np.real: _make_reader("real"),
    np.imag: _make_reader("imag"),
}
if hasattr(np, "matvec"):  # from numpy 2.2 on, with the array API's names
    FUNCTIONS.update(
        {
            np.astype: NumpyMethods.astype,
            np.matrix_transpose: _make_reader("mT"),
            np.linalg.matrix_transpose: _make_reader("mT"),
            np.linalg.tensordot: contractions.tensordot,
            np.linalg.matmul: contractions.matmul,
            np.linalg.vecdot: vecdot,
        }
    )
"""numpy's functions that distributed arrays have."""
