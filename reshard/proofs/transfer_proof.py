"""Transfers of any origin, proved or refuted: every element of every target tile written once, from the right place.

    f32[{x}4] on <x=2>  ->  f32[8] on <x=2>, element 5 of device 0

    transfer (1, 0, 0, 4, 4)      copies elements 0-3 of device 1's tile, which are 4-7 of the array, to 4-7: right
    transfer (1, 0, 1, 4, 4)      device 0 must hold element (4,) at 4, and element (5,) arrives: refuted

Nothing is run. What tiles hold is a list of *runs*: neighbours of a flat tile that are neighbours of the flat array,
by `types.meaning` at first, and after each turn by what its transfers copy. The last list is compared with the one of
what the target means. What this costs grows with the runs, not with how long they are.

    tile of device 1 above      from 0 on: element 4 of the array, and those after it
    device 0, after the turn    from 0 on: element 0, from 4 on: element 4; or nothing, where no transfer writes
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from reshard.errors import NamedErrors, PlanError, ProofError, UndecidedError, name_arguments, quoted
from reshard.geometry.detect import LayoutLike, as_layouts
from reshard.plans.descriptors import Descriptor, read_transfer
from reshard.plans.plan import Plan, group_moves
from reshard.plans.rules.bounds import joint_endpoint_bound, joint_lower_bound
from reshard.proofs.parts import compare_parts
from reshard.proofs.refute import Counterexample
from reshard.proofs.symbolic.contract import list_indices, offset_of_held
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.mesh import MeshLike
from reshard.types.move import Move
from reshard.types.units import bytes_text, counted, listed
from reshard.types.view import ViewMap, canonical_map
from reshard.types.whole import MOST

MOST_RUNS = 1 << 26
"""The most runs of all tiles, or of all transfers of a turn, that are compared: some ten numbers of 8 bytes each."""

_PADDING, _KEPT, _UNWRITTEN, _EMPTY, _DOUBLED = -1, -2, -3, -4, -5
"""What is no element: padding, what a move into part of the target leaves, what nothing wrote, copies of such, and what
several transfers wrote."""

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Verified:
    """Transfers that are proved to make a move, and what they send: bytes of the busiest device beside the bounds.

    `ratio` is what the busiest device sends or receives over `endpoint_bound_bytes`, 1.0 at the bound. `filled` are the
    targets of a tree of which something is left as it is, so that they must be there before.
    """

    transfers: int
    turns: int
    received_bytes: int
    sent_bytes: int
    lower_bound_bytes: int
    endpoint_bound_bytes: int
    filled: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """How many times the bound the busiest device sends or receives; 1.0 where nothing need move, nor does."""
        busiest = max(self.received_bytes, self.sent_bytes)
        if not self.endpoint_bound_bytes:
            return math.inf if busiest else 1.0
        return busiest / self.endpoint_bound_bytes

    def __str__(self) -> str:
        left = f"; something is left as it is in {quoted(list(self.filled[:4]))}" if self.filled else ""
        return (
            f"{counted(self.transfers, 'transfer')} in {counted(self.turns, 'turn')}, proved: "
            f"sent {bytes_text(self.sent_bytes)}, received {bytes_text(self.received_bytes)}, "
            f"{self.ratio:.3g} times the bound{left}"
        )


class _Loops(NamedTuple):
    """The transfers of a turn that repeat a run by the same loops: (extent, source stride, target stride) of each loop.

    A row has the source device, the target device, the offset of the first run in the tile of each, and its length.
    """

    axes: tuple[tuple[int, int, int], ...]
    numbers: Indices
    rows: Indices

    @property
    def runs(self) -> int:
        """How many runs each transfer has."""
        return math.prod(axis[0] for axis in self.axes)

    def offsets(self, side: int) -> Indices:
        """How far every run of a transfer is from the first, in the source's tile (side 0) or the target's (1)."""
        offsets = np.zeros(1, np.int64)
        for axis in self.axes:
            offsets = (offsets[:, None] + np.arange(axis[0]) * axis[1 + side]).ravel()
        return offsets


_Turn = list[_Loops]


@name_arguments
def verify(
    transfers: Any,
    source: LayoutLike | Move | Mapping[str, LayoutLike | Move] | None = None,
    target: LayoutLike | Mapping[str, LayoutLike] | None = None,
    *,
    mesh: MeshLike | None = None,
    sources: Mapping[str, str] | None = None,
    targets: Mapping[str, str] | None = None,
) -> Verified:
    """Proves that transfers make a move: every element of every target tile is written once, from the right place.

    A transfer is what `Plan.to_descriptors` lists, or a tuple of the same fields (`Descriptor`); a run of neighbours
    may be (source device, target device, source offset, target offset, length). Offsets, lengths and strides count
    elements of flat row-major tiles, padding included; what stays on its device is a transfer to itself. An array of
    whole numbers of five columns is a list of runs, and a table of Arrow has the columns of `Descriptor`, or these
    five. Turns after the first (`step`) read what the turn before them wrote. What a move with `into` leaves must not
    be written, what devices hold already (`have`) need not; padding may be. A `Plan` has both its transfers and its
    move.

    Layouts are in any form that `reshard.as_layout` reads; what one end of a move leaves out, the other one says, or
    `mesh`.

    Of a tree, `transfers` are a dict of such lists by the names of moves, and `source` and `target` dicts of moves or
    layouts; `sources` and `targets` say which array each move reads and fills, as in `plan_tree`. Parts of one target
    may not overlap: each of its elements is written once by all moves together.

    Raises `ProofError` with the first wrong element, by its index in the target; `PlanError` for anything that is not a
    list of transfers, and for sums and casts, which copies cannot make; `UndecidedError` for more than `MOST_RUNS`
    runs of neighbours.

    >>> import reshard as rs
    >>> before, after = (rs.Layout.parse(text, rs.Mesh(x=2)) for text in ("f32[{x}4]", "f32[8]"))
    >>> runs = [(0, 0, 0, 0, 4), (1, 0, 0, 4, 4), (0, 1, 0, 0, 4), (1, 1, 0, 4, 4)]
    >>> print(verify(runs, before, after))
    4 transfers in 1 turn, proved: sent 16 B, received 16 B, 1 times the bound
    >>> verify([*runs[:3], (1, 1, 1, 4, 3)], before, after)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    reshard.errors.ProofError: device 1 must hold element (4,) ... but element (5,) is copied there ...
    >>> verify({"w": runs, "v": runs}, {"w": before, "v": before}, {"w": after, "v": after}).received_bytes
    32
    """
    if source is None and isinstance(transfers, Plan):
        plan, transfers = transfers, transfers.to_descriptors()
        source = Move(
            plan.source,
            plan.target,
            plan.view,
            have=plan.have,
            changed=None if plan.holding is None else plan.holding.stale,
        )
    tree = isinstance(source, Mapping)
    moves = (
        _read_moves(cast("Mapping[str, Any]", source), target, mesh)
        if tree
        else {"": _read_verified_move(source, target, mesh)}
    )
    lists = _match_lists(transfers, moves) if tree else {"": transfers}
    filled = _find_filled(moves, sources, targets) if tree else ()
    known: dict[tuple[int, Move], _Loads] = {}  # Layers are alike: `TreePlan.to_descriptors` has one list for all.
    loads: list[_Loads] = []
    for name, move in moves.items():
        key = id(lists[name]), move
        with NamedErrors(name):
            known[key] = known.get(key) or _prove_transfers(lists[name], move)
        loads.append(known[key])
    sent, received = Counter[int](), Counter[int]()
    for load in loads:
        sent.update(load.sent)
        received.update(load.received)
    ends = [(m.source, m.target, None if m.view.plain else m.view, m.holding) for m in moves.values()]
    least = joint_lower_bound(ends)
    return Verified(
        sum(load.transfers for load in loads),
        max((load.turns for load in loads), default=0),
        max(received.values(), default=0),
        max(sent.values(), default=0),
        least,
        max(least, joint_endpoint_bound(ends)),
        filled,
    )


class _Loads(NamedTuple):
    """What transfers that were proved come to: how many in how many turns, and the bytes of each device."""

    transfers: int
    turns: int
    sent: Mapping[int, int]
    received: Mapping[int, int]


def _prove_transfers(transfers: Iterable[Any], move: Move) -> _Loads:
    if move.casts or move.source.partial or move.target.partial:
        raise PlanError(
            f"{move} adds or casts, and transfers only copy; verify the moves before and after it, each by its own list"
        )
    turns = _read_turns(transfers)
    problem, last = _Problem(move, move.source, move.target, move.view.map), turns[-1]
    if len(turns) == 1 and move.holding is None:
        _check_places(last, *(_Tiles.of_layout(end) for end in (move.source, move.target)))
        for at in range(len(last[0].axes) if last else 0):
            cut = _find_cut(problem, last, *last[0].axes[at][1:])
            if cut is not None:
                problem, last = _cut_problem(problem, cut), [_cut_loops(loops, cut) for loops in last]
    ends = problem.source, problem.target, *(() if move.have is None else (move.have,))
    _limit_runs(move, sum(end.mesh.size * math.prod(end.tile_shape) // max(1, _row_length(end)) for end in ends))
    held = _Tiles.of_layout(problem.source)
    held = held.filled([_list_rows(problem.source, int(device)) for device in held.devices])
    for turn in turns[:-1]:
        held = _run_turn(move, turn, held, _Tiles.of(_written_ends(turn)))
        if (held.values == _DOUBLED).any():
            _refuse_doubles(turn, held)
    _compare(problem, last, _run_turn(move, last, held, _Tiles.of_layout(problem.target)))
    sent, received = (
        {device: move.source.nbytes(elements) for device, elements in _count_loads(turns, side).items()}
        for side in (0, 1)
    )
    return _Loads(sum(len(loops.numbers) for turn in turns for loops in turn), len(turns), sent, received)


# Trees: by the names of moves, what is wanted and what is given.


def _read_verified_move(source: object, target: object, mesh: MeshLike | None) -> Move:
    if isinstance(source, Move):
        return source
    if target is None:
        raise PlanError(f"the source {quoted(source)} has no target: give verify(transfers, source, target), or a Move")
    return Move(*as_layouts(source, target, mesh))


def _read_moves(source: Mapping[str, Any], target: Any, mesh: MeshLike | None) -> dict[str, Move]:
    if target is not None and not (isinstance(target, Mapping) and set(cast("Iterable[Any]", target)) == set(source)):
        given, names = quoted(cast("object", target)), quoted(list(source)[:4])
        raise PlanError(f"the targets {given} of a tree are not a dict of layouts of the same names, {names}")
    ends = cast("Mapping[str, Any]", target or {})
    return {name: _read_verified_move(leaf, ends.get(name), mesh) for name, leaf in source.items()}


def _match_lists(transfers: Any, moves: Mapping[str, Move]) -> Mapping[str, Any]:
    if not isinstance(transfers, Mapping):
        given = quoted(cast("object", transfers))
        raise PlanError(f"the transfers {given} of a tree are not a dict of lists by the names of its moves")
    lists = cast("Mapping[str, Any]", transfers)
    if wrong := sorted(set(lists) ^ set(moves), key=str):
        raise PlanError(
            f"{quoted(wrong[:4])} have transfers and no move, or a move and no transfers; give both, or none"
        )
    return lists


def _find_filled(moves: Mapping[str, Move], sources: object, targets: object) -> tuple[str, ...]:
    """The targets of which moves leave something as it is; refuses moves that do not go together."""
    filled: list[str] = []
    for what, given in (("sources", sources), ("targets", targets)):
        named = cast("Mapping[str, str]", given if isinstance(given, Mapping) else {})
        if given is not None and (not isinstance(given, Mapping) or not set(named) <= set(moves)):
            raise PlanError(
                f"{what} {quoted(cast('object', given))}: give a dict of names of moves and names of arrays"
            )
        for array, names in group_moves(tuple(moves), [named.get(name, name) for name in moves]).items():
            layouts = {moves[name].source if what == "sources" else moves[name].target for name in names}
            if len(layouts) > 1:
                raise PlanError(
                    f"{quoted(names[:4])} are of one array, {quoted(array)}, in {len(layouts)} layouts; give one"
                )
            if what == "sources":
                continue
            views = tuple(moves[name].view for name in names)
            alone = len(names) == 1 and not views[0].into
            overlap, elements = (None, math.prod(views[0].target_shape)) if alone else compare_parts(views)
            if overlap is not None:
                one, other = (names[at] for at in overlap)
                raise PlanError(
                    f"{one} and {other} both fill an element of {quoted(array)}; parts of one target may not overlap"
                )
            kept = any(moves[name].holding is not None for name in names)
            if kept or elements < math.prod(views[0].target_shape):
                filled.append(array)
    return tuple(filled)


def _limit_runs(move: Move, runs: int) -> None:
    if runs > MOST_RUNS:
        raise UndecidedError(
            f"{move}: tiles and transfers are in {runs} runs of neighbours, and at most {MOST_RUNS} are compared; "
            f"verify a part of the array at a time"
        )


def _count_loads(turns: Iterable[_Turn], side: int) -> Counter[int]:
    """How many elements each device sends (side 0) or receives (1)."""
    load = Counter[int]()
    for loops in itertools.chain.from_iterable(turns):
        moving = loops.rows[loops.rows[:, 0] != loops.rows[:, 1]]
        devices, of = np.unique(moving[:, side], return_inverse=True)
        elements = np.zeros(len(devices), np.int64)
        np.add.at(elements, of, moving[:, 4])
        load.update(dict(zip(devices.tolist(), (elements * loops.runs).tolist(), strict=True)))
    return load


# Transfers, read into columns.


def _read_turns(transfers: Iterable[Any]) -> list[_Turn]:
    """The transfers by turn, and in each by their loops."""
    if hasattr(transfers, "__arrow_c_stream__"):
        transfers = _read_arrow(transfers)
    if isinstance(transfers, np.ndarray):
        table = _checked_table(cast("NDArray[Any]", transfers))
        return [list(_make_loops((), np.arange(len(table)), table))]
    if not isinstance(cast("object", transfers), Iterable):
        raise PlanError(f"{quoted(transfers)} is not a list of transfers; give those of Plan.to_descriptors()")
    # Lists come by the hundred thousand, and differ in few of their extents and strides: each of these is read once,
    # and what is left of a transfer is a row of five numbers, which are checked together.
    groups: dict[tuple[int, Any], tuple[list[int], list[Sequence[int]]]] = {(0, ()): ([], [])}
    plain_numbers, plain_rows = groups[0, ()]
    known: dict[Any, tuple[list[int], list[Sequence[int]], int]] = {}
    for number, each in enumerate(transfers):
        kind = type(cast("object", each))
        if (kind is tuple or kind is list) and len(each) == 5:
            plain_numbers.append(number)
            plain_rows.append(each)
            continue
        made = each if kind is Descriptor else _split_fields(each)
        try:
            group = known.get(made[4:])
        except TypeError:  # A list among the fields of a Descriptor that was made by hand.
            made = read_transfer(each)
            group = known.get(made[4:])
        if group is None:
            read = read_transfer(each)
            axes, length = _split_run(*read[4:7])
            group = *groups.setdefault((read.step, axes), ([], [])), length
            known[made[4:]] = group
        numbers, rows, length = group
        numbers.append(number)
        rows.append((*made[:4], length))
    turns: dict[int, _Turn] = {}
    for (step, axes), (numbers, rows) in sorted(groups.items()):
        if rows:
            turns.setdefault(step, []).extend(_make_loops(axes, np.array(numbers), _read_rows(rows)))
    return list(turns.values()) or [[]]


def _read_arrow(given: Any) -> Any:
    """The transfers in a table of Arrow, of any library that has its C interface."""
    try:
        table = import_module("pyarrow").table(given)
        columns: dict[str, Any] = dict(zip(table.column_names, table.columns, strict=True))
    except ImportError:
        raise PlanError(
            "a table of transfers is read by pyarrow: pip install pyarrow, or give a list of them"
        ) from None
    runs = (*Descriptor._fields[:4], "length")
    if set(columns) == set(runs):
        return np.stack([columns[field].to_numpy() for field in runs], 1)
    if set(columns) - {"step"} != set(Descriptor._fields[:7]):
        raise PlanError(
            f"a table of transfers has the columns {listed(Descriptor._fields)}, or for runs {listed(runs)}, not "
            f"{listed(list(columns))}"
        )
    return zip(*(columns[field].to_pylist() for field in Descriptor._fields if field in columns), strict=True)


def _split_fields(given: Any) -> tuple[Any, ...]:
    """A transfer in one of the forms of `read_transfer` as eight fields that can be looked up."""
    try:
        if type(given) in (tuple, list) and len(given) in (7, 8):
            return (*given[:4], *map(tuple, given[4:7]), *(given[7:] or (0,)))
        if type(given) in (tuple, list) and len(given) == 6:
            return (*given[:4], (*given[4],), tuple([(*pair,) for pair in given[5]]), None, None)
    except TypeError:
        pass  # Read below, to be refused.
    return read_transfer(given)


def _split_run(
    extents: tuple[int, ...], sources: tuple[int, ...], targets: tuple[int, ...]
) -> tuple[tuple[tuple[int, int, int], ...], int]:
    """Loops as few loops around a run of neighbours, and its length: 0 where there are no elements."""
    if not math.prod(extents):
        return (), 0
    axes: list[tuple[int, int, int]] = []
    for extent, src, dst in zip(extents, sources, targets, strict=True):
        if axes and axes[-1][1:] == (extent * src, extent * dst):  # Rows that go on evenly are one longer row.
            axes[-1] = axes[-1][0] * extent, src, dst
        elif extent != 1:
            axes.append((extent, src, dst))
    run = max((axis for axis in axes if axis[1:] == (1, 1)), default=None)
    if run is not None:
        axes.remove(run)
    return tuple(axes), 1 if run is None else run[0]


def _read_rows(rows: Sequence[Sequence[Any]]) -> Indices:
    """Rows of source device, target device, both offsets and a length, checked."""
    if set(map(type, itertools.chain.from_iterable(rows))) != {int}:
        rows = [(*made[:4], made.extents[0]) for made in map(read_transfer, rows)]
    table = np.array(rows)
    if table.dtype != np.int64 or int(table.min()) < 0:  # Of a number beyond 64 bits it is an array of objects.
        rows = [(*made[:4], made.extents[0]) for made in map(read_transfer, rows)]
        table = np.array(rows, np.int64)
    return table


def _checked_table(table: NDArray[Any]) -> Indices:
    if table.ndim != 2 or table.shape[1] != 5 or table.dtype.kind not in "iu" or (table.size and int(table.min()) < 0):
        raise PlanError(
            f"an array of {table.dtype} of shape {table.shape} is not a list of runs; give whole numbers of at least 0 "
            f"in five columns: source device, target device, source offset, target offset, length"
        )
    if table.size and int(table.max()) > MOST:
        raise PlanError(
            f"a list of runs has the number {int(table.max())}, which is larger than any tile; give elements"
        )
    return table.astype(np.int64)


def _make_loops(axes: tuple[tuple[int, int, int], ...], numbers: Indices, rows: Indices) -> Iterator[_Loops]:
    """The transfers with these loops that have elements."""
    some = rows[:, 4] > 0
    if not some.any():
        return
    made = _Loops(axes, numbers[some], rows[some])
    longest = int(made.rows[:, 4].max())
    reach = [longest - 1 + sum((axis[0] - 1) * abs(axis[side]) for axis in axes) for side in (1, 2)]
    if max(*reach, longest * made.runs) > MOST:
        raise PlanError(
            f"transfer {numbers[0]} with runs of {longest} in loops of (extent, source stride, target stride) "
            f"{quoted(axes)} reaches further than any tile; give offsets and strides in elements"
        )
    yield made


# Digits that every transfer moves whole, which need not be looked at one by one.
#
#     bf16[{fsdp}8, 7168, 4096] -> bf16[256, 7168, {tp}512], in boxes of 8 x 7168 rows of 512
#
#     all boxes have all values of the second dim, at 4096 in one tile and at 512 in the other: if the first value is
#     right, all are, and what is left to compare is bf16[{fsdp}8, 1, 4096] -> bf16[256, 1, {tp}512], in boxes of 8 rows


class _Cut(NamedTuple):
    """A digit that is left out: its radix, and what it is worth in the flat tiles of source and target, and in the flat
    arrays of source and target."""

    radix: int
    places: tuple[int, int, int, int]


class _Problem(NamedTuple):
    """What is compared: the layouts and the index map of a move, without the digits that are left out."""

    move: Move
    source: Layout
    target: Layout
    map: ViewMap
    cuts: tuple[_Cut, ...] = ()

    def put_back(self, flat: int, side: int) -> int:
        """An index in a flat tile or array of the move, numbered as `_Cut.places`; anything else is left as it is."""
        for cut in reversed(self.cuts) if flat >= 0 else ():
            place = cut.places[side]
            flat = flat // place * place * cut.radix + flat % place
        return flat


def _find_cut(problem: _Problem, turn: _Turn, *places: int) -> _Cut | None:
    """The largest digit at these places of both tiles that every transfer moves whole; None if there is none."""
    if min(places) < 1:
        return None
    radix = 0
    for loops in turn:
        found = [at for at, axis in enumerate(loops.axes) if axis[1:] == places]
        if not found:
            return None
        radix = math.gcd(radix, loops.axes[found[0]][0])
        others = [axis for at, axis in enumerate(loops.axes) if at != found[0]]
        longest = int(loops.rows[:, 4].max())
        for side, place in enumerate(places):
            offsets = loops.rows[:, 2 + side]
            radix = _divide_strides(radix, place, [(axis[0], axis[1 + side]) for axis in (*others, (longest, 1, 1))])
            below = sum((axis[0] - 1) * axis[1 + side] for axis in others if axis[1 + side] < place)
            # What other loops add must not carry into the digit.
            if radix < 2 or (offsets % place + below + longest > place).any():
                return None
            radix = math.gcd(radix, int(np.gcd.reduce(offsets // place)))
    worth: list[int] = []
    for layout, place in zip((problem.source, problem.target), places, strict=True):
        found = _find_dim(layout, place)
        if found is None:
            return None
        dim, within = found
        if layout.dims[dim].pieces is not None:
            return None
        run = math.prod(
            digit.radix for digit in itertools.takewhile(lambda d: d.axis is None, reversed(layout.dims[dim].digits))
        )
        if within >= run or run % within or layout.dims[dim].size % within:
            return None
        radix = math.gcd(radix, run // within, layout.dims[dim].size // within)
        worth.append(within * math.prod(layout.shape[dim + 1 :]))
    radix = _divide_map(problem.map, radix, *worth)
    return _Cut(radix, (places[0], places[1], worth[0], worth[1])) if radix > 1 else None


def _divide_strides(radix: int, place: int, axes: Iterable[tuple[int, int]]) -> int:
    """The largest part of a digit at a place that loops of (extent, stride) step over, or stay below; 1 if none."""
    for extent, stride in axes:
        if stride < 0 or (extent > 1 and stride >= place and stride % place):
            return 1
        if extent > 1 and stride >= place:
            radix = math.gcd(radix, stride // place)
    return radix


def _find_dim(layout: Layout, place: int) -> tuple[int, int] | None:
    """The dim that a stride in a flat tile is along, and how many of its indices."""
    stride = 1
    for at, extent in reversed(list(enumerate(layout.tile_shape))):
        if place < stride * extent:
            return None if place % stride else (at, place // stride)
        stride *= extent
    return None


def _divide_map(view: ViewMap, radix: int, source: int, target: int) -> int:
    """The largest part of a digit, at these places of both arrays, that is one in the index map, too; 1 if none."""
    at = next((at for at, digit in enumerate(view.digits) if 0 < digit[2] <= target), None)
    if at is None:
        return 1
    count, *strides = view.digits[at]
    within = target // strides[1]
    if target % strides[1] or strides[0] * within != source or within >= count or count % within:
        return 1
    radix = math.gcd(radix, count // within)
    for side, place, offset in ((1, source, view.start), (2, target, view.end)):
        others = [(digit[0], digit[side]) for number, digit in enumerate(view.digits) if number != at]
        below = sum((extent - 1) * stride for extent, stride in others if stride < place)
        if offset % place + below + (within - 1) * strides[side - 1] >= place:
            return 1
        radix = math.gcd(_divide_strides(radix, place, others), offset // place)
    return radix


def _cut_problem(problem: _Problem, cut: _Cut) -> _Problem:
    radix, (*tiles, source, target) = cut
    layouts: list[Layout] = []
    for layout, place in zip((problem.source, problem.target), tiles, strict=True):
        found = _find_dim(layout, place)
        dims = list(layout.dims)
        if found is not None:
            digits, size, _ = dims[found[0]]
            whole = len(list(itertools.takewhile(lambda digit: digit.axis is None, reversed(digits))))
            run = Digit(math.prod(digit.radix for digit in digits[len(digits) - whole :]) // radix, None)
            dims[found[0]] = Dim((*digits[: len(digits) - whole], run), size // radix)
        layouts.append(replace(layout, dims=tuple(dims)))
    digits, start, end = problem.map
    at = next(at for at, digit in enumerate(digits) if 0 < digit[2] <= target)
    made = [
        (count, src // radix if src >= source else src, dst // radix if dst >= target else dst)
        if number != at
        else (count // radix, src, dst)
        for number, (count, src, dst) in enumerate(digits)
    ]
    ends = (_drop_digit(flat, place, radix) for flat, place in ((start, source), (end, target)))
    return _Problem(problem.move, layouts[0], layouts[1], canonical_map(made, *ends), (*problem.cuts, cut))


def _cut_loops(loops: _Loops, cut: _Cut) -> _Loops:
    radix, places = cut.radix, cut.places[:2]
    at = next(at for at, axis in enumerate(loops.axes) if axis[1:] == places)
    axes = [
        (
            count,
            *(stride // radix if stride >= place else stride for stride, place in zip(strides, places, strict=True)),
        )
        if number != at
        else (count // radix, *strides)
        for number, (count, *strides) in enumerate(loops.axes)
    ]
    rows = loops.rows.copy()
    for side, place in enumerate(places):
        rows[:, 2 + side] = _drop_digit(rows[:, 2 + side], place, radix)
    return _Loops(cast("Any", tuple(axes)), loops.numbers, rows)


def _drop_digit(flat: Any, place: int, radix: int) -> Any:
    """An index of which the digit at a place is 0, without that digit."""
    return flat // (place * radix) * place + flat % place


# Tiles as runs.


class _Tiles(NamedTuple):
    """Flat tiles behind one another: their devices in order, where each begins, how long each is, and their runs.

    Of each run `starts` has the first position, and `values` the index in the flat array of the element there; those of
    what is no element are negative, and are that of the whole run.
    """

    devices: Indices
    bases: Indices
    sizes: Indices
    starts: Indices
    values: Indices

    @classmethod
    def of(cls, sizes: Mapping[int, int]) -> _Tiles:
        """Tiles without runs."""
        if sum(sizes.values()) > MOST:
            raise UndecidedError(f"tiles of {sum(sizes.values())} elements are too many to be counted; verify a part")
        devices = np.array(sorted(sizes), np.int64)
        each = np.array([sizes[int(device)] for device in devices], np.int64)
        none = np.zeros(0, np.int64)
        return cls(devices, np.cumsum(each) - each, each, none, none)

    @classmethod
    def of_layout(cls, layout: Layout) -> _Tiles:
        """The tiles of a layout, without runs."""
        return cls.of(dict.fromkeys(layout.mesh.devices, math.prod(layout.tile_shape)))

    def filled(self, tiles: Sequence[tuple[Indices, Indices]]) -> _Tiles:
        """The same tiles with these runs of each of them."""
        starts = [base + starts for base, (starts, _) in zip(self.bases, tiles, strict=True)]
        joined = (np.concatenate(each or [np.zeros(0, np.int64)]) for each in (starts, [each[1] for each in tiles]))
        return self._replace(starts=next(joined), values=next(joined))

    @property
    def total(self) -> int:
        """The elements of all tiles."""
        return int(self.sizes.sum())

    @property
    def ends(self) -> Indices:
        """Where each run ends."""
        return np.append(self.starts[1:], self.total) if len(self.starts) else self.starts

    def place(self, devices: Indices) -> Indices:
        """The positions of these devices among those with tiles; -1 for others."""
        if not len(self.devices):
            return np.full(len(devices), -1)
        at = np.minimum(np.searchsorted(self.devices, devices), len(self.devices) - 1)
        return np.where(self.devices[at] == devices, at, -1)

    def find(self, position: int) -> tuple[int, int]:
        """The device and the local index of a position."""
        at = int(np.searchsorted(self.bases + self.sizes, position, "right"))
        return int(self.devices[at]), position - int(self.bases[at])

    def read(self, runs: Indices, positions: Indices) -> Indices:
        """What is at positions in these runs."""
        values = self.values[runs]
        return np.where(values < 0, values, values + positions - self.starts[runs])


def _row_length(layout: Layout) -> int:
    """How many neighbours of a flat tile are neighbours of the flat array: its last dims that are whole, and a run."""
    length = 1
    for dim in reversed(layout.dims):
        for radix, axis in reversed(dim.digits):
            if axis is not None or dim.pieces is not None:
                return length
            length *= radix
    return length


def _list_rows(layout: Layout, device: int) -> tuple[Indices, Indices]:
    """Where the runs of a flat tile start, and the index in the flat array of the element there, or `_PADDING`.

    This is the definition of `types.meaning`, for the first element of each row.
    """
    shape, length, position = layout.tile_shape, _row_length(layout), layout.mesh.position(device)
    starts = np.arange(0, math.prod(shape), max(1, length))
    local = np.unravel_index(starts, shape) if shape and len(starts) else [starts] * len(shape)
    flat, real, inner = np.zeros(len(starts), np.int64), np.full(len(starts), length), math.prod(shape)
    for rest, dim in zip(local, layout.dims, strict=True):
        index, place, inner = np.zeros(len(starts), np.int64), 1, inner // max(1, dim.tile)
        if dim.pieces is not None:
            held = offset_of_held(dim, layout, np.array([position]))
            index = list_indices(dim, int(held[0]))[rest]
        for radix, axis in reversed(dim.digits) if dim.pieces is None else ():
            index += place * (rest % radix if axis is None else layout.mesh.coordinate(position, axis))
            rest = rest // radix if axis is None else rest
            place *= radix
        if dim.padded != dim.tile:  # Else all of the dim is here, and none of it padding.
            real = np.minimum(real, np.maximum(dim.size - index, 0) * inner)
        flat = flat * dim.size + index
    if (real == length).all():
        return starts, flat
    pairs = np.stack([starts, starts + real], 1), np.stack([flat, np.full(len(flat), _PADDING)], 1)
    some = np.stack([real > 0, real < length], 1)
    return pairs[0][some], pairs[1][some]


def _list_wanted(problem: _Problem, device: int) -> tuple[Indices, Indices, Indices]:
    """Runs of a flat tile of the target: where they start, their index in the target, and in the source what belongs
    there."""
    starts, index = _list_rows(problem.target, device)
    lengths = np.append(starts[1:], math.prod(problem.target.tile_shape)) - starts if len(starts) else starts
    digits, start, end = problem.map
    # Every `period` elements of the target, from `end` on, the view has a run of the source, of `run` elements.
    rows, run = (digits[:-1], digits[-1][0]) if digits and digits[-1][1:] == (1, 1) else (digits, 1)
    period = max(1, rows[-1][2]) if rows else math.prod(problem.target.shape) + end + run
    real = index >= 0
    first = np.where(real, (index - end) // period, 0)
    count = np.where(real, (index + lengths - 1 - end) // period - first + 1, 1)
    _limit_runs(problem.move, 2 * int(count.sum()))
    of, turn = _repeat_each(count)
    low = np.where(real[of], np.maximum(index[of], end + period * (first[of] + turn)), 0)
    high = np.where(real[of], np.minimum((index + lengths)[of], end + period * (first[of] + turn + 1)), lengths[of])
    cut = np.clip(end + period * (first[of] + turn) + run, low, high) if run < period else high
    pieces, some = np.stack([low, cut], 1), np.stack([low < cut, cut < high], 1)
    pieces, of = pieces[some], np.stack([of, of], 1)[some]
    rest = pieces - end
    value, reached = np.full(len(pieces), start), rest >= 0
    for size, src, dst in digits:
        at = rest // max(1, dst)
        reached &= at < size
        value += at * src
        rest = rest - at * dst
    value = np.where(real[of], np.where(reached & (rest == 0), value, _KEPT), _PADDING)
    return starts[of] + pieces - np.where(real[of], index[of], 0), np.where(real[of], pieces, MOST), value


def _list_stale(move: Move) -> tuple[Indices, Indices]:
    """The runs of the flat source that have changed since devices got what they hold: starts and lengths."""
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for box in move.holding.stale.boxes if move.holding is not None else ():
        starts, length, place = np.zeros(1, np.int64), 1, 1
        for (low, high), size in zip(reversed(box), reversed(move.source.shape), strict=True):
            if length == place:  # All of the dims after this one: their runs are one.
                starts, length = starts + low * place, (high - low) * place
            else:
                _limit_runs(move, len(starts) * (high - low))
                starts = (np.arange(low, high)[:, None] * place + starts).ravel()
            place *= size
        found.append((starts, np.full(len(starts), length)))
    starts, lengths = (np.concatenate(each) for each in zip(*found, strict=True))
    return starts, lengths


def _list_fresh(
    move: Move, device: int, wanted: tuple[Indices, Indices, Indices], stale: tuple[Indices, Indices]
) -> tuple[Indices, Indices]:
    """The runs of a flat tile of the target that its device holds, and that have not changed: starts and ends."""
    starts, index, values = wanted
    if move.holding is None or device not in move.holding.layout.mesh.devices:
        return starts[:0], starts[:0]
    have = move.holding.layout
    at, rows = _list_rows(have, device)
    held = rows[rows >= 0], (np.append(at[1:], math.prod(have.tile_shape)) - at)[rows >= 0]
    lengths = np.append(starts[1:], math.prod(move.target.tile_shape)) - starts
    keep = values >= 0
    starts, index, values, lengths = starts[keep], index[keep], values[keep], lengths[keep]
    for inside, (begins, extents), shape in ((1, held, move.target.shape), (0, stale, move.source.shape)):
        # The flat array in pieces that are in turn without and within: even ones and odd ones.
        order = np.argsort(begins)
        edges = np.append(0, np.stack([begins, begins + extents], 1)[order].ravel())
        flat = index if inside else values
        of, pieces, low, cut = _cut_runs(move, edges, math.prod(shape), flat, lengths)
        keep = (pieces % 2 == inside) & (cut > 0)
        of, shift, lengths = of[keep], (low - flat[of])[keep], cut[keep]
        starts, index, values = starts[of] + shift, index[of] + shift, values[of] + shift
    return starts, starts + lengths


def _repeat_each(count: Indices) -> tuple[Indices, Indices]:
    """As many of each number as `count` says, and how many of its own are before each."""
    of = np.repeat(np.arange(len(count)), count)
    return of, np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)


# A turn.


def _run_turn(move: Move, turn: _Turn, before: _Tiles, after: _Tiles) -> _Tiles:
    """What every device holds after a turn."""
    reads, writes, lengths = _list_compared_runs(move, turn, before, after)
    if len(reads):
        of, runs, low, lengths = _cut_runs(move, before.starts, before.total, reads, lengths)
        values = before.read(runs, low)
        writes, values = writes[of] + low - reads[of], np.where(values == _UNWRITTEN, _EMPTY, values)
    else:
        values = reads
    return _lay_runs(after, writes, lengths, values)


def _cut_runs(
    move: Move, edges: Indices, total: int, starts: Indices, lengths: Indices
) -> tuple[Indices, Indices, Indices, Indices]:
    """Runs, cut where others begin at `edges`: for each piece the run that it is of, the number of the edge before it,
    where it starts and how long it is."""
    first = np.searchsorted(edges, starts, "right") - 1
    count = np.searchsorted(edges, starts + lengths, "left") - first
    _limit_runs(move, int(count.sum()))
    of, at = _repeat_each(count)
    pieces = first[of] + at
    low = np.maximum(edges[pieces], starts[of])
    return of, pieces, low, np.minimum(np.append(edges[1:], total)[pieces], (starts + lengths)[of]) - low


def _list_compared_runs(move: Move, turn: _Turn, before: _Tiles, after: _Tiles) -> tuple[Indices, Indices, Indices]:
    """The runs that a turn copies: where each is read, where it is written, and how long it is."""
    _check_places(turn, before, after)
    _limit_runs(move, sum(len(loops.rows) * loops.runs for loops in turn))
    none = np.zeros(0, np.int64)
    found = [(none, none, none)]
    for loops in turn:
        reads, writes = (
            (tiles.bases[tiles.place(loops.rows[:, side])] + loops.rows[:, 2 + side])[:, None] + loops.offsets(side)
            for side, tiles in enumerate((before, after))
        )
        found.append((reads.ravel(), writes.ravel(), np.repeat(loops.rows[:, 4], loops.runs)))
    reads, writes, lengths = (np.concatenate(each) for each in zip(*found, strict=True))
    return reads, writes, lengths


def _check_places(turn: _Turn, before: _Tiles, after: _Tiles) -> None:
    """Refuses the first transfer that leaves a tile."""
    outside = [_find_outside(loops, tiles, side) for loops in turn for side, tiles in enumerate((before, after))]
    if errors := [each for each in outside if each is not None]:
        raise min(errors, key=lambda each: each[0])[1]


def _find_outside(loops: _Loops, tiles: _Tiles, side: int) -> tuple[int, ProofError] | None:
    """The first transfer that leaves the tile of its device, and the error that says so."""
    at, start = tiles.place(loops.rows[:, side]), loops.rows[:, 2 + side]
    low, high = (
        sum((axis[0] - 1) * end(0, axis[1 + side]) for axis in loops.axes)
        for end in cast("tuple[Any, ...]", (min, max))
    )
    sizes = np.where(at < 0, 0, tiles.sizes[at]) if len(tiles.sizes) else np.zeros(len(at), np.int64)
    outside = (start < -low) | (start > sizes - high - loops.rows[:, 4])  # No sum of both, which could overflow.
    if not outside.any():
        return None
    row = np.flatnonzero(outside)[np.argmin(loops.numbers[outside])]
    number, device = int(loops.numbers[row]), int(loops.rows[row, side])
    does, has = ("reads", "holds") if side == 0 else ("writes", "has room for")
    last = int(start[row]) + high + int(loops.rows[row, 4]) - 1
    what = (
        f"transfer {number} {does} elements {int(start[row]) + low} to {last} of the tile of device {device}, which "
        f"{has} {counted(int(sizes[row]), 'element')}"
    )
    return number, ProofError(what, Counterexample("right", what, device))


def _written_ends(turn: _Turn) -> dict[int, int]:
    """How far into each device's tile a turn writes."""
    ends: dict[int, int] = {}
    for loops in turn:
        devices, of = np.unique(loops.rows[:, 1], return_inverse=True)
        most = np.zeros(len(devices), np.uint64)  # Two numbers of 63 bits make one of 64.
        np.maximum.at(most, of, loops.rows[:, 3].astype(np.uint64) + loops.rows[:, 4].astype(np.uint64))
        last = sum((axis[0] - 1) * max(0, axis[2]) for axis in loops.axes)
        for device, end in zip(devices.tolist(), most.tolist(), strict=True):
            ends[device] = max(ends.get(device, 0), end + last)
    return ends


def _lay_runs(tiles: _Tiles, starts: Indices, lengths: Indices, values: Indices) -> _Tiles:
    """The tiles with runs written into them: `_UNWRITTEN` where there is none, `_DOUBLED` where there are several."""
    if (starts[1:] < starts[:-1]).any():
        order = np.argsort(starts, kind="stable")
        starts, lengths, values = starts[order], lengths[order], values[order]
    ends = starts + lengths
    if (ends[:-1] > starts[1:]).any():
        # A sweep over all ends of runs: how many are open there, and what they say in sum, which is what the one says
        # where one is open. Sums may overflow, and come back.
        marks = np.unique(np.concatenate([starts, ends]))
        sums = np.zeros((3, len(marks)), np.int64)
        rising = values >= 0
        for side, at in ((1, starts), (-1, ends)):
            where = np.searchsorted(marks, at)
            for row, each in enumerate((np.ones(len(at), np.int64), rising, np.where(rising, values - starts, values))):
                np.add.at(sums[row], where, side * each)
        count, rising, values = np.cumsum(sums, axis=1)
        values = np.where(count > 1, _DOUBLED, np.where(count == 1, values + rising * marks, _UNWRITTEN))
        starts, ends = marks[:-1], marks[1:]
        values = values[:-1]
    # What no run covers is a run as well.
    edges = np.concatenate([[0], ends]), np.append(starts, tiles.total)
    gaps = edges[0][edges[0] < edges[1]]
    if len(gaps):
        starts, values = np.append(starts, gaps), np.append(values, np.full(len(gaps), _UNWRITTEN))
        order = np.argsort(starts, kind="stable")
        starts, values = starts[order], values[order]
    return tiles._replace(starts=starts, values=values)


def _refuse_doubles(turn: _Turn, held: _Tiles) -> None:
    """Raises for the first element, device by device, that several transfers of a turn write."""
    device, local = held.find(int(held.starts[np.argmax(held.values == _DOUBLED)]))
    numbers = [number for number, _ in _find_writers(turn, device, local)]
    both = (
        f"transfer {numbers[0]} twice writes"
        if len(numbers) == 1
        else f"transfers {numbers[0]} and {numbers[1]} both write"
    )
    what = f"{both} element {local} of the tile of device {device}; each is written once"
    raise ProofError(what, Counterexample("right", what, device))


def _find_writers(turn: _Turn, device: int, local: int) -> list[tuple[int, int]]:
    """The transfers that write an element of a device's tile, in order, and the device that each reads from."""
    found: list[tuple[int, int]] = []
    for loops in turn:
        offsets = np.sort(loops.offsets(1))
        mine = np.flatnonzero(loops.rows[:, 1] == device)
        for row in mine:
            rest = local - int(loops.rows[row, 3]) - offsets
            if ((rest >= 0) & (rest < loops.rows[row, 4])).any():
                found.append((int(loops.numbers[row]), int(loops.rows[row, 0])))
    return sorted(found)


def _compare(problem: _Problem, last: _Turn, held: _Tiles) -> None:
    """Raises for the first element, by its index in the target, that is not what the target means."""
    move = problem.move
    wanted = [_list_wanted(problem, int(device)) for device in held.devices]
    want = held.filled([(starts, values) for starts, _, values in wanted])
    order = np.concatenate([index for _, index, _ in wanted])
    stale = _list_stale(move)
    fresh = [_list_fresh(move, int(device), each, stale) for device, each in zip(held.devices, wanted, strict=True)]
    edges = [
        np.concatenate([each[side] + base for base, each in zip(held.bases, fresh, strict=True)] or [held.starts])
        for side in (0, 1)
    ]
    marks = np.unique(np.concatenate([want.starts, held.starts, *edges]))
    marks = marks[marks < held.total]
    here, there = (np.searchsorted(tiles.starts, marks, "right") - 1 for tiles in (want, held))
    means, has = want.read(here, marks), held.read(there, marks)
    wrong = has != np.where(means == _KEPT, _UNWRITTEN, means)
    # What a device holds already may be left as it is.
    kept = np.searchsorted(edges[0], marks, "right") > np.searchsorted(edges[1], marks, "right")
    wrong &= ~kept | (has != _UNWRITTEN)
    wrong = np.flatnonzero((wrong & (means != _PADDING)) | (has == _DOUBLED))
    if not len(wrong):
        return
    index = np.where(means == _PADDING, MOST, order[here] + marks - want.starts[here])
    first = wrong[np.argmin(index[wrong])]
    device, local = held.find(int(marks[first]))
    writers = _find_writers(last, device, local)
    belongs, actual = (problem.put_back(int(each[first]), 2) for each in (means, has))
    place = _unravel(problem.put_back(local, 1), move.target.tile_shape)
    shapes = move.source.shape, move.source.tile_shape, move.target.tile_shape
    element, found = (_unravel(at, move.source.shape) if at >= 0 else None for at in (belongs, actual))
    if belongs == _KEPT:
        what = f"device {device} must keep what it has at local index {place}, but "
    elif belongs == _PADDING:
        what = f"device {device} has padding at local index {place}, but "
    else:
        what = f"device {device} must hold element {element} of the array at local index {place}"
        there = _unravel(problem.put_back(int(index[first]), 3), move.target.shape)
        what += ", but " if move.view.plain else f", element {there} of the target, but "
    if len(writers) > 1:
        what += f"transfers {writers[0][0]} and {writers[1][0]} both write there"
    elif actual == _DOUBLED:
        what += f"transfer {writers[0][0]} writes there twice"
    elif not writers:
        what += "no transfer writes it"
    elif belongs == _KEPT:
        what += f"transfer {writers[0][0]} writes there"
    else:
        come = f"element {found} is" if found else "padding is" if actual == _PADDING else "what nothing has written is"
        what += f"{come} copied there from device {writers[0][1]} (transfer {writers[0][0]})"
    raise ProofError(what, Counterexample("right", what, device, place, element, found, shapes))


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(at) for at in np.unravel_index(flat, shape)) if shape else ()
