"""`DistArray`: a layout, this rank's tile and the communicator, with the moves between layouts as methods."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex, cast

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike, NDArray

from reshard.errors import AgreementError, LayoutError, PlanError, TileError, name_arguments, quoted, shortened
from reshard.lower.to_mpi import seat_of
from reshard.mpi import files
from reshard.mpi.gathers import ArrayInTiles, RowGather, make_fetch, want_halo, want_rows
from reshard.mpi.numpy_protocol.numpy_methods import NumpyMethods
from reshard.mpi.tile_checks import (
    check_fill,
    check_given_tile,
    check_global,
    check_layout,
    check_not_partial,
    check_nothing,
    check_options,
    check_out,
    check_root,
    element_dtype,
    read_ends,
    relabelled,
    replicate_layout,
    true_part,
    with_ranks_as_ids,
)
from reshard.runtime.account import Account
from reshard.runtime.numpy_tiles import in_native_order, numpy_dtype
from reshard.runtime.on_files.formats.metadata_files import MOST_METADATA
from reshard.runtime.on_mpi.collective import ReadyCall, check_limit, collective, run_together
from reshard.runtime.on_mpi.global_array import clear_padding, global_indices, index_ranges, order_by_owner
from reshard.runtime.on_mpi.prepare import Request, check_seats, prepare_tile, read_options
from reshard.runtime.on_mpi.repeated import (
    ARRAYS,
    DEFERRED,
    PreparedMove,
    find_agreed,
    find_prepared,
    keep_agreed,
    keep_prepared,
    limit_or_usual,
)
from reshard.runtime.on_mpi.team import TIME_LIMIT, Comm, Team, Watch, check_alive, report_failure
from reshard.runtime.on_mpi.transports import transport_tile
from reshard.runtime.on_mpi.window_tiles import (
    ABSENT,
    WindowTile,
    absent_tile,
    locate_tile,
    members_with_tile,
    new_tile,
    post_tile,
)
from reshard.synth import Network
from reshard.types import Layout, Mesh
from reshard.types.whole import checked_flag

Array = NDArray[Any]


class DistArray(NumpyMethods):
    """A distributed array with one tile per rank: its `layout`, this rank's `tile` and the communicator `comm`.

    `empty`, `zeros`, `full`, `from_global`, `from_function`, `load` and `redistribute` put tiles into memory that the
    ranks of a node share, so that a move inside a node is one copy. They, `to_global` and `save` are collective: all
    ranks call them. `DistArray(layout, tile, comm)` wraps an existing tile (a copy, if it has no padding or another
    byte order), and numpy's elementwise functions work tile by tile; neither communicates. Reductions, products and
    slices of split dims are collective, see docs/reference/numpy.md.

    `dtype` is for elements whose dtype has no name in layouts (structured, dates, text): the layout then names the
    plain dtype of their size, see `reshard.mpi.RAW`. `limit` is how many seconds a call may take to plan and to wait
    for the others.

    >>> from mpi4py import MPI
    >>> from reshard.types import Mesh
    >>> comm = MPI.COMM_WORLD
    >>> rows = Layout.from_spec([["x"], []], Mesh(x=comm.size), (4, 6), "float64")
    >>> a = DistArray.from_function(lambda i, j: 10 * i + j, rows, comm)
    >>> b = (np.sqrt(a) + 1).redistribute(0)
    >>> b.tile.shape[0], b.dtype.name
    (4, 'float64')
    >>> float(b.to_global(root=None)[0, 4])
    3.0
    """

    @name_arguments
    def __init__(self, layout: Layout, tile: Array | None, comm: Comm) -> None:
        check_layout(layout, "layout")
        given: Any = comm
        if isinstance(given, MPI.Comm):
            check_alive(comm)
        elif not (isinstance(getattr(given, "size", None), int) and hasattr(given, "rank")):  # An array has a size.
            raise AgreementError(
                f"comm {quoted(comm)} is not a communicator of these ranks; give one such as MPI.COMM_WORLD"
            )
        check_seats(layout, layout, comm.size)
        self._layout, self._comm = layout, comm
        self._seat = seat_of(layout.mesh, comm.rank, comm.size)
        if self._seat is None:
            check_nothing(tile, "tile", layout, comm.rank)
            self._held = absent_tile(layout, numpy_dtype(layout.dtype))
        else:
            self._held = WindowTile(check_given_tile(tile, layout, self._seat))

    @classmethod
    def _of(cls, layout: Layout, held: WindowTile, comm: Comm) -> DistArray:
        """An array whose tile is known to fit."""
        array = cls.__new__(cls)
        array._layout, array._held, array._comm = layout, held, comm
        array._seat = seat_of(layout.mesh, comm.rank, comm.size)
        return array

    @classmethod
    def empty(
        cls, layout: Layout, comm: Comm, *, dtype: DTypeLike | None = None, limit: float = TIME_LIMIT
    ) -> DistArray:
        """An uninitialized array."""
        held = new_filled(layout, comm, limit, "empty", lambda: element_dtype(layout, dtype), lambda _: None)
        return cls._of(layout, held, comm)

    @classmethod
    def full(
        cls, layout: Layout, value: Any, comm: Comm, *, dtype: DTypeLike | None = None, limit: float = TIME_LIMIT
    ) -> DistArray:
        """An array whose elements all have one value."""

        def fill(tile: Array) -> None:
            tile[...] = value

        def dtype_of() -> np.dtype[Any]:
            element = element_dtype(layout, dtype)
            check_fill(value, layout, element)
            return element

        return cls._of(layout, new_filled(layout, comm, limit, "full", dtype_of, fill), comm)

    @classmethod
    def zeros(
        cls, layout: Layout, comm: Comm, *, dtype: DTypeLike | None = None, limit: float = TIME_LIMIT
    ) -> DistArray:
        """An array of zeros."""

        def fill(tile: Array) -> None:
            tile[...] = np.zeros((), tile.dtype)

        held = new_filled(layout, comm, limit, "zeros", lambda: element_dtype(layout, dtype), fill)
        return cls._of(layout, held, comm)

    @classmethod
    def from_function(
        cls,
        function: Callable[..., Any],
        layout: Layout,
        comm: Comm,
        *,
        dtype: DTypeLike | None = None,
        limit: float = TIME_LIMIT,
    ) -> DistArray:
        """An array with the values `function(i, j, ...)` at the global indices i, j, ...

        Each rank that has elements calls `function` once, with one index array per dim, shaped so that they broadcast.
        Raises `LayoutError` for a partial layout.
        """

        def fill(tile: Array) -> None:
            seat = seat_of(layout.mesh, comm.rank, comm.size)
            part = tile if seat is None else true_part(tile, layout, seat)
            if seat is not None and part.size:
                values = function(*np.ix_(*(global_indices(layout, dim, seat) for dim in range(tile.ndim))))
                try:
                    part[...] = values
                except (TypeError, ValueError, OverflowError) as error:
                    raise TileError(f"the function returns {quoted(values)}, not {tile.dtype}: {error}") from None

        def dtype_of() -> np.dtype[Any]:
            if not callable(function):
                raise TileError(f"{quoted(function)} is not a function of global indices")
            return element_dtype(check_not_partial(layout), dtype)

        return cls._of(layout, new_held(layout, comm, limit, lambda: "from_function", dtype_of, fill, clear=True), comm)

    @classmethod
    def from_global(
        cls,
        array: Array | None,
        layout: Layout,
        comm: Comm,
        root: int | None = 0,
        *,
        dtype: DTypeLike | None = None,
        limit: float = TIME_LIMIT,
    ) -> DistArray:
        """The whole array of the rank `root`, scattered; other ranks may pass None.

        With root None every rank has the whole array, and takes its own part without communication. Raises
        `LayoutError` for a partial layout, and `TileError` for an array of another shape or dtype than the layout's.
        """

        def dtype_of() -> np.dtype[Any]:
            check_root(root, comm.size)
            element = element_dtype(check_not_partial(layout), dtype)
            if root in (comm.rank, None):
                check_global(array, layout, element)
            return element

        def fill(tile: Array) -> None:
            seat = seat_of(layout.mesh, comm.rank, comm.size)
            if seat is not None:
                part = in_native_order(np.asarray(array))
                for dim in range(part.ndim):
                    index = global_indices(layout, dim, seat)
                    one_run = bool(index.size) and index[-1] - index[0] == index.size - 1
                    key = slice(index[0], index[-1] + 1) if one_run else index
                    part = part[(slice(None),) * dim + (key,)]
                true_part(tile, layout, seat)[...] = part

        if root is None:
            held = new_held(layout, comm, limit, lambda: "from_global (root=None)", dtype_of, fill, clear=True)
            return cls._of(layout, held, comm)

        def prepare(team: Team) -> ReadyCall:
            element = dtype_of()
            check_seats(check_layout(layout, "layout"), layout, team.size)
            source = replicate_layout(layout, Mesh({"root": 1}, device_ids=[int(root)]))
            # The root puts rows by owner one after another: then they move as intervals, however many runs they are.
            intervals, orders = order_by_owner(layout)
            target = with_ranks_as_ids(intervals, team.size)
            held, into = absent_tile(source, element), None
            if team.rank == root:
                whole = in_native_order(np.asarray(array))
                for dim, order in orders:
                    whole = whole.take(order, dim)
                # Where no other rank has a tile, the root's would be the caller's array itself.
                held = WindowTile(np.array(whole, order="C", copy=True if target.mesh.size == 1 else None))
            if seat_of(target.mesh, team.rank, team.size) is None:
                into = absent_tile(target, element)
            request = Request.of_tile(source, target)
            launch = prepare_tile(team, request, held.tile)

            def run(team: Team, watch: Watch) -> DistArray:
                return cls._of(layout, transport_tile(team, watch, launch, held, into, None), comm)

            return ReadyCall(f"from_global: {request} in {layout}", post_tile(held, into), run)

        return run_together(comm, limit, prepare)

    @classmethod
    def load(cls, path: str | PathLike[str], layout: Layout, comm: Comm, *, limit: float = TIME_LIMIT) -> DistArray:
        """The array that `save` wrote to a folder, in any layout of its shape and dtype, on any number of ranks.

        Every rank reads only the elements that it needs. Raises `LayoutError` if the saved array does not fit, or a
        file of it is missing, cut short or not the one that was saved.
        """

        saved: list[files.SavedTiles] = []

        def dtype_of() -> np.dtype[Any]:
            saved[:] = [files.find_saved(path, layout, seat_of(layout.mesh, comm.rank, comm.size))]
            return saved[0].dtype

        def fill(tile: Array) -> None:
            files.read_saved_tile(saved[0], tile)

        return cls._of(layout, new_held(layout, comm, limit, lambda: f"load {path}", dtype_of, fill, clear=True), comm)

    @property
    def layout(self) -> Layout:
        """The layout: which rank has which elements."""
        return self._layout

    @property
    def tile(self) -> Array:
        """This rank's tile, padding included; writing to it changes the array. Raises `TileError` without one."""
        if self._seat is None:
            raise TileError(f"rank {self._comm.rank} has no tile of {self!r}; ask has_tile before")
        return self._held.tile

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype of the elements."""
        return self._held.tile.dtype

    @property
    def has_tile(self) -> bool:
        """Whether this rank has a tile: whether it is in the layout's mesh."""
        return self._seat is not None

    @property
    def unpadded(self) -> Array:
        """This rank's tile without padding, a view; writing to it changes the array."""
        return true_part(self.tile, self._layout, self._seat or 0)

    @property
    def comm(self) -> Comm:
        """The communicator. Raises `RankError` once it has been freed."""
        return check_alive(self._comm)

    def local_index_ranges(self) -> tuple[tuple[range, ...], ...]:
        """Per dim, the global indices of this rank's tile as ranges, in the tile's order and without padding.

        No ranges on a rank without a tile.
        """
        return ((),) * len(self.shape) if self._seat is None else index_ranges(self._layout, self._seat)

    def redistribute(
        self,
        target: Layout | SupportsIndex,
        *,
        out: DistArray | None = None,
        budget: int | str | None = None,
        network: Network | str | None = None,
        donate: bool = False,
        relabel: bool = False,
        limit: float = TIME_LIMIT,
        memory: Account | None = None,
        to: int | None = None,
    ) -> DistArray:
        """The same array in another layout; the options are those of `reshard.mpi.redistribute`.

        A number as `target` makes that dim local, as between slabs and pencils of an FFT: the target is then
        `layout.with_local(number, to)`. `out` is an array of the target layout to write to; it may be the array itself
        if that has the layout already.
        """
        plain = budget is network is None and donate is relabel is False
        layout = (
            target
            if type(target) is Layout and plain and to is None
            else _find_target(self._layout, target, relabel, to)
        )
        if plain and type(layout) is Layout:
            prepared = find_prepared(self._comm, (ARRAYS, self._layout, layout))
            if prepared is not None:
                return self._move_again(prepared, layout, out, limit, memory)
        if layout == self._layout and (out is None or out is self):
            check_options(donate, relabel, memory)
            check_limit(limit)
            return self

        def prepare(team: Team) -> ReadyCall:
            if not isinstance(layout, Layout):
                raise layout
            check_options(donate, relabel, memory)
            held = self._located(team)
            options = read_options(budget, network, bool(donate), team)
            request = Request.of_tile(self._layout, layout, options, out is not None, held.place != 0)
            check_seats(self._layout, layout, team.size)
            into = None
            if out is not None:
                if not isinstance(out, DistArray):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise TileError(f"out is a {type(out).__name__}; give a DistArray of layout {layout}")
                if out.layout != layout:
                    raise TileError(f"out has layout {out.layout}, the move ends in {layout}; give one of that layout")
                if out.has_tile and self.has_tile:
                    check_out(out.tile, layout, self.tile)
                into = out._located(team)
            if seat_of(layout.mesh, team.rank, team.size) is None:
                into = absent_tile(layout, held.tile.dtype)
            launch = prepare_tile(team, request, held.tile)

            def run(team: Team, watch: Watch) -> DistArray:
                moved = transport_tile(team, watch, launch, held, into, memory)
                if plain:
                    keep_prepared(team, watch, request, launch, kind=ARRAYS)
                return DistArray._of(request.target, moved, self._comm) if out is None else out

            return ReadyCall(f"DistArray: {request}{'' if plain else ', with options'}", post_tile(held, into), run)

        return run_together(self._comm, limit, prepare)

    def _move_again(
        self, prepared: PreparedMove, target: Layout, out: DistArray | None, limit: float, memory: Account | None
    ) -> DistArray:
        """Makes a request without options again, as `MoveArguments.run_again` does for tiles."""
        allowed = limit_or_usual(limit)
        release, same = prepared.hold(allowed)
        try:
            into: Any = out
            if type(out) is DistArray and out._layout == target:
                into = None if out._seat is None else out._held.tile
            usual = same and allowed is limit and (memory is None or type(memory) is Account)
            moved = prepared.run(None if self._seat is None else self._held.tile, into, allowed, memory, usual)
            if moved is DEFERRED:
                return self.redistribute(target, out=out, limit=limit, memory=memory)
            if out is not None:
                return out
            array = DistArray.__new__(DistArray)
            array._layout, array._comm, array._seat = target, self._comm, prepared.seat
            array._held = absent_tile(target, self.dtype) if moved is None else WindowTile(moved)
            return array
        finally:
            release()

    def _located(self, team: Team) -> WindowTile:
        """This rank's tile with its place in the team's arena."""
        return self._held._replace(place=ABSENT) if self._seat is None else locate_tile(team, self._held.tile)

    @name_arguments
    def gather_rows(
        self, indices: object, have: tuple[object, object] | None = None, *, limit: float = TIME_LIMIT
    ) -> Array:
        """The rows of dim 0 that have these global numbers, in their order, each whole; collective.

        Each rank gives numbers of its own: any, in any order, any of them twice. Only rows that this rank has neither
        in its tile nor in `have` (their numbers, and the rows) come from other ranks, each once. Raises `TileError` on
        all ranks for numbers that no row has.

        >>> from mpi4py import MPI
        >>> from reshard.types import Mesh
        >>> layout = Layout.from_spec([["x"]], Mesh(x=MPI.COMM_WORLD.size), (4, 2), "int64")
        >>> a = DistArray.from_function(lambda i, j: 10 * i + j, layout, MPI.COMM_WORLD)
        >>> a.gather_rows([3, 0, 3]).tolist()
        [[30, 31], [0, 1], [30, 31]]
        """
        array = ArrayInTiles(self._layout, self._held, self._comm)
        numbers, rows = have if isinstance(have, tuple) and len(have) == 2 else (have, None)
        want = want_rows(array, indices, numbers)
        return cast(Array, make_fetch(array, want, "gather_rows", rows, limit, False)[2])

    @name_arguments
    def prepare_gather(self, indices: object, have_indices: object = None, *, limit: float = TIME_LIMIT) -> RowGather:
        """A handle that gathers the same rows again and again: `gather()`; collective.

        Everything that does not depend on values is done here, once: which rank has what, and who sends it. With
        `have_indices`, `gather(held_rows)` takes the rows of these numbers from what is held.
        """
        array = ArrayInTiles(self._layout, self._held, self._comm)
        return RowGather(array, want_rows(array, indices, have_indices), "prepare_gather", limit)

    @name_arguments
    def halo(self, width: Any, periodic: Any = False, *, limit: float = TIME_LIMIT) -> Array:
        """This rank's box of the array, wider by `width` indices on each side, corners included; collective.

        `width` is a number, or one for each dim, or pairs (before, after). At the ends of the array the box is cut, or,
        where it is `periodic` (a flag, or one for each dim), goes on at the other end, once around at most. Pieces are
        intervals of any sizes; where a rank has none in some dim, its box is empty there.

        >>> from mpi4py import MPI
        >>> from reshard.types import Mesh
        >>> layout = Layout.from_spec([["x"]], Mesh(x=MPI.COMM_WORLD.size), (4,), "int64")
        >>> a = DistArray.from_function(lambda i: 10 * i, layout, MPI.COMM_WORLD)
        >>> a.halo(1, periodic=True).tolist() if MPI.COMM_WORLD.size == 1 else [30, 0, 10, 20, 30, 0]
        [30, 0, 10, 20, 30, 0]
        """
        array = ArrayInTiles(self._layout, self._held, self._comm)
        what = f"halo of width {quoted(width)}, periodic={quoted(periodic)},"
        return cast(Array, make_fetch(array, want_halo(array, width, periodic), what, None, limit, False)[2])

    def prepare_halo(self, width: Any, periodic: Any = False, *, limit: float = TIME_LIMIT) -> RowGather:
        """A handle that fetches the same halo again and again, with the tiles' present values; collective."""
        array = ArrayInTiles(self._layout, self._held, self._comm)
        what = f"prepare_halo of width {quoted(width)}, periodic={quoted(periodic)},"
        return RowGather(array, want_halo(array, width, periodic), what, limit)

    def to_global(self, root: int | None = 0, *, limit: float = TIME_LIMIT) -> Array | None:
        """The whole array on the rank `root`, and None on the others; with root None, the array on all ranks."""
        if self._layout.partial:
            return self.redistribute(replace(self._layout, partial=()), limit=limit).to_global(root, limit=limit)
        intervals, orders = order_by_owner(self._layout)
        if orders:
            # What moves is intervals, which all ranks take for the same table once they have agreed on it.
            with collective(self._comm, limit, lambda _: None, lambda _: f"to_global {self._layout}"):
                gathered = DistArray._of(intervals, self._held, self._comm)
            whole = gathered.to_global(root, limit=limit)
            for dim, order in orders:
                whole = None if whole is None else whole.take(np.argsort(order), dim)
            return whole
        if root is None:
            everyone = self._layout.mesh if self._layout.mesh.size == self.comm.size else Mesh(rank=self.comm.size)
            return self.redistribute(replicate_layout(self._layout, everyone), limit=limit).tile

        try:
            check_root(root, self._comm.size)
        except PlanError as error:
            self.refuse(error)
        source = with_ranks_as_ids(self._layout, self._comm.size)
        target = replicate_layout(source, Mesh({"root": 1}, device_ids=[int(root)]))
        moved = DistArray._of(source, self._held, self._comm).redistribute(target, limit=limit)
        if not moved.has_tile:
            return None
        # Where nothing moves, the array's own tile is the whole of it.
        return moved.tile.copy() if moved.tile is self._held.tile else moved.tile

    def save(self, path: str | PathLike[str], *, limit: float = TIME_LIMIT) -> None:
        """Writes a folder with the layout and each rank's tile as `.npy`.

        An array that is saved there already is replaced once the new one is on disk, and survives a save that fails.
        """

        def prepare(_: Team) -> None:
            if (length := len(str(self._layout))) > MOST_METADATA - (1 << 20):
                raise LayoutError(
                    f"{self._layout} is {length} B as text, more than is read of a layout.json; redistribute the array "
                    f"to a layout of fewer runs, and save that"
                )
            try:
                Path(path).mkdir(parents=True, exist_ok=True)
            except (OSError, TypeError, ValueError) as error:
                raise LayoutError(f"cannot make the folder {quoted(path)}: {shortened(str(error))}") from None

        def request(_: None) -> str:  # A path may have a `__str__` that raises: then all ranks do.
            return f"save {self._layout} on {self._layout.mesh!r} to {path}"

        with collective(self._comm, limit, prepare, request):
            pass
        files.save_tiles(self._comm, path, self._layout, self._seat, self._held.tile, limit)

    def refuse(self, error: Exception) -> NoReturn:
        """Raises this rank's error on all ranks, in place of the collective call that the others make next."""

        def prepare(_: Team) -> None:
            raise error

        with collective(self._comm, TIME_LIMIT, prepare, str):
            raise error

    def with_tile(self, layout: Layout, tile: Array) -> DistArray:
        """Another array on the same communicator; its tile is private memory."""
        fits = type(tile) is np.ndarray and tile.shape == layout.tile_shape and self._seat is not None
        if fits and tile.dtype == numpy_dtype(layout.dtype) and layout.mesh == self._layout.mesh:
            return DistArray._of(layout, WindowTile(tile), self._comm)
        return DistArray(layout, tile, self._comm)

    def __repr__(self) -> str:
        at = f"rank {self._comm.rank} of {self._comm.size}" if self._comm else "its communicator has been freed"
        return f"DistArray({self._layout} on {self._layout.mesh}, {at})"


_with_local = lru_cache(maxsize=256)(Layout.with_local)  # To make a layout takes ten times as long as to move 64 bytes.


def _find_target(layout: Layout, target: Any, relabel: object, to: int | None = None) -> Layout | Exception:
    """Where an array goes, or an error, which the ranks must agree on before it is raised."""
    try:
        is_dim = hasattr(target, "__index__") and type(target) not in (bool, np.bool_)
        number = target.__index__() if is_dim else None
        if number is not None:
            end = _with_local(layout, number, to)
        elif to is not None:
            raise PlanError(f"to={quoted(to)} is the dim that takes axes of another one: give the number of that dim")
        else:
            end = check_layout(read_ends(layout, target)[1], "target")
        return relabelled(layout, end) if checked_flag(relabel, "relabel") else end
    except Exception as error:
        return error


# New tiles in the memory of a node, once all ranks agree on what they are.
#
# An array that holds one value, or none yet, takes one synchronization, since no rank waits for another after that. All
# ranks keep what they have agreed on, so the next such array takes no more than that and a few lines of code:
#
#     call 1    `collective`      the request is written out and hashed
#     call 2    `agree_again`     the digest of call 1; as call 1 if some rank defers
#
# A rank may lack memory for its tile. That cannot happen where the node has a place for it at hand; otherwise the ranks
# also meet at the end of the call, so that all raise in it.


Element = Callable[[], np.dtype[Any]]
"""Checks the arguments; returns the dtype of the elements."""


def new_held(
    layout: Layout,
    comm: Comm,
    limit: float,
    what: Callable[[], str],
    dtype_of: Element,
    fill: Callable[[Array], object],
    *,
    clear: bool = False,
    alone: bool = False,
) -> WindowTile:
    """A new tile, once all ranks agree on `what`, which is asked for when arguments are checked; `fill` writes it.

    All ranks call `fill`: those without a tile with one that has no elements. With `clear`, padding is set to zero.
    `alone` says that `fill` waits for no rank and cannot fail; if there is memory for the tile, the call ends without a
    wait.
    """

    def prepare(team: Team) -> np.dtype[Any]:
        check_seats(check_layout(layout, "layout"), layout, team.size)
        return dtype_of()

    def request(_: np.dtype[Any]) -> str:
        return f"{what()} {layout} on {layout.mesh!r}"

    def has_memory(team: Team, dtype: np.dtype[Any]) -> bool:
        # A place at hand, so that no rank of the node needs new memory, shared or private.
        members, nbytes = members_with_tile(team, layout), math.prod(layout.tile_shape) * dtype.itemsize
        return not members or team.arena.has_room(nbytes, members)

    ends_alone = has_memory if alone else None
    with collective(comm, limit, prepare, request, alone=ends_alone) as (team, watch, dtype):
        held = new_tile(team, watch, layout, dtype)
        fill(held.tile)
        seat = seat_of(layout.mesh, team.rank, team.size)
        if clear and seat is not None:
            clear_padding(layout, seat, held.tile)
        if alone:
            keep_agreed(team, (what(), layout), request(dtype), dtype)
    return held


def new_filled(
    layout: Layout, comm: Comm, limit: float, what: str, dtype_of: Element, fill: Callable[[Array], object]
) -> WindowTile:
    """A new tile that each rank fills by itself, which cannot fail."""
    make_anew = partial(new_held, layout, comm, limit, lambda: what, dtype_of, fill, alone=True)
    agreed = find_agreed(comm, (what, layout)) if type(layout) is Layout else None
    if agreed is None:
        return make_anew()
    team, allowed = agreed.team, limit_or_usual(limit)
    release, same = agreed.hold(allowed)
    try:
        try:  # Whether the arguments are right, and give the dtype that was agreed on.
            plain = same and allowed is limit and dtype_of() == agreed.value
        except Exception:  # The call that is made anew raises it, on all ranks.
            plain = False
        watch = Watch(team, allowed)
        if not agreed.agree_again(watch, plain):
            return make_anew()
        with report_failure(team):
            held = new_tile(team, watch, layout, cast("np.dtype[Any]", agreed.value))
            fill(held.tile)
            if not held.place:  # In private memory, of which another rank may not have enough.
                team.settle(watch)
        return held
    finally:
        release()
