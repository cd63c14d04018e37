"""`move`: moves tiles of plain arrays by a `reshard.Move`: through a view, in part, or to another dtype."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI
from numpy.typing import NDArray

from reshard.mpi.redistribution import TreeMove
from reshard.runtime.account import Account
from reshard.runtime.on_mpi.team import TIME_LIMIT, Comm
from reshard.synth import Network
from reshard.types.move import Move

Array = NDArray[Any]


def move(
    tile: Any,
    move: Move,
    comm: Comm | MPI.Intercomm,
    *,
    out: Array | None = None,
    budget: int | str | None = None,
    network: Network | str | None = None,
    scale: Any = None,
    limit: float = TIME_LIMIT,
    memory: Account | None = None,
) -> Array | None:
    """This rank's tile of the move's target; every rank of `comm` calls it with its tile of the source.

    Source and target may be on any ranks, as in `redistribute`: a rank outside the source's mesh gives None, and one
    outside the target's gets None.

    `out` receives the result; a move that fills part of its target needs it, and leaves the rest of it as it is.
    `scale` is what a cast divides by where it narrows, and multiplies by where it widens: a number, or an array that
    broadcasts to this rank's wider tile. The other options are those of `redistribute`. The result has memory of its
    own, also where nothing has to move: a budget bounds source, target and buffers, as that of `rs.plan_tree` does.

    Before any data move, the ranks compare their requests. If these differ, or if an argument of one rank is wrong, all
    ranks raise the same error: `AgreementError`, `TileError`, `LayoutError`, `PlanError` or `BudgetError`.

    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from reshard import Layout, Mesh
    >>> mesh = Mesh(x=1)
    >>> fused, split = (Layout.parse(text, mesh) for text in ("s64[6]", "s64[2, 3]"))
    >>> move(np.arange(6), Move(fused, split, view="(h two) -> two h", two=2), MPI.COMM_SELF).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    given, by = ({"": each} if each is not None else None for each in (out, scale))
    tree = TreeMove({"": tile}, {"": move}, None, budget, network, memory, True, None, None, given, by)
    return tree.run(comm, limit)[""]
