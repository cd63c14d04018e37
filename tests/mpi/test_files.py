"""Arrays in files: what is written, what is read back in other layouts, and folders that hold another array."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

import reshard as rs
from reshard.errors import LayoutError
from reshard.mpi import files
from reshard.types import Layout, Mesh
from tests.files.tile_folders import write_layout, write_tile
from tests.mpi import running
from tests.oracle import PADDING, tiles_of

SAVED = Layout.parse("s32[2{x}2/7, {y}2/3]", Mesh({"x": 2, "y": 2}, device_ids=[3, 1, 0, 2]))
OTHERS = [
    Layout.parse("s32[7, 3]", Mesh(k=1)),
    Layout.parse("s32[{k}3/7, 3]", Mesh(k=3)),
    Layout.parse("s32[4{k}1/7, {j}1]", Mesh(k=2, j=3)),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The oracle's tiles, written rank by rank."""
    path = tmp_path / "array"
    path.mkdir()
    tiles = tiles_of(SAVED)
    for rank, device in enumerate(sorted(SAVED.mesh.devices)):
        write_tile(path, rank, tiles[device].astype("int32"), "a1")
    write_layout(path, SAVED, "a1")
    return path


def one_tile(path: Path, layout: Layout, tile: np.ndarray) -> None:
    write_tile(path, 0, tile, "b2")
    write_layout(path, layout, "b2")


@pytest.mark.parametrize("layout", OTHERS, ids=str)
def test_every_rank_of_another_layout_reads_its_elements(folder: Path, layout: Layout) -> None:
    tiles = tiles_of(layout)
    for rank, device in enumerate(sorted(layout.mesh.devices)):
        tile = np.full(layout.tile_shape, PADDING, np.int32)
        files.read_saved_tile(files.find_saved(folder, layout, rank), tile)
        real = tiles[device] != PADDING
        assert np.array_equal(tile[real], tiles[device][real])


def test_only_the_files_that_have_elements_are_read(folder: Path) -> None:
    """The device of the first rows and columns needs one file of four."""
    layout = Layout.parse("s32[{k}1/7, 3]", Mesh(k=7))
    for device in SAVED.mesh.devices:
        rank = sorted(SAVED.mesh.devices).index(device)
        if not (tiles_of(SAVED)[device] < 3).any():
            (folder / f"tile-{rank}-a1.npy").unlink()
    tile = np.full(layout.tile_shape, PADDING, np.int32)
    files.read_saved_tile(files.find_saved(folder, layout, 0), tile)
    assert tile.tolist() == [[0, 1, 2]]


def test_the_dtype_is_that_of_the_layout_or_of_the_files(tmp_path: Path, folder: Path) -> None:
    assert files.find_saved(folder, SAVED, 0).dtype == np.int32
    raw = Layout.parse("u32[3]", Mesh())
    kind = np.dtype([("a", "<i2"), ("b", "<i2")])
    one_tile(tmp_path, raw, np.zeros(3, kind))
    assert files.find_saved(tmp_path, raw, 0).dtype == kind


@pytest.mark.parametrize(
    ("text", "message"),
    [("s32[3, 7]", "of another shape or dtype than"), ("f32[7, 3]", "of another shape or dtype than")],
)
def test_another_array_is_refused(folder: Path, text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        files.find_saved(folder, Layout.parse(text, Mesh()), 0)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("format", True, "format is True, not a whole number"),
        ("format", 2.0, "format is 2.0, not a whole number"),
        ("format", 3, "format is 3, and this version reads format 2"),
        ("format", 10**30, "this version reads format 2"),
        ("layout", 7, "layout is 7, not text"),
        ("layout", "s32[7", "cannot re"),
        ("mesh", [["x", 2], ["y", 2]], "mesh is .*, not an object"),
        ("mesh", {"x": True, "y": 2}, "axis 'x' has size True"),
        ("mesh", {"x": 10**400, "y": 2}, "axis 'x' has size"),
        ("device_ids", "3102", "device_ids is '3102', not a list or null"),
        ("device_ids", [3, 1, 0, 2.0], "item 4 of device_ids is 2.0"),
        ("save", 7, "save is 7, not text"),
        ("save", "../a1", "the save '../a1' is not letters and digits"),
        ("save", None, "save is None, not text"),
    ],
)
def test_a_layout_that_was_edited_is_refused(folder: Path, field: str, value: object, text: str) -> None:
    head = json.loads((folder / "layout.json").read_text())
    (folder / "layout.json").write_text(json.dumps(head | {field: value}))
    with pytest.raises(LayoutError, match=f"is not a saved array: .*{text}"):
        files.find_saved(folder, SAVED, 0)
    del head[field]
    (folder / "layout.json").write_text(json.dumps(head))
    with pytest.raises(LayoutError, match=f"{field} is missing.*; save the array again"):
        files.find_saved(folder, SAVED, 0)


def test_a_layout_that_is_not_json_is_refused(folder: Path) -> None:
    content = (folder / "layout.json").read_bytes()
    given = json.loads(content)
    huge = json.dumps({**given, "mesh": {**given["mesh"], "z": 1 << 31}, "device_ids": None}).encode()
    for data in (b"", content[:-1], b"[]", b"\xff", b"[" * 100000, b'{"format": ' + b"9" * 5000 + b"}", huge):
        (folder / "layout.json").write_bytes(data)
        with pytest.raises(LayoutError, match="is not a saved array: "):
            files.find_saved(folder, SAVED, 0)


def test_sums_are_not_finished_by_reading(tmp_path: Path) -> None:
    partial = Layout.from_spec(Mesh(x=2), (4,), "int32", [[]], unreduced=["x"])
    for rank in range(2):
        write_tile(tmp_path, rank, np.zeros(4, np.int32), "b2")
    write_layout(tmp_path, partial, "b2")
    assert files.find_saved(tmp_path, partial, 1).dtype == np.int32
    with pytest.raises(LayoutError, match="reading finishes no sums"):
        files.find_saved(tmp_path, Layout.parse("s32[4]", Mesh(x=2)), 0)


def test_a_tile_is_told_from_every_other_one(folder: Path) -> None:
    """What is wrong with one file is an error of the ranks that read it, and of no other."""
    whole, (tile, other) = Layout.parse("s32[7, 3]", Mesh(k=1)), (folder / f"tile-{r}-a1.npy" for r in (1, 2))
    content = tile.read_bytes()
    short = Layout.parse("s32[{k}1/7, 3]", Mesh(k=7))  # Rank 0 reads the row that devices 3 and 1 hold.
    used = list(files._fetches_of_files(SAVED, short, 0))
    damage: dict[str, bytes | None] = {
        "cannot be opened (No such file": None,
        "begins with b''": b"",
        "no .npy of version 1 or 2": content[:6] + b"\7" + content[7:],
        f"{len(content) - 1} B instead of {len(content)}": content[:-1],
        "its header has ": content[: content.index(b"\n") - 5],
        "is not tile 1 of save a1, but b'\\ntile 2 of save a1": other.read_bytes(),
        "is not tile 1 of save a1, but b'\\ntile 1 of save a2": content.replace(b"save a1", b"save a2"),
        f"{len(content) + 4} B instead of": content + b"more",
    }
    for text, data in damage.items():
        tile.unlink(missing_ok=True)
        if data is not None:
            tile.write_bytes(data)
        with pytest.raises(LayoutError) as caught:
            files.find_saved(folder, whole, 0)
        assert text in str(caught.value) and "tile-1-a1.npy" in str(caught.value)
        if 1 not in used:
            files.find_saved(folder, short, 0)
    tile.write_bytes(content)
    files.find_saved(folder, whole, 0)


HEADERS = {
    "'''": "TokenError",
    "{'descr': '<i4', \\\n": "Error",
    "[" * 9000: "Error",
    "{'descr': '<i4', 'fortran_order': False, 'shape': (9999999999999999999999, 2), }": "Error|shape",
    "{'descr': '<i4', 'fortran_order': False, 'shape': (-4, 2), }": "Error|shape",
    "{'descr': '<i4', 'fortran_order': False, 'shape': (1 << 9, 2), }": "Error",
    "{'descr': '|O', 'fortran_order': False, 'shape': (4, 2), }": "its elements are Python objects",
    "{'descr': ('<i4', (99999, 99999)), 'fortran_order': False, 'shape': (4, 2), }": "Error|elements of",
}


@pytest.mark.parametrize("header", HEADERS, ids=map(str, range(len(HEADERS))))
def test_a_damaged_header_is_refused(folder: Path, header: str) -> None:
    tile = folder / "tile-2-a1.npy"
    start = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header.encode()
    tile.write_bytes(start + tile.read_bytes().partition(b"\n")[2])
    with pytest.raises(LayoutError, match=HEADERS[header]):
        files.find_saved(folder, Layout.parse("s32[7, 3]", Mesh()), 0)


def test_what_is_no_regular_file_is_not_waited_for(folder: Path) -> None:
    for name in ("tile-2-a1.npy", "layout.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(LayoutError, match="is a pipe, not a regular file"):
            files.find_saved(folder, Layout.parse("s32[7, 3]", Mesh()), 0)


@pytest.mark.parametrize(
    ("tile", "text"),
    [
        (np.zeros((2, 2), np.int32), r"has shape \(2, 2\), and tiles of .* have \(4, 2\)"),
        (np.zeros((4, 2), np.float32), "has elements of float32, not of int32"),
        (np.zeros((4, 2), ">i4"), "its elements are >i4, big-endian"),
        (np.zeros((4, 2), "V8"), r"has elements of \|V8, not of int32"),
    ],
)
def test_a_tile_of_another_shape_or_dtype_is_refused(folder: Path, tile: np.ndarray, text: str) -> None:
    write_tile(folder, 2, tile, "a1")
    with pytest.raises(LayoutError, match=text):
        files.find_saved(folder, Layout.parse("s32[7, 3]", Mesh()), 0)


def test_tiles_of_every_memory_order_and_dtype_are_read_back(tmp_path: Path) -> None:
    for number, kind in enumerate(("f4", "bfloat16", "i4,f4", "M8[s]")):
        import ml_dtypes

        dtype = np.dtype(getattr(ml_dtypes, kind, kind))
        name = {"f4": "float32", "bfloat16": "bfloat16"}.get(kind, "uint64")
        layout = Layout.tiled(Mesh(), (3, 5), name, [[], []])
        tile = np.arange(15).reshape(3, 5).astype(dtype if number != 2 else "i4")
        tile = tile.astype(dtype) if number != 2 else np.array(tile.astype("i4"), dtype)
        for order in "CF":
            one_tile(tmp_path, layout, np.array(tile, order=order))
            assert files.find_saved(tmp_path, layout, 0).dtype == dtype
            result = np.zeros((3, 5), dtype)
            files.read_saved_tile(files.find_saved(tmp_path, layout, 0), result)
            assert np.array_equal(result, tile)


SAVE = """
import os, sys, signal
from mpi4py import MPI
from reshard.mpi import DistArray
from reshard.types import Layout, Mesh

comm, (path, value, point) = MPI.COMM_WORLD, sys.argv[1:]
count = 0

def killed(real):
    def call(*given, **options):
        global count
        count += 1
        if comm.rank == comm.size - 1 and str(count) == point:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given, **options)
    return call

layout = Layout.from_spec(Mesh(x=comm.size), (7, 5), "int32", [["x"]])
array = DistArray.full(layout, int(value), comm)
os.pwritev, os.fsync, os.replace = killed(os.pwritev), killed(os.fsync), killed(os.replace)
array.save(path)
"""


def save_full(path: Path, value: int, ranks: int = 1, point: int = 0) -> int:
    """Saves an array of one value, by ranks of which the last is killed at its `point`th call that touches the disk."""
    (path.parent / "save.py").write_text(SAVE)
    started = running.start([str(path.parent / "save.py"), str(path), str(value), str(point)], ranks)
    text = running.output(started)
    assert (started.returncode != 0) == (point > 0), text
    return started.returncode


def saved_values(path: Path) -> set[int]:
    tile, layout = np.zeros((7, 5), np.int32), Layout.parse("s32[7, 5]", Mesh())
    files.read_saved_tile(files.find_saved(path, layout, 0), tile)
    return set(tile.ravel().tolist())


def test_a_save_takes_the_place_of_others(tmp_path: Path) -> None:
    """Of those without a sidecar, too; what is not of any save stays."""
    path = tmp_path / "array"
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    one_tile(path, Layout.parse("s32[7, 5]", Mesh()), np.zeros((7, 5), np.int32))
    save_full(path, 1, 2)
    (tile, _) = sorted(file.name for file in path.glob("tile-*.npy"))
    save = tile.removeprefix("tile-0-").removesuffix(".npy")
    head = json.loads((path / "layout.json").read_text())
    mesh = {"mesh": {"x": 2}, "device_ids": None}
    assert head == {"format": 2, "layout": "s32[{x}4/7, 5]", **mesh, "save": save}
    assert np.array_equal(np.load(path / tile), np.ones((4, 5)))
    # The sums are those that every load compares.
    loaded = rs.files.load(path, {"array": Layout.parse("s32[7, 5]", Mesh())})["array"][0]
    assert np.array_equal(loaded, np.ones((7, 5)))
    save_full(path, 2)
    kept = {"layout.json", "notes.txt", "reshard.json"}
    assert len(set(os.listdir(path)) - kept) == 1 and saved_values(path) == {2}


KILLED = [(1, 1, 1), (1, 10, 2), (2, 1, 1), (1, 5, 1), (1, 9, 1), (2, 2, 1)]


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize(
    ("ranks", "point", "survivor"),
    [pytest.param(*each, marks=() if number < 3 else pytest.mark.slow) for number, each in enumerate(KILLED)],
)
def test_an_older_save_survives_one_that_is_killed(ranks: int, point: int, survivor: int, tmp_path: Path) -> None:
    """With two ranks the second one dies."""
    path = tmp_path / "array"
    save_full(path, 1)
    save_full(path, 2, ranks, point)
    assert saved_values(path) == {survivor}
    save_full(path, 3)
    assert saved_values(path) == {3} and len(os.listdir(path)) == 3


def test_folders_that_hold_no_array(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"is not a saved array: .*layout.json"):
        files.find_saved(tmp_path, SAVED, 0)
