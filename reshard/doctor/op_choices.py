"""Where an operation's rows may be: the layouts of what it takes and of its results, and of both where it runs.

Every dim is a list of digits, each held by devices or local. Where the operation runs, the digits inside a row are
local, and those that count rows are held as they are before, or as they are afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from reshard.doctor.batch_ops import BatchOp
from reshard.doctor.infer_layouts import GlobalDigit, layouts_of, mesh_of
from reshard.doctor.replacements import Unfit
from reshard.errors import LayoutError, MeshError
from reshard.hlo import Array
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh


class OpMoves(NamedTuple):
    """The layouts of the source, of its rows where the operation runs, and those of each output before and after."""

    source: Layout
    rows: Layout
    outputs: tuple[tuple[Layout, Layout], ...]


class RowDigit(NamedTuple):
    """A digit of one dim: its weight and radix there, the stride of the devices that hold it or of its local place."""

    weight: int
    radix: int
    device: int | None
    place: int | None


RowDims = list[list[RowDigit]]  # of each dim, least significant first


class Choices:
    """The layouts that an operation's rows may have; `before` and `after` have the digits of its operand and results.

    Digits of dims that count rows are cut so that all have the same.
    """

    def __init__(self, op: BatchOp, before: RowDims, after: Sequence[RowDims], devices: int, mesh: Mesh | None) -> None:
        self.op = op
        self.devices = devices
        self.mesh = mesh
        self.before = list(before)
        self.after = [list(dims) for dims in after]
        for dim in op.batch:
            one, *others = _aligned([self.before[dim], *(dims[dim] for dims in self.after)])
            self.before[dim] = one
            for dims, other in zip(self.after, others, strict=True):
                dims[dim] = other

    def order(self, dims: RowDims) -> tuple[tuple[int, int], ...]:
        """The local digits of an array in the order of its dims, as radices and strides."""
        return tuple((one.radix, one.place) for dim in dims for one in reversed(dim) if one.place is not None)

    def of(self, results: Sequence[Array]) -> tuple[OpMoves, ...]:
        """The layouts to choose from, for outputs that are forms of these results; raises `Unfit` if there are none."""
        made: dict[OpMoves, None] = {}
        for rows in self._rows():
            try:
                made[self._moves(rows, results)] = None
            except (MeshError, LayoutError):
                continue
        if not made:
            raise Unfit("no layout has whole rows on each device")
        return tuple(made)

    def _rows(self) -> Iterator[list[list[int | None]]]:
        """Which devices may hold each digit of the dims that count rows: those before, or those after."""
        for dims in (self.before, *self.after):
            yield [[one.device for one in dims[dim]] for dim in self.op.batch]

    def _moves(self, rows: list[list[int | None]], results: Sequence[Array]) -> OpMoves:
        holders = dict(zip(self.op.batch, rows, strict=True))
        arrays = [_global(self.before, holders), *(_global(dims, holders) for dims in self.after)]
        dtypes = [array.dtype for array in (self.op.operands[0], *results)]
        pairs = [
            layouts_of(mesh, dims, dtype, ())
            for mesh in [self._mesh(arrays)]
            for dims, dtype in zip(arrays, dtypes, strict=True)
        ]
        (source, at_rows), *others = pairs
        return OpMoves(source, at_rows, tuple((rows, used) for used, rows in others))

    def _mesh(self, arrays: Sequence[list[list[GlobalDigit]]]) -> Mesh:
        """The program's mesh, if all digits are of its axes, else one made for them."""
        dims = [dim for array in arrays for dim in array]
        if self.mesh is not None and self.mesh.size == self.devices:
            try:
                layouts_of(self.mesh, dims, "f32", ())
                return self.mesh
            except (MeshError, LayoutError):
                pass
        return mesh_of(self.devices, dims, ())


def _global(dims: RowDims, holders: dict[int, list[int | None]]) -> list[list[GlobalDigit]]:
    """The digits of an array, most significant first: held as they are, and as where the operation runs."""
    rows = [holders.get(at, [None] * len(digits)) for at, digits in enumerate(dims)]
    return [
        [GlobalDigit(one.radix, one.device, at, one.place) for one, at in zip(digits, holder, strict=True)][::-1]
        for digits, holder in zip(dims, rows, strict=True)
    ]


def _aligned(several: Sequence[list[RowDigit]]) -> list[list[RowDigit]]:
    """The same dim as digits of the same weights; raises `Unfit` if there are none."""
    cuts = sorted({one.weight * one.radix for digits in several for one in digits})
    if any(high % low for low, high in pairwise([1, *cuts])):
        raise Unfit("the rows are counted in other digits before and after")
    return [[part for one in digits for part in _cut(one, cuts)] for digits in several]


def _cut(digit: RowDigit, cuts: Sequence[int]) -> Iterator[RowDigit]:
    """The digits that a digit is made of, cut at these weights."""
    for cut in cuts:
        if digit.weight < cut < digit.weight * digit.radix:
            low = cut // digit.weight
            yield digit._replace(radix=low)
            digit = RowDigit(cut, digit.radix // low, _times(digit.device, low), _times(digit.place, low))
    yield digit


def by_dim(digits: Iterable[RowDigit], dims: Sequence[int], name: str) -> RowDims:
    """Digits whose weights are strides in a row-major array, by its dims; raises `Unfit` unless they are all of it."""
    strides = strides_of(dims)
    made: RowDims = [[] for _ in dims]
    for digit in digits:
        for part in _cut(digit, sorted(strides)):
            at = next(at for at, stride in enumerate(strides) if stride <= part.weight and dims[at] > 1)
            made[at].append(part._replace(weight=part.weight // strides[at]))
    for at, size in enumerate(dims):
        made[at].sort()
        ends = [1, *(one.weight * one.radix for one in made[at])]
        if [one.weight for one in made[at]] != ends[:-1] or ends[-1] != size:
            raise Unfit(f"{name} is used in part")
    return made


def strides_of(dims: Sequence[int]) -> list[int]:
    return [math.prod(dims[at + 1 :]) for at in range(len(dims))]


def _times(number: int | None, factor: int) -> int | None:
    return None if number is None else number * factor
