"""Ranks that disagree, fail, are stuck or die: the call ends on all of them. See `tests.mpi.failing`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")


@pytest.mark.parametrize("topic", ["disagreement", "arrays_disagree", "failure", "untouched", "stuck"])
def test_calls_that_go_wrong(topic: str, tmp_path: Path):
    running.check(f"failing.{topic}", 4, tmp_path)


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("cleanup", [True, False])
def test_a_rank_that_dies_ends_the_call_on_all(
    nodes: int, cleanup: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`mpiexec` ends all ranks, unless it is told not to; then those that are left raise an error in time."""
    monkeypatch.setenv("NODES_OF_THE_KILLED", str(nodes))
    monkeypatch.setenv("REPORT_OF_THE_KILLED", str(tmp_path / "said"))
    worker = ["-m", "tests.mpi.worker", "failing.killed", str(tmp_path / "report")]
    started = running.start(worker, 4, cleanup)
    said = running.output(started, 60)
    assert started.returncode != 0 or not cleanup, said
    assert "took longer" not in said
    texts = [path.read_text() for path in tmp_path.glob("said-*")]
    assert len(texts) == 4, said
    errors = [text for text in texts if text]
    assert all(" s: RankError(" in text for text in errors), texts
    assert all(text.endswith(" kept") for text in errors), texts
    assert len(errors) == 3 or cleanup, f"{texts}\n{said}"
