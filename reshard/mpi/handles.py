"""`prepare`: a move between two layouts that is agreed on once and then made again and again."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, Self, cast

import numpy as np
from mpi4py import MPI

from reshard.errors import PlanError, RankError, name_arguments
from reshard.lower.to_mpi import seat_of
from reshard.mpi.redistribution import MoveArguments
from reshard.mpi.tile_checks import (
    check_layout,
    check_nothing,
    check_options,
    check_out,
    check_source,
    dtype_without_tile,
    read_ends,
)
from reshard.runtime.account import Account, begin_account, measures
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_mpi.collective import Statement, collective, join_errors
from reshard.runtime.on_mpi.copies.strided_copy import find_word_dtype, view_as_words
from reshard.runtime.on_mpi.fetch import Fetch, parts_of_move
from reshard.runtime.on_mpi.global_array import clear_padding
from reshard.runtime.on_mpi.gpu import is_on_gpu
from reshard.runtime.on_mpi.prepare import Request, TilePlan, check_seats, prepare_tile, read_options
from reshard.runtime.on_mpi.repeated import DEFERRED, TILES, PreparedMove, find_prepared, is_small, keep_prepared
from reshard.runtime.on_mpi.team import (
    CORES,
    TIME_LIMIT,
    Comm,
    Started,
    Team,
    Watch,
    check_alive,
    report_failure,
    team_at_hand,
)
from reshard.synth import Network
from reshard.types import Layout

Begin = Callable[[Fetch, Watch], Callable[[Watch], Any]]
"""Begins a call of an exchange between neighbours; returns what finishes it, and gives its result or error."""

SMALL_AMONG = 8
"""The part of the ranks of a node, one of so many, that each may talk to in a small move for it to wait for these alone
rather than for all: that takes five times as long, but does not wait for ranks that are late.
"""

HIDDEN = 1 << 20
"""Bytes of a tile from which a thread makes a small move that has begun: to start one takes a third of such a move."""


@name_arguments
def prepare(
    source: Layout,
    target: Layout,
    comm: Comm,
    *,
    budget: int | str | None = None,
    network: Network | str | None = None,
    limit: float = TIME_LIMIT,
) -> MoveHandle:
    """A handle that moves tiles from `source` to `target`; every rank of `comm` calls this, with the same arguments.

    Everything that does not depend on the tiles is done here: planning, the agreement of the ranks, and the memory
    that they share. `budget`, `network` and `limit` (seconds) are as in `redistribute`; `limit` holds for this call and
    for each call of the handle.

    If the ranks ask for different things, or if an argument of one rank is wrong, all ranks raise the same error:
    `AgreementError`, `LayoutError`, `PlanError` or `BudgetError`.

    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from reshard import Mesh
    >>> comm = MPI.COMM_WORLD
    >>> mesh = Mesh(x=comm.size)
    >>> rows = Layout.from_spec([["x"], []], mesh, (16, 16), "float64")
    >>> columns = Layout.from_spec([[], ["x"]], mesh, (16, 16), "float64")
    >>> with prepare(rows, columns, comm) as to_columns:
    ...     tiles = [to_columns(np.full(rows.tile_shape, step)) for step in (1.0, 2.0)]
    >>> [tile[0, 0] for tile in tiles]
    [np.float64(1.0), np.float64(2.0)]
    """

    source, target = read_ends(source, target)
    plain = budget is None and network is None

    def plan(team: Team) -> tuple[Request, TilePlan]:
        check_layout(source, "source")
        check_layout(target, "target")
        check_seats(source, target, team.size)
        request = Request.of_tile(source, target, read_options(budget, network, team=team))
        return request, prepare_tile(team, request, np.empty(0, numpy_dtype(source.dtype)))

    # What is kept is kept by all ranks or none, so they agree on that as well: `network="none"` is not plain.
    options = "" if plain else ", with options"

    def make(again: bool = False) -> PreparedMove | Fetch | None:
        with collective(comm, limit, plan, lambda planned: f"prepare {planned[0]}{options}") as (team, watch, planned):
            request, ready = planned
            parts = None
            if plain and ready.moves is not None and ready.joined is None:
                parts = parts_of_move(source, target, team.rank, team.facts.nodes, ready.itemsize)
            # A rank outside both meshes talks to nobody.
            many = parts is None or len(parts.neighbours) > team.size // (
                SMALL_AMONG if is_small(team, *planned) else 2
            )
            if parts is not None and (again or not team.some(watch, many, False)[0]):
                places = dict.fromkeys(team.members if team.facts.reads else (), 0)
                dtype = find_word_dtype(ready.itemsize)
                return Fetch(team, watch, parts, places, dtype, source.tile_shape)
            return keep_prepared(team, watch, request, ready, now=True) if plain else None

    prepared = make()
    call = MoveArguments(None, source, target, comm, float(limit), None, budget, network, handle=True)
    if isinstance(prepared, Fetch):
        calls = FetchCalls(comm, float(limit), lambda: cast(Fetch, make(True)), prepared)
        return MoveHandle(call, None, calls)
    return MoveHandle(call, prepared)


class MoveHandle:
    """A prepared move: `handle(tile)` returns this rank's tile of the target, as `redistribute` does.

    Calls are collective. Moves of small tiles inside a node cost one synchronization of the ranks. Where each rank
    talks to few others, `neighbours`, a call waits for these alone. All others are those of `redistribute`. `free`, or
    the end of a `with`, releases what the handle keeps; so does freeing its communicator.
    """

    def __init__(self, call: MoveArguments, prepared: PreparedMove | None, calls: FetchCalls | None = None) -> None:
        self._call, self._prepared, self._limit, self._calls = call, prepared, call.limit, calls
        self._freed = False

    @property
    def source(self) -> Layout:
        """The layout of the tiles that are given."""
        return self._call.source

    @property
    def target(self) -> Layout:
        """The layout of the results."""
        return self._call.target

    @property
    def neighbours(self) -> tuple[int, ...] | None:
        """The ranks that a call waits for, in ascending order; None if it is a call of all ranks."""
        return None if self._calls is None else self._calls.fetch.neighbours

    def __call__(self, tile: Any, *, out: Any = None, memory: Account | None = None) -> Any:
        """This rank's tile of the target: `out`, which must not overlap the tile, or a new array.

        None for a rank without a tile, on either side. Errors are those of `redistribute`, the same on all ranks, and
        leave `out` as it was. In a call among neighbours, what is wrong with the arguments of a rank is the same error
        on it and on those that take from it, and leaves their `out` as it was; the others have their results. `memory`
        is filled with the bytes received and held live.
        """
        prepared, limit = self._prepared, self._limit
        if self._calls is not None and not is_on_gpu(tile):
            return self._calls.run(lambda fetch, watch: self._begin(fetch, watch, tile, out, memory))
        if prepared is None or not prepared.team.alive:
            return self._make_anew(tile, out, memory, self._freed)
        # As `MoveArguments.run_again`, but for the arguments, whose making takes a quarter of a call of 64 bytes.
        release, same = prepared.hold(limit)
        try:
            result = prepared.run(tile, out, limit, memory, same and (memory is None or type(memory) is Account))
            return self._make_anew(tile, out, memory) if result is DEFERRED else result
        finally:
            release()

    def start(self, tile: Any, *, out: Any = None) -> StartedMove:
        """Begins a move, and returns what to wait for; until then, `tile` and `out` must not be changed or read.

        Moves are made by a thread meanwhile, if this process may use more cores than the node has ranks, and MPI allows
        threads; else by `wait`. Small moves are staged and posted here, so that the ranks need not wait for each other
        later, and copied to `out` by `wait`; a thread makes those of at least `HIDDEN` bytes. One move of a
        communicator is under way at a time: any other call there finishes it first. Of those among neighbours, one of
        each handle: what others take has been sent when this returns, and `wait` takes what comes.
        """
        if self._calls is not None and not is_on_gpu(tile):
            return self._calls.start(lambda fetch, watch: self._begin(fetch, watch, tile, out, None))
        prepared, limit = self._prepared, self._limit
        # What has begun goes on if the handle is freed meanwhile: some ranks may have made it by then.
        freed = self._freed
        if prepared is not None and prepared.team.alive:
            release, same = prepared.hold(limit)

            def make() -> Any:
                # Without a turn: whoever comes meanwhile waits for this thread first.
                prepared.start(tile, out, same)
                return prepared.finish(out, limit)

            try:
                move = StartedMove(lambda: self._make_anew(tile, out, None, freed), make)
                hides = self.source.tile_bytes >= HIDDEN and len(prepared.team.members) < CORES
                if hides and (number := move.begin()):
                    prepared.team.started = Started(move.finish, number)
                    return move
                prepared.start(tile, out, same)
            finally:
                release()

            def end() -> Any:
                turn = prepared.team.turns.take(time.monotonic() + limit)
                try:
                    result = prepared.finish(out, limit)
                    return self._make_anew(tile, out, None, freed) if result is DEFERRED else result
                finally:
                    turn.release()

            move = StartedMove(end)
            prepared.team.started = Started(move.finish)
            return move
        # A move that cannot be staged needs the other ranks at once: a thread of its own makes it, where the process
        # has a core for that, so that it is not slower than one that begins with `wait`.
        team = None if self._freed else team_at_hand(self._call.comm)
        move = StartedMove(lambda: self._make_anew(tile, out, None, freed))
        if team is not None and team.alive:
            team.finish_started()
            free = len(team.members) < CORES and MPI.Query_thread() == MPI.THREAD_MULTIPLE
            team.started = Started(move.finish, move.begin() if free else 0)
        return move

    def free(self) -> None:
        """Releases what the handle keeps, on this rank only; may be called any number of times. The handle cannot be
        called again.
        """
        self._freed, self._prepared = True, None
        if self._calls is not None:
            self._calls.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def _begin(self, fetch: Fetch, watch: Watch, tile: Any, out: Any, memory: Account | None) -> Callable[[Watch], Any]:
        """Begins a call among neighbours; returns what finishes it, and gives the result or an error."""
        source, target, team = self.source, self.target, fetch.team
        seat = seat_of(target.mesh, team.rank, team.size)
        error, held, result = None, None, None
        try:
            check_options(False, False, memory)
            held = check_source(tile, source, team.rank, team.size)
            if seat is None:
                check_nothing(out, "out", target, team.rank)
            elif out is None:
                result = np.empty(target.tile_shape, held.dtype)
            else:
                result = check_out(out, target, held if held.size else held.astype(dtype_without_tile(target, out)))
        except Exception as caught:  # Those that take from this rank are told.
            error, held, result = caught, None, None
        if error is None and (memory is not None or measures()):
            account = begin_account(source.dtype, memory)
            account.take(team.rank, sum([each.size for each in (held, result) if each is not None]))
            account.receive(team.rank, sum([part.elements for part in fetch.received]))
        # A rank that is wrong takes part all the same: its neighbours count calls, not results.
        if held is None:
            fetch.begin(watch, None, json.dumps(Statement.of(error)))
        else:
            fetch.begin(watch, view_as_words(held))

        def finish(watch: Watch) -> Any:
            # Blocks lie in C order: an `out` of strides is filled from such an array.
            into = result if result is None or result.flags.c_contiguous else np.empty(result.shape, result.dtype)
            told = fetch.finish(watch, None if into is None else view_as_words(into), out is not None)
            failed = {rank: Statement(*json.loads(text)) for rank, text in told.items()}
            if error is not None:
                failed[team.rank] = Statement.of(error)
            if failed:
                return join_errors(failed, error, 1 + len(fetch.received))
            if into is not result and result is not None:
                result[...] = into
            elif out is None and seat is not None and result is not None and not target.even:
                clear_padding(target, seat, result)
            return result

        return finish

    def _make_anew(self, tile: Any, out: Any, memory: Account | None = None, freed: bool = False) -> Any:
        """Makes a call as if for the first time; after a failure, the ranks prepare a small move anew in it."""
        if freed:
            raise PlanError("this handle has been freed; prepare another one")
        comm = check_alive(cast("Comm", self._call.comm))
        result = self._call._replace(tiles=tile, out=out, memory=memory).run()
        if self._prepared is not None and not self._prepared.team.alive:
            self._prepared = find_prepared(comm, (TILES, self.source, self.target))
        return result


class StartedMove:
    """A move that is under way, as a handle's `start` begins it.

    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from reshard import Mesh
    >>> mesh = Mesh(x=MPI.COMM_WORLD.size)
    >>> rows, columns = (Layout.from_spec(spec, mesh, (8, 8), "float32") for spec in ([["x"]], [[], ["x"]]))
    >>> with prepare(rows, columns, MPI.COMM_WORLD) as to_columns:
    ...     started = to_columns.start(np.ones(rows.tile_shape, "float32"))
    ...     work = sum(range(1000))  # meanwhile
    ...     tile = started.wait()
    >>> tile.shape == columns.tile_shape
    True
    """

    def __init__(self, run: Callable[[], Any], ahead: Callable[[], Any] | None = None) -> None:
        self._run: Callable[[], Any] | None = run
        self._ahead = ahead
        """What a thread makes instead; if it gives `DEFERRED`, whoever waits for the move makes it."""
        self._thread: threading.Thread | None = None
        self._result: Any = None
        self._error: BaseException | None = None

    def wait(self) -> Any:
        """The result, as the call of the handle returns it, or the error that it raises; again if called again."""
        self.finish()
        if self._error is not None:
            raise self._error
        return self._result

    def begin(self) -> int:
        """Makes the move in a thread of its own, if there can be one; returns its number, or 0."""
        context = copy_context()
        # Once threads have overlapped, requests have their names: ranks without a core to spare give the caller's.
        name = threading.current_thread().name
        thread = threading.Thread(target=lambda: context.run(self._make_beside), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # The system has no more threads, or the interpreter ends.
            return 0
        self._thread = thread
        return thread.ident or 0

    def finish(self) -> None:
        """Waits for the end, and leaves its error to `wait`."""
        if self._thread is not None:
            self._thread.join()
        self._make()

    def _make_beside(self) -> None:
        """The thread's part: the whole move, or what can be done without the caller's turn."""
        with _quick_turns:
            if self._ahead is None:
                self._make()
                return
            try:
                result = self._ahead()
            except BaseException as error:  # `wait` raises it.
                self._run, self._error = None, error
                return
            if result is not DEFERRED:
                self._run, self._result = None, result

    def _make(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        try:
            self._result = run()
        except BaseException as error:  # `wait` raises it.
            self._error = error


class FetchCalls:
    """The calls of a handle whose ranks wait for their neighbours alone. All ranks make them in one order."""

    def __init__(self, comm: Comm, limit: float, make: Callable[[], Fetch], made: Fetch | None = None) -> None:
        self._comm, self._limit, self._make = comm, limit, make
        self.fetch = made or make()
        """The exchange, made anew by all ranks after a failure."""
        self._started: StartedMove | None = None
        self._freed = False

    def run(self, begin: Begin) -> Any:
        """A call: what it begins is finished; raises the error that it gives instead of a result."""
        fetch, release = self._take_turn()
        try:
            with report_failure(fetch.team, f"fetch {fetch.team.fetched}: "):
                watch = Watch(fetch.team, self._limit)
                result = begin(fetch, watch)(watch)
        finally:
            release()
        if isinstance(result, Exception):
            raise result
        return result

    def start(self, begin: Begin) -> StartedMove:
        """Begins a call, which ends when it is waited for, or before the next one of this handle."""
        fetch, release = self._take_turn()
        try:
            with report_failure(fetch.team, where := f"fetch {fetch.team.fetched}: "):
                finish = begin(fetch, Watch(fetch.team, self._limit))
        finally:
            release()

        def end() -> Any:
            turn = fetch.team.turns.take(time.monotonic() + self._limit)
            try:
                with report_failure(fetch.team, where):
                    result = finish(Watch(fetch.team, self._limit))
            finally:
                turn.release()
            if isinstance(result, Exception):
                raise result
            return result

        self._started = StartedMove(end)
        return self._started

    def _take_turn(self) -> tuple[Fetch, Callable[[], None]]:
        """This thread's turn for the next call, and what gives it back."""
        if self._started is not None:
            self._started.finish()
            self._started = None
        if self._freed:
            raise PlanError("this handle has been freed; prepare another one")
        check_alive(self._comm)
        team = self.fetch.team
        team.fetched += 1
        if not team.alive:
            # Ranks do not wait for each other before they fail: this one may be late for a call that has failed. After
            # it, and after one that was made in vain, all ranks prepare the handle anew.
            where = f"fetch {team.fetched}: "
            failed = [f"rank {rank}: {text}" for rank, text in team.failures().items() if text.startswith(where)]
            if failed:
                raise RankError(f"the call ended on all ranks, because one failed: {'; '.join(failed)}")
            self.fetch = self._make()
        turns = self.fetch.team.turns
        release = turns.free if turns.take_again() else turns.take(time.monotonic() + self._limit).release
        return self.fetch, release

    def free(self) -> None:
        """Ends the call that has begun; the next one is refused."""
        if self._started is not None:
            self._started.finish()
        self._freed, self._started = True, None


class _QuickTurns:
    """While threads make moves, Python's threads give each other the interpreter after a fifth of a millisecond.

    A move asks for it between its copies and its looks at the other ranks. By default it would wait five milliseconds
    each time for a thread that works in Python, or in many short calls of numpy: as long as 50 MiB take to copy.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._usual = self._quick = 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._under_way += 1
            if self._under_way == 1:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual, 2e-4))
                self._quick = sys.getswitchinterval()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._under_way -= 1
            if not self._under_way and sys.getswitchinterval() == self._quick:  # Else somebody has set another one.
                sys.setswitchinterval(self._usual)


_quick_turns = _QuickTurns()
