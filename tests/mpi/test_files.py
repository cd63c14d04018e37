"""Arrays in files: what is written, what is read back in other layouts, and folders that hold another array."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.errors import LayoutError
from reshard.mpi import files
from reshard.types import Layout, Mesh
from tests.mpi import running
from tests.mpi.sampling import sampled
from tests.oracle import PADDING, tiles_of

SAVED = Layout.parse("s32[2{x}2/7, {y}2/3]", Mesh({"x": 2, "y": 2}, device_ids=[3, 1, 0, 2]))
OTHERS = [
    Layout.parse("s32[7, 3]", Mesh(k=1)),
    Layout.parse("s32[{k}3/7, 3]", Mesh(k=3)),
    Layout.parse("s32[4{k}1/7, {j}1]", Mesh(k=2, j=3)),
]


@pytest.mark.parametrize(("topic", "ranks"), sampled(["saving"], [1, 3, 6], ("saving", 3)))
def test_saving_on_ranks(topic: str, ranks: int, tmp_path: Path) -> None:
    running.check(f"arrays.{topic}", ranks, tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The oracle's tiles, written rank by rank."""
    path = tmp_path / "array"
    files.make_folder(path)
    tiles = tiles_of(SAVED)
    for rank, device in enumerate(sorted(SAVED.mesh.devices)):
        files.write(path, SAVED, rank, tiles[device].astype("int32"))
    return path


@pytest.mark.parametrize("layout", OTHERS, ids=str)
def test_every_rank_of_another_layout_reads_its_elements(folder: Path, layout: Layout) -> None:
    tiles = tiles_of(layout)
    for rank, device in enumerate(sorted(layout.mesh.devices)):
        tile = np.full(layout.tile_shape, PADDING, np.int32)
        files.read(folder, layout, rank, tile)
        real = tiles[device] != PADDING
        assert np.array_equal(tile[real], tiles[device][real])


def test_only_the_files_that_have_elements_are_read(folder: Path) -> None:
    """The device of the first rows and columns needs one file of four."""
    layout = Layout.parse("s32[{k}1/7, 3]", Mesh(k=7))
    for device in SAVED.mesh.devices:
        rank = sorted(SAVED.mesh.devices).index(device)
        if not (tiles_of(SAVED)[device] < 3).any():
            (folder / f"tile-{rank}.npy").unlink()
    tile = np.full(layout.tile_shape, PADDING, np.int32)
    files.read(folder, layout, 0, tile)
    assert tile.tolist() == [[0, 1, 2]]


def test_the_layout_is_plain_json(folder: Path) -> None:
    head = json.loads((folder / "layout.json").read_text())
    assert head == {"format": 1, "layout": str(SAVED), "mesh": {"x": 2, "y": 2}, "device_ids": [3, 1, 0, 2]}
    assert np.load(folder / "tile-3.npy").shape == SAVED.tile_shape


def test_the_dtype_is_that_of_the_layout_or_of_the_files(tmp_path: Path, folder: Path) -> None:
    assert files.check_saved(folder, SAVED) == np.int32
    raw = Layout.parse("u32[3]", Mesh())
    kind = np.dtype([("a", "<i2"), ("b", "<i2")])
    files.write(tmp_path, raw, 0, np.zeros(3, kind))
    assert files.check_saved(tmp_path, raw) == kind


@pytest.mark.parametrize(
    ("text", "message"),
    [("s32[3, 7]", "of another shape or dtype than"), ("f32[7, 3]", "of another shape or dtype than")],
)
def test_another_array_is_refused(folder: Path, text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        files.check_saved(folder, Layout.parse(text, Mesh()))


def test_sums_are_not_finished_by_reading(tmp_path: Path) -> None:
    partial = Layout.from_spec(Mesh(x=2), (4,), "int32", [[]], unreduced=["x"])
    files.write(tmp_path, partial, 0, np.zeros(4, np.int32))
    assert files.check_saved(tmp_path, partial) == np.int32
    with pytest.raises(LayoutError, match="reading finishes no sums"):
        files.check_saved(tmp_path, Layout.parse("s32[4]", Mesh(x=2)))


def test_folders_that_hold_no_array(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"is not a saved array \(FileNotFoundError"):
        files.check_saved(tmp_path, SAVED)
    (tmp_path / "layout.json").write_text("{}")
    with pytest.raises(LayoutError, match=r"is not a saved array \(KeyError"):
        files.check_saved(tmp_path, SAVED)
    with pytest.raises(LayoutError, match="cannot make the folder"):
        files.make_folder(tmp_path / "layout.json" / "below")
