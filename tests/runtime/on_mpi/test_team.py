"""Teams: what ranks know of each other, and how a call ends on all ranks if one fails, is stuck or dies.

See `tests.mpi.calls` and `tests.mpi.failing`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.errors import AgreementError, RankError
from reshard.runtime.on_mpi import team as module
from reshard.runtime.on_mpi.team import NODES, Team, Watch, moving, team_of


@pytest.mark.slow
def test_teams(tmp_path: Path):
    running.check("calls.teams", 3, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topic", "ranks"),
    [("communicators", 3), ("very_many_communicators", 2), ("finalized", 2)],
)
def test_communicators_that_the_user_frees(topic: str, ranks: int, tmp_path: Path):
    running.check(f"sharing.{topic}", ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("topic", ["failure", "untouched", "stuck"])
def test_calls_that_go_wrong(topic: str, tmp_path: Path):
    running.check(f"failing.{topic}", 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cleanup", [True, False])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_rank_that_dies_ends_the_call_on_all(
    nodes: int, cleanup: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`mpiexec` ends all ranks, unless it is told not to; then those that are left raise an error in time."""
    monkeypatch.setenv("NODES_OF_THE_KILLED", str(nodes))
    monkeypatch.setenv("REPORT_OF_THE_KILLED", str(tmp_path / "report"))
    monkeypatch.setenv("FILES_OF_THE_KILLED", str(tmp_path / "files"))
    worker = ["-m", "tests.mpi.worker", str(tmp_path / "cases"), "failing.killed"]
    started = running.start(worker, 4, cleanup)
    printed = running.output(started)
    for place in {place for path in tmp_path.glob("files-*") for place in path.read_text().split()}:
        Path(place).unlink(missing_ok=True)
    assert started.returncode != 0 or not cleanup, printed
    assert "took longer" not in printed
    texts = [path.read_text() for path in tmp_path.glob("report-*")]
    assert len(texts) == 4, printed
    errors = [text for text in texts if text]
    assert all(" s: RankError(" in text for text in errors), texts
    assert all(text.endswith(" kept") for text in errors), texts
    assert len(errors) == 3 or cleanup, f"{texts}\n{printed}"


# ---- a single rank, in this process ------------------------------------------------------------------


def test_the_team_of_a_communicator_is_kept_until_it_breaks():
    comm = MPI.COMM_SELF.Dup()
    team = team_of(comm, 5)
    assert team_of(comm, 5) is team
    team.broken = True
    assert team_of(comm, 5) is not team
    assert team_of(comm, 5, nodes=1) is not team_of(comm, 5, nodes=1)


@pytest.mark.parametrize("setting", ["0", "-1", "two", "1.5"])
def test_the_number_of_pretended_nodes_is_a_whole_number(setting: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(NODES, setting)
    with pytest.raises(AgreementError, match="a whole number from 1 up"):
        team_of(MPI.COMM_SELF.Dup(), 5)


def test_groups_are_kept_up_to_a_number_and_the_oldest_is_freed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_GROUPS", 2)
    team = Team(MPI.COMM_SELF, None, 5)
    assert team.group((0,)) is team.comm
    team._groups = {(key,): MPI.COMM_SELF.Dup() for key in (7, 8)}
    oldest = team._groups[7,]
    team.size = 2
    team.group((0,))
    assert list(team._groups) == [(8,), (0,)]
    assert oldest == MPI.COMM_NULL


def test_an_error_breaks_the_team_and_is_reported():
    team = Team(MPI.COMM_SELF, None, 5)
    with pytest.raises(ValueError, match="a reason"), moving(team):
        raise ValueError("a reason")
    assert team.broken
    assert team.failures() == {0: "ValueError: a reason"}
    with pytest.raises(RankError, match="because one failed: rank 0: ValueError: a reason"), moving(team):
        Watch(team, 5).look()


def test_a_wait_ends_at_its_limit():
    watch = Watch(Team(MPI.COMM_SELF, None, 5), 0.01)
    with pytest.raises(RankError, match=r"rank 0 waited longer than 0\.01 s; if they are only slow"):
        watch.until(lambda: False)
    assert [Watch(Team(MPI.COMM_SELF, None, 5), limit).margin for limit in (2, 60)] == [0.5, 1.0]
    tries = iter([False, False, True])
    Watch(Team(MPI.COMM_SELF, None, 5), 5).until(lambda: next(tries))


def test_a_team_is_freed_with_its_communicator(monkeypatch: pytest.MonkeyPatch):
    comm = MPI.COMM_SELF.Dup()
    team = team_of(comm, 5)
    freed: list[Team] = []
    monkeypatch.setattr(Team, "free", lambda self: freed.append(self))
    other = team_of(comm, 5, nodes=1)
    assert freed == [team]
    comm.Free()
    assert freed == [team, other]
    with pytest.raises(RankError, match="has been freed; give one that is alive"):
        team_of(comm, 5)


def test_freeing_a_team_frees_its_communicators():
    comm = MPI.COMM_SELF.Dup()
    team = team_of(comm, 5)
    group = team._groups[0, 0] = MPI.COMM_SELF.Dup()
    inner = team.comm
    comm.Free()
    assert inner == group == MPI.COMM_NULL


def test_a_broken_team_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    """Its messages may still be under way."""
    comm = MPI.COMM_SELF.Dup()
    team = team_of(comm, 5)
    monkeypatch.setattr(Team, "free", lambda self: pytest.fail("freed"))
    team.broken = True
    comm.Free()
    assert team.comm != MPI.COMM_NULL


def test_ranks_that_cannot_share_memory_are_nodes_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "segment", lambda *_: None)
    near = SimpleNamespace(size=3, rank=1, Free=lambda: None)
    comm = SimpleNamespace(Split_type=lambda *_: near, rank=1)
    node, memory = module._node(cast(Any, comm), None)
    assert node == MPI.COMM_SELF
    assert not memory.any()
