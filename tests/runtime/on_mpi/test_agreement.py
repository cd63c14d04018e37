"""Agreement: the same error on all ranks, and nothing has moved. See `tests.mpi.failing`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.errors import AgreementError, BudgetError, PlanError, TileError
from reshard.runtime.on_mpi.collective import _raise, _Statement, begin, digest_of
from reshard.runtime.on_mpi.team import Team


@pytest.mark.slow
@pytest.mark.parametrize("topic", ["disagreement", "arrays_disagree"])
def test_ranks_that_disagree(topic: str, tmp_path: Path):
    running.check(f"failing.{topic}", 4, tmp_path)


def statement(request: str = "a move", kind: str = "", text: str = "", smallest: int = 0, calls: int = 1) -> _Statement:
    return _Statement(kind, text, smallest, request, calls)


def test_different_requests_are_listed_with_their_ranks():
    with pytest.raises(AgreementError) as caught:
        _raise([statement("a"), statement("b"), statement("a"), statement("a", calls=2)], None)
    assert str(caught.value) == (
        "the ranks ask for different things, so nothing was moved: ranks [0, 2]: a (call 1 of this communicator); "
        "ranks [1]: b (call 1 of this communicator); ranks [3]: a (call 2 of this communicator); make the same call "
        "on all"
    )


def test_an_error_of_all_ranks_is_raised_as_it_is():
    own = TileError("wrong shape")
    with pytest.raises(TileError) as caught:
        _raise([statement(kind="TileError", text="wrong shape")] * 3, own)
    assert caught.value is own


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
    with pytest.raises(raised) as caught:
        _raise([statement(), statement(kind=kind, text="bad", smallest=77)], None)
    assert type(caught.value) is raised
    assert str(caught.value) == text
    assert getattr(caught.value, "smallest", 77) == 77


def test_further_ranks_with_errors_are_counted():
    failed = statement(kind="TileError", text="bad")
    with pytest.raises(TileError, match=r"rank 1 \(and 2 more ranks\): bad"):
        _raise([statement(), failed, statement(kind="PlanError", text="worse"), failed], None)


def test_digests_are_those_of_the_text_in_every_process():
    texts = ["", "f32[{x}4] -> f32[16]"]
    code = f"from reshard.runtime.on_mpi.collective import digest_of; print(*map(digest_of, {texts}))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [str(digest_of(text)) for text in texts] == other
    assert all(0 <= digest_of(text) < 1 << 62 for text in texts)
    assert len({digest_of(str(number)) for number in range(1000)}) == 1000


def test_a_call_prepares_once_and_raises_what_that_raised():
    team = Team(MPI.COMM_SELF, None, 5)
    watch, result = begin(team, 5, "a call", lambda: 7)
    assert result == 7
    watch.look()

    def fails() -> None:
        raise TileError("no tile")

    with pytest.raises(TileError, match=r"^no tile$"):
        begin(team, 5, "a call", fails)
    assert begin(team, 5, "the next call", lambda: 8)[1] == 8
    assert team.calls == 3
