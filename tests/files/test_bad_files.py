"""Bad files of every kind: an error that names the file, the tensor and the byte, and nothing that they ask for."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path

import pytest
import safetensors

import reshard as rs
from reshard.errors import FileError
from tests.files.bad_files import BAD_FILES, SAFETENSORS, V, W, file_of

STRICTER = ("name twice", "dtype below a byte")
"""What the library opens all the same."""


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, name: str):
    bad = BAD_FILES[name]
    path = bad.make(tmp_path)
    tracemalloc.start()
    with pytest.raises(FileError) as caught:
        rs.files.open(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    message = str(caught.value)
    assert re.search(bad.says, message), message
    assert str(tmp_path) in message and len(message) < 2000
    assert peak < 64 << 20
    assert not Path("/tmp/reshard-was-here").exists()


@pytest.mark.parametrize("name", SAFETENSORS)
def test_the_library_judges_alike(tmp_path: Path, name: str):
    path = SAFETENSORS[name].make(tmp_path)
    try:
        with safetensors.safe_open(path, "numpy") as opened:
            opened.keys()
        refused = False
    except Exception:
        refused = True
    assert refused == (name not in STRICTER)


def test_every_number_of_the_list_has_a_case():
    """22 and 23 open: nothing in the file betrays them."""
    assert {bad.number for bad in BAD_FILES.values()} == {*range(1, 36), 40} - {22, 23}


def test_a_dtype_of_another_meaning_is_what_the_file_says_it_is(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of({"w": {**W, "dtype": "I32"}, "v": V}))
    assert rs.files.open(path)["w"].dtype == "int32"


@pytest.mark.parametrize("name", ["w" * (1 << 20), "\x1b[31mw\x07", "../w", "", "__proto__"])
def test_an_odd_name_is_quoted_and_shortened(tmp_path: Path, name: str):
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of({name: W}, 24))
    text = str(rs.files.open(path))
    assert "\x1b" not in text and "\x07" not in text and len(text) < 500
    path.write_bytes(file_of({name: {**W, "shape": [7]}}, 24))
    with pytest.raises(FileError) as caught:
        rs.files.open(path)
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("path", ["", "nowhere", "a\0b", 7, None, b"nowhere", "/dev/null", "/proc/self/mem"])
def test_what_is_no_checkpoint_is_refused(path: object):
    with pytest.raises(FileError):
        rs.files.open(path)  # type: ignore[arg-type]


def test_an_empty_folder_and_two_indexes_are_refused(tmp_path: Path):
    with pytest.raises(FileError, match="of no format that is known"):
        rs.files.open(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(FileError, match="open one of them"):
        rs.files.open(tmp_path)
