"""Moves that are made again and again: handles, moves that have begun, and what `redistribute` keeps."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.errors import AgreementError, PlanError, RankError, ReshardError, TileError
from reshard.mpi import DistArray, handles, prepare, redistribute
from reshard.runtime import Account
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_mpi import repeated
from reshard.runtime.on_mpi.copies.stream_copy import SWITCH
from reshard.runtime.on_mpi.repeated import ARRAYS, STAGED, TILES, AgreedCall, PreparedMove
from reshard.runtime.on_mpi.team import team_of, turns_of
from reshard.types import Digit, Dim, Layout, Mesh, Pieces
from tests.mpi.moving import LIMIT, caught_by, check_refused, check_tile, given_tile, slabs
from tests.mpi.worker import Case
from tests.oracle import PADDING, tiles_of

ODD = 1


def moves(comm: MPI.Intracomm) -> Iterator[Case]:
    """Every element, through a handle, a move that has begun, and repeated calls; new tiles each time."""
    line, size = Mesh(x=comm.size), comm.size
    two = Mesh(x=size // 2, y=2)
    n = 2 * size
    on_line = ["[{x}%d, %d]", "[%d, {x}%d]", "[2{x}%d, %d]", "[%d, %d]", "[%d, 2{x}%d]"]
    layouts = [Layout.parse(f"s64{text}", line) for text in _sized(on_line, n, size)]
    for number, (source, target) in enumerate(product(layouts, layouts)):
        if number % 4 == 1 or source is target is layouts[0]:  # From one kind to the next, and back.
            yield f"{source} -> {target}", partial(_moved, comm, source, target)
    grid = [rs.Layout.from_spec(two, (n, n, 6), "int64", held) for held in _HELD]
    for source, target in zip(grid, [*grid[1:], grid[0]], strict=True):
        yield f"{source} -> {target}", partial(_moved, comm, source, target)
    rows, columns = (rs.Layout.from_spec(line, (n, n), "int64", held) for held in ([["x"], []], [[], ["x"]]))
    for dtype in ("bool", "bfloat16", "complex128"):
        ends = [Layout(end.mesh, end.dims, dtype) for end in (rows, columns)]
        yield f"dtype {dtype}", partial(_moved, comm, *ends)
    uneven = rs.Layout.from_spec(line, (n + 1, n), "int64", [["x"], []])
    across = rs.Layout.from_spec(line, (n + 1, n), "int64", [[], ["x"]])
    whole = rs.Layout.from_spec(line, (n + 1, n), "int64", [[], []])
    owners = Pieces.from_owners([(3 * row) % size for row in range(n + 1)], size)
    by_owner = Layout(line, (Dim((*uneven.dims[0].digits[:1], Digit(owners.largest, None)), n + 1, owners),
                             whole.dims[1]), "int64")  # fmt: skip
    for source, target in ((uneven, whole), (uneven, across), (across, uneven), (across, by_owner), (by_owner, across)):
        yield f"uneven, {source} -> {target}", partial(_moved, comm, source, target)
    large = [rs.Layout.from_spec(line, (STAGED // 64, 16 * size), "int64", held) for held in ([["x"], []], [[], ["x"]])]
    yield "large", partial(_moved, comm, *large, turns=2)
    medium = [rs.Layout.from_spec(line, (4096, 16 * size), "int64", held) for held in ([["x"], []], [[], ["x"]])]
    for switch in ("0", "1"):  # Without the compiled call, and with it.
        apart = comm.Dup()
        for ends in ((rows, columns), (columns, rows), medium):
            for kind, check in (("tiles", _moved), ("arrays", _arrays_moved)):
                case = partial(_switched, switch, check, apart, *ends)
                yield f"{kind}, {ends[0]} -> {ends[1]}, switch {switch}", case
    yield "medium, results need more memory", partial(_moved_into_new_memory, comm.Dup(), *medium)
    yield "large, by a thread", partial(_moved_by_a_thread, comm, *large)
    yield "large, by a thread, then other calls", partial(_joined_by_the_next_call, comm, *large, rows, columns)
    some = rs.Layout.from_spec(Mesh({"x": 2}, device_ids=[size - 1, 0]), (n, n), "int64", [[], ["x"]])
    yield "other ranks", partial(_crossed, comm, rows, some)
    yield "other ranks, back", partial(_crossed, comm, some, rows)


_HELD = [[["x"], ["y"], []], [["x"], [], ["y"]], [[], ["x"], ["y"]], [["y"], ["x"], []], [["x", "y"], [], []]]


def _sized(texts: list[str], n: int, size: int) -> Iterator[str]:
    for text in texts:
        dims = text.strip("[]").split(", ")
        cuts = [n // size // 2 if dim.startswith("2") else n // size if "x" in dim else n for dim in dims]
        yield text % tuple(cuts)


def _moved(comm: MPI.Intracomm, source: Layout, target: Layout, turns: int = 4) -> None:
    dtype = numpy_dtype(source.dtype)
    tile = given_tile(source, comm.rank, dtype)
    plan = rs.plan(source, target)
    with prepare(source, target, comm, limit=LIMIT) as handle:
        for turn in range(turns):
            out = np.zeros(target.tile_shape, dtype)
            given = np.asfortranarray(tile) if turn % 2 else tile.copy()
            memory = Account(source.dtype)
            handle(np.zeros_like(tile))  # Leaves nothing of the last turn.
            assert handle(given, out=out, memory=memory) is out
            assert np.array_equal(given, tile)
            check_tile(target, comm.rank, out, comm)
            assert max(comm.allgather(memory.received_bytes)) == plan.received_bytes
            begun = handle.start(given)
            if plan.steps and source.tile_bytes <= STAGED and handle.neighbours is None:
                given[...] = 0  # It has been staged.
            check_tile(target, comm.rank, begun.wait(), comm)
            assert begun.wait() is begun.wait()
            padding = tiles_of(target)[comm.rank] == PADDING
            assert not plan.steps or not begun.wait()[padding].any()
            out[padding] = -7
            assert handle(tile, out=out) is out and (out[padding] == -7).all()
    for _ in range(turns):
        check_tile(target, comm.rank, redistribute(tile, source, target, comm, limit=LIMIT), comm)


def _arrays_moved(comm: MPI.Intracomm, source: Layout, target: Layout) -> None:
    """Results are arrays of their own, of which none is written to by a later move, and can be moved back."""
    team, array = team_of(comm), DistArray.empty(source, comm, limit=LIMIT)
    for turn in range(4):
        array.tile[...] = given_tile(source, comm.rank, "int64") + turn
        memory, out = Account(source.dtype), DistArray.full(target, -5, comm, limit=LIMIT)
        made = [array.redistribute(target, limit=LIMIT) for _ in range(3)]
        assert array.redistribute(target, out=out, limit=LIMIT, memory=memory) is out
        assert np.array_equal(array.tile, given_tile(source, comm.rank, "int64") + turn)
        for each in (*made, out):
            check_tile(target, comm.rank, each.tile - turn, comm)
            assert each.layout == target and each.has_tile
        assert max(comm.allgather(memory.received_bytes)) == rs.plan(source, target).received_bytes
        back = [each.redistribute(source, limit=LIMIT) for each in made]
        assert all(np.array_equal(each.tile, array.tile) for each in back)
    if team.one_node and source.even and target.even:
        assert isinstance(team.repeated[ARRAYS, source, target], PreparedMove)


def _moved_into_new_memory(comm: MPI.Intracomm, source: Layout, target: Layout) -> None:
    """All results are kept, so that the node's memory grows between staging and reading; the last rank reads late."""
    tile, read = given_tile(source, comm.rank, "int64"), PreparedMove._filled

    def read_late(*arguments: Any) -> Any:
        time.sleep(0.02 * (comm.rank == comm.size - 1))
        return read(*arguments)

    with mock.patch.object(PreparedMove, "_filled", read_late):
        kept = [redistribute(tile + turn, source, target, comm, limit=LIMIT) for turn in range(8)]
    for turn, result in enumerate(kept):
        check_tile(target, comm.rank, result - turn, comm)


def _switched(switch: str, check: Callable[..., None], *arguments: Any) -> None:
    with mock.patch.dict(os.environ, {SWITCH: switch}):
        check(*arguments)


def _moved_by_a_thread(comm: MPI.Intracomm, source: Layout, target: Layout) -> None:
    with mock.patch.object(handles, "CORES", comm.size + 1):
        _moved(comm, source, target, turns=1)


def _joined_by_the_next_call(
    comm: MPI.Intracomm, source: Layout, target: Layout, rows: Layout, columns: Layout
) -> None:
    """The thread has the turn, and the call that comes next on the thread that began the move waits for it."""
    large, small = given_tile(source, comm.rank, "int64"), given_tile(rows, comm.rank, "int64")
    again = prepare(rows, columns, comm, limit=LIMIT)
    with mock.patch.object(handles, "CORES", comm.size + 1), prepare(source, target, comm, limit=LIMIT) as handle:
        for call in (again, lambda tile: redistribute(tile, rows, columns, comm, limit=LIMIT), again.start):
            if comm.rank == ODD:
                time.sleep(0.02)  # The threads of the other ranks wait for this one's.
            begun = handle.start(large)
            other = call(small)
            check_tile(columns, comm.rank, other if isinstance(other, np.ndarray) else other.wait(), comm)
            check_tile(target, comm.rank, begun.wait(), comm)


def sums(comm: MPI.Intracomm) -> Iterator[Case]:
    """Small sums have the bits of a sum in the order of ranks, in every call of theirs, and extrema keep a NaN."""
    size, line = comm.size, Mesh(x=comm.size)
    kinds = {"sum": "float32 int8 complex64", "mean": "float64 bfloat16", "max": "float32 bool", "min": "float64"}
    for kind, dtypes in {**kinds, "product": "float16"}.items():
        for dtype in dtypes.split():
            for text in (f"[3, {2 * size}]", "[3, {x}2]", f"[1{{x}}3/{size + 1}, 4]"):
                target = Layout.parse(f"{dtype}{text}", line)
                source = Layout.parse(f"{dtype}{[*target.shape]} + {kind}{{x}}", line)
                yield f"{source} -> {target}", partial(_summed, comm, source, target)


def _summed(comm: MPI.Intracomm, source: Layout, target: Layout) -> None:
    dtype, choose = numpy_dtype(source.dtype), np.random.default_rng(9)
    summands = [(choose.random(source.tile_shape) * 9 - 4).astype(dtype) for _ in range(comm.size)]
    if source.reduction in ("max", "min"):
        summands[-1].flat[0] = np.nan
    with np.errstate(all="ignore"):
        combine = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply}
        wanted = summands[0].copy()
        for each in summands[1:]:
            wanted = combine[str(source.reduction)](wanted, each)
        wanted = wanted / dtype.type(comm.size) if source.reduction == "mean" else wanted
    places = tiles_of(replace(target, dtype="int64"))[comm.rank]
    mine, inside, tile = (
        wanted.reshape(-1)[np.where(places == PADDING, 0, places)],
        places != PADDING,
        summands[comm.rank],
    )
    out, memory, team = np.zeros(target.tile_shape, dtype), Account(source.dtype), team_of(comm)
    array = DistArray(source, tile, comm)
    with prepare(source, target, comm, limit=LIMIT) as handle:
        made = [redistribute(tile, source, target, comm, limit=LIMIT) for _ in range(3)]
        made += [array.redistribute(target, limit=LIMIT).tile for _ in range(3)]
        made += [handle(tile), handle(tile, out=out, memory=memory), handle.start(tile).wait()]
    for turn, each in enumerate(made):
        assert np.array_equal(each[inside], mine[inside], equal_nan=dtype.kind == "f"), (turn, each, mine)
    assert memory.received_bytes == rs.plan(source, target).received_bytes
    if target.even and comm.size > 1 and team.one_node:
        assert isinstance(team.repeated[TILES, source, target], PreparedMove)


def _crossed(comm: MPI.Intracomm, source: Layout, target: Layout) -> None:
    handle = prepare(source, target, comm, limit=LIMIT)
    wanted = tiles_of(target).get(comm.rank)
    for _ in range(3):
        tile = tiles_of(source).get(comm.rank)
        result = handle(None if tile is None else tile.astype("int64"))
        assert (result is None) == (wanted is None)
        assert wanted is None or np.array_equal(result[wanted != PADDING], wanted[wanted != PADDING])


def mistakes(comm: MPI.Intracomm) -> Iterator[Case]:
    """One error on all ranks, nothing moved, and the handle works afterwards."""
    rows, columns = slabs(comm, "int64")
    tile, wanted = given_tile(rows, comm.rank, "int64"), given_tile(columns, comm.rank, "int64")
    odd, shape = comm.rank == ODD, columns.tile_shape
    handle = prepare(rows, columns, comm, limit=LIMIT)
    other = prepare(columns, rows, comm, limit=LIMIT)
    out = np.full(shape, -5)

    def again() -> None:
        assert (out == -5).all()
        assert np.array_equal(handle(tile), wanted)
        assert isinstance(team_of(comm).repeated[TILES, rows, columns], PreparedMove | int)

    def refused(error: type[ReshardError], call: Callable[[], Any]) -> None:
        check_refused(comm, error, call)
        again()

    for name, (one, to) in {
        "shape": (np.zeros((3, 3)), out),
        "dtype": (tile.astype("f4"), out),
        "no tile": (None, out),
        "a list for out": (tile, [1]),
        "out of another shape": (tile, np.zeros((1, 1), "int64")),
        "out that is read-only": (tile, np.broadcast_to(0, shape)),
    }.items():
        for begins in (False, True):
            given = (one, to) if odd else (tile, out)
            call = partial(_call, handle, begins, *given)
            yield f"{name}, begun {begins}", partial(refused, TileError, call)
    yield "out that overlaps", partial(refused, TileError, lambda: handle(tile, out=tile.reshape(shape)))
    yield "out on all but one", partial(refused, AgreementError, lambda: handle(tile, out=None if odd else out))
    yield "another handle", partial(refused, AgreementError, lambda: other(wanted) if odd else handle(tile, out=out))
    yield (
        "another call",
        partial(refused, AgreementError, lambda: DistArray.zeros(rows, comm) if odd else handle(tile, out=out)),
    )
    array, into = DistArray.empty(rows, comm), DistArray.full(columns, -5, comm)
    array.tile[...] = tile

    def moved_again() -> None:
        assert (into.tile == -5).all()
        for _ in range(3):
            assert np.array_equal(array.redistribute(columns, limit=LIMIT).tile, wanted)

    def arrays_refused(error: type[ReshardError], **wrong: Any) -> None:
        moved_again()
        options = {"out": into, "limit": LIMIT, **(wrong if odd else {})}
        check_refused(comm, error, lambda: array.redistribute(columns, **options))
        moved_again()

    yield "an array as out", partial(arrays_refused, TileError, out=np.zeros(shape))
    yield "out of another layout", partial(arrays_refused, TileError, out=array)
    yield "no out on one rank", partial(arrays_refused, AgreementError, out=None)
    yield "a limit", partial(arrays_refused, PlanError, limit="soon")
    yield "an account", partial(arrays_refused, PlanError, memory=1)
    yield "no network", partial(arrays_refused, AgreementError, network="none")
    # What one rank alone would keep for the next call, of a move that is kept already and of one that is not.
    fresh = [replace(end, dtype="int16") for end in (rows, columns)]
    options: list[dict[str, Any]] = [{"donate": np.False_}, {"network": "none"}]
    options += [{"relabel": True}] if find_spec("scipy") else []
    for option in options:
        for ends in ((rows, columns), fresh):
            one = given_tile(ends[0], comm.rank, ends[0].dtype)
            kept = partial(redistribute, one, *ends, comm, limit=LIMIT, **(option if odd else {}))
            yield f"{ends[0].dtype}, {option}", partial(refused, AgreementError, kept)
    for_handle = partial(prepare, rows, columns, comm, network="none" if odd else None)
    yield "no network, by its name", partial(refused, AgreementError, for_handle)
    yield "no agreement", partial(refused, AgreementError, lambda: prepare(rows, columns if odd else rows, comm))
    yield "no layout", partial(refused, ReshardError, lambda: prepare(rows, "columns" if odd else columns, comm))


def creations(comm: MPI.Intracomm) -> Iterator[Case]:
    """Arrays that are made again and again: their values, their memory, and one error on all ranks."""
    rows, columns = slabs(comm, "int64")
    odd, team = comm.rank == ODD, team_of(comm)

    def made() -> None:
        for value in range(4):
            arrays = [
                DistArray.full(rows, value, comm),
                DistArray.full(rows, -value, comm),
                DistArray.empty(rows, comm),
            ]
            comm.Barrier()
            for array, wanted in zip(arrays, (value, -value), strict=False):
                assert array.tile.shape == rows.tile_shape and (array.tile == wanted).all()
                assert team.arena.place_of(array.tile)
            arrays[2].tile[...] = -5  # Is memory of its own.
            assert (arrays[1].tile == -value).all()
        assert isinstance(team.repeated["full", rows], AgreedCall)

    def used_again() -> None:
        places = {team.arena.place_of(DistArray.zeros(columns, comm).tile) for _ in range(20)}
        assert len(places) <= 3

    def refused(error: type[ReshardError], call: Callable[[], Any]) -> None:
        made()
        check_refused(comm, error, call)
        made()

    def by_a_thread() -> None:
        results: list[DistArray] = []
        thread = threading.Thread(target=lambda: results.append(DistArray.full(rows, 7, comm)))
        thread.start()
        thread.join()
        assert (results[0].tile == 7).all()

    full, other = partial(DistArray.full, comm=comm), columns if odd else rows
    yield "made", made
    yield "used again", used_again
    yield "dtype", partial(refused, TileError, lambda: full(rows, 1, dtype="f4" if odd else None))
    yield "value", partial(refused, TileError, lambda: full(rows, "one" if odd else 1))
    yield "limit", partial(refused, PlanError, lambda: full(rows, 1, limit="soon" if odd else 1.0))
    yield "layout", partial(refused, AgreementError, lambda: full(other, 1))
    yield "no layout", partial(refused, ReshardError, lambda: full("rows" if odd else rows, 1))
    yield "kind", partial(refused, AgreementError, lambda: DistArray.empty(rows, comm) if odd else full(rows, 1))
    yield "threads", by_a_thread
    yield "after threads", made


def endings(comm: MPI.Intracomm) -> Iterator[Case]:
    """Moves that begin before others end, other threads, failures, and the end of handles."""
    rows, columns = slabs(comm, "int64")
    tile, wanted = given_tile(rows, comm.rank, "int64"), given_tile(columns, comm.rank, "int64")
    odd, out = comm.rank == ODD, np.full(columns.tile_shape, -5)
    handle, other = prepare(rows, columns, comm, limit=LIMIT), prepare(columns, rows, comm, limit=LIMIT)

    def again() -> None:
        assert (out == -5).all()
        assert np.array_equal(handle(tile), wanted)

    def two_begun() -> None:
        first, second = handle.start(tile), other.start(wanted)
        assert np.array_equal(second.wait(), tile) and np.array_equal(first.wait(), wanted)
        third = handle.start(tile)
        assert np.array_equal(DistArray.zeros(rows, comm).tile, np.zeros(rows.tile_shape))
        assert np.array_equal(third.wait(), wanted)

    def by_threads() -> None:
        for _ in range(3):
            results: list[np.ndarray] = []
            thread = threading.Thread(target=lambda into=results: into.append(handle(tile)))
            thread.start()
            thread.join()
            assert np.array_equal(results[0], wanted)
            assert np.array_equal(handle(tile), wanted)

    def failed() -> None:
        comm.Barrier()
        if odd:
            team_of(comm).fail("gone")
        comm.Barrier()
        for _ in range(3):
            again()
        assert isinstance(team_of(comm).repeated[TILES, rows, columns], PreparedMove)

    def skipped() -> None:
        short = prepare(rows, columns, comm, limit=LIMIT)
        if not odd:
            with mock.patch.object(short, "_limit", 0.5):
                assert isinstance(caught_by(lambda: short(tile, out=out)), RankError), "one rank made no call"
        comm.Barrier()
        again()

    def freed() -> None:
        apart = comm.Dup()
        mine, gone = prepare(rows, columns, apart), prepare(rows, columns, apart)
        gone.free()
        assert isinstance(caught_by(lambda: gone(tile)), PlanError)
        apart.Free()
        assert isinstance(caught_by(lambda: mine(tile)), RankError)

    yield "two begun", two_begun
    yield "threads", by_threads
    yield "after a failure", failed
    yield "one skipped it", skipped
    yield "freed", freed


def begun(comm: MPI.Intracomm) -> Iterator[Case]:
    """Moves that some ranks make in threads; random schedules are in `tests.mpi.schedules`."""
    rows, columns = slabs(comm, "int64")
    tile, odd = given_tile(rows, comm.rank, "int64"), comm.rank == ODD

    @contextmanager
    def ways(with_cores: bool, small: bool) -> Iterator[None]:
        """A thread makes the move where there are cores, as a small one or anew."""
        one = mock.patch.multiple(handles, CORES=comm.size + 1 if with_cores else 1, HIDDEN=0)
        with one, nullcontext() if small else mock.patch.object(repeated, "STAGED", 8):
            yield

    def freed_while_begun(with_cores: bool, small: bool, mixed: bool) -> None:
        """The move goes on, whether a thread makes it or `wait`, and however the threads are called."""
        with ways(with_cores, small), mock.patch.object(turns_of(comm), "mixed", mixed):
            for _ in range(2):
                with prepare(rows, columns, comm, limit=5) as gone:
                    begun = gone.start(tile)
                check_tile(columns, comm.rank, begun.wait(), comm)

    def one_after_another(with_cores: bool, small: bool) -> None:
        """A move that begins finishes the one that has begun before, whoever makes it, and is not made beside it."""
        wanted = given_tile(columns, comm.rank, "int64")
        with ways(with_cores, small):
            ends = (rows, columns), (columns, rows)
            there, back = (prepare(*each, comm, limit=5) for each in ends)
            if odd:
                time.sleep(0.02)
            first, second, third = there.start(tile), back.start(wanted), there.start(-tile)
            assert np.array_equal(second.wait(), tile)
            assert np.array_equal(third.wait(), -wanted) and np.array_equal(first.wait(), wanted)

    def without_a_thread(small: bool) -> None:
        """A rank that can start none makes the move when it waits, and a thread that is there comes before the others'
        reports are looked for: they must not be received twice.
        """
        full = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
        with ways(True, small):
            slow = prepare(rows, columns, comm, limit=LIMIT)
            with full if odd else nullcontext():
                begun = slow.start(tile)
            if odd:
                time.sleep(0.02)
            else:
                assert team_of(comm).alive and not begun._thread.is_alive()
            check_tile(columns, comm.rank, begun.wait(), comm)

    def wrong_on_one_rank() -> None:
        """A small move that a thread makes defers where a tile is wrong: all raise when they wait, and go on."""
        with ways(True, True), prepare(rows, columns, comm, limit=LIMIT) as handle:
            begun = handle.start(tile[:, :1] if odd else tile)
            assert isinstance(caught_by(begun.wait), TileError) and isinstance(caught_by(begun.wait), TileError)
            check_tile(columns, comm.rank, handle.start(tile).wait(), comm)
        assert sys.getswitchinterval() == usual

    usual = sys.getswitchinterval()
    for small in (False, True):
        for mixed in (False, True):
            yield f"freed while begun, {small}, {mixed}", partial(freed_while_begun, True, small, mixed)
            yield f"freed while begun on some ranks, {small}, {mixed}", partial(freed_while_begun, odd, small, mixed)
        for name, cores in (("threads", True), ("waits", False), ("some threads", odd)):
            yield f"one after another, by {name}, {small}", partial(one_after_another, cores, small)
        yield f"without a thread, {small}", partial(without_a_thread, small)
    yield "wrong on one rank", wrong_on_one_rank


def _call(handle: Any, begins: bool, tile: Any, out: Any) -> Any:
    return handle.start(tile, out=out).wait() if begins else handle(tile, out=out)
