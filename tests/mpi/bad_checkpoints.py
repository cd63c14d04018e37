"""The topic of bad files on ranks: the same error on all of them, and a communicator that goes on."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from mpi4py import MPI

import reshard as rs
from reshard.errors import FileError
from tests.files.bad_chunks import BAD_CHUNKS
from tests.files.bad_files import BAD_FILES, BadFile
from tests.mpi.worker import Case


def bad_files(comm: MPI.Intracomm) -> Iterator[Case]:
    # One process reads them all: `tests/files`.
    for name, bad in [*BAD_FILES.items(), *BAD_CHUNKS.items()][::2]:
        yield name, partial(_load_bad, comm, bad)


def _load_bad(comm: MPI.Intracomm, bad: BadFile) -> None:
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    path = comm.bcast(bad.make(Path(folder)) if comm.rank == 0 else None)
    mesh, targets = rs.Mesh(x=1), {"w": rs.Layout.parse("f32[16, 48]", rs.Mesh(x=1))}
    if comm.rank == 0:
        with contextlib.suppress(FileError):  # What opens is refused by load.
            stored = rs.files.open(path).values()
            targets = {
                each.name: rs.Layout.from_spec(mesh, each.shape, each.dtype, [[]] * len(each.shape)) for each in stored
            }
    targets = comm.bcast(targets)
    message = ""
    try:
        rs.files.load(path, targets, comm=comm)
    except FileError as error:
        message = str(error)
    said = comm.allgather(message)
    assert re.search(bad.says, message), message
    assert len(set(said)) == 1, said
    assert folder in message and not Path("/tmp/reshard-was-here").exists()
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
