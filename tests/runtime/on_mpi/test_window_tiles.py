"""Where tiles lie: what a rank posts, and tiles in windows as long as there is room."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.runtime.on_mpi.collective import begin
from reshard.runtime.on_mpi.team import Team, Watch
from reshard.runtime.on_mpi.window_tiles import NOWHERE, Posted, located, new_tile, posted_by_rank, where
from reshard.types import Layout, Mesh

LAYOUT = Layout.parse("f32[6, 7]", Mesh())


@pytest.fixture
def team() -> Team:
    return Team(MPI.COMM_SELF, None, 5)


@pytest.fixture
def watch(team: Team) -> Watch:
    return Watch(team, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topic", "ranks"),
    [("full", 4), ("many", 2), ("very_many", 3), pytest.param("every_full", 4, marks=pytest.mark.sweep)],
)
def test_ranks(topic: str, ranks: int, tmp_path: Path):
    running.check(f"sharing.{topic}", ranks, tmp_path)


@pytest.mark.slow
def test_a_rank_without_memory_for_its_result(tmp_path: Path):
    running.check("mistakes.no_memory", 3, tmp_path)


SMALL_SHARED_MEMORY = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"', "sh"]
"""Runs a command with a /dev/shm of 64 MiB, as containers have it; needs a kernel that lets users do that."""


@pytest.mark.slow
def test_arrays_beyond_the_size_of_shared_memory(tmp_path: Path):
    if subprocess.run([*SMALL_SHARED_MEMORY, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a /dev/shm of its own; refusals are tried without it, too")
    running.check("sharing.files_of_a_name", 2, tmp_path, SMALL_SHARED_MEMORY)


def test_a_private_tile_has_an_address_and_no_place(team: Team):
    tile = np.zeros((4, 3))
    assert where(located(team, tile)) == (0, tile.ctypes.data, 0, 0)
    assert where(located(team, tile.T)) == (0, 0, 0, 0)


def test_a_tile_is_known_by_its_address(team: Team, watch: Watch):
    one, other = (new_tile(team, watch, LAYOUT, np.dtype("f4")) for _ in range(2))
    assert 0 < one.place < other.place
    assert located(team, one.tile) == one
    assert located(team, one.tile[1:]).place == one.place + 7 * 4
    assert located(team, one.tile[:, 1:]).place == 0
    assert located(Team(MPI.COMM_SELF, None, 5), one.tile).place == 0
    posted = where(one, other)
    assert posted == (one.place, one.tile.ctypes.data, other.place, 1)
    begin(team, 5, "posted", lambda: one, lambda held: where(held, other))
    assert posted_by_rank(team) == {0: Posted(*posted)}
    assert team.plain
    assert team.shared


def test_a_rank_without_a_tile_posts_nowhere(team: Team):
    begin(team, 5, "nothing", lambda: None)
    assert posted_by_rank(team) == {0: NOWHERE}
    assert not team.plain
    assert not team.shared


def test_a_tile_is_private_if_the_node_has_no_room(team: Team, watch: Watch, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(team.arena, "_add", lambda *_: False)
    private = new_tile(team, watch, LAYOUT, np.dtype("f4"))
    assert private.place == 0
    assert private.tile.shape == (6, 7)
    begin(team, 5, "posted", lambda: private, where)
    assert team.plain
    assert not team.shared
