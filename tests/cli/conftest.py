"""A fixture that calls the command in this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import pytest

from reshard.cli import main

SET_IF_UNSET = ("JAX_PLATFORMS", "ALLOW_MULTIPLE_LIBTPU_LOAD", "TPU_SKIP_MDS_QUERY", "TF_CPP_MIN_LOG_LEVEL")
"""What the command sets in the environment."""


class Ran(NamedTuple):
    """The exit code of a call, and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Calls the command with these arguments, on a terminal of 100 columns by default."""
    for name in SET_IF_UNSET:
        monkeypatch.setenv(name, os.environ.get(name, "0"))

    def run(*argv: object, columns: int = 100) -> Ran:
        monkeypatch.setenv("COLUMNS", str(columns))
        try:
            code = main([str(argument) for argument in argv])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Ran(code, *capsys.readouterr())

    return run
