"""Arrays of numpy in files: what `reshard.files.open` says of them, read back by numpy alone."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import reshard as rs
from reshard.errors import FileError
from reshard.types import Layout, Mesh
from tests.files.piece_reader import read_pieces
from tests.files.tile_folders import write_layout, write_tile
from tests.oracle import tiles_of

XY = Mesh({"x": 2, "y": 2}, device_ids=[3, 1, 0, 2])
LAYOUTS = {
    "one tile": Layout.parse("s32[7, 3]", Mesh(x=1)),
    "rows": Layout.parse("s32[{x}4, 6]", Mesh(x=2)),
    "padded in both dims, ids out of order": Layout.parse("s32[{x}4/7, {y}2/3]", XY),
    "dealt in rounds and padded": Layout.parse("s32[2{x}2/7, {y}2/3]", XY),
    "dealt one by one": Layout.parse("s32[4{x}1/7, 2]", XY),
    "replicated along y": Layout.parse("s32[{x}4, 6]", XY),
    "with pieces that are all padding": Layout.parse("s32[{x}1/3, 2]", Mesh(x=4)),
    "without elements": Layout.parse("s32[{x}2, 0]", Mesh(x=2)),
    "of three dims, a middle one split": Layout.parse("s32[3, {x}2/3, {y}2]", XY),
    "a scalar": Layout.parse("s32[]", Mesh(x=2)),
}


def save_layout(folder: Path, layout: Layout, order: str = "C") -> np.ndarray:
    """The tiles of the oracle in a folder; returns the whole array."""
    folder.mkdir()
    for seat, device in enumerate(sorted(layout.mesh.devices)):
        write_tile(folder, seat, np.asarray(tiles_of(layout)[device].astype("int32"), order=order), "a1")
    write_layout(folder, layout, "a1")
    return np.arange(np.prod(layout.shape), dtype="int32").reshape(layout.shape)


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("name", LAYOUTS)
def test_tiles_of_any_layout_are_pieces_of_the_array(tmp_path: Path, name: str, order: str):
    whole = save_layout(tmp_path / "w", LAYOUTS[name], order)
    ckpt = rs.files.open(tmp_path / "w")
    assert (list(ckpt), ckpt["w"].dtype, ckpt["w"].shape) == (["w"], "int32", whole.shape)
    np.testing.assert_array_equal(read_pieces(ckpt, "w", whole.dtype), whole)


def test_pieces_that_are_a_grid_are_a_layout_again(tmp_path: Path):
    save_layout(tmp_path / "w", LAYOUTS["padded in both dims, ids out of order"])
    stored = rs.files.open(tmp_path / "w")["w"]
    assert (stored.chunks, str(stored.layout)) == ((4, 2), "s32[{c0}4/7, {c1}2/3]")
    save_layout(tmp_path / "v", LAYOUTS["dealt in rounds and padded"])
    assert rs.files.open(tmp_path / "v")["v"].chunks is not None  # Rounds of even blocks are a grid, too.


@pytest.mark.parametrize("order", "CF")
def test_a_folder_of_arrays_and_one_alone(tmp_path: Path, order: str):
    arrays = {
        "a": np.arange(24, dtype="<f8").reshape(2, 3, 4),
        "b": np.array([True, False, True]),
        "c": np.full((), 2, "f2"),
    }
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", np.asarray(array, order=order))
    ckpt = rs.files.open(tmp_path)
    for name, array in arrays.items():
        assert (ckpt[name].dtype, ckpt[name].shape) == (str(array.dtype), array.shape)
        np.testing.assert_array_equal(read_pieces(ckpt, name, array.dtype), array)
    assert ckpt["a"].pieces[0].strides == (None if order == "C" else (1, 2, 6))
    assert set(rs.files.open(tmp_path / "b.npy")) == {"b"}


OTHERS = {
    "objects": (np.array([{}, None]), "Python objects, which only a pickle holds"),
    "big-endian": (np.arange(3, dtype=">i4"), "big-endian"),
    "no name": (np.zeros(2, ml_dtypes.bfloat16).view("V2"), "no numbers that have a name"),
    "fields": (np.zeros(2, "i4,f4"), "no numbers that have a name"),
    "text": (np.array(["ab"]), "no numbers that have a name"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_arrays_of_what_is_no_number_are_refused(tmp_path: Path, what: str):
    array, why = OTHERS[what]
    np.save(tmp_path / "w.npy", array, allow_pickle=True)
    with pytest.raises(FileError, match=rf"w.npy', tensor 'w'.*{why}"):
        rs.files.open(tmp_path / "w.npy")


def header_of(text: str, version: bytes = b"\1\0") -> bytes:
    return b"\x93NUMPY" + version + len(text).to_bytes(2 if version < b"\2" else 4, "little") + text.encode()


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }"
BAD = {
    "empty": b"",
    "cut magic": b"\x93NUM",
    "other magic": b"PK\3\4" + header_of(GOOD)[4:],
    "version 9": header_of(GOOD, b"\x09\0"),
    "header past the end": header_of(GOOD)[:20],
    "header of 4 GiB": b"\x93NUMPY\2\0\xff\xff\xff\xff" + b" " * 64,
    "code": header_of("__import__('os').system('touch /tmp/x')"),
    "deep": header_of("(" * 4000),
    "negative": header_of(GOOD.replace("3, 4", "-3, 4")),
    "huge": header_of(GOOD.replace("3, 4", f"{2**62}, 4")),
    "true for a size": header_of(GOOD.replace("3, 4", "True, 4")),
    "not a tuple": header_of(GOOD.replace("(3, 4)", "12")),
    "unknown dtype": header_of(GOOD.replace("<f4", "<q9")),
    "field missing": header_of(GOOD.replace("'fortran_order': False, ", "")),
    "a byte short": header_of(GOOD) + bytes(47),
    "a byte more": header_of(GOOD) + bytes(49),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("what", BAD)
def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path, what: str):
    (tmp_path / "w.npy").write_bytes(BAD[what])
    with pytest.raises(FileError, match=r"w.npy'.* (byte|begins)"):
        rs.files.open(tmp_path / "w.npy")


@pytest.mark.parametrize(
    "damage", ["gone", "cut", "another", "of another save", "shape", "dtype", "layout", "sum", "pipe"]
)
def test_a_damaged_folder_of_tiles_is_refused(tmp_path: Path, damage: str):

    folder, layout = tmp_path / "w", Layout.parse("s32[{x}4, 6]", Mesh(x=2))
    save_layout(folder, layout)
    tile, other = folder / "tile-1-a1.npy", folder / "tile-0-a1.npy"
    content = tile.read_bytes()
    if damage == "gone":
        tile.unlink()
    elif damage == "cut":
        tile.write_bytes(content[:-30])
    elif damage == "another":
        tile.write_bytes(other.read_bytes())
    elif damage == "of another save":
        tile.write_bytes(content.replace(b"save a1", b"save a2"))
    elif damage in ("shape", "dtype"):
        write_tile(
            folder, 1, np.zeros((4, 5) if damage == "shape" else (4, 6), "f4" if damage == "dtype" else "i4"), "a1"
        )
    elif damage == "pipe":
        tile.unlink()
        os.mkfifo(tile)
    else:
        text = (folder / "layout.json").read_text()
        changed = (
            text.replace("{x}4", "{x}5") if damage == "layout" else text.replace("s32[{x}4, 6]", "s32[8, 6] + sum{x}")
        )
        (folder / "layout.json").write_text(changed)
    with pytest.raises(FileError, match=rf"{folder}"):
        rs.files.open(folder)


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("name", LAYOUTS)
def test_load_reads_tiles_of_any_layout(tmp_path: Path, name: str, order: str):
    whole = save_layout(tmp_path / "w", LAYOUTS[name], order)
    mesh = Mesh(x=3)
    spec = [["x"], *[[] for _ in whole.shape]][: whole.ndim]
    layout = Layout.from_spec(mesh, whole.shape, "int32", spec)
    tiles = rs.files.load(tmp_path / "w", {"w": layout}, devices=mesh.devices)["w"]
    if whole.ndim:
        np.testing.assert_array_equal(np.concatenate([tiles[d] for d in mesh.devices])[: len(whole)], whole)
    else:
        assert all(tile == whole for tile in tiles.values())
