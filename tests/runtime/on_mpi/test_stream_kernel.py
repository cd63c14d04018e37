"""The kernel exists where it should and nowhere else, and its bytes are those of its listing."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard.runtime.on_mpi.copies import stream_copy
from reshard.runtime.on_mpi.copies.stream_copy import SWITCH, kernel


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    kernel.cache_clear()
    yield
    kernel.cache_clear()


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="no kernel for this processor")
def test_there_is_a_kernel() -> None:
    assert kernel() is not None


@pytest.mark.skipif(shutil.which("as") is None or shutil.which("objcopy") is None, reason="no GNU assembler here")
def test_the_bytes_are_those_of_the_instructions(tmp_path: Path) -> None:
    """The listing beside the bytes, assembled."""
    lines = [line.split(maxsplit=1) for line in stream_copy._CODE.strip().splitlines()]  # pyright: ignore
    source = tmp_path / "kernel.s"
    source.write_text("\n".join([".intel_syntax noprefix", *(text for _, text in lines), ""]))
    subprocess.run(["as", "--64", "-o", tmp_path / "kernel.o", source], check=True)
    subprocess.run(
        ["objcopy", "-O", "binary", "-j", ".text", tmp_path / "kernel.o", tmp_path / "kernel.bin"], check=True
    )
    assert (tmp_path / "kernel.bin").read_bytes() == bytes.fromhex("".join(code for code, _ in lines))


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
