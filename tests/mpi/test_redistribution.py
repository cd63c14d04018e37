"""`redistribute` on one rank: what it returns, its options, and the same error for every rank's mistake.

Moves on several ranks are in tests/runtime/on_mpi.
"""

from __future__ import annotations

from inspect import signature

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.errors import BudgetError, PlanError, TileError
from reshard.mpi import redistribute
from reshard.mpi.redistribution import RedistributeOptions, TreeOptions
from reshard.runtime import Account
from reshard.types import Layout, Mesh

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
        (TILE, {"out": TILE}, TileError, "out overlaps the tile"),
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
