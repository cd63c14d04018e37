"""Views in einops' notation: `l (three h d) m -> three l h d m`.

    h            an atom, or a whole dim
    (three h d)  a dim made of atoms, major first
    1, ()        a dim of one element
    3            an atom of 3 values whose name is its size
    ...          the dims in between, as they are

Sizes are given where they cannot be inferred from the shapes, as in einops. An atom may be taken at one index or in
part (`take`), or fill part of the target's atom (`into`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from reshard.errors import NotationError, quoted, shortened
from reshard.types.view import Atom, View, Window
from reshard.types.whole import MOST, MOST_LISTED, whole, written

_TOKEN = re.compile(r"\s*(?:([A-Za-z][A-Za-z0-9_]*|[0-9]+|\.\.\.|[()])|(\S))")
_LONGEST = 1 << 14

Side = tuple[tuple[str, ...], ...]
"""For each dim, the names of its atoms, major first; `...` alone stands for the dims in between."""

Part = tuple[int, int | None, bool]
"""The first value of a part, the one after the last (None: the end), and whether it is a single index."""


class Pattern(NamedTuple):
    """The names on both sides of the arrow."""

    text: str
    source: Side
    target: Side


def parse_pattern(text: str) -> Pattern:
    """Reads a pattern; sizes are not known yet.

    >>> parse_pattern("l (three h) -> three l h").source
    (('l',), ('three', 'h'))
    """
    if not isinstance(text, str) or len(text) > _LONGEST:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise NotationError(f'view {quoted(text)}: give text in einops\' notation, such as "(a b) -> b a"')
    sides = text.split("->")
    if len(sides) != 2:
        raise NotationError(f"view {quoted(text)} has {len(sides) - 1} arrows; write SOURCE -> TARGET, with one ->")
    source, target = (_read_side(text, side) for side in sides)
    if (("...",) in source) != (("...",) in target):
        raise NotationError(f"view {quoted(text)}: ... stands for the same dims on both sides; write it on both")
    return Pattern(text, source, target)


def resolve_pattern(
    pattern: Pattern,
    shapes: tuple[Sequence[int], Sequence[int] | None],
    sizes: Mapping[str, object],
    take: Mapping[str, object],
    into: Mapping[str, object],
) -> View:
    """The view of a pattern between two global shapes; infers the sizes that are not given.

    The target's shape may be None where it follows.

    Raises `NotationError` for sizes that do not fit, cannot be inferred, or belong to no atom.

    >>> view = resolve_pattern(parse_pattern("(a b) -> b a"), ((6,), (3, 2)), {}, {}, {})
    >>> [(atom.name, atom.size) for atom in view.atoms]
    [('a', 2), ('b', 3)]
    """
    return _Resolver(pattern, shapes, sizes, take, into).view()


def _read_side(text: str, side: str) -> Side:
    dims: list[tuple[str, ...]] = []
    bracket: list[str] | None = None
    for match in _TOKEN.finditer(side):
        token = match[1]
        if token is None:
            raise _unreadable(text, f"cannot read {match[2]!r}; names start with a letter, dims with (")
        atoms = () if token == "1" else (token,)
        if token in "()":
            if (token == "(") != (bracket is None):
                raise _unreadable(text, "brackets do not match; a dim is one pair, as in (a b)")
            dims += [] if bracket is None else [tuple(bracket)]
            bracket = [] if bracket is None else None
        elif bracket is None:
            dims.append(atoms)
        elif token == "...":
            raise _unreadable(text, "... stands for whole dims; write it outside of brackets")
        else:
            bracket += atoms
    if bracket is not None:
        raise _unreadable(text, "a bracket is not closed; a dim is one pair, as in (a b)")
    names = [name for dim in dims for name in dim]
    if len(names) > MOST_LISTED:
        raise _unreadable(text, f"{len(names)} atoms; at most {MOST_LISTED}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise _unreadable(text, f"{twice} occurs twice on one side; name each atom once")
    return tuple(dims)


def _unreadable(text: str, why: str) -> NotationError:
    return NotationError(f"view {quoted(text)}: {why}")


class _Resolver:
    """The known sizes of a pattern's atoms on either side, and what they imply."""

    def __init__(
        self,
        pattern: Pattern,
        shapes: tuple[Sequence[int], Sequence[int] | None],
        sizes: Mapping[str, object],
        take: Mapping[str, object],
        into: Mapping[str, object],
    ) -> None:
        self._text = shortened(pattern.text)
        self._shapes = shapes
        self._parts = parts = {name: _read_range(name, part) for name, part in (*take.items(), *into.items())}
        # An array has no dim for an atom of which the other side has one index, unless it is written so.
        indexed = [{name for name in given if parts[name][2]} for given in (into, take)]
        self._sides: list[list[tuple[str, ...]]] = []
        between = 0
        for side, shape, drop in zip((pattern.source, pattern.target), shapes, indexed, strict=True):
            dims = list(side)
            if ("...",) in dims:
                at = dims.index(("...",))
                between = between if shape is None else len(shape) - len(dims) + 1
                dims[at : at + 1] = [(f"_{n}",) for n in range(between)]
            kept = [dim for dim in dims if not (len(dim) == 1 and dim[0] in drop)]
            if shape is None or (len(kept) < len(dims) and len(kept) == len(shape)):
                dims = kept
            elif len(dims) != len(shape):
                raise self._error(f"{len(dims)} dims are written for an array of shape {tuple(shape)}; write one each")
            self._sides.append(dims)
        self._names = list(dict.fromkeys(name for side in self._sides for dim in side for name in dim))
        if both := set(take) & set(into):
            raise self._error(f"{quoted(min(both))} is in take and in into; make two moves")
        for what, given in (("sizes", sizes), ("take", take), ("into", into)):
            for name in given:
                if name not in self._names:
                    raise self._error(
                        f"{what} names {quoted(name)}, which is not an atom of it; its atoms are "
                        f"{', '.join(self._names)}"
                    )
        self._taken, self._filled = set(take), set(into)
        written_sizes = {name: written(name) for name in self._names if name.isdigit()}
        self._sizes: dict[str, int] = {}
        for name, size in (*sizes.items(), *written_sizes.items()):
            checked = whole(size)
            if checked is None:
                raise self._error(f"{name}={quoted(size)}: a size is a whole number from 0 to {MOST}")
            self._sizes[name] = checked

    def view(self) -> View:
        """The view; raises `NotationError` for sizes that are unknown or do not fit."""
        # Sizes are inferred dim by dim until nothing more follows; each pass that goes on finds at least one.
        while any(
            [
                self._infer_dim(side, dim, size)
                for side, shape in enumerate(self._shapes)
                if shape is not None
                for dim, size in zip(self._sides[side], shape, strict=True)
            ]
        ):
            pass
        unknown = [name for name in self._names if name not in self._sizes]
        if unknown:
            raise self._error(
                f"the size of {', '.join(unknown)} cannot be inferred from the shapes "
                f"{' and '.join(str(tuple(shape)) for shape in self._shapes if shape is not None)}; give "
                f"{unknown[0]}=..."
            )
        atoms: list[Atom] = []
        for name in self._names:
            size, window = self._sizes[name], None
            if name in self._parts:
                window, size = Window(self._bounds(name, size)[0], size), self._bounds(name, size)[1]
            taken = name in self._taken
            atoms.append(Atom(name, size, window if taken else None, None if taken else window))
        for side, (here, there, word) in enumerate((("source", "target", "into"), ("target", "source", "take"))):
            names = {name for dim in self._sides[side] for name in dim}
            for atom in atoms:
                if atom.name not in names and atom.size != 1:
                    raise self._error(
                        f"{atom.name} ({atom.size} values) is in the {there} but not in the {here}; name it on both "
                        f"sides, or choose one of its values with {word}={{{atom.name!r}: 0}}"
                    )
        numbers = {name: at for at, name in enumerate(self._names)}
        source, target = (tuple(tuple(numbers[name] for name in dim) for dim in side) for side in self._sides)
        view = View(tuple(atoms), source, target)
        for what, made, shape in zip(_SIDES, (view.source_shape, view.target_shape), self._shapes, strict=True):
            if shape is not None and made != tuple(shape):
                raise self._error(f"its sizes make a {what} of global shape {made}, but the {what} has {tuple(shape)}")
        return view

    def _infer_dim(self, side: int, dim: tuple[str, ...], size: int) -> bool:
        """Infers the one unknown size of a dim from the others; says whether it did."""
        parts = self._filled if side == 0 else self._taken
        unknown = [name for name in dim if self._on_side(name, side) is None]
        if len(unknown) != 1 or unknown[0] in parts:
            return False
        others = math.prod(self._on_side(name, side) or 0 for name in dim if name != unknown[0])
        if others == size == 0:
            return False
        if not others or size % others:
            raise self._error(
                f"the {_SIDES[side]}'s dim ({' '.join(dim)}) of {size} is not a multiple of {others}, the product of "
                f"{', '.join(n for n in dim if n != unknown[0])}; whole sizes only"
            )
        self._sizes[unknown[0]] = size // others
        return True

    def _on_side(self, name: str, side: int) -> int | None:
        """The atom's values on a side, None while they are unknown."""
        if name not in (self._filled if side == 0 else self._taken):
            return self._sizes.get(name)
        start, stop, _ = self._parts[name]
        if stop is None or stop < 0 or start < 0:
            size = self._sizes.get(name)
            return None if size is None else self._bounds(name, size)[1]
        return stop - start

    def _bounds(self, name: str, size: int) -> tuple[int, int]:
        """Where the part of an atom of this size starts, and how many values it has."""
        start, stop, single = self._parts[name]
        start = start + size if start < 0 else start
        stop = size if stop is None else stop + size if stop < 0 or (single and stop == 0) else stop
        if not 0 <= start <= stop <= size:
            raise self._error(f"{name} has {size} values; {start}:{stop} is not a part of them")
        return start, stop - start

    def _error(self, why: str) -> NotationError:
        return NotationError(f"view {quoted(self._text)}: {why}")


_SIDES = ("source", "target")


def _read_range(name: str, part: object) -> Part:
    """An index, a slice or a (start, stop) pair as a part; negative numbers count from the end."""
    index = _read_index(part)
    if index is not None:
        return index, index + 1, True
    if isinstance(part, slice):
        given = cast("Any", part)
        start, stop = (None if end is None else _read_index(end) for end in (given.start, given.stop))
        unread = (given.start is not None and start is None) or (given.stop is not None and stop is None)
        if given.step in (None, 1) and not unread:
            return start or 0, stop, False
    if isinstance(part, tuple | list) and len(cast("Sequence[object]", part)) == 2:
        start, stop = map(_read_index, cast("Sequence[Any]", part))
        if start is not None and stop is not None:
            return start, stop, False
    raise NotationError(
        f"{quoted(cast('object', part))} of {quoted(name)}: give an index, a slice without a step, or (start, stop)"
    )


def _read_index(value: object) -> int | None:
    size = whole(value)
    return whole(value, -MOST, -1) if size is None else size


def read_part(text: str) -> int | slice:
    """A part as text: `2`, or `0:8`, `8:`; for the command line.

    >>> read_part("2"), read_part("8:")
    (2, slice(8, None, None))
    """
    match = re.fullmatch(r"\s*(\d*)\s*(:?)\s*(\d*)\s*", text)
    if match is None or not (match[1] or match[2]):
        raise NotationError(f"part {quoted(text)}: write an index such as 2, or START:STOP such as 0:8")
    start, stop = (None if not digits else written(digits) for digits in (match[1], match[3]))
    if match[2]:
        return slice(start, stop)
    if start is None:
        raise NotationError(f"part {quoted(text)}: an index is at most {MOST}")
    return start
