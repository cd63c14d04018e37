"""Relabelling: the elements that stay are counted as the meaning says, and no assignment of tiles keeps more."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")
pytest.importorskip("scipy")

from reshard.errors import LayoutError, PlanError
from reshard.mpi import DistArray, relabel
from reshard.mpi.relabel import kept_elements, relabelled
from reshard.types import Layout, Mesh
from tests.mpi import running
from tests.oracle import PADDING, tiles_of

TURNED = Mesh({"x": 3}, device_ids=[2, 0, 1])
PAIRS = [
    ("f32[{x}4, 6]", Mesh(x=3), "f32[{x}4, 6]", TURNED),
    ("f32[{x}4, 6]", Mesh(x=3), "f32[12, {x}2]", TURNED),
    ("f32[{x}3/7, 5]", Mesh(x=3), "f32[3{x}1/7, 5]", Mesh(x=3)),
    ("f32[{a}2/3, {b}3/5]", Mesh(a=2, b=2), "f32[3, {b}{a}2/5]", Mesh(a=2, b=2)),
    ("f32[6]", Mesh(x=4), "f32[{x}2/6]", Mesh(x=4)),
    ("f32[{x}3/7, 5]", Mesh(x=3), "f32[4{x}1/7, 5]", Mesh({"x": 2}, device_ids=[1, 2])),
    ("f32[{x}1/1]", Mesh(x=2), "f32[{x}1/1]", Mesh({"x": 2}, device_ids=[1, 0])),  # one element is worth two tiles
]


def layouts(pair: tuple[str, Mesh, str, Mesh]) -> tuple[Layout, Layout]:
    before, one, after, other = pair
    return Layout.parse(before, one), Layout.parse(after, other)


def in_common(source: Layout, target: Layout) -> np.ndarray:
    """At [r, t], the elements of device r's tile that are in device t's tile of the target, from the oracle's tiles."""
    held, wanted = ({d: set(t.ravel()) - {PADDING} for d, t in tiles_of(side).items()} for side in (source, target))
    devices = sorted(target.mesh.devices)
    return np.array([[len(held.get(mine, set()) & wanted[theirs]) for theirs in devices] for mine in devices])


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_kept_elements(pair: tuple[str, Mesh, str, Mesh]) -> None:
    source, target = layouts(pair)
    assert np.array_equal(kept_elements(source, target), in_common(source, target))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_no_assignment_keeps_more(pair: tuple[str, Mesh, str, Mesh]) -> None:
    source, target = layouts(pair)
    result = relabelled(source, target)
    counts = in_common(source, target)
    most = max(sum(counts[rank, tile] for rank, tile in enumerate(order)) for order in permutations(range(len(counts))))
    assert np.trace(in_common(source, result)) == most
    assert result.mesh.axes == target.mesh.axes and set(result.mesh.devices) == set(target.mesh.devices)
    assert (result.dims, result.dtype) == (target.dims, target.dtype)


def test_if_all_assignments_keep_as_much_no_tile_changes_its_rank() -> None:
    rows, columns = Layout.parse("f32[{x}2, 6]", Mesh(x=3)), Layout.parse("f32[6, {x}2]", TURNED)
    assert relabelled(rows, columns) == columns


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(relabel, "import_module", absent)
    with pytest.raises(PlanError, match="pip install scipy"):
        relabelled(*layouts(PAIRS[0]))


@pytest.mark.slow
def test_relabelling_on_ranks(tmp_path: Path) -> None:
    running.check("arrays.relabelling", 3, tmp_path)


def test_what_is_not_a_layout_is_refused():
    layout = Layout.parse("f32[{x}4, 6]", Mesh(x=3))
    with pytest.raises(LayoutError, match=r"the target .* is a list, not a Layout"):
        relabelled(layout, [1.0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="give two layouts of one array"):
        relabelled(layout, Layout.parse("f32[{x}4, 5]", Mesh(x=3)))
    with pytest.raises(LayoutError, match=r"the layout .* is a ndarray, not a Layout"):
        DistArray(np.zeros((4, 6)), layout, comm=None)  # pyright: ignore[reportArgumentType]
