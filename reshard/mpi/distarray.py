"""`DistArray`: a layout, this rank's tile and the communicator, with the moves between layouts as methods."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from typing import Any, cast

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import DTypeLike, NDArray

from reshard.errors import LayoutError, TileError
from reshard.mpi import files
from reshard.mpi.relabel import relabelled
from reshard.mpi.tiles import aligned, check_root, check_whole, checked, checked_out, finished, kind, replicated
from reshard.runtime.account import Account
from reshard.runtime.on_mpi.global_array import gather, scatter
from reshard.runtime.on_mpi.indices import clear_padding, index_ranges, indices
from reshard.runtime.on_mpi.move import Held, Prepared, Request, begin, check_mesh, move, new_tile, prepared, where
from reshard.runtime.on_mpi.team import TIME_LIMIT, Comm, Team, moving, team_of
from reshard.runtime.on_mpi.wire.exchange import Call
from reshard.synth import Network
from reshard.types import Layout, dtypes

Array = NDArray[Any]


class DistArray(NDArrayOperatorsMixin):
    """An array in tiles, one a rank: its `layout`, this rank's `tile` and the communicator `comm`.

    Arrays made by `empty`, `zeros`, `full`, `from_global`, `from_function`, `load` and `redistribute` have their
    tiles in memory that the ranks of a node share, so that a move inside a node is one copy. `DistArray(layout,
    tile, comm)` takes a tile as it is, without a word to the other ranks, and so do numpy's functions. Every other
    way to make one, every move, `to_global` and `save` are collective: all ranks call them.

    `dtype`, where it is asked for, is for elements that have no name in layouts (structured, dates, text): the
    layout then names the plain dtype of their size, see `reshard.mpi.RAW`. `limit` is how many seconds a rank
    waits for the others.
    """

    def __init__(self, layout: Layout, tile: Array, comm: Comm) -> None:
        self._keep(layout, Held(checked(tile, layout, "tile")), comm)

    def _keep(self, layout: Layout, held: Held, comm: Comm) -> None:
        self._layout, self._held, self._comm = layout, held, comm

    @classmethod
    def _of(cls, layout: Layout, held: Held, comm: Comm) -> DistArray:
        made = cls.__new__(cls)
        made._keep(layout, held, comm)
        return made

    @classmethod
    def _made(
        cls,
        what: str,
        layout: Layout,
        comm: Comm,
        limit: float,
        kind_of: Callable[[], np.dtype[Any]],
        fill: Callable[[Call, Array], None],
    ) -> DistArray:
        """An array whose tile `fill` fills, once all ranks agree on `what`, and `kind_of` knows the dtype."""
        team = team_of(comm, limit)

        def prepare() -> np.dtype[Any]:
            check_mesh(layout, comm.size)
            return kind_of()

        watch, kind = begin(team, limit, f"{what} {layout} on {layout.mesh!r}", prepare)
        with moving(team):
            held = new_tile(team, layout, kind)
            fill(Call(team, watch, team.pool, Account(layout.dtype), 0), held.tile)
            team.settle(watch)
        return cls._of(layout, held, comm)

    @classmethod
    def empty(
        cls, layout: Layout, comm: Comm, *, dtype: DTypeLike | None = None, limit: float = TIME_LIMIT
    ) -> DistArray:
        """An array of anything."""
        return cls._made("empty", layout, comm, limit, lambda: kind(layout, dtype), lambda call, tile: None)

    @classmethod
    def full(
        cls, layout: Layout, value: Any, comm: Comm, *, dtype: DTypeLike | None = None, limit: float = TIME_LIMIT
    ) -> DistArray:
        """An array of one value."""

        def fill(call: Call, tile: Array) -> None:
            tile[...] = value

        return cls._made("full", layout, comm, limit, lambda: kind(layout, dtype), fill)

    @classmethod
    def zeros(
        cls, layout: Layout, comm: Comm, *, dtype: DTypeLike | None = None, limit: float = TIME_LIMIT
    ) -> DistArray:
        """An array of zeros."""

        def fill(call: Call, tile: Array) -> None:
            tile[...] = np.zeros((), tile.dtype)

        return cls._made("zeros", layout, comm, limit, lambda: kind(layout, dtype), fill)

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
        """An array of `function(i, j, ...)`, called once a rank with the global indices of its elements: one array a
        dim, shaped so that they broadcast. Raises `LayoutError` for a layout that is still to be summed.
        """

        def fill(call: Call, tile: Array) -> None:
            if tile.size and math.prod(layout.shape):
                tile[...] = function(*np.ix_(*(indices(layout, dim, comm.rank) for dim in range(tile.ndim))))
            clear_padding(layout, comm.rank, tile)

        return cls._made("from_function", layout, comm, limit, lambda: kind(finished(layout), dtype), fill)

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
        """The array of the rank `root`, dealt out; other ranks need give none. With root None every rank has it, and
        takes its own part. Raises `LayoutError` for a layout that is still to be summed, `TileError` for an array
        that is not the layout's.
        """

        def kind_of() -> np.dtype[Any]:
            check_root(root, comm.size)
            found = kind(finished(layout), dtype)
            if root in (comm.rank, None):
                check_whole(array, layout, found)
            return found

        def fill(call: Call, tile: Array) -> None:
            given = np.asarray(array) if root in (comm.rank, None) else np.empty((0,) * tile.ndim, tile.dtype)
            scatter(call, layout, given, root, tile)
            clear_padding(layout, comm.rank, tile)

        return cls._made(f"from_global (root={root})", layout, comm, limit, kind_of, fill)

    @classmethod
    def load(cls, path: str | PathLike[str], layout: Layout, comm: Comm, *, limit: float = TIME_LIMIT) -> DistArray:
        """The array that `save` wrote, in this layout, whatever it was saved in and by however many ranks.

        Every rank reads only what it needs. Raises `LayoutError` if the array is another one than the layout's.
        """

        def fill(call: Call, tile: Array) -> None:
            files.read(path, layout, comm.rank, tile)
            clear_padding(layout, comm.rank, tile)

        return cls._made(f"load {path}", layout, comm, limit, lambda: files.checked(path, layout), fill)

    @property
    def layout(self) -> Layout:
        """What is where."""
        return self._layout

    @property
    def tile(self) -> Array:
        """This rank's tile, padding included; what is written to it is written to the array."""
        return self._held.tile

    @property
    def comm(self) -> Comm:
        """The communicator."""
        return self._comm

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self._layout.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The elements' numpy dtype."""
        return self.tile.dtype

    def local_index_ranges(self) -> tuple[tuple[range, ...], ...]:
        """Per dim, the global indices that this rank's tile has, as ranges in the tile's order, without padding."""
        return index_ranges(self._layout, self._comm.rank)

    def redistribute(
        self,
        target: Layout | int,
        *,
        out: DistArray | None = None,
        budget: int | None = None,
        network: Network | str | None = None,
        donate: bool = False,
        relabel: bool = False,
        limit: float = TIME_LIMIT,
        memory: Account | None = None,
    ) -> DistArray:
        """The same array in another layout; see `reshard.mpi.redistribute` for the options.

        A number makes that dim local: what holds it comes to hold the last dim that nothing holds so far (slabs
        and pencils of an FFT). `out` is an array of the target layout to write to.
        """
        layout = self._layout if isinstance(target, int) else target
        if isinstance(target, int):
            layout = aligned(self._layout, target)
        if relabel:
            layout = relabelled(self._layout, layout)
        if layout == self._layout and out is None:
            return self
        team = team_of(self._comm, limit)
        held = _in_windows(team, self._held)
        request = Request(self._layout, layout, budget, network, donate, out is not None, held.window is not None)

        into = _in_windows(team, out._held) if isinstance(out, DistArray) else None

        def prepare() -> Prepared:
            if out is not None:
                _check_out(out, layout, self)
            return prepared(team, request, held.tile)

        watch, ready = begin(team, limit, f"DistArray: {request}", prepare, lambda _: where(held, into))
        found = move(team, watch, ready, request, held, into, memory)
        return DistArray._of(layout, found, self._comm) if out is None else out

    def to_global(self, root: int | None = 0, *, limit: float = TIME_LIMIT) -> Array | None:
        """The whole array on the rank `root`, None on the others; with root None, on all of them."""
        if self._layout.partial:
            return self.redistribute(replace(self._layout, partial=()), limit=limit).to_global(root, limit=limit)
        if root is None:
            return self.redistribute(replicated(self._layout), limit=limit).tile
        team = team_of(self._comm, limit)
        request = f"to_global {self._layout} on {self._layout.mesh!r}, root={root}"
        watch, _ = begin(team, limit, request, lambda: check_root(root, self._comm.size))
        mine = root == self._comm.rank
        with moving(team):
            array = np.empty(self.shape if mine else (0,) * len(self.shape), self.dtype)
            call = Call(team, watch, team.pool, Account(self._layout.dtype), 0)
            gather(call, self._layout, self.tile, root, array)
            team.settle(watch)
        return array if mine else None

    def save(self, path: str | PathLike[str], *, limit: float = TIME_LIMIT) -> None:
        """Writes a folder: the layout, and every rank's tile as `.npy`; a file of that name in it is overwritten."""
        team = team_of(self._comm, limit)
        request = f"save {self._layout} on {self._layout.mesh!r} to {path}"
        watch, _ = begin(team, limit, request, lambda: files.make(path))
        with moving(team):
            files.write(path, self._layout, self._comm.rank, self.tile)
            team.settle(watch)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Numpy's elementwise functions, tile by tile, on arrays of one layout and on numbers."""
        if method != "__call__":
            return NotImplemented
        outs = cast("tuple[Any, ...]", options.pop("out", ()))
        arrays = [given for given in (*inputs, *outs) if isinstance(given, DistArray)]
        _check_alike(ufunc, arrays, inputs)
        if outs:
            options["out"] = tuple(given.tile if isinstance(given, DistArray) else given for given in outs)
        tiles = [given.tile if isinstance(given, DistArray) else given for given in inputs]
        found = getattr(ufunc, method)(*tiles, **options)
        if outs:
            return outs[0] if len(outs) == 1 else outs
        return (
            tuple(self._like(each) for each in cast("tuple[Array, ...]", found))
            if isinstance(found, tuple)
            else self._like(found)
        )

    def _like(self, tile: Array) -> DistArray:
        named = replace(self._layout, dtype=dtypes.canonical(tile.dtype))
        return DistArray._of(named, Held(np.asarray(tile)), self._comm)

    def __repr__(self) -> str:
        return f"DistArray({self._layout} on {self._layout.mesh}, rank {self._comm.rank} of {self._comm.size})"


def _in_windows(team: Team, held: Held) -> Held:
    """The same tile; its window only if it is one of this team's."""
    return held if team.windows.has(held.window) else Held(held.tile)


def _check_out(out: object, layout: Layout, source: DistArray) -> None:
    if not isinstance(out, DistArray):
        raise TileError(f"out is a {type(out).__name__}; give a DistArray of layout {layout}")
    if out.layout != layout:
        raise TileError(f"out has layout {out.layout}, the move ends in {layout}; give one of that layout")
    checked_out(out.tile, layout, source.tile)


def _check_alike(ufunc: np.ufunc, arrays: list[DistArray], inputs: tuple[Any, ...]) -> None:
    first = arrays[0]
    for other in arrays[1:]:
        if replace(other.layout, dtype=first.layout.dtype) != first.layout:
            raise LayoutError(
                f"{ufunc.__name__} of arrays in layouts {first.layout} and {other.layout}; redistribute one of "
                f"them, so that the tiles of a rank have the same elements"
            )
    finished(first.layout)
    for given in inputs:
        if not isinstance(given, DistArray) and np.ndim(given):
            raise LayoutError(
                f"{ufunc.__name__} of a DistArray and an array of shape {np.shape(given)}; give a number, or a "
                f"DistArray of layout {first.layout}"
            )
