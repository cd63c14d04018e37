"""Meetings: all ranks come, or all give up in time, and come again in the next call. See `tests.mpi.mistakes`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.errors import RankError
from reshard.runtime.on_mpi import team as module
from reshard.runtime.on_mpi.team import Meeting, meet


@pytest.mark.slow
def test_ranks_that_come_late_leave_and_come_again(tmp_path: Path):
    running.check("mistakes.meetings", 3, tmp_path)


@pytest.mark.slow
def test_skipped_calls(tmp_path: Path):
    running.check("mistakes.skipped", 3, tmp_path)


def test_a_rank_alone_meets_itself_and_its_duplicate_is_freed_with_the_communicator():
    comm = MPI.COMM_SELF.Dup()
    meet(comm, 0.1)
    meeting = module._meeting_of(comm)
    assert module._meeting_of(comm) is meeting
    assert meeting._comm != MPI.COMM_NULL
    comm.Free()
    assert meeting._comm == MPI.COMM_NULL


def test_a_rank_gives_up_before_its_limit(monkeypatch: pytest.MonkeyPatch):
    comm = MPI.COMM_SELF.Dup()
    monkeypatch.setattr(Meeting, "held", lambda *_: False)
    with pytest.raises(RankError, match=r"rank 0: the other ranks did not make this call within 3 s; if they are"):
        meet(comm, 3)


def test_rank_0_opens_a_meeting_once_all_are_there_that_have_not_left(monkeypatch: pytest.MonkeyPatch):
    """Messages in order: 1 comes, 2 comes, 2 leaves, 2 comes again."""
    meeting: Any = Meeting.__new__(Meeting)
    arrived = [(1, 1), (2, 1), (2, -1)]
    sent: list[tuple[int, int]] = []

    class Comm:
        size = 3

        def Iprobe(self, source: int, tag: int, status: Any) -> bool:
            if arrived:
                status.source = arrived[0][0]
            return bool(arrived)

    meeting._comm, meeting._present = cast(Any, Comm()), {}
    monkeypatch.setattr(meeting, "_receive", lambda *_: arrived.pop(0)[1])
    monkeypatch.setattr(meeting, "_send", lambda number, to, _: sent.append((number, to)))
    assert not meeting._open()
    assert sent == []
    arrived.append((2, 2))
    assert meeting._open()
    assert sent == [(1, 1), (2, 2)]
    assert not meeting._open()  # The next meeting starts empty.
