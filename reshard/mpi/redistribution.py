"""`redistribute` and `move`: this rank's part of a move that all ranks of a communicator make together.

MoveArguments      what the caller gave: a tile, on the host or a GPU, or a dict of tiles
ReadyCall          what this rank prepared from it: its request as text, what it posts to its node, what it runs
run_together       all ranks agree on their requests, run, and finish, or all raise the same error
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, cast, overload

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from reshard.errors import (
    AgreementError,
    LayoutError,
    NamedErrors,
    PlanError,
    ReshardError,
    TileError,
    name_arguments,
    quoted,
)
from reshard.geometry.remesh import one_set
from reshard.lower.to_mpi import device_of, devices_by_id, seat_of
from reshard.mpi.sparse_rows import SparseRows, count_nonzeros, is_sparse, lay_arrays, share_rows
from reshard.mpi.tile_checks import (
    check_filled,
    check_given_tile,
    check_layout,
    check_nothing,
    check_options,
    check_out,
    check_source,
    check_tile,
    check_true_out,
    dtype_without_tile,
    read_ends,
    relabelled,
    true_part,
)
from reshard.plans.manifest import Update, Version, checked_version
from reshard.plans.plan import Plan
from reshard.plans.plan_data import MOST_DEPTH, spell_key
from reshard.runtime.account import Account, begin_account
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_mpi.collective import ReadyCall, gather_contents, run_together
from reshard.runtime.on_mpi.copies.strided_copy import copy_view, view_as_words
from reshard.runtime.on_mpi.global_array import add_sums, sum_tile
from reshard.runtime.on_mpi.gpu import (
    GpuArray,
    check_makes,
    describe_array,
    host_like,
    is_on_gpu,
    is_writable,
    move_on_gpu,
    prepare_device_tiles,
    takes_pointers,
)
from reshard.runtime.on_mpi.launches import GivenTiles, PreparedTree, clear_new, prepare_tree, run_launches
from reshard.runtime.on_mpi.prepare import Leaf, Request, check_seats, ends_of, prepare_tile, read_options
from reshard.runtime.on_mpi.repeated import DEFERRED, TILES, PreparedMove, find_prepared, keep_prepared, limit_or_usual
from reshard.runtime.on_mpi.run_plan import list_wide_shapes, rank_plan
from reshard.runtime.on_mpi.team import TIME_LIMIT, Comm, MergedGroups, Team, Watch, groups_of
from reshard.runtime.on_mpi.window_tiles import ABSENT, NOWHERE, WindowTile, absent_tile, locate_tile, post_tile
from reshard.runtime.on_numpy import hold_tiles
from reshard.synth import Network
from reshard.types import Layout
from reshard.types.move import Move
from reshard.types.whole import checked_flag

Array = NDArray[Any]
Tree = Mapping[str, Any]
Versions = Version | Update | Mapping[str, Version | Update]
"""The version of all arrays of a call, or of each by its name, or the two between which an update leads."""


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
    have: Array | None
    have_layout: Layout | None
    changed: Any
    version: Versions
    have_version: Version


class TreeOptions(TypedDict, total=False):
    """The options of `redistribute` for a tree of tiles."""

    out: Mapping[str, Any] | None
    budget: int | str | None
    network: Network | str | None
    limit: float
    memory: Account | None
    padded: bool
    scale: Mapping[str, Any] | None
    version: Versions
    have_version: Version | Mapping[str, Version]
    verify: str | None
    sources: Mapping[str, str] | None
    targets: Mapping[str, str] | None


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


@name_arguments
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
    version: Versions = None,
    verify: str | None = None,
    scale: Any = None,
    have: Array | None = None,
    have_layout: Layout | None = None,
    changed: Any = None,
    have_version: Version | Mapping[str, Version] = None,
    sources: Mapping[str, str] | None = None,
    targets: Mapping[str, str] | None = None,
) -> Array | Any:
    """This rank's tile of the target layout; every rank of `comm` calls it with its own tile of the source layout.

    Source and target are layouts in any form that `reshard.as_layout` reads; what one leaves out, the other one says.
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
    - `have` is what this rank holds of the array already, in `have_layout`, by default the target's; `changed` are the
      elements that are stale in it, as in `reshard.plan`, and the same on all ranks, as is `have_layout`. Only the
      difference moves. A tile of the target is brought up to date where it is, and returned; one of another layout is
      copied into a new tile. A rank outside the target's mesh gives no `have`. With `version=reshard.Update(base,
      version)`, ranks whose `have_version` is not the base refuse, and so do all (`VersionError`).
    - `padded=False` returns the tile without padding, a view of the one with it; `out` then has no padding either. Not
      for uneven layouts on a GPU.
    - `cuda_aware` says whether MPI accepts pointers to GPU memory; if it is None, the environment or MPI itself does.

    A dict of tiles, nested or not, moves as one, with dicts of layouts, or one layout for all; `plan_tree` plans it and
    `budget` bounds all of it together. Equal moves of small tiles share their messages; their results share memory.
    In place of a source layout it may have a `reshard.Move`, with its own target. The ranks compare names, order,
    shapes, layouts, views and the `version` of the values before anything moves, and with `verify="hash"` the values
    before and after, except sums; scaled values are refused then. `out` is a dict of arrays for all results, or for
    those of which moves leave something out, `scale` one of the scales of casts, as in `move`. `donate` and `relabel`
    are for one tile.

    `sources` and `targets` say, by the names of moves, which array a move reads and which it fills, as in
    `reshard.plan_tree`: moves may read one array, and fill parts of one. `tile` then has the arrays that are read,
    `out` and the result, a dict, those that are filled. An array that equal moves make under two names is one.

    A sparse matrix of this rank's rows (scipy's CSR, jax's BCSR and BCOO, or any class with `indptr`, `indices` and
    `data` that is made of these) gives one of the target's rows, where both layouts split dim 0 alone. Its three arrays
    move in one plan: nonzeros and counts of rows that a rank lacks, nothing else. A rank that has no rows gives a
    matrix of 0 rows, not None, and gets one. `donate`, `out`, `have` and the like are not for it.

    A tile in the memory of a GPU (torch, cupy, jax: DLPack or `__cuda_array_interface__` on CUDA) gives a result of
    the same library on the same GPU; `out` must be such an array, too, and all ranks must give one, or none. It moves
    through host memory, where the budget counts its copies, or directly between GPUs, see docs/explanation/mpi.md.

    Before any data move, the ranks compare their requests. If these differ, or if an argument of one rank is wrong, all
    ranks raise the same error: `AgreementError`, `TileError`, `LayoutError`, `PlanError` or `BudgetError`.

    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from reshard import Mesh
    >>> comm = MPI.COMM_WORLD
    >>> mesh = Mesh(x=comm.size)
    >>> rows = Layout.from_spec([["x"], []], mesh, (16, 16), "float64")
    >>> columns = Layout.from_spec([[], ["x"]], mesh, (16, 16), "float64")
    >>> redistribute(np.zeros(rows.tile_shape), rows, columns, comm).shape == columns.tile_shape
    True
    """
    if type(source) is not Layout or type(target) is not Layout:
        source, target = read_ends(source, target)
    arguments = MoveArguments(
        tile, source, target, comm, limit, out, budget, network, donate, relabel, memory, cuda_aware, padded, version,
        verify, scale, have=have, have_layout=have_layout, changed=changed, have_version=have_version,
        sources=sources, targets=targets,
    )  # fmt: skip
    prepared = find_prepared(comm, (TILES, source, target)) if arguments.is_plain else None
    return arguments.run() if prepared is None else arguments.run_again(prepared)


@name_arguments
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
    have: Array | None = None,
) -> Array | None:
    """This rank's tile of the move's target; every rank of `comm` calls it with its tile of the source.

    Source and target may be on any ranks, as in `redistribute`: a rank outside the source's mesh gives None, and one
    outside the target's gets None.

    `out` receives the result; a move that fills part of its target needs it, and leaves the rest of it as it is.
    `scale` is what a cast divides by where it narrows, and multiplies by where it widens: a number, or an array that
    broadcasts to this rank's wider tile. `have` is this rank's tile of `move.have`, what ranks hold already; one of the
    target is brought up to date where it is, and returned. The other options are those of `redistribute`. The result
    has memory of its own, also where nothing has to move: a budget bounds source, target and buffers, as that of
    `rs.plan_tree` does.

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
    # Ranks that hold nothing take the same way as the others; the tile that is held may also be given as `out`.
    held = None if out is not None and have is None else getattr(move, "have", None)
    arguments = MoveArguments(
        {"": tile}, {"": move}, None, comm, limit, given, budget, network,
        memory=memory, scale=by, have=have, have_layout=held,
    )  # fmt: skip
    return arguments.run()[""]


class MoveArguments(NamedTuple):
    """One rank's call as it was given: a tile, or a nested dict of tiles, and the options."""

    tiles: Any
    source: Any
    target: Any
    comm: Comm | MPI.Intercomm
    limit: float = TIME_LIMIT
    out: Any = None
    budget: int | str | None = None
    network: Network | str | None = None
    donate: bool = False
    relabel: bool = False
    memory: Account | None = None
    cuda_aware: bool | None = None
    padded: bool = True
    version: Versions = None
    verify: str | None = None
    scale: Any = None
    have: Any = None
    have_layout: Any = None
    changed: Any = None
    have_version: Version | Mapping[str, Version] = None
    sources: Any = None
    targets: Any = None
    handle: bool = False
    """Whether it is a call of a handle, which all ranks prepare to make again at once."""

    @property
    def is_plain(self) -> bool:
        """Whether it is a request for two layouts without options, the kind that is kept for the next call. The ranks
        agree on this, or on an error.
        """
        options = self.budget is self.network is None and self.donate is self.relabel is False
        of_one = self.version is self.verify is self.scale is self.have is self.have_layout is self.changed is None
        of_one = of_one and self.sources is self.targets is None
        return options and of_one and type(self.source) is type(self.target) is Layout and not self._is_tree

    @property
    def _is_tree(self) -> bool:
        return isinstance(self.tiles, Mapping) and not self.handle  # A handle is of one array.

    def run(self) -> Any:
        """What the caller gets: each rank prepares its part, all agree, and all move."""
        comm = self.comm
        if is_sparse(self.tiles) and not self.handle:
            return self._run_sparse()
        if not isinstance(comm, MPI.Intercomm):
            return run_together(comm, self.limit, self._prepare)
        groups, giving = groups_of(comm, limit_or_usual(self.limit)), list[int]()

        def ahead(team: Team, watch: Watch) -> None:
            gives = False
            with suppress(ReshardError):  # What is not a tree gives no tile, and is refused later.
                tiles = [tile for _, tile in leaves_of(self.tiles, "")] if self._is_tree else [self.tiles]
                gives = any(tile is not None for tile in tiles)
            giving.extend(groups.giving(team, watch, gives))

        def prepare(team: Team) -> ReadyCall:
            return self._seated(groups, groups.one_giving(giving))._prepare(team)

        return run_together(groups.comm, self.limit, prepare, ahead)

    def _run_sparse(self) -> Any:
        """This rank's rows of a sparse matrix: its counts, columns and values move as one tree."""
        free = {"tiles", "source", "target", "comm"}
        free |= {"limit", "budget", "network", "memory", "padded", "version", "verify"}
        usual = MoveArguments(*[None] * 4)._asdict()  # pyright: ignore[reportArgumentType]
        wrong = [name for name in usual if name not in free and getattr(self, name) is not usual[name]]

        def prepare(team: Team) -> ReadyCall:
            if wrong:
                raise PlanError(
                    f"{', '.join(wrong)}: not for a sparse matrix, whose arrays are made anew; leave it out"
                )
            source, target = check_layout(self.source, "source"), check_layout(self.target, "target")
            shared, seat = share_rows(source, target), seat_of(source.mesh, team.rank, team.size)
            check_seats(source, target, team.size)
            device = None if seat is None else devices_by_id(source.mesh)[seat]
            count = 0 if device is None else source.tile_shape_of(device)[0]
            rows = SparseRows.read(self.tiles, (count, source.shape[1]))
            told = count_nonzeros(rows, shared.of_rank(source, team.rank, team.size), shared)

            def run(team: Team, watch: Watch) -> Any:
                before, after = lay_arrays(source, target, shared, gather_contents(team, watch, told))
                return rows, rows.list_tiles(before, device), before, after

            return ReadyCall(f"rows of a {rows.kind.__name__}, {source!r} -> {target!r}", NOWHERE, run)

        rows, tiles, before, after = run_together(cast("Any", self.comm), self.limit, prepare)
        return rows.rebuild(self._replace(tiles=tiles, source=before, target=after, padded=False).run())

    def run_again(self, prepared: PreparedMove) -> Any:
        """What the caller gets, by what was agreed on in an earlier call; all make the call anew if some rank defers.

        The turn is held until the call has been made anew, so that this, too, sees threads that overlap.
        """
        limit = limit_or_usual(self.limit)
        release, same = prepared.hold(limit)
        try:
            # Whether the options that ranks may give by themselves are the usual ones.
            usual = self.cuda_aware is None and type(self.padded) is bool and limit is self.limit
            usual = usual and (self.memory is None or type(self.memory) is Account)
            result = prepared.run(self.tiles, self.out, limit, self.memory, same and usual)
            return self.run() if result is DEFERRED else result
        finally:
            release()

    def _seated(self, groups: MergedGroups, giving: int) -> MoveArguments:
        """The same call on the merged communicator of two groups."""
        if not self._is_tree:
            check_layout(self.source, "source")
            check_layout(self.target, "target")
            if is_on_gpu(self.tiles) or self.relabel:
                raise TileError(
                    "between the groups of an inter-communicator: give tiles in host memory, and no relabel"
                )

        def seated(leaf: Any, group: int) -> Any:
            if isinstance(leaf, Move):
                ends = groups.seated(leaf.source, group), groups.seated(leaf.target, 1 - group)
                have = None if leaf.have is None else groups.seated(leaf.have, 1 - group)
                return Move(*ends, leaf.view, cast=leaf.cast, have=have, changed=leaf.changed)
            return groups.seated(leaf, group) if isinstance(leaf, Layout) else leaf

        source = map_leaves(self.source, lambda _, leaf: seated(leaf, giving))
        target = map_leaves(self.target, lambda _, leaf: seated(leaf, 1 - giving))
        return self._replace(source=source, target=target, have_layout=seated(self.have_layout, 1 - giving))

    def _prepare(self, team: Team) -> ReadyCall:
        """Checks what this rank gave, and plans. Everything that can fail for one rank's arguments is done here: from
        the agreement on, all ranks move.
        """
        if not (self.have is self.have_layout is self.changed is None):
            return self._prepare_update(team)
        if self._is_tree:
            return self._prepare_tree(team)
        if not (self.version is self.verify is self.scale is self.sources is self.targets is None):
            raise PlanError(
                "version, verify, scale, sources and targets are for a tree of tiles, and one tile is given; give a "
                "dict of one"
            )
        check_options(self.donate, self.relabel, self.memory, self.cuda_aware, self.padded)
        source = check_layout(self.source, "source")
        end = check_layout(self.target, "target")
        if self.relabel:
            end = relabelled(source, end)
        # An `out` without padding has another shape than the tile that moves, and is filled when that has moved.
        is_copied = self.out is not None and not self.padded and not end.even
        options = read_options(self.budget, self.network, bool(self.donate), team)
        request = Request.of_tile(source, end, options, self.out is not None and not is_copied)
        if is_on_gpu(self.tiles):
            if not self.padded and not end.even:
                raise TileError(
                    f"padded=False: a tile of {end} on a GPU has padding; give padded=True, and cut it there"
                )
            return self._prepare_on_gpu(team, request)
        check_seats(source, end, team.size)
        held, into = self._held(team), None
        launch = prepare_tile(team, request, held.tile)
        seat = seat_of(end.mesh, team.rank, team.size)
        if seat is None:
            check_nothing(self.out, "out", end, team.rank)
            into = absent_tile(end, held.tile.dtype)
        elif is_copied:
            check_true_out(self.out, end, seat, held.tile, self.budget)
        elif self.out is not None:
            into = locate_tile(team, check_out(self.out, end, held.tile))

        def run(team: Team, watch: Watch) -> WindowTile:
            given = GivenTiles({"": held}, {} if into is None else {"": into})
            moved = run_launches(team, watch, (launch,), given, self.memory)[""]
            if self.is_plain and isinstance(self.comm, MPI.Intracomm):
                keep_prepared(team, watch, request, launch, now=self.handle)
            return moved

        def finish(moved: WindowTile) -> Any:
            result = None
            if seat is not None:
                result = moved.tile if self.padded else true_part(moved.tile, end, seat)
                if is_copied:
                    self.out[...], result = result, self.out
            return (result, end) if self.relabel else result

        # What is kept is kept by all ranks or none, so they agree on that as well: `donate=np.False_` is not plain.
        text = f"{'prepared: ' if self.handle else ''}{request}{'' if self.is_plain else ', with options'}"
        return ReadyCall(text, post_tile(held, into), run, finish)

    def _held(self, team: Team) -> WindowTile:
        """This rank's tile, which must be there if the source has one for it, and only then."""
        seat = seat_of(self.source.mesh, team.rank, team.size)
        if seat is None:
            check_nothing(self.tiles, "tile", self.source, team.rank)
            return absent_tile(self.source, dtype_without_tile(self.source, self.out))
        return locate_tile(team, check_given_tile(self.tiles, self.source, seat, self.budget))

    def _prepare_on_gpu(self, team: Team, request: Request) -> ReadyCall:
        """The call that makes the target's tile on the tile's GPU. Its copies on the host lie in the node's arena if
        that has room.
        """
        source, target = request.source, request.target
        if source.mesh.size != team.size or not one_set(source.mesh, target.mesh):
            raise TileError(
                f"tiles on GPUs move only among all {team.size} ranks of a communicator, not from {source.mesh!r} to "
                f"{target.mesh!r}; copy the tile to the host, or give a communicator of the ranks that have one"
            )
        # The host's result is still the call's own, so no message is held back from it, as from an `out` on the host.
        options = request.options._replace(donate=request.options.donate or self.out is not None)
        on_host = request._replace(options=options, shared=True)
        on = describe_array(self.tiles, "tile")
        like = check_tile(host_like(on), source, "tile")
        into = None if self.out is None else check_out_on_gpu(self.out, target, on)
        if self.out is None:
            check_makes(self.tiles)
        ready = prepare_tile(team, on_host, like)
        pointers = (takes_pointers() if self.cuda_aware is None else self.cuda_aware) and is_writable(self.tiles)
        tiles = prepare_device_tiles(on, into, ready, on_host, team.rank, pointers)
        text = f"{request}, tiles on GPUs, their pointers {'' if pointers else 'not '}given to MPI"

        def run(team: Team, watch: Watch) -> Any:
            moved = move_on_gpu(team, watch, ready, tiles, self.memory)
            return (moved, target) if self.relabel else moved

        # Where only some ranks give an `out`, all learn it now: found out inside the move, it would break the team.
        return ReadyCall(text, NOWHERE._replace(given=int(self.out is not None)), run)

    def _prepare_update(self, team: Team) -> ReadyCall:
        """The call that moves what ranks lack or hold stale: a tree of one move, into the tile that this rank holds."""
        one: object = leaf.get("") if isinstance(leaf := cast("Any", self.source), dict) else None  # pyright: ignore
        given = one if isinstance(one, Move) else None
        if self._is_tree and given is None:
            raise PlanError(
                "have=, have_layout= and changed= are for one tile; in a tree, give reshard.Move(..., changed=) in "
                "place of its layouts, and the tile that is held with out="
            )
        options = {"out": self.out is not None, "donate": self.donate, "relabel": self.relabel}
        wrong = [name for name, value in {**options, "cuda_aware": self.cuda_aware is not None}.items() if value]
        if wrong or is_on_gpu(self.tiles) or is_on_gpu(self.have):
            what = ", ".join(wrong) or "tiles on a GPU"
            raise PlanError(f"{what}: not beside have= and changed=, which bring a tile on the host up to date")
        if given is None:
            if self.have_layout is self.changed is None:
                raise PlanError(
                    "have= says what is held: say with changed= what is stale in it, or give its have_layout="
                )
            ends = check_layout(cast("Any", self).source, "source"), check_layout(self.target, "target")
            given = Move(*ends, have=self.have_layout, changed=self.changed)
        if given.have is None:
            raise PlanError(f"have= is given, and {given} counts on nothing; give Move(..., have=) or changed=")
        out = self._spread_held(given, given.have, team)
        tree = self._replace(tiles=self.tiles if self._is_tree else {"": self.tiles}, source={"": given}, target=None)
        outs = None if out is None else {"": out}
        ready = tree._replace(out=outs, have=None, have_layout=None, changed=None)._prepare_tree(team)
        if self._is_tree or (finish := ready.finish) is None:
            return ready

        def finish_one(moved: Any) -> Any:
            return finish(moved)[""]

        return ready._replace(finish=finish_one)

    def _spread_held(self, move: Move, layout: Layout, team: Team) -> Array | None:
        """This rank's tile of the target, with what it holds of it; None if it has none."""
        target, size = move.target, team.size
        if seat_of(target.mesh, team.rank, size) is None:
            check_nothing(self.have, "have", target, team.rank)
            return None
        if layout == target:
            if self.have is None:
                raise TileError(
                    f"rank {team.rank} has a tile of {target}, which have= or changed= say is held; give it"
                )
            return self.have
        device = device_of((target.mesh,), team.rank, size)
        if device not in layout.mesh.devices:
            check_nothing(self.have, "have", layout, team.rank)
            held = {}
        else:
            held = {device: check_source(self.have, layout, team.rank, size, self.budget)}
        return hold_tiles(layout, target, held, device).into[device]

    def _prepare_tree(self, team: Team) -> ReadyCall:
        """Checks and plans a dict of tiles."""
        of_one = {"donate": self.donate, "relabel": self.relabel, "cuda_aware": self.cuda_aware is not None}
        wrong = [name for name, value in of_one.items() if checked_flag(value, name)]
        if wrong:
            raise PlanError(f"{', '.join(wrong)}: for one tile, and a tree of {len(self.tiles)} is given; leave it out")
        if not (self.verify is None or (isinstance(self.verify, str) and self.verify == "hash")):  # pyright: ignore
            raise PlanError(f'verify {quoted(self.verify)}: give "hash", which compares the values, or None')
        check_options(False, False, self.memory, None, self.padded)
        flat = dict(leaves_of(self.tiles, ""))
        # Moves have names of their own where arrays do.
        source, by_name = cast("object", self.source), self._shares and isinstance(self.source, Mapping)
        named = flat_or_none(source, "source") if by_name else flat
        leaves = moves_of(source, self.target, named)
        arrays = tuple(
            _freeze_names(what, each) for what, each in (("sources", self.sources), ("targets", self.targets))
        )
        reads = _name_sources(leaves, dict(arrays[0]), flat)
        ends = {name: ends_of(leaf) for name, leaf in leaves.items()}
        first: dict[tuple[int, int], str] = {}  # Of hundreds of arrays, most have layouts that others have, too.
        for name, (source, target) in ends.items():
            first.setdefault((id(source), id(target)), name)
        with NamedErrors() as at:
            for at.name in first.values():
                check_seats(*ends[at.name], team.size)
            for at.name in leaves if self.have_version is not None else ():
                update, had = (
                    cast("Any", each).get(at.name) if isinstance(each, Mapping) else each
                    for each in (self.version, self.have_version)
                )
                if not isinstance(update, Update):
                    raise PlanError(
                        f"have_version={quoted(had)} is compared with version=reshard.Update(base, version)"
                    )
                update.check_held(checked_version(had, "what is held"))
        options = read_options(self.budget, self.network, team=team)
        version = _freeze_version(self.version)
        request = Request(tuple(leaves.items()), options, version=version, verify=self.verify, arrays=arrays)
        prepared = prepare_tree(request, team.rank, team.facts)
        tree = prepared.plan
        checked: dict[str, Array] = {}
        with NamedErrors() as at:
            for name, (source, _) in ends.items():
                at.name = reads[name]
                if at.name not in checked:
                    checked[at.name] = check_source(flat[at.name], source, team.rank, team.size, options.budget)
        tiles = {name: checked[source] for name, source in tree.source_of.items()}
        outs, gave = self._outs(prepared, tiles, team)
        scales = _check_scales(flat_or_none(self.scale, "scale"), tree.plans, team)
        if scales and self.verify is not None:
            raise PlanError(f"verify compares no scaled values: move {quoted(sorted(scales)[:4])} in a call without it")
        memory = begin_account("uint8", self.memory)
        memory.cast("uint8")
        held = {name: WindowTile(tile) for name, tile in tiles.items()}
        filled = set(tree.filled)
        # A target that is there from the start is in the account from the start.
        placed = {target: WindowTile(out, counted=target in filled) for target, out in outs.items()}
        parts = {n: target for n, target in tree.target_of.items() if tree.plans[n].fills and target not in filled}
        given = GivenTiles(held, placed, scales, parts)
        text = prepared.text + (f", scale={', '.join(sorted(scales))}" if scales else "")
        run = partial(self._move_tree, prepared, given, memory)
        return ReadyCall(text, NOWHERE._replace(given=gave), run, partial(self._results, prepared, team))

    @property
    def _shares(self) -> bool:
        """Whether moves may read and fill arrays of other names than their own."""
        return not (self.sources is self.targets is None)

    def _outs(self, prepared: PreparedTree, tiles: Mapping[str, Array], team: Team) -> tuple[dict[str, Array], int]:
        """The arrays for results, by name, empty where this rank has none, and what to post of them: whether all are
        given."""
        given, tree = flat_or_none(self.out, "out"), prepared.plan
        ends = {**tree.target_layouts}
        ends |= {target: ends[twin] for target, twin in prepared.tied.items()}
        filled = dict.fromkeys(tree.filled)
        # Looked up for each array, of which there may be thousands, so no list.
        results = {name: None for name, end in ends.items() if seat_of(end.mesh, team.rank, team.size) is not None}
        rest = [name for name in results if name not in filled]
        gave = any(given.get(name) is not None for name in rest)
        if unknown := [name for name in given if name not in ends]:
            raise TileError(f"out: {quoted(unknown[:4])} are not arrays of the tree")
        if missing := [name for name in filled if name in results and given.get(name) is None]:
            raise TileError(f"{quoted(missing[:4])} leave something of their targets: give their tiles with out=")
        if gave and (without := [name for name in rest if given.get(name) is None]):
            raise TileError(f"out: {quoted(without[:4])} have none; give one for all, or none")
        outs: dict[str, Array] = {}
        with NamedErrors() as at:
            for at.name, end in ends.items():
                name = at.name
                if gave or name in filled or name not in results:
                    for move in tree.parts[prepared.tied.get(name, name)]:
                        outs[name] = check_filled(given.get(name), end, tiles[move], team.rank, team.size)
        return outs, (int(gave) if rest else ABSENT)

    def _move_tree(
        self, prepared: PreparedTree, given: GivenTiles, memory: Account, team: Team, watch: Watch
    ) -> tuple[dict[str, WindowTile], list[int], list[int]]:
        """What each target has become, and the sums of the arrays that are verified, before and after."""
        tree, outs = prepared.plan, given.outs
        plans = tree.plans
        verified = {name: plan for name, plan in plans.items() if self.verify is not None and _is_comparable(plan)}
        before = [_sum_of(plan, given.tiles[name].tile, team, False) for name, plan in verified.items()]
        there = [*tree.source_layouts.values(), *(tree.target_layouts[name] for name in tree.filled)]
        held = sum(end.tile_bytes for end in there if seat_of(end.mesh, team.rank, team.size) is not None)
        memory.take(team.rank, held, "uint8")
        team.pool.limit(max(0, tree.peak_bytes - held))
        # Tiles stay live for the whole call, so buffers may take what the plan promises beyond them.
        if not team.into:  # This rank has no result, and no rank that has one gave an array for it.
            outs = {target: outs[target] for target in tree.filled}
        given = given._replace(outs={name: outs[of] for name, of in tree.target_of.items() if of in outs})
        made = dict(given.tiles)
        launches = prepared.apart if team.into else prepared.launches
        made |= run_launches(team, watch, launches, given, memory)
        # What stays where it is, is copied for the caller last: buffers are gone by then, and an `out` that is the
        # memory of another array's tile has been read.
        for name, plan in plans.items():
            if not plan.steps and name in given.outs:
                out = made[name] = given.outs[name]
                memory.take(team.rank, out.tile.nbytes, "uint8")
                copy_view(view_as_words(out.tile), view_as_words(given.tiles[name].tile))
        # Inside a node, others write into this rank's results until they are done.
        team.settle(watch)
        moved = {target: made[name] for name, target in tree.target_of.items()}
        for target in dict.fromkeys(given.parts.values()) if team.into else ():
            clear_new(team, tree.target_layouts[target], moved[target].tile)
        for target, twin in prepared.tied.items():
            moved[target] = moved[twin]
            if target in outs:
                out = moved[target] = outs[target]
                memory.take(team.rank, out.tile.nbytes, "uint8")
                copy_view(view_as_words(out.tile), view_as_words(moved[twin].tile))
        after = [_sum_of(plan, made[name].tile, team, True) for name, plan in verified.items()]
        return moved, add_sums(team, watch, before), add_sums(team, watch, after)

    def _results(
        self, prepared: PreparedTree, team: Team, moved: tuple[dict[str, WindowTile], list[int], list[int]]
    ) -> dict[str, Any]:
        """The tiles of the targets, None where this rank has none, in the tree's structure if they have its names."""
        tiles, *sums = moved
        tree = prepared.plan
        compared = [name for name, plan in tree.plans.items() if _is_comparable(plan)]
        wrong = [name for name, one, other in zip(compared, *sums, strict=False) if one != other]
        if wrong:  # All ranks have the same sums, so all raise, and the communicator stays usable.
            raise AgreementError(
                f"the values of {quoted(wrong[:4])} are not what they were before the move, of {len(compared)} arrays "
                f"compared"
            )
        results: dict[str, Array | None] = {}
        for name, held in tiles.items():
            end = tree.target_layouts[prepared.tied.get(name, name)]
            seat = seat_of(end.mesh, team.rank, team.size)
            whole = held.tile if self.padded or seat is None else true_part(held.tile, end, seat)
            results[name] = None if seat is None else whole
        return results if self._shares else map_leaves(self.tiles, lambda name, _: results[name])


def check_out_on_gpu(out: Any, layout: Layout, tile: GpuArray) -> GpuArray:
    """The array `out` if the result for this tile can be written to it; else raises `TileError`."""
    if not is_on_gpu(out) or not is_writable(out):
        raise TileError(
            f"out is a {type(out).__name__}, the tile lies on GPU {tile.device}; give an array there that can be "
            f"written to"
        )
    array = describe_array(out, "out")
    check_tile(host_like(array), layout, "out")
    if array.device != tile.device:
        raise TileError(f"out is on GPU {array.device}, the tile on GPU {tile.device}; give one on the same GPU")
    if array.dtype != tile.dtype:
        raise TileError(f"out is {array.dtype}, the tile {tile.dtype}; give one dtype")
    if array.overlaps(tile):
        raise TileError("out overlaps the tile; give memory of its own, or donate=True and no out")
    return array


def _sum_of(plan: Plan, tile: Array, team: Team, after: bool) -> int:
    """This rank's part of an array's sum, of its values in the dtype that they have after the move."""
    layout = plan.target if after else plan.source
    seat = seat_of(layout.mesh, team.rank, team.size)
    if seat is None:
        return 0
    return sum_tile(layout, seat, tile.astype(numpy_dtype(plan.target.dtype), copy=False), plan.view, after=after)


def _is_comparable(plan: Plan) -> bool:
    """Whether an array has its values before the move: a sum that is not finished has none."""
    return not plan.source.partial and not plan.target.partial


def _check_scales(given: dict[str, Any], plans: Mapping[str, Plan], team: Team) -> dict[str, Any]:
    """The scales of casts, checked against the tiles that are cast."""
    if unknown := [name for name in given if name not in plans]:
        raise TileError(f"scale: {quoted(unknown[:4])} are not arrays of the tree")
    scales = {name: scale for name, scale in given.items() if scale is not None}
    with NamedErrors() as at:
        for at.name, scale in scales.items():
            plan = plans[at.name]
            casts = list_wide_shapes(rank_plan(plan, team.rank, team.size, numpy_dtype(plan.source.dtype).itemsize))
            if not casts:
                raise TileError(f"scale {quoted(scale)}: {plan.source} to {plan.target} casts nothing; leave it out")
            try:
                np.broadcast_to(np.asarray(scale, "float64"), casts[0] if math.prod(casts[0]) else np.shape(scale))
            except (ValueError, TypeError) as error:
                raise TileError(
                    f"scale {quoted(scale)} does not fit the tile of shape {casts[0]} that is cast: {error}; give a "
                    f"number, or an array that broadcasts to the tile"
                ) from None
    return scales


def _freeze_names(what: str, given: object) -> tuple[tuple[str, str], ...]:
    """The arrays that moves read or fill, by the moves' names, as a cache takes them."""
    named = cast("Mapping[object, object]", given if isinstance(given, Mapping) else {})
    if not isinstance(given, Mapping | None) or not all(isinstance(e, str) for pair in named.items() for e in pair):
        raise PlanError(f"{what} {quoted(cast('object', given))}: give a dict of move names and names of arrays")
    return cast("tuple[tuple[str, str], ...]", tuple(named.items()))


def _name_sources(leaves: Mapping[str, Leaf], named: Mapping[str, str], tiles: Mapping[str, Any]) -> dict[str, str]:
    """The tile that each move reads, by name; refuses tiles that none reads, and moves without one."""
    reads = {name: named.get(name, name) for name in leaves}
    read = set(reads.values())
    wrong = [*(source for source in read if source not in tiles), *(name for name in tiles if name not in read)]
    if wrong:
        raise TileError(
            f"{quoted(wrong[:4])} are read by moves and have no tile, or have one that no move reads; give a tile for "
            f"each array that is read"
        )
    return reads


def _freeze_version(version: object) -> Version | Update | tuple[tuple[str, Version | Update], ...]:
    """The version of all arrays, or of each by its name, as a cache takes it; raises `PlanError` for anything else."""

    def checked(one: object, whose: str) -> Version | Update:
        return (
            Update(*(checked_version(each, whose) for each in one))
            if isinstance(one, Update)
            else checked_version(one, whose)
        )

    if not isinstance(version, Mapping):
        return checked(version, "all arrays")
    each = cast("Mapping[object, object]", version)
    return tuple((str(name), checked(each[name], quoted(name))) for name in sorted(each, key=str))


# The nested dicts that `redistribute` takes, by the names of their arrays: tiles, layouts, moves, results.


def leaves_of(tree: Tree, path: str, depth: int = 0) -> list[tuple[str, Any]]:
    """The tiles by name, as `plans.plan_data` names them; only dicts are nested, since lists may be tiles."""
    if depth >= MOST_DEPTH:
        raise PlanError(f"the tree of tiles is nested more than {MOST_DEPTH} deep at {quoted(path)}")
    leaves: list[tuple[str, Any]] = []
    for key, below in tree.items():
        name = f"{path}{spell_key(key, [path] if path else [])}"
        below_it = leaves_of(cast("Tree", below), f"{name}.", depth + 1) if isinstance(below, Mapping) else None
        leaves += [(name, below)] if below_it is None else below_it
    names = [name for name, _ in leaves]
    if len(set(names)) < len(names):
        raise PlanError(f"two tiles of the tree have one name, of {quoted(names)}; give each its own")
    return leaves


def map_leaves(tree: object, leaf: Callable[[str, Any], Any], path: str = "") -> Any:
    """A nested dict with each of its leaves changed, by its name and value."""
    if not isinstance(tree, Mapping):
        return leaf(path.removesuffix("."), tree)
    changed: dict[Any, Any] = {}
    for key, below in cast("Mapping[Any, Any]", tree).items():
        # A call for each of hundreds of leaves would take a tenth of a small move.
        nested = isinstance(below, Mapping)
        changed[key] = map_leaves(cast("Tree", below), leaf, f"{path}{key}.") if nested else leaf(f"{path}{key}", below)
    return changed


def moves_of(source: object, target: object, flat: Mapping[str, Any]) -> dict[str, Leaf]:
    """What each tile is to do: the move that is given in place of its source, or its two layouts."""
    sources = _give_each(source, flat, "source", (Layout, Move), "a Layout or a Move; read a layout with Layout.parse")
    pairs = [name for name, given in sources.items() if not isinstance(given, Move)]
    if target is None:
        if pairs:
            name = pairs[0]
            raise LayoutError(
                f"{_name_argument('source', name)} is the layout {sources[name]}, and no target is given; give "
                f"Move(source, target), or a source and a target"
            )
        return sources
    targets = _give_each(target, pairs, "target", (Layout,), "a Layout; read it with Layout.parse", sources)
    return {name: (given, targets[name]) if name in targets else given for name, given in sources.items()}


def _name_argument(what: str, name: str) -> str:
    """How an error calls the argument for a tile: the only tile of a call has no name."""
    return f"the {what} of {name!r}" if name else f"the {what}"


def _give_each(
    given: object, names: Collection[str], what: str, kinds: tuple[type, ...], wanted: str, sources: Tree | None = None
) -> dict[str, Any]:
    """What is given for each array, by its name: its own, or the one for all. Targets in other forms than layouts take
    what they lack from their sources.
    """
    if isinstance(given, kinds):
        return dict.fromkeys(names, given)
    if sources is not None and (isinstance(given, str) or hasattr(given, "partitions")):
        given = dict.fromkeys(names, given)
    if not isinstance(given, Mapping):
        raise LayoutError(f"the {what} of a tree of tiles is a {type(given).__name__}; give a dict of layouts")
    each = dict(leaves_of(cast("Tree", given), ""))
    wrong = [*(name for name in names if name not in each), *(name for name in each if name not in names)]
    if wrong:
        raise LayoutError(f"the {what} and the tiles have different names: {quoted(wrong[:4])} are in one of them only")
    if sources is not None:
        each = {n: one if isinstance(one, kinds) else read_ends(sources[n], one)[1] for n, one in each.items()}
    other = next((name for name, one in each.items() if not isinstance(one, kinds)), None)
    if other is not None:
        raise LayoutError(f"{_name_argument(what, other)} is {quoted(each[other])}, not {wanted}")
    return {name: each[name] for name in names}


def flat_or_none(given: object, what: str) -> dict[str, Any]:
    """What is given for some arrays of a tree, by name; nothing if it is None."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TileError(f"the {what} of a tree of tiles is a {type(given).__name__}; give a dict, by the arrays' names")
    return dict(leaves_of(cast("Tree", given), ""))
