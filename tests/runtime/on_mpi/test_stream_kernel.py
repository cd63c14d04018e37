"""The kernel exists where it should, and nowhere else."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator

import pytest

from reshard.runtime.on_mpi.stream_kernel import SWITCH, kernel


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    kernel.cache_clear()
    yield
    kernel.cache_clear()


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="no kernel for this processor")
def test_there_is_a_kernel() -> None:
    assert kernel() is not None


@pytest.mark.parametrize("what", ["system", "processor", "switch", "memory"])
def test_there_is_none(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if what == "system":
        monkeypatch.setattr("sys.platform", "darwin")
    elif what == "processor":
        monkeypatch.setattr("platform.machine", lambda: "aarch64")
    elif what == "switch":
        monkeypatch.setenv(SWITCH, "0")
    else:

        def refuse(*_: object) -> None:
            raise OSError("no memory")

        monkeypatch.setattr("mmap.mmap", refuse)
    assert kernel() is None
