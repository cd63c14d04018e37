"""Views: which element of the source is which element of the target, when their index spaces differ.

    "l (three h d) m -> three l h d m", three=3, h=32, on a source of 2 x 6144 x 1024

    atom    size   source dim   target dim
    l          2   0            1
    three      3   1            0
    h         32   1            2
    d         64   1            3
    m       1024   2            4

An *atom* is a factor of an index. A source dim is the product of its atoms, major first, and so is a target dim: a
view permutes, splits and merges the digits of indices, and moves no element. Where only part of an atom takes part,
a `Window` says which: `taken` of the source's atom, `into` the target's. An atom of one value may be on one side only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, cast

from reshard.errors import PlanError, quoted
from reshard.types.whole import MOST, read_items, whole


class Window(NamedTuple):
    """The part of an atom of `size` values that starts at `start`."""

    start: int
    size: int


class Atom(NamedTuple):
    """A factor of an index: its name, how many values move, and the window of them on either side, None for all.

    >>> q = Atom("three", 1, taken=Window(0, 3))
    >>> q.source_size, q.target_size
    (3, 1)
    """

    name: str
    size: int
    taken: Window | None = None
    into: Window | None = None

    @property
    def source_size(self) -> int:
        """The atom's values in the source."""
        return self.size if self.taken is None else self.taken.size

    @property
    def target_size(self) -> int:
        """The atom's values in the target."""
        return self.size if self.into is None else self.into.size


Groups = tuple[tuple[int, ...], ...]
"""For each dim, its atoms by number, major first."""


@dataclass(frozen=True)
class View:
    """The atoms, and those of each dim of the source and of the target.

    Raises `PlanError` for atoms that occur twice on a side, or on one side only with more than one value.

    >>> view = View((Atom("a", 2), Atom("b", 3)), ((0, 1),), ((1,), (0,)))
    >>> str(view), view.source_shape, view.target_shape
    ('(a b) -> b a', (6,), (3, 2))
    """

    atoms: tuple[Atom, ...]
    source: Groups
    target: Groups

    def __post_init__(self) -> None:
        for name in ("atoms", "source", "target"):
            given: object = getattr(self, name)
            if not isinstance(given, tuple | list):
                raise PlanError(f"{name} {quoted(given)} of a view: give a tuple")
        for dim in (*self.source, *self.target):
            if not isinstance(dim, tuple | list) or any(whole(at, 0, len(self.atoms) - 1) is None for at in dim):  # pyright: ignore
                raise PlanError(f"the dims of a view name its atoms by number, below {len(self.atoms)}: {quoted(dim)}")
        for at, atom in enumerate(self.atoms):
            _check_atom(atom)
            sides = [sum(dim.count(at) for dim in groups) for groups in (self.source, self.target)]
            alone = sides in ([1, 0], [0, 1]) and atom.size == 1
            if sides != [1, 1] and not alone:
                raise PlanError(
                    f"atom {atom.name!r} of {atom.size} values occurs {sides[0]} times in the source and {sides[1]} "
                    f"times in the target of a view; name it once on each side"
                )
        if any(size > MOST for size in (*self.source_shape, *self.target_shape)):
            raise PlanError(f"view {self}: the sizes of a dim multiply to more than {MOST}, the largest index")

    @classmethod
    def identity(cls, shape: Sequence[int]) -> View:
        """The view that leaves an array of this shape as it is."""
        sizes = read_items(shape)
        if sizes is None:
            raise PlanError(f"shape {quoted(shape)} of a view: give one size per dim, such as (16, 8)")
        return _keep_dims(tuple(sizes))

    @cached_property
    def source_shape(self) -> tuple[int, ...]:
        """The global shape of the source."""
        return tuple(math.prod(self.atoms[at].source_size for at in dim) for dim in self.source)

    @cached_property
    def target_shape(self) -> tuple[int, ...]:
        """The global shape of the target."""
        return tuple(math.prod(self.atoms[at].target_size for at in dim) for dim in self.target)

    @property
    def taken(self) -> bool:
        """Whether only part of the source is wanted."""
        return any(atom.taken is not None for atom in self.atoms)

    @property
    def into(self) -> bool:
        """Whether only part of the target is filled."""
        return any(atom.into is not None for atom in self.atoms)

    @cached_property
    def map(self) -> ViewMap:
        """The pairs of row-major indices that it relates, in the one form that equal views share."""
        source = _atom_strides(self.source, [atom.source_size for atom in self.atoms])
        target = _atom_strides(self.target, [atom.target_size for atom in self.atoms])
        start = sum(atom.taken.start * source.get(at, 0) for at, atom in enumerate(self.atoms) if atom.taken)
        end = sum(atom.into.start * target.get(at, 0) for at, atom in enumerate(self.atoms) if atom.into)
        digits = [(atom.size, source.get(at, 0), target.get(at, 0)) for at, atom in enumerate(self.atoms)]
        return canonical_map(digits, start, end)

    @cached_property
    def plain(self) -> bool:
        """Whether it leaves every array as it is; filling a part does not, even if that is all of the target."""
        return (
            not self.into and self.source_shape == self.target_shape and self.map == _keep_dims(self.source_shape).map
        )

    def to_dict(self) -> dict[str, Any]:
        """The view as plain data of JSON; `from_dict` reads it back."""
        atoms = [[a.name, a.size, *(None if w is None else list(w) for w in (a.taken, a.into))] for a in self.atoms]
        return {"atoms": atoms, "source": [list(d) for d in self.source], "target": [list(d) for d in self.target]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> View:
        """Reads what `to_dict` makes; raises `PlanError` for anything else.

        >>> view = View.identity((4, 2))
        >>> View.from_dict(view.to_dict()) == view
        True
        """
        try:
            atoms = [
                Atom(name, size, *(None if w is None else Window(*w) for w in (taken, into)))
                for name, size, taken, into in _checked_list(data["atoms"])
            ]
            source, target = (
                tuple(tuple(_checked_list(d)) for d in _checked_list(data[side])) for side in ("source", "target")
            )
            return cls(tuple(atoms), source, target)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"{quoted(data)} is not a view in JSON; use the output of to_json()") from None

    def __str__(self) -> str:
        sides: list[str] = []
        for groups in (self.source, self.target):
            dims = [" ".join(self.atoms[at].name for at in dim) for dim in groups]
            sizes = [len(dim) for dim in groups]
            sides.append(" ".join(d if n == 1 else f"({d})" if n else "1" for d, n in zip(dims, sizes, strict=True)))
        parts = [" -> ".join(sides).strip()]
        for atom in self.atoms:
            for side, window in (("source", atom.taken), ("target", atom.into)):
                if window is not None:
                    values = window.start if atom.size == 1 else f"{window.start}:{window.start + atom.size}"
                    parts.append(f"{atom.name}={values} of the {side}'s {window.size}")
        return ", ".join(parts)


def _checked_list(value: object) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError("an object or a text is no list, though it can be iterated over")
    return cast("Sequence[Any]", value)


def _check_atom(atom: object) -> None:
    if not isinstance(atom, Atom) or not isinstance(cast("object", atom.name), str) or whole(atom.size) is None:
        raise PlanError(f"{quoted(atom)} is not an Atom; give a name and a size of at least 0")
    for window in (atom.taken, atom.into):
        given = read_items(window) if window is not None else None
        if window is not None and (given is None or len(given) != 2 or any(whole(each) is None for each in given)):
            raise PlanError(f"{quoted(window)} of atom {atom.name!r} is not a Window; give its start and the size")
        if window is not None and window.start + atom.size > window.size:
            raise PlanError(
                f"atom {atom.name!r}: the {atom.size} values from {window.start} on leave its {window.size} values"
            )


@lru_cache(maxsize=4096)
def _keep_dims(shape: tuple[int, ...]) -> View:
    """The identity of arrays of a shape: thousands of a model's have few shapes."""
    atoms = tuple(Atom(f"d{at}", size) for at, size in enumerate(shape))
    each = tuple((at,) for at in range(len(atoms)))
    return View(atoms, each, each)


def _atom_strides(groups: Groups, sizes: Sequence[int]) -> dict[int, int]:
    """What one value of each atom is worth in the row-major index of a side's array."""
    place, strides = 1, dict[int, int]()
    for at in (at for dim in reversed(groups) for at in reversed(dim)):
        strides[at] = place
        place *= sizes[at]
    return strides


# Index maps of views: pairs of row-major indices, as counts and strides, and one view after another.
#
#   "(a b) -> b a" with a=2, b=3    source 0 1 2 3 4 5    digits (2, 3, 1) and (3, 1, 2): counts, strides in the source
#                                   target 0 2 4 1 3 5    and in the target
#
# That the views of a plan's steps, one after another, make the view that was asked for is checked on these: a plan
# whose steps relabel elements in any other way cannot be built.


MapDigit = tuple[int, int, int]
"""How many values, and what one is worth in the source's row-major index and in the target's."""


class ViewMap(NamedTuple):
    """All pairs (start + sum of v * source stride, end + sum of v * target stride) for digit values v."""

    digits: tuple[MapDigit, ...]
    start: int
    end: int


def canonical_map(digits: Iterable[MapDigit], start: int = 0, end: int = 0) -> ViewMap:
    """The map with as few digits as possible, by falling strides in the target: equal maps are equal objects.

    >>> canonical_map([(2, 3, 3), (3, 1, 1)])
    ViewMap(digits=((6, 1, 1),), start=0, end=0)
    """
    counted = [digit for digit in digits if digit[0] != 1]
    if any(count == 0 for count, _, _ in counted):
        return ViewMap(((0, 0, 0),), 0, 0)
    merged: list[MapDigit] = []
    for count, source, target in sorted(counted, key=lambda digit: -digit[2]):
        if merged and merged[-1][1:] == (count * source, count * target):
            merged[-1] = (merged[-1][0] * count, source, target)
        else:
            merged.append((count, source, target))
    return ViewMap(tuple(merged), start, end)


def compose_maps(first: ViewMap, second: ViewMap) -> ViewMap | None:
    """The map of `first` and then `second`, if the digits of one nest in those of the other; else None.

    One of the two has all indices of the array in the middle, so that they are numerals of its digits.

    >>> split, swap = canonical_map([(6, 1, 1)]), canonical_map([(2, 3, 1), (3, 1, 2)])
    >>> compose_maps(split, swap) == swap, compose_maps(swap, canonical_map([(2, 3, 3), (3, 1, 1)])) == swap
    (True, True)
    """
    if ((0, 0, 0),) in (first.digits, second.digits):
        return canonical_map([(0, 0, 0)])
    # The second may leave in their places just those indices that the first leads to.
    if second == canonical_map([(count, target, target) for count, _, target in first.digits], first.end, first.end):
        return first
    forward = _compose_from_all(first, second)
    if forward is not None:
        return forward
    backward = _compose_from_all(_invert_map(second), _invert_map(first))
    return None if backward is None else _invert_map(backward)


def _invert_map(view: ViewMap) -> ViewMap:
    return canonical_map(((count, target, source) for count, source, target in view.digits), view.end, view.start)


def _compose_from_all(first: ViewMap, second: ViewMap) -> ViewMap | None:
    """The map of both, where `first` has all indices in the middle that `second` starts from."""
    # As many indices as the last one says, so that there is none in the middle that no source index leads to.
    indices = math.prod(count for count, _, _ in first.digits)
    if first.end or indices < _map_extent(first) or indices < _map_extent(_invert_map(second)):
        return None
    digits: list[MapDigit] = []
    for count, middle, target in second.digits:
        parts = _map_digit(first.digits, count, middle, target, second.start)
        if parts is None:
            return None
        digits += parts
    start = first.start + sum(second.start // at % count * source for count, source, at in first.digits)
    return canonical_map(digits, start, second.end)


def _map_extent(view: ViewMap) -> int:
    """The target's indices up to the largest that the map reaches."""
    return view.end + 1 + sum((count - 1) * target for count, _, target in view.digits)


def _map_digit(first: Sequence[MapDigit], count: int, middle: int, target: int, start: int) -> list[MapDigit] | None:
    """A digit of the second map as digits of the source; None if its values carry from one digit to the next."""
    parts: list[MapDigit] = []
    for radix, source, place in reversed(first):
        if count == 1:
            break
        if place * radix <= middle or middle % place:
            continue
        # The digit moves by `step` values of this one of the source, which has room for so many before it carries.
        step, room = middle // place, radix // (middle // place)
        value = start // place % radix
        if value + (count - 1) * step < radix:
            return [*parts, (count, source * step, target)]
        # It carries evenly only if it starts in the first step and fills whole rounds.
        if radix % step or value >= step or count % room:
            return None
        parts.append((room, source * step, target))
        count, middle, target = count // room, place * radix, target * room
    return parts if count == 1 else None
