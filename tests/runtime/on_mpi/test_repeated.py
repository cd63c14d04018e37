"""What a communicator keeps of a request, and after how many calls."""

from __future__ import annotations

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.runtime.on_mpi import repeated
from reshard.runtime.on_mpi.repeated import find_prepared, seconds
from reshard.runtime.on_mpi.team import TIME_LIMIT, team_of
from reshard.types import Layout, Mesh


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [(2.5, 2.5), (0.0, TIME_LIMIT), (-1.0, TIME_LIMIT), ("soon", TIME_LIMIT), (float("nan"), TIME_LIMIT)],
)
def test_a_wrong_limit_is_replaced(limit: object, wanted: float):
    assert seconds(limit) == wanted


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
        team.repeated[n, n] = 1  # A rank has deferred.
        request = type("Request", (), {"source": n, "target": n})
        assert repeated.keep_prepared(team, None, request, None) is None  # type: ignore[arg-type]
    assert team.repeated == {(1, 1): 0, (2, 2): 0}
    team.repeated.clear()
