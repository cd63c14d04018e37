"""The topics of `reshard.runtime.on_mpi.node` and `wire` that need several ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.lower.to_mpi import schedule_device
from reshard.runtime import Account
from reshard.runtime.on_mpi.copies.strided_copy import view_as_words
from reshard.runtime.on_mpi.node.arena import share_segment
from reshard.runtime.on_mpi.node.cma import RemoteMemory
from reshard.runtime.on_mpi.node.node_sync import NodeSync, sync_bytes
from reshard.runtime.on_mpi.run_plan import overwrite_tile, reduce_step
from reshard.runtime.on_mpi.team import Watch, team_of
from reshard.runtime.on_mpi.wire.chunks import messages_of_step
from reshard.runtime.on_mpi.wire.message_exchange import Call, MessageExchange
from reshard.types import Layout, Mesh
from tests.mpi.moving import LIMIT, check_tile, given_tile
from tests.mpi.worker import Case


def new_call(comm: MPI.Intracomm, dtype: str = "int64") -> Call:
    """A call of a dtype, whose account is empty."""
    team = team_of(comm)
    return Call(team, Watch(team, LIMIT), team.pool, Account(dtype), comm.rank)


# ---- node ------------------------------------------------------------------------------------------------


def node_sync(comm: MPI.Intracomm) -> Iterator[Case]:
    """Words of even and odd syncs, who is missing, and failures."""
    memory = share_segment(comm.size, comm.rank, 1 << 16, comm.allgather)
    assert memory is not None
    sync = NodeSync(comm.size, comm.rank, memory[: sync_bytes(comm.size)])

    def wait() -> None:
        while not sync.complete():
            pass

    def words() -> None:
        for number in range(50):
            sync.post([number * 100 + comm.rank, -number, 1 << 62])
            wait()
            assert [sync.read(m, 3) for m in range(comm.size)] == [
                [number * 100 + m, -number, 1 << 62] for m in range(comm.size)
            ]

    def missing() -> None:
        if comm.rank:
            comm.Barrier()  # Until rank 0 has looked.
            sync.post([])
        else:
            sync.post([])
            assert sync.missing() == list(range(1, comm.size))
            assert not sync.complete()
            comm.Barrier()
        wait()
        assert sync.missing() == []

    def failures() -> None:
        assert sync.failed() == {}
        comm.Barrier()
        if comm.rank == comm.size - 1:
            sync.fail("größer" + "x" * 5000)
        comm.Barrier()
        (text,) = sync.failed().values()
        assert list(sync.failed()) == [comm.size - 1]
        assert text.startswith("größerxxx")
        assert 1000 < len(text) < 5000
        comm.Barrier()

    yield "words", words
    yield "missing", missing
    yield "failures", failures


def cma(comm: MPI.Intracomm) -> Iterator[Case]:
    """The memory of other processes, if this machine allows it."""
    memory = RemoteMemory(comm)

    def reads() -> None:
        assert len(set(comm.allgather(memory.works))) == 1
        mine = np.arange(6000, dtype="i8") * (comm.rank + 1)
        addresses = comm.allgather(mine.ctypes.data)
        for member in range(comm.size if memory.works else 0):
            runs = np.array([[addresses[member] + 16 * at, 8] for at in range(3000)], np.uint64)
            into = np.zeros(3000, "i8")
            memory.read(member, runs, np.array([[into.ctypes.data, into.nbytes]], np.uint64))
            assert np.array_equal(into, np.arange(0, 6000, 2) * (member + 1))
        comm.Barrier()

    yield "reads", reads


# ---- wire ------------------------------------------------------------------------------------------------


def exchange(comm: MPI.Intracomm) -> Iterator[Case]:
    """An all-to-all with any staging: every element arrives, and no more is staged than there is room for."""
    mesh = Mesh(x=comm.size)
    side = 4 * comm.size + 1
    pairs = [
        [Layout.from_spec(mesh, (side, side), "int64", spec) for spec in ([["x"]], [[], ["x"]])],
        [Layout.from_spec(mesh, (side, 3), "int64", spec) for spec in ([["x"]], [])],
    ]
    for (source, target), scratch, ahead in itertools.product(pairs, (0, 16, 200, 1 << 20), (False, True)):
        yield f"{source} -> {target}, {scratch}, {ahead}", partial(_exchanged, comm, source, target, scratch, ahead)


def _exchanged(comm: MPI.Intracomm, source: Layout, target: Layout, scratch: int, ahead: bool) -> None:
    call = new_call(comm)
    step = schedule_device(rs.plan(source, target), comm.rank).steps[0]
    step = replace(step, scratch=scratch)
    received = rs.plan(source, target).received_bytes
    mine = messages_of_step(step, {d: d for d in range(comm.size)}, (source.tile_shape, target.tile_shape), 8, received)
    tile = given_tile(source, comm.rank, "int64")
    result = np.full(target.tile_shape, -5)
    untouched: list[bool] = []

    def ready() -> None:
        untouched.append(bool((result == -5).all()))

    MessageExchange(call, mine, view_as_words(tile), view_as_words(result)).run(ready if ahead else None)
    comm.Barrier()
    check_tile(target, comm.rank, result, comm)
    assert untouched == ([True] if ahead else [])
    room = scratch + (received if mine.held else 0)
    largest = max([chunk.elements for side in (mine.sends, mine.receives) for chunk in side.chunks], default=0)
    assert call.memory.peak_bytes <= max(room, 2 * 8 * largest)
    assert call.memory.live[comm.rank] == 0
    assert call.memory.received[comm.rank] <= received


def reduction(comm: MPI.Intracomm) -> Iterator[Case]:
    """Reduce-scatters and all-reduces of every operation, for dtypes that MPI knows and those that it does not."""
    mesh = Mesh(x=comm.size)
    side = 2 * comm.size
    ends = [("[]", []), ("[rows]", [["x"]]), ("[columns]", [[], ["x"]])]
    for dtype, operation in itertools.product(("int32", "float64", "float16"), ("sum", "max", "min", "product")):
        source = Layout.from_spec(mesh, (side, side), dtype, [], unreduced=["x"])
        source = Layout(mesh, source.dims, dtype, operation, source.partial)
        for (name, spec), order in itertools.product(ends, "CF"):
            target = Layout.from_spec(mesh, (side, side), dtype, spec)
            case = partial(_reduced, comm, source, target, order)
            yield f"{operation} of {dtype} to {name}, {order}", case


def _reduced(comm: MPI.Intracomm, source: Layout, target: Layout, order: str) -> None:
    call = new_call(comm, source.dtype)
    step = schedule_device(rs.plan(source, target), comm.rank).steps[0]
    rng = np.random.default_rng(5)
    # Small whole numbers, so that no order of combining them rounds.
    every = [rng.integers(1, 4, source.shape).astype(source.dtype) for _ in range(comm.size)]
    tile, result = np.array(every[comm.rank], order=order), np.zeros(target.tile_shape, source.dtype)
    calls: list[int] = []
    reduce_step(call, step, {d: d for d in range(comm.size)}, tile, result, lambda: calls.append(1))
    combine = {"sum": np.sum, "max": np.max, "min": np.min, "product": np.prod}[source.reduction or ""]
    wanted = combine(np.stack(every), axis=0)
    spans = {(): (slice(None), slice(None))}
    side = source.shape[0] // comm.size
    part = slice(comm.rank * side, (comm.rank + 1) * side)
    spans = [slice(None) if extent == source.shape[0] else part for extent in target.tile_shape]
    assert np.array_equal(result, wanted[tuple(spans)])
    assert np.array_equal(tile, every[comm.rank]), "the source was written to"
    assert len(calls) == 2
    assert call.memory.live[comm.rank] == 0


def in_place(comm: MPI.Intracomm) -> Iterator[Case]:
    """Exchanges inside a donated tile, whole and in chunks."""
    mesh, side = Mesh(x=comm.size), 2 * comm.size
    rows = Layout.from_spec(mesh, (side, side, 3), "int64", [["x"]])
    columns = Layout.from_spec(mesh, (side, side, 3), "int64", [[], ["x"]])
    for source, target in ((rows, columns), (columns, rows)):
        for more in (0, 8 * 7, 1 << 10):
            yield f"{source} -> {target}, {more}", partial(_overwritten, comm, source, target, more)


def _overwritten(comm: MPI.Intracomm, source: Layout, target: Layout, more: int) -> None:
    budget = min(source.tile_bytes + more, source.tile_bytes + target.tile_bytes - 1)
    plan = rs.plan(source, target, budget=budget, donate=True)
    call = new_call(comm)
    tile = given_tile(source, comm.rank, "int64")
    call.memory.take(comm.rank, tile.size)
    ranks = {d: d for d in range(comm.size)}
    result = overwrite_tile(call, schedule_device(plan, comm.rank).steps[0], ranks, tile, target.tile_shape)
    assert np.shares_memory(result, tile)
    check_tile(target, comm.rank, result, comm)
    assert call.memory.peak_bytes <= plan.peak_bytes <= budget
