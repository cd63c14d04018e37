"""The topics of distributed arrays, saving, relabelling and calibration, which run on ranks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.errors import LayoutError, NetworkError, TileError
from reshard.lower.to_mpi import devices_by_id
from reshard.mpi import DistArray, calibrate, redistribute, relabelled
from reshard.runtime import Account
from reshard.runtime.on_mpi.prepare import read_options
from reshard.runtime.on_mpi.team import team_of
from reshard.runtime.platform_network import CACHE, Calibration, store_calibration
from reshard.synth import Network
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.mpi.cases import MESHES
from tests.mpi.moving import caught_by, check_refused, check_tile, elements, given_tile
from tests.mpi.worker import Case


def _layouts(comm: MPI.Intracomm) -> Iterator[Layout]:
    down = next(k for k in range(int(comm.size**0.5), 0, -1) if comm.size % k == 0)
    for mesh in (Mesh(a=down, b=comm.size // down), Mesh(b=comm.size, a=1)):
        for rounds in (1, 2):
            for size in (9, 7):
                block = -(-size // (mesh.axes["b"] * rounds))
                across = f"{-(-size // (mesh.axes['b'] * block))}{{b}}{block}/{size}"
                along = f"{{a}}{-(-5 // mesh.axes['a'])}/5"
                yield Layout.parse(f"f64[{across}, 3, {along}]", mesh)
        yield Layout.parse("f64[]", mesh)
        yield Layout.from_spec(mesh, (0, 5), "float64", [["a"], ["b"]])
        yield Layout.from_spec(mesh, (1, 2), "float64", [["a"], ["b"]])


def _whole(layout: Layout) -> np.ndarray:
    return np.arange(np.prod(layout.shape, dtype=int), dtype=layout.dtype).reshape(layout.shape)


def making(comm: MPI.Intracomm) -> Iterator[Case]:
    """Arrays from functions, whole arrays and tiles, and whole arrays from them."""
    for nodes in sorted({1, min(2, comm.size), comm.size}):
        team_of(comm, nodes=nodes)
        for layout in _layouts(comm):
            yield f"{layout} on {layout.mesh}, {nodes} nodes", partial(_made, comm, layout)


def _made(comm: MPI.Intracomm, layout: Layout) -> None:
    whole, last = _whole(layout), comm.size - 1

    def index(*at: np.ndarray) -> Any:
        return np.ravel_multi_index(np.broadcast_arrays(*at), layout.shape) if at else 0

    made = [
        DistArray.from_function(index, layout, comm),
        DistArray.from_global(whole if comm.rank == last else None, layout, comm, root=last),
        DistArray.from_global(np.array(whole, order="F"), layout, comm, root=None),
        DistArray(layout, given_tile(layout, comm.rank, "float64", "F"), comm),
    ]
    for array in made:
        check_tile(layout, comm.rank, array.tile, comm)
        one, every = array.to_global(last), array.to_global(None)
        assert (one is None) == (comm.rank != last)
        assert one is None or np.array_equal(one, whole)
        assert every is not None
        assert np.array_equal(every, whole)
    index_of = meaning(layout, devices_by_id(layout.mesh)[comm.rank])
    wanted = [[at for at in along if at < size] for along, size in zip(index_of, layout.shape, strict=True)]
    ranges = [[at for run in runs for at in run] for runs in made[0].local_index_ranges()]
    assert ranges == wanted or 0 in layout.shape
    zeros, sevens = DistArray.zeros(layout, comm), DistArray.full(layout, 7, comm)
    assert (zeros.tile == 0).all()
    assert (sevens.tile == 7).all()


def unpadded(comm: MPI.Intracomm) -> Iterator[Case]:
    """Tiles of NUMROC's sizes and of true extents, in any memory and byte order, in and out."""
    down = next(k for k in range(int(comm.size**0.5), 0, -1) if comm.size % k == 0)
    grid, line = Mesh(a=down, b=comm.size // down), Mesh(c=comm.size)
    scalapack = Layout.from_scalapack([1, 0, 23, 13, 3, 2, 0, 0, 9], (down, comm.size // down), "int32")
    across, along = comm.size // down, comm.size
    layouts = [
        scalapack,
        Layout.from_scalapack([1, 0, 23, 13, 4, 5, down - 1, 0, 9], (down, across), "int32", order="C"),
        Layout.from_spec(line, (23, 13), "int32", [["c"]]),
        Layout.from_spec(line, (23, 13), "int32", [[], ["c"]]),
        Layout.parse(f"s32[{-(-23 // (2 * along))}{{c}}2/23, 13]", line),
        Layout.from_spec(grid, (23, 13), "int32", [["b", "a"]]),
    ]
    for nodes in sorted({1, comm.size}):
        team_of(comm, nodes=nodes)
        for number, source in enumerate(layouts):
            target = layouts[(number + 1) % len(layouts)]
            yield f"{source} -> {target}, {nodes} nodes", partial(_unpadded, comm, source, target)


def _unpadded(comm: MPI.Intracomm, source: Layout, target: Layout) -> None:
    whole = np.arange(23 * 13).reshape(23, 13)

    def own(layout: Layout) -> np.ndarray:
        index = meaning(layout, devices_by_id(layout.mesh)[comm.rank])
        return whole[np.ix_(*([i for i in dim if i < n] for dim, n in zip(index, whole.shape, strict=True)))]

    given, wanted = own(source), own(target)
    strided = np.full((given.shape[0] + 2, 2 * given.shape[1]), -1, "i4")
    strided[1:-1, ::2] = given
    for tile in (given.astype("i4"), given.astype("i4", order="F"), given.astype(">i4"), strided[1:-1, ::2]):
        before = tile.copy()
        result = redistribute(tile, source, target, comm, padded=False)
        assert np.array_equal(result, wanted)
        assert result.dtype == np.int32 and result.dtype.isnative
        check_tile(target, comm.rank, redistribute(tile, source, target, comm), comm)
        out = np.full((wanted.shape[0] + 1, wanted.shape[1]), -5, "i4", order="F")[1:]  # LLD is above the rows.
        assert redistribute(tile, source, target, comm, out=out, padded=False) is out
        assert np.array_equal(out, wanted)
        assert np.array_equal(tile, before)
        array = DistArray(source, tile, comm)
        assert np.array_equal(array.unpadded, given)
        moved = array.redistribute(target)
        assert np.array_equal(moved.unpadded, wanted)
        assert np.shares_memory(moved.unpadded, moved.tile) or not wanted.size
    assert np.array_equal(redistribute(given.astype("i4"), source, source, comm, padded=False), given)
    big = DistArray.from_global(whole.astype(">i4"), source, comm, root=None)
    one = DistArray.from_global(whole.astype(">i4") if comm.rank == 0 else None, source, comm)
    assert np.array_equal(big.unpadded, given)
    assert np.array_equal(one.unpadded, given)
    assert big.dtype.isnative
    _unpadded_refused(comm, source, target, given.astype("i4"))


def _unpadded_refused(comm: MPI.Intracomm, source: Layout, target: Layout, tile: np.ndarray) -> None:
    """On all ranks, also those whose own tile is all right; and the next call works."""
    first = tile if comm.rank else np.zeros((tile.shape[0] + 1, tile.shape[1] + 3), "i4")
    whole_on_all = all(comm.allgather(tile.shape == source.tile_shape))
    for call, kind in (
        (lambda: redistribute(first, source, target, comm), TileError),
        (lambda: redistribute(tile, source, target, comm, out=np.zeros((1, 99), "i4"), padded=False), TileError),
        (lambda: redistribute(tile, source, target, comm, budget="1 GiB"), None if whole_on_all else TileError),
    ):
        assert type(caught_by(call)) is (kind or type(None))


def functions(comm: MPI.Intracomm) -> Iterator[Case]:
    """Moves to a local dim; numpy's functions are those of `tests.mpi.numpy_protocol`."""
    mesh = MESHES[comm.size][0]
    first = next(iter(mesh.axes), None)
    layout = Layout.from_spec(mesh, (8, 16, 24), "float32", [[first] if first else [], [], []])
    whole = _whole(layout)
    a = DistArray.from_global(whole if comm.rank == 0 else None, layout, comm)

    def by_number() -> None:
        moved = a.redistribute(0)
        assert moved.layout.tile_shape[0] == 8
        for array in (moved, moved.redistribute(2).redistribute(1)):
            assert np.array_equal(array.to_global(None), whole)
        assert a.redistribute(1) is a or first is None
        assert isinstance(caught_by(lambda: a.redistribute(5)), LayoutError)

    yield "moves by a number", by_number


def saving(comm: MPI.Intracomm) -> Iterator[Case]:
    """Arrays that these ranks, or fewer, have saved are loaded in every other layout."""
    folder = Path(comm.bcast(tempfile.mkdtemp()))
    layouts = [layout for layout in _layouts(comm) if layout.shape == (9, 3, 5)]

    def there_and_back(number: int) -> None:
        DistArray.from_global(_whole(layouts[number]), layouts[number], comm, root=None).save(folder / str(number))
        for other in layouts:
            check_tile(other, comm.rank, DistArray.load(folder / str(number), other, comm).tile, comm)

    for number in range(len(layouts)):
        yield f"saved as {layouts[number]}", partial(there_and_back, number)

    def by_one_rank() -> None:
        if comm.rank == 0:
            alone = Layout.parse("f64[2{x}5/9, 3, 5]", Mesh(x=1))
            DistArray.from_global(_whole(alone), alone, MPI.COMM_SELF).save(folder / "alone")
        comm.Barrier()
        for other in layouts:
            check_tile(other, comm.rank, DistArray.load(folder / "alone", other, comm).tile, comm)

    yield "saved by one rank", by_one_rank

    def damaged() -> None:
        """One file is missing, cut short, or another tile: the same error on all ranks, of which few read that file."""
        layout = layouts[0]
        array = DistArray.from_global(_whole(layout), layout, comm, root=None)
        array.save(folder / "damaged")
        tiles = sorted((folder / "damaged").glob("tile-*.npy"))
        first, last = tiles[0], tiles[-1]
        content = last.read_bytes()
        for data in (None, content[:-40], first.read_bytes() if comm.size > 1 else b"", content[:10]):
            comm.Barrier()
            if comm.rank == 0:
                last.unlink() if data is None else last.write_bytes(data)
            comm.Barrier()
            check_refused(comm, LayoutError, lambda: DistArray.load(folder / "damaged", layout, comm), last.name)
        array.save(folder / "damaged")
        check_tile(layout, comm.rank, DistArray.load(folder / "damaged", layout, comm).tile, comm)

    yield "damaged", damaged

    def dtypes() -> None:
        for name, kind in (("bfloat16", None), ("uint32", np.dtype([("a", "<i2"), ("b", "<i2")]))):
            layout = Layout(layouts[0].mesh, layouts[0].dims, name)
            array = DistArray.zeros(layout, comm, dtype=kind)
            array.tile[...] = elements(np.ones(array.tile.shape, int), array.dtype)
            array.save(folder / name)
            loaded = DistArray.load(folder / name, layout, comm)
            assert loaded.dtype == array.dtype
            assert np.array_equal(loaded.tile, array.tile) or not layout.even

    yield "dtypes", dtypes


def relabelling(comm: MPI.Intracomm) -> Iterator[Case]:
    """Relabelling never costs more bytes, and a permutation of tiles costs none."""
    mesh = Mesh(x=comm.size)
    turned = Mesh({"x": comm.size}, device_ids=[*range(1, comm.size), 0])
    rows = Layout.parse("s32[{x}2, 6]", mesh)
    rolled = Layout(turned, rows.dims, rows.dtype)
    columns = Layout.from_spec(turned, rows.shape, "int32", [[], ["x"]])

    def moved(target: Layout) -> None:
        tile = given_tile(rows, comm.rank, "int32")
        result, layout = redistribute(tile, rows, target, comm, relabel=True)
        assert layout == relabelled(rows, target)
        check_tile(layout, comm.rank, result, comm)
        before, after = Account("int32"), Account("int32")
        redistribute(tile, rows, target, comm, memory=before)
        redistribute(tile, rows, layout, comm, memory=after)
        sums = comm.allreduce(np.array([sum(m.received.values()) for m in (before, after)]))
        assert sums[1] <= sums[0]
        assert sums[1] == 0 or target is not rolled
        array = DistArray.from_global(tile if comm.size == 1 else _whole(rows), rows, comm, root=None)
        dist = array.redistribute(target, relabel=True)
        assert dist.layout == layout
        check_tile(layout, comm.rank, dist.tile, comm)

    yield "a permutation", partial(moved, rolled)
    yield "columns", partial(moved, columns)


def calibration(comm: MPI.Intracomm) -> Iterator[Case]:
    """The measured network is the same on all ranks, and planning and moving accept it; communicators that are used
    for the first time later take it where all their ranks have it."""
    folder = Path(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None))
    rows, columns = (Layout.from_spec(Mesh(x=comm.size), (12, 12), "int32", spec) for spec in ([["x"]], [[], ["x"]]))
    tile = given_tile(rows, comm.rank, "int32")

    def measured(nodes: int) -> None:
        team_of(comm, nodes=nodes)
        network = calibrate(comm, store=False)
        assert len(set(comm.allgather(network.to_json()))) == 1
        assert network.inner is not None
        assert network.outer is not None
        assert network.domain == comm.size // nodes
        path = folder / "network.json"
        if comm.rank == 0:
            path.write_text(network.to_json())
        comm.Barrier()
        assert Network.load(os.fspath(path)) == network
        assert rs.plan(rows, columns, network=network).seconds > 0
        check_tile(columns, comm.rank, redistribute(tile, rows, columns, comm, network=network), comm)

    @contextmanager
    def fresh(name: str) -> Iterator[MPI.Intracomm]:
        """A communicator that nobody has used, where what is measured is kept in a folder of this name."""
        before = os.environ.get(CACHE)
        os.environ[CACHE] = os.fspath(folder / name)
        try:
            yield comm.Dup()
        finally:
            os.environ.pop(CACHE)
            os.environ.update({} if before is None else {CACHE: before})

    def kept() -> None:
        with fresh("all") as one:
            network = calibrate(one, "kept")
            assert read_options(team=team_of(one)).network is None
        with fresh("all") as one:
            assert read_options(team=team_of(one)).network == network
            assert read_options(network="h100", team=team_of(one)).network == Network.preset("h100")
            check_tile(columns, comm.rank, redistribute(tile, rows, columns, one), comm)
        with fresh(f"one/{comm.rank}") as one:
            if comm.rank == 0:
                store_calibration(team_of(comm).kind, Calibration(network, None))
            assert read_options(team=team_of(one)).network is None

    def damaged() -> None:
        with fresh("damaged") as one:
            if comm.rank == 0:
                store_calibration(team_of(comm).kind, Calibration(Network.preset("h100"), None)).write_text("{}")
            comm.Barrier()
            # A call that names a network needs no other.
            check_tile(columns, comm.rank, redistribute(tile, rows, columns, one, network="none"), comm)
            check_refused(comm, NetworkError, lambda: redistribute(tile, rows, columns, one), "calibrate again")

    for nodes in (2, 1) if comm.size % 2 == 0 else (1,):
        yield f"{nodes} nodes", partial(measured, nodes)
    yield "kept", kept
    yield "damaged", damaged
