"""`redistribute`: moves plain arrays, one tile per rank, from one layout to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, cast, overload

from mpi4py import MPI
from numpy.typing import NDArray

from reshard.errors import PlanError, TileError
from reshard.lower.to_mpi import seat_of
from reshard.mpi.gpu_tiles import redistribute_on_gpu
from reshard.mpi.relabel import relabelled
from reshard.mpi.tiles import (
    check_given_tile,
    check_layout,
    check_nothing,
    check_options,
    check_out,
    check_true_out,
    dtype_without_tile,
    true_part,
)
from reshard.mpi.trees import TreeMove
from reshard.runtime.account import Account
from reshard.runtime.on_mpi.collective import collective
from reshard.runtime.on_mpi.gpu.device_arrays import on_gpu
from reshard.runtime.on_mpi.intercomm import MergedGroups, groups_of
from reshard.runtime.on_mpi.move import move
from reshard.runtime.on_mpi.prepare import MoveRequest, Prepared, check_seats, prepared
from reshard.runtime.on_mpi.repeated import call_again, keep, kept, seconds
from reshard.runtime.on_mpi.team import TIME_LIMIT, Comm, Team, Watch
from reshard.runtime.on_mpi.window_tiles import Posted, WindowTile, absent, located, where
from reshard.synth import Network
from reshard.types import Layout
from reshard.types.manifest import Version

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
    if isinstance(tile, Mapping):
        of_one = {"donate": donate, "relabel": relabel, "cuda_aware": cuda_aware is not None}
        tiles = cast("Mapping[str, Any]", tile)
        return TreeMove(
            tiles, source, target, budget=budget, network=network, memory=memory, padded=padded, version=version,
            verify=verify, out=out, scale=scale, of_one=of_one,
        ).run(comm, limit)  # fmt: skip
    of_trees = version is not None or verify is not None or scale is not None
    call = TileMove(tile, source, target, out, budget, network, donate, relabel, memory, cuda_aware, padded, of_trees)
    again = kept(comm, (source, target)) if call.is_plain else None
    if again is not None:
        allowed = seconds(limit)

        def general(*_: object) -> Any:
            return call.run(comm, limit)

        return call_again(again, tile, out, allowed, memory, call.is_usual and allowed is limit, general)
    return call.run(comm, limit)


@dataclass(frozen=True, eq=False)
class TileMove:
    """The arguments of one rank's call of `redistribute`, as they were given."""

    tile: Any
    source: Layout
    target: Layout
    out: Any = None
    budget: int | str | None = None
    network: Network | str | None = None
    donate: bool = False
    relabel: bool = False
    memory: Account | None = None
    cuda_aware: bool | None = None
    padded: bool = True
    of_trees: bool = False
    repeats: bool = False
    """Whether it is the move of a handle, which all ranks prepare to call again."""

    @property
    def is_plain(self) -> bool:
        """Whether it is a request for two layouts without options, the kind that is kept for the next call. The ranks
        agree on this, or on an error.
        """
        options = self.budget is self.network is None and self.donate is self.relabel is False and not self.of_trees
        return options and type(self.source) is type(self.target) is Layout

    @property
    def is_usual(self) -> bool:
        """Whether the options that ranks may give by themselves are the usual ones."""
        memory = self.memory is None or type(self.memory) is Account
        return self.cuda_aware is None and type(self.padded) is bool and memory

    def run(self, comm: Comm | MPI.Intercomm, limit: float) -> Any:
        """What the caller gets, in the general way: the result and, with `relabel`, its layout."""
        if isinstance(comm, MPI.Intercomm):
            return self.between_groups(comm, limit)
        result, end = self.on_gpu(comm, limit) if on_gpu(self.tile) else self.on_host(comm, limit)
        return (result, end) if self.relabel else result

    def on_host(self, comm: Comm, limit: float) -> tuple[Any, Layout]:
        """Moves a tile in host memory; returns the result, None outside the target's mesh, and its layout."""
        name = "prepared: " if self.repeats else ""
        return self._result(comm, *move_together(comm, limit, self._prepare, name, self.memory, keeping=self._keep))

    def _keep(self, team: Team, watch: Watch, given: PreparedMove) -> None:
        """Keeps what the next call of this request needs."""
        if self.is_plain:
            keep(team, watch, given.request, given.ready, self.repeats)

    def between_groups(self, comm: MPI.Intercomm, limit: float) -> Any:
        """Moves a tile between the groups of an inter-communicator; returns the result, None in the giving group."""
        groups, giving = groups_of(comm, seconds(limit)), list[int]()

        def ahead(team: Team, watch: Watch) -> None:
            giving.extend(groups.giving(team, watch, self.tile is not None))

        def prepare(team: Team) -> PreparedMove:
            return self._seated(groups, giving)._prepare(team)

        return self._result(groups.comm, *move_together(groups.comm, limit, prepare, "", self.memory, ahead))[0]

    def _seated(self, groups: MergedGroups, giving: list[int]) -> TileMove:
        """The same move on the merged communicator."""
        group = groups.one_giving(giving)
        if on_gpu(self.tile) or self.relabel:
            raise TileError("between the groups of an inter-communicator: give tiles in host memory, and no relabel")
        source, target = check_layout(self.source, "source"), check_layout(self.target, "target")
        return replace(self, source=groups.seated(source, group), target=groups.seated(target, 1 - group))

    def _result(self, comm: Comm, held: WindowTile, end: Layout) -> tuple[Any, Layout]:
        """What the caller gets of the tile that has moved."""
        seat = seat_of(end.mesh, comm.rank, comm.size)
        if seat is None:
            return None, end
        result = held.tile if self.padded else true_part(held.tile, end, seat)
        if self._is_copied(end):
            self.out[...], result = result, self.out
        return result, end

    def on_gpu(self, comm: Comm, limit: float) -> tuple[Any, Layout]:
        """Moves a tile in a GPU's memory; returns the result and its layout."""
        return redistribute_on_gpu(comm, self._request, self.tile, self.out, limit, self.memory, self.cuda_aware)

    def _request(self) -> MoveRequest:
        if self.of_trees:
            raise PlanError(
                "version, verify and scale are for a tree of tiles, and one tile is given; give a dict of one"
            )
        check_options(self.donate, self.relabel, self.memory, self.cuda_aware, self.padded)
        check_layout(self.source, "source")
        check_layout(self.target, "target")
        end = relabelled(self.source, self.target) if self.relabel else self.target
        if on_gpu(self.tile) and not self.padded and not end.even:
            raise TileError(f"padded=False: a tile of {end} on a GPU has padding; give padded=True, and cut it there")
        into = self.out is not None and not self._is_copied(end)
        return MoveRequest(self.source, end, self.budget, self.network, bool(self.donate), into)

    def _is_copied(self, end: Layout) -> bool:
        """Whether `out` has another shape than the tile that moves."""
        return self.out is not None and not self.padded and not end.even

    def _prepare(self, team: Team) -> PreparedMove:
        wanted = self._request()
        check_seats(self.source, wanted.target, team.size)
        held = self._held(team)
        ready = prepared(team, wanted, held.tile)
        return PreparedMove(wanted, ready, held, self._into(team, wanted.target, held.tile))

    def _held(self, team: Team) -> WindowTile:
        """This rank's tile, which must be there if the source has one for it, and only then."""
        seat = seat_of(self.source.mesh, team.rank, team.size)
        if seat is None:
            check_nothing(self.tile, "tile", self.source, team.rank)
            return absent(self.source, dtype_without_tile(self.source, self.out))
        return located(team, check_given_tile(self.tile, self.source, seat, self.budget))

    def _into(self, team: Team, target: Layout, tile: Array) -> WindowTile | None:
        """What the result is written to: None for new memory."""
        seat = seat_of(target.mesh, team.rank, team.size)
        if seat is None:
            check_nothing(self.out, "out", target, team.rank)
            return absent(target, tile.dtype)
        if self._is_copied(target):
            check_true_out(self.out, target, seat, tile, self.budget)
            return None
        return None if self.out is None else located(team, check_out(self.out, target, tile))


class PreparedMove(NamedTuple):
    """One rank's part of a move: the request, what it works out from it, its tile, and `out`."""

    request: MoveRequest
    ready: Prepared
    held: WindowTile
    into: WindowTile | None


Keeping = Callable[[Team, Watch, PreparedMove], object]


def move_together(
    comm: Comm,
    limit: float,
    prepare: Callable[[Team], PreparedMove],
    name: str,
    memory: Account | None,
    ahead: Callable[[Team, Watch], None] | None = None,
    keeping: Keeping | None = None,
) -> tuple[WindowTile, Layout]:
    """Prepares a move on each rank, agrees on it with the others under a `name`, and moves the tile.

    Returns the result and its layout. `ahead` is as in `collective`; `keeping` is called once the tile has moved.
    """

    def request(given: PreparedMove) -> str:
        return f"{name}{given.request}"

    def posting(given: PreparedMove) -> Posted:
        return where(given.held, given.into)

    with collective(comm, limit, prepare, request, posting, ahead) as (team, watch, given):
        result = move(team, watch, given.ready, given.request, given.held, given.into, memory)
        if keeping is not None:
            keeping(team, watch, given)
    return result, given.request.target
