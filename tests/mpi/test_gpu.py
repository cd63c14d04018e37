"""Tiles on GPUs: on a fake one everywhere, on a real one where there is one. See `tests.mpi.on_gpus`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_moves(ranks: int, tmp_path: Path):
    running.check("on_gpus.moves", ranks, tmp_path)


@pytest.mark.parametrize("topic", ["dtypes", "refused"])
def test_calls(topic: str, tmp_path: Path):
    running.check(f"on_gpus.{topic}", 2, tmp_path)


def test_where_a_dlpack_array_lies():
    """Numpy's arrays say so too: they are the real producer that every machine has."""
    from reshard.runtime.on_mpi.gpu import device_arrays

    for array in (np.arange(24.0).reshape(2, 3, 4)[:, ::2, 1:], np.array(np.float32(3)), np.zeros((0, 2), "i2")):
        found = device_arrays._by_dlpack(array)
        assert found.memory.address == array.ctypes.data or not array.size
        assert (found.shape, found.dtype) == (array.shape, array.dtype)
        assert found.memory.strides == array.strides or not array.size
        assert found.c_contiguous == array.flags.c_contiguous
        assert not device_arrays.on_gpu(array)


def test_the_driver_reads_the_description_of_a_copy_as_its_header_has_it():
    """Offsets of CUDA_MEMCPY2D_v2 in cuda.h, on machines of 64 bits."""
    from reshard.runtime.on_mpi.gpu.cuda import _Copy2D

    fields = ("src_type", "src_device", "src_pitch", "dst_type", "dst_device", "dst_pitch", "width", "height")
    assert [getattr(_Copy2D, name).offset for name in fields] == [16, 32, 48, 72, 88, 104, 112, 120]
    assert ctypes.sizeof(_Copy2D) == 128


def test_whether_mpi_takes_pointers_can_be_said(monkeypatch: pytest.MonkeyPatch):
    from reshard.errors import AgreementError
    from reshard.runtime.on_mpi.gpu import device_messages

    monkeypatch.setattr(device_messages, "_is_cuda_aware", lambda: False)
    assert not device_messages.takes_pointers()
    for said, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(device_messages.CUDA_AWARE, said)
        assert device_messages.takes_pointers() == expected
    monkeypatch.setenv(device_messages.CUDA_AWARE, "maybe")
    with pytest.raises(AgreementError, match="give 1 if MPI takes pointers"):
        device_messages.takes_pointers()


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
