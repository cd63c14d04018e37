"""Checkpoints as data: what they print, and JSON and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reshard.errors import FileError
from reshard.plans.stored import NO_FILE, Checkpoint, ChunkGrid, Stored, StoredFile, StoredPiece

FILES = (StoredFile("a/0.bin", 4096, 17), StoredFile("a/1.bin", 64, 18), StoredFile("a/index.json", 9, 19))
BOXES = (((0, 4), (0, 8)), ((4, 7), (0, 8)))


def every_kind_of_piece() -> Checkpoint:
    cut = tuple(StoredPiece(box, at, 8 * at, 128 - 32 * at, True, ("crc32", 7 + at)) for at, box in enumerate(BOXES))
    tensors = {
        "h.0.w": Stored("h.0.w", "float32", (8, 4), (StoredPiece(((0, 8), (0, 4)), 0, 80, 128),)),
        "h.11.w": Stored("h.11.w", "float32", (8, 4), (StoredPiece(((0, 8), (0, 4)), 1, 80, 128),)),
        "cut": Stored("cut", "float32", (7, 8), cut, (4, 8)),
        "turned": Stored("turned", "int8", (3, 5), (StoredPiece(((0, 3), (0, 5)), 1, 0, 15, strides=(1, 3)),)),
        "grid": Stored("grid", "bfloat16", (10, 8), ChunkGrid((10, 8), (3, 4), 24), (3, 4)),
        "coded": Stored("coded", "bool", (2,), (StoredPiece(((0, 2),), NO_FILE, 0, 9, False),)),
        "scalar": Stored("scalar", "int64", (), (StoredPiece((), 0, 0, 8),)),
        "bad\x1b[31m\n": Stored("bad\x1b[31m\n", "int8", (0,), (StoredPiece(((0, 0),), 0, 0, 0),)),
    }
    return Checkpoint("a", "safetensors", FILES, tensors)


def test_json_says_all_of_it_and_reads_back():
    ckpt = every_kind_of_piece()
    assert Checkpoint.from_json(ckpt.to_json()) == ckpt
    assert Checkpoint.from_json(ckpt.to_json()).to_json() == ckpt.to_json()


@pytest.mark.parametrize(
    "places, value",
    [
        (("format",), 2), (("path",), None), (("files", 0, 1), "9"), (("files", 0), []), (("tensors",), []),
        (("tensors", "h.0.w", 0), "f32"), (("tensors", "h.0.w", 0), []), (("tensors", "h.0.w", 1, 0), True),
        (("tensors", "h.0.w", 1, 0), -1), (("tensors", "h.0.w", 3, 0, 0), 3), (("tensors", "h.0.w", 3, 0, 1), 0.5),
        (("tensors", "cut", 3, 0, 3, 0), [0, 99]), (("tensors", "cut", 3, 0, 5), [1]), (("tensors", "grid", 2), None),
        (("tensors", "turned", 3, 0, 6), [1]), (("tensors", "grid", 2, 0), 0), (("tensors", "coded", 3, 0, 4), 0),
    ],
)  # fmt: skip
def test_json_of_another_form_is_refused(places: tuple[Any, ...], value: Any):
    data = json.loads(every_kind_of_piece().to_json())
    at = data
    for place in places[:-1]:
        at = at[place]
    at[places[-1]] = value
    with pytest.raises(FileError, match="not a checkpoint in JSON"):
        Checkpoint.from_json(json.dumps(data))


def test_text_that_is_no_json_is_refused():
    for text in ("", "[]", "{", "[" * 100_000, '{"format": ' + "9" * 5000):
        with pytest.raises(FileError, match=r"not a checkpoint in JSON .*; use the output of to_json"):
            Checkpoint.from_json(text)


def test_a_table_has_a_row_for_tensors_that_differ_by_numbers():
    text = str(every_kind_of_piece())
    assert text.splitlines()[0] == "'a': 8 tensors, 665 B in 2 files (safetensors)"
    assert "  h.{0..11}.w  " in text and "f32[8, 4]" in text
    assert "raw, 2 pieces of 4 x 8" in text and "coded, 8 pieces of 3 x 4" in text
    assert "\x1b" not in text and "'bad\\x1b[31m\\n'" in text
    assert every_kind_of_piece().describe(2).splitlines()[-1] == "  ... and 5 rows more"


def test_a_long_name_is_shortened(tmp_path: Path):
    name = "w" * (1 << 20)
    stored = Stored(name, "int8", (0,), (StoredPiece(((0, 0),), 0, 0, 0),))
    assert len(str(Checkpoint("a", "npy", FILES, {name: stored}))) < 500
