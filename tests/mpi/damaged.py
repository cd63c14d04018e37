"""The topic of damaged checkpoints on ranks: each reads a part of a file, and together they find what changed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.errors import FileError
from tests.files.test_damages import FORMATS, TREE, damage
from tests.mpi.worker import Case


def damages(comm: MPI.Intracomm) -> Iterator[Case]:
    for name in FORMATS:
        yield name, partial(_load_damaged, comm, name)


def _load_damaged(comm: MPI.Intracomm, name: str) -> None:
    folder = Path(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None))
    path = comm.bcast(FORMATS[name](folder) if comm.rank == 0 else None)
    mesh = rs.Mesh(x=2, y=2)
    layouts = {2: [[], ["y", "x"]], 0: []}, {2: [["x"], []], 0: []}
    for spec in layouts:
        targets = {
            key: rs.Layout.from_spec(mesh, array.shape, str(array.dtype), spec[array.ndim])
            for key, array in TREE.items()
        }
        tiles = rs.files.load(path, targets, comm=comm)
        for key, tile in tiles.items():
            array, x, y = TREE[key], *divmod(comm.rank, 2)
            if array.ndim:
                width = array.shape[1] // 4
                rows = slice(x * len(array) // 2, (x + 1) * len(array) // 2)
                part = (slice(None), slice((2 * y + x) * width, (2 * y + x + 1) * width))
                array = array[part] if spec is layouts[0] else array[rows]
            np.testing.assert_array_equal(tile, array)
    comm.Barrier()
    if comm.rank == 0:
        damage(path, "flip", 1)
    comm.Barrier()
    for spec in layouts:
        targets = {
            key: rs.Layout.from_spec(mesh, array.shape, str(array.dtype), spec[array.ndim])
            for key, array in TREE.items()
        }
        message = ""
        try:
            rs.files.load(path, targets, comm=comm)
        except FileError as error:
            message = str(error)
        said = comm.allgather(message)
        assert str(path) in message and len(set(said)) == 1, said
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
