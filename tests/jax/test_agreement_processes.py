"""Two and four processes over gloo: they move what all ask for, and nothing else."""

from __future__ import annotations

import pytest

from tests.jax import worker


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 2)])
@pytest.mark.parametrize("name", ["moves", "mismatches", "outside"])
def test_processes_agree(name: str, processes: int, devices: int):
    worker.check([name], devices=devices, processes=processes, module="tests.jax.agreeing")


@pytest.mark.slow
def test_a_process_that_never_asks_is_named_within_the_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RESHARD_JAX_LIMIT", "2")
    worker.check(["late"], devices=4, processes=2, module="tests.jax.agreeing")
