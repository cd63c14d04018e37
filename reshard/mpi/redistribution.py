"""`redistribute`: moves plain arrays, one tile per rank, from one layout to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack, overload

from numpy.typing import NDArray

from reshard.mpi.gpu_tiles import redistribute_on_gpu
from reshard.mpi.relabel import relabelled
from reshard.mpi.tiles import check_given_tile, check_out, check_true_out, true_part
from reshard.runtime.account import Account
from reshard.runtime.on_mpi.agreement import begin
from reshard.runtime.on_mpi.gpu.device_arrays import on_gpu
from reshard.runtime.on_mpi.move import move
from reshard.runtime.on_mpi.prepare import MoveRequest, Prepared, prepared
from reshard.runtime.on_mpi.team import TIME_LIMIT, Comm, Team, team_of
from reshard.runtime.on_mpi.window_tiles import WindowTile, located, where
from reshard.synth import Network
from reshard.types import Layout

Array = NDArray[Any]


class RedistributeOptions(TypedDict, total=False):
    """The options of `redistribute` besides `relabel`."""

    out: Array | None
    budget: int | str | None
    network: Network | str | None
    donate: bool
    limit: float
    memory: Account | None
    cuda_aware: bool | None
    padded: bool


@overload
def redistribute(
    tile: Any,
    source: Layout,
    target: Layout,
    comm: Comm,
    *,
    relabel: Literal[False] = False,
    **options: Unpack[RedistributeOptions],
) -> Array: ...


@overload
def redistribute(
    tile: Any,
    source: Layout,
    target: Layout,
    comm: Comm,
    *,
    relabel: Literal[True],
    **options: Unpack[RedistributeOptions],
) -> tuple[Array, Layout]: ...


def redistribute(
    tile: Any,
    source: Layout,
    target: Layout,
    comm: Comm,
    *,
    out: Array | None = None,
    budget: int | str | None = None,
    network: Network | str | None = None,
    donate: bool = False,
    relabel: bool = False,
    limit: float = TIME_LIMIT,
    memory: Account | None = None,
    cuda_aware: bool | None = None,
    padded: bool = True,
) -> Array | tuple[Array, Layout]:
    """This rank's tile of the target layout; every rank of `comm` calls it with its own tile of the source layout.

    The tile has the shape `source.tile_shape` or, without padding, `source.tile_shape_of(rank)`, in any strides. The
    result is `out`, which must not overlap the tile, or a new C-ordered array. If the layouts are equal, a C-ordered
    tile is returned unchanged.

    - `budget` (bytes, or text such as "64MiB") bounds what lives on each rank, tile and result included; `network` as
      in `reshard.plan`.
    - `donate` allows overwriting the tile if the budget requires it; the result then lies in the tile's memory.
    - `relabel` assigns the target's tiles to the ranks so that the most elements stay where they are; the result is
      then a pair, with the layout that says which rank has which tile.
    - `limit` is how many seconds a rank waits for another before it raises `RankError`.
    - `memory` is filled with the bytes that this call received and held live.
    - `padded=False` returns the tile without padding, a view of the one with it; `out` then has no padding either.
    - `cuda_aware` says whether MPI accepts pointers to GPU memory; if it is None, the environment or MPI itself does.

    A tile in the memory of a GPU (torch, cupy, jax: DLPack or `__cuda_array_interface__` on CUDA) gives a result of
    the same library on the same GPU; `out` must be such an array, too, and all ranks must give one, or none. It moves
    through host memory, where the budget counts its copies, or directly between GPUs, see docs/mpi.md.

    Before any data move, the ranks compare their requests. If these differ, or if one rank's tile does not fit, all
    ranks raise the same error: `AgreementError`, `TileError`, `PlanError` or `BudgetError`.

    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from reshard import Mesh
    >>> comm = MPI.COMM_WORLD
    >>> mesh = Mesh(x=comm.size)
    >>> rows = Layout.from_spec(mesh, (16, 16), "float64", [["x"], []])
    >>> columns = Layout.from_spec(mesh, (16, 16), "float64", [[], ["x"]])
    >>> redistribute(np.zeros(rows.tile_shape), rows, columns, comm).shape == columns.tile_shape
    True
    """
    team = team_of(comm, limit)
    if relabel:
        target = relabelled(source, target)
    copied = out is not None and not padded and not target.even  # `out` has another shape than the tile that moves.
    request = MoveRequest(source, target, budget, network, donate, out is not None and not copied)
    if on_gpu(tile):
        result = redistribute_on_gpu(team, request, tile, out, limit, memory, cuda_aware)
        return (result, target) if relabel else result

    def prepare() -> tuple[Prepared, WindowTile, WindowTile | None]:
        array = check_given_tile(tile, source, team.rank, budget)
        ready = prepared(team, request, array)
        into = None if out is None or copied else check_out(out, target, array)
        if copied:
            check_true_out(out, target, team.rank, array, budget)
        return ready, located(team, array), None if into is None else located(team, into)

    result = move_together(team, request, str(request), prepare, limit, memory).tile
    if not padded:
        result = true_part(result, target, team.rank)
    if out is not None and copied:
        out[...], result = result, out
    return (result, target) if relabel else result


def move_together(
    team: Team,
    request: MoveRequest,
    text: str,
    prepare: Callable[[], tuple[Prepared, WindowTile, WindowTile | None]],
    limit: float,
    memory: Account | None,
) -> WindowTile:
    """Prepares a move on each rank, agrees on `text` with the others, and moves the tile.

    `prepare` returns this rank's part of the request, its tile, and `out`.
    """
    watch, (ready, held, into) = begin(team, limit, text, prepare, lambda given: where(given[1], given[2]))
    return move(team, watch, ready, request, held, into, memory)
