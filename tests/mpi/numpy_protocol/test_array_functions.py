"""The table of numpy's functions: what is missing is refused by name, comparisons see all elements, and conversions."""

from __future__ import annotations

import copy

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.errors import TileError
from reshard.mpi.numpy_protocol.array_functions import FUNCTIONS
from tests.mpi.numpy_protocol.arrays import array, whole

A = np.arange(6.0).reshape(2, 3)


def test_comparisons() -> None:
    a, b = array(A), array(A + np.eye(2, 3))
    assert np.array_equal(a, array(A)) and not np.array_equal(a, b) and not np.array_equal(a, array(A.T))
    assert np.allclose(a, a + 1e-12) and not np.allclose(a, b) and np.allclose(array(A * 0), 0)
    nan = array(np.array([np.nan]))
    assert not np.array_equal(nan, nan) and np.array_equal(nan, nan, equal_nan=True)
    assert np.array_equal(array(np.zeros((0, 3))), array(np.zeros((0, 3))))
    with pytest.raises(TypeError, match="to_global"):
        np.array_equal(a, A)
    with pytest.raises(TypeError, match="to_global"):
        np.testing.assert_array_equal(a, a)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(TypeError, match=r"numpy\.cumsum is not implemented for DistArrays.*to_global"):
        np.cumsum(array(A))
    with pytest.raises(TypeError, match=r"numpy\.mean of a DistArray takes a.*to_global|takes array.*to_global"):
        np.mean(array(A), where=A > 1)
    with pytest.raises(TypeError, match="to_global"):
        np.where(array(A))
    assert np.sum(array(A), out=None) == A.sum()


def test_no_implicit_conversion() -> None:
    a = array(A)
    for call in (np.asarray, np.array, list, float, int, complex, iter, lambda a: a.item()):
        with pytest.raises(TypeError, match="to_global"):
            call(a)
    with pytest.raises(TileError, match=r"a\.any\(\) or a\.all\(\)"):
        bool(a == a)
    with pytest.raises(TileError, match="to_global"):
        bool(array(np.zeros(0)))
    with pytest.raises(TypeError, match="without dims"):
        len(array(1.0))
    assert (len(a), 4.0 in a, 9 in a) == (2, True, False)


def test_arrays_of_one_element_are_numbers() -> None:
    s = array(np.int64(3))
    assert (float(s), int(s), complex(s), bool(s), [5, 6, 7, 8][s], s.item()) == (3.0, 3, 3 + 0j, True, 8, 3)
    assert bool(array([[0.0]])) is False
    with pytest.raises(TypeError, match="is an index"):
        [1, 2][array(1.0)]  # pyright: ignore


def test_copies_and_dtypes() -> None:
    a = array(A)
    for made in (a.copy(), np.copy(a), copy.copy(a), copy.deepcopy(a)):
        assert np.array_equal(made, a) and not np.shares_memory(made.tile, a.tile)
    assert whole(a.astype("i4")).dtype == np.int32
    with pytest.raises(TileError, match="cast it first"):
        a.astype(">f8")
    assert whole(np.ones_like(a, dtype="complex64")).tolist() == np.ones_like(A).tolist()
    assert (np.shape(a), np.ndim(a), np.size(a), np.size(a, 1)) == ((2, 3), 2, 6, 3)
    z = array(A + 2j * A)
    assert np.array_equal(whole(z.real + z.imag), 3 * A) and np.array_equal(whole(z.conj()), A - 2j * A)


def test_every_function_is_one_of_numpys() -> None:
    assert all(callable(function) for function in FUNCTIONS)
