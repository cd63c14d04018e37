"""The topics of moves whose ranks each talk to few others: handles that wait for these alone.

Arrays have their global indices as values; who has which is a table of owners (`tests.owners`), by which this module
also works out who talks to whom.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

from reshard.errors import PlanError, RankError, TileError
from reshard.mpi import DistArray, MoveHandle, handles, prepare
from reshard.runtime import Account
from reshard.runtime.on_mpi import fetch
from reshard.runtime.on_mpi.team import Facts, team_of
from reshard.types import Layout, Mesh
from tests.mpi.moving import LIMIT, caught_by
from tests.mpi.worker import Case
from tests.owners import PADDING, Owned

Pair = tuple[Owned, Owned]
LATE = 2


def _rows(owners: np.ndarray, size: int, width: int, ids: list[int] | None = None) -> Owned:
    mesh = Mesh({"x": size}, device_ids=ids)
    layout = Layout.from_owners(owners, mesh, (len(owners), width), "int32")
    return Owned(layout, [["x"], []], [np.asarray(owners), np.zeros(width, np.int64)])


def _pairs(size: int) -> Iterator[tuple[str, Pair]]:
    """Layouts between which each rank takes from the one before it, or gives to those beside it."""
    choose = np.random.default_rng(size)
    table = choose.integers(0, size, 61)
    passed = np.where(choose.random(61) < 0.4, (table + 1) % size, table)
    yield "rows by owner, some passed on", (_rows(table, size, 3), _rows(passed, size, 3))
    even = np.repeat(np.arange(size), 12)
    # The ends move to the left and to the right by turns: rank 1 takes from both sides, rank 2 gives to both.
    ends = np.arange(1, size) * 12 + np.resize([-4, 3], size - 1)
    shifted = np.searchsorted(ends, np.arange(12 * size), side="right")
    yield "intervals whose ends shift", (_rows(even, size, 2), _rows(shifted, size, 2))
    yield "and back", (_rows(shifted, size, 2), _rows(even, size, 2))
    yield "all tiles passed on", (_rows(even, size, 2), _rows((even + 1) % size, size, 2))
    # Twenty runs of a row each: they are copied by index.
    long = np.repeat(np.arange(size), 400)
    yield (
        "very many rows",
        (_rows(long, size, 1), _rows(np.where(choose.random(len(long)) < 0.5, (long + 1) % size, long), size, 1)),
    )
    some = _rows(even // 2, -(-size // 2), 2, list(range(0, size, 2)))
    yield "to fewer ranks", (_rows(even, size, 2), some)
    yield "from fewer ranks", (some, _rows(even, size, 2))


def _neighbours(rank: int, pair: Pair) -> set[int]:
    """Who has what a rank gets, and gets what it has."""
    source, target = (end.held(0) for end in pair)
    none = np.zeros(np.prod(pair[0].layout.shape), bool)
    givers = {peer for peer, has in source.items() if (has & target.get(rank, none) & ~source.get(rank, none)).any()}
    takers = {peer for peer, has in target.items() if (has & source.get(rank, none) & ~source.get(peer, none)).any()}
    return (givers | takers) - {rank}


def moves(comm: MPI.Intracomm) -> Iterator[Case]:
    """Every element, in each way between ranks: through an inbox, read in place or by the kernel, in messages."""
    for (name, pair), nodes, pushed, reads in itertools.product(
        _pairs(comm.size), sorted({1, 2, comm.size}), (fetch.PUSHED, 0), (True, False)
    ):
        call = partial(_moved, comm, pair, nodes, pushed, reads)
        yield f"{name}, {nodes} nodes, pushed {pushed}, reads {reads}", call


def sampled(comm: MPI.Intracomm) -> Iterator[Case]:
    """Every third of the cases of `moves`."""
    yield from itertools.islice(moves(comm), 0, None, 3)


def _prepared(comm: MPI.Intracomm, pair: Pair, nodes: int, reads: bool = True, limit: float = LIMIT) -> MoveHandle:
    team = team_of(comm, nodes=nodes)
    if not reads:
        team.facts = Facts(team.facts.nodes, False)
    with mock.patch.object(handles, "SMALL_AMONG", 2):
        handle = prepare(pair[0].layout, pair[1].layout, comm, limit=limit)
    assert handle.neighbours is not None
    return handle


def _moved(comm: MPI.Intracomm, pair: Pair, nodes: int, pushed: int, reads: bool) -> None:
    source, target = pair
    whole = np.arange(np.prod(source.layout.shape), dtype="int32").reshape(source.layout.shape)
    before, after = (end.tiles(whole).get(comm.rank) for end in pair)
    with mock.patch.multiple(fetch, PUSHED=pushed, WORTHWHILE=pushed), _prepared(comm, pair, nodes, reads) as handle:
        assert set(handle.neighbours or ()) == _neighbours(comm.rank, pair)
        given = None
        if before is not None:
            given = DistArray.zeros(source.layout, comm).tile if source.layout.mesh.size == comm.size else before.copy()
        held = None if after is None else after != PADDING
        for step in range(7):
            scale = step + 1
            if before is None:
                tile = None
            elif step % 3 == 0:
                tile = np.array(before * scale, order="F" if step else "C")
            elif step % 3 == 1:
                given[...] = before * scale  # In shared memory.
                tile = given
            else:
                tile = (before * scale)[tuple(map(slice, map(len, source.indices(comm.rank))))]  # Without padding.
            out = None
            if after is not None and step % 2:
                out = np.full(after.shape, -5, "int32", order="F" if step == 3 else "C")
            memory = Account("int32")
            begun = handle.start(tile, out=out) if step > 3 else None
            result = handle(tile, out=out, memory=memory) if begun is None else begun.wait()
            assert (result is None) == (after is None) and (out is None or result is out)
            if after is None:
                continue
            assert np.array_equal(result[held], after[held] * scale), f"call {step}"
            assert out is not None or not result[~held].any()
            mine = source.held(0).get(comm.rank)
            wanted = target.held(0)[comm.rank]
            lacking = int(np.count_nonzero(wanted if mine is None else wanted & ~mine))
            assert begun is not None or memory.received_bytes == 4 * lacking


def mistakes(comm: MPI.Intracomm) -> Iterator[Case]:
    """What is wrong on a rank is one error on it and those that take from it, whose `out` stays; others have theirs."""
    (_, pair), odd = next(itertools.islice(_pairs(comm.size), 3, 4)), comm.rank == 1
    whole = np.arange(np.prod(pair[0].layout.shape), dtype="int32").reshape(pair[0].layout.shape)
    before, after = (end.tiles(whole)[comm.rank] for end in pair)
    shape, hears = after.shape, comm.rank == 2
    wrong: list[tuple[str, Any, Any, type[Exception], str]] = [
        ("a tile of another shape", np.zeros((3, 3), "int32"), None, TileError, "shape"),
        ("no tile", None, None, TileError, "None"),
        ("a tile of another dtype", before.astype("f8"), None, TileError, "float64"),
        ("out of another shape", before, np.zeros((1, 1), "int32"), TileError, "shape"),
        ("out that is read-only", before, np.broadcast_to(np.int32(0), shape), TileError, "read-only"),
        ("out that is the tile", before, before, TileError, "overlaps"),
    ]
    for nodes, pushed in itertools.product(sorted({1, comm.size}), (fetch.PUSHED, 0)):
        with mock.patch.multiple(fetch, PUSHED=pushed, WORTHWHILE=pushed):
            handle = _prepared(comm, pair, nodes)

        def refused(
            handle: MoveHandle, tile: Any, into: Any, kind: type[Exception], text: str, begins: bool = False
        ) -> None:
            out = np.full(shape, -5, "int32")
            error = caught_by(partial(_call, handle, begins, *((tile, into) if odd else (before, out))))
            if odd or hears:
                assert type(error) is kind and text in str(error), error
                assert odd or ("rank 1: " in str(error) and (out == -5).all()), error
            else:
                assert error is None and np.array_equal(out, after), error
            assert np.array_equal(handle(before), after)

        for name, *given in wrong:
            for begins in (False, True):
                yield (
                    f"{name}, {nodes} nodes, pushed {pushed}, begun {begins}",
                    partial(refused, handle, *given, begins),
                )
        yield f"wrong alike, {nodes} nodes", partial(_all_wrong, comm, handle, before, after)


def _call(handle: MoveHandle, begins: bool, tile: Any, out: Any) -> Any:
    return handle.start(tile, out=out).wait() if begins else handle(tile, out=out)


def _all_wrong(comm: MPI.Intracomm, handle: MoveHandle, before: np.ndarray, after: np.ndarray) -> None:
    texts = comm.allgather(str(caught_by(partial(handle, before[:1]))))
    assert len(set(texts)) == 1 and "rank" not in texts[0].partition(";")[0], texts
    assert np.array_equal(handle(before), after)


class _Shifted:
    """Intervals whose ends shift: each rank talks to those beside it, and those beside `LATE` take from it."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.pair = comm, next(itertools.islice(_pairs(comm.size), 1, 2))[1]
        whole = np.arange(np.prod(self.pair[0].layout.shape), dtype="int32").reshape(self.pair[0].layout.shape)
        self.before, self.after = (end.tiles(whole)[comm.rank] for end in self.pair)
        self.back_pair = self.pair[1], self.pair[0]
        self.held = self.after != PADDING
        self.free = [rank for rank in range(comm.size) if LATE not in {rank, *_neighbours(rank, self.pair)}]
        self.takers = [rank for rank in range(comm.size) if rank != LATE and LATE in _neighbours(rank, self.pair)]

    def there(self, handle: Callable[..., Any], scale: int = 1, **options: Any) -> None:
        """Makes a call, and checks it."""
        self.check(handle(self.before * scale, **options), scale)

    def check(self, result: np.ndarray, scale: int = 1) -> None:
        assert np.array_equal(result[self.held], self.after[self.held] * scale)

    def back(self, handle: Callable[..., Any], scale: int = 1) -> None:
        """The same of the way back."""
        self.check_back(handle(np.where(self.held, self.after * scale, 0).astype("int32")), scale)

    def check_back(self, result: np.ndarray, scale: int = 1) -> None:
        own = tuple(map(slice, map(len, self.pair[0].indices(self.comm.rank))))
        assert np.array_equal(result[own], self.before[own] * scale)


def late(comm: MPI.Intracomm) -> Iterator[Case]:
    """A rank that makes its call only when those that do not talk to it have ended theirs."""
    case = _Shifted(comm)

    def waits_for_nobody(nodes: int, pushed: int, begins: bool, gives_out: bool) -> None:
        assert case.free
        with mock.patch.multiple(fetch, PUSHED=pushed, WORTHWHILE=pushed), _prepared(comm, case.pair, nodes) as handle:
            for step in range(3):
                out = np.full(case.after.shape, -5, "int32") if gives_out else None
                if comm.rank == LATE:
                    for rank in case.free:
                        comm.recv(source=rank, tag=77)
                case.there(partial(_call, handle, begins), step, out=out)
                if comm.rank in case.free:
                    comm.send(None, LATE, tag=77)

    for nodes, pushed, begins, out in itertools.product(
        sorted({1, 2, comm.size}), (fetch.PUSHED, 0), (False, True), (False, True)
    ):
        call = partial(waits_for_nobody, nodes, pushed, begins, out)
        yield f"{nodes} nodes, pushed {pushed}, begun {begins}, out {out}", call


def _overtaken(comm: MPI.Intracomm, case: _Shifted, nodes: int) -> None:
    """Who gives to a late rank is calls ahead of it, and may not write what that has not read."""
    with _prepared(comm, case.pair, nodes) as handle:
        for step in range(12):
            time.sleep(0.02 * (comm.rank == LATE))
            case.there(handle, step)


def races(comm: MPI.Intracomm) -> Iterator[Case]:
    """Several calls under way, ranks that come in any order or not at all, and the end of handles."""
    case = _Shifted(comm)

    def several(nodes: int) -> None:
        # Two handles under way, one of which is started twice and freed while it is.
        there, back = (_prepared(comm, pair, nodes) for pair in (case.pair, case.back_pair))
        for _ in range(3):
            one, other = there.start(case.before), back.start(np.where(case.held, case.after, 0))
            two = there.start(case.before * 2)
            case.check(one.wait())
            case.check_back(other.wait())
            if comm.rank == LATE:
                time.sleep(0.05)
            case.check(two.wait(), 2)
        begun = there.start(case.before)
        there.free()
        case.check(begun.wait())
        assert type(caught_by(partial(there, case.before))) is PlanError
        back.free()

    def raced(nodes: int) -> None:
        choose, alike = random.Random(comm.rank), random.Random(5)
        there, back = (_prepared(comm, pair, nodes) for pair in (case.pair, case.back_pair))
        for step in range(40):
            if choose.random() < 0.2:
                time.sleep(choose.random() * 2e-3)
            if alike.random() < 0.1:
                DistArray.zeros(case.pair[0].layout, comm)  # A call of all ranks.
            if alike.random() < 0.5:
                case.there(there, step)
            else:
                case.back(back, step)

    def gone(nodes: int) -> None:
        # A rank that makes no call ends those of its neighbours after the limit; then all prepare the handle anew.
        with _prepared(comm, case.pair, nodes, limit=1.5) as handle:
            out = np.full(case.after.shape, -5, "int32")
            error = None if comm.rank == LATE else caught_by(partial(handle, case.before, out=out))
            if comm.rank in case.takers:
                assert type(error) is RankError and (out == -5).all(), error
            comm.Barrier()
            time.sleep(0.2)
            case.there(handle, out=out)

    for nodes in sorted({1, 2, comm.size}):
        yield f"several under way, {nodes} nodes", partial(several, nodes)
        yield f"pauses, {nodes} nodes", partial(raced, nodes)
        yield f"a rank that comes late to each call, {nodes} nodes", partial(_overtaken, comm, case, nodes)
        if nodes != 2:  # It waits for a limit.
            yield f"a rank that makes no call, {nodes} nodes", partial(gone, nodes)
