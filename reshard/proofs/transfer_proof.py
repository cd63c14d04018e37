"""Transfers of any origin, proved or refuted: every element of every target tile written once, from the right place.

    f32[{x}4] on <x=2>  ->  f32[8] on <x=2>, element 5 of device 0

    transfer (1, 0, 0, 4, 4)      copies elements 0-3 of device 1's tile, which are 4-7 of the array, to 4-7: right
    transfer (1, 0, 1, 4, 4)      device 0 must hold element (4,) at 4, and element (5,) arrives: refuted

Nothing is run. Each tile is an array of the global indices that its elements have by `types.meaning`; the transfers are
applied to these arrays, and the last ones are compared with what the target means. All that is compared counts *units*:
the longest runs, of equal length, that no tile, no view and no transfer cuts, so that what it costs does not depend on
how long the rows are.

    tiles of 4096 x 1024 of an array of 4096 x 8192, moved in rows of 1024     4,096 units a tile, not 4 million
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from reshard.errors import PlanError, ProofError, UndecidedError, quoted
from reshard.plans.descriptors import Descriptor, read_descriptor
from reshard.plans.rules.bounds import endpoint_bound, lower_bound
from reshard.proofs.refute import Counterexample
from reshard.types.layout import Layout
from reshard.types.move import Move
from reshard.types.units import bytes_text, counted
from reshard.types.whole import MOST, whole

MOST_UNITS = 1 << 28
"""The most units of all tiles of a turn that are compared, of 8 bytes each."""

_PADDING, _KEPT, _UNWRITTEN, _EMPTY = -1, -2, -3, -4
"""Units that are no element, that a move into part of the target leaves, that nothing wrote, and copies of such."""

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Verified:
    """Transfers that are proved to make a move, and what they send: bytes of the busiest device beside the bounds.

    `ratio` is what the busiest device sends or receives over `endpoint_bound_bytes`, 1.0 at the bound.
    """

    transfers: int
    turns: int
    received_bytes: int
    sent_bytes: int
    lower_bound_bytes: int
    endpoint_bound_bytes: int

    @property
    def ratio(self) -> float:
        """How many times the bound the busiest device sends or receives; 1.0 where nothing need move, nor does."""
        busiest = max(self.received_bytes, self.sent_bytes)
        if not self.endpoint_bound_bytes:
            return math.inf if busiest else 1.0
        return busiest / self.endpoint_bound_bytes

    def __str__(self) -> str:
        return (
            f"{counted(self.transfers, 'transfer')} in {counted(self.turns, 'turn')}, proved: "
            f"sent {bytes_text(self.sent_bytes)}, received {bytes_text(self.received_bytes)}, "
            f"{self.ratio:.3g} times the bound"
        )


class _Axis(NamedTuple):
    """`extent` elements, `src` apart in the source's tile and `dst` apart in the target's."""

    extent: int
    src: int
    dst: int


class _Loops(NamedTuple):
    """The transfers of a turn that have the same loops: their numbers, and for each (source, target, both offsets)."""

    axes: tuple[_Axis, ...]
    numbers: Indices
    rows: Indices


_Turn = list[_Loops]


def verify(transfers: Iterable[Any], source: Layout | Move, target: Layout | None = None) -> Verified:
    """Proves that transfers make a move: every element of every target tile is written once, from the right place.

    A transfer is what `Plan.to_descriptors` lists, or a tuple of the same fields (`Descriptor`); a run of neighbours
    may be (source device, target device, source offset, target offset, length). Offsets, lengths and strides count
    elements of flat row-major tiles, padding included; what stays on its device is a transfer to itself. An array of
    whole numbers of five columns is a list of runs. Turns after the first (`step`) read what the turn before them
    wrote. What a move with `into` leaves must not be written; padding may be.

    Raises `ProofError` with the first wrong element, by its index in the target; `PlanError` for anything that is not a
    list of transfers, and for sums and casts, which copies cannot make; `UndecidedError` for more than `MOST_UNITS`
    runs.

    >>> import reshard as rs
    >>> before, after = (rs.Layout.parse(text, rs.Mesh(x=2)) for text in ("f32[{x}4]", "f32[8]"))
    >>> runs = [(0, 0, 0, 0, 4), (1, 0, 0, 4, 4), (0, 1, 0, 0, 4), (1, 1, 0, 4, 4)]
    >>> print(verify(runs, before, after))
    4 transfers in 1 turn, proved: sent 16 B, received 16 B, 1 times the bound
    >>> verify([*runs[:3], (1, 1, 1, 4, 3)], before, after)
    Traceback (most recent call last):
    reshard.errors.ProofError: device 1 must hold element (4,) of the array at local index (4,), but element (5,) is \
copied there from device 1 (transfer 3)
    """
    if not isinstance(source, Move) and target is None:
        raise PlanError(f"the source {quoted(source)} has no target: give verify(transfers, source, target), or a Move")
    move = source if isinstance(source, Move) else Move(source, cast("Layout", target))
    if move.casts or move.source.partial or move.target.partial:
        raise PlanError(
            f"{move} adds or casts, and transfers only copy; verify the moves before and after it, each by its own list"
        )
    turns = _read_turns(transfers)
    unit = _common_unit(move, turns)
    size = sum(layout.mesh.size * math.prod(layout.tile_shape) for layout in (move.source, move.target))
    size += sum(sum(_written_ends(turn).values()) for turn in turns[:-1])
    longest = max((math.prod(axis.extent for axis in loops.axes) for turn in turns for loops in turn), default=0)
    if max(size, longest) > MOST_UNITS * unit:
        raise UndecidedError(
            f"{move}: the transfers cut its tiles into more than {MOST_UNITS} runs of {counted(unit, 'element')}; "
            f"verify a part of the array at a time"
        )
    held = {device: _array_units(move.source, device, unit) for device in move.source.mesh.devices}
    sent, received = Counter[int](), Counter[int]()
    for turn in turns[:-1]:
        held = _run_turn(turn, unit, held, None)
    wanted = {device: _wanted_units(move, device, unit) for device in move.target.mesh.devices}
    _compare(move, unit, turns[-1], _run_turn(turns[-1], unit, held, wanted), wanted)
    for loops in itertools.chain.from_iterable(turns):
        elements = math.prod(axis.extent for axis in loops.axes)
        for device, load in ((0, sent), (1, received)):
            moving = loops.rows[loops.rows[:, 0] != loops.rows[:, 1], device]
            devices, counts = np.unique(moving, return_counts=True)
            load.update(dict(zip(devices.tolist(), (counts * elements).tolist(), strict=True)))
    in_bytes, out_bytes = (move.source.nbytes(max(load.values(), default=0)) for load in (received, sent))
    ends = move.source, move.target, None if move.view.plain else move.view
    count = sum(len(loops.numbers) for loops in itertools.chain.from_iterable(turns))
    return Verified(count, len(turns), in_bytes, out_bytes, lower_bound(*ends), endpoint_bound(*ends))


def _read_turns(transfers: Iterable[Any]) -> list[_Turn]:
    """The transfers by turn, and in each by their loops."""
    if isinstance(transfers, np.ndarray):
        return [_group_runs(cast("NDArray[Any]", transfers))]
    groups: dict[int, dict[Any, tuple[list[int], list[Sequence[int]]]]] = {}
    if not isinstance(cast("object", transfers), Iterable):
        raise PlanError(f"{quoted(transfers)} is not a list of transfers; give those of Plan.to_descriptors()")
    for number, each in enumerate(transfers):
        if type(each) is Descriptor and whole(each.step) is not None:
            made: Any = each
        elif type(each) is tuple and len(run := cast("tuple[Any, ...]", each)) == 5:
            made = (*run[:4], (run[4],), (1,), (1,), 0)  # Runs come by the hundred thousand; they are checked below.
        else:
            made = read_descriptor(cast("object", each))
        try:
            numbers, rows = groups.setdefault(made[7], {}).setdefault(made[4:7], ([], []))
        except TypeError:  # A list among the fields of a Descriptor that was made by hand.
            made = read_descriptor(cast("object", each))
            numbers, rows = groups.setdefault(made[7], {}).setdefault(made[4:7], ([], []))
        numbers.append(number)
        rows.append(made[:4])
    turns: list[_Turn] = []
    for step in sorted(groups):
        turn = [
            _make_loops(fields, numbers, _checked_rows(rows, fields))
            for fields, (numbers, rows) in groups[step].items()
        ]
        turns.append([loops for loops in turn if loops is not None])
    return turns or [[]]


def _group_runs(table: NDArray[Any]) -> _Turn:
    """The runs of an array, one in each row."""
    if table.ndim != 2 or table.shape[1] != 5 or table.dtype.kind not in "iu" or (table.size and int(table.min()) < 0):
        raise PlanError(
            f"an array of {table.dtype} of shape {table.shape} is not a list of runs; give whole numbers of at least 0 "
            f"in five columns: source device, target device, source offset, target offset, length"
        )
    runs = table.astype(np.int64)
    lengths, of = np.unique(runs[:, 4], return_inverse=True)
    order = np.argsort(of, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(of, minlength=len(lengths)))[:-1]) if len(lengths) else []
    turn = [
        _make_loops(((int(length),), (1,), (1,)), rows, runs[rows, :4])
        for length, rows in zip(lengths, parts, strict=True)
    ]
    return [loops for loops in turn if loops is not None]


def _make_loops(fields: Any, numbers: Any, rows: Indices) -> _Loops | None:
    """The transfers of some loops, checked; None for loops without elements."""
    extents, sources, targets = read_descriptor((0, 0, 0, 0, *fields))[4:7]
    if not math.prod(extents):
        return None
    reach = [
        sum((extent - 1) * abs(step) for extent, step in zip(extents, side, strict=True)) for side in (sources, targets)
    ]
    if max(*reach, math.prod(extents)) > MOST:
        raise PlanError(
            f"transfer {numbers[0]} of extents {quoted(extents)} and strides {quoted(sources)}, {quoted(targets)} "
            f"reaches further than any tile; give offsets and strides in elements"
        )
    axes: list[_Axis] = []
    for extent, src, dst in zip(extents, sources, targets, strict=True):
        if axes and axes[-1][1:] == (extent * src, extent * dst):  # Rows that go on evenly are one longer row.
            axes[-1] = _Axis(axes[-1].extent * extent, src, dst)
        elif extent != 1:
            axes.append(_Axis(extent, src, dst))
    return _Loops(tuple(axes), np.asarray(numbers, np.int64), rows)


def _checked_rows(rows: Sequence[Sequence[int]], fields: Any) -> Indices:
    """The devices and offsets of transfers as an array; all are checked: a `Descriptor` checks none of its fields."""
    try:
        table = np.array(rows)
    except (ValueError, OverflowError):
        table = np.array(rows, object)
    if table.dtype != np.int64 or table.ndim != 2 or int(table.min()) < 0:
        return np.array([read_descriptor((*row, *fields))[:4] for row in rows], np.int64)
    return table


# Units: runs of a length that divides every run of either tile, of the view and of the transfers.


def _common_unit(move: Move, turns: Iterable[_Turn]) -> int:
    unit = math.gcd(_unit_of_tile(move.source), _unit_of_tile(move.target))
    digits, start, end = move.view.map
    unit = math.gcd(unit, start, end, _unit_of_loops(digits))
    for loops in itertools.chain.from_iterable(turns):
        unit = math.gcd(unit, _unit_of_loops(loops.axes), *np.gcd.reduce(loops.rows[:, 2:], axis=0).tolist())
    return unit


def _unit_of_tile(layout: Layout) -> int:
    """The run of a flat tile whose multiples are runs of the array: its last dims that are whole, and a part of one."""
    unit = 1
    for dim in reversed(layout.dims):
        local = 1
        for radix, axis in reversed(dim.digits):
            if axis is not None:
                return unit * math.gcd(local, dim.size)
            local *= radix
        if local != dim.size:
            return unit * math.gcd(local, dim.size)
        unit *= local
    return unit


def _unit_of_loops(axes: Iterable[tuple[int, int, int]]) -> int:
    """The longest run that loops copy whole, from multiples of it to multiples of it."""
    runs = [extent for extent, src, dst in axes if src == dst == 1]
    return (
        math.gcd(*runs, *(stride for _, src, dst in axes if (src, dst) != (1, 1) for stride in (src, dst)))
        if runs
        else 1
    )


def _array_units(layout: Layout, device: int, unit: int) -> Indices:
    """For each unit of a flat tile, the unit of the flat array that it is; `_PADDING` for padding."""
    shape = layout.tile_shape
    if not shape:
        return np.zeros(1, np.int64)
    flat = np.zeros(math.prod(shape) // unit, np.int64)
    padding = np.zeros(len(flat), bool)
    position = layout.mesh.position(device)
    local = np.unravel_index(np.arange(len(flat)) * unit, shape) if len(flat) else [flat] * len(shape)
    for rest, dim in zip(local, layout.dims, strict=True):
        # The definition of `types.meaning`, for these local indices only: a dim may be far longer than its units.
        index, place = np.zeros(len(flat), np.int64), 1
        for radix, axis in reversed(dim.digits):
            index += place * (rest % radix if axis is None else layout.mesh.coordinate(position, axis))
            rest = rest // radix if axis is None else rest
            place *= radix
        padding |= index >= dim.size
        flat = flat * dim.size + index
    return np.where(padding, _PADDING, flat // unit)


def _wanted_units(move: Move, device: int, unit: int) -> Indices:
    """For each unit of a flat tile of the target, the unit of the source that belongs there."""
    units = _array_units(move.target, device, unit)
    digits, start, end = move.view.map
    rest = units * unit - end
    source, reached = np.full(len(units), start), rest >= 0
    for count, src, dst in digits:
        value = rest // max(1, dst)
        reached &= value < count
        source += value * src
        rest = rest - value * dst
    return np.where(units == _PADDING, _PADDING, np.where(reached & (rest < unit), source // unit, _KEPT))


# A turn: the units of all tiles behind one another, moved by index.


class _Tiles(NamedTuple):
    """Tiles as one array: their devices in order, where each begins, how long each is, and their units."""

    devices: Indices
    starts: Indices
    sizes: Indices
    units: Indices

    @classmethod
    def of(cls, tiles: Mapping[int, Indices]) -> _Tiles:
        devices = np.array(sorted(tiles), np.int64)
        sizes = np.array([len(tiles[int(device)]) for device in devices], np.int64)
        units = [tiles[int(device)] for device in devices] or [np.zeros(0, np.int64)]
        return cls(devices, np.cumsum(sizes) - sizes, sizes, np.concatenate(units))

    def place(self, devices: Indices) -> Indices:
        """The positions of these devices among those with tiles; -1 for others."""
        if not len(self.devices):
            return np.full(len(devices), -1)
        at = np.minimum(np.searchsorted(self.devices, devices), len(self.devices) - 1)
        return np.where(self.devices[at] == devices, at, -1)

    def split(self) -> dict[int, Indices]:
        """The tile of each device."""
        parts = np.split(self.units, self.starts[1:]) if len(self.devices) else []
        return dict(zip(self.devices.tolist(), parts, strict=True))


def _run_turn(
    turn: _Turn, unit: int, held: Mapping[int, Indices], wanted: Mapping[int, Indices] | None
) -> dict[int, Indices]:
    """What every device holds after a turn: in tiles of the target, or in as much as the turn writes."""
    before = _Tiles.of(held)
    before.units[before.units == _UNWRITTEN] = _EMPTY
    if wanted is None:
        sizes = {device: -(-end // unit) for device, end in _written_ends(turn).items()}
    else:
        sizes = {device: len(units) for device, units in wanted.items()}
    after = _Tiles.of({device: np.full(size, _UNWRITTEN) for device, size in sizes.items()})
    copied = 0
    for loops in turn:
        sides = [_loop_offsets(loops.axes, side, unit) for side in (1, 2)]
        places = [_place_transfers(loops, sides[at], tiles, at, unit) for at, tiles in enumerate((before, after))]
        step = max(1, _CHUNK // len(sides[0]))
        for low in range(0, len(loops.rows), step):
            read, write = (
                (place[low : low + step, None] + side).ravel() for place, side in zip(places, sides, strict=True)
            )
            after.units[write] = before.units[read]
            copied += len(write)
    if copied != int((after.units != _UNWRITTEN).sum()):
        _refuse_doubles(turn, unit, after)
    return after.split()


_CHUNK = 1 << 22
"""Units that are copied at once."""


def _loop_offsets(axes: Sequence[_Axis], side: int, unit: int) -> Indices:
    """The offsets in units that loops visit in one of the tiles."""
    offsets = np.zeros(1, np.int64)
    for axis in axes:
        runs = axis.src == axis.dst == 1
        count, stride = (axis.extent // unit, 1) if runs else (axis.extent, axis[side] // unit)
        offsets = (offsets[:, None] + np.arange(count) * stride).ravel()
    return offsets


def _written_ends(turn: _Turn) -> dict[int, int]:
    """How far into each device's tile a turn writes, in elements."""
    ends: dict[int, int] = {}
    for loops in turn:
        last = sum((axis.extent - 1) * max(0, axis.dst) for axis in loops.axes)
        for device, offset in loops.rows[:, (1, 3)].tolist():
            ends[device] = max(ends.get(device, 0), offset + last + 1)
    return ends


def _place_transfers(loops: _Loops, offsets: Indices, tiles: _Tiles, side: int, unit: int) -> Indices:
    """Where the transfers begin among all units of a side; refuses those that leave the tile of their device."""
    at = tiles.place(loops.rows[:, side])
    start = loops.rows[:, 2 + side] // unit
    sizes = np.where(at < 0, 0, tiles.sizes[at]) if len(tiles.sizes) else np.zeros(len(at), np.int64)
    outside = (start < -int(offsets.min())) | (start >= sizes - int(offsets.max()))  # No sum: it could overflow.
    if outside.any():
        row = int(np.argmax(outside))
        number, device = int(loops.numbers[row]), int(loops.rows[row, side])
        low, high = ((int(start[row]) + end) * unit for end in (int(offsets.min()), int(offsets.max()) + 1))
        does, has = ("reads", "holds") if side == 0 else ("writes", "has room for")
        what = (
            f"transfer {number} {does} elements {low} to {high - 1} of the tile of device {device}, which {has} "
            f"{counted(int(sizes[row]) * unit, 'element')}"
        )
        raise ProofError(what, Counterexample("right", what, device))
    return tiles.starts[at] + start


def _refuse_doubles(turn: _Turn, unit: int, after: _Tiles) -> None:
    """Raises for the first unit, device by device, that two transfers write."""
    count = np.zeros(len(after.units), np.int32)
    for loops in turn:
        offsets = _loop_offsets(loops.axes, 2, unit)
        for start in _place_transfers(loops, offsets, after, 1, unit):
            np.add.at(count, start + offsets, 1)  # Loops whose strides meet write an element twice themselves.
    at = int(np.argmax(count > 1))
    place = int(np.searchsorted(after.starts, at, "right")) - 1
    device, local = int(after.devices[place]), at - int(after.starts[place])
    writers = _find_writers(turn, unit, device, local)
    both = (
        f"transfers {writers[0]} and {writers[1]} both write"
        if len(writers) > 1
        else f"transfer {writers[0]} twice writes"
    )
    what = f"{both} element {local * unit} of the tile of device {device}; each is written once"
    raise ProofError(what, Counterexample("right", what, device))


def _find_writers(turn: _Turn, unit: int, device: int, local: int) -> list[int]:
    """The transfers that write a unit of a device's tile, in order."""
    found: list[int] = []
    for loops in turn:
        offsets = set(_loop_offsets(loops.axes, 2, unit).tolist())
        for number, row in zip(loops.numbers.tolist(), loops.rows.tolist(), strict=True):
            if row[1] == device and local - row[3] // unit in offsets:
                found.append(number)
    return sorted(found)


def _compare(move: Move, unit: int, last: _Turn, held: Mapping[int, Indices], wanted: Mapping[int, Indices]) -> None:
    """Raises for the first element, by its index in the target, that is not what the target means."""
    first: tuple[int, int, int] | None = None
    for device, want in wanted.items():
        got = held[device]
        wrong = np.flatnonzero((want != _PADDING) & (got != np.where(want == _KEPT, _UNWRITTEN, want)))
        if len(wrong):
            order = _array_units(move.target, device, unit)[wrong]
            at = int(np.argmin(order))
            found = int(order[at]), device, int(wrong[at])
            first = found if first is None else min(first, found)
    if first is None:
        return
    _, device, local = first
    shapes = move.source.shape, move.source.tile_shape, move.target.tile_shape
    want, got = int(wanted[device][local]), int(held[device][local])
    index = _unravel(local * unit, move.target.tile_shape)
    element, actual = (_unravel(at * unit, move.source.shape) if at >= 0 else None for at in (want, got))
    writers = _find_writers(last, unit, device, local)
    if want == _KEPT:
        what = f"device {device} must keep what it has at local index {index}, but transfer {writers[0]} writes there"
    else:
        what = f"device {device} must hold element {element} of the array at local index {index}, but "
        if not writers:
            what += "no transfer writes it"
        else:
            row = next(
                row
                for loops in last
                for number, row in zip(loops.numbers, loops.rows, strict=True)
                if number == writers[0]
            )
            come = (
                f"element {actual} is copied"
                if actual
                else "padding is copied"
                if got == _PADDING
                else "what nothing has written is copied"
            )
            what += f"{come} there from device {int(row[0])} (transfer {writers[0]})"
    raise ProofError(what, Counterexample("right", what, device, index, element, actual, shapes))


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(at) for at in np.unravel_index(flat, shape)) if shape else ()
