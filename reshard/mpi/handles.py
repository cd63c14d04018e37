"""`prepare`: a move between two layouts that is agreed on once and then made again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from typing import Any, Self

import numpy as np
from mpi4py import MPI

from reshard.errors import PlanError
from reshard.mpi.redistribution import PreparedMove, TileMove
from reshard.mpi.tiles import check_layout
from reshard.runtime.account import Account
from reshard.runtime.numpy_dtypes import numpy_dtype
from reshard.runtime.on_mpi.collective import collective
from reshard.runtime.on_mpi.prepare import MoveRequest, check_seats, prepared
from reshard.runtime.on_mpi.repeated import StagedMove, begin_again, call_again, end_again, keep, kept
from reshard.runtime.on_mpi.team import CORES, TIME_LIMIT, Comm, Started, Team, check_alive, team_at_hand
from reshard.runtime.on_mpi.window_tiles import WindowTile
from reshard.synth import Network
from reshard.types import Layout


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
    >>> rows = Layout.from_spec(mesh, (16, 16), "float64", [["x"], []])
    >>> columns = Layout.from_spec(mesh, (16, 16), "float64", [[], ["x"]])
    >>> with prepare(rows, columns, comm) as to_columns:
    ...     tiles = [to_columns(np.full(rows.tile_shape, step)) for step in (1.0, 2.0)]
    >>> [tile[0, 0] for tile in tiles]
    [np.float64(1.0), np.float64(2.0)]
    """

    def ready(team: Team) -> PreparedMove:
        check_layout(source, "source")
        check_layout(target, "target")
        check_seats(source, target, team.size)
        request = MoveRequest(source, target, budget, network)
        empty = WindowTile(np.empty(0, numpy_dtype(source.dtype)))
        return PreparedMove(request, prepared(team, request, empty.tile), empty, None)

    with collective(comm, limit, ready, lambda given: f"prepare {given.request}") as (team, watch, given):
        plain = budget is None and network is None
        staged = keep(team, watch, given.request, given.ready, now=True) if plain else None
    return MoveHandle(TileMove(None, source, target, None, budget, network, repeats=True), comm, float(limit), staged)


class MoveHandle:
    """A prepared move: `handle(tile)` returns this rank's tile of the target, as `redistribute` does.

    Calls are collective. Moves of small tiles inside a node cost one synchronization of the ranks; others are those of
    `redistribute`. `free`, or the end of a `with`, releases what the handle keeps; so does freeing its communicator.
    """

    def __init__(self, move: TileMove, comm: Comm, limit: float, staged: StagedMove | None) -> None:
        self._move, self._comm, self._limit, self._staged = move, comm, limit, staged
        self._freed = False

    @property
    def source(self) -> Layout:
        """The layout of the tiles that are given."""
        return self._move.source

    @property
    def target(self) -> Layout:
        """The layout of the results."""
        return self._move.target

    def __call__(self, tile: Any, *, out: Any = None, memory: Account | None = None) -> Any:
        """This rank's tile of the target: `out`, which must not overlap the tile, or a new array.

        None for a rank without a tile, on either side. Errors are those of `redistribute`, the same on all ranks, and
        leave `out` as it was. `memory` is filled with the bytes received and held live.
        """
        staged = self._staged
        if staged is None or not staged.team.alive:
            return self._called(tile, out, memory)
        usual = memory is None or isinstance(memory, Account)  # pyright: ignore[reportUnnecessaryIsInstance]
        return call_again(staged, tile, out, self._limit, memory, usual, self._called)

    def start(self, tile: Any, *, out: Any = None) -> StartedMove:
        """Begins a move, and returns what to wait for; until then, `tile` and `out` must not be changed or read.

        Small moves are staged and posted here, so that the ranks need not wait for each other later, and copied to
        `out` by `wait`. Other moves are made by a thread meanwhile, if this process may use more cores than the node
        has ranks, and MPI allows threads; else by `wait`. One move of a communicator is under way at a time: any other
        call there finishes it first.
        """
        staged = self._staged
        if staged is not None and staged.team.alive:
            begin_again(staged, tile, out, self._limit)
            limit = self._limit
            move = StartedMove(lambda: end_again(staged, out, limit, lambda: self._called(tile, out, None)))
            staged.team.started = Started(move.finish)
            return move
        team = None if self._freed else team_at_hand(self._comm)
        move = StartedMove(lambda: self._called(tile, out, None))
        if team is not None and team.alive:
            team.finish_started()
            free = len(team.members) < CORES and MPI.Query_thread() == MPI.THREAD_MULTIPLE
            team.started = Started(move.finish, move.begin() if free else 0)
        return move

    def free(self) -> None:
        """Releases what the handle keeps, on this rank only; may be called any number of times. The handle cannot be
        called again.
        """
        self._freed, self._staged = True, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def _called(self, tile: Any, out: Any, memory: Account | None) -> Any:
        """Makes the call in the general way; after a failure, the ranks prepare a small move anew in it."""
        if self._freed:
            raise PlanError("this handle has been freed; prepare another one")
        move = replace(self._move, tile=tile, out=out, memory=memory)
        result = move.run(check_alive(self._comm), self._limit)
        if self._staged is not None and not self._staged.team.alive:
            self._staged = kept(self._comm, (self.source, self.target))
        return result


class StartedMove:
    """A move that is under way, as a handle's `start` begins it.

    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from reshard import Mesh
    >>> mesh = Mesh(x=MPI.COMM_WORLD.size)
    >>> rows, columns = (Layout.from_spec(mesh, (8, 8), "float32", spec) for spec in ([["x"]], [[], ["x"]]))
    >>> with prepare(rows, columns, MPI.COMM_WORLD) as to_columns:
    ...     started = to_columns.start(np.ones(rows.tile_shape, "float32"))
    ...     work = sum(range(1000))  # meanwhile
    ...     tile = started.wait()
    >>> tile.shape == columns.tile_shape
    True
    """

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run: Callable[[], Any] | None = run
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
        """Makes the move in a thread of its own; returns its number."""
        context = copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._make), daemon=True)
        self._thread.start()
        return self._thread.ident or 0

    def finish(self) -> None:
        """Waits for the end, and leaves its error to `wait`."""
        if self._thread is not None:
            self._thread.join()
        else:
            self._make()

    def _make(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        try:
            self._result = run()
        except BaseException as error:  # `wait` raises it.
            self._error = error
