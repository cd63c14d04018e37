"""`redistribute`: plain arrays, one tile a rank, from one layout to another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, overload

from numpy.typing import NDArray

from reshard.errors import TileError
from reshard.mpi.relabel import relabelled
from reshard.mpi.tiles import checked, checked_out
from reshard.runtime.account import Account
from reshard.runtime.on_mpi.gpu.device_arrays import GpuArray, check_makes, described, on_gpu, writable
from reshard.runtime.on_mpi.gpu.device_messages import takes_pointers
from reshard.runtime.on_mpi.gpu.staging import Given, given, host_like, move_on_gpu
from reshard.runtime.on_mpi.move import Held, Prepared, Request, begin, move, prepared, where
from reshard.runtime.on_mpi.team import TIME_LIMIT, Comm, Team, team_of
from reshard.synth import Network
from reshard.types import Layout

Array = NDArray[Any]


@overload
def redistribute(
    tile: Any,
    source: Layout,
    target: Layout,
    comm: Comm,
    *,
    out: Array | None = None,
    budget: int | None = None,
    network: Network | str | None = None,
    donate: bool = False,
    relabel: Literal[False] = False,
    limit: float = TIME_LIMIT,
    memory: Account | None = None,
    cuda_aware: bool | None = None,
) -> Array: ...


@overload
def redistribute(
    tile: Any,
    source: Layout,
    target: Layout,
    comm: Comm,
    *,
    out: Array | None = None,
    budget: int | None = None,
    network: Network | str | None = None,
    donate: bool = False,
    relabel: Literal[True],
    limit: float = TIME_LIMIT,
    memory: Account | None = None,
    cuda_aware: bool | None = None,
) -> tuple[Array, Layout]: ...


def redistribute(
    tile: Any,
    source: Layout,
    target: Layout,
    comm: Comm,
    *,
    out: Array | None = None,
    budget: int | None = None,
    network: Network | str | None = None,
    donate: bool = False,
    relabel: bool = False,
    limit: float = TIME_LIMIT,
    memory: Account | None = None,
    cuda_aware: bool | None = None,
) -> Array | tuple[Array, Layout]:
    """This rank's tile of the target layout; every rank of the communicator calls it with its tile of the source.

    A tile in the memory of a GPU (torch, cupy, jax: DLPack or `__cuda_array_interface__` on CUDA) gives a result of
    the same library on the same GPU, and so must `out` be. It moves by way of the host, in whose memory the budget
    then counts its copies, or straight from there with `cuda_aware`, see docs/mpi.md; where that is None, the
    environment or MPI itself says whether MPI takes pointers to a GPU's memory. All ranks give such a tile, or none.

    The tile may have any strides. The result is `out`, which must not overlap the tile, or C-ordered and new; where
    the layouts are equal, a C-ordered tile is returned as it is. `budget` is in bytes a rank and counts all that is
    live, tile and result included; with `donate` the tile may be overwritten where the budget asks for it, and the
    result then lies in its memory. With `relabel`, ranks take those tiles of the target that keep the most elements
    where they are, and the layout that says which is returned too. `memory` is filled with what the call took.

    Before data move, the ranks compare what they ask for. If they differ, or one rank's tile does not fit, the
    same error is raised on all of them. A rank that waits longer than `limit` seconds raises `RankError`.
    """
    team = team_of(comm, limit)
    if relabel:
        target = relabelled(source, target)
    request = Request(source, target, budget, network, donate, out is not None)
    if on_gpu(tile):
        found = _on_gpu(team, request, tile, out, limit, memory, cuda_aware)
        return (found, target) if relabel else found

    def prepare() -> tuple[Prepared, Held, Held | None]:
        array = checked(tile, source, "tile")
        into = None if out is None else checked_out(out, target, array)
        ready = prepared(team, request, array)
        return ready, _held(team, array), None if into is None else _held(team, into)

    watch, (ready, held, into) = begin(team, limit, str(request), prepare, lambda found: where(*found[1:]))
    found = move(team, watch, ready, request, held, into, memory).tile
    return (found, target) if relabel else found


def _held(team: Team, array: Array) -> Held:
    return Held(array, team.windows.under(array))


def _on_gpu(
    team: Team, asked: Request, tile: Any, out: Any, limit: float, memory: Account | None, cuda_aware: bool | None
) -> Any:
    """The same for tiles on GPUs, whose copies on the host lie in shared windows where there is room."""
    # The host's result is nobody's yet, so no message has to be held back from it, as one would be from `out`.
    donate, shared = asked.donate or out is not None, asked.source.tile_bytes <= team.facts.room
    request = replace(asked, donate=donate, shared=shared)

    def prepare() -> tuple[Prepared, Given]:
        on = described(tile, "tile")
        standing = checked(host_like(on), request.source, "tile")
        into = None if out is None else _checked_out(out, request.target, on)
        if out is None:
            check_makes(tile)
        ready = prepared(team, request, standing)
        return ready, given(on, into, ready, request, team.rank, pointers)

    aware = takes_pointers() if cuda_aware is None else cuda_aware
    pointers = aware and writable(tile)
    what = f"{asked}, tiles on GPUs, their pointers {'' if pointers else 'not '}given to MPI"
    watch, (ready, found) = begin(team, limit, what, prepare)
    return move_on_gpu(team, watch, ready, request, found, limit, memory)


def _checked_out(out: Any, layout: Layout, tile: GpuArray) -> GpuArray:
    if not on_gpu(out) or not writable(out):
        raise TileError(
            f"out is a {type(out).__name__}, the tile lies on GPU {tile.device}; give an array there that can be "
            f"written to"
        )
    found = described(out, "out")
    checked(host_like(found), layout, "out")
    if found.device != tile.device:
        raise TileError(f"out is on GPU {found.device}, the tile on GPU {tile.device}; give one on the same GPU")
    if found.dtype != tile.dtype:
        raise TileError(f"out is {found.dtype}, the tile {tile.dtype}; give one dtype")
    if found.overlaps(tile):
        raise TileError("out overlaps the tile; give memory of its own, or donate=True and no out")
    return found
