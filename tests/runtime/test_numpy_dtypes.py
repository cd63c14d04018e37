"""numpy's dtypes and ufuncs for those of layouts."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from reshard.errors import ReshardError
from reshard.runtime.numpy_tiles import numpy_dtype, ufunc
from reshard.types import dtypes
from reshard.types.reductions import REDUCTIONS

SMALL = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int4", "uint4"]


@pytest.mark.parametrize("name", ["bool", "int8", "uint64", "float16", "float64", "complex128"])
def test_dtypes_of_numpy(name: str):
    assert numpy_dtype(name) == np.dtype(name)
    assert numpy_dtype(name).itemsize == dtypes.nbytes(1, name)


@pytest.mark.parametrize("name", SMALL)
def test_dtypes_of_ml_dtypes(name: str):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert numpy_dtype(name) == np.dtype(getattr(ml_dtypes, name))
    assert numpy_dtype(name).name == name


def test_advice_where_ml_dtypes_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ReshardError, match="numpy alone has no bfloat16; install ml_dtypes"):
        numpy_dtype("bfloat16")
    assert numpy_dtype("float32") == np.float32


def test_advice_where_ml_dtypes_is_too_old(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", ModuleType("ml_dtypes"))
    with pytest.raises(ReshardError, match="this ml_dtypes has no int2; install a newer one"):
        numpy_dtype("int2")


def test_a_ufunc_for_each_reduction():
    """By a pair of values; a mean is divided by the caller."""
    combined = {reduction: float(ufunc(reduction)(3.0, 5.0)) for reduction in REDUCTIONS}
    assert combined == {"sum": 8.0, "mean": 8.0, "max": 5.0, "min": 3.0, "product": 15.0}
