"""The layout in which a stored tensor is read: every byte by one process, in few runs, near where it is wanted.

It is chosen on the target's own mesh. An axis of that is *inside* where devices that are neighbours along it belong to
one process, and *crossing* otherwise; what crosses decides who reads what. A bf16[8192, 1024], in C order in a file,
for bf16[{fsdp}2048, {tp}512] on <rep=2, fsdp=4, tp=2>, each device a process:

    as read                       runs a reader    received by each, besides what it has read
    [{fsdp}2048, {tp}512]         2048             nothing, but two replicas read the same
    [{fsdp}{rep}1024, {tp}512]    1024             half a tile
    [{fsdp}{tp}{rep}512, 1024]    1                three quarters of a tile
    [{rep}{fsdp}{tp}512, 1024]    1                seven eighths: what is read lies elsewhere

Elements of one row are neighbours in the file, so rows are cut: first as the target cuts them, so that readers have
rows that they need, then by the axes of the target's other dims, then by those that replicate it. What is coded is cut
between chunks alone. Axes inside stay as in the target: what its process reads has both parts, or is for both devices.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.geometry.view_layouts import invert_view, split_over_atoms
from reshard.plans.rules.bounds import lower_bound
from reshard.plans.stored import ChunkGrid, Stored
from reshard.types import dtypes
from reshard.types.dims import Digit, Dim, fit_digits, tabulate_pieces
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis
from reshard.types.move import Move
from reshard.types.whole import primes

READ_SIZE = 1 << 20
"""A read of so many bytes takes as long again as one of a few: the default, for disks."""


@dataclass(frozen=True)
class ReadOptions:
    """What a caller asks of a load: see `reshard.files.plan_load`. `wave` is None where the budget decides.

    With `writing`, what a move has as target is where an array is, and it is written in the layout that is chosen.
    """

    read_size: int = READ_SIZE
    wave: int | None = None
    budget: int | None = None
    writing: bool = False


@dataclass(frozen=True)
class Readers:
    """Which devices belong to one process, and so read together; each is its own where `process_of` is None."""

    process_of: Mapping[int, int] | None = None
    _inside: dict[tuple[Mesh, SubAxis], bool] = field(default_factory=dict[tuple[Mesh, SubAxis], bool])

    def is_inside(self, mesh: Mesh, axis: SubAxis) -> bool:
        """Whether devices that differ along a sub-axis alone belong to one process."""
        if self.process_of is None:
            return False
        key = mesh, axis
        # All devices are asked, since processes may have any of them; hundreds of tensors ask for the same few axes.
        if key not in self._inside:
            stride, devices, processes = mesh.stride(axis), mesh.devices, self.process_of
            self._inside[key] = all(
                processes[device] == processes[devices[at - at // stride % axis.size * stride]]
                for at, device in enumerate(devices)
            )
        return self._inside[key]

    def list_crossing(self, mesh: Mesh) -> list[SubAxis]:
        """The prime sub-axes of a mesh along which processes differ, in the order of its axes."""
        return [axis for axis in list_idle_axes(mesh, ()) if not self.is_inside(mesh, axis)]

    def count_devices(self, mesh: Mesh) -> int:
        """The most devices of a mesh in one process."""
        if self.process_of is None:
            return 1
        return max(Counter(self.list_processes(mesh)).values())

    def list_processes(self, mesh: Mesh) -> Sequence[int]:
        """The process of the device at each position of a mesh."""
        if self.process_of is None:
            return mesh.devices
        return [self.process_of[device] for device in mesh.devices]


def choose_as_read(
    stored: Stored, move: Move, process_of: Mapping[int, int] | None, options: ReadOptions, most: int | None = None
) -> Layout:
    """The layout in which the stored tensor that `move` reads is read; by `most` readers at most, if that is given.

    >>> mesh = Mesh(rep=2, tp=2)
    >>> stored = Stored("w", "bfloat16", (4096, 4096), ())
    >>> move = Move(stored.as_stored, Layout.parse("bf16[4096, {tp}2048]", mesh))
    >>> print(choose_as_read(stored, move, None, ReadOptions()))
    bf16[{tp}{rep}1024, 4096]
    """
    placed = place_readers(stored, move, Readers(process_of), options, most)
    return leave_out(placed.layout, placed.dropped)


class PlacedReaders(NamedTuple):
    """Who reads a tensor: a layout on the target's mesh, of which devices at one coordinate along each of the `dropped`
    axes read; how many processes do, and in how many runs each."""

    layout: Layout
    dropped: tuple[SubAxis, ...]
    processes: int
    runs: int


class CuttableArray(NamedTuple):
    """What decides where axes go: the array, the units in which its dims are cut, and where the target has its axes.

    Axes are prime sub-axes of `mesh`: for each dim of the array those by which the target cuts it, major first, and
    those by which it cuts none; it is `sparse` if some devices have nothing.
    """

    shape: tuple[int, ...]
    dtype: str
    units: tuple[int, ...]
    mesh: Mesh
    own: tuple[tuple[SubAxis, ...], ...]
    idle: tuple[SubAxis, ...]
    sparse: bool


def place_readers(
    stored: Stored, move: Move, readers: Readers, options: ReadOptions, most: int | None = None
) -> PlacedReaders:
    """What `choose_as_read` chooses, for readers that are known."""
    mesh, own = move.target.mesh, list_own_axes(move)
    sparse = any(dim.padded - dim.size >= dim.tile > 0 and dim.pieces is None for dim in move.target.dims)
    idle = list_idle_axes(mesh, own)
    what = CuttableArray(stored.shape, stored.dtype, list_units(stored), mesh, own, idle, sparse)
    processes = None if readers.process_of is None else {readers.process_of[device] for device in mesh.devices}
    coded = not all(piece.raw for piece in stored.pieces[:1])
    if coded and move.plain and processes is not None and len(processes) == 1 and not options.writing:
        # A process that has all devices reads chunks whole, and puts what each tile wants of them there: a layout that
        # chunks divide would be in memory beside the target, and be copied once more.
        return PlacedReaders(move.target, (), 1, len(stored.pieces))
    every = math.prod(axis.size for axis in (*itertools.chain(*own), *what.idle) if not readers.is_inside(mesh, axis))

    def place(
        by_dim: Sequence[Sequence[SubAxis]], dropped: tuple[SubAxis, ...], processes: int, runs: int
    ) -> PlacedReaders:
        dims = [
            fit_digits([*(Digit(axis.size, axis) for axis in axes), Digit(_piece_size(size, unit, axes), None)], size)
            for axes, size, unit in zip(by_dim, what.shape, what.units, strict=True)
        ]
        return PlacedReaders(Layout(mesh, tuple(dims), what.dtype), dropped, processes, runs)

    # Layouts take long to make, and most would be made for nothing: what a placing costs is known without.
    priced: dict[tuple[tuple[SubAxis, ...], ...], tuple[int, tuple[tuple[SubAxis, ...], int, int]]] = {}
    for by_dim, dropped in _list_placings(what, readers, most):
        axes = tuple(map(tuple, by_dim))
        if axes in priced:
            continue
        runs, nbytes, pieces = _measure_reads(stored, what, by_dim, readers)
        processes = min(every, pieces)
        few = runs * options.read_size <= max(nbytes, options.read_size)
        if not priced and not dropped and few:
            placed = place(axes, (), processes, runs)
            if placed.layout == move.target:
                return placed  # Whoever needs it reads it, in few runs: nothing is better.
        # A read costs as much as the bytes that take as long.
        priced[axes] = nbytes + runs * options.read_size, (tuple(dropped), processes, runs)
    # What is received costs too, and takes long to find: only where it can decide. It is at most what a device needs.
    needed = dtypes.nbytes(math.prod(move.target.tile_shape), what.dtype)
    least = min(cost for cost, _ in priced.values()) + needed
    left = [(cost, place(axes, *rest)) for axes, (cost, rest) in priced.items() if cost <= least]
    as_owned = _place_by_owner(stored, move, what, readers)
    if as_owned is not None and (most is None or as_owned.processes <= most):  # First of equals: it moves nothing.
        left.insert(0, (needed + as_owned.runs * options.read_size, as_owned))
    if len(left) == 1:
        return left[0][1]
    view = None if move.view.plain else move.view

    def count_received(placed: PlacedReaders) -> int:
        there = leave_out(placed.layout, placed.dropped)
        if options.writing:
            return lower_bound(move.target, there, None if view is None else invert_view(view))
        return lower_bound(there, move.target, view)

    return min(left, key=lambda each: each[0] + count_received(each[1]))[1]


def _place_by_owner(stored: Stored, move: Move, what: CuttableArray, readers: Readers) -> PlacedReaders | None:
    """A target in pieces of any size read as it is, each part by one of those who need it; None if no such part can be,
    since a coded chunk would be in two of them.
    """
    if not (move.target.ragged and move.view.plain):
        return None
    dims, coded = move.target.dims, any(unit > 1 for unit in what.units)
    for dim, unit in zip(dims, what.units, strict=True):
        if unit > 1 and any(start % unit for start in tabulate_pieces(dim).starts):
            return None
    dropped = tuple(axis for axis in what.idle if not readers.is_inside(what.mesh, axis))
    processes = math.prod(axis.size for axes in what.own for axis in axes if not readers.is_inside(what.mesh, axis))
    # The last dim that is split decides how long a run is; a chunk, or a stored piece, is read once.
    last = max(at for at, axes in enumerate(what.own) if axes)
    most = max(Counter(tabulate_pieces(dims[last]).numbers).values())
    runs = 1 if coded else math.prod(dim.tile for dim in dims[:last]) * most
    placed = Layout(what.mesh, dims, what.dtype)
    return PlacedReaders(placed, dropped, processes, max(runs, len(stored.pieces) // processes))


def list_own_axes(move: Move) -> tuple[tuple[SubAxis, ...], ...]:
    """For each dim of the source, the prime sub-axes by which the target cuts it, put there through the view.

    >>> mesh, target = Mesh(x=2, y=2), "f32[3, {x}4, {y}8]"
    >>> move = Move(Layout.parse("f32[24, 16]", mesh), Layout.parse(target, mesh), view="(h t) m -> t h m", t=3)
    >>> list_own_axes(move)
    ((SubAxis(axis='x', pre=1, size=2),), (SubAxis(axis='y', pre=1, size=2),))
    """
    view, target = move.view, move.target
    if view.plain:
        dims = target.dims
        held = [[digit.axis for digit in dim.digits if digit.axis is not None] for dim in dims]
    else:
        atoms = split_over_atoms(target, view.target, lambda at: view.atoms[at].target_size)
        held = [
            [
                digit.axis
                for at in dim
                # Of an atom that is filled in part, some devices need nothing.
                if atoms is not None and at in atoms and view.atoms[at].into is None
                for digit in atoms[at].digits
                if digit.axis is not None
            ]
            for dim in view.source
        ]
    return tuple(tuple(part for axis in axes for part in split_axis(axis)) for axes in held)


def list_units(stored: Stored) -> tuple[int, ...]:
    """The sizes in whose multiples the dims of a stored tensor may be cut: 1 where any part can be read alone."""
    pieces, shape = stored.pieces, stored.shape
    if not isinstance(pieces, ChunkGrid) and all(piece.raw for piece in pieces):
        return (1,) * len(shape)
    if stored.chunks is not None:  # Some chunks may be raw, but a cut through the others would read these twice.
        return stored.chunks
    units: list[int] = []
    for at, size in enumerate(shape):
        spans = {piece.box[at] for piece in pieces}
        starts = sorted({start for start, _ in spans if start})[:64]
        # The least size of which no multiple lies inside a piece.
        whole = (unit for unit in starts if not any(start // unit != (stop - 1) // unit for start, stop in spans))
        units.append(next(whole, size))
    return tuple(max(1, unit) for unit in units)


def split_axis(axis: SubAxis) -> list[SubAxis]:
    """A sub-axis as prime ones, major first."""
    parts: list[SubAxis] = []
    pre = axis.pre
    for prime in primes(axis.size):
        parts.append(SubAxis(axis.axis, pre, prime))
        pre *= prime
    return parts


def list_idle_axes(mesh: Mesh, own: Sequence[Sequence[SubAxis]]) -> tuple[SubAxis, ...]:
    """The prime sub-axes of a mesh that are not used, in the order of its axes."""
    # What lies before, between and after the sub-axes that are used, each with the prefix where it starts.
    idle: list[SubAxis] = []
    for name, size in mesh.axes.items():
        pre = 1
        for used in sorted((axis for axes in own for axis in axes if axis.axis == name), key=lambda axis: axis.pre):
            idle += split_axis(SubAxis(name, pre, used.pre // pre))
            pre = used.pre * used.size
        idle += split_axis(SubAxis(name, pre, size // pre))
    return tuple(idle)


def _piece_size(size: int, unit: int, axes: Sequence[SubAxis]) -> int:
    """The elements of one piece of a dim that these axes cut, in whole units."""
    count = math.prod(axis.size for axis in axes)
    return min(-(-size // (unit * count)) * unit, size)


def _list_placings(
    what: CuttableArray, readers: Readers, most: int | None
) -> Iterator[tuple[list[list[SubAxis]], list[SubAxis]]]:
    """The axes that cut each dim, and those that are left over, the most welcome placing first."""
    room = [-(-size // unit) for size, unit in zip(what.shape, what.units, strict=True)]
    rank, mesh = len(room), what.mesh
    own = [(axis, at) for at, axes in enumerate(what.own) for axis in axes]
    crossing = [axis for axis in what.idle if not readers.is_inside(mesh, axis)]
    everywhere = [*range(rank)]
    # Where each axis goes, in this order; those that come first are major. First, all as in the target: nothing moves
    # but what replicas share. Then each dim in turn as the first to be cut, so that what a reader has is few runs.
    orders = [([*((axis, [at]) for axis, at in own), *((axis, everywhere) for axis in crossing)], False)]
    for first in range(rank):
        if math.prod(what.shape[:first]) > MOST_RUNS:
            break
        dims = [*everywhere[first:], *everywhere[:first]]
        staying = [(axis, [at]) for axis, at in own if at == first or readers.is_inside(mesh, axis)]
        moving = [(axis, dims) for axis, at in own if at != first and not readers.is_inside(mesh, axis)]
        order = [*staying, *moving, *((axis, dims) for axis in crossing)]
        orders += [(order, False), (order, True)]
        # Where some devices have no part of what the target cuts, those that do are not in the order of their axes.
        if what.sparse and not first and len(order) <= MOST_ORDERED:
            orders += [([*each], False) for each in itertools.permutations(order)]
    for order, evenly in orders:
        # Greedy: an axis goes to the first dim that has units for all its pieces, else it cuts nothing.
        by_dim, dropped, counts = [list[SubAxis]() for _ in room], list[SubAxis](), [1] * rank
        reading = 1
        for axis, dims in order:
            inside, size = readers.is_inside(mesh, axis), axis.size
            fitting = [at for at in dims if counts[at] * size <= room[at]]
            exact = [at for at in fitting if room[at] % (counts[at] * size) == 0] if evenly else []
            at = next(iter(exact or fitting), None)
            if at is None or (most is not None and not inside and reading * size > most):
                dropped += [] if inside else [axis]
                continue
            by_dim[at].append(axis)
            counts[at] *= size
            reading *= 1 if inside else size
        yield by_dim, dropped


MOST_ORDERED = 5
"""The most axes of which all orders are tried where a target leaves devices empty."""

MOST_RUNS = 64
"""The most runs of a reader for which a dim behind others is cut first."""


def _measure_reads(
    stored: Stored, what: CuttableArray, by_dim: Sequence[Sequence[SubAxis]], readers: Readers
) -> tuple[int, int, int]:
    """The runs and bytes of a process that reads most, and for how many processes there are pieces."""
    # What a process reads is what its devices have together: an axis inside it cuts nothing, but parts its rows where
    # an axis below it is of other processes.
    extents, runs = list[int](), 1
    for axes, size, unit in zip(by_dim, what.shape, what.units, strict=True):
        inside = [readers.is_inside(what.mesh, axis) for axis in axes]
        extents.append(_piece_size(size, unit, [axis for axis, one in zip(axes, inside, strict=True) if not one]))
        last = max((at for at, one in enumerate(inside) if not one), default=0)
        runs *= math.prod(axis.size for axis, one in zip(axes[:last], inside[:last], strict=True) if one)
    pieces = math.prod(-(-size // extent) for size, extent in zip(what.shape, extents, strict=True) if extent)
    nbytes = dtypes.nbytes(math.prod(extents), what.dtype)
    # Where pieces form no grid, the first stands for all.
    chunks = stored.chunks
    if chunks is None and len(stored.pieces):
        chunks = tuple(stop - start for start, stop in stored.pieces[0].box)
    chunks = chunks or what.shape
    runs *= math.prod(-(-extent // chunk) for extent, chunk in zip(extents, chunks, strict=True) if chunk)
    if all(unit == 1 for unit in what.units):
        # Of each piece, rows before the last dim that is cut.
        part = [min(extent, chunk) for extent, chunk in zip(extents, chunks, strict=True)]
        last = max((at for at, chunk in enumerate(chunks) if part[at] < chunk), default=0)
        runs *= math.prod(part[:last])
    return runs, nbytes, pieces


def leave_out(layout: Layout, dropped: Sequence[SubAxis], turn: int = 0) -> Layout:
    """The layout on those devices alone that are at one coordinate along each of the dropped sub-axes.

    `turn` numbers these coordinates.

    >>> mesh = Mesh(x=4, y=2)
    >>> left = leave_out(Layout.parse("f32[{x:(1)2}4, 3]", mesh), [mesh.sub_axis("x:(2)2"), mesh.sub_axis("y")], 3)
    >>> str(left), left.mesh.devices
    ('f32[{x.1}4, 3]', (3, 7))
    """
    if not dropped:
        return layout
    mesh, parts = layout.mesh, _name_parts(layout, dropped)
    first = list_turns(mesh, dropped)[turn]
    devices = [mesh.devices[first + position] for position in list_left(layout, dropped)]
    small = Mesh({parts[axis]: axis.size for axis in parts}, device_ids=devices)

    def spell(digit: Digit) -> list[Digit]:
        if digit.axis is None:
            return [digit]
        held = [axis for axis in parts if axis.axis == digit.axis.axis]
        within = [each for each in held if digit.axis.pre <= each.pre < digit.axis.pre * digit.axis.size]
        return [Digit(each.size, SubAxis(parts[each], 1, each.size)) for each in within]

    dims = tuple(
        Dim(tuple(part for digit in dim.digits for part in spell(digit)), dim.size, dim.pieces) for dim in layout.dims
    )
    return Layout(small, dims, layout.dtype)


def list_turns(mesh: Mesh, dropped: Sequence[SubAxis]) -> list[int]:
    """The first positions that have each of the coordinates along the dropped sub-axes, in the order of these."""
    firsts = [0]
    for axis in dropped:
        stride = mesh.stride(axis)
        firsts = [at + value * stride for at in firsts for value in range(axis.size)]
    return firsts


def list_left(layout: Layout, dropped: Sequence[SubAxis]) -> list[int]:
    """The positions that are at coordinate 0 of each dropped sub-axis, in the order of what is left of the mesh."""
    positions = [0]
    for axis in _name_parts(layout, dropped):
        stride = layout.mesh.stride(axis)
        positions = [at + value * stride for at in positions for value in range(axis.size)]
    return positions


def _name_parts(layout: Layout, dropped: Sequence[SubAxis]) -> dict[SubAxis, str]:
    """The axes that are left of a mesh, in the parts that the layout and what is dropped tell apart, with names."""
    parts = dict[SubAxis, str]()
    gone = {(axis.axis, axis.pre) for axis in dropped}
    for name, size in layout.mesh.axes.items():
        used = [axis for axis in (*layout.held, *dropped) if axis.axis == name]
        cuts = sorted({1, size, *(axis.pre for axis in used), *(axis.pre * axis.size for axis in used)})
        for low, high in itertools.pairwise(cuts):
            if (name, low) not in gone:
                parts[SubAxis(name, low, high // low)] = name if (low, high) == (1, size) else f"{name}.{low}"
    return parts
