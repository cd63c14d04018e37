"""Eight devices of two or four processes, over gloo: each process has exactly its shards, or all have an error."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.jax import loads, worker


@pytest.mark.slow
def test_two_processes():
    """Moves on one set of devices and to others, and calls in which the processes do not agree."""
    worker.check(["one_of_several,to_others,agreeing.moves,agreeing.mismatches,disagree"], devices=4, processes=2)


@pytest.mark.slow
def test_four_processes(tmp_path: Path):
    """Some of them have no device of one end; they load and save together."""
    loads.write_checkpoint(tmp_path)
    loads.save_again(tmp_path)
    checks = ["to_others", f"loads.processes={tmp_path}", f"saves.processes={tmp_path / 'written'}"]
    worker.check([",".join(checks)], devices=2, processes=4)


@pytest.mark.sweep
def test_four_processes_agree():
    worker.check(["agreeing.mismatches,agreeing.outside,agreeing.moves"], devices=2, processes=4)


@pytest.mark.slow
def test_a_process_that_died_is_named_within_the_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RESHARD_JAX_LIMIT", "2")
    worker.check(["agreeing.killed"], devices=4, processes=2, killed=1)


@pytest.mark.slow
def test_a_process_that_fails_is_seen():
    with pytest.raises(AssertionError, match="process_count"):
        worker.check(["one_of_several"], devices=4)


@pytest.mark.slow
def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch):
    """One of two processes waits for another that never comes."""
    monkeypatch.setattr(worker, "SECONDS", 3)
    started = []
    monkeypatch.setattr(worker, "start", lambda *given: started.append(start(*given)) or started[-1])
    with pytest.raises(subprocess.TimeoutExpired):
        worker.check(["one_of_several", "0", "2", "1"], devices=4)
    assert started[0].wait(60) != 0


start = worker.start
