"""Rows and halos that each rank names for itself, once or by a handle: `gather_rows`, `halo` and their `prepare_`.

rows      any global indices of dim 0, in any order, each whole in the other dims
halo      the box of this rank's tile, with more indices before and after it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray

from reshard.errors import LayoutError, TileError, quoted
from reshard.geometry.holders import tile_of
from reshard.lower.to_mpi import Picks, devices_by_id, join_neighbours, locate_indices, pick_boxes, seat_of
from reshard.mpi.handles import FetchCalls, StartedMove
from reshard.mpi.tile_checks import check_layout, check_not_partial
from reshard.runtime.account import begin_account, measures
from reshard.runtime.on_mpi.collective import collective
from reshard.runtime.on_mpi.copies.strided_copy import find_word_dtype, view_as_words
from reshard.runtime.on_mpi.fetch import Fetch, parts_of_picks
from reshard.runtime.on_mpi.global_array import index_ranges
from reshard.runtime.on_mpi.prepare import check_seats
from reshard.runtime.on_mpi.team import Comm, Team, Watch
from reshard.runtime.on_mpi.window_tiles import NOWHERE, Posted, WindowTile, locate_tile, post_tile
from reshard.types import Layout
from reshard.types.whole import read_items, whole

Array = NDArray[Any]
Column = NDArray[np.int64]


class Wanted(NamedTuple):
    """What one rank wants: for each dim the global indices, and, where it holds rows itself, which of the result's are
    which of these.
    """

    picks: Picks
    shape: tuple[int, ...]
    held: tuple[Column, Column] | None = None
    held_shape: tuple[int, ...] | None = None


class ArrayInTiles(NamedTuple):
    """The array that elements are fetched from, as this rank has it."""

    layout: Layout
    held: WindowTile
    comm: Comm


Want = Callable[[Team], Wanted]


def want_rows(array: ArrayInTiles, indices: object, held: object) -> Want:
    """The rows of these numbers, of which a rank may hold some itself."""

    def want(team: Team) -> Wanted:
        layout = check_not_partial(array.layout)
        if not layout.shape:
            raise LayoutError(f"{layout} has no rows: give an array of at least one dim")
        index = _read_indices(indices, layout, "indices")
        rest, held_index, from_held = np.arange(len(index)), None, None
        if held is not None:
            held_index = _read_indices(held, layout, "the indices of held rows")
            order = np.argsort(held_index, kind="stable")
            at = np.searchsorted(held_index, index, sorter=order)
            at = order[np.minimum(at, len(order) - 1)] if len(order) else np.zeros(len(index), np.int64)
            has = (held_index[at] == index) if len(order) else np.zeros(len(index), bool)
            seat = seat_of(layout.mesh, team.rank, team.size)
            device = None if seat is None else devices_by_id(layout.mesh)[seat]
            if device is not None and layout.tile_shape_of(device)[1:] == layout.shape[1:]:
                # What it has in its own tile is as new as that.
                has &= locate_indices(layout.dims[0], index)[0] != tile_of(layout, device)[0]
            rest, from_held = np.flatnonzero(~has), (np.flatnonzero(has), at[has])
        picks = pick_boxes(layout, [index[rest], *map(np.arange, layout.shape[1:])], team.rank, team.facts.nodes)
        if len(rest) < len(index):
            boxes = [
                box._replace(here=(join_neighbours(rest[cast(Any, box.here[0])]), *box.here[1:])) for box in picks.boxes
            ]
            copies, of = picks.again[0]
            picks = Picks(boxes, [(rest[copies], rest[of]), *picks.again[1:]])
        shape = layout.shape[1:]
        return Wanted(picks, (len(index), *shape), from_held, None if held_index is None else (len(held_index), *shape))

    return want


def want_halo(array: ArrayInTiles, width: object, periodic: object) -> Want:
    """The box of this rank's tile, wider by `width`."""

    def want(team: Team) -> Wanted:
        layout = check_not_partial(array.layout)
        widths, wraps = _read_widths(width, periodic, layout)
        seat = seat_of(layout.mesh, team.rank, team.size)
        indices: list[Column] = []
        for dim, (before, after) in enumerate(widths):
            runs = () if seat is None else index_ranges(layout, seat)[dim]
            if len(runs) > 1:
                raise LayoutError(
                    f"dim {dim} of {layout:} has {len(runs)} runs on rank {team.rank}, and a halo is of one interval; "
                    f"redistribute to a layout whose pieces are intervals, or use gather_rows"
                )
            size, (start, stop) = layout.shape[dim], (runs[0].start, runs[0].stop) if runs else (0, 0)
            if not runs:
                indices.append(np.empty(0, np.int64))
            elif wraps[dim] and size:
                if max(before, after) > size:
                    raise LayoutError(
                        f"a halo of {max(before, after)} in dim {dim} of {layout:}, which has {size} elements and goes "
                        f"on at its other end: give a width of at most {size}"
                    )
                indices.append(np.arange(start - before, stop + after) % size)
            else:
                indices.append(np.arange(max(0, start - before), min(size, stop + after)))
        return Wanted(pick_boxes(layout, indices, team.rank, team.facts.nodes), tuple(map(len, indices)))

    return want


def _read_indices(given: object, layout: Layout, what: str) -> Column:
    """Row numbers as a column; raises `TileError` unless they are numbers of rows."""
    try:
        index = np.asarray(given)
    except Exception as error:
        raise TileError(f"{what} are a {type(given).__name__} that numpy cannot take ({error}); give ints") from None
    if index.ndim == 1 and not index.size:
        index = np.empty(0, np.int64)
    if index.ndim != 1 or index.dtype.kind not in "iu":
        raise TileError(
            f"{what} have {index.ndim} dims and dtype {index.dtype}; give the numbers of rows, as ints in one dim"
        )
    rows = layout.shape[0]
    wrong = np.flatnonzero((index < 0) | (index >= rows))
    if len(wrong):
        raise TileError(
            f"{what} have {index[wrong[0]]} at {wrong[0]}, but {layout:} has rows 0 to {rows - 1}; give numbers of its "
            f"rows"
        )
    return index.astype(np.int64)


def _read_widths(width: Any, periodic: object, layout: Layout) -> tuple[list[tuple[int, int]], list[bool]]:
    """How far a box is widened before and after, for each dim, and whether that dim goes on at its other end."""
    ndim = len(layout.shape)
    each = [width] * ndim if whole(width) is not None else read_items(width)
    if each is None or len(each) != ndim:
        raise LayoutError(
            f"width {quoted(width)}: give a number, or one for each of the {ndim} dims of {layout:}, or pairs (before, "
            f"after)"
        )
    widths: list[tuple[int, int]] = []
    for one in each:
        both = (one, one) if whole(one) is not None else read_items(one)
        ends = [] if both is None else [whole(end) for end in both]
        if len(ends) != 2 or ends[0] is None or ends[1] is None:
            raise LayoutError(f"width {quoted(width)}: {quoted(one)} is no number, nor a pair (before, after) of them")
        widths.append((ends[0], ends[1]))
    wraps = [periodic] * ndim if isinstance(periodic, bool) else read_items(periodic)
    if wraps is None or len(wraps) != ndim or not all(isinstance(one, bool) for one in wraps):
        raise LayoutError(f"periodic {quoted(periodic)}: give True or False, or one for each of the {ndim} dims")
    return widths, [*wraps]


def _check_held_rows(rows: object, wanted: Wanted, dtype: np.dtype[Any]) -> Array | None:
    """The rows that a rank holds itself; raises `TileError` unless they are as many, and like those of the array."""
    if wanted.held_shape is None:
        if rows is not None:
            raise TileError("held rows are given, but not their numbers: prepare the gather with have_indices=")
        return None
    if rows is None:
        raise TileError(
            "the held rows of have_indices= are not given: call gather(held_rows), or gather_rows(have=(numbers, rows))"
        )
    try:
        array = np.asarray(rows)
    except Exception as error:
        raise TileError(f"the held rows are no array: {error}") from None
    if array.shape != wanted.held_shape or array.dtype != dtype:
        raise TileError(
            f"the held rows have shape {array.shape} and dtype {array.dtype}, but their numbers need "
            f"{wanted.held_shape} and {dtype}"
        )
    return array


def _check_result(out: object, shape: tuple[int, ...], dtype: np.dtype[Any], tile: Array) -> Array:
    """The array that a result is written to."""
    if out is None:
        return np.empty(shape, dtype)
    given: Any = out
    fits = type(given) is np.ndarray and given.shape == shape and given.dtype == dtype and given.flags.carray
    if not fits or np.may_share_memory(given, tile):
        raise TileError(
            f"out is no C-ordered array of shape {shape} and dtype {dtype} with memory of its own; give one, or none"
        )
    return given


def make_fetch(
    array: ArrayInTiles, want: Want, what: str, rows: object, limit: float, lasting: bool
) -> tuple[Fetch, Wanted, Array | None]:
    """Agrees on what all want, and prepares it; without `lasting`, also fetches it, once. Collective."""

    def prepare(team: Team) -> tuple[WindowTile, Wanted]:
        check_seats(check_layout(array.layout, "layout"), array.layout, team.size)
        wanted, held = want(team), array.held
        if not lasting:
            _check_held_rows(rows, wanted, held.tile.dtype)
        mine = seat_of(array.layout.mesh, team.rank, team.size)
        return held if mine is None else locate_tile(team, held.tile), wanted

    def posting(ready: tuple[WindowTile, Wanted]) -> Posted:
        return post_tile(ready[0])

    def request(_: object) -> str:
        return f"{what} of {array.layout} on {array.layout.mesh!r}"

    with collective(array.comm, limit, prepare, request, posting) as (team, watch, (held, wanted)):
        posted = zip(team.members, team.posted(), strict=True)
        places = {rank: at for rank, words in posted if (at := Posted(*words[: len(NOWHERE)]).place) > 0}
        parts, dtype = parts_of_picks(wanted.picks, team.rank), find_word_dtype(held.tile.itemsize)
        fetch = Fetch(team, watch, parts, places, dtype, array.layout.tile_shape, lasting)
        result = None if lasting else begin_fetch(fetch, watch, array, wanted, rows, None)(watch)
    return fetch, wanted, cast("Array | None", result)  # What is wrong with the rows has been found before.


def begin_fetch(
    fetch: Fetch, watch: Watch, array: ArrayInTiles, wanted: Wanted, rows: object, out: object
) -> Callable[[Watch], Array | TileError]:
    """Begins a fetch; returns what finishes it, and gives the result, or what is wrong with this rank's arguments.

    Neighbours do not depend on these, and may be a call behind or ahead: so the rank takes part all the same.
    """
    tile, error, held = array.held.tile, None, None
    try:
        result = _check_result(out, wanted.shape, tile.dtype, tile)
        if rows is not None or wanted.held is not None:
            held = _check_held_rows(rows, wanted, tile.dtype)
    except TileError as caught:
        error, result = caught, np.empty(wanted.shape, tile.dtype)
    if measures():
        account, device = begin_account(array.layout.dtype), fetch.team.rank
        account.take(device, tile.size + result.size)
        account.receive(device, sum(part.elements for part in fetch.received))
    fetch.begin(watch, fetch.words_of(tile))

    def finish(watch: Watch) -> Array | TileError:
        if wanted.held is not None and held is not None:
            result[wanted.held[0]] = held[wanted.held[1]]
        fetch.finish(watch, view_as_words(result))
        return result if error is None else error

    return finish


class RowGather:
    """Rows, or a halo, that are fetched again and again, with the values that the tiles have at each call.

    `gather()`, or a call, returns them, in `out` if it is given. Who asks whom for what was made out with the handle,
    so that a call waits for this rank's neighbours only. All ranks make the calls of a handle in one order; `free`, or
    the end of a `with`, releases what it keeps.
    """

    def __init__(self, array: ArrayInTiles, want: Want, what: str, limit: float) -> None:
        self._array = array
        self._wanted: Wanted | None = None

        def make() -> Fetch:
            fetch, self._wanted, _ = make_fetch(array, want, what, None, limit, True)
            return fetch

        self._calls = FetchCalls(array.comm, limit, make)

    @property
    def received_rows(self) -> int:
        """How many rows, or parts of rows, come from other ranks in each call."""
        return sum(part.extents[0] for part in self._calls.fetch.received)

    @property
    def received_bytes(self) -> int:
        """How many bytes come from other ranks in each call."""
        return sum(part.elements for part in self._calls.fetch.received) * self._array.held.tile.itemsize

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks that something comes from, or goes to, in ascending order."""
        return self._calls.fetch.neighbours

    def gather(self, held_rows: object = None, *, out: object = None) -> Array:
        """The rows in the order of their indices, or the box; `held_rows` are those of `have_indices`.

        Until all neighbours have made the call as well, the tile must not change: this returns when they have. Raises
        `TileError` for arguments that do not fit, on this rank alone: the others have their rows.
        """
        return self._calls.run(lambda fetch, watch: self._begin(fetch, watch, held_rows, out))

    __call__ = gather

    def start(self, held_rows: object = None, *, out: object = None) -> StartedMove:
        """Begins a call, and returns what to wait for; until then, the tile, `held_rows` and `out` must not be changed.

        What this rank has others send is under way meanwhile. One call of a handle is under way at a time: the next one
        finishes it first.
        """
        return self._calls.start(lambda fetch, watch: self._begin(fetch, watch, held_rows, out))

    def _begin(self, fetch: Fetch, watch: Watch, rows: object, out: object) -> Callable[[Watch], Array | TileError]:
        return begin_fetch(fetch, watch, self._array, cast(Wanted, self._wanted), rows, out)

    def free(self) -> None:
        """Releases what the handle keeps, on this rank only; may be called any number of times. The handle cannot be
        called again.
        """
        self._calls.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()
