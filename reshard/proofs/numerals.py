"""Numerals of unknown radices, and the law that a collective commutes with their meaning.

    all_gather of a digit p of radix r, anywhere in a dim:    pre {x}p post  ->  pre p post

    local index before     o_pre tile_post + o_post              the digit is held, so no tile has it
    global index before    (pre(o_pre) r + x) all_post + post(o_post)
    local index after      (e_pre r + e_p) tile_post + e_post
    global index after     (pre(e_pre) r + e_p) all_post + post(e_post)
    the sender has         x = e_p and the local index e_pre tile_post + e_post

A dim of a layout is a string of parts, major to minor: digits that a step moves, and runs of any number of other
digits. Its global index is the numeral of all parts, with the holder's coordinate for a held digit. Its local index is
the numeral of the local parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.proofs.symbolic import Law, Lemma, Term

Pair = tuple[Term, Term]


class DigitRun(NamedTuple):
    """Any number of neighbouring digits that a step does not move."""

    name: str


class MovedDigit(NamedTuple):
    """A digit that a step moves: local, or held along the axis on which devices have the coordinate `holder`."""

    name: str
    radix: Term
    holder: Term | None = None


Numeral = tuple[DigitRun | MovedDigit, ...]


class Typed(NamedTuple):
    """The dims that a step changes, before and after."""

    operand: tuple[Numeral, ...]
    result: tuple[Numeral, ...]


class Taken(NamedTuple):
    """Where a collective takes the element for the receiver's coordinates and local digits from.

    `sender` gives the coordinates in which the sender may differ, `digits` those local digits of the operand that the
    result does not have. They may use `unknowns`, each below its radix, for which the equations in `where` hold.
    """

    sender: Mapping[Term, Term]
    digits: Mapping[str, Term]
    unknowns: Sequence[Pair] = ()
    where: Sequence[Pair] = ()


def commutes(about: str, typed: Typed, taken: Taken) -> Law:
    """The law that a collective leaves in a tile what the result's meaning gives.

    The receiver's index in its tile is the numeral of its local digits. The place that the collective reads is given as
    an index in the sender's tile, with unknown digits. The law claims that the two global indices are equal.
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
    """The lemmas that two equal numerals of the same radices have the same digits, from the last digit on."""
    while one.head == other.head == "+" and one.args[0].head == other.args[0].head == "*":
        (high, radix), (above, other_radix) = one.args[0].args, other.args[0].args
        if radix != other_radix:
            return
        yield Lemma(high, above, one.args[1], other.args[1], radix)
        one, other = high, above


def _local(part: DigitRun | MovedDigit) -> bool:
    return isinstance(part, DigitRun) or part.holder is None


def _radix(part: DigitRun | MovedDigit, tile: bool) -> Term:
    """The number of values that a part has, in all or in a tile."""
    if isinstance(part, MovedDigit):
        return part.radix
    return Term(f"{'tile' if tile else 'all'}_{part.name}")


def index(dim: Numeral, digits: Mapping[str, Term]) -> Term:
    """The local index: the numeral of the local digits."""
    return _horner([(digits[p.name], _radix(p, tile=True)) for p in dim if _local(p)])


def element(dim: Numeral, digits: Mapping[str, Term], at: Mapping[Term, Term]) -> Term:
    """The global index by the definition of `meaning`: a held digit is the device's coordinate."""
    values: list[tuple[Term, Term]] = []
    for p in dim:
        if isinstance(p, DigitRun):
            values.append((Term(p.name)(digits[p.name]), _radix(p, tile=False)))
        else:
            values.append((digits[p.name] if p.holder is None else at.get(p.holder, p.holder), p.radix))
    return _horner(values)


def _horner(digits: Sequence[tuple[Term, Term]]) -> Term:
    number = digits[0][0]
    for value, radix in digits[1:]:
        number = number * radix + value
    return number


def _bounds(dims: Sequence[Numeral], digits: Mapping[str, Term]) -> Iterator[tuple[Term, Term | None]]:
    """The local digits with their radices as bounds; a leading run has none."""
    for dim in dims:
        for at, p in enumerate(dim):
            if _local(p):
                yield digits[p.name], None if at == 0 and isinstance(p, DigitRun) else _radix(p, tile=True)


def _coordinates(typed: Typed) -> Iterator[tuple[Term, Term]]:
    """The receiver's coordinates with their bounds."""
    for dim in (*typed.operand, *typed.result):
        for p in dim:
            if isinstance(p, MovedDigit) and p.holder is not None:
                yield p.holder, p.radix


def _sizes(typed: Typed) -> tuple[Term, ...]:
    parts = [p for dim in (*typed.operand, *typed.result) for p in dim]
    return tuple(dict.fromkeys(_radix(p, tile) for p in parts for tile in (True, False)))
