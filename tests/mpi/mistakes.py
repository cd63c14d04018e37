"""The topics of callers' mistakes that no tile shows: wrong types on one rank, skipped calls, threads, long plans."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.errors import AgreementError, PlanError, RankError, ReshardError, TileError
from reshard.mpi import DistArray, calibrate, distarray, redistribute
from reshard.runtime.on_mpi import prepare, run_plan, transports, window_tiles
from reshard.runtime.on_mpi.node import arena
from reshard.runtime.on_mpi.team import Watch, meet_ranks, team_of, turns_of
from reshard.types import Layout, Mesh
from reshard.types.whole import check_deadline
from tests.mpi.moving import LIMIT, check_refused, given_tile, slabs
from tests.mpi.worker import Case

ODD = 1


def _caught(call: Callable[[], Any]) -> tuple[Exception | None, float]:
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def _moves(comm: MPI.Intracomm, limit: float = LIMIT) -> None:
    """Asserts that a move works on all ranks."""
    rows, columns = slabs(comm)
    result = redistribute(given_tile(rows, comm.rank, "int32"), rows, columns, comm, limit=limit)
    assert np.array_equal(result, given_tile(columns, comm.rank, "int32"))


# ---- arguments ---------------------------------------------------------------------------------------------

JUNK: list[Any] = [None, 3.5, b"x", object(), [1], float("nan"), np.arange(3), "f32[4]", -1]


class Hostile:
    """An object with which nothing works."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no array")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __hash__ = None  # type: ignore


def arguments(comm: MPI.Intracomm) -> Iterator[Case]:
    """One rank gives an argument of a wrong type: the same error on all ranks at once, and the next call works.

    Every argument gets a third of the junk, another one on each number of nodes.
    """
    for turn, nodes in enumerate((1, 2)):
        team_of(comm, nodes=nodes)
        for at, (name, (names, call)) in enumerate(_calls(comm).items()):
            for argument in names:
                for junk in [*JUNK, Hostile()][(at + turn) % 3 :: 3]:
                    if not _fits(argument, junk):
                        case = partial(_one_error, comm, name, call, names, argument, junk)
                        yield f"{name}: {argument} is a {type(junk).__name__}, {nodes} nodes", case


def _arguments(comm: MPI.Intracomm) -> dict[str, Any]:
    rows, columns = slabs(comm)
    tile = given_tile(rows, comm.rank, "int32")
    return {
        "tile": tile,
        "source": rows,
        "target": columns,
        "out": None,
        "budget": None,
        "network": None,
        "donate": False,
        "relabel": False,
        "limit": LIMIT,
        "memory": None,
        "cuda_aware": None,
        "dtype": None,
        "value": 7,
        "function": lambda i, j: i + j,
        "array": np.zeros(rows.shape, "int32"),
        "root": 0,
        "path": "/nonexistent/array",
        "name": "here",
    }


def _fits(argument: str, junk: Any) -> bool:
    """Whether junk is a right value of an argument: then the ranks may go on, or disagree."""
    optional = argument in ("out", "budget", "network", "memory", "cuda_aware", "dtype", "root", "array")
    if (junk is None and optional) or (argument == "limit" and isinstance(junk, float) and junk == 3.5):
        return True
    numbers = {"value": (3.5, -1), "target": (-1,)}
    if isinstance(junk, int | float) and junk in numbers.get(argument, ()):
        return True
    # numpy takes these as they are: an array of another kind, a dtype, a value that fits.
    return (argument, type(junk)) in {
        ("dtype", type(None)),
        ("value", type(None)),
        ("value", float),
        ("value", list),
        ("path", str),
        ("name", str),
    }


MOVE = ("out", "budget", "network", "donate", "relabel", "limit", "memory")


def _calls(comm: MPI.Intracomm) -> dict[str, tuple[Sequence[str], Callable[..., Any]]]:
    """The arguments of each call, and the call with all of them."""
    rows, _ = slabs(comm)
    a = DistArray.zeros(rows, comm, limit=LIMIT)
    return {
        "move": (
            ("tile", "source", "target", *MOVE, "cuda_aware"),
            lambda tile, source, target, **options: redistribute(tile, source, target, comm, **options),
        ),
        "method": (("target", *MOVE), a.redistribute),
        "zeros": (
            ("source", "dtype", "limit"),
            lambda source, dtype, limit: DistArray.zeros(source, comm, dtype=dtype, limit=limit),
        ),
        "full": (
            ("source", "value", "dtype"),
            lambda source, value, dtype: DistArray.full(source, value, comm, dtype=dtype, limit=LIMIT),
        ),
        "from_function": (
            ("function", "source"),
            lambda function, source: DistArray.from_function(function, source, comm, limit=LIMIT),
        ),
        "from_global": (
            ("array", "source", "root"),
            lambda array, source, root: DistArray.from_global(array, source, comm, root, limit=LIMIT),
        ),
        "from_everywhere": (("array",), lambda array: DistArray.from_global(array, rows, comm, None, limit=LIMIT)),
        "to_global": (("root", "limit"), a.to_global),
        "save": (("path", "limit"), a.save),
        "load": (
            ("path", "source", "limit"),
            lambda path, source, limit: DistArray.load(path, source, comm, limit=limit),
        ),
        "measured": (("name", "limit"), lambda name, limit: calibrate(comm, name, limit)),
    }


def _one_error(
    comm: MPI.Intracomm, name: str, call: Callable[..., Any], names: Sequence[str], argument: str, junk: Any
) -> None:
    options = {each: value for each, value in _arguments(comm).items() if each in names}
    if name == "save":  # It works where the path is right, so no rank may be right.
        options["path"] = "/proc/nothing/array"
    if name == "from_global" and argument == "array":
        options["root"] = ODD
    if comm.rank == ODD:
        options[argument] = junk
    assert not isinstance(check_refused(comm, ReshardError, lambda: call(**options)), RankError)
    _moves(comm)


# ---- skipped calls -----------------------------------------------------------------------------------------


def skipped(comm: MPI.Intracomm) -> Iterator[Case]:
    """A rank misses a call, or makes another one: one error on each rank that made it, and the next call works."""
    for nodes in (1, 2, comm.size):
        for odd in (0, comm.size - 1):
            for first in (False, True):
                yield f"rank {odd}, {nodes} nodes, first={first}", partial(_skips, comm, nodes, odd, first)
        yield f"another move, {nodes} nodes", partial(_other_move, comm, nodes)


def meetings(comm: MPI.Intracomm) -> Iterator[Case]:
    """Ranks that come late, leave in time and come again; who leaves first differs from turn to turn."""

    def met() -> None:
        own = comm.Dup()
        for odd in (*range(comm.size), *range(comm.size)):
            if comm.rank != odd:
                caught, seconds = _caught(lambda: meet_ranks(own, 0.2))
                assert type(caught) is RankError, caught
                assert seconds < LIMIT / 2, seconds
            comm.Barrier()
            meet_ranks(own, LIMIT)
            meet_ranks(own, LIMIT)
        own.Free()

    yield "late ranks", met

    def many() -> None:
        for _ in range(20):
            own = comm.Dup()
            _moves(own)
            own.Free()

    yield "many communicators", many


def _skips(comm: MPI.Intracomm, nodes: int, odd: int, first: bool) -> None:
    own = comm.Dup()
    if not first:
        team_of(own, nodes=nodes)
        _moves(own)
    for _ in range(2):
        if own.rank != odd:
            caught, seconds = _caught(lambda: _moves(own, limit=0.1))
            assert type(caught) is RankError, caught
            assert seconds < LIMIT / 2, seconds
        comm.Barrier()
        _moves(own)
        _moves(own)
    own.Free()


def _other_move(comm: MPI.Intracomm, nodes: int) -> None:
    team_of(comm, nodes=nodes)
    rows, columns = slabs(comm)
    end = rows if comm.rank == ODD else columns
    tile = given_tile(rows, comm.rank, "int32")
    check_refused(comm, AgreementError, lambda: redistribute(tile, rows, end, comm, limit=LIMIT))
    _moves(comm)


# ---- groups ------------------------------------------------------------------------------------------------


def groups(comm: MPI.Intracomm) -> Iterator[Case]:
    """A rank that fails before its first reduction: the others do not wait inside MPI for the group to be made."""
    mesh = Mesh(x=2, y=comm.size // 2)
    source, target = (Layout.parse(f"s32[8, 8]{end}", mesh) for end in (" + sum{y}", ""))

    def fails(nodes: int) -> None:
        own = comm.Dup()
        team_of(own, nodes=nodes)
        tile = given_tile(source, comm.rank, "int32")
        with mock.patch.object(run_plan, "run_step", _wrong if comm.rank == ODD else run_plan.run_step):
            kind = MemoryError if comm.rank == ODD else RankError
            check_refused(comm, kind, lambda: redistribute(tile, source, target, own, limit=LIMIT), alike=False)
        _moves(own)

    for nodes in (1, 2):
        yield f"{nodes} nodes", partial(fails, nodes)


def _wrong(*_: Any) -> Any:
    raise MemoryError("no memory left")


# ---- memory ------------------------------------------------------------------------------------------------


def no_memory(comm: MPI.Intracomm) -> Iterator[Case]:
    """A rank that cannot allocate its result, before or after the node's ranks have agreed on its place: that rank
    raises what the allocation did, the others name it, and the next call works."""
    rows, columns = slabs(comm)

    def fails(nodes: int, call: Callable[[MPI.Intracomm], Any], late: bool, known: bool = False) -> None:
        own = comm.Dup()
        team = team_of(own, nodes=nodes)
        with mock.patch.object(arena, "share_segment", lambda *_: None) if known else nullcontext():
            made = [makes(own) for _ in range(2 * known)]  # In private memory, but on a rank that is alone on its node.
            assert all(bool(team.arena.place_of(each.tile)) == (len(team.members) == 1) for each in made)
            with _without_memory(late) if comm.rank == ODD else nullcontext():
                kind = MemoryError if comm.rank == ODD else RankError
                caught = check_refused(comm, kind, lambda: call(own), alike=False)
        assert comm.rank == ODD or (f"[{ODD}]" in str(caught) or f"rank {ODD}" in str(caught)), caught
        _moves(own)

    def moves(own: MPI.Intracomm) -> Any:
        return redistribute(given_tile(rows, comm.rank, "int32"), rows, columns, own, limit=LIMIT)

    def makes(own: MPI.Intracomm) -> Any:
        return DistArray.full(rows, 3, own, limit=LIMIT)

    for nodes, late in itertools.product((1, 2), (False, True)):
        when = "after the place is agreed" if late else "before"
        yield f"a result, {when}, {nodes} nodes", partial(fails, nodes, moves, late)
        yield f"a new array, {when}, {nodes} nodes", partial(fails, nodes, makes, late)
    for nodes in (1, 2):
        yield f"an array like others, {nodes} nodes", partial(fails, nodes, makes, True, known=True)


@contextmanager
def _without_memory(late: bool) -> Iterator[None]:
    """`new_tile` finds no memory: at once, or after what it does together with the other ranks of the node."""

    def new_tile(*arguments: Any) -> Any:
        if late:
            allocate(*arguments)
        _wrong()

    allocate = window_tiles.new_tile
    with mock.patch.object(transports, "new_tile", new_tile), mock.patch.object(distarray, "new_tile", new_tile):
        yield


# ---- threads -----------------------------------------------------------------------------------------------


def threads(comm: MPI.Intracomm) -> Iterator[Case]:
    """Two threads on one communicator, in any order: each call is right or ends with one error; the next works."""
    for nodes in (1, 2):
        for number in range(6):
            yield f"{number}, {nodes} nodes", partial(_two_threads, comm, nodes, number)
        yield f"a communicator each, {nodes} nodes", partial(_two_communicators, comm, nodes)


def _two_threads(comm: MPI.Intracomm, nodes: int, number: int) -> None:
    own = comm.Dup()
    team_of(own, nodes=nodes)
    rows, columns = slabs(comm)
    outcomes: list[tuple[int, Any, float]] = []

    def call(thread: int) -> None:
        results: list[Any] = []
        tile = given_tile(rows, comm.rank, "int32") + 1000 * thread
        caught, seconds = _caught(lambda: results.append(redistribute(tile, rows, columns, own, limit=4.0)))
        outcomes.append((thread, results[0] if caught is None else caught, seconds))

    def work(thread: int) -> None:
        call(thread)
        time.sleep(0.003 * ((comm.rank + thread + number) % 3))
        for _ in range(3):
            call(thread)

    turns = turns_of(own)
    turn = turns.take(time.monotonic() + LIMIT)  # Until both have come, so that they overlap for certain.
    made = _started(work)
    while turns.came < 2:
        time.sleep(0.001)
    turn.release()
    _joined(made)
    comm.Barrier()
    _moves(own)
    wanted = given_tile(columns, comm.rank, "int32")
    assert len(outcomes) == 8, outcomes
    assert sum(isinstance(outcome, AgreementError) for _, outcome, _ in outcomes) >= 2, outcomes
    for thread, outcome, seconds in outcomes:
        assert seconds < LIMIT / 2, outcomes
        right = isinstance(outcome, np.ndarray) and np.array_equal(outcome, wanted + 1000 * thread)
        assert right or isinstance(outcome, ReshardError), (thread, outcome)


def _started(work: Callable[[int], None]) -> list[threading.Thread]:
    made = [threading.Thread(target=work, args=(thread,), name=f"worker {thread}") for thread in (0, 1)]
    for each in made:
        each.start()
    return made


def _joined(made: list[threading.Thread]) -> None:
    for each in made:
        each.join(60)
        assert not each.is_alive()


def _two_communicators(comm: MPI.Intracomm, nodes: int) -> None:
    own = [comm.Dup(), comm.Dup()]
    for each in own:
        team_of(each, nodes=nodes)
        for _ in range(5):
            _moves(each)
    errors: list[Exception | None] = []

    def work(thread: int) -> None:
        for _ in range(20):
            errors.append(_caught(lambda: _moves(own[thread]))[0])

    _joined(_started(work))
    assert errors == [None] * 40, errors


# ---- planning ----------------------------------------------------------------------------------------------


def planning(comm: MPI.Intracomm) -> Iterator[Case]:
    """Planning that takes too long, on all ranks or on one: one error on all ranks within the limit."""

    def slow(ranks: range, nodes: int) -> None:
        team_of(comm, nodes=nodes)
        plan = prepare.find_plan

        def slowly(*arguments: Any, **options: Any) -> rs.Plan:
            end = time.monotonic() + LIMIT
            while time.monotonic() < end and comm.rank in ranks:
                check_deadline()
                time.sleep(0.001)
            return plan(*arguments, **options)

        prepare._plan_tile.cache_clear()
        margin = property(lambda watch: watch._limit - 0.3)  # Time for the others to hear of it on a busy machine.
        with mock.patch.object(prepare, "find_plan", slowly), mock.patch.object(Watch, "margin", margin):
            check_refused(comm, PlanError, lambda: _moves(comm, limit=LIMIT / 2))
        _moves(comm)

    for nodes in (1, 2):
        yield f"all, {nodes} nodes", partial(slow, range(comm.size), nodes)
        yield f"one, {nodes} nodes", partial(slow, range(1, 2), nodes)


# ---- dtypes ------------------------------------------------------------------------------------------------


def sums(comm: MPI.Intracomm) -> Iterator[Case]:
    """Elements that have no sum are refused on all ranks; those that have one are combined, however many dtypes."""
    mesh, size = Mesh(x=comm.size), 2 * comm.size

    def refused(kind: Any, word: str, reduction: str, ranks: range) -> None:
        source = Layout.parse(f"{word}[{size}] + {reduction}{{x}}", mesh)
        target = Layout.from_spec(mesh, (size,), source.dtype, ["x"])
        dtype = np.dtype(kind) if comm.rank in ranks else np.dtype(source.dtype)
        tile = np.zeros(size, dtype)
        check_refused(comm, TileError, lambda: redistribute(tile, source, target, comm, limit=LIMIT), "cannot be")
        check_refused(comm, TileError, lambda: DistArray.zeros(source, comm, dtype=dtype, limit=LIMIT))
        _moves(comm)

    structure = [("a", "i4"), ("b", "f4")]
    for kind, word, reduction in (
        (structure, "u64", "sum"),
        (structure, "u64", "max"),
        ("M8[s]", "u64", "sum"),
        ("m8[s]", "u64", "product"),
        ("V4", "u32", "min"),
        ("S1", "u8", "sum"),
        ("U2", "u64", "sum"),
        ("M8[s]", "u64", "product"),
    ):
        for ranks in (range(comm.size), range(1, 2)):
            yield f"{reduction} of {kind} on {ranks}", partial(refused, kind, word, reduction, ranks)

    def combined() -> None:
        for unit in [f"{number}{word}" for number in range(1, 9) for word in ("s", "ms", "us", "D")]:
            for reduction, factor in (("sum", sum(range(1, comm.size + 1))), ("max", comm.size)):
                source = Layout.parse(f"u64[{size}] + {reduction}{{x}}", mesh)
                tile = (np.arange(size) * (comm.rank + 1)).astype(f"m8[{unit}]")
                whole = Layout.from_spec(mesh, (size,), "uint64", [])
                result = redistribute(tile, source, whole, comm, limit=LIMIT)
                assert np.array_equal(result, (np.arange(size) * factor).astype(f"m8[{unit}]"))

    def overflowing() -> None:
        source = Layout.parse(f"f16[{size}] + sum{{x}}", mesh)
        with np.errstate(all="raise"):  # An exception inside MPI would end the process.
            tile = np.full(size, 60000, "float16")
            result = redistribute(tile, source, Layout.from_spec(mesh, (size,), "float16", []), comm, limit=LIMIT)
        assert np.isinf(result).all()

    yield "many dtypes", combined
    yield "overflow", overflowing
