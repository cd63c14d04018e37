"""Reductions: NaN, empty parts, summands, and results in the dtypes of numpy; on ranks also in `conformance`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.errors import TileError
from reshard.mpi.numpy_protocol import reductions
from tests.mpi import running
from tests.mpi.numpy_protocol.arrays import array, whole
from tests.mpi.sampling import sampled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topic", "ranks"), sampled(["reductions", "errors"], [2, 3, 4], ("reductions", 3), ("errors", 3))
)
def test_reductions_on_ranks(topic: str, ranks: int, tmp_path: Path) -> None:
    running.check(f"numpy_protocol.special.{topic}", ranks, tmp_path)


@pytest.mark.fast(12)
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float32", "complex64"])
@pytest.mark.parametrize("name", ["sum", "prod", "mean", "min", "max", "any", "all"])
def test_dtypes(name: str, dtype: str) -> None:
    values = np.array([[1, 0, 3], [2, 1, 1]]).astype(dtype)
    for axis in (None, 0, (0, 1)):
        given, wanted = getattr(array(values), name)(axis=axis), getattr(values, name)(axis=axis)
        assert (given.dtype, given.shape) == (wanted.dtype, wanted.shape)
        assert np.array_equal(whole(given) if wanted.ndim else given, wanted)


def test_no_elements() -> None:
    nothing = array(np.zeros((0, 2)))
    assert nothing.sum() == 0 and nothing.all() and not nothing.any()
    assert np.linalg.norm(nothing, np.inf) == 0  # as newer versions of numpy have it; 1.26 raises
    with pytest.raises(TileError, match="no elements have no min"):
        nothing.min()
    assert whole(nothing.max(axis=1)).shape == (0,)


@pytest.mark.parametrize("order", [None, 0, 1, 2, 3, np.inf, -np.inf])
def test_norms_of_vectors(order: object) -> None:
    values = np.array([[3.0, -4.0, 0.0], [1.0, 2.0, 5.0]])
    for axis in (0, 1, -1):
        given = reductions.norm(array(values), order, axis)
        assert np.allclose(whole(given), np.linalg.norm(values, order, axis))  # pyright: ignore


@pytest.mark.parametrize("order", [None, "fro", 1, -1, np.inf, -np.inf])
def test_norms_of_matrices(order: object) -> None:
    values = np.array([[3.0, -4.0, 0.0], [1.0, 2.0, 5.0]])
    assert np.allclose(np.linalg.norm(array(values), order), np.linalg.norm(values, order))  # pyright: ignore
    kept = np.linalg.norm(array(values), order, (1, 0), keepdims=True)  # pyright: ignore
    assert np.allclose(whole(kept), np.linalg.norm(values, order, (1, 0), keepdims=True))  # pyright: ignore


def test_refused() -> None:
    for order in (2, "nuc"):
        with pytest.raises(TypeError, match="to_global"):
            np.linalg.norm(array(np.eye(2)), order)  # pyright: ignore
    with pytest.raises(ValueError, match="invalid norm order"):
        np.linalg.norm(array(np.ones(2)), "fro")
    with pytest.raises(TypeError, match="to_global"):
        np.sum(array(np.ones(2)), initial=3)
