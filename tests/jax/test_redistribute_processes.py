"""Eight devices of two or four processes, over gloo: each process has exactly its shards."""

from __future__ import annotations

import subprocess

import pytest

from tests.jax import worker


@pytest.mark.slow
def test_two_processes():
    worker.check(["one-of-several"], devices=4, processes=2)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 2)])
def test_moves_to_devices_of_other_processes(processes: int, devices: int):
    worker.check(["to-others"], devices=devices, processes=processes)


@pytest.mark.slow
def test_a_process_that_fails_is_seen():
    with pytest.raises(AssertionError, match="IndexError"):
        worker.check(["one-of-several"], devices=4)


@pytest.mark.slow
def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch):
    """One of two processes waits for another that never comes."""
    monkeypatch.setattr(worker, "SECONDS", 3)
    started = []
    monkeypatch.setattr(worker, "start", lambda *given: started.append(start(*given)) or started[-1])
    with pytest.raises(subprocess.TimeoutExpired):
        worker.check(["one-of-several", "0", "2", "1"], devices=4)
    assert started[0].wait(60) != 0


start = worker.start
