"""Digits and dims: the numerals of a layout, and the invariants that layouts keep."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

from reshard.errors import LayoutError, quoted
from reshard.types import reductions
from reshard.types.mesh import Mesh, SubAxis
from reshard.types.pieces import Pieces
from reshard.types.whole import MOST, MOST_LISTED, primes, read_items, whole


class Digit(NamedTuple):
    """One digit of a numeral: its radix and the sub-axis that holds it, None for a local digit."""

    radix: int
    axis: SubAxis | None


class Dim(NamedTuple):
    """One dimension: its digits, most significant first, and its true size.

    >>> dim = Dim((Digit(4, SubAxis("x", 1, 4)), Digit(3, None)), 10)    # {x}3/10: pieces 0-2, 3-5, 6-8, 9
    >>> dim.padded, dim.tile
    (12, 3)

    With `pieces`, the coordinates along the held digits are the number of a piece, and the last digit is local: its
    values are the local indices, as many as the largest piece has.

    >>> dim = Dim((Digit(3, SubAxis("x", 1, 3)), Digit(5, None)), 8, Pieces.from_sizes([3, 5, 0]))    # {x}(3,5,0)
    >>> dim.padded, dim.tile
    (15, 5)
    """

    digits: tuple[Digit, ...]
    size: int
    pieces: Pieces | None = None

    @property
    def padded(self) -> int:
        """The product of the radices: the true size rounded up to whole pieces."""
        return math.prod(d.radix for d in self.digits)

    @property
    def tile(self) -> int:
        """Elements of this dim in one tile, padding included."""
        return math.prod(d.radix for d in self.digits if d.axis is None)


def true_extent(dim: Dim, mesh: Mesh, position: int) -> int:
    """How many local indices of a dim are elements, on the device at a position; the rest is padding.

    Global indices grow with local ones, so the elements come first: this is ScaLAPACK's NUMROC.

    >>> dim = Dim((Digit(2, None), Digit(3, SubAxis("x", 1, 3)), Digit(2, None)), 9)    # 2{x}2/9
    >>> [true_extent(dim, Mesh(x=3), x) for x in range(3)]
    [4, 3, 2]
    """
    if not dim.size:
        return 0
    if dim.pieces is not None:
        return dim.pieces.sizes[number_piece(dim, mesh, position)]
    count, left, place, tile = 0, dim.size, dim.padded, dim.tile
    for radix, axis in dim.digits:
        place //= radix
        if axis is None:  # Whole values of the digit, and at most one that is cut short.
            tile //= radix
            values = min(left // place, radix)
            count, left = count + values * tile, left - values * place
            left = left if values < radix else 0
        else:
            left = min(max(left - mesh.coordinate(position, axis) * place, 0), place)
    return count + left


def number_piece(dim: Dim, mesh: Mesh, position: int) -> int:
    """The number of the piece of a dim on the device at a position: its held digits, most significant first."""
    number = 0
    for radix, axis in dim.digits:
        if axis is not None:
            number = number * radix + mesh.coordinate(position, axis)
    return number


@lru_cache(maxsize=64)
def tabulate_pieces(dim: Dim) -> Pieces:
    """The runs of any dim: a numeral has one for each block of its last digit.

    >>> print(tabulate_pieces(Dim((Digit(2, None), Digit(2, SubAxis("x", 1, 2)), Digit(2, None)), 7)))
    (2@0,2@1,2@0,1@1)
    """
    if dim.pieces is not None:
        return dim.pieces
    inner = dim.digits[-1:] if dim.digits and dim.digits[-1].axis is None else ()
    block = max(1, math.prod(digit.radix for digit in inner))
    blocks, numbers, count = -(-dim.size // block), [0], 1
    for radix, axis in reversed(dim.digits[: len(dim.digits) - len(inner)]):
        values = range(min(radix, -(-blocks // len(numbers))))
        share = 0 if axis is None else count
        numbers = [number + value * share for value in values for number in numbers]
        count *= 1 if axis is None else radix
    lengths = [block] * blocks
    lengths[-1:] = [dim.size - (blocks - 1) * block] if blocks else []
    return Pieces(lengths, numbers[:blocks], count)


def fit_digits(digits: Iterable[Digit], size: int) -> Dim:
    """The dim that covers `size` in as many rounds of these digits as it takes.

    Leading local digits count rounds, and are replaced by the number needed. Digits that start with a held one are
    one round, which gets a leading digit in front.

    >>> axis = SubAxis("x", 1, 4)
    >>> fit_digits([Digit(9, None), Digit(4, axis), Digit(2, None)], 20).digits[0]
    Digit(radix=3, axis=None)
    """
    kept = tuple(itertools.dropwhile(lambda d: d.axis is None, digits))
    unit = math.prod(d.radix for d in kept)
    return Dim((Digit(-(-size // unit), None), *kept), size)


def checked_size(size: object) -> int:
    """Returns a dim's size; raises `LayoutError` unless it is a whole number of at least 0 (*whole sizes*)."""
    checked = whole(size)
    if checked is None:
        raise LayoutError(
            f"dim size {quoted(size)}: a size is a whole number of at least 0, at most {MOST} (whole sizes)"
        )
    return checked


def checked_shape(shape: object) -> tuple[int, ...]:
    """Returns a global shape; raises `LayoutError` unless it lists whole numbers of at least 0 (*whole sizes*)."""
    sizes = read_items(shape)
    if sizes is None:
        raise LayoutError(
            f"global shape {quoted(shape)}: give one size per dim, such as (16, 8), for at most {MOST_LISTED} dims"
        )
    return tuple(checked_size(size) for size in sizes)


# The coordinates of all positions of a mesh at once.


def numbers_along(positions: int, factors: Sequence[tuple[int, int]]) -> list[int]:
    """For each position below `positions`, its coordinates along (stride, size) factors as one number, major to minor.

    Lists are repeated instead of taking each position apart: a mesh may have millions.

    >>> numbers_along(6, [(1, 3), (3, 2)])
    [0, 2, 4, 1, 3, 5]
    """
    numbers = [0] * positions
    for at, (stride, size) in enumerate(factors):
        each = range(size)
        once = each if stride == 1 else itertools.chain.from_iterable(itertools.repeat(value, stride) for value in each)
        along = [*once] * (positions // (stride * size))
        numbers = [number * size + value for number, value in zip(numbers, along, strict=True)] if at else along
    return numbers


# The invariants of a layout, each checked by one function under the name that `docs/reference/language.md` gives it.
#
#     whole sizes      check_whole_sizes      refuses a radix of -2, of 2.5 or True, and a size above 2^63 - 1
#     exact cover      check_exact_cover      refuses f32[{x}4/10]: room for 16 elements, where 12 hold 10
#                      check_pieces           refuses f32[{x}(3,5)] on <x=4>: two pieces for four devices
#     single use       check_single_use       refuses f32[{x}4, {x}4]: devices have one coordinate along x, not two
#     radix match      check_radix_match      refuses a digit of radix 2 that is held by an axis of size 4
#     canonical form   canonical_dim,         turns f32[2 2{x:(1)2}{x:(2)2}] into f32[4{x}]
#                      canonical_partial,
#                      canonical_pieces       turns f32[{x}(3,3,3,1)] into f32[{x}3/10]
#     one reduction    check_one_reduction    refuses s32[16] + mean{x}: integers have no mean
#
# `Layout` calls them all when it is built, so layouts of equal meaning are equal objects.


def canonical_dim(dim: Dim, mesh: Mesh, at: int) -> Dim:
    """*Canonical form* of dim number `at`: neighbouring digits merged, digits of radix 1 dropped.

    Checks *whole sizes*, *radix match* and *exact cover* on the way.
    """
    dim = check_whole_sizes(dim, at)
    for digit in dim.digits:
        if digit.axis is not None:
            check_radix_match(digit, mesh)
    size = dim.size
    if dim.pieces is not None:
        check_pieces(dim, dim.pieces, at)
    if size == 0:  # No device holds an element, whatever the digits are.
        return Dim((Digit(0, None),), 0)
    if dim.pieces is not None:
        return canonical_pieces(dim, dim.pieces, mesh)
    # Digits of radix 1 are dropped. Neighbours are merged if both are local, or held by consecutive sub-axes of one.
    digits: list[Digit] = []
    for digit in dim.digits:
        if digit.radix == 1:
            continue
        axis, above = digit.axis, digits[-1].axis if digits else None
        joined = None if axis is None or above is None else _join_axes(above, axis)
        if digits and axis is None and above is None:
            digits[-1] = Digit(digits[-1].radix * digit.radix, None)
        elif joined is not None:
            digits[-1] = Digit(joined.size, joined)
        else:
            digits.append(digit)
    one_round = dim.digits[:1] == ((1, None),)
    if digits and digits[0].axis is None and any(d.radix == 1 and d.axis is not None for d in dim.digits):
        # Where blocks are dealt along an axis of one device, that digit was dropped, so rounds and blocks have merged
        # into one local digit: rounds without elements go, since it must not count the padding of the last block.
        unit = math.prod(d.radix for d in digits[1:])
        rounds = min(digits.pop(0).radix, -(-size // unit))
        one_round = rounds == 1
        digits[:0] = [Digit(rounds, None)] if rounds > 1 else []
    return Dim(tuple(check_exact_cover(digits, size, one_round, at)), size)


@lru_cache(maxsize=64)
def canonical_pieces(dim: Dim, pieces: Pieces, mesh: Mesh) -> Dim:
    """*Canonical form* of a dim in pieces of any size: a numeral if one says the same, else one order of held digits.

    That is the order in which the pieces are intervals, or the order of the mesh if there is none, so that equal
    pieces are numbered alike.
    """
    # The sub-axes in the order of the mesh, as few as can be, and the pieces numbered so.
    given = [digit.axis for digit in dim.digits if digit.axis is not None and digit.radix > 1]
    axes = [digit.axis for digit in _join_held(sorted(given, key=mesh.stride, reverse=True)) if digit.axis is not None]
    if not axes:
        return canonical_dim(Dim((Digit(dim.size, None),), dim.size), mesh, 0)
    strides = [mesh.stride(axis) for axis in given]
    if strides != sorted(strides, reverse=True):
        order = sorted(range(len(given)), key=strides.__getitem__, reverse=True)
        pieces = _reorder_numbers(pieces, [axis.size for axis in given], order)
    # As factors of prime size. Where an axis has several primes, what is in order by one order of them may not be by
    # another one: the first that fits is taken.
    spellings = [sorted(set(itertools.permutations(primes(axis.size)[:_MOST_PRIMES]))) for axis in axes]
    rests = [primes(axis.size)[_MOST_PRIMES:] for axis in axes]
    every: list[list[SubAxis]] = []
    for choice in itertools.islice(itertools.product(*spellings), _MOST_SPELLINGS):
        every.append([])
        for axis, some, rest in zip(axes, choice, rests, strict=True):
            pre = axis.pre
            for prime in (*some, *rest):
                every[-1].append(SubAxis(axis.axis, pre, prime))
                pre *= prime
    for factors in every:
        numeral = pieces.read_numeral([axis.size for axis in factors])
        digits = [Digit(radix, None if at is None else factors[at]) for radix, at in numeral or ()]
        # Some rounds may have no element, or the last one may be cut short where it must not be.
        with contextlib.suppress(LayoutError):
            plain = canonical_dim(Dim((Digit(1, None), *digits), dim.size), mesh, 0) if digits else None
            if plain is not None and plain.tile == pieces.largest:
                return plain
    for factors in every:
        sizes = [axis.size for axis in factors]
        if (order := pieces.find_order(sizes)) is not None:
            held = _join_held(factors[at] for at in order)
            if order != sorted(order):
                pieces = _reorder_numbers(pieces, sizes, order)
            return Dim((*held, Digit(pieces.largest, None)), dim.size, pieces)
    return Dim((*_join_held(axes), Digit(pieces.largest, None)), dim.size, pieces)


_MOST_PRIMES, _MOST_SPELLINGS = 5, 64
"""Primes of an axis that are tried in every order, and spellings of all axes."""


def _join_held(axes: Iterable[SubAxis]) -> list[Digit]:
    """Held digits, major first, consecutive sub-axes as one."""
    held: list[Digit] = []
    for axis in axes:
        joined = _join_axes(held[-1].axis, axis) if held and held[-1].axis is not None else None
        if joined is not None:
            held[-1] = Digit(joined.size, joined)
        else:
            held.append(Digit(axis.size, axis))
    return held


def _reorder_numbers(pieces: Pieces, radices: Sequence[int], order: Sequence[int]) -> Pieces:
    """The pieces whose numbers have these digits, major first, numbered by the same digits in another order."""
    weights = [math.prod(radices[at + 1 :]) for at in range(len(radices))]
    numbers = [0] * pieces.count
    for number in range(pieces.count):
        for at in order:
            numbers[number] = numbers[number] * radices[at] + number // weights[at] % radices[at]
    return pieces.renumbered(numbers, pieces.count)


def canonical_partial(partial: Iterable[SubAxis], mesh: Mesh) -> tuple[SubAxis, ...]:
    """*Canonical form* of partial sub-axes: sorted major to minor and merged, since a reduction has no order."""
    merged: list[SubAxis] = []
    for axis in sorted((a for a in partial if mesh.checked(a).size > 1), key=mesh.stride, reverse=True):
        joined = _join_axes(merged[-1], axis) if merged else None
        if joined is None:
            merged.append(axis)
        else:
            merged[-1] = joined
    return tuple(merged)


def _join_axes(major: SubAxis, minor: SubAxis) -> SubAxis | None:
    """The sub-axis that two consecutive ones of one axis make up."""
    if major.axis != minor.axis or major.pre * major.size != minor.pre:
        return None
    return SubAxis(major.axis, major.pre, major.size * minor.size)


def check_whole_sizes(dim: Dim, at: int) -> Dim:
    """*Whole sizes*: the true size and all radices of dim `at` are ints, not bools, of at least 0 and at most `MOST`.

    A held digit's radix is the size of its sub-axis, which is at least 1. Returns the dim with ints of Python's own.
    """
    given: Any = dim.digits if isinstance(dim, Dim) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if not isinstance(given, tuple):
        raise LayoutError(f"dim {at} is {quoted(dim)}; give Dim((Digit(radix, holder), ...), size)")
    for digit in cast("tuple[object, ...]", given):
        if not isinstance(digit, Digit):
            raise LayoutError(
                f"dim {at} has the digit {quoted(digit)}; give Digit(radix, holder), holder None if local"
            )
    radices = [whole(digit.radix) for digit in dim.digits]
    wrong = [digit.radix for digit, radix in zip(dim.digits, radices, strict=True) if radix is None]
    size = whole(dim.size)
    if wrong or size is None:
        given = f"a radix of {quoted(wrong[0])}" if wrong else f"the true size {quoted(dim.size)}"
        raise LayoutError(
            f"dim {at} has {given}; sizes and radices are ints of at least 0 and at most {MOST} (whole sizes)"
        )
    if math.prod(digit.radix for digit in dim.digits) > MOST:
        raise LayoutError(
            f"dim {at}: its radices multiply to more than {MOST}, the largest index; give smaller ones (whole sizes)"
        )
    if all(type(each) is int for each in (dim.size, *(digit.radix for digit in dim.digits))):
        return dim
    digits = (Digit(int(digit.radix), digit.axis) for digit in dim.digits)
    return Dim(tuple(digits), size, dim.pieces)


def check_exact_cover(digits: list[Digit], size: int, one_round: bool, at: int) -> list[Digit]:
    """*Exact cover*: dim `at` is padded to the smallest fitting multiple of all its digits but the first local one.

    Returns the digits. They start with a 1 where `one_round` says so and it matters: `1{x}8/10` is one round of
    blocks of 8, of which the second is cut short, whereas `{x}3/10` is pieces of 3.
    """
    padded = math.prod(d.radix for d in digits)
    if padded == size:
        return digits
    rounds = next((d.radix for d in digits if d.axis is None), 1)
    if padded == 0 < rounds:
        raise LayoutError(
            f"dim {at}: a block of 0 elements leaves no room, but the true size is {size}; give the blocks at least 1 "
            f"element (exact cover)"
        )
    # One round less would not do: the padding is shorter than a round.
    if rounds > 0 and size <= padded and padded - size < padded // rounds:
        return digits
    # All blocks of the only round are there, however few of them are full: the 1 keeps their length from being the
    # number of pieces that the size asks for.
    if one_round and size <= padded and digits[0].axis is not None:
        return [Digit(1, None), *digits]
    unit = math.prod(d.radix for d in digits if d.axis is not None) if rounds == 0 else padded // rounds
    best = -(-size // unit) * unit
    raise LayoutError(
        f"dim {at}: the radices multiply to {padded}, but the true size is {size}, whose smallest fitting "
        f"multiple of {unit} is {best}; change the local digit so that the product is {best} (exact cover)"
    )


def check_pieces(dim: Dim, pieces: Pieces, at: int) -> None:
    """*Exact cover* and *radix match* of dim `at` in pieces: one for each coordinate, together as long as the dim."""
    held = math.prod(digit.radix for digit in dim.digits if digit.axis is not None)
    if not isinstance(pieces, Pieces):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(f"dim {at} has the pieces {quoted(pieces)}; give a reshard.types.Pieces")
    if held != pieces.count:
        raise LayoutError(
            f"dim {at} has {pieces.count} pieces {pieces:}, but its axes have {held} coordinates; give one piece for "
            f"each, 0 where a device has none (exact cover)"
        )
    if pieces.size != dim.size:
        raise LayoutError(
            f"dim {at}: its pieces {pieces:} have {pieces.size} elements in all, but the true size is {dim.size}; each "
            f"index is in one piece (exact cover)"
        )
    if [digit.axis is None for digit in dim.digits] != [False] * (len(dim.digits) - 1) + [True]:
        raise LayoutError(
            f"dim {at} is in pieces {pieces:}: its held digits come first, and one local digit last (radix match)"
        )
    if dim.digits[-1].radix != pieces.largest:
        raise LayoutError(
            f"dim {at} has the local digit {dim.digits[-1].radix}, but the largest of its pieces {pieces:} has "
            f"{pieces.largest} elements, which is the radix of that digit (radix match)"
        )


def check_single_use(mesh: Mesh, used: Iterable[SubAxis]) -> None:
    """*Single use*: sub-axes neither repeat nor overlap, and split each axis into whole factors."""
    by_axis: dict[str, list[SubAxis]] = {}
    for sub in used:
        if sub.size > 1:
            by_axis.setdefault(sub.axis, []).append(sub)
    for axis, subs in by_axis.items():
        if len(subs) == 1:
            continue
        # Digits of one numeral of the axis: each prefix is made of whole sub-axes before it.
        subs.sort(key=lambda s: s.pre)
        for major, minor in pairwise(subs):
            if minor.pre % (major.pre * major.size):
                raise LayoutError(
                    f"axis {axis!r} of mesh {mesh} is used as {mesh.spell(major)} and as {mesh.spell(minor)}, which "
                    f"overlap; use every part of an axis once, partial axes included (single use)"
                )


def check_radix_match(digit: Digit, mesh: Mesh) -> None:
    """*Radix match*: the radix of a held digit is the size of its sub-axis."""
    if digit.axis is None:
        return
    mesh.checked(digit.axis)
    if digit.radix != digit.axis.size:
        raise LayoutError(
            f"a digit of radix {digit.radix} is held by {mesh.spell(digit.axis)} of size {digit.axis.size} in mesh "
            f"{mesh}; a held digit's radix is its sub-axis's size (radix match)"
        )


def check_one_reduction(dtype: str, reduction: str | None) -> None:
    """*One reduction*: partial sub-axes have one operation, and the element type supports it."""
    if not isinstance(reduction, str) or reduction not in reductions.REDUCTIONS:
        raise LayoutError(
            f"reduction {quoted(reduction)} is unknown; use one of {', '.join(reductions.REDUCTIONS)} (one reduction)"
        )
    if not reductions.has_reduction(dtype, reduction):
        raise LayoutError(
            f"{dtype} has no {reduction} reduction; for bool use max (any) or min (all), "
            f"for complex sum, mean or product, and mean only for inexact types (one reduction)"
        )
