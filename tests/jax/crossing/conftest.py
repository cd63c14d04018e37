"""How arrays come to other devices in these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.jax.crossing.cases import by_messages


@pytest.fixture(params=["host", "messages"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both ways: a copy on the host, and messages or whole tiles as between accelerators."""
    if request.param == "host":
        yield "host"
        return
    with by_messages(monkeypatch):
        yield "messages"
