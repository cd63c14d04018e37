"""Moves on 1 to 8 ranks, in every way, against the oracle (see `tests.mpi.cases`); and which way is chosen."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.runtime.on_mpi.node.node_sync import WORDS
from reshard.runtime.on_mpi.transports import TRANSPORTS, TileTransfer, choose_transport
from reshard.runtime.on_mpi.window_tiles import Posted, WindowTile
from reshard.types import Layout, Mesh


@pytest.mark.parametrize("ranks", [1, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 3, 4, 6, 8))])
def test_moves(ranks: int, tmp_path: Path):
    running.check("cases.moves", ranks, tmp_path)


@pytest.mark.slow
def test_dtypes(tmp_path: Path):
    running.check("cases.dtypes", 8, tmp_path)


class Room:
    """An arena without memory, which has a place for so many blocks of a kilobyte at most."""

    def __init__(self, blocks: int) -> None:
        self.left = blocks

    def take(self, nbytes: int, gather: object, members: tuple[int, ...]) -> int:
        assert members
        assert nbytes <= 1024
        self.left -= 1
        return 64 if self.left >= 0 else 0

    def hold(self, place: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.zeros(shape, dtype)


def transfer(
    way: str, posts: list[tuple[int, int]], *, nodes: int = 1, plain: bool = True, room: int = 9, **options: Any
) -> TileTransfer:
    """A transfer of 4 x 16 floats of rank 0; `posts` has the places of tile and `out` of each rank of its node."""
    size = nodes * len(posts)
    mesh = Mesh(x=size)
    target = Layout.from_spec(mesh, (size, 16), "float32", [["x"]] if not options.pop("replicated", False) else [])
    source = Layout.from_spec(mesh, (4 * size, 16), "float32", [["x"]])
    members = tuple(range(len(posts)))
    team = SimpleNamespace(
        plain=plain, rank=0, members=members, one_node=nodes == 1, size=size, arena=Room(room), gather=list
    )
    request = SimpleNamespace(into=options.pop("into", False), source=source, target=target)
    ready = SimpleNamespace(
        transport=way,
        otherwise="stage",
        moves=options.pop("moves", object()),
        push=options.pop("push", False),
        crowded=options.pop("crowded", 0),
        by_node=None,
    )
    posted = {rank: Posted(place, 8, out) for rank, (place, out) in enumerate(posts)}
    call, held = SimpleNamespace(team=team, watch=None), WindowTile(np.zeros((4, 16), "f4"))
    return TileTransfer(*(cast(Any, each) for each in (call, ready, request, held, None, posted)))


PRIVATE, SHARED = [(0, 0)] * 4, [(3, 0)] * 4
NO_ROOM = {"room": 0}


@pytest.mark.parametrize(
    ("way", "posts", "options", "chosen"),
    [
        ("stage", SHARED, {}, "pull"),  # results of an earlier call
        ("read", SHARED, {}, "pull"),
        ("read", PRIVATE, {}, "push"),
        ("read", PRIVATE, {"crowded": -4}, "read"),  # more ranks receive than send
        ("plan", SHARED, {}, "pull"),
        ("plan", SHARED, {"nodes": 2}, "plan"),  # the budget has no room for messages between nodes
        ("stage", SHARED, {"push": True}, "push"),
        ("stage", PRIVATE, {}, "push"),  # the results will lie in windows
        ("plan", PRIVATE, {}, "push"),
        ("plan", PRIVATE, {"nodes": 2}, "plan"),
        ("stage", [*SHARED[:3], (0, 0)], {}, "push"),
        ("stage", PRIVATE, NO_ROOM, "plan"),
        ("stage", PRIVATE, {**NO_ROOM, "nodes": 2}, "messages"),  # the other node may have room
        ("stage", PRIVATE, {**NO_ROOM, "into": True}, "plan"),
        ("stage", SHARED, NO_ROOM, "pull"),
        ("stage", SHARED, {**NO_ROOM, "push": True}, "pull"),
        ("plan", PRIVATE, NO_ROOM, "plan"),
        ("plan", SHARED, NO_ROOM, "pull"),
        ("stage", PRIVATE, {"into": True, "replicated": True}, "stage"),
        ("read", PRIVATE, NO_ROOM, "read"),
        ("read", PRIVATE, {"into": True, "plain": False}, "pack"),  # some tile is not C-ordered
        ("stage", PRIVATE, {"into": True}, "pack"),  # `out` in private memory
        ("stage", [(0, 5)] * 4, {"into": True}, "push"),
        ("stage", [(0, 5)] * 3 + [(0, 0)], {"into": True}, "pack"),
        ("stage", [(0, 0)] * (WORDS + 1), {"into": True}, "stage"),  # more ranks than words
        ("pull", [(0, 0)], {"nodes": 3}, "pull"),  # alone on a node
        ("stage", [(0, 0)], {}, "pull"),
        ("plan", SHARED, {"moves": None}, "plan"),
        ("overwrite", SHARED, {"moves": None}, "overwrite"),
    ],
)
def test_the_way_follows_from_what_the_ranks_of_the_node_posted(way: str, posts: list, options: dict, chosen: str):
    assert choose_transport(transfer(way, posts, **options)) == chosen
    assert chosen in TRANSPORTS
