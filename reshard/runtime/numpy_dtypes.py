"""numpy's terms for the dtypes and reductions of layouts, and tiles as its arrays."""

from __future__ import annotations

import importlib
from collections.abc import Sequence, Sized
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.errors import ReshardError, TileError, quoted
from reshard.types.reductions import UFUNCS, identity
from reshard.types.whole import counted


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
    if not listed or any(shape and counted(tile) == shape[0] for shape in shapes):
        with suppress(Exception):  # What converts itself to an array is the caller's code.
            return np.asarray(tile)
    raise TileError(
        f"device {device}'s tile {quoted(tile)} is not an array of shape {shapes[0]}, as the source's tiles are"
    )


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
