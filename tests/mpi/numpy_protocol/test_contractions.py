"""Products: dims that match, labels, and refused operands; on ranks in layouts that differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.errors import LayoutError
from tests.mpi import running
from tests.mpi.numpy_protocol.arrays import array, whole
from tests.mpi.sampling import sampled

A, B = np.arange(12.0).reshape(3, 4), np.arange(20.0).reshape(4, 5)


@pytest.mark.slow
@pytest.mark.parametrize(("topic", "ranks"), sampled(["layouts"], [2, 3, 4], ("layouts", 3)))
def test_products_on_ranks(topic: str, ranks: int, tmp_path: Path) -> None:
    running.check(f"numpy_protocol.special.{topic}", ranks, tmp_path)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((3, 4), (4, 5)),
        ((4,), (4, 5)),
        ((3, 4), (4,)),
        ((2, 3, 4), (4, 5)),
        ((2, 1, 3, 4), (7, 4, 5)),
        ((1, 1), (1, 1)),
    ],
)
def test_matmul(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    left, right = np.random.default_rng(0).random(one), np.random.default_rng(1).random(other)
    assert np.allclose(whole(array(left) @ array(right)), left @ right)


@pytest.mark.parametrize("axes", [0, 1, ([1], [0]), (1, 0), ((-1,), (0,))])
def test_tensordot(axes: object) -> None:
    assert np.allclose(whole(np.tensordot(array(A), array(B), axes)), np.tensordot(A, B, axes))  # pyright: ignore


def test_dot() -> None:
    assert array(A[0]).dot(array(A[1])) == A[0].dot(A[1])
    assert np.array_equal(whole(np.dot(array(A), array(B))), A @ B)
    assert np.array_equal(whole(np.dot(2, array(B))), 2 * B)
    flags = np.array([[True, False], [True, True]])
    assert np.array_equal(whole(array(flags) @ array(flags)), flags @ flags)


def test_refused() -> None:
    for call in (
        lambda: array(A) @ array(A),
        lambda: array(A) @ array(3.0),
        lambda: array(A) @ B,
        lambda: np.tensordot(array(A), array(B), 3),
        lambda: np.tensordot(array(A), array(B), ([0, 1], [0])),
    ):
        with pytest.raises(LayoutError):
            call()
    with pytest.raises(TypeError, match="to_global"):
        np.matmul(array(A), array(B), out=array(A))
