"""Where tiles lie: what a rank posts, and tiles in windows as long as there is room."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.runtime.on_mpi.agreement import begin
from reshard.runtime.on_mpi.team import Facts, Team
from reshard.runtime.on_mpi.window_tiles import NOWHERE, Posted, WindowTile, new_tile, posted_by_rank, where
from reshard.types import Layout, Mesh

LAYOUT = Layout.parse("f32[6, 7]", Mesh())


@pytest.fixture
def team() -> Team:
    return Team(MPI.COMM_SELF, None, 5)


def test_a_private_tile_has_an_address_and_no_slot(team: Team):
    tile = np.zeros((4, 3))
    assert where(WindowTile(tile)) == (0, tile.ctypes.data, 0)
    assert where(WindowTile(tile.T)) == (0, 0, 0)


def test_slots_count_from_one(team: Team):
    begin(team, 5, "two tiles", lambda: None)
    one, other = (new_tile(team, LAYOUT, np.dtype("f4")) for _ in range(2))
    assert one.window is not None
    assert other.window is not None
    assert one.window.slot != other.window.slot
    posted = where(one, other)
    assert posted == (one.window.slot + 1, one.tile.ctypes.data, other.window.slot + 1)
    begin(team, 5, "posted", lambda: one, lambda held: where(held, other))
    assert posted_by_rank(team) == {0: Posted(*posted)}
    assert team.plain


def test_a_rank_without_a_tile_posts_nowhere(team: Team):
    begin(team, 5, "nothing", lambda: None)
    assert posted_by_rank(team) == {0: NOWHERE}
    assert not team.plain


def test_a_tile_beyond_the_room_of_windows_is_private(team: Team):
    begin(team, 5, "a tile", lambda: None)
    team.facts = Facts(team.facts.nodes, team.facts.reads, LAYOUT.tile_bytes - 1)
    private = new_tile(team, LAYOUT, np.dtype("f4"))
    assert private.window is None
    assert private.tile.shape == (6, 7)
    team.facts = Facts(team.facts.nodes, team.facts.reads, LAYOUT.tile_bytes)
    assert new_tile(team, LAYOUT, np.dtype("f4")).window is not None
