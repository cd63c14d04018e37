"""Files that a command reads and writes: programs, by their contents, and whatever it makes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from reshard.errors import NotationError, ReshardError

ARTIFACT = b"ML\xefR"  # What a portable StableHLO artifact begins with.
_HLO = re.compile(r"^HloModule ", re.MULTILINE)
_MLIR = re.compile(r"\bstablehlo\.|\bfunc\.func\b|\bsdy\.|^\s*module\b.*\{", re.MULTILINE)


class Program(NamedTuple):
    """A program as it was read: text, or the bytes of a portable artifact."""

    content: str | bytes
    is_hlo: bool

    @property
    def text(self) -> str:
        """The text, empty for an artifact."""
        return self.content if isinstance(self.content, str) else ""


def read(path: str) -> Program:
    """The program in a file, `-` being stdin: optimized HLO, StableHLO text, or a portable StableHLO artifact.

    Raises `NotationError` for anything else, and `ReshardError` for a file that cannot be read.
    """
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise ReshardError(f"cannot read {path}: {error.strerror}") from None
    if content.startswith(ARTIFACT):
        return Program(content, False)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise NotationError(f"{path} is binary, and no portable StableHLO artifact; {_WANTED}") from None
    if _HLO.search(text):
        return Program(text, True)
    if _MLIR.search(text):
        return Program(text, False)
    what = "empty" if not text.strip() else f"no program: {text.strip()[:60]!r}"
    raise NotationError(f"{path} is {what}; {_WANTED}")


def write(path: str, content: str | bytes) -> None:
    """Writes a file, `-` being stdout for text; raises `ReshardError` if that cannot be done."""
    try:
        if path == "-" and isinstance(content, str):
            sys.stdout.write(content)
        else:
            Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise ReshardError(f"cannot write {path}: {error.strerror}") from None


def quiet_jax() -> None:
    """Settings for a process that compiles and runs nothing, where the user has none: before jax is imported."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu would ask a server that is not there.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of what is reported here.


_WANTED = (
    "give optimized HLO (compiled.as_text(), or a .txt of --xla_dump_to), StableHLO text "
    "(jitted.lower(...).as_text(debug_info=True)), or a portable StableHLO artifact"
)
