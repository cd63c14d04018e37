"""`redistribute`: plain arrays, one tile a rank, from one layout to another."""

from __future__ import annotations

from typing import Any, Literal, overload

from numpy.typing import NDArray

from reshard.mpi.relabel import relabelled
from reshard.mpi.tiles import checked, checked_out
from reshard.runtime.memory import Memory
from reshard.runtime.on_mpi.moves import Held, Prepared, Request, begin, move, prepared, where
from reshard.runtime.on_mpi.team import TIME_LIMIT, Comm, team_of
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
    memory: Memory | None = None,
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
    memory: Memory | None = None,
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
    memory: Memory | None = None,
) -> Array | tuple[Array, Layout]:
    """This rank's tile of the target layout; every rank of the communicator calls it with its tile of the source.

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

    def prepare() -> tuple[Prepared, Held]:
        given = checked(tile, source, "tile")
        if out is not None:
            checked_out(out, target, given)
        return prepared(team, request, given), Held(given, team.windows.under(given))

    watch, (ready, held) = begin(team, limit, str(request), prepare, lambda found: where(found[1]))
    found = move(team, watch, ready, request, held, out, memory).tile
    return (found, target) if relabel else found
