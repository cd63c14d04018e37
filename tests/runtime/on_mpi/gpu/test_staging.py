"""Tiles on GPUs: on a fake one everywhere, on a real one where there is one. See `tests.mpi.on_gpus`."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.runtime import Account
from reshard.runtime.on_mpi.gpu.cuda_arrays import Cuda, describe_array
from reshard.runtime.on_mpi.gpu.gpu_moves import DeviceStage
from tests.mpi.fake_gpu import TorchLike, gpus
from tests.mpi.moving import laid


@pytest.mark.parametrize("order", ["C", "F", "strided", "reversed"])
@pytest.mark.parametrize("chunk", [0, 1, 7, 1000])
def test_a_tile_goes_to_the_host_and_back(order: str, chunk: int):
    """In pinned chunks of any size, or in none; the account has both lanes' buffers meanwhile."""
    content = laid(np.arange(5 * 7 * 3, dtype="i4").reshape(5, 7, 3), order)
    with gpus() as driver:
        account = Account("int32")
        call = cast(Any, SimpleNamespace(memory=account, device=0))
        stage = DeviceStage(call, Cuda(driver, 0), chunk)
        host = np.zeros(content.shape, "i4")
        stage.to_host(describe_array(TorchLike.of(driver, content), "tile"), host)
        assert np.array_equal(host, content)
        back = TorchLike.of(driver, laid(np.zeros_like(content), order))
        stage.to_gpu(describe_array(back, "result"), host)
        assert np.array_equal(back.shadow, content)
        assert account.peak_bytes == 2 * chunk * 4
        assert account.live[0] == 0
        assert driver.most_pinned == 2 * chunk * 4
        assert not driver.current


def _driver() -> bool:
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


@pytest.mark.skipif(not _driver(), reason="no GPU at hand")
def test_a_real_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Torch, cupy and jax, those of them that are installed, two ranks on one GPU."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    running.check("on_gpus.hardware", 2, tmp_path)
