"""The topics of memory that a node's ranks share: segments, the arena, no room, many arrays, many communicators."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice, product
from pathlib import Path
from unittest import mock

import numpy as np
from mpi4py import MPI

from reshard.mpi import DistArray, redistribute
from reshard.runtime.on_mpi.node import arena as segments_module
from reshard.runtime.on_mpi.node.arena import KINDS, LOG, PAGE, Arena, share_segment
from reshard.runtime.on_mpi.team import team_of
from reshard.types import Layout, Mesh
from tests.mpi.moving import LIMIT, MoveOptions, caught_by, check_move, check_tile, given_tile
from tests.mpi.worker import Case

U1 = np.dtype("u1")


def segments(comm: MPI.Intracomm) -> Iterator[Case]:
    """Every rank sees what the others write, whichever file it is; without room on one rank, none has memory."""

    def shared(kind: int, nbytes: int) -> None:
        with mock.patch.object(segments_module, "KINDS", (kind,)):
            memory = share_segment(comm.size, comm.rank, nbytes, comm.allgather)
        assert memory is not None
        memory[comm.rank * nbytes : (comm.rank + 1) * nbytes] = comm.rank + 1
        comm.Barrier()
        assert (memory.reshape(comm.size, nbytes) == np.arange(1, comm.size + 1)[:, None]).all()
        comm.Barrier()

    def refused(odd: int) -> None:
        with _refusing(comm.rank == odd):
            assert share_segment(comm.size, comm.rank, PAGE, comm.allgather) is None

    for kind, nbytes in product(KINDS, (PAGE, 10 << 20)):
        yield f"file {kind}, {nbytes} B", partial(shared, kind, nbytes)
    for odd in (0, comm.size - 1):
        yield f"refused on {odd}", partial(refused, odd)


def arenas(comm: MPI.Intracomm) -> Iterator[Case]:
    """Memory is used again once all ranks have released it, and is the same on every rank."""
    logs = share_segment(comm.size, comm.rank, LOG * 8, comm.allgather)
    assert logs is not None
    arena = Arena(comm.size, comm.rank, logs.view(np.int64).reshape(-1, LOG))

    def take(nbytes: int) -> int:
        arena.update(comm.allgather(arena.log()))
        place = arena.take(nbytes, lambda words: comm.allgather(list(words)))
        assert len(set(comm.allgather(place))) == 1
        return place

    def shared(nbytes: int) -> None:
        place = take(nbytes)
        tile = arena.hold(place, (nbytes // 8,), np.dtype("i8"))
        tile[...] = comm.rank
        comm.Barrier()
        for member in range(comm.size):
            assert (arena.tile(member, place, (nbytes // 8,), np.dtype("i8")) == member).all()
        comm.Barrier()

    def released_by_all() -> None:
        place = take(8000)
        kept = arena.hold(place, (8000,), U1) if comm.rank == 0 else None
        if comm.rank:
            arena.release(place)
        other = take(8000)
        assert other != place, "used while rank 0 holds it"
        arena.release(other)
        del kept
        assert take(8000) in (place, other)

    for nbytes in (8, 80_000, 10 << 20):
        yield f"shared memory, {nbytes} B", partial(shared, nbytes)
    yield "released by all", released_by_all


# ---- no room ---------------------------------------------------------------------------------------------


@contextmanager
def _refusing(refuses: bool) -> Iterator[None]:
    """This rank finds no room for new memory, if it `refuses`."""
    with ExitStack() as patches:
        if refuses:
            patches.enter_context(mock.patch.object(segments_module, "_allocate_segment", lambda *_: None))
        yield


def full(comm: MPI.Intracomm) -> Iterator[Case]:
    """Moves of all kinds while no node has room, or only one of them has: a quarter of the pairs of a move and an
    option, with every node."""
    cases = list(every_full(comm))
    third = len(cases) // 3  # Another node.
    yield from (cases[number % 3 * third + number] for number in range(0, third, 4))


def every_full(comm: MPI.Intracomm) -> Iterator[Case]:
    mesh = Mesh(x=comm.size)
    side = 4 * comm.size + 1
    ends = [Layout.from_spec(mesh, (side, side), "int32", spec) for spec in ([["x"]], [[], ["x"]], [])]
    ends.append(Layout.parse(f"s32[2{{x}}3/{side}, {side}]", mesh))
    options = [
        MoveOptions(),
        MoveOptions(shared=True),
        MoveOptions(shared=True, out=True),
        MoveOptions(out=True),
        MoveOptions(order="F", out=True),
        MoveOptions("stage", out=True),
        MoveOptions("read", out=True),
    ]
    for nodes, refused in ((1, 1), (2, 1), (2, 2)):
        for (source, target), move in product(product(ends, ends), options):
            name = f"{source} -> {target}, {move}, {refused} of {nodes} nodes full"
            yield name, partial(_moves_when_full, comm, nodes, refused, source, target, move)


def _moves_when_full(
    comm: MPI.Intracomm, nodes: int, refused: int, source: Layout, target: Layout, move: MoveOptions
) -> None:
    team = team_of(comm, nodes=nodes)
    with _refusing(team.nodes[comm.rank] < refused and comm.rank % 2 == 0):  # One rank of a node is enough.
        check_move(comm, team, source, target, move)


def files_of_a_name(comm: MPI.Intracomm) -> Iterator[Case]:
    """Arrays beyond the size of /dev/shm, where the ranks must use it: right results, and nobody is ended."""

    side = 2048
    mesh = Mesh(x=comm.size)
    rows = Layout.from_spec(mesh, (side, side), "float32", [["x"]])
    columns = Layout.from_spec(mesh, (side, side), "float32", [[], ["x"]])
    whole = np.arange(side * side, dtype="f4").reshape(side, side)
    part = slice(comm.rank * side // comm.size, (comm.rank + 1) * side // comm.size)

    def beyond() -> None:
        with mock.patch.object(segments_module, "KINDS", KINDS[1:]):
            arrays = [DistArray(rows, whole[part].copy(), comm).redistribute(columns, limit=LIMIT) for _ in range(8)]
            arrays += [array.redistribute(rows, limit=LIMIT) for array in arrays]
            for number, array in enumerate(arrays):
                assert np.array_equal(array.tile, whole[part] if number > 7 else whole[:, part]), number
            places = [team_of(comm).arena.place_of(array.tile) > 0 for array in arrays]
            assert places[0] and not places[-1], places
            assert len(set(comm.allgather(tuple(places)))) == 1

    yield "beyond the size of the file system", beyond


# ---- many ------------------------------------------------------------------------------------------------


def many(comm: MPI.Intracomm, count: int = 100) -> Iterator[Case]:
    """Many arrays alive at once, each with its own elements; their memory is used again."""
    comm = comm.Dup()
    mesh = Mesh(x=comm.size)
    rows = Layout.from_spec(mesh, (comm.size, 2 * comm.size), "int32", [["x"]])
    columns = Layout.from_spec(mesh, rows.shape, "int32", [[], ["x"]])

    def used() -> int:
        return sum(sum(heap.capacities.values()) for heap in team_of(comm).arena._heaps.values())

    def alive() -> None:
        arrays = [DistArray.full(rows, number, comm, limit=LIMIT) for number in range(count)]
        moved = [array.redistribute(columns, limit=LIMIT) for array in arrays[:: count // 20]]
        for number, array in enumerate(arrays):
            assert (array.tile == number).all(), number
        for number, array in zip(range(0, count, count // 20), moved, strict=False):
            assert (array.tile == number).all(), number

    def again() -> None:
        before = used()
        for _ in range(3):
            alive()
            gc.collect()
            for _ in range(2 * count // LOG + 2):
                DistArray.empty(rows, comm, limit=LIMIT)
        assert used() <= 2 * before, (before, used())

    yield "alive", alive
    yield "again", again


def very_many(comm: MPI.Intracomm) -> Iterator[Case]:
    """MPICH has no more than 2,000 windows in all, and /dev/shm a file for each."""
    yield from islice(many(comm, 2500), 1)


def communicators(comm: MPI.Intracomm, count: int = 15) -> Iterator[Case]:
    """Communicators that the user makes, uses and frees; arrays of a freed one keep their tiles."""
    mesh = Mesh(x=comm.size)
    rows = Layout.from_spec(mesh, (comm.size, 2 * comm.size), "int32", [["x"]])
    columns = Layout.from_spec(mesh, rows.shape, "int32", [[], ["x"]])
    tile = given_tile(rows, comm.rank, "int32")

    def freed() -> None:
        kept: list[DistArray] = []
        for number in range(count):
            own = comm.Dup() if number % 3 else comm.Split(0, comm.rank)
            check_tile(columns, comm.rank, redistribute(tile, rows, columns, own, limit=LIMIT), comm)
            kept.append(DistArray.full(rows, number, own, limit=LIMIT))
            if number % 5 == 0:
                team_of(own, nodes=comm.size)
                check_tile(columns, comm.rank, redistribute(tile, rows, columns, own, limit=LIMIT), comm)
            own.Free()
        for number, array in enumerate(kept):
            array.tile[...] += 1
            assert (array.tile == number + 1).all()
        assert "freed" in str(caught_by(lambda: kept[0].redistribute(columns, limit=LIMIT)))
        assert "freed" in repr(kept[0])
        assert "wrapped again" in str(caught_by(lambda: kept[1] + 1))
        check_tile(columns, comm.rank, DistArray(rows, tile, comm).redistribute(columns).tile, comm)

    def broken() -> None:
        own = comm.Dup()
        team_of(own).fail("an odd rank") if comm.rank == 0 else team_of(own)
        comm.Barrier()
        check_tile(columns, comm.rank, redistribute(tile, rows, columns, own, limit=LIMIT), comm)
        own.Free()

    yield "freed", freed
    yield "one that has failed", broken


def very_many_communicators(comm: MPI.Intracomm) -> Iterator[Case]:
    """MPICH has about 2,000 in all, of which a team that is not freed takes several: most are taken beforehand."""
    taken = [comm.Dup() for _ in range(1850)]
    yield from islice(communicators(comm, 150), 1)
    for each in taken:
        each.Free()


def finalized(comm: MPI.Intracomm) -> Iterator[Case]:
    """Teams of communicators of all kinds are alive when MPI ends, as are arrays: nothing crashes."""
    rows = Layout.from_spec(Mesh(x=comm.size), (comm.size, 2), "int32", [["x"]])
    kept = [DistArray.zeros(rows, each, limit=LIMIT) for each in (comm, comm.Dup(), comm.Dup())]
    Path("/dev/null").write_text(str(DistArray.zeros(Layout.parse("s32[{x}2]", Mesh(x=1)), MPI.COMM_SELF)))
    kept[1].comm.Free()
    globals()["_KEPT"] = kept
    yield "nothing", lambda: None
