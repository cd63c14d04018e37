"""Ranks as the processes of a save: what each holds of an array, and how all tell each other that they are done."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI
from numpy.typing import NDArray

from reshard.errors import FileError, TileError, quoted
from reshard.lower.to_mpi import seat_of
from reshard.mpi.tile_checks import check_given_tile, check_nothing, with_ranks_as_ids
from reshard.runtime.on_files.commit import Processes
from reshard.runtime.on_mpi.collective import check_communicator, collective, gather_texts
from reshard.runtime.on_mpi.prepare import check_seats
from reshard.types.layout import Layout


class RankProcesses:
    """The ranks of a communicator; each wait for the others ends after `limit` seconds."""

    def __init__(self, comm: MPI.Intracomm, limit: float) -> None:
        self.comm, self._limit = check_communicator(comm), limit
        self.rank, self.size = comm.rank, comm.size

    def gather(self, mine: str) -> list[str]:
        """What each rank gives."""
        # A call of its own each time: between two of them a rank may write for minutes, and moves may be made.
        with collective(self.comm, self._limit, lambda _: None, lambda _: "save") as (team, watch, _):
            return gather_texts(team, watch, mine)


def tiles_of_rank(
    name: str, leaf: Any, layout: Layout | None, processes: Processes
) -> tuple[Layout, dict[int, NDArray[Any]], dict[int, int]]:
    """An array whose devices are ranks: its layout with ranks as ids, this rank's tile, and the process of each device.

    `leaf` is the rank's tile, None where it has none, or a `DistArray`.
    """
    if hasattr(leaf, "comm"):  # A DistArray has a tile without elements where it has none.
        own: Layout = leaf.layout
        layout, leaf = own, leaf.tile if seat_of(own.mesh, processes.rank, processes.size) is not None else None
    if layout is None:
        raise FileError(f"tensor {quoted(name)} has no layout; give layouts={{name: Layout}} with comm=")
    check_seats(layout, layout, processes.size)
    seat = seat_of(layout.mesh, processes.rank, processes.size)
    tiles: dict[int, NDArray[Any]] = {}
    try:
        if seat is None:
            check_nothing(leaf, "tile", layout, processes.rank)
        else:
            tiles[processes.rank] = check_given_tile(leaf, layout, seat)
    except TileError as error:
        raise TileError(f"tensor {quoted(name)}: {error}") from None
    # Ids become ranks: the processes of a save are numbered by these, whatever meshes call them.
    layout = with_ranks_as_ids(layout, processes.size)
    return layout, tiles, {rank: rank for rank in layout.mesh.devices}
