"""Inter-communicators: their two groups merged into one communicator, and layouts that count the ranks of a group.

    group A, 3 ranks     0  1  2               merged     0  1  2  3  4
    group B, 2 ranks              0  1

    a layout on <x=2> of group B               is on ranks 3 and 4

MPI merges once, for all later calls, and may put either group first. That blocks inside MPI, so the ranks meet before:
they ask for a duplicate, which MPI makes, without blocking, when all ranks of both groups have asked for it. One gap is
left: a rank whose limit ends in the milliseconds between the last request and its own look at it gives up, and the
others wait inside MPI until it makes its next call. `meeting` closes that gap inside one communicator by a message that
says who leaves; between two groups nobody can collect these before the groups are merged.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, cast

from mpi4py import MPI

from reshard.errors import PlanError, RankError, TileError
from reshard.runtime.on_mpi.meeting import until
from reshard.runtime.on_mpi.team import Team, Watch
from reshard.types import Layout, Mesh


class MergedGroups(NamedTuple):
    """The merged communicator, and its ranks by group; `mine` is the number of this rank's group, 0 or 1."""

    comm: MPI.Intracomm
    ranks: tuple[range, range]
    mine: int

    def giving(self, team: Team, watch: Watch, gives: bool) -> list[int]:
        """The groups, by number, of which some rank gives a tile. Collective."""
        some = team.some(watch, gives and self.mine == 0, gives and self.mine == 1)
        return [number for number, given in enumerate(some) if given]

    def one_giving(self, giving: list[int]) -> int:
        """The one group that gives tiles; raises `TileError` if there are none or two."""
        if len(giving) != 1:
            text = "ranks of both groups of the inter-communicator give tiles" if giving else "no rank gives a tile"
            raise TileError(f"{text}: the source's ranks do, all in one group, and the others give None")
        return giving[0]

    def seated(self, layout: Layout, number: int) -> Layout:
        """A layout on the ranks of a group as one on the merged communicator.

        Raises `PlanError` unless all device ids are ranks of the group.
        """
        ranks = self.ranks[number]
        if layout.mesh.size > len(ranks) or max(layout.mesh.devices) >= len(ranks):
            raise PlanError(
                f"{layout} is on {layout.mesh!r}, but its group of the inter-communicator has {len(ranks)} ranks; give "
                f"a mesh whose device ids are ranks of that group"
            )
        return _shifted(layout, ranks.start)


@lru_cache(maxsize=256)
def _shifted(layout: Layout, first: int) -> Layout:
    ids = [first + device for device in layout.mesh.devices]
    return replace(layout, mesh=Mesh(layout.mesh.axes, device_ids=ids))


def groups_of(comm: MPI.Intercomm, limit: float) -> MergedGroups:
    """The groups of an inter-communicator, merged in the first call, which all ranks of both make together.

    Raises `RankError` if some rank does not make that call within `limit` seconds; a later call may still merge them.
    """
    if comm == MPI.COMM_NULL:
        raise RankError("the inter-communicator is MPI.COMM_NULL, or has been freed; give one that is alive")
    groups = cast("MergedGroups | None", comm.Get_attr(_KEY))
    if groups is None:
        groups = _merged(comm, limit)
        comm.Set_attr(_KEY, groups)
    return groups


def _merged(comm: MPI.Intercomm, limit: float) -> MergedGroups:
    duplicate = _met(comm, limit)
    merged = duplicate.Merge()
    duplicate.Free()
    first = merged.rank == comm.rank
    here, there = comm.size, comm.remote_size
    ranks = (range(here), range(here, here + there)) if first else (range(there), range(there, here + there))
    return MergedGroups(merged, ranks, 0 if first else 1)


def _met(comm: MPI.Intercomm, limit: float) -> MPI.Intercomm:
    """A duplicate, once all ranks have asked for it. MPI cannot cancel a request for one: a later call waits for it."""
    pending = cast("tuple[MPI.Intercomm, MPI.Request] | None", comm.Get_attr(_PENDING))
    if pending is None:
        pending = comm.Idup()
        comm.Set_attr(_PENDING, pending)
    duplicate, request = pending
    if not until(request.Test, time.monotonic() + limit):
        raise RankError(
            f"rank {comm.rank} of its group: the other ranks of both groups of the inter-communicator did not make "
            f"their first call within {limit:g} s; if they are only slow, give a higher limit, else look for a rank "
            f"that died or did not make the call"
        )
    comm.Delete_attr(_PENDING)
    return duplicate


def _forget(_: MPI.Comm, __: int, groups: MergedGroups) -> None:
    groups.comm.Free()


_KEY = MPI.Comm.Create_keyval(delete_fn=_forget)
_PENDING = MPI.Comm.Create_keyval()
