"""`redistribute` and `move`: this rank's part of a move that all ranks of a communicator make together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

from mpi4py import MPI
from numpy.typing import NDArray

from reshard.mpi.arguments import MoveArguments
from reshard.plans.manifest import Version
from reshard.runtime.account import Account
from reshard.runtime.on_mpi.repeated import find_prepared
from reshard.runtime.on_mpi.team import TIME_LIMIT, Comm
from reshard.synth import Network
from reshard.types import Layout
from reshard.types.move import Move

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


class TreeOptions(TypedDict, total=False):
    """The options of `redistribute` for a tree of tiles."""

    out: Mapping[str, Any] | None
    budget: int | str | None
    network: Network | str | None
    limit: float
    memory: Account | None
    padded: bool
    scale: Mapping[str, Any] | None
    version: Version | Mapping[str, Version]
    verify: str | None


@overload
def redistribute(
    tile: Mapping[str, Any], source: Any, target: Any, comm: Comm | MPI.Intercomm, **options: Unpack[TreeOptions]
) -> dict[str, Any]: ...


@overload
def redistribute(
    tile: Any,
    source: Layout,
    target: Layout,
    comm: Comm | MPI.Intercomm,
    *,
    relabel: Literal[False] = False,
    **options: Unpack[RedistributeOptions],
) -> Array | Any: ...


@overload
def redistribute(
    tile: Any,
    source: Layout,
    target: Layout,
    comm: Comm | MPI.Intercomm,
    *,
    relabel: Literal[True],
    **options: Unpack[RedistributeOptions],
) -> tuple[Array | Any, Layout]: ...


def redistribute(
    tile: Any,
    source: Any,
    target: Any,
    comm: Comm | MPI.Intercomm,
    *,
    out: Any = None,
    budget: int | str | None = None,
    network: Network | str | None = None,
    donate: bool = False,
    relabel: bool = False,
    limit: float = TIME_LIMIT,
    memory: Account | None = None,
    cuda_aware: bool | None = None,
    padded: bool = True,
    version: Version | Mapping[str, Version] = None,
    verify: str | None = None,
    scale: Any = None,
) -> Array | Any:
    """This rank's tile of the target layout; every rank of `comm` calls it with its own tile of the source layout.

    The tile has the shape `source.tile_shape` or, without padding, `source.tile_shape_of(rank)`, in any strides. The
    result is `out`, which must not overlap the tile, or a new C-ordered array. If the layouts are equal, a C-ordered
    tile is returned unchanged.

    Source and target may be on any ranks of `comm`: the device ids of their meshes are ranks. A rank outside the
    source's mesh gives None, and one outside the target's gets None and gives no `out`; its result has the dtype of the
    layout. Between the two groups of an inter-communicator, the source's ids are ranks of the group that gives tiles,
    the target's those of the other group. Where source and target have one set of as many devices as there are ranks,
    ids may be any: rank r then has the r-th smallest.

    - `budget` (bytes, or text such as "64MiB") bounds what lives on each rank, tile and result included; `network` as
      in `reshard.plan`, or else the one that the environment variable `RESHARD_NETWORK` names.
    - `donate` allows overwriting the tile if the budget requires it; the result then lies in the tile's memory.
    - `relabel` assigns the target's tiles to the ranks so that the most elements stay where they are; the result is
      then a pair, with the layout that says which rank has which tile.
    - `limit` is how many seconds the call may take to plan (`PlanError` on all ranks) and to wait for other ranks
      (`RankError`).
    - `memory` is filled with the bytes that this call received and held live.
    - `padded=False` returns the tile without padding, a view of the one with it; `out` then has no padding either. Not
      for uneven layouts on a GPU.
    - `cuda_aware` says whether MPI accepts pointers to GPU memory; if it is None, the environment or MPI itself does.

    A dict of tiles, nested or not, moves as one, with dicts of layouts, or one layout for all; `plan_tree` plans it and
    `budget` bounds all of it together. Equal moves of small tiles share their messages; their results share memory.
    In place of a source layout it may have a `reshard.Move`, with its own target. The ranks compare names, order,
    shapes, layouts, views and the `version` of the values before anything moves, and with `verify="hash"` the values
    before and after, except sums; scaled values are refused then. `out` is a dict of arrays for all results, or for
    those of which a move fills a part, `scale` one of the scales of casts, as in `move`. `donate` and `relabel` are for
    one tile.

    A tile in the memory of a GPU (torch, cupy, jax: DLPack or `__cuda_array_interface__` on CUDA) gives a result of
    the same library on the same GPU; `out` must be such an array, too, and all ranks must give one, or none. It moves
    through host memory, where the budget counts its copies, or directly between GPUs, see docs/mpi.md.

    Before any data move, the ranks compare their requests. If these differ, or if an argument of one rank is wrong, all
    ranks raise the same error: `AgreementError`, `TileError`, `LayoutError`, `PlanError` or `BudgetError`.

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
    arguments = MoveArguments(
        tile, source, target, comm, limit, out, budget, network, donate, relabel, memory, cuda_aware, padded, version,
        verify, scale,
    )  # fmt: skip
    prepared = find_prepared(comm, (source, target)) if arguments.is_plain else None
    return arguments.run() if prepared is None else arguments.run_again(prepared)


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
    arguments = MoveArguments(
        {"": tile}, {"": move}, None, comm, limit, given, budget, network, memory=memory, scale=by
    )
    return arguments.run()[""]
