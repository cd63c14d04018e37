"""`redistribute` for tiles on GPUs, on one rank and a fake GPU. Several ranks are in tests/runtime/on_mpi."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.errors import TileError
from reshard.mpi import redistribute
from reshard.mpi.redistribution import MoveArguments, check_out_on_gpu
from reshard.runtime.on_mpi.gpu.cuda_arrays import describe_array
from reshard.types import Layout, Mesh
from tests.mpi.fake_gpu import CupyLike, Driver, JaxLike, TorchLike, gpus

LAYOUT = Layout.parse("s32[5, 7]", Mesh(x=1))
TURNED = Layout.parse("s32[5, 7]", Mesh(y=1))
CONTENT = np.arange(35, dtype=np.int32).reshape(5, 7)


@pytest.fixture
def driver() -> Iterator[Driver]:
    with gpus() as fake:
        yield fake


@pytest.mark.parametrize("kind", [TorchLike, CupyLike, JaxLike])
def test_the_result_is_of_the_tiles_library(driver: Driver, kind: Any) -> None:
    result = redistribute(kind.of(driver, CONTENT), LAYOUT, TURNED, MPI.COMM_SELF)
    assert isinstance(result, kind) and np.array_equal(result.shadow, CONTENT)


def test_relabelling_returns_the_layout_too(driver: Driver) -> None:
    pytest.importorskip("scipy")
    result, layout = redistribute(TorchLike.of(driver, CONTENT), LAYOUT, TURNED, MPI.COMM_SELF, relabel=True)
    assert layout == TURNED and np.array_equal(result.shadow, CONTENT)  # pyright: ignore


def test_an_out_that_fits(driver: Driver) -> None:
    tile, out = TorchLike.of(driver, CONTENT), TorchLike.of(driver, np.zeros((5, 7), "i4"))
    assert check_out_on_gpu(out, LAYOUT, describe_array(tile, "tile")).shape == (5, 7)
    assert redistribute(tile, LAYOUT, TURNED, MPI.COMM_SELF, out=out) is out  # pyright: ignore
    assert np.array_equal(out.shadow, CONTENT)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda driver, tile: CONTENT, "out is a ndarray, the tile lies on GPU 0"),
        (lambda driver, tile: JaxLike.of(driver, CONTENT), "out is a JaxLike"),
        (lambda driver, tile: TorchLike.of(driver, CONTENT[:, :6]), "the out has shape (5, 6)"),
        (lambda driver, tile: TorchLike.of(driver, CONTENT.astype("f4")), "the out is float32"),
        (lambda driver, tile: TorchLike.of(driver, CONTENT, 1), "out is on GPU 1, the tile on GPU 0"),
        (lambda driver, tile: tile, "out overlaps the tile"),
    ],
)
def test_an_out_that_does_not_fit(driver: Driver, make: Any, text: str) -> None:
    tile = TorchLike.of(driver, CONTENT)
    with pytest.raises(TileError) as caught:
        check_out_on_gpu(make(driver, tile), LAYOUT, describe_array(tile, "tile"))
    assert text in str(caught.value)


def test_a_tile_with_padding_is_not_cut(driver: Driver) -> None:
    rows, columns = (Layout.parse(text, Mesh(x=2)) for text in ("s32[{x}3/5, 7]", "s32[5, {x}4/7]"))
    tile = TorchLike.of(driver, CONTENT[:3])
    call = MoveArguments(tile, rows, columns, MPI.COMM_SELF, padded=False)
    with pytest.raises(TileError, match=r"padded=False: a tile of .* on a GPU has padding"):
        call._prepare(cast(Any, None))  # pyright: ignore[reportPrivateUsage]
