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
from reshard.errors import FileError
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


def test_chunks_of_any_layout_are_pieces(tmp_path: Path):
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
    write_dcp(tmp_path, {"rows": rows, **tensors, "lr": 0.1})
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
