"""`rs.files.rechunk` on 4 ranks: windows that they share, regions and spill files, and errors that all raise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")
pytest.importorskip("tensorstore")

import reshard.mpi

SHAPE = (32, 24, 20)
RANKS = """
import json, os, resource, sys
import numpy as np
import reshard.files
from mpi4py import MPI

comm, folder = MPI.COMM_WORLD, sys.argv[1]
done = []
os.environ["RESHARD_MPI_NODES"] = "2"
apart = comm.Dup()  # Two nodes, between which messages go.
target = f"{folder}/apart"
plan = reshard.files.rechunk(f"{folder}/bricks.zarr", target, chunks=(32, 5, 7), memory="60KiB", comm=apart)
done.append((target, (32, 5, 7), plan.arrays[""].method, plan.arrays[""].dealt))
assert plan.arrays[""].dealt >= 0
del os.environ["RESHARD_MPI_NODES"]
for source in ("maps.zarr", "bricks.zarr"):
    for number, (chunks, memory) in enumerate([
        ((32, 5, 7), "21KiB"), ((32, 5, 7), "60KiB"), ((32, 24, 1), "40KiB"), ((5, 7, 20), "30KiB"),
        ((32, 24, 20), "1MiB"),
    ]):
        target = f"{folder}/{source}-{number}"
        plan = reshard.files.rechunk(f"{folder}/{source}", target, chunks=chunks, memory=memory, comm=comm)
        done.append((target, chunks, plan.arrays[""].method, plan.arrays[""].dealt))
try:
    reshard.files.rechunk(f"{folder}/torn.zarr", f"{folder}/torn-0", chunks=(32, 24, 1), memory="60KiB", comm=comm)
    raise SystemExit("no error")
except reshard.errors.FileError as error:
    assert "torn.zarr" in str(error), error
asked = {"chunks": (9, 7, 6), "memory": "60KiB", "format": "hdf5", "comm": comm}
reshard.files.rechunk(f"{folder}/maps.zarr", f"{folder}/maps.h5", **asked)
try:
    reshard.files.rechunk(f"{folder}/bricks.zarr", f"{folder}/torn.h5", **asked)
    raise SystemExit("no error")
except reshard.errors.FileError as error:
    assert "codec=None" in str(error), error
# A rank that can write nothing, and meets that with the last chunks, when no rank reads any more.
most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if comm.rank == 1 else most, hard))
try:
    reshard.files.rechunk(f"{folder}/maps.zarr", f"{folder}/torn-1", chunks=(32, 5, 7), memory="60KiB", comm=comm)
    raise SystemExit("no error")
except reshard.errors.FileError as error:
    assert "torn-1" in str(error) and "File too large" in str(error), error
resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
if comm.rank == 0:
    open(f"{folder}/done.json", "w").write(json.dumps(done))
"""


@pytest.mark.slow
def test_ranks_share_windows_regions_and_files(tmp_path: Path):
    zarr: Any = pytest.importorskip("zarr")
    h5py: Any = pytest.importorskip("h5py")
    data = np.arange(np.prod(SHAPE), dtype="float32").reshape(SHAPE)
    for name, chunks, codec in [
        ("maps", (1, 24, 20), None),
        ("bricks", (7, 9, 20), "auto"),
        ("torn", (1, 24, 20), None),
    ]:
        zarr.create_array(tmp_path / f"{name}.zarr", shape=SHAPE, chunks=chunks, dtype="float32", compressors=codec)[
            ...
        ] = data
    # A missing chunk that only one rank would read.
    torn = sorted(path for path in (tmp_path / "torn.zarr/c").rglob("*") if path.is_file())
    (tmp_path / "run.py").write_text(RANKS, encoding="utf-8")
    torn[5].unlink()
    assert reshard.mpi.launch(4, [str(tmp_path / "run.py"), str(tmp_path)], timeout=120) == 0
    done = json.loads((tmp_path / "done.json").read_text())
    assert (
        len(done) == 11 and any(dealt >= 0 for *_, dealt in done) and any(method == "spill" for _, _, method, _ in done)
    )
    for target, chunks, _, _ in done:
        array = zarr.open_array(target, mode="r")
        assert array.chunks == tuple(chunks) and np.array_equal(array[...], data), target
    with h5py.File(tmp_path / "maps.h5") as file:
        assert file["data"].chunks == (9, 7, 6) and np.array_equal(file["data"][()], data)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".", "torn-", "torn.h5"))]
