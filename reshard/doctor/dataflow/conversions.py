"""Conversions on the way of data that is only moved: which dtypes each element has had.

    %w = f32[2,8] convert(%b)          CPU has no collectives of bf16, so it sends f32
    %g = f32[8,8] all-gather(%w)
    %n = bf16[8,8] convert(%g)         bf16, f32, bf16: nothing was lost, and bf16 is enough

Converting is elementwise, so it may as well happen before or after a move. If there are two dtypes and one has all
values of the other, an element is rounded to the narrow one at most once, and all orders give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

from reshard.doctor.dataflow.flow import HloValue
from reshard.doctor.dataflow.index_maps import IndexMaps

_WIDER = frozenset(
    {("bf16", "f32"), ("f16", "f32"), ("bf16", "f64"), ("f16", "f64"), ("f32", "f64")}
    | {(f"s{few}", f"s{many}") for few in (8, 16, 32) for many in (16, 32, 64) if few < many}
    | {(f"u{few}", f"u{many}") for few in (8, 16, 32) for many in (16, 32, 64) if few < many}
)
_Dtypes = frozenset[str]


class Conversion(NamedTuple):
    """What becomes of elements: their dtype before, the narrowest that they have on the way, and the one after."""

    before: str
    narrowest: str
    after: str


class Unconvertible(Exception):
    """Why conversions on the way cannot be done elsewhere."""


def conversion(maps: IndexMaps, value: HloValue, leaf: HloValue) -> Conversion:
    """What becomes of the elements that `value` has from `leaf`; raises `Unconvertible` if that is not one conversion.

    >>> from reshard.doctor.checks.equivalence import Traced
    >>> from reshard.hlo import parse
    >>> traced = Traced(parse('''HloModule m
    ...
    ... ENTRY %main {
    ...   %p = bf16[8]{0} parameter(0)
    ...   %w = f32[8]{0} convert(%p)
    ...   %c = f32[8]{0} copy(%w)
    ...   ROOT %n = bf16[8]{0} convert(%c)
    ... }'''), 1)
    >>> conversion(traced.maps, *(HloValue(traced.region("main"), name) for name in ("c", "p")))
    Conversion(before='bf16', narrowest='bf16', after='f32')
    """
    before, after = _dtype(leaf), _dtype(value)
    ways = _Ways(maps, leaf).of(value)
    if len(ways) > 1:
        raise Unconvertible(f"it converts some of the elements of {value.name} on the way, and others not")
    dtypes = next(iter(ways), frozenset({before, after}))
    narrowest = [one for one in sorted(dtypes) if all(one == other or (one, other) in _WIDER for other in dtypes)]
    if len(dtypes) > 2 or not narrowest:
        raise Unconvertible(f"it converts {before} to {after} by way of {', '.join(sorted(dtypes))}")
    return Conversion(before, narrowest[0], after)


class _Ways:
    """The sets of dtypes that elements have between a leaf and values made of it, a set for each way that they take."""

    def __init__(self, maps: IndexMaps, leaf: HloValue) -> None:
        self.maps = maps
        self.leaf = leaf
        self._known: dict[HloValue, frozenset[_Dtypes]] = {}

    def of(self, value: HloValue) -> frozenset[_Dtypes]:
        """The ways to a value; none if it has nothing of the leaf."""
        if value not in self._known:
            own = frozenset({_dtype(value)})
            sources = [] if value == self.leaf else self.maps.sources(value) or []
            before = frozenset({own}) if value == self.leaf else frozenset[_Dtypes]()
            self._known[value] = before.union(*({way | own for way in self.of(source)} for source in sources))
        return self._known[value]


def _dtype(value: HloValue) -> str:
    if value.array is None:
        raise Unconvertible(f"{value.name} is not an array")
    return value.array.dtype
