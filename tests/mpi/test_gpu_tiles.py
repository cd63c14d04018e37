"""`redistribute` for tiles on GPUs, on one rank and a fake GPU: what the topics of `on_gpus` do not show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.errors import TileError
from reshard.mpi import redistribute
from reshard.mpi.redistribution import MoveArguments
from reshard.types import Layout, Mesh
from tests.mpi.fake_gpu import Driver, TorchLike, gpus

LAYOUT = Layout.parse("s32[5, 7]", Mesh(x=1))
TURNED = Layout.parse("s32[5, 7]", Mesh(y=1))
CONTENT = np.arange(35, dtype=np.int32).reshape(5, 7)


@pytest.fixture
def driver() -> Iterator[Driver]:
    with gpus() as fake:
        yield fake


def test_relabelling_returns_the_layout_too(driver: Driver) -> None:
    pytest.importorskip("scipy")
    result, layout = redistribute(TorchLike.of(driver, CONTENT), LAYOUT, TURNED, MPI.COMM_SELF, relabel=True)
    assert layout == TURNED and np.array_equal(result.shadow, CONTENT)  # pyright: ignore


def test_a_tile_with_padding_is_not_cut(driver: Driver) -> None:
    rows, columns = (Layout.parse(text, Mesh(x=2)) for text in ("s32[{x}3/5, 7]", "s32[5, {x}4/7]"))
    tile = TorchLike.of(driver, CONTENT[:3])
    call = MoveArguments(tile, rows, columns, MPI.COMM_SELF, padded=False)
    with pytest.raises(TileError, match=r"padded=False: a tile of .* on a GPU has padding"):
        call._prepare(cast(Any, None))  # pyright: ignore[reportPrivateUsage]
