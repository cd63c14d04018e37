"""Two and four processes over gloo: they move what all ask for, and nothing else."""

from __future__ import annotations

import pytest

from tests.jax import worker


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "checks"),
    [(2, 4, "moves,mismatches"), pytest.param(4, 2, "mismatches,outside,moves", marks=pytest.mark.sweep)],
)
def test_processes_agree(processes: int, devices: int, checks: str):
    worker.check([checks], devices=devices, processes=processes, module="tests.jax.agreeing")


@pytest.mark.slow
def test_a_process_that_died_is_named_within_the_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RESHARD_JAX_LIMIT", "2")
    worker.check(["killed"], devices=4, processes=2, module="tests.jax.agreeing", killed=1)
