"""Safetensors files: what `reshard.files.open` says of them, against the safetensors library and numpy."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

import reshard as rs
from reshard.errors import FileError, MissingTensorError
from reshard.runtime.on_files.formats import metadata_files
from reshard.runtime.on_files.formats.metadata_files import OpenedFile
from tests.files.piece_reader import read_pieces

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
)
NARROW = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)


def write_checkpoint(folder: Path, *, index: bool = True) -> dict[str, np.ndarray]:
    """Three files with elements that say their global index, and the index of them."""
    shapes = {"layers.0.w": (6, 4), "layers.1.w": (6, 4), "layers.0.norm": (4,), "scale": (), "none": (0, 3)}
    arrays = {name: np.arange(np.prod(shape), dtype="float32").reshape(shape) for name, shape in shapes.items()}
    homes = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(arrays)}
    for home in set(homes.values()):
        save_file({name: arrays[name] for name in arrays if homes[name] == home}, folder / home, {"format": "pt"})
    if index:
        text = json.dumps({"metadata": {"total_size": 4 * 61}, "weight_map": homes})
        (folder / "model.safetensors.index.json").write_text(text)
    return arrays


@pytest.mark.parametrize("index", [True, False])
def test_a_folder_is_what_the_library_says_it_is(tmp_path: Path, index: bool):
    arrays = write_checkpoint(tmp_path, index=index)
    ckpt = rs.files.open(tmp_path)
    assert set(ckpt) == set(arrays)
    for name, array in arrays.items():
        assert (ckpt[name].shape, ckpt[name].dtype) == (array.shape, "float32")
        np.testing.assert_array_equal(read_pieces(ckpt, name, array.dtype), array)
    for file in ckpt.files:
        assert file.size == Path(file.path).stat().st_size
        if not file.path.endswith(".json"):
            with safetensors.safe_open(file.path, "numpy") as opened:
                assert set(opened.keys()) == {n for n in ckpt if ckpt.files[ckpt[n].pieces[0].file] == file}


def test_one_file_and_an_index_open_as_well(tmp_path: Path):
    arrays = write_checkpoint(tmp_path)
    assert set(rs.files.open(tmp_path / "model-0.safetensors")) == {"layers.0.w", "scale"}
    assert set(rs.files.open(tmp_path / "model.safetensors.index.json")) == set(arrays)


def test_every_dtype_of_whole_bytes_has_its_name(tmp_path: Path):
    arrays = {str(np.dtype(dtype)): np.ones((2, 3), dtype) for dtype in (*DTYPES, *NARROW)}
    save_file(arrays, tmp_path / "all.safetensors")
    ckpt = rs.files.open(tmp_path / "all.safetensors")
    assert {name: ckpt[name].dtype for name in ckpt} == {name: name for name in arrays}


def test_an_unknown_tensor_is_an_error_that_knows_the_nearest(tmp_path: Path):
    write_checkpoint(tmp_path)
    with pytest.raises(MissingTensorError, match=r"has no tensor 'layers.0.x'; did you mean 'layers.0.w'"):
        rs.files.open(tmp_path)["layers.0.x"]


def test_a_cache_of_links_opens_and_a_link_elsewhere_does_not(tmp_path: Path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0a1b"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    arrays = write_checkpoint(blobs)
    for blob in list(blobs.iterdir()):
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    assert set(rs.files.open(snapshot)) == set(arrays)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for blob in list(blobs.iterdir()):
        (elsewhere / blob.name).symlink_to(blob)
    with pytest.raises(FileError, match=r"a link out of the folder"):
        rs.files.open(elsewhere)


def test_hidden_files_and_those_that_no_index_names_are_passed_over(tmp_path: Path):
    arrays = write_checkpoint(tmp_path, index=False)
    (tmp_path / "._model-0.safetensors").write_bytes(b"left by a copy")
    assert set(rs.files.open(tmp_path)) == set(arrays)
    write_checkpoint(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"of another loader")
    assert set(rs.files.open(tmp_path)) == set(arrays)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / ".model.safetensors.part").write_bytes(b"")
    (hidden / "._model.safetensors").write_bytes(b"")
    with pytest.raises(FileError, match="of no format that is known"):
        rs.files.open(hidden)


def test_headers_of_slow_files_are_read_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for at in range(5):
        save_file({f"w{at}": np.full((4, 2), at, "float32")}, tmp_path / f"model-{at}.safetensors")
    want, meeting, read = rs.files.open(tmp_path), threading.Barrier(2, timeout=20), OpenedFile.read
    monkeypatch.setattr(metadata_files, "SLOW_FILE", -1.0)

    def wait_for_another(self: OpenedFile, offset: int, nbytes: int) -> bytes:
        if not offset and not self.path.endswith("model-0.safetensors"):
            meeting.wait()
        return read(self, offset, nbytes)

    monkeypatch.setattr(OpenedFile, "read", wait_for_another)
    assert rs.files.open(tmp_path) == want and list(want) == [f"w{at}" for at in range(5)]
    monkeypatch.setattr(OpenedFile, "read", read)
    (tmp_path / "model-3.safetensors").write_bytes(b"short")
    with pytest.raises(FileError, match=r"model-3\.safetensors"):
        rs.files.open(tmp_path)
