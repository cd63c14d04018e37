"""A move in stages that move no data around its middle: dims opened, parts taken; parts put, dims closed.

view "(three h) -> h", take three=0 of f32[3{x}2] on <x=4>

view   f32[3{x}2]   -> f32[3, {x}2]     the dim with the part is opened
take   f32[3, {x}2] -> f32[1, {x}2]     three lies whole in each tile, so its part is local
...    f32[1, {x}2] -> the target       an ordinary move under the rest of the view
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from reshard.types.layout import Digit, Dim, Layout
from reshard.types.pair.view_layouts import Middle, inverse, is_local, middle, over_atoms
from reshard.types.view import Atom, Groups, View


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
def stages(source: Layout, target: Layout, view: View) -> Stages | None:
    """The stages of a move; None if a part is of a dim that is spread over devices, or if there is no middle.

    >>> from reshard.types import Mesh
    >>> from reshard.types.view import Window
    >>> view = View((Atom("three", 1, Window(0, 3)), Atom("h", 8)), ((0, 1),), ((1,),))
    >>> both = [Layout.parse(text, Mesh(x=4)) for text in ("f32[3{x}2]", "f32[8]")]
    >>> str(stages(*both, view).before.part), str(stages(*both, view).middle.source)
    ('f32[1, {x}2]', 'f32[{x}2]')
    """
    before = _opened(source, view.source, view) if view.taken else None
    back = inverse(view)
    after = _opened(target, back.source, back) if view.into else None
    if (before is None and view.taken) or (after is None and view.into):
        return None
    atoms = tuple(Atom(atom.name, atom.size) for atom in view.atoms)
    groups = [own if side is None else side.groups for own, side in ((view.source, before), (view.target, after))]
    ends = [own if side is None else side.part for own, side in ((source, before), (target, after))]
    between = middle(ends[0], ends[1], View(atoms, *groups))
    return None if between is None else Stages(before, between, after)


def _opened(layout: Layout, groups: Groups, view: View) -> Opened | None:
    """A side whose atoms have windows; None if one of them does not lie whole in every tile."""
    tokens: list[tuple[int, ...]] = []
    source: list[tuple[int, ...]] = []
    for group in groups:
        parts = [(at,) for at in group] if any(view.atoms[at].taken for at in group) else [group]
        source.append(tuple(range(len(tokens), len(tokens) + len(parts))))
        tokens += parts
    atoms = [_token(view, token) for token in tokens]
    each = tuple((at,) for at in range(len(tokens)))
    dims = over_atoms(layout, tuple(source), lambda at: atoms[at].source_size)
    if dims is None:
        return None
    whole = [dims[at] for at in range(len(tokens))]
    if not all(atom.taken is None or is_local(dim) for atom, dim in zip(atoms, whole, strict=True)):
        return None
    part = [_part(atom, dim) for atom, dim in zip(atoms, whole, strict=True)]
    opening = View(tuple(Atom(atom.name, atom.source_size) for atom in atoms), tuple(source), each)
    return Opened(_on(layout, whole), opening, _on(layout, part), View(tuple(atoms), each, each), tuple(tokens))


def _part(atom: Atom, dim: Dim) -> Dim:
    return dim if atom.taken is None else Dim((Digit(atom.size, None),), atom.size)


def _on(layout: Layout, dims: list[Dim]) -> Layout:
    return Layout(layout.mesh, tuple(dims), layout.dtype, layout.reduction, layout.partial)


def _token(view: View, token: tuple[int, ...]) -> Atom:
    """An atom of an opened dim, or another dim as one atom."""
    if len(token) == 1:
        atom = view.atoms[token[0]]
        return Atom(atom.name, atom.size, atom.taken)
    size = 1
    for at in token:
        size *= view.atoms[at].source_size
    return Atom("_".join(view.atoms[at].name for at in token) or "one", size)
