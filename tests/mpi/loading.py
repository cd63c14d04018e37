"""The topics of loads onto ranks: random ones, and files that are bad, cut or cannot be read on one rank."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
from mpi4py import MPI
from safetensors.numpy import save_file

import reshard as rs
from reshard.errors import AgreementError, ChecksumError, FileError, MissingTensorError
from reshard.mpi import DistArray
from reshard.mpi.loading import load_on_ranks
from reshard.plans.stored import ChunkGrid, StoredFile
from reshard.runtime.on_files import engine
from reshard.runtime.on_files.engine import ReadCounts
from reshard.runtime.on_mpi.team import team_of
from reshard.synth.reading import plan_reading
from tests.files.load_files import chunks_of, describe_file, write_pieces
from tests.mpi.cases import MESHES
from tests.mpi.moving import LIMIT, check_refused
from tests.mpi.worker import Case
from tests.owners import Owned
from tests.synth.loads import draw_problem, expect, fill

ODD = 1
"""The rank on which something goes wrong."""


def random_loads(comm: MPI.Intracomm) -> Iterator[Case]:
    """Loads whose devices are these ranks, or some of them, on one node and on two."""
    folder = Path(comm.bcast(tempfile.mkdtemp()))
    for nodes in (1, 2):
        team_of(comm, nodes=nodes)
        for seed in range(60 * nodes, 60 * nodes + 25):
            if next(iter(draw_problem(random.Random(seed)).moves.values())).target.mesh.size <= comm.size:
                yield f"seed {seed}, {nodes} nodes", partial(_load, comm, folder, seed)


def few_loads(comm: MPI.Intracomm) -> Iterator[Case]:
    """Some of these, on one node."""
    return itertools.islice(random_loads(comm), 8)


def _load(comm: MPI.Intracomm, folder: Path, seed: int) -> None:
    problem = draw_problem(random.Random(seed))._replace(process_of=None)
    arrays, path = fill(problem.stored), folder / f"{comm.size}-{seed}"
    if comm.rank == 0:
        write_pieces(path, problem.stored, arrays)
    comm.Barrier()
    counts = ReadCounts()
    with chunks_of(arrays) as driver:
        tiles = load_on_ranks(
            comm,
            f"load {path}",
            lambda: describe_file(path, problem.stored),
            lambda _: f"seed {seed}",
            lambda ckpt: plan_reading(ckpt, *problem[1:]),
            lambda _: None,
            LIMIT,
            counts=counts,
        )
    for name, want in expect(problem.moves, problem.sources, problem.fills, arrays).items():
        if comm.rank in want:
            np.testing.assert_array_equal(tiles[name], want[comm.rank], name)
        else:
            assert tiles[name] is None
    raw = [each for each in problem.stored.values() if not isinstance(each.pieces, ChunkGrid)]
    assert comm.allreduce(counts.bytes) == sum(each.nbytes for each in raw)
    given = [each for of in comm.allgather(driver.given) for each in of]
    assert len(given) == len(set(given)), "a chunk is read by two ranks"


def owners(comm: MPI.Intracomm) -> Iterator[Case]:
    """Rows by owner out of every kind of file, with and without replicas, as long runs and as short ones."""
    folder, choose = Path(comm.bcast(tempfile.mkdtemp())), random.Random(70 + comm.size)
    array = np.arange(60 * 24, dtype="int32").reshape(60, 24)
    for format in ("safetensors", "npy", "tiles", "zarr"):
        path = folder / f"w.{format}"
        source = Owned.random(choose, rs.Mesh(x=comm.size), array.shape)
        if format == "tiles":
            DistArray.from_global(array, source.layout, comm, root=None).save(path)
        elif comm.rank == 0:
            if format == "safetensors":
                save_file({"w": array}, path)
            elif format == "npy":
                np.save(path, array)
            else:
                rs.files.save(path, {"w": array}, format=format, codec="zstd", chunks={"w": (7, 24)})
        for at in range(6):
            owned = Owned.random(choose, choose.choice(MESHES[comm.size][:2]), array.shape)
            yield f"{format} {at}: {owned.layout}", partial(_load_owned, comm, path, owned, array, 1 << 10 * at % 3)


def _load_owned(comm: MPI.Intracomm, path: Path, owned: Owned, array: np.ndarray, read_size: int) -> None:
    comm.Barrier()
    counts, (name,) = ReadCounts(), rs.files.open(path)
    tile = rs.files.load(path, {name: owned.layout}, comm=comm, read_size=read_size, limit=LIMIT, counts=counts)[name]
    wanted = array[np.ix_(*owned.indices(comm.rank))]
    np.testing.assert_array_equal(tile[tuple(map(slice, wanted.shape))], wanted)
    assert tile.shape == owned.layout.tile_shape
    read = comm.allreduce(counts.bytes)
    if path.suffix == ".zarr":  # Every chunk once, and by each rank at most the metadata.
        stored, metadata = rs.files.open(path)[name].stored_bytes, (path / name / "zarr.json").stat().st_size
        assert stored <= read <= stored + comm.size * metadata
    else:
        assert read == array.nbytes


class _OneFile:
    """A file of one array, and loads of it by rows or columns."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.folder = comm, Path(comm.bcast(tempfile.mkdtemp()))
        self.path, self.side = self.folder / "w.safetensors", 128 // comm.size
        self.array, mesh = np.arange(1 << 14, dtype="float32").reshape(128, 128), rs.Mesh(x=comm.size)
        self.rows, self.columns = (
            rs.Layout.from_spec(mesh, (128, 128), "float32", spec) for spec in ([["x"], []], [[], ["x"]])
        )

    def write(self) -> None:
        if self.comm.rank == 0:
            save_file({"w": self.array}, self.path)
        self.comm.Barrier()

    def load(self, target: rs.Layout | None = None, path: Path | None = None) -> None:
        """Every rank's tile is right, or all raise."""
        target = target or self.columns
        at = slice(self.comm.rank * self.side, (self.comm.rank + 1) * self.side)
        given = {"w": target}
        tile = rs.files.load(path or self.path, given, comm=self.comm, read_size=1, limit=LIMIT)["w"]
        np.testing.assert_array_equal(tile, self.array[at] if target == self.rows else self.array[:, at])

    def refused(self, do: Callable[[], None], says: str) -> None:
        """What happens when a rank reads is an error on all."""
        self.write()
        whole = os.preadv

        def preadv(file: int, buffers: list[np.ndarray], at: int) -> int:
            if self.comm.rank == ODD:
                do()
            return whole(file, buffers, at)

        with mock.patch.object(engine.os, "preadv", preadv):
            error = check_refused(self.comm, FileError, self.load, says)
        assert str(self.path) in str(error)
        self.write()
        self.load()


def _fail() -> None:
    raise OSError(5, "Input/output error")


def bad_files(comm: MPI.Intracomm) -> Iterator[Case]:
    """What goes wrong on one rank is the same error on all, soon, and the next load is as if nothing had been."""
    one = _OneFile(comm)
    yield "a read that fails", partial(one.refused, _fail, "Input/output error")
    yield "a file that is touched", partial(one.refused, lambda: os.utime(one.path), "has changed since")
    yield "a file that is cut", partial(one.refused, lambda: os.truncate(one.path, 90), "w.safetensors")

    def hidden() -> None:
        one.write()
        opened = engine.open_stored_file

        def open_elsewhere(of: StoredFile) -> int:
            return opened(replace(of, path="/nowhere") if comm.rank == ODD else of)

        with mock.patch.object(engine, "open_stored_file", open_elsewhere):
            check_refused(comm, FileError, one.load, "/nowhere")
        one.load()

    yield "a file that one rank does not see", hidden

    def bad_header() -> None:
        if comm.rank == 0:
            one.path.write_bytes(b"\x07\0\0\0\0\0\0\0{'w'}")
        comm.Barrier()
        check_refused(comm, FileError, one.load)
        if comm.rank == 0:
            one.path.unlink()
        comm.Barrier()
        check_refused(comm, FileError, one.load, "w.safetensors")
        one.write()
        one.load()

    yield "a file with a bad header, and none", bad_header

    def flipped() -> None:
        out, at = one.folder / "out", slice(comm.rank * one.side, (comm.rank + 1) * one.side)
        rs.files.save(out, {"w": one.array[at].copy()}, {"w": one.rows}, comm=comm)
        one.load(path=out)
        piece = (ckpt := rs.files.open(out))["w"].pieces[0]
        file = Path(ckpt.files[piece.file].path)
        comm.Barrier()
        if comm.rank == 0:
            status, content = file.stat(), bytearray(file.read_bytes())
            content[piece.offset + 12345] ^= 1
            file.write_bytes(content)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        comm.Barrier()
        for target in (one.rows, one.columns):
            check_refused(comm, ChecksumError, partial(one.load, target, out), "'w'")

    yield "a bit of a block that several ranks read", flipped


def odd_requests(comm: MPI.Intracomm) -> Iterator[Case]:
    """Ranks that ask for different things."""
    one = _OneFile(comm)

    def targets() -> None:
        one.write()
        check_refused(comm, AgreementError, lambda: one.load(one.rows if comm.rank == ODD else one.columns))
        name = "v" if comm.rank == ODD else "w"
        check_refused(
            comm, MissingTensorError, lambda: rs.files.load(one.path, {name: one.rows}, comm=comm, limit=LIMIT), "v"
        )
        check_refused(comm, AgreementError, lambda: one.load(path=one.folder if comm.rank == ODD else one.path))
        one.load()

    yield "other targets, a wrong name, another path", targets
