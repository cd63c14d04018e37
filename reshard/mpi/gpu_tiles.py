"""`redistribute` for tiles in the memory of GPUs: what differs before and during the agreement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reshard.errors import TileError
from reshard.mpi.tiles import check_tile
from reshard.runtime.account import Account
from reshard.runtime.on_mpi.agreement import begin
from reshard.runtime.on_mpi.gpu.device_arrays import GpuArray, check_makes, described, on_gpu, writable
from reshard.runtime.on_mpi.gpu.device_messages import takes_pointers
from reshard.runtime.on_mpi.gpu.staging import DeviceTiles, device_tiles, host_like, move_on_gpu
from reshard.runtime.on_mpi.prepare import MoveRequest, Prepared, prepared
from reshard.runtime.on_mpi.team import Team
from reshard.types import Layout


def redistribute_on_gpu(
    team: Team,
    request: MoveRequest,
    tile: Any,
    out: Any,
    limit: float,
    memory: Account | None,
    cuda_aware: bool | None,
) -> Any:
    """The target's tile on the tile's GPU. Its copies on the host lie in the node's arena if that has room."""
    # The host's result is still the call's own, so no message is held back from it, as from an `out` on the host.
    on_host = replace(request, donate=request.donate or out is not None, shared=True)

    def prepare() -> tuple[Prepared, DeviceTiles]:
        on = described(tile, "tile")
        like = check_tile(host_like(on), request.source, "tile")
        into = None if out is None else check_out_on_gpu(out, request.target, on)
        if out is None:
            check_makes(tile)
        ready = prepared(team, on_host, like)
        return ready, device_tiles(on, into, ready, on_host, team.rank, pointers)

    aware = takes_pointers() if cuda_aware is None else cuda_aware
    pointers = aware and writable(tile)
    text = f"{request}, tiles on GPUs, their pointers {'' if pointers else 'not '}given to MPI"
    watch, (ready, tiles) = begin(team, limit, text, prepare)
    return move_on_gpu(team, watch, ready, on_host, tiles, limit, memory)


def check_out_on_gpu(out: Any, layout: Layout, tile: GpuArray) -> GpuArray:
    """The array `out` if the result for this tile can be written to it; else raises `TileError`."""
    if not on_gpu(out) or not writable(out):
        raise TileError(
            f"out is a {type(out).__name__}, the tile lies on GPU {tile.device}; give an array there that can be "
            f"written to"
        )
    array = described(out, "out")
    check_tile(host_like(array), layout, "out")
    if array.device != tile.device:
        raise TileError(f"out is on GPU {array.device}, the tile on GPU {tile.device}; give one on the same GPU")
    if array.dtype != tile.dtype:
        raise TileError(f"out is {array.dtype}, the tile {tile.dtype}; give one dtype")
    if array.overlaps(tile):
        raise TileError("out overlaps the tile; give memory of its own, or donate=True and no out")
    return array
