"""numpy's terms for the dtypes and reductions of layouts."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from reshard.errors import ReshardError
from reshard.types.reductions import UFUNCS


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype of this name, or that of ml_dtypes (bfloat16, float8 and the like).

    Raises `ReshardError` for a dtype that numpy lacks if ml_dtypes is not installed.

    >>> numpy_dtype("float32")
    dtype('float32')
    """
    if hasattr(np, name) or name == "bool":
        return np.dtype(name)
    try:
        return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except ImportError:
        raise ReshardError(f"numpy alone has no {name}; install ml_dtypes, or take another dtype") from None


def ufunc(reduction: str) -> np.ufunc:
    """The ufunc that combines two summands; the caller divides a mean by their number.

    >>> ufunc("max"), ufunc("mean")
    (<ufunc 'maximum'>, <ufunc 'add'>)
    """
    return getattr(np, UFUNCS[reduction])
