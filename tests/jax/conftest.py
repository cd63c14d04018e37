"""How concrete arrays move in tests: between CPU devices of one process by copies, or by programs as elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from reshard.jax import crossing
from tests.jax.crossing.cases import forget_programs


@pytest.fixture
def by_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every move runs as a program, as on accelerators and between processes."""
    forget_programs()
    with monkeypatch.context() as patch:
        patch.setattr(crossing, "compile_copies", lambda *_: None)
        yield
    forget_programs()


@pytest.fixture(params=["copies", "programs"])
def both_ways(request: pytest.FixtureRequest) -> None:
    """Each test moves by copies, and by programs."""
    if request.param == "programs":
        request.getfixturevalue("by_programs")
