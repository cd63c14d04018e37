"""`move`: moves tiles of plain arrays by a `reshard.Move`: through a view, in part, or to another dtype."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.errors import PlanError, TileError, quoted
from reshard.lower.to_mpi import ranks
from reshard.mpi.tiles import check_given_tile, check_options, check_out
from reshard.runtime.account import Account, begin_account
from reshard.runtime.numpy_dtypes import numpy_dtype
from reshard.runtime.on_mpi.collective import collective
from reshard.runtime.on_mpi.gpu.device_arrays import on_gpu
from reshard.runtime.on_mpi.indices import clear_padding
from reshard.runtime.on_mpi.prepare import check_mesh
from reshard.runtime.on_mpi.run_view import ViewPlan, run_view_plan, view_plan
from reshard.runtime.on_mpi.team import TIME_LIMIT, Comm, Team
from reshard.runtime.on_mpi.wire.exchange import Call
from reshard.runtime.platform_network import named
from reshard.synth import Network, plan
from reshard.types.move import Move
from reshard.types.pair.device_sets import one_set
from reshard.types.plan import Plan

Array = NDArray[Any]


class _Ready(NamedTuple):
    """One rank's part of a call: the plan, its steps, its tile and the result."""

    plan: Plan
    steps: ViewPlan
    tile: Array
    result: Array


def move(
    tile: Any,
    move: Move,
    comm: Comm,
    *,
    out: Array | None = None,
    budget: int | str | None = None,
    network: Network | str | None = None,
    scale: Any = None,
    limit: float = TIME_LIMIT,
    memory: Account | None = None,
) -> Array:
    """This rank's tile of the move's target; every rank of `comm` calls it with its tile of the source.

    `out` receives the result; a move that fills part of its target needs it, and leaves the rest of it as it is.
    `scale` is what a cast divides by where it narrows, and multiplies by where it widens: a number, or an array that
    broadcasts to this rank's wider tile. The other options are those of `redistribute`.

    Before any data move, the ranks compare their requests. If these differ, or if an argument of one rank is wrong, all
    ranks raise the same error: `AgreementError`, `TileError`, `PlanError` or `BudgetError`.

    >>> from mpi4py import MPI
    >>> from reshard import Layout, Mesh
    >>> mesh = Mesh(x=1)
    >>> fused, split = (Layout.parse(text, mesh) for text in ("s64[6]", "s64[2, 3]"))
    >>> move(np.arange(6), Move(fused, split, view="(h two) -> two h", two=2), MPI.COMM_SELF).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    network = named(network)
    call = (move, budget, network, out is not None, scale is not None)

    def prepare(team: Team) -> _Ready:
        return _prepared(team, tile, move, (out, scale), (budget, network), memory)

    def request(given: _Ready) -> str:
        return f"move {', '.join(map(str, call))}, {given.plan.source.mesh!r} to {given.plan.target.mesh!r}"

    with collective(comm, limit, prepare, request) as (team, watch, ready):
        account = begin_account(move.source.dtype, memory)
        running = Call(team, watch, team.pool, account, ranks(move.source.mesh)[team.rank])
        account.take(running.device, ready.tile.size)
        team.pool.limit(max(0, ready.plan.peak_bytes - move.source.tile_bytes - move.target.tile_bytes))
        settle = (lambda: team.settle(watch)) if out is not None else None
        run_view_plan(running, ready.steps, ready.tile, ready.result, scale, settle)
    if out is None and not move.target.even:
        clear_padding(move.target, comm.rank, ready.result)
    return ready.result


def _prepared(
    team: Team,
    tile: Any,
    move: object,
    arrays: tuple[Any, Any],
    options: tuple[int | str | None, Network | str | None],
    memory: Account | None,
) -> _Ready:
    out, scale = arrays
    budget, network = options
    if not isinstance(move, Move):
        raise PlanError(
            f"{quoted(move)} is a {type(move).__name__}, not a Move; give reshard.Move(source, target, ...)"
        )
    check_options(False, False, memory, None, True)
    check_mesh(move.source, team.size)
    check_mesh(move.target, team.size)
    if not one_set(move.source.mesh, move.target.mesh):
        raise PlanError(
            f"{move}: mesh {move.target.mesh} of the target has other devices than the source; put both layouts on the "
            f"same devices"
        )
    if on_gpu(tile):
        raise TileError(f"the tile of {move} is on a GPU: moves with a view run in host memory; copy it there")
    if move.view.into and out is None:
        raise TileError(f"{move} fills part of its target: give this rank's tile of the target with out=")
    made = plan(move, None, budget, network)
    array = np.ascontiguousarray(check_given_tile(tile, move.source, team.rank, budget))
    result = _result(move, out, array)
    steps = view_plan(made, team.rank)
    _check_scale(move, steps, scale)
    return _Ready(made, steps, array, result)


def _check_scale(move: Move, steps: ViewPlan, scale: Any) -> None:
    if scale is None:
        return
    shape = next((step.before for step in steps.steps if step.step is None), None)
    if shape is None:
        raise TileError(f"scale {quoted(scale)}: {move} casts nothing; leave it out")
    try:
        np.broadcast_to(np.asarray(scale, "float64"), shape)
    except (ValueError, TypeError) as error:
        raise TileError(
            f"scale {quoted(scale)} does not fit the tile of shape {shape} that is cast: {error}; give a number, or an "
            f"array that broadcasts to the tile"
        ) from None


def _result(move: Move, out: Any, tile: Array) -> Array:
    if out is None:
        return np.empty(move.target.tile_shape, numpy_dtype(move.target.dtype))
    array = check_out(out, move.target, tile)
    if not array.flags.c_contiguous:
        raise TileError(f"out, of shape {array.shape}, is not C-ordered; give a C-ordered array")
    return array
