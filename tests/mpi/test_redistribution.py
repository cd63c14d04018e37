"""`redistribute`, `move` and handles on one rank: results, options, trees, views, and what is refused."""

from __future__ import annotations

from inspect import signature
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI
from numpy.lib.stride_tricks import as_strided

import reshard as rs
from reshard.errors import AgreementError, BudgetError, LayoutError, PlanError, RankError, TileError
from reshard.mpi import move, prepare, redistribute, redistribution
from reshard.mpi.redistribution import RedistributeOptions, TreeOptions
from reshard.runtime import Account
from reshard.types import Layout, Mesh

# ---- `redistribute` on one rank: what it returns, its options, and the same error for every rank's mistake


COMM = MPI.COMM_SELF
SOURCE = Layout.parse("f64[5{x}1, 7]", Mesh(x=1))
MOVED = Layout.parse("f64[5, 7]", Mesh(y=1))
TILE = np.arange(35.0).reshape(5, 7)


def test_equal_layouts_return_a_c_ordered_tile_itself() -> None:
    assert redistribute(TILE, SOURCE, SOURCE, COMM) is TILE
    fortran = np.asfortranarray(TILE)
    result = redistribute(fortran, SOURCE, SOURCE, COMM)
    assert result is not fortran and result.flags.c_contiguous and np.array_equal(result, TILE)


@pytest.mark.parametrize("tile", [TILE, np.asfortranarray(TILE), TILE[::-1][::-1], np.repeat(TILE, 2, 1)[:, ::2]])
def test_tiles_of_any_strides(tile: np.ndarray) -> None:
    out = np.zeros((5, 7))
    assert redistribute(tile, SOURCE, MOVED, COMM, out=out) is out
    assert np.array_equal(out, TILE)


def test_the_account_is_filled() -> None:
    memory = Account("float64")
    redistribute(TILE, SOURCE, MOVED, COMM, out=np.zeros((5, 7)), memory=memory)
    assert memory.received_bytes == 0 and memory.peak_bytes >= TILE.nbytes


def test_relabelling_returns_the_layout_too() -> None:
    pytest.importorskip("scipy")
    result, layout = redistribute(TILE, SOURCE, MOVED, COMM, relabel=True)
    assert np.array_equal(result, TILE) and layout == MOVED


@pytest.mark.parametrize(
    ("tile", "options", "kind", "text"),
    [
        (TILE.T, {}, TileError, "the tile has shape (7, 5)"),
        (TILE.astype("f4"), {}, TileError, "the tile is float32"),
        (TILE, {"out": np.zeros((7, 5))}, TileError, "the out has shape (7, 5)"),
        (TILE.astype(">f4"), {}, TileError, "cast it first"),
        (0.0, {}, TileError, "the tile has shape ()"),
        (TILE, {"out": TILE}, TileError, "out overlaps the tile"),
        (TILE, {"out": TILE[::-1]}, TileError, "out overlaps the tile"),
        (TILE, {"out": [[0.0]]}, TileError, "out is a list; give a numpy array"),
        (TILE, {"out": np.broadcast_to(0.0, (5, 7))}, TileError, "out is read-only"),
        (TILE, {"out": as_strided(np.zeros(11), (5, 7), (8, 8))}, TileError, "its elements share memory"),
        (TILE, {"budget": 3}, BudgetError, "budget 3 B"),
        (TILE, {"budget": "3 B"}, BudgetError, "budget 3 B"),
        (TILE, {"budget": "3 apples"}, PlanError, "'3 apples'"),
        (range(10**12), {}, TileError, "device 0's tile range(0, 1000000000000) is not an array of shape (5, 7)"),
        ([[1.0], [2.0, 3.0]], {}, TileError, "is not an array of shape (5, 7)"),
        (TILE, {"limit": 0}, PlanError, "limit 0: give a positive number of seconds"),
        (TILE, {"limit": float("nan")}, PlanError, "limit nan: give a positive number of seconds"),
        (TILE, {"donate": "no"}, PlanError, "donate 'no': give True or False"),
        (TILE, {"padded": 0}, PlanError, "padded 0: give True or False"),
        (TILE, {"cuda_aware": []}, PlanError, "cuda_aware []: give True or False"),
    ],
)
def test_mistakes(tile: np.ndarray, options: RedistributeOptions, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        redistribute(tile, SOURCE, MOVED, COMM, **options)
    assert text in str(caught.value)


def test_a_budget_in_words() -> None:
    assert np.array_equal(redistribute(TILE, SOURCE, MOVED, COMM, budget="1 MiB"), TILE)


def test_a_mesh_of_another_size_than_the_communicator() -> None:
    rows = Layout.parse("f64[{x}4]", Mesh(x=2))
    with pytest.raises(PlanError, match="not every device is one of the 1 ranks"):
        redistribute(np.zeros(4), rows, rows, COMM)


def test_the_typed_options_are_those_of_the_function() -> None:
    """The overloads share `RedistributeOptions`, and `TreeOptions`; the function lists its options one by one."""
    parameters = signature(redistribute).parameters.values()
    options = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert options == {*RedistributeOptions.__annotations__, *TreeOptions.__annotations__, "relabel"}


# ---- Handles on one rank; those on several are in tests/mpi/again.py


ROWS, WHOLE = Layout.parse("f64[{x}4, 3]", Mesh(x=1)), Layout.parse("f64[4, 3]", Mesh(x=1))
TILE_HANDLES = np.arange(12.0).reshape(4, 3)


def test_a_handle_moves_and_names_its_ends():
    with prepare(ROWS, WHOLE, MPI.COMM_SELF) as handle:
        assert (handle.source, handle.target) == (ROWS, WHOLE)
        out = np.zeros((4, 3))
        assert handle(TILE_HANDLES, out=out) is out and np.array_equal(out, TILE_HANDLES)
        assert np.array_equal(handle.start(TILE_HANDLES).wait(), TILE_HANDLES)
    with pytest.raises(PlanError, match="freed"):
        handle(TILE_HANDLES)
    with pytest.raises(PlanError, match="freed"):
        handle.start(TILE_HANDLES).wait()


def test_wrong_arguments():
    with pytest.raises(LayoutError):
        prepare("rows", WHOLE, MPI.COMM_SELF)
    with pytest.raises(PlanError, match="budget"):
        prepare(ROWS, WHOLE, MPI.COMM_SELF, budget="much")
    for limit in ("soon", 0, -1.0, float("nan"), True):
        with pytest.raises(PlanError, match=f"limit {limit!r}: give a positive number of seconds"):
            prepare(ROWS, WHOLE, MPI.COMM_SELF, limit=limit)  # type: ignore[arg-type]
    with pytest.raises(TileError, match="shape"):
        prepare(ROWS, WHOLE, MPI.COMM_SELF).start(TILE_HANDLES.T).wait()


def test_ends_that_are_text_take_what_they_lack_from_the_other_one():
    for source, target in ((str(ROWS), WHOLE), (ROWS, str(WHOLE)), (ROWS, [None] * len(ROWS.shape))):
        assert np.array_equal(prepare(source, target, MPI.COMM_SELF)(TILE_HANDLES), TILE_HANDLES)
        assert np.array_equal(redistribute(TILE_HANDLES, source, target, MPI.COMM_SELF), TILE_HANDLES)


@pytest.mark.parametrize("spec", ["text", "jax"])
def test_targets_of_trees_in_any_form(spec: str):
    one = str(WHOLE) if spec == "text" else pytest.importorskip("jax.sharding").PartitionSpec()
    for target in (one, {"w": str(WHOLE), "v": {"u": one}}):
        tiles = {"w": TILE_HANDLES, "v": {"u": TILE_HANDLES}}
        moved = redistribute(tiles, ROWS, target, MPI.COMM_SELF)
        assert np.array_equal(moved["w"], TILE_HANDLES) and np.array_equal(moved["v"]["u"], TILE_HANDLES)


def test_a_handle_ends_with_its_communicator():
    comm = MPI.COMM_SELF.Dup()
    handle = prepare(ROWS, WHOLE, comm)
    comm.Free()
    with pytest.raises(RankError):
        handle(TILE_HANDLES)


# ---- `reshard.mpi.move` on one rank and on several; see `tests.mpi.views`


def test_one_rank():
    mesh = rs.Mesh(x=1)
    fused, part = rs.Layout.parse("s64[6]", mesh), rs.Layout.parse("s64[3]", mesh)
    odd = rs.Move(fused, part, view="(h two) -> h", take={"two": 1}, two=2)
    assert move(np.arange(6), odd, MPI.COMM_SELF).tolist() == [1, 3, 5]
    out = np.zeros(6, "i8")
    back = rs.Move(part, fused, view="h -> (h two)", into={"two": 0}, two=2)
    assert move(np.array([7, 8, 9]), back, MPI.COMM_SELF, out=out) is out
    assert out.tolist() == [7, 0, 8, 0, 9, 0]
    with pytest.raises(TileError, match="C-ordered"):
        move(np.array([7, 8, 9]), back, MPI.COMM_SELF, out=np.zeros(12, "i8")[::2])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            rs.Layout.parse("s64[6]", rs.Mesh(x=1)),
            r"the source is the layout s64\[6\], and no target is given; give Move\(",
        ),
        (None, "the source is None, not a Layout or a Move"),
    ],
)
def test_what_is_not_a_move_is_refused(given: Any, text: str):
    with pytest.raises(LayoutError, match=text):
        move(np.arange(6), given, MPI.COMM_SELF)


# ---- Trees of tiles: one rank here, several in the topics of `tests.mpi.trees`


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
    honest = redistribution.run_launches

    def swapped(*given: Any) -> Any:
        moved = honest(*given)
        return {**moved, "q": moved["k"], "k": moved["q"]}

    monkeypatch.setattr(redistribution, "run_launches", swapped)
    with pytest.raises(AgreementError, match=r"the values of \['q', 'k'\] are not .* of 3 arrays compared"):
        redistribute(tiles, moves, None, COMM, verify="hash")


def test_scaled_values_are_not_verified() -> None:
    move = rs.Move(Layout.parse("f32[4]", Mesh(x=1)), Layout.parse("bf16[4]", Mesh(x=1)), cast=True)
    with pytest.raises(PlanError, match=r"verify compares no scaled values: move .'w'. in a call without it"):
        redistribute({"w": np.ones(4, "float32")}, {"w": move}, None, COMM, scale={"w": 2.0}, verify="hash")


def test_a_version_of_a_single_tile_is_refused() -> None:
    with pytest.raises(PlanError, match="version"):
        redistribute(TILE, SOURCE, MOVED, COMM, version=3)
