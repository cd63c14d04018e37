"""Nested dicts of tiles by name; calls with them are in test_trees.py."""

from __future__ import annotations

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.errors import LayoutError, PlanError, TileError
from reshard.mpi.redistribution import NamedErrors, distinct, flat_or_none, leaves_of, mapped, moves_of, unflattened
from reshard.types import Layout, Mesh

ROWS, WHOLE = (Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}4]", "f32[8]"))
TREE = {"a": {0: 1, "b": 2}, "c": 3}


def test_names_and_back():
    flat = dict(leaves_of(TREE, ""))
    assert flat == {"a.0": 1, "a.b": 2, "c": 3}
    assert unflattened(TREE, flat, "") == TREE
    assert mapped(TREE, str) == {"a": {0: "1", "b": "2"}, "c": "3"}


@pytest.mark.parametrize("tree", [{1.5: 1}, {"a": {"b": 1}, "a.b": 2}])
def test_names_that_do_not_tell_arrays_apart(tree: dict[str, object]):
    with pytest.raises(PlanError):
        leaves_of(tree, "")


def test_one_layout_for_all_or_one_for_each():
    flat = {"a": 1, "b": 2}
    assert moves_of(ROWS, {"a": WHOLE, "b": ROWS}, flat) == {"a": (ROWS, WHOLE), "b": (ROWS, ROWS)}
    for source in ("f32[8]", {"a": ROWS}, {"a": ROWS, "b": 3}):
        with pytest.raises(LayoutError):
            moves_of(source, WHOLE, flat)
    assert flat_or_none(None, "out") == {}
    with pytest.raises(TileError):
        flat_or_none([1], "out")


def test_ends_are_listed_once_with_their_first_array():
    assert distinct({"a": (ROWS, WHOLE), "b": (ROWS, WHOLE), "c": (WHOLE, ROWS)}) == [
        ("a", (ROWS, WHOLE)),
        ("c", (WHOLE, ROWS)),
    ]


def test_errors_name_the_array():
    with pytest.raises(LayoutError, match="b: wrong"), NamedErrors() as at:
        for at.name in ("a", "b"):
            if at.name == "b":
                raise LayoutError("wrong")
    with pytest.raises(KeyError), NamedErrors() as at:
        raise KeyError
