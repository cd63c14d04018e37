"""The topics of saves by ranks: every format, ranks that fail, arrays of some ranks only, saves behind other calls."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.errors import AgreementError, FileError, TileError
from reshard.mpi import DistArray
from reshard.runtime.on_files import commit
from tests.files.save_files import (
    FORMATS,
    assert_same_arrays,
    make_arrays,
    make_layouts,
    read_by_library,
    tiles_by_device,
)
from tests.mpi.moving import LIMIT, check_refused
from tests.mpi.worker import Case

ODD = 1
"""The rank on which something goes wrong."""


def formats(comm: MPI.Intracomm) -> Iterator[Case]:
    """Each format, written anew over what is there, with tiles as chunks and with chunks that no rank has whole."""
    folder = Path(comm.bcast(tempfile.mkdtemp()))
    for format in FORMATS:
        yield format, partial(_save_twice, comm, folder, format, {})
        if format not in ("safetensors", "hdf5"):
            more = {"chunks": {"embed": (8, 10), "layers.w": (4, 4, 5)}, "codec": "zstd"}
            yield f"{format} in other chunks", partial(_save_twice, comm, folder, format, more)


def _save_twice(comm: MPI.Intracomm, folder: Path, format: str, options: dict[str, Any]) -> None:
    path = folder / f"{format}{len(options)}{'.h5' if format == 'hdf5' else ''}"
    for extra in (0, 3):
        arrays = make_arrays(extra=extra)
        layouts = make_layouts(arrays, comm.size)
        tiles = {name: of.get(comm.rank) for name, of in tiles_by_device(arrays, layouts).items()}
        rs.files.save(path, tiles, layouts, comm=comm, format=format, limit=LIMIT, **options)
        if comm.rank == 0:
            assert_same_arrays(read_by_library(path, format), arrays)
            assert rs.files.check(path).faults == ()
        comm.Barrier()


def columns(comm: MPI.Intracomm) -> Iterator[Case]:
    """Columns of a large array are exchanged for rows first; behind the caller's work they are written as they are."""
    folder = Path(comm.bcast(tempfile.mkdtemp()))
    array = np.arange(1200 * 512, dtype=np.float32).reshape(1200, 512)
    mesh = rs.Mesh(x=comm.size)
    layout = rs.Layout.from_spec(mesh, array.shape, "float32", [[], ["x"]])
    whole = DistArray.from_global(array, layout, comm, root=None)
    runs: list[int] = []
    write = commit.write_fully

    def count(descriptor: int, offset: int, buffers: Any) -> None:
        runs.append(offset)
        write(descriptor, offset, buffers)

    def written(name: str, behind: bool) -> int:
        runs.clear()
        with mock.patch.object(commit, "write_fully", count):
            if behind:
                pending = rs.files.start(folder / name, {"w": whole}, limit=LIMIT)
                kept = whole.tile.copy()
                whole.tile[...] = -1
                pending.wait()
                whole.tile[...] = kept
            else:
                rs.files.save(folder / name, {"w": whole}, limit=LIMIT)
        found = read_by_library(folder / name, "safetensors")
        np.testing.assert_array_equal(found["w"], array)
        return len(runs) - 2 * (comm.rank == 0)

    def both() -> None:
        assert written("rows", False) == 1
        assert written("columns", True) == 1200

    yield "rows and columns", both


def failures(comm: MPI.Intracomm) -> Iterator[Case]:
    """What goes wrong on one rank is raised by all, and what was saved before stays."""
    folder = Path(comm.bcast(tempfile.mkdtemp()))
    arrays = make_arrays()
    layouts = make_layouts(arrays, comm.size)
    tiles = {name: of.get(comm.rank) for name, of in tiles_by_device(arrays, layouts).items()}
    save = partial(rs.files.save, comm=comm, limit=LIMIT)

    def wrong() -> None:
        save(folder, tiles, layouts)
        short = tiles | {"embed": tiles["embed"][1:]} if comm.rank == ODD else tiles
        check_refused(comm, TileError, lambda: save(folder, short, layouts), "embed", alike=False)
        other = layouts | {"norm": rs.Layout.parse("s64[16]", layouts["norm"].mesh)} if comm.rank == ODD else layouts
        given = tiles | {"norm": arrays["norm"]} if comm.rank == ODD else tiles
        check_refused(comm, AgreementError, lambda: save(folder, given, other), "different things", alike=False)
        check_refused(comm, AgreementError, lambda: save(folder / str(comm.rank), tiles, layouts), alike=False)
        _check_whole(comm, folder, arrays)

    yield "arguments", wrong

    for call in ("pwritev", "fsync"):
        for format in ("safetensors", "hdf5"):
            yield (
                f"{call} of {format}",
                partial(_fail_once, comm, folder / format, call, format, tiles, layouts, arrays),
            )


def _fail_once(
    comm: MPI.Intracomm, folder: Path, call: str, format: str, tiles: Any, layouts: Any, arrays: Any
) -> None:
    path = folder / "saved.h5" if format == "hdf5" else folder
    rs.files.save(path, tiles, layouts, comm=comm, format=format, limit=LIMIT)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    changed = {name: None if tile is None else tile + tile.dtype.type(1) for name, tile in tiles.items()}
    with mock.patch.object(os, call, full) if comm.rank == ODD else mock.MagicMock():
        check_refused(
            comm,
            FileError,
            lambda: rs.files.save(path, changed, layouts, comm=comm, format=format, limit=LIMIT),
            "No space left",
            alike=False,
        )
    _check_whole(comm, path, arrays, format)


def _check_whole(comm: MPI.Intracomm, path: Path, arrays: Any, format: str = "safetensors") -> None:
    comm.Barrier()
    if comm.rank == 0:
        assert_same_arrays(read_by_library(path, format), arrays)
        assert rs.files.check(path).faults == ()
        beside = path if path.is_dir() else path.parent
        assert not [each.name for each in beside.iterdir() if each.name.endswith(".part")]
    comm.Barrier()
