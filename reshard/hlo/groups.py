"""Which devices a collective joins, in each of XLA's spellings.

    groups = "{{" id {"," id} "}" {"," "{" ... "}"} "}"                    listed
           | "{}"                                                          one group of all
           | "[" count "," size "]" ids                                    an iota, cut into rows
           | "mesh[" 'axis' "=" size {...} "]" [", device_ids=(" ids ")"] "{" used {"," used} "}"
    ids    = ["<="] "[" sizes "]" ["T(" permutation ")"] | id {"," id}
    used   = 'axis' [":(" before ")" size]

`{'y','x'}` joins the devices that differ along y or x, y major; `'x':(2)4` is the factor of 4 of axis x that
follows a prefix of 2. Groups are kept as digits (sizes and strides) and listed only when asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from reshard.errors import NotationError

_LISTED = re.compile(r"\{\s*(?:\{[\d,\s]*\}\s*,?\s*)*\}")
_GROUP = re.compile(r"\{([\d,\s]+)\}")
_IOTA = re.compile(r"\[(\d+),(\d+)\]<=(.*)")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:\s*,\s*device_ids=\((.*)\))?\s*\{(.*)\}")
_AXIS = re.compile(r"['\"]?([^'\"=,:\s]+)['\"]?=(\d+)")
_USED = re.compile(r"['\"]?([^'\"=,:\s]+)['\"]?(?::\((\d+)\)(\d+))?(?:,\s*|$)")
_IOTA_IDS = re.compile(r"(?:<=)?\[([\d,\s]+)\](?:T\(([\d,\s]+)\))?$")


class Digit(NamedTuple):
    """`size` numbers, `stride` apart."""

    size: int
    stride: int


@dataclass(frozen=True, eq=False)
class Groups:
    """`count` groups, the largest of `size` devices; `lists` are the ids of each, made when first asked for."""

    count: int
    size: int
    expand: Callable[[], tuple[tuple[int, ...], ...]] = field(repr=False)

    @cached_property
    def lists(self) -> tuple[tuple[int, ...], ...]:
        return self.expand()


def parse_groups(text: str, devices: int | None) -> Groups:
    """Reads the value of `replica_groups`; `devices` is how many `{}` stands for, None where that is not known.

    Raises `NotationError` for text in none of the spellings, and for `{}` among unknown devices.

    >>> parse_groups("[2,4]<=[4,2]T(1,0)", None).lists
    ((0, 2, 4, 6), (1, 3, 5, 7))
    >>> parse_groups("mesh['x'=4,'y'=2] {'x':(1)2,'y'}", None).lists
    ((0, 1, 4, 5), (2, 3, 6, 7))
    """
    if _LISTED.fullmatch(text):
        return _listed(text, devices)
    if iota := _IOTA.fullmatch(text):
        count, size = int(iota[1]), int(iota[2])
        return _regular(text, _ids(text, iota[3]), [Digit(count, size)], [Digit(size, 1)])
    if mesh := _MESH.fullmatch(text):
        return _mesh(text, mesh[1], mesh[2], mesh[3])
    raise _unreadable(text)


def _listed(text: str, devices: int | None) -> Groups:
    lists = tuple(tuple(map(int, group.split(","))) for group in _GROUP.findall(text))
    if lists:
        return Groups(len(lists), max(map(len, lists)), lambda: lists)
    if devices is None:
        raise NotationError(
            f"HLO replica groups {text}: they mean all devices, and the header does not say how many; "
            "keep num_partitions=8 (or replica_count=8) in the HloModule line"
        )
    return Groups(1, devices, lambda: (tuple(range(devices)),))


def _mesh(text: str, axes: str, order: str | None, named: str) -> Groups:
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    strides = _strides(tuple(sizes.values()))
    factors = {
        name: _Axis(size, stride, {1, size}) for (name, size), stride in zip(sizes.items(), strides, strict=True)
    }
    inner: list[Digit] = []
    taken: set[tuple[str, int]] = set()
    for name, before, size in _USED.findall(named):
        low = int(before or 1)
        high = low * int(size or sizes.get(name, 0))
        if not high or sizes.get(name, 0) % high:
            raise _unreadable(text)
        factors[name].cuts.update((low, high))
        taken.add((name, low))
        inner.append(factors[name].digit(low, high))
    outer = [
        axis.digit(low, high)
        for name, axis in factors.items()
        for low, high in pairwise(sorted(axis.cuts))
        if (name, low) not in taken
    ]
    total = math.prod(sizes.values())
    return _regular(text, _ids(text, order) if order else Ids(total, lambda: range(total)), outer, inner)


class _Axis(NamedTuple):
    """A mesh axis, the stride of its coordinate, and the prefixes at which its used factors begin and end."""

    size: int
    stride: int
    cuts: set[int]

    def digit(self, low: int, high: int) -> Digit:
        """The factor between two prefixes."""
        return Digit(high // low, self.stride * (self.size // high))


class Ids(NamedTuple):
    """So many device ids in an order, listed when asked for."""

    size: int
    expand: Callable[[], Sequence[int]]


def _regular(text: str, ids: Ids, outer: Sequence[Digit], inner: Sequence[Digit]) -> Groups:
    """Groups of a regular form: places in `ids`, over the digits of the groups and of their members."""
    count, size = (math.prod(digit.size for digit in digits) for digits in (outer, inner))
    if ids.size != count * size:
        raise _unreadable(text)

    def expand() -> tuple[tuple[int, ...], ...]:
        order, members = ids.expand(), _numbers(inner)
        return tuple(tuple(order[first + at] for at in members) for first in _numbers(outer))

    return Groups(count, size, expand)


def _ids(text: str, order: str) -> Ids:
    """Device ids as a list, or as an iota that is transposed."""
    if iota := _IOTA_IDS.fullmatch(order):
        sizes = _ints(iota[1])
        permutation = _ints(iota[2]) if iota[2] else tuple(range(len(sizes)))
        if sorted(permutation) != list(range(len(sizes))):
            raise _unreadable(text)
        strides = _strides(sizes)
        digits = [Digit(sizes[at], strides[at]) for at in permutation]
        return Ids(math.prod(sizes), lambda: _numbers(digits))
    if re.fullmatch(r"[\d,\s]+", order):
        listed = _ints(order)
        return Ids(len(listed), lambda: listed)
    raise _unreadable(text)


def _strides(sizes: Sequence[int]) -> list[int]:
    """The stride of each dim, the last varying fastest."""
    return [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]


def _numbers(digits: Sequence[Digit]) -> list[int]:
    """All numbers with these digits, major to minor."""
    found = [0]
    for size, stride in digits:
        found = [number + step * stride for number in found for step in range(size)]
    return found


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _unreadable(text: str) -> NotationError:
    return NotationError(
        f"HLO replica groups {text[:120]!r}: write {{{{0,1}},{{2,3}}}}, [2,4]<=[4,2]T(1,0) "
        "or mesh['x'=4,'y'=2] {'x'}, over each device once"
    )
