"""Numerals of unknown radices, and the law that a collective commutes with their meaning.

A dim of a layout is a string of parts, major to minor: digits that a step moves, and runs of any number of other
digits. Its global index is the numeral of all parts, a held one being its holder's coordinate; its local index is
the numeral of the local parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.proofs.symbolic import Law, Lemma, Term

Pair = tuple[Term, Term]


class Run(NamedTuple):
    """Any number of neighbouring digits that a step leaves alone."""

    name: str


class Digit(NamedTuple):
    """A digit that moves: local, or held along the axis on which devices have the coordinate `holder`."""

    name: str
    radix: Term
    holder: Term | None = None


Numeral = tuple[Run | Digit, ...]


class Typed(NamedTuple):
    """The dims of a step that it changes, before and after."""

    operand: tuple[Numeral, ...]
    result: tuple[Numeral, ...]


class Taken(NamedTuple):
    """Where a collective takes the element at the receiver's coordinates and local digits from.

    `sender` are the coordinates in which the sender may differ, `digits` those of the operand's local digits that are
    no local digits of the result. `where` says more of the unknowns in them, each below its radix.
    """

    sender: Mapping[Term, Term]
    digits: Mapping[str, Term]
    unknowns: Sequence[Pair] = ()
    where: Sequence[Pair] = ()


def commutes(about: str, typed: Typed, taken: Taken) -> Law:
    """The law that a collective leaves in a tile what the result's meaning says.

    The receiver's index in its tile is the numeral of its local digits; the place that the collective reads is given
    as an index of the sender's tile, whose digits are unknown; and the two global indices are claimed to be equal.
    """
    here = {p.name: Term(f"e_{p.name}") for dim in typed.result for p in dim if _local(p)}
    there = {p.name: Term(f"o_{p.name}") for dim in typed.operand for p in dim if _local(p)}
    read = {**here, **taken.digits}
    given = (*taken.where, *((index(dim, there), index(dim, read)) for dim in typed.operand))
    equal = [
        (element(a, there, taken.sender), element(b, here, {}))
        for a, b in zip(typed.operand, typed.result, strict=True)
    ]
    digits = [*_bounds(typed.result, here), *_bounds(typed.operand, there), *_coordinates(typed), *taken.unknowns]
    lemmas = tuple(lemma for pair in given for lemma in _same_digits(*pair))
    return Law(about, _sizes(typed), tuple(dict(digits).items()), given, tuple(equal), lemmas=lemmas)


def _same_digits(one: Term, other: Term) -> Iterator[Lemma]:
    """The law of numerals, from the last digit on: two equal numerals of the same radices have the same digits."""
    while one.head == other.head == "+" and one.args[0].head == other.args[0].head == "*":
        (high, radix), (above, other_radix) = one.args[0].args, other.args[0].args
        if radix != other_radix:
            return
        yield Lemma(high, above, one.args[1], other.args[1], radix)
        one, other = high, above


def _local(part: Run | Digit) -> bool:
    return isinstance(part, Run) or part.holder is None


def _radix(part: Run | Digit, tile: bool) -> Term:
    """How many values a part has: all, or those in a tile."""
    if isinstance(part, Digit):
        return part.radix
    return Term(f"{'tile' if tile else 'all'}_{part.name}")


def index(dim: Numeral, digits: Mapping[str, Term]) -> Term:
    """A local index: the numeral of the local digits."""
    return _horner([(digits[p.name], _radix(p, tile=True)) for p in dim if _local(p)])


def element(dim: Numeral, digits: Mapping[str, Term], at: Mapping[Term, Term]) -> Term:
    """A global index, by the definition of `meaning`: a held digit is the device's coordinate."""
    values: list[tuple[Term, Term]] = []
    for p in dim:
        if isinstance(p, Run):
            values.append((Term(p.name)(digits[p.name]), _radix(p, tile=False)))
        else:
            values.append((digits[p.name] if p.holder is None else at.get(p.holder, p.holder), p.radix))
    return _horner(values)


def _horner(digits: Sequence[tuple[Term, Term]]) -> Term:
    found = digits[0][0]
    for value, radix in digits[1:]:
        found = found * radix + value
    return found


def _bounds(dims: Sequence[Numeral], digits: Mapping[str, Term]) -> Iterator[tuple[Term, Term | None]]:
    """Every local digit is below its radix, but for the leading run's."""
    for dim in dims:
        for at, p in enumerate(dim):
            if _local(p):
                yield digits[p.name], None if at == 0 and isinstance(p, Run) else _radix(p, tile=True)


def _coordinates(typed: Typed) -> Iterator[tuple[Term, Term]]:
    """The receiver's coordinates."""
    for dim in (*typed.operand, *typed.result):
        for p in dim:
            if isinstance(p, Digit) and p.holder is not None:
                yield p.holder, p.radix


def _sizes(typed: Typed) -> tuple[Term, ...]:
    parts = [p for dim in (*typed.operand, *typed.result) for p in dim]
    return tuple(dict.fromkeys(_radix(p, tile) for p in parts for tile in (True, False)))
