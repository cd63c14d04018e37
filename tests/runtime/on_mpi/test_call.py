"""One call on all ranks: turns of threads, meetings, teams, agreement, and calls that are made again."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.errors import AgreementError, BudgetError, PlanError, RankError, TileError
from reshard.runtime.on_mpi import repeated
from reshard.runtime.on_mpi import team as team_module
from reshard.runtime.on_mpi.collective import (
    Statement,
    _list_requests,
    collective,
    digest_of,
    join_errors,
    seconds_of,
)
from reshard.runtime.on_mpi.repeated import find_prepared, limit_or_usual
from reshard.runtime.on_mpi.team import (
    NODES,
    TIME_LIMIT,
    Meeting,
    Team,
    Turn,
    Turns,
    Watch,
    meet_ranks,
    report_failure,
    team_of,
    turns_of,
)
from reshard.types import Layout, Mesh
from tests.mpi import running

# ---- Turns of threads on a communicator: one at a time, and overlapping calls know it


@contextmanager
def turn_on(turns: Turns, seconds: float = 5) -> Iterator[Turn]:
    turn = turns.take(time.monotonic() + seconds)
    try:
        yield turn
    finally:
        turn.release()


def test_one_thread_has_the_turn_as_often_as_it_likes():
    turns = Turns()
    with turn_on(turns) as outer, turn_on(turns) as inner:
        assert not outer.overlapped and not inner.overlapped
    with turn_on(turns) as outer:
        assert not outer.overlapped


def test_both_of_two_overlapping_threads_know_it():
    turns = Turns()
    waited: list[bool] = []

    def other() -> None:
        with turn_on(turns) as turn:
            waited.append(turn.overlapped)

    with turn_on(turns) as turn:
        assert not turn.overlapped
        thread = threading.Thread(target=other)
        thread.start()
        while not turn.overlapped:
            time.sleep(0.001)
        assert not waited
    thread.join()
    assert waited == [True]
    with turn_on(turns) as turn:
        assert not turn.overlapped


def test_a_thread_waits_until_its_deadline():
    turns = Turns()
    errors: list[Exception] = []

    def other() -> None:
        try:
            with turn_on(turns, 0.05):
                pass
        except RankError as error:
            errors.append(error)

    with turn_on(turns):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "another thread of this rank is in a call" in str(errors[0])


def test_communicators_have_their_own_turns_and_one_lock_if_mpi_takes_one_thread(monkeypatch: pytest.MonkeyPatch):
    one, other = MPI.COMM_SELF.Dup(), MPI.COMM_SELF.Dup()
    assert turns_of(one) is turns_of(one) is not turns_of(other)
    assert turns_of(one)._lock is not turns_of(other)._lock
    monkeypatch.setattr(team_module, "_LEVEL", MPI.THREAD_SERIALIZED)
    one, other = MPI.COMM_SELF.Dup(), MPI.COMM_SELF.Dup()
    assert turns_of(one) is not turns_of(other)
    assert turns_of(one)._lock is turns_of(other)._lock
    monkeypatch.setattr(team_module, "_LEVEL", MPI.THREAD_FUNNELED)
    turns_of(one)
    monkeypatch.setattr(team_module.MPI, "Is_thread_main", lambda: False)
    with pytest.raises(AgreementError, match="main thread"):
        turns_of(one)


# ---- Meetings: all ranks come, or all give up in time, and come again in the next call. See `tests.mpi.mistakes`


def test_a_rank_alone_meets_itself_and_its_duplicate_is_freed_with_the_communicator():
    comm = MPI.COMM_SELF.Dup()
    meet_ranks(comm, 0.1)
    meeting = comm.Get_attr(team_module._MEETING_KEY)
    assert meeting._comm != MPI.COMM_NULL
    comm.Free()
    assert meeting._comm == MPI.COMM_NULL


def test_a_rank_gives_up_before_its_limit(monkeypatch: pytest.MonkeyPatch):
    comm = MPI.COMM_SELF.Dup()
    monkeypatch.setattr(Meeting, "held", lambda *_: False)
    with pytest.raises(RankError, match=r"rank 0: the other ranks did not make this call within 3 s; if they are"):
        meet_ranks(comm, 3)


# ---- Teams: what ranks know of each other, and how a call ends on all ranks if one fails, is stuck or dies


@pytest.mark.fast(0, slow=2)
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
    monkeypatch.setattr(team_module, "_GROUPS", 2)
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
    with pytest.raises(ValueError, match="a reason"), report_failure(team):
        raise ValueError("a reason")
    assert team.broken
    assert team.failures() == {0: "ValueError: a reason"}
    with pytest.raises(RankError, match="because one failed: rank 0: ValueError: a reason"), report_failure(team):
        Watch(team, 5).look()


def test_a_wait_ends_at_its_limit():
    watch = Watch(Team(MPI.COMM_SELF, None, 5), 0.01)
    with pytest.raises(RankError, match=r"rank 0 waited longer than 0\.01 s; if they are only slow"):
        watch.until(lambda: False)
    assert [Watch(Team(MPI.COMM_SELF, None, 5), limit).margin for limit in (2, 60)] == [0.5, 1.0]
    tries = iter([False, False, True])
    Watch(Team(MPI.COMM_SELF, None, 5), 5).until(lambda: next(tries))


def test_a_failure_is_noticed_however_long_a_look_at_messages_takes(monkeypatch: pytest.MonkeyPatch):
    team, looks = Team(MPI.COMM_SELF, None, 5), list[float]()
    monkeypatch.setattr(team_module, "SPINS", 0)
    monkeypatch.setattr(team, "failures", lambda: {0: "gone"})
    with pytest.raises(RankError, match="gone"):
        Watch(team, 5).until(lambda: looks.append(time.sleep(0.001)))  # type: ignore[func-returns-value]
    assert len(looks) < 9


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
    monkeypatch.setattr(team_module, "share_segment", lambda *_: None)
    near = SimpleNamespace(size=3, rank=1, Free=lambda: None)
    comm = SimpleNamespace(Split_type=lambda *_: near, rank=1)
    node, memory = team_module._split_node(cast(Any, comm), None)
    assert node == MPI.COMM_SELF
    assert not memory.any()


# ---- Agreement: the same error on all ranks, and nothing has moved. See `tests.mpi.failing`


def statement(request: str = "a move", kind: str = "", text: str = "", smallest: int = 0, calls: int = 1) -> Statement:
    return Statement(kind, text, smallest, request, calls)


def test_different_requests_are_listed_with_their_ranks():
    assert _list_requests([statement("a"), statement("b"), statement("a"), statement("a", calls=2)]) == (
        "ranks [0, 2]: a (call 1 of this communicator); ranks [1]: b (call 1 of this communicator); "
        "ranks [3]: a (call 2 of this communicator)"
    )


def test_an_error_of_all_ranks_is_raised_as_it_is():
    own = TileError("wrong shape")
    assert join_errors(dict.fromkeys(range(3), statement(kind="TileError", text="wrong shape")), own, 3) is own


@pytest.mark.parametrize(
    ("kind", "raised", "text"),
    [
        ("PlanError", PlanError, "rank 1: bad; nothing was moved"),
        ("BudgetError", BudgetError, "rank 1: bad; nothing was moved"),
        ("ValueError", AgreementError, "ValueError: rank 1: bad; nothing was moved"),
        ("ReshardErrors", AgreementError, "ReshardErrors: rank 1: bad; nothing was moved"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(kind: str, raised: type, text: str):
    error = join_errors({1: statement(kind=kind, text="bad", smallest=77)}, None, 2)
    assert type(error) is raised
    assert str(error) == text
    assert getattr(error, "smallest", 77) == 77


def test_further_ranks_with_errors_are_counted():
    failed = statement(kind="TileError", text="bad")
    error = join_errors({1: failed, 2: statement(kind="PlanError", text="worse"), 3: failed}, None, 4)
    assert isinstance(error, TileError) and str(error).startswith("rank 1 (and 2 more ranks): bad")


def test_digests_are_those_of_the_text_in_every_process():
    texts = ["", "f32[{x}4] -> f32[16]"]
    code = f"from reshard.runtime.on_mpi.collective import digest_of; print(*map(digest_of, {texts}))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [str(digest_of(text)) for text in texts] == other
    assert all(0 <= digest_of(text) < 1 << 62 for text in texts)
    assert len({digest_of(str(number)) for number in range(1000)}) == 1000


# ---- Collective calls: wrong arguments, threads and slow planning end with one error. See `tests.mpi.mistakes`


RIGHT = [1, 0.5, np.float32(2), np.int8(3), Fraction(1, 2), math.inf]
WRONG = [0, 0.0, -1, math.nan, True, None, "3", [3], np.ones(1), 10**400, 3j]


@pytest.mark.parametrize(("limit", "right"), [*((each, True) for each in RIGHT), *((each, False) for each in WRONG)])
def test_limits(limit: Any, right: bool):
    def run() -> float:
        with collective(MPI.COMM_SELF, limit, lambda _: 7, str) as (_, watch, value):
            assert value == 7
            return watch.deadline - time.monotonic()

    if right:
        assert run() <= float(limit) == seconds_of(limit)
    else:
        with pytest.raises(PlanError, match="give a positive number of seconds"):
            run()


@pytest.mark.parametrize("comm", [None, 5, "world", MPI.COMM_NULL, MPI.Group()])
def test_what_is_not_a_communicator(comm: Any):
    with pytest.raises(AgreementError, match="is not a communicator"), collective(comm, 5, lambda _: 7, str):
        pass


def test_an_error_in_prepare_or_request_leaves_the_team_and_one_in_the_block_breaks_it():
    def fails(*_: Any) -> Any:
        raise TileError("no tile")

    with collective(MPI.COMM_SELF, 5, lambda _: 7, str) as (team, _, _):
        pass
    for arguments in ((fails, str), (lambda _: 7, fails)):
        with pytest.raises(TileError, match="no tile"), collective(MPI.COMM_SELF, 5, *arguments):
            raise AssertionError
    with collective(MPI.COMM_SELF, 5, lambda _: 7, str) as (same, _, _):
        assert same is team
    with pytest.raises(ValueError, match="odd"), collective(MPI.COMM_SELF, 5, lambda _: 7, str):
        raise ValueError("odd")
    assert team.broken
    with collective(MPI.COMM_SELF, 5, lambda _: 7, str) as (other, _, _):
        assert other is not team


# ---- What a communicator keeps of a request, and after how many calls


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [(2.5, 2.5), (0.0, TIME_LIMIT), (-1.0, TIME_LIMIT), ("soon", TIME_LIMIT), (float("nan"), TIME_LIMIT)],
)
def test_a_wrong_limit_is_replaced(limit: object, wanted: float):
    assert limit_or_usual(limit) == wanted


def test_nothing_is_kept_on_one_rank_or_of_what_is_no_communicator():
    source, target = Layout.parse("s64[{x}4]", Mesh(x=1)), Layout.parse("s64[4]", Mesh(x=1))
    team_of(MPI.COMM_SELF).repeated[source, target] = 0
    assert find_prepared(MPI.COMM_SELF, (source, target)) is None
    assert find_prepared(None, (source, target)) is None
    assert find_prepared(MPI.COMM_NULL, (source, target)) is None


def test_the_oldest_requests_go(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(repeated, "_RETAINED", 2)
    monkeypatch.setattr(repeated, "is_small", lambda *_: True)
    team = team_of(MPI.COMM_SELF)
    team.repeated.clear()
    for n in range(3):
        team.repeated[repeated.TILES, n, n] = 1  # A rank has deferred.
        request = type("Request", (), {"source": n, "target": n})
        assert repeated.keep_prepared(team, None, request, None) is None  # type: ignore[arg-type]
    assert team.repeated == {(repeated.TILES, 1, 1): 0, (repeated.TILES, 2, 2): 0}
    team.repeated.clear()


# ---- Tags: one for each kind of message, and none written elsewhere


def test_no_two_kinds_of_message_share_a_tag():
    home = Path(team_module.__file__)
    numbers = re.findall(r"^[A-Z]+ = (9\d\d)$", home.read_text(), re.MULTILINE)
    assert len(numbers) == len(set(numbers)) > 5
    for path in home.parent.rglob("*.py"):
        assert path == home or not re.findall(r"\b_?TAG\w* = |\b90\d\b", path.read_text()), path
