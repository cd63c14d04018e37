"""Layouts on both sides of a view: dims split into atoms, merged from atoms, and the space where both can be planned.

    view "(three h) -> three h", three=3, h=8, on <x=4>

    source f32[3{x}2]       three: 3, h: {x}2      its digits end where the atoms end: the dim splits
    source f32[{x}6]        pieces of 6            a digit crosses from h into three: it does not; target f32[3, {x}2]
                                                   is then written on the source's dim, as f32[3{x}2]

A *unit* is an atom, or a dim of one side that does not split into its atoms. Where both layouts can be written on the
same units, a move is an ordinary one between these two, with relabelings before and after that move nothing. Where they
cannot, tiles are compared as boxes of atoms (`view_dims`).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import lt, mul, sub
from typing import NamedTuple

from reshard.errors import LayoutError
from reshard.geometry.blocks import Axis, Block, Factor, list_strides, split_rows
from reshard.geometry.overlap import SharedDims, contiguous_extent, piece_extents, piece_runs
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.mesh import SubAxis
from reshard.types.view import Atom, Groups, View

Unit = tuple[int, ...]
"""Atoms by number, major first, whose product is one dim."""


def split_dim(dim: Dim, sizes: Sequence[int]) -> list[Dim] | None:
    """The dims of these sizes whose product a dim is, major first; None if a digit, or pieces, lie across two of them.

    Only the first may be padded: an index past the end of the dim is one past the end of its major part.

    >>> dim = Dim((Digit(3, None), Digit(4, SubAxis("x", 1, 4)), Digit(2, None)), 24)
    >>> [(part.digits[0].radix, part.size) for part in split_dim(dim, (3, 8))], split_dim(dim, (4, 6))
    ([(3, 3), (4, 8)], None)
    """
    if math.prod(sizes) != dim.size:
        return None
    if dim.size == 0:
        return [Dim((Digit(size, None),), size) for size in sizes]
    if not sizes:
        return [] if dim.padded == 1 else None
    if dim.pieces is not None:  # Pieces of any size have no digits to divide: all of them are of one part.
        parts = [dim if size == dim.size > 1 else Dim((), 1) for size in sizes]
        return parts if dim in parts else None
    rest = list(dim.digits)
    parts: list[Dim] = []
    for size in reversed(sizes[1:]):
        # The minor digits whose product is the size; the last of them may have to be cut.
        digits: list[Digit] = []
        left = size
        while left > 1:
            if not rest:
                return None
            radix, axis = rest.pop()
            if left % radix == 0:
                digits.insert(0, Digit(radix, axis))
                left //= radix
                continue
            major, uneven = divmod(radix, left)
            if uneven:
                return None
            if axis is None:
                rest.append(Digit(major, None))
                digits.insert(0, Digit(left, None))
            else:
                rest.append(Digit(major, SubAxis(axis.axis, axis.pre, major)))
                digits.insert(0, Digit(left, SubAxis(axis.axis, axis.pre * major, left)))
            left = 1
        parts.append(Dim(tuple(digits), size))
    return [Dim(tuple(rest), sizes[0]), *reversed(parts)]


def merge_dims(dims: Sequence[Dim]) -> Dim | None:
    """The dim whose index is made of these, major first; None if one but the first is padded, or pieces are cut."""
    size = math.prod(dim.size for dim in dims)
    if size == 0:
        return Dim((Digit(0, None),), 0)
    if any(dim.pieces is not None for dim in dims):
        large = [dim for dim in dims if dim.pieces is not None or dim.padded != 1]
        return large[0] if len(large) == 1 else None
    if any(dim.padded != dim.size for dim in dims[1:]):
        return None
    return Dim(tuple(digit for dim in dims for digit in dim.digits), size)


def is_local(dim: Dim) -> bool:
    """Whether every tile has all of a dim."""
    return all(digit.axis is None for digit in dim.digits)


def layout_over(layout: Layout, dims: Iterable[Dim], dtype: str | None = None) -> Layout | None:
    """The layout with other dims of the same holders; None where they make no layout."""
    try:
        return _replace_dims(layout, dims, dtype)
    except LayoutError:
        return None


def _replace_dims(layout: Layout, dims: Iterable[Dim], dtype: str | None = None) -> Layout:
    return Layout(layout.mesh, tuple(dims), dtype or layout.dtype, layout.reduction, layout.partial)


def split_over_atoms(layout: Layout, groups: Groups, size: Callable[[int], int]) -> dict[int, Dim] | None:
    """Each atom's dim, by number; None if a dim does not split into its atoms."""
    atoms: dict[int, Dim] = {}
    for dim, group in zip(layout.dims, groups, strict=True):
        parts = split_dim(dim, [size(at) for at in group])
        if parts is None:
            return None
        atoms.update(zip(group, parts, strict=True))
    return atoms


class Middle(NamedTuple):
    """A move written on units: both layouts over the same dims, in the order of the source's indices.

    `order` is that of the target's: where it differs, tiles are transposed on the way.
    """

    source: Layout
    target: Layout
    view: View
    units: tuple[Unit, ...]
    order: tuple[int, ...]

    def first(self, transposed: bool) -> View:
        """The view from the source to the units, in the source's order or in the target's."""
        units = [self.units[at] for at in self.order] if transposed else self.units
        return _view_to_units(self.view, self.view.source, units)

    def last(self, transposed: bool) -> View:
        """The view from the units, in the target's order if they are transposed before, to the target."""
        units = [self.units[at] for at in self.order] if transposed else self.units
        return invert_view(_view_to_units(self.view, self.view.target, units))

    def turned(self, layout: Layout) -> Layout:
        """A layout on the units, its dims in the target's order."""
        return _replace_dims(layout, [layout.dims[at] for at in self.order])


@lru_cache(maxsize=4096)
def find_middle(source: Layout, target: Layout, view: View) -> Middle | None:
    """The move on units; None if the two sides have none in common, or if only part of an atom moves.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> view = View((Atom("three", 3), Atom("h", 8)), ((0, 1),), ((0,), (1,)))
    >>> parts = find_middle(Layout.parse("f32[{x}6]", mesh), Layout.parse("f32[3, {x}2]", mesh), view)
    >>> str(parts.source), str(parts.target)
    ('f32[{x}6]', 'f32[3{x}2]')
    """
    if view.taken or view.into:
        return None
    view = fuse_atoms(view)
    sides = (source, view.source), (target, view.target)
    # What the dims of each side split into, atom by atom, beside the dims themselves. Those that do not are units.
    split: list[dict[Unit, Dim]] = []
    whole: dict[Unit, None] = {}
    for layout, groups in sides:
        split.append(dict(zip(groups, layout.dims, strict=True)))
        for dim, group in zip(layout.dims, groups, strict=True):
            parts = split_dim(dim, [view.atoms[at].size for at in group])
            if parts is None:
                whole[group] = None
            else:
                split[-1].update(((at,), part) for at, part in zip(group, parts, strict=True))
    atoms = [at for unit in whole for at in unit]
    if len(set(atoms)) != len(atoms) or () in whole:
        return None  # Dims of both sides that do not split share an atom, and are not the same.
    first, last = (list(itertools.chain(*groups)) for _, groups in sides)
    lone = ((atom,) for atom in first if atom not in atoms)
    units = sorted((*whole, *lone), key=lambda unit: min(map(first.index, unit)))
    written: list[Layout] = []
    for (layout, _), own in zip(sides, split, strict=True):
        dims = [own[unit] if unit in own else merge_dims([own[at,] for at in unit]) for unit in units]
        known = [dim for dim in dims if dim is not None]
        made = layout_over(layout, known) if len(known) == len(dims) else None
        if made is None:
            return None
        written.append(made)
    order = sorted(range(len(units)), key=lambda at: min(map(last.index, units[at])))
    return Middle(written[0], written[1], view, tuple(units), tuple(order))


def fuse_atoms(view: View) -> View:
    """The same view in as few atoms as possible: neighbours on both sides are one, atoms of one value are dropped.

    >>> str(fuse_atoms(View((Atom("a", 2), Atom("h", 3), Atom("d", 4)), ((0, 1, 2),), ((1, 2), (0,)))))
    '(a h_d) -> h_d a'
    """
    alone = {dim[0] for dim in view.source if len(dim) == 1} & {dim[0] for dim in view.target if len(dim) == 1}
    whole = {at for at, atom in enumerate(view.atoms) if atom.taken is None and atom.into is None}
    # Atoms of one value do not matter, unless they are a dim of their own on both sides.
    idle = {at for at in whole - alone if view.atoms[at].size == 1}
    source, target = (
        [tuple(at for at in dim if at not in idle) for dim in side] for side in (view.source, view.target)
    )
    following = {pair for dim in target for pair in itertools.pairwise(dim) if whole.issuperset(pair)}
    groups: list[list[Unit]] = []
    for dim in source:
        chains: list[Unit] = []
        for at in dim:
            if chains and (chains[-1][-1], at) in following:
                chains[-1] = (*chains[-1], at)
            else:
                chains.append((at,))
        groups.append(chains)
    seen = set(itertools.chain(*source))
    every = [*itertools.chain(*groups), *((at,) for at in itertools.chain(*target) if at not in seen)]
    number = {chain[0]: at for at, chain in enumerate(every)}
    before = tuple(tuple(number[chain[0]] for chain in group) for group in groups)
    after = tuple(tuple(number[at] for at in dim if at in number) for dim in target)
    return View(tuple(_multiply_atoms(view, chain) for chain in every), before, after)


def invert_view(view: View) -> View:
    """The view from its target to its source."""
    return View(tuple(Atom(a.name, a.size, a.into, a.taken) for a in view.atoms), view.target, view.source)


def _multiply_atoms(view: View, chain: Unit) -> Atom:
    atoms = [view.atoms[at] for at in chain]
    if len(atoms) == 1:
        return atoms[0]
    return Atom("_".join(atom.name for atom in atoms), math.prod(atom.size for atom in atoms))


def _view_to_units(view: View, groups: Groups, units: Sequence[Unit]) -> View:
    """The view from one side's dims to units, whose atoms are these dims where they are units, else their atoms."""
    numbers: dict[Unit, int] = {}
    source: list[Unit] = []
    for group in groups:
        parts = [group] if group in units else [(at,) for at in group]
        source.append(tuple(numbers.setdefault(part, len(numbers)) for part in parts))
    atoms = tuple(_multiply_atoms(view, part) for part in numbers)
    target = tuple((numbers[unit],) if unit in numbers else tuple(numbers[at,] for at in unit) for unit in units)
    return View(atoms, tuple(source), target)


# A move in stages that move no data around its middle: dims opened, parts taken; parts put, dims closed.
#
# view "(three h) -> h", take three=0 of f32[3{x}2] on <x=4>
#
# view   f32[3{x}2]   -> f32[3, {x}2]     the dim with the part is opened
# take   f32[3, {x}2] -> f32[1, {x}2]     three lies whole in each tile, so its part is local
# ...    f32[1, {x}2] -> the target       an ordinary move under the rest of the view


class Opened(NamedTuple):
    """A side whose dims with parts are opened: the layout, the view that opens it, the part, the view that takes it.

    `groups` are the atoms of the part's dims.
    """

    whole: Layout
    opening: View
    part: Layout
    taking: View
    groups: Groups


class Stages(NamedTuple):
    """What to do before the middle and after it; None where all of a side moves."""

    before: Opened | None
    middle: Middle
    after: Opened | None


@lru_cache(maxsize=4096)
def view_stages(source: Layout, target: Layout, view: View) -> Stages | None:
    """The stages of a move; None if a part is of a dim that is spread over devices, or if there is no middle.

    >>> from reshard.types import Mesh
    >>> from reshard.types.view import Window
    >>> view = View((Atom("three", 1, Window(0, 3)), Atom("h", 8)), ((0, 1),), ((1,),))
    >>> both = [Layout.parse(text, Mesh(x=4)) for text in ("f32[3{x}2]", "f32[8]")]
    >>> str(view_stages(*both, view).before.part), str(view_stages(*both, view).middle.source)
    ('f32[1, {x}2]', 'f32[{x}2]')
    """
    before = _open_side(source, view.source, view) if view.taken else None
    filled = open_target(target, view) if view.into else None
    if (before is None and view.taken) or (filled is None and view.into):
        return None
    after = None if filled is None else filled[0]
    atoms = tuple(Atom(atom.name, atom.size) for atom in view.atoms)
    groups = [own if side is None else side.groups for own, side in ((view.source, before), (view.target, after))]
    ends = [own if side is None else side.part for own, side in ((source, before), (target, after))]
    between = find_middle(ends[0], ends[1], View(atoms, *groups))
    return None if between is None else Stages(before, between, after)


def open_target(target: Layout, view: View) -> tuple[Opened, View] | None:
    """The target's part that a view fills, and the view that fills all of that; None if tiles have pieces of the part.

    >>> from reshard.types import Mesh
    >>> from reshard.types.view import Window
    >>> view = View((Atom("three", 1, None, Window(0, 3)), Atom("h", 8)), ((1,),), ((0, 1),))
    >>> opened, filling = open_target(Layout.parse("f32[3{x}2]", Mesh(x=4)), view)
    >>> str(opened.part), str(filling)
    ('f32[1, {x}2]', 'h -> three h')
    """
    back = invert_view(view)
    opened = _open_side(target, back.source, back)
    if opened is None:
        return None
    atoms = tuple(atom._replace(into=None) for atom in view.atoms)
    return opened, View(atoms, view.source, opened.groups)


def _open_side(layout: Layout, groups: Groups, view: View) -> Opened | None:
    """A side whose atoms have windows; None if one of them does not lie whole in every tile."""
    tokens: list[Unit] = []
    source: list[Unit] = []
    for group in groups:
        parts = [(at,) for at in group] if any(view.atoms[at].taken for at in group) else [group]
        source.append(tuple(range(len(tokens), len(tokens) + len(parts))))
        tokens += parts
    atoms: list[Atom] = []
    for token in tokens:
        each = [view.atoms[at] for at in token]
        if len(each) == 1:
            atoms.append(Atom(each[0].name, each[0].size, each[0].taken))
        else:  # A dim that stays closed is one atom.
            name, size = "_".join(atom.name for atom in each) or "one", math.prod(atom.source_size for atom in each)
            atoms.append(Atom(name, size))
    dims = split_over_atoms(layout, tuple(source), lambda at: atoms[at].source_size)
    if dims is None:
        return None
    whole = [dims[at] for at in range(len(tokens))]
    part: list[Dim] = []
    for atom, dim in zip(atoms, whole, strict=True):
        if atom.taken is not None and not is_local(dim):
            return None
        part.append(dim if atom.taken is None else Dim((Digit(atom.size, None),), atom.size))
    own = tuple((at,) for at in range(len(tokens)))
    opening = View(tuple(Atom(atom.name, atom.source_size) for atom in atoms), tuple(source), own)
    taking = View(tuple(atoms), own, own)
    return Opened(_replace_dims(layout, whole), opening, _replace_dims(layout, part), taking, tuple(tokens))


# What tiles share through a view, as boxes of its atoms.
#
#     view "(three h) -> three h", three=3, h=4, on <x=2, y=2>: f32[{x}6] -> f32[3, {y}2]
#
#     source piece 1 has indices 6 to 11   = three 1, h 2-3 and three 2, h 0-3
#     target piece 0 wants h 0-1           it shares three 2, h 0-1 with that: a block of 1 x 2
#
# A run of neighbouring indices is a few boxes of atoms:
#
#     indices 95 to 204, digits 10 x 10 x 10    95-99 = (0, 9, 5-9), 100-199 = (1, 0-9, 0-9), 200-204 = (2, 0, 0-4)
#
# A box has an offset in a flat tile, and there a stride for each atom: inside a run, neighbouring indices are
# neighbours in the tile. Boxes that go on evenly along an atom are merged, so that the rounds of a block-cyclic dim are
# one box. The boxes of both sides are cut with each other, atom by atom, so that the work depends on pieces and runs,
# not on elements. Dims that share no atoms, on either side, are independent: each group of dims is worked out alone.


@lru_cache(maxsize=64)
def view_dims(operand: Layout, result: Layout, view: View) -> Sequence[SharedDims]:
    """What the tiles of two layouts share through a view, for each group of dims that share atoms.

    >>> from reshard.types import Mesh
    >>> both = Layout.parse("f32[{x}6]", Mesh(x=2, y=2)), Layout.parse("f32[3, {y}2]", Mesh(x=2, y=2))
    >>> (shared,) = view_dims(*both, View((Atom("three", 3), Atom("h", 4)), ((0, 1),), ((0,), (1,))))
    >>> shared.source, shared.target, [block.extents for block in shared.wanted((0, 0))[1,]]
    ((0,), (0, 1), [(2,)])
    """
    # Dims of both sides, as (side, number), and the atoms that they and no other dims have.
    groups = [({(0, at)}, set(dim)) for at, dim in enumerate(view.source)]
    for at, dim in enumerate(view.target):
        dims, atoms = {(1, at)}, set(dim)
        for other in [group for group in groups if group[1] & atoms]:
            groups.remove(other)
            dims, atoms = dims | other[0], atoms | other[1]
        groups.append((dims, atoms))
    shared: list[SharedDims] = []
    for dims, atoms in groups:
        source, target = (tuple(sorted(at for which, at in dims if which == side)) for side in (0, 1))
        factor = _AtomFactor((operand, result), view, source, target, tuple(sorted(atoms)))
        shared.append(SharedDims(source, target, factor))
    return shared


@lru_cache(maxsize=4096)
def settle_windows(operand: Layout, result: Layout, view: View) -> View:
    """A view through which every device shares as much with every other one: its windows are as far down as they go
    within the tiles that have them. So 256 experts of a stack are one case, or one for each device.

    >>> from reshard.types import Mesh
    >>> from reshard.types.view import Window
    >>> view = View((Atom("e", 1, None, Window(5, 8)), Atom("h", 6)), ((1,),), ((0,), (1,)))
    >>> both = [Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}3]", "f32[{x}4, 6]")]
    >>> settle_windows(*both, view).atoms[0].into
    Window(start=4, size=8)
    """
    atoms = list(view.atoms)
    for layout, groups, taken in (operand, view.source, True), (result, view.target, False):
        for dim, group in zip(layout.dims, groups, strict=True):
            local, extent = is_local(dim), contiguous_extent(dim) if len(group) == 1 else None
            for at in group:
                window = atoms[at].taken if taken else atoms[at].into
                if window is None or (not local and extent is None):
                    continue
                first = 0 if local or extent is None else window.start // extent * extent
                if local or window.start + atoms[at].size <= first + (extent or 0):
                    moved = window._replace(start=first)
                    atoms[at] = atoms[at]._replace(taken=moved) if taken else atoms[at]._replace(into=moved)
    return view if atoms == list(view.atoms) else replace(view, atoms=tuple(atoms))


@dataclass(frozen=True)
class SharedCounts:
    """Some dims of both layouts, by number, and the elements that pieces of these share, by those of the source."""

    source: Unit
    target: Unit
    counts: Mapping[Unit, Mapping[Unit, int]]

    def count(self, source: Unit, target: Unit) -> int:
        """The elements that the pieces of two tiles share."""
        return self.counts.get(pick_numbers(source, self.source), {}).get(pick_numbers(target, self.target), 0)

    def sizes(self, pieces: Unit) -> tuple[tuple[Unit, int], ...]:
        """What these pieces of the source share with which of the target."""
        return tuple(self.counts.get(pieces, {}).items())

    def total(self, target: Unit) -> tuple[int, int]:
        """The elements that the pieces of a target tile share with all of the source's, and with how many of these."""
        return self._totals.get(pick_numbers(target, self.target), (0, 0))

    @cached_property
    def _totals(self) -> Mapping[Unit, tuple[int, int]]:
        each: dict[Unit, tuple[int, int]] = {}
        for shared in self.counts.values():
            for pieces, elements in shared.items():
                total, owners = each.get(pieces, (0, 0))
                each[pieces] = total + elements, owners + 1
        return each


def pick_numbers(numbers: Unit, dims: Unit) -> Unit:
    """The numbers of some dims."""
    return tuple([numbers[at] for at in dims])


def count_shared(operand: Layout, result: Layout, view: View) -> Sequence[SharedCounts]:
    """How many elements the tiles of two layouts share through a view, for each group of dims that share atoms.

    >>> from reshard.types import Mesh
    >>> both = Layout.parse("f32[{x}6]", Mesh(x=2, y=2)), Layout.parse("f32[3, {y}2]", Mesh(x=2, y=2))
    >>> (shared,) = count_shared(*both, View((Atom("three", 3), Atom("h", 4)), ((0, 1),), ((0,), (1,))))
    >>> shared.counts[1,], shared.total((0, 0))
    ({(0, 0): 2, (0, 1): 4}, (6, 2))
    """
    return _count_settled(operand, result, settle_windows(operand, result, view))


@lru_cache(maxsize=256)
def _count_settled(operand: Layout, result: Layout, view: View) -> Sequence[SharedCounts]:
    groups: list[SharedCounts] = []
    for each in view_dims(operand, result, view):
        counts: dict[Unit, dict[Unit, int]] = {}
        for pieces in itertools.product(*(range(len(piece_extents(result.dims[at]))) for at in each.target)):
            for owner, factor in each.wanted(pieces).items():
                counts.setdefault(owner, {})[pieces] = sum([block.elements for block in factor])
        groups.append(SharedCounts(each.source, each.target, counts))
    return groups


class _AtomFactor:
    """What the pieces of some dims share, worked out once for each combination of pieces."""

    def __init__(self, ends: tuple[Layout, Layout], view: View, source: Unit, target: Unit, atoms: Unit) -> None:
        self._view, self._atoms = view, atoms
        self._sizes = [view.atoms[at].size for at in atoms]
        taken = [(a.taken.start if a.taken else 0, a.source_size) for a in view.atoms]
        into = [(a.into.start if a.into else 0, a.target_size) for a in view.atoms]
        before = self._list_boxes(ends[0], view.source, source, taken)
        self._target = self._list_boxes(ends[1], view.target, target, into)
        self._near = BoxIndex([(p, box) for p, boxes in before.items() for box in boxes], self._sizes)
        self._shared: dict[Unit, Mapping[Unit, Factor]] = {}

    def __call__(self, pieces: Unit) -> Mapping[Unit, Factor]:
        """The source's pieces that overlap those of the target, with the blocks in common."""
        if pieces not in self._shared:
            overlaps: dict[Unit, list[Block]] = {}
            for b in self._target[pieces]:
                for source, a in self._near.candidates(b):
                    common = common_block(a, b)
                    if common is not None:
                        overlaps.setdefault(source, []).append(common)
            self._shared[pieces] = {p: tuple(overlaps[p]) for p in sorted(overlaps)}
        return self._shared[pieces]

    def _list_boxes(
        self, layout: Layout, groups: Groups, dims: Unit, parts: Sequence[tuple[int, int]]
    ) -> dict[Unit, list[SideBox]]:
        """The boxes of every combination of pieces of a side's dims."""
        each: list[list[list[SideBox]]] = []
        own: list[tuple[list[int], int]] = []
        for at in dims:
            windows = [(parts[atom][0], self._view.atoms[atom].size, parts[atom][1]) for atom in groups[at]]
            each.append(dim_boxes(layout.dims[at], windows))
            own.append(([self._atoms.index(atom) for atom in groups[at]], math.prod(layout.tile_shape[at + 1 :])))
        combined: dict[Unit, list[SideBox]] = {}
        for pieces in itertools.product(*(range(len(dim)) for dim in each)):
            combined[pieces] = []
            for boxes in itertools.product(*(dim[p] for dim, p in zip(each, pieces, strict=True))):
                # Each dim's box restricts the atoms of its own dim; those of no dim of this side are whole.
                low, high, place, strides = [0] * len(self._sizes), list(self._sizes), 0, [0] * len(self._sizes)
                for box, (atoms, step) in zip(boxes, own, strict=True):
                    place += box.place * step
                    for n, at in enumerate(atoms):
                        low[at], high[at], strides[at] = box.low[n], box.high[n], box.strides[n] * step
                combined[pieces].append(SideBox(tuple(low), tuple(high), place, tuple(strides)))
        return combined


class SideBox(NamedTuple):
    """A box of atoms on one side: from `low` to `high` in each, at `place` of the flat tile, with strides there."""

    low: Unit
    high: Unit
    place: int
    strides: Unit


class BoxIndex:
    """Boxes sorted along the atom where they are smallest, so that few are compared with another one.

    >>> boxes = [((n,), SideBox((4 * n,), (4 * n + 4,), 0, (1,))) for n in range(100)]
    >>> [pieces for pieces, _ in BoxIndex(boxes, [400]).candidates(SideBox((6,), (9,), 0, (1,)))]
    [(1,), (2,)]
    """

    def __init__(self, boxes: Sequence[tuple[Unit, SideBox]], sizes: Sequence[int]) -> None:
        def share(atom: int) -> float:
            return sum((box.high[atom] - box.low[atom]) / max(1, sizes[atom]) for _, box in boxes)

        self._atom = atom = min(range(len(sizes)), key=share, default=None)
        self._boxes = list(boxes) if atom is None else sorted(boxes, key=lambda each: each[1].low[atom])
        self._lows = [] if atom is None else [box.low[atom] for _, box in self._boxes]
        # Sorted by their low ends, boxes end at most this much further on.
        self._widest = 0 if atom is None else max((box.high[atom] - box.low[atom] for _, box in boxes), default=0)

    def candidates(self, box: SideBox) -> Sequence[tuple[Unit, SideBox]]:
        """The boxes that overlap this one along the atom, and perhaps a few that do not."""
        if self._atom is None:
            return self._boxes
        first = bisect_right(self._lows, box.low[self._atom] - self._widest)
        return self._boxes[first : bisect_left(self._lows, box.high[self._atom])]


def common_block(a: SideBox, b: SideBox) -> Block | None:
    """What a box of the source and one of the target have in common; None if nothing.

    >>> common_block(SideBox((0,), (4,), 0, (1,)), SideBox((2,), (6,), 10, (3,)))
    Block(src=2, dst=10, axes=(Axis(extent=2, src=1, dst=3),))
    """
    low = [max(pair) for pair in zip(a.low, b.low, strict=True)]
    extents = tuple(min(pair) - start for *pair, start in zip(a.high, b.high, low, strict=True))
    if any(extent <= 0 for extent in extents):
        return None
    src = a.place + sum((at - start) * s for at, start, s in zip(low, a.low, a.strides, strict=True))
    dst = b.place + sum((at - start) * s for at, start, s in zip(low, b.low, b.strides, strict=True))
    axes = zip(extents, a.strides, b.strides, strict=True)
    return Block(src, dst, tuple([Axis(*axis) for axis in axes if axis[0] != 1]))


def dim_boxes(dim: Dim, windows: Sequence[tuple[int, int, int]]) -> list[list[SideBox]]:
    """For each piece of a dim, its boxes of atoms, which are (start, values, size) windows, major first.

    >>> halves = Dim((Digit(2, SubAxis("x", 1, 2)), Digit(3, None)), 6)
    >>> [[(box.low, box.high) for box in boxes] for boxes in dim_boxes(halves, [(0, 3, 3), (0, 2, 2)])]
    [[((0, 0), (1, 2)), ((1, 0), (2, 1))], [((1, 1), (2, 2)), ((2, 0), (3, 2))]]
    """
    starts, counts, sizes = ([window[at] for window in windows] for at in range(3))
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    strides = tuple(list_strides(sizes))
    boxes: list[list[SideBox]] = []
    for runs in piece_runs(dim):
        own: list[SideBox] = []
        for first, local, length in runs:
            for corner, after in _digit_boxes(first, first + length, sizes):
                # The part inside the windows, its digits counted from their starts.
                low = [max(pair) for pair in zip(corner, starts, strict=True)]
                high = [min(pair) for pair in zip(after, ends, strict=True)]
                if all(map(lt, low, high)):
                    place = local - first + sum(map(mul, low, strides))
                    own.append(SideBox(tuple(map(sub, low, starts)), tuple(map(sub, high, starts)), place, strides))
        # Neighbours along one atom are one box where their places go on evenly.
        for atom in reversed(range(len(windows))):
            merged: list[SideBox] = []
            for box in own:
                joined = _join_boxes(merged[-1], box, atom) if merged else None
                if joined is None:
                    merged.append(box)
                else:
                    merged[-1] = joined
            own = merged
        boxes.append(own)
    return boxes


def _digit_boxes(low: int, high: int, sizes: Sequence[int]) -> Iterator[tuple[Unit, Unit]]:
    """The numbers from `low` to `high` as boxes of digits, each by its lowest corner and the one after its highest.

    >>> list(_digit_boxes(95, 205, (10, 10, 10)))[1]
    ((1, 0, 0), (2, 10, 10))
    """
    if not sizes:
        yield (), ()
        return
    rest = sizes[1:]
    row = math.prod(rest)
    for first, last, start, end in split_rows(low, high, row):
        if (start, end) == (0, row):
            yield (first, *[0] * len(rest)), (last, *rest)
        else:
            yield from (((first, *corner), (last, *after)) for corner, after in _digit_boxes(start, end, rest))


def _join_boxes(a: SideBox, b: SideBox, atom: int) -> SideBox | None:
    """One box for two that follow each other along an atom, if all else is alike."""
    if a.high[atom] != b.low[atom]:
        return None
    for at in range(len(a.low)):
        # A stride along an atom of one value says nothing.
        single = a.high[at] - a.low[at] == 1
        if at != atom and (
            (a.low[at], a.high[at]) != (b.low[at], b.high[at]) or (a.strides[at] != b.strides[at] and not single)
        ):
            return None
    stride, rest = divmod(b.place - a.place, b.low[atom] - a.low[atom])
    fits = all(box.high[atom] - box.low[atom] == 1 or box.strides[atom] == stride for box in (a, b))
    if rest or not fits:
        return None
    high, strides = list(a.high), list(a.strides)
    high[atom], strides[atom] = b.high[atom], stride
    return SideBox(a.low, tuple(high), a.place, tuple(strides))
