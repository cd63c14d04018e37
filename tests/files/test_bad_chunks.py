"""Bad files of zarr, Orbax and HDF5: an error that names file and tensor, before anything is returned."""

from __future__ import annotations

import re
import time
import tracemalloc
from pathlib import Path

import pytest

import reshard as rs
from reshard.errors import FileError
from tests.files.bad_chunks import BAD_CHUNKS


def load_all(path: Path) -> dict[str, object]:
    """Every tensor, whole, on one device."""
    ckpt = rs.files.open(path)
    mesh = rs.Mesh(x=1)
    targets = {
        name: rs.Layout.tiled(mesh, each.shape, each.dtype, [[]] * len(each.shape)) for name, each in ckpt.items()
    }
    return rs.files.load(ckpt, targets, devices=[0])


@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_bad_chunks_are_refused_by_name(tmp_path: Path, name: str):
    bad = BAD_CHUNKS[name]
    path = bad.make(tmp_path)
    tracemalloc.start()
    begun = time.monotonic()
    with pytest.raises(FileError) as caught:
        load_all(path)
    seconds = time.monotonic() - begun
    _, peak = tracemalloc.get_traced_memory()
    # Python before 3.13.2 ends the process if another thread allocates while tracing stops (CPython's gh-128679), as
    # one of tensorstore's that lets go of what it read may: without this, in one of some hundred cases.
    time.sleep(0.02)
    tracemalloc.stop()
    message = str(caught.value)
    assert re.search(bad.says, message), message
    assert str(tmp_path) in message and len(message) < 2000
    assert peak < 64 << 20 and seconds < 30  # Nothing hangs.
    report = None
    try:
        report = rs.files.check(path)
    except FileError as error:
        assert re.search(bad.says, str(error))
    assert report is None or any(re.search(bad.says, fault) for fault in report.faults), report


def test_every_number_of_the_list_has_a_case():
    assert {bad.number for bad in BAD_CHUNKS.values()} == {36, 37, 38, 39, 40}
