"""`redistribute` for tiles in the memory of GPUs: what differs before and during the agreement."""

from __future__ import annotations

from typing import Any

from reshard.errors import TileError
from reshard.geometry.remesh import one_set
from reshard.mpi.tile_checks import check_tile
from reshard.runtime.account import Account
from reshard.runtime.on_mpi.collective import ReadyCall
from reshard.runtime.on_mpi.gpu.device_arrays import GpuArray, check_makes, described, on_gpu, writable
from reshard.runtime.on_mpi.gpu.device_messages import takes_pointers
from reshard.runtime.on_mpi.gpu.staging import device_tiles, host_like, move_on_gpu
from reshard.runtime.on_mpi.prepare import Request, prepare_tile
from reshard.runtime.on_mpi.team import Team, Watch
from reshard.runtime.on_mpi.window_tiles import NOWHERE
from reshard.types import Layout


def prepare_on_gpu(
    team: Team, request: Request, tile: Any, out: Any, memory: Account | None, cuda_aware: bool | None
) -> ReadyCall:
    """The call that makes the target's tile on the tile's GPU. Its copies on the host lie in the node's arena if that
    has room.
    """
    source, target = request.source, request.target
    if source.mesh.size != team.size or not one_set(source.mesh, target.mesh):
        raise TileError(
            f"tiles on GPUs move only among all {team.size} ranks of a communicator, not from {source.mesh!r} to "
            f"{target.mesh!r}; copy the tile to the host, or give a communicator of the ranks that have one"
        )
    # The host's result is still the call's own, so no message is held back from it, as from an `out` on the host.
    options = request.options._replace(donate=request.options.donate or out is not None)
    on_host = request._replace(options=options, shared=True)
    on = described(tile, "tile")
    like = check_tile(host_like(on), request.source, "tile")
    into = None if out is None else check_out_on_gpu(out, request.target, on)
    if out is None:
        check_makes(tile)
    ready = prepare_tile(team, on_host, like)
    pointers = (takes_pointers() if cuda_aware is None else cuda_aware) and writable(tile)
    tiles = device_tiles(on, into, ready, on_host, team.rank, pointers)
    text = f"{request}, tiles on GPUs, their pointers {'' if pointers else 'not '}given to MPI"

    def run(team: Team, watch: Watch) -> Any:
        return move_on_gpu(team, watch, ready, tiles, memory)

    return ReadyCall(text, NOWHERE, run)


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
