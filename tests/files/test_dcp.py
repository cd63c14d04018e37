"""Checkpoints of torch.distributed.checkpoint: read without torch, against numpy and zipfile."""

from __future__ import annotations

import sys
import zipfile
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import reshard as rs
from reshard.errors import ChecksumError, FileError
from tests.files.dcp_maker import Chunk, Tensor, chunk_zip, rows_tensor, write_dcp
from tests.files.piece_reader import read_pieces

REAL = Path(__file__).parent / "data" / "dcp"
"""Written by torch 2.14.1 on two ranks."""


def test_a_checkpoint_that_torch_wrote():
    ckpt = rs.files.open(REAL)
    assert (ckpt.format, set(ckpt)) == (
        "dcp",
        {"rows", "optim.step", "optim.turned"},
    )  # The learning rate is no tensor.
    rows = np.arange(21).reshape(7, 3).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(read_pieces(ckpt, "rows", rows.dtype), rows)
    assert (ckpt["rows"].chunks, str(ckpt["rows"].layout)) == ((4, 3), "bf16[{c0}4/7, 3]")
    np.testing.assert_array_equal(
        read_pieces(ckpt, "optim.turned", np.dtype("f4")), np.arange(24, dtype="f4").reshape(4, 6).T
    )
    assert ckpt["optim.turned"].pieces[0].strides == (1, 6)
    assert read_pieces(ckpt, "optim.step", np.dtype("i8")) == 3
    assert "torch" not in sys.modules


def test_checksums_are_those_of_the_bytes_that_pieces_have():
    ckpt = rs.files.open(REAL)
    for stored in ckpt.tensors.values():
        for piece in stored.pieces:
            content = Path(ckpt.files[piece.file].path).read_bytes()
            assert piece.checksum == ("crc32", zlib.crc32(content[piece.offset : piece.offset + piece.nbytes]))


@pytest.mark.parametrize("named", [False, True])
def test_chunks_of_any_layout_are_pieces(tmp_path: Path, named: bool):
    whole, rows = rows_tensor(4)
    big = np.arange(400, dtype="float32").reshape(100, 4)
    narrow = np.arange(6).reshape(2, 3).astype(ml_dtypes.float8_e4m3fn)
    archives = {
        "view": chunk_zip(big[10:13], "float32", first=40, storage=big),
        "turned": chunk_zip(big.T, "float32", storage=big, strides=(1, 4)),
        "narrow": chunk_zip(narrow, "float8_e4m3fn", untyped=True),
        "scalar": chunk_zip(np.array(7), "int64"),
        "none": chunk_zip(np.zeros((0, 3), "f4"), "float32"),
    }
    expected = {"view": big[10:13], "turned": big.T, "narrow": narrow, "scalar": np.array(7)}
    expected["none"] = np.zeros((0, 3), "f4")
    tensors = {
        name: Tensor(str(array.dtype), array.shape, [Chunk((0,) * array.ndim, array.shape, "a", archives[name])])
        for name, array in expected.items()
    }
    write_dcp(tmp_path, {"rows": rows, **tensors, "lr": 0.1}, named)
    ckpt = rs.files.open(tmp_path)
    for name, array in {"rows": whole, **expected}.items():
        np.testing.assert_array_equal(read_pieces(ckpt, name, array.dtype), array)
    assert "lr" not in ckpt
    assert ckpt["view"].pieces[0].checksum is None  # The CRC-32 is that of all 100 rows.


def test_entries_lie_where_zipfile_says_also_beyond_32_bits(tmp_path: Path):
    """`force_zip64` writes what torch writes for storages above 4 GiB."""
    whole, rows = rows_tensor(1)
    wide = tmp_path / "wide.zip"
    with zipfile.ZipFile(wide, "w") as archive:
        entries: dict[str, bytes] = {}
        chunk_zip(whole, "float32", change=entries.update)
        chunk_zip(whole, "float32", change=lambda made: entries.update(made))
        for name, content in entries.items():
            with archive.open(f"archive/{name}", "w", force_zip64=True) as entry:
                entry.write(content)
    write_dcp(tmp_path / "c", {"w": Tensor("float32", (8, 3), [rows.chunks[0]._replace(content=wide.read_bytes())])})
    ckpt = rs.files.open(tmp_path / "c")
    np.testing.assert_array_equal(read_pieces(ckpt, "w", whole.dtype), whole)


def test_a_folder_without_metadata_is_a_save_that_never_ended(tmp_path: Path):
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(FileError, match=r"\.metadata' cannot be opened \(No such file"):
        rs.files.open(tmp_path)


def load_whole(path: Path, split: int = 1) -> dict[str, np.ndarray]:
    """All tensors, put together from rows on `split` devices, or whole where rows do not divide."""
    ckpt = rs.files.open(path)
    mesh = rs.Mesh(x=split)
    layouts = {
        name: rs.Layout.from_spec(mesh, each.shape, each.dtype, [["x"], *[[] for _ in each.shape]][: len(each.shape)])
        for name, each in ckpt.items()
    }
    tiles = rs.files.load(path, layouts, devices=range(split))
    return {
        name: np.concatenate([held[device] for device in range(split)])[: ckpt[name].shape[0]]
        if ckpt[name].shape
        else held[0]
        for name, held in tiles.items()
    }


@pytest.mark.parametrize("split", [1, 2, 3])
def test_load_honours_views_strides_and_uneven_chunks(tmp_path: Path, split: int):
    loaded = load_whole(REAL, split)
    np.testing.assert_array_equal(loaded["rows"], np.arange(21).reshape(7, 3).astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(loaded["optim.turned"], np.arange(24, dtype="f4").reshape(4, 6).T)
    big = np.arange(400, dtype="float32").reshape(100, 4)
    view = Chunk((0, 0), (3, 4), "v", chunk_zip(big[10:13], "float32", first=40, storage=big))
    turned = Chunk((0, 0), (4, 100), "v", chunk_zip(big.T, "float32", storage=big, strides=(1, 4)))
    tensors = {"view": Tensor("float32", (3, 4), [view]), "turned": Tensor("float32", (4, 100), [turned])}
    write_dcp(tmp_path, {**tensors, "rows": rows_tensor(4)[1]})
    for name, array in {"view": big[10:13], "turned": big.T, "rows": rows_tensor()[0]}.items():
        np.testing.assert_array_equal(load_whole(tmp_path, split)[name], array)


@pytest.mark.parametrize("split", [1, 3])
def test_a_flipped_bit_is_a_checksum_error_in_load_too(tmp_path: Path, split: int):
    whole, rows = rows_tensor(2)
    content = rows.chunks[1].content
    at = content.index(whole[4:].tobytes()) + 17
    changed = content[:at] + bytes((content[at] ^ 4,)) + content[at + 1 :]
    write_dcp(tmp_path, {"w": rows._replace(chunks=[rows.chunks[0], rows.chunks[1]._replace(content=changed)])})
    with pytest.raises(ChecksumError, match=r"__1_0.distcp'.* of tensor 'w' .* their crc32 is [0-9a-f]{8}, not"):
        load_whole(tmp_path, split)
    layout = rs.Layout.parse("f32[8, 3]", rs.Mesh(x=1))
    loaded = rs.files.load(tmp_path, {"w": layout}, devices=[0], verify=False)["w"][0]
    assert (loaded != whole).sum() == 1
