"""Trees of tiles: one rank here, several in the topics of `tests.mpi.trees`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

import reshard as rs
from reshard.errors import AgreementError, LayoutError, PlanError, TileError
from reshard.mpi import arguments, redistribute
from reshard.types import Layout, Mesh
from tests.mpi import running
from tests.mpi.trees import FAULTS

COMM = MPI.COMM_SELF
SOURCE = Layout.parse("f64[5{x}1, 7]", Mesh(x=1))
MOVED = Layout.parse("f64[5, 7]", Mesh(y=1))
TILE = np.arange(35.0).reshape(5, 7)


def test_more_than_twenty_faults_are_planted() -> None:
    assert len(FAULTS) >= 20


@pytest.mark.slow
def test_faults_of_one_rank_end_the_call_on_all(tmp_path: Path) -> None:
    running.check("trees.faults", 3, tmp_path)


@pytest.mark.slow
def test_random_trees(tmp_path: Path) -> None:
    running.check("trees.moves", 4, tmp_path)


TOPICS = [("across", 4), ("moves_through_views", 4), ("groups", 4), ("models", 6)]


@pytest.mark.slow
@pytest.mark.parametrize(("topic", "ranks"), [*TOPICS, ("across", 3), ("across", 6), ("groups", 5)])
@pytest.mark.parametrize("nodes", [1, 2, 6])
def test_trees_on_other_ranks(topic: str, ranks: int, nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RESHARD_MPI_NODES", str(min(nodes, ranks)))
    running.check(f"trees.{topic}", ranks, tmp_path)


@pytest.mark.slow
def test_arrays_of_any_shapes_travel_in_one_message_for_each_peer(tmp_path: Path) -> None:
    running.check("trees.few_messages", 4, tmp_path)


@pytest.mark.slow
def test_random_trees_on_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_MPI_NODES", "2")
    running.check("trees.moves", 4, tmp_path)


def test_a_tree_on_one_rank() -> None:
    moved = redistribute({"a": TILE, "b": {"c": TILE + 1}}, SOURCE, MOVED, COMM)
    assert np.array_equal(moved["a"], TILE) and np.array_equal(moved["b"]["c"], TILE + 1)


def test_tiles_without_padding() -> None:
    uneven = Layout.parse("f64[2{x}3/5]", Mesh(x=1))
    moved = redistribute({"a": np.arange(5.0)}, uneven, Layout.parse("f64[5]", Mesh(x=1)), COMM, padded=False)
    assert np.array_equal(moved["a"], np.arange(5.0))


NESTED: dict[str, object] = {}
NESTED["again"] = NESTED


@pytest.mark.parametrize(
    ("tiles", "source", "options", "error", "message"),
    [
        ({"a": TILE}, 7, {}, LayoutError, "the source of a tree of tiles is a int"),
        ({"a": TILE}, {"a": 7}, {}, LayoutError, "the source of 'a' is 7"),
        ({"a": TILE}, {"b": SOURCE}, {}, LayoutError, "have different names"),
        ({"a": TILE}, {"a": SOURCE}, {"out": TILE}, TileError, "the out of a tree of tiles is a ndarray"),
        ({"a": TILE}, {"a": SOURCE}, {"out": {"b": TILE}}, TileError, r"out: \['b'\] are not arrays of the tree"),
        ({"a": TILE}, {"a": SOURCE}, {"out": {"a": TILE}}, TileError, "a: out overlaps the tile"),
        ({"a": TILE}, {"a": SOURCE}, {"scale": {"a": 2.0}}, TileError, "a: scale 2.0: .* casts nothing"),
        ({"a": TILE}, {"a": SOURCE}, {"donate": True}, PlanError, "donate: for one tile"),
        ({"a": None}, {"a": SOURCE}, {}, TileError, "a: the tile is None"),
        ({"a": TILE}, {"a": SOURCE}, {"relabel": True}, PlanError, "relabel: for one tile"),
        ({"a": TILE}, {"a": SOURCE}, {"verify": 7}, PlanError, "verify 7"),
        ({"a": TILE}, {"a": SOURCE}, {"version": 1.5}, PlanError, "the version 1.5"),
        ({"a": TILE}, {"a": SOURCE}, {"budget": [1]}, PlanError, r"budget \[1\]"),
        ({"a": TILE}, {"a": SOURCE}, {"network": []}, PlanError, r"network \[\]"),
        ({"a": TILE[1:]}, {"a": SOURCE}, {}, TileError, r"a: the tile has shape \(4, 7\)"),
        ({None: TILE}, SOURCE, {}, PlanError, "the key None"),
        ({10**5000: TILE}, SOURCE, {}, PlanError, "the key an int of 16610 bits"),
        (NESTED, SOURCE, {}, PlanError, "nested more than 64 deep"),
        (
            {"a": TILE},
            {"a": SOURCE},
            {"version": 10**5000},
            PlanError,
            "the version an int of 16610 bits of all arrays",
        ),
        ({"a": TILE}, {"a": SOURCE}, {"version": {"a": []}}, PlanError, r"the version \[\] of 'a'"),
        ({"a": TILE}, {"a": SOURCE}, {"verify": np.arange(3)}, PlanError, "verify array"),
        ({"a.b": TILE, "a": {"b": TILE}}, SOURCE, {}, PlanError, "one name"),
    ],
)
def test_what_is_not_a_tree_is_refused(tiles, source, options, error, message) -> None:
    with pytest.raises(error, match=message):
        redistribute(tiles, source, MOVED, COMM, **options)


def test_views_and_casts_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query and key of a fused array, which a runtime swaps: both have the right layout, and the wrong values."""
    mesh = Mesh(x=1)
    fused, part = Layout.parse("f32[6, 4]", mesh), Layout.parse("bf16[4, 2]", mesh)
    options: dict[str, Any] = {"view": "(three h) m -> m h", "three": 3, "cast": True}
    moves = {name: rs.Move(fused, part, take={"three": at}, **options) for at, name in enumerate("qkv")}
    tiles = dict.fromkeys(moves, np.arange(24, dtype="float32").reshape(6, 4) / 3)
    moved = redistribute(tiles, moves, None, COMM, verify="hash")
    np.testing.assert_array_equal(moved["k"], tiles["k"][2:4].T.astype(moved["k"].dtype))
    honest = arguments.run_launches

    def swapped(*given: Any) -> Any:
        moved = honest(*given)
        return {**moved, "q": moved["k"], "k": moved["q"]}

    monkeypatch.setattr(arguments, "run_launches", swapped)
    with pytest.raises(AgreementError, match=r"the values of \['q', 'k'\] are not .* of 3 arrays compared"):
        redistribute(tiles, moves, None, COMM, verify="hash")


def test_scaled_values_are_not_verified() -> None:
    move = rs.Move(Layout.parse("f32[4]", Mesh(x=1)), Layout.parse("bf16[4]", Mesh(x=1)), cast=True)
    with pytest.raises(PlanError, match=r"verify compares no scaled values: move .'w'. in a call without it"):
        redistribute({"w": np.ones(4, "float32")}, {"w": move}, None, COMM, scale={"w": 2.0}, verify="hash")


def test_a_version_of_a_single_tile_is_refused() -> None:
    with pytest.raises(PlanError, match="version"):
        redistribute(TILE, SOURCE, MOVED, COMM, version=3)
