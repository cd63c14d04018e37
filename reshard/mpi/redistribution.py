"""`redistribute`: moves plain arrays, one tile per rank, from one layout to another."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, Self, TypedDict, Unpack, cast, overload

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from reshard.errors import AgreementError, LayoutError, PlanError, ReshardError, TileError, quoted
from reshard.lower.to_mpi import seat_of
from reshard.lower.views import CastTiles
from reshard.mpi.gpu_tiles import redistribute_on_gpu
from reshard.mpi.relabel import relabelled
from reshard.mpi.tiles import (
    check_filled,
    check_given_tile,
    check_layout,
    check_nothing,
    check_options,
    check_out,
    check_source,
    check_true_out,
    dtype_without_tile,
    true_part,
)
from reshard.plans.manifest import Manifest, Version, checked_version
from reshard.plans.plan import Plan, TreePlan
from reshard.plans.plan_data import MOST_DEPTH, key_text
from reshard.runtime.account import Account, begin_account
from reshard.runtime.numpy_dtypes import numpy_dtype
from reshard.runtime.on_mpi.collective import MANIFEST_END, collective
from reshard.runtime.on_mpi.copies.strided_copy import copy, raw
from reshard.runtime.on_mpi.global_array import checksum, total
from reshard.runtime.on_mpi.gpu.device_arrays import on_gpu
from reshard.runtime.on_mpi.launches import Launch, list_launches
from reshard.runtime.on_mpi.prepare import MoveRequest, Prepared, check_seats, prepared
from reshard.runtime.on_mpi.repeated import call_again, keep, kept, seconds
from reshard.runtime.on_mpi.run_launches import GivenTiles, check_launches, run_launches
from reshard.runtime.on_mpi.run_plan import rank_plan
from reshard.runtime.on_mpi.team import TIME_LIMIT, Comm, Facts, MergedGroups, Team, Watch, groups_of
from reshard.runtime.on_mpi.transports import move
from reshard.runtime.on_mpi.window_tiles import ABSENT, NOWHERE, Posted, WindowTile, absent, located, where
from reshard.runtime.platform_network import named, network_text
from reshard.synth import Network, plan_tree
from reshard.synth.planner import bytes_of, network_of
from reshard.types import Layout
from reshard.types.move import Move
from reshard.types.whole import checked_flag

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


# The nested dicts that `redistribute` takes, by the names of their arrays: tiles, layouts, moves, results.


Tree = Mapping[str, Any]
Ends = tuple[Layout, Layout]
Leaf = Move | Ends


def ends_of(leaf: Leaf) -> Ends:
    """The layouts of an array before and after its move."""
    return (leaf.source, leaf.target) if isinstance(leaf, Move) else leaf


def distinct(ends: Mapping[str, Ends]) -> list[tuple[str, Ends]]:
    """The different ends, each with the first array that has them."""
    first: dict[tuple[int, int], str] = {}
    for name, (source, target) in ends.items():
        first.setdefault((id(source), id(target)), name)
    return [(name, ends[name]) for name in first.values()]


class NamedErrors:
    """A context whose errors name the array that is being looked at."""

    name = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ReshardError) and self.name:
            raise type(error)(f"{self.name}: {error}") from None


def leaves_of(tree: Tree, path: str, depth: int = 0) -> list[tuple[str, Any]]:
    """The tiles by name, as `types.tree_names` names them; only dicts are nested, since lists may be tiles."""
    if depth >= MOST_DEPTH:
        raise PlanError(f"the tree of tiles is nested more than {MOST_DEPTH} deep at {quoted(path)}")
    leaves: list[tuple[str, Any]] = []
    for key, below in tree.items():
        name = f"{path}{key_text(key, [path] if path else [])}"
        below_it = leaves_of(cast("Tree", below), f"{name}.", depth + 1) if isinstance(below, Mapping) else None
        leaves += [(name, below)] if below_it is None else below_it
    names = [name for name, _ in leaves]
    if len(set(names)) < len(names):
        raise PlanError(f"two tiles of the tree have one name, of {quoted(names)}; give each its own")
    return leaves


def unflattened(tree: Tree, moved: Mapping[str, Array | None], path: str) -> dict[Any, Any]:
    """A tree of the same structure with what has moved, by name."""
    return {
        key: unflattened(cast("Tree", below), moved, f"{path}{key}.")
        if isinstance(below, Mapping)
        else moved[f"{path}{key}"]
        for key, below in tree.items()
    }


def mapped(tree: object, leaf: Callable[[Any], Any]) -> Any:
    """A nested dict with each of its leaves changed."""
    if not isinstance(tree, Mapping):
        return leaf(tree)
    return {key: mapped(below, leaf) for key, below in cast("Mapping[Any, Any]", tree).items()}


def moves_of(source: object, target: object, flat: Mapping[str, Any]) -> dict[str, Leaf]:
    """What each tile is to do: the move that is given in place of its source, or its two layouts."""
    sources = _of_names(source, flat, "source", (Layout, Move), "a Layout or a Move; read a layout with Layout.parse")
    pairs = [name for name, given in sources.items() if not isinstance(given, Move)]
    if target is None:
        _check_moves(sources, pairs)
        return sources
    targets = _of_names(target, pairs, "target", (Layout,), "a Layout; read it with Layout.parse")
    return {name: (given, targets[name]) if name in targets else given for name, given in sources.items()}


def _check_moves(sources: Mapping[str, object], layouts: Sequence[str]) -> None:
    """Raises `LayoutError` if some tiles have a layout, to which a target belongs, in place of a move."""
    if layouts:
        name = layouts[0]
        raise LayoutError(
            f"{_of('source', name)} is the layout {sources[name]}, and no target is given; give Move(source, target), "
            f"or a source and a target"
        )


def _of(what: str, name: str) -> str:
    """How an error calls the argument for a tile: the only tile of a call has no name."""
    return f"the {what} of {name!r}" if name else f"the {what}"


def _of_names(given: object, names: Collection[str], what: str, kinds: tuple[type, ...], wanted: str) -> dict[str, Any]:
    """What is given for each array, by its name: its own, or the one for all."""
    if isinstance(given, kinds):
        return dict.fromkeys(names, given)
    if not isinstance(given, Mapping):
        raise LayoutError(f"the {what} of a tree of tiles is a {type(given).__name__}; give a dict of layouts")
    each = dict(leaves_of(cast("Tree", given), ""))
    wrong = [*(name for name in names if name not in each), *(name for name in each if name not in names)]
    if wrong:
        raise LayoutError(f"the {what} and the tiles have different names: {quoted(wrong[:4])} are in one of them only")
    other = next((name for name, one in each.items() if not isinstance(one, kinds)), None)
    if other is not None:
        raise LayoutError(f"{_of(what, other)} is {quoted(each[other])}, not {wanted}")
    return {name: each[name] for name in names}


def flat_or_none(given: object, what: str) -> dict[str, Any]:
    """What is given for some arrays of a tree, by name; nothing if it is None."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TileError(f"the {what} of a tree of tiles is a {type(given).__name__}; give a dict, by the arrays' names")
    return dict(leaves_of(cast("Tree", given), ""))


# `redistribute` for a tree of tiles: one agreement on names, layouts and versions, and few messages.


@dataclass(frozen=True, eq=False)
class TreeMove:
    """The arguments of one rank's call for a tree of tiles, as they were given."""

    tiles: Tree
    source: object
    target: object
    budget: int | str | None
    network: Network | str | None
    memory: Account | None
    padded: bool
    version: Version | Mapping[str, Version]
    verify: str | None
    out: object = None
    scale: object = None
    of_one: Mapping[str, object] = field(default_factory=dict[str, object])
    """The options that are for one tile, and whether each is given."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "network", named(self.network))

    def run(self, comm: Comm | MPI.Intercomm, limit: float) -> dict[str, Any]:
        """Moves all tiles; returns those of the targets, None where this rank has none, in the tree's structure."""
        if not isinstance(comm, MPI.Intercomm):
            return self._run(comm, limit, self._prepare)
        groups, giving = groups_of(comm, seconds(limit)), list[int]()

        def ahead(team: Team, watch: Watch) -> None:
            giving.extend(groups.giving(team, watch, self._gives))

        def prepare(team: Team) -> _ReadyTree:
            return self._seated(groups, groups.one_giving(giving))._prepare(team)

        return self._run(groups.comm, limit, prepare, ahead)

    @property
    def _gives(self) -> bool:
        """Whether this rank gives a tile; what is not a tree gives none, and is refused later."""
        with suppress(ReshardError):
            return any(tile is not None for _, tile in leaves_of(self.tiles, ""))
        return False

    def _seated(self, groups: MergedGroups, giving: int) -> TreeMove:
        """The same on the merged communicator of two groups."""

        def seated(leaf: Any, group: int) -> Any:
            if isinstance(leaf, Move):
                ends = groups.seated(leaf.source, group), groups.seated(leaf.target, 1 - group)
                return Move(*ends, leaf.view, cast=leaf.cast)
            return groups.seated(leaf, group) if isinstance(leaf, Layout) else leaf

        source = mapped(self.source, lambda leaf: seated(leaf, giving))
        return replace(self, source=source, target=mapped(self.target, lambda leaf: seated(leaf, 1 - giving)))

    def _run(
        self,
        comm: Comm,
        limit: float,
        prepare: Callable[[Team], _ReadyTree],
        ahead: Callable[[Team, Watch], None] | None = None,
    ) -> dict[str, Any]:
        def request(given: _ReadyTree) -> str:
            network = None if self.network is None else network_text(self.network)
            options = {"budget": self.budget, "network": network, "verify": self.verify}
            options["scale"] = ", ".join(sorted(given.arrays.scales))
            chosen = {name: value for name, value in options.items() if value}
            return f"{given.planned.manifest}{MANIFEST_END}{chosen or ''}"

        with collective(comm, limit, prepare, request, _ReadyTree.posting, ahead) as (team, watch, given):
            before = given.sums(given.arrays.tiles, team, after=False)
            moved = {**given.arrays.tiles, **self._moved(team, watch, given)}
            team.settle(watch)
            after = given.sums(moved, team, after=True)
            sums = total(team, watch, before), total(team, watch, after)
        _compare(given, *sums)  # All ranks have the same sums, so all raise, and the communicator stays usable.
        plans = given.planned.tree.plans
        results = {name: _result(tile, plans[name], comm, self.padded) for name, tile in moved.items()}
        return cast("dict[str, Any]", unflattened(self.tiles, results, ""))

    def _moved(self, team: Team, watch: Watch, given: _ReadyTree) -> dict[str, Array]:
        sources = [plan.source for plan in given.planned.tree.plans.values()]
        held = sum(end.tile_bytes for end in sources if seat_of(end.mesh, team.rank, team.size) is not None)
        given.memory.take(team.rank, held, "uint8")
        team.pool.limit(max(0, given.planned.tree.peak_bytes - held))
        arrays = given.arrays
        if not team.into:  # This rank has no result, and no rank that has one gave an array for it.
            arrays = arrays._replace(outs={name: arrays.outs[name] for name in given.filled})
        parts = given.planned.single_parts if team.into else given.planned.parts
        moved = run_launches(team, watch, parts, arrays, given.memory)
        return {**_copied(given, arrays, team), **moved}

    def _prepare(self, team: Team) -> _ReadyTree:
        self._check_options()
        flat = dict(leaves_of(self.tiles, ""))
        leaves = moves_of(self.source, self.target, flat)
        ends = {name: ends_of(leaf) for name, leaf in leaves.items()}
        with NamedErrors() as at:
            for at.name, pair in distinct(ends):
                check_seats(*pair, team.size)
        budget = bytes_of(self.budget)
        if not isinstance(self.network, str):
            network_of(self.network)
        planned = _planned(tuple(leaves.items()), _frozen(self.version), budget, self.network, team.rank, team.facts)
        tiles: dict[str, Array] = {}
        with NamedErrors() as at:
            for at.name, (source, _) in ends.items():
                tiles[at.name] = check_source(flat[at.name], source, team.rank, team.size, self.budget)
        filled = [name for name, leaf in leaves.items() if isinstance(leaf, Move) and leaf.view.into]
        outs, gave = self._outs(ends, filled, tiles, team)
        scales = _scales(flat_or_none(self.scale, "scale"), planned.tree.plans, team)
        if scales and self.verify is not None:
            raise PlanError(f"verify compares no scaled values: move {quoted(sorted(scales)[:4])} in a call without it")
        memory = begin_account("uint8", self.memory)
        memory.cast("uint8")
        return _ReadyTree(planned, GivenTiles(tiles, outs, scales), filled, gave, memory, self.verify is not None)

    def _check_options(self) -> None:
        given = [name for name, value in self.of_one.items() if checked_flag(value, name)]
        if given:
            raise PlanError(f"{', '.join(given)}: for one tile, and a tree of {len(self.tiles)} is given; leave it out")
        if not (self.verify is None or (isinstance(self.verify, str) and self.verify == "hash")):  # pyright: ignore
            raise PlanError(f'verify {quoted(self.verify)}: give "hash", which compares the values, or None')
        check_options(False, False, self.memory, None, self.padded)

    def _outs(
        self, ends: Mapping[str, Ends], filled: Sequence[str], tiles: Mapping[str, Array], team: Team
    ) -> tuple[dict[str, Array], int]:
        """The arrays for results, empty where this rank has none, and what to post of them: whether all are given."""
        given = flat_or_none(self.out, "out")
        results = {name for name, (_, end) in ends.items() if seat_of(end.mesh, team.rank, team.size) is not None}
        rest = [name for name in ends if name in results and name not in filled]
        gave = any(given.get(name) is not None for name in rest)
        _check_given(given, ends, [name for name in filled if name in results], rest if gave else [])
        outs: dict[str, Array] = {}
        with NamedErrors() as at:
            for at.name, (_, end) in ends.items():
                name = at.name
                if gave or name in filled or name not in results:
                    outs[name] = check_filled(given.get(name), end, tiles[name], team.rank, team.size)
        return outs, (int(gave) if rest else ABSENT)


def _check_given(
    given: Mapping[str, Any], names: Collection[str], filled: Collection[str], others: Collection[str]
) -> None:
    """Refuses arrays for results that are not in the tree, and missing ones."""
    unknown = [name for name in given if name not in names]
    if unknown:
        raise TileError(f"out: {quoted(unknown[:4])} are not arrays of the tree")
    missing = [name for name in filled if given.get(name) is None]
    if missing:
        raise TileError(f"{quoted(missing[:4])} fill part of their targets: give their tiles with out=")
    without = [name for name in others if given.get(name) is None]
    if without:
        raise TileError(f"out: {quoted(without[:4])} have none; give one for all, or none")


@dataclass(frozen=True, eq=False)
class _Planned:
    """What all ranks work out alike; `parts` are those of a call that gives no `out` for all results."""

    manifest: str
    tree: TreePlan
    parts: Sequence[Launch]
    facts: Facts

    @cached_property
    def single_parts(self) -> Sequence[Launch]:
        """The parts of a call that gives arrays for all results."""
        return list_launches(self.tree, self.facts, apart=True)


class _ReadyTree(NamedTuple):
    """One rank's part of a tree: what all agree on, this rank's arrays, and whether it gave `out` for all results."""

    planned: _Planned
    arrays: GivenTiles
    filled: list[str]
    gave: int
    memory: Account
    verified: bool

    def posting(self) -> Posted:
        """What the other ranks of the node can read."""
        return NOWHERE._replace(given=self.gave)

    def sums(self, tiles: Mapping[str, Array], team: Team, *, after: bool) -> list[int]:
        """This rank's parts of the sums of all arrays that are compared, none unless they are verified."""
        plans = self.planned.tree.plans.items() if self.verified else ()
        return [_sum_of(plan, tiles[name], team, after) for name, plan in plans if _comparable(plan)]


def _sum_of(plan: Plan, tile: Array, team: Team, after: bool) -> int:
    """This rank's part of an array's sum, of its values in the dtype that they have after the move."""
    layout = plan.target if after else plan.source
    seat = seat_of(layout.mesh, team.rank, team.size)
    if seat is None:
        return 0
    return checksum(layout, seat, tile.astype(numpy_dtype(plan.target.dtype), copy=False), plan.view, after=after)


def _copied(given: _ReadyTree, arrays: GivenTiles, team: Team) -> dict[str, Array]:
    """The arrays for results of tiles that stay where they are, filled with these."""
    still = [name for name, plan in given.planned.tree.plans.items() if not plan.steps and name in arrays.outs]
    for name in still:
        given.memory.take(team.rank, arrays.outs[name].nbytes, "uint8")
        copy(raw(arrays.outs[name]), raw(arrays.tiles[name]))
    return {name: arrays.outs[name] for name in still}


def _comparable(plan: Plan) -> bool:
    """Whether an array has its values before the move: a sum that is not finished has none."""
    return not plan.source.partial and not plan.target.partial


def _compare(given: _ReadyTree, before: list[int], after: list[int]) -> None:
    """Raises `AgreementError` on all ranks if the values of an array are not what they were."""
    names = [name for name, plan in given.planned.tree.plans.items() if _comparable(plan)]
    wrong = [name for name, one, other in zip(names, before, after, strict=False) if one != other]
    if wrong:
        raise AgreementError(
            f"the values of {quoted(wrong[:4])} are not what they were before the move, of {len(names)} arrays compared"
        )


def _result(tile: Array, plan: Plan, comm: Comm, padded: bool) -> Array | None:
    seat = seat_of(plan.target.mesh, comm.rank, comm.size)
    if seat is None:
        return None
    return tile if padded else true_part(tile, plan.target, seat)


def _scales(given: dict[str, Any], plans: Mapping[str, Plan], team: Team) -> dict[str, Any]:
    """The scales of casts, checked against the tiles that are cast."""
    unknown = [name for name in given if name not in plans]
    if unknown:
        raise TileError(f"scale: {quoted(unknown[:4])} are not arrays of the tree")
    with NamedErrors() as at:
        for at.name, scale in given.items():
            _check_scale(plans[at.name], scale, team)
    return {name: scale for name, scale in given.items() if scale is not None}


def _check_scale(plan: Plan, scale: Any, team: Team) -> None:
    if scale is None:
        return
    itemsize = numpy_dtype(plan.source.dtype).itemsize
    steps = rank_plan(plan, team.rank, team.size, itemsize).steps
    casts = [step.before for step in steps if isinstance(step.run, CastTiles)]
    if not casts:
        raise TileError(f"scale {quoted(scale)}: {plan.source} to {plan.target} casts nothing; leave it out")
    try:
        np.broadcast_to(np.asarray(scale, "float64"), casts[0] if math.prod(casts[0]) else np.shape(scale))
    except (ValueError, TypeError) as error:
        raise TileError(
            f"scale {quoted(scale)} does not fit the tile of shape {casts[0]} that is cast: {error}; give a number, or "
            f"an array that broadcasts to the tile"
        ) from None


def _frozen(version: object) -> object:
    """The version of all arrays, or of each by its name, as a cache takes it; raises `PlanError` for anything else."""
    if not isinstance(version, Mapping):
        return checked_version(version, "all arrays")
    each = cast("Mapping[object, object]", version)
    return tuple(sorted((str(name), checked_version(one, quoted(name))) for name, one in each.items()))


@lru_cache(maxsize=64)
def _planned(
    leaves: tuple[tuple[str, Leaf], ...], version: Any, budget: Any, network: Any, rank: int, facts: Facts
) -> _Planned:
    versions = dict(cast("Mapping[str, Version]", version)) if isinstance(version, tuple) else version
    manifest = Manifest.of(dict(leaves), versions).to_json()
    tree = plan_tree(dict(leaves), budget, network)
    parts = list_launches(tree, facts)
    check_launches(parts, rank, len(facts.nodes))
    return _Planned(manifest, tree, parts, facts)
