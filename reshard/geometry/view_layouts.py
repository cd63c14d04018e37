"""Layouts on both sides of a view: dims split into atoms, merged from atoms, and the space where both can be planned.

    view "(three h) -> three h", three=3, h=8, on <x=4>

    source f32[3{x}2]       three: 3, h: {x}2      its digits end where the atoms end: the dim splits
    source f32[{x}6]        pieces of 6            a digit crosses from h into three: it does not; target f32[3, {x}2]
                                                   is then written on the source's dim, as f32[3{x}2]

A *unit* is an atom, or a dim of one side that does not split into its atoms. Where both layouts can be written on the
same units, a move is an ordinary one between these two, with relabelings before and after that move nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.errors import LayoutError
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.mesh import SubAxis
from reshard.types.view import Atom, Groups, View

Unit = tuple[int, ...]
"""Atoms by number, major first, whose product is one dim."""


def split_dim(dim: Dim, sizes: Sequence[int]) -> list[Dim] | None:
    """The dims of these sizes whose product a dim is, major first; None if a digit lies across two of them.

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
    rest = list(dim.digits)
    parts: list[Dim] = []
    for size in reversed(sizes[1:]):
        digits = _take_minor_digits(rest, size)
        if digits is None:
            return None
        parts.append(Dim(tuple(digits), size))
    return [Dim(tuple(rest), sizes[0]), *reversed(parts)]


def _take_minor_digits(rest: list[Digit], size: int) -> list[Digit] | None:
    """Takes the minor digits whose product is `size` off a numeral; cuts one of them if need be."""
    digits: list[Digit] = []
    while size > 1:
        if not rest:
            return None
        digit = rest.pop()
        if size % digit.radix == 0:
            digits.insert(0, digit)
            size //= digit.radix
        elif digit.radix % size == 0:
            major, minor = _cut_digit(digit, size)
            rest.append(major)
            digits.insert(0, minor)
            size = 1
        else:
            return None
    return digits


def _cut_digit(digit: Digit, minor: int) -> tuple[Digit, Digit]:
    radix, axis = digit
    if axis is None:
        return Digit(radix // minor, None), Digit(minor, None)
    major = SubAxis(axis.axis, axis.pre, radix // minor)
    return Digit(major.size, major), Digit(minor, SubAxis(axis.axis, axis.pre * major.size, minor))


def merge_dims(dims: Sequence[Dim]) -> Dim | None:
    """The dim whose index is made of these, major first; None if one but the first is padded.

    >>> merge_dims([Dim((Digit(3, None),), 3), Dim((Digit(8, None),), 8)]).size
    24
    """
    size = math.prod(dim.size for dim in dims)
    if size == 0:
        return Dim((Digit(0, None),), 0)
    if any(dim.padded != dim.size for dim in dims[1:]):
        return None
    return Dim(tuple(digit for dim in dims for digit in dim.digits), size)


def is_local(dim: Dim) -> bool:
    """Whether every tile has all of a dim.

    >>> is_local(Dim((Digit(3, None),), 3)), is_local(Dim((Digit(2, SubAxis("x", 1, 2)), Digit(1, None)), 1))
    (True, False)
    """
    return all(digit.axis is None for digit in dim.digits)


def layout_over(layout: Layout, dims: Iterable[Dim], dtype: str | None = None) -> Layout | None:
    """The layout with other dims of the same holders; None where they make no layout."""
    try:
        return Layout(layout.mesh, tuple(dims), dtype or layout.dtype, layout.reduction, layout.partial)
    except LayoutError:
        return None


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
        dims = tuple(layout.dims[at] for at in self.order)
        return Layout(layout.mesh, dims, layout.dtype, layout.reduction, layout.partial)


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
    units = _find_units(view, source, target)
    if units is None:
        return None
    before, after = (
        _layout_on_units(source, view.source, units, view),
        _layout_on_units(target, view.target, units, view),
    )
    if before is None or after is None:
        return None
    rank = {atom: at for at, atom in enumerate(atom for dim in view.target for atom in dim)}
    order = sorted(range(len(units)), key=lambda at: min(rank[atom] for atom in units[at]))
    return Middle(before, after, view, units, tuple(order))


def fuse_atoms(view: View) -> View:
    """The same view in as few atoms as possible: neighbours on both sides are one, atoms of one value are dropped.

    >>> str(fuse_atoms(View((Atom("a", 2), Atom("h", 3), Atom("d", 4)), ((0, 1, 2),), ((1, 2), (0,)))))
    '(a h_d) -> h_d a'
    """
    source, target = (_drop_ones(view, groups) for groups in (view.source, view.target))
    following = {pair for dim in target for pair in itertools.pairwise(dim) if not _has_window(view, pair)}
    groups = [_chain_atoms(dim, following) for dim in source]
    chains = [*itertools.chain(*groups), *_atoms_of_target_only(source, target)]
    number = {chain[0]: at for at, chain in enumerate(chains)}
    before = tuple(tuple(number[chain[0]] for chain in group) for group in groups)
    after = tuple(tuple(number[at] for at in dim if at in number) for dim in target)
    return View(tuple(_multiply_atoms(view, chain) for chain in chains), before, after)


def _atoms_of_target_only(source: Groups, target: Groups) -> list[Unit]:
    """The atoms that are in the target only."""
    seen = set(itertools.chain(*source))
    return [(at,) for at in itertools.chain(*target) if at not in seen]


def _chain_atoms(dim: Sequence[int], following: set[tuple[int, int]]) -> list[Unit]:
    """A dim's atoms, those that follow each other on the other side in one."""
    chains: list[Unit] = []
    for at in dim:
        if chains and (chains[-1][-1], at) in following:
            chains[-1] = (*chains[-1], at)
        else:
            chains.append((at,))
    return chains


def invert_view(view: View) -> View:
    """The view from its target to its source."""
    return View(tuple(Atom(a.name, a.size, a.into, a.taken) for a in view.atoms), view.target, view.source)


def _drop_ones(view: View, groups: Groups) -> Groups:
    """The atoms that matter: not those of one value, unless they are a dim of their own on both sides."""
    alone = {dim[0] for dim in view.source if len(dim) == 1} & {dim[0] for dim in view.target if len(dim) == 1}

    def kept(at: int) -> bool:
        atom = view.atoms[at]
        return atom.size != 1 or at in alone or atom.taken is not None or atom.into is not None

    return tuple(tuple(at for at in dim if kept(at)) for dim in groups)


def _has_window(view: View, atoms: Iterable[int]) -> bool:
    return any(view.atoms[at].taken is not None or view.atoms[at].into is not None for at in atoms)


def _multiply_atoms(view: View, chain: Unit) -> Atom:
    atoms = [view.atoms[at] for at in chain]
    if len(atoms) == 1:
        return atoms[0]
    return Atom("_".join(atom.name for atom in atoms), math.prod(atom.size for atom in atoms))


def _find_units(view: View, source: Layout, target: Layout) -> tuple[Unit, ...] | None:
    """The units, in the order of the source's indices: dims that do not split, and all other atoms.

    None if dims of both sides that do not split share an atom and are not the same.
    """
    units: dict[Unit, None] = {}
    for layout, groups in ((source, view.source), (target, view.target)):
        for dim, group in zip(layout.dims, groups, strict=True):
            if split_dim(dim, [view.atoms[at].size for at in group]) is None:
                units[group] = None
    atoms = [at for unit in units for at in unit]
    if len(set(atoms)) != len(atoms) or () in units:
        return None
    rank = {atom: at for at, atom in enumerate(atom for dim in view.source for atom in dim)}
    lone = ((atom,) for atom in rank if atom not in atoms)
    return tuple(sorted((*units, *lone), key=lambda unit: min(rank[atom] for atom in unit)))


def _layout_on_units(layout: Layout, groups: Groups, units: Sequence[Unit], view: View) -> Layout | None:
    """A side's layout with a dim for each unit; None if they cannot be written so."""
    atoms: dict[int, Dim] = {}
    wholes: dict[Unit, Dim] = {}
    for dim, group in zip(layout.dims, groups, strict=True):
        parts = split_dim(dim, [view.atoms[at].size for at in group])
        if group in units:
            wholes[group] = dim
        elif parts is None:
            return None
        else:
            atoms.update(zip(group, parts, strict=True))
    dims = [wholes[unit] if unit in wholes else merge_dims([atoms[at] for at in unit]) for unit in units]
    known = [dim for dim in dims if dim is not None]
    return layout_over(layout, known) if len(known) == len(dims) else None


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
    back = invert_view(view)
    after = _open_side(target, back.source, back) if view.into else None
    if (before is None and view.taken) or (after is None and view.into):
        return None
    atoms = tuple(Atom(atom.name, atom.size) for atom in view.atoms)
    groups = [own if side is None else side.groups for own, side in ((view.source, before), (view.target, after))]
    ends = [own if side is None else side.part for own, side in ((source, before), (target, after))]
    between = find_middle(ends[0], ends[1], View(atoms, *groups))
    return None if between is None else Stages(before, between, after)


def _open_side(layout: Layout, groups: Groups, view: View) -> Opened | None:
    """A side whose atoms have windows; None if one of them does not lie whole in every tile."""
    tokens: list[tuple[int, ...]] = []
    source: list[tuple[int, ...]] = []
    for group in groups:
        parts = [(at,) for at in group] if any(view.atoms[at].taken for at in group) else [group]
        source.append(tuple(range(len(tokens), len(tokens) + len(parts))))
        tokens += parts
    atoms = [_token_atom(view, token) for token in tokens]
    each = tuple((at,) for at in range(len(tokens)))
    dims = split_over_atoms(layout, tuple(source), lambda at: atoms[at].source_size)
    if dims is None:
        return None
    whole = [dims[at] for at in range(len(tokens))]
    if not all(atom.taken is None or is_local(dim) for atom, dim in zip(atoms, whole, strict=True)):
        return None
    part = [_part_of_dim(atom, dim) for atom, dim in zip(atoms, whole, strict=True)]
    opening = View(tuple(Atom(atom.name, atom.source_size) for atom in atoms), tuple(source), each)
    return Opened(
        _layout_of_dims(layout, whole),
        opening,
        _layout_of_dims(layout, part),
        View(tuple(atoms), each, each),
        tuple(tokens),
    )


def _part_of_dim(atom: Atom, dim: Dim) -> Dim:
    return dim if atom.taken is None else Dim((Digit(atom.size, None),), atom.size)


def _layout_of_dims(layout: Layout, dims: list[Dim]) -> Layout:
    return Layout(layout.mesh, tuple(dims), layout.dtype, layout.reduction, layout.partial)


def _token_atom(view: View, token: tuple[int, ...]) -> Atom:
    """An atom of an opened dim, or another dim as one atom."""
    if len(token) == 1:
        atom = view.atoms[token[0]]
        return Atom(atom.name, atom.size, atom.taken)
    size = 1
    for at in token:
        size *= view.atoms[at].source_size
    return Atom("_".join(view.atoms[at].name for at in token) or "one", size)
