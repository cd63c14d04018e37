"""Which elements of an array: any set of its indices, as few products of runs, and in one form.

    rows 2 to 4 and 7 of a matrix of 8 x 6     ((2, 5), (7, 8)) x ((0, 6),)                       one product
    and elements 1 and 2 of row 0              ((0, 1),) x ((1, 3),), and the product above       two

A product has, for each dim, runs of indices (start, stop); its elements are all combinations. Indices of the first dim
that have the same elements behind them are one product, so equal sets are equal objects, and what a set costs to write
down grows with its runs, not with its elements.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

from reshard.errors import PlanError, quoted
from reshard.types.json_fields import Fields
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.whole import MOST, check_deadline, read_items, whole

Runs = tuple[tuple[int, int], ...]
"""Indices of a dim as (start, stop), in order; two runs neither meet nor overlap."""

Product = tuple[Runs, ...]
"""Runs of each dim."""

MOST_BOXES = 1 << 20
"""A longer list of what changed is refused: give a mask, or rows."""

_CURE = (
    "give a list of boxes, each a tuple of slices and ints, or of rows as ints or slices; or a mask of bools over the "
    "array or its first dims"
)


@dataclass(frozen=True)
class IndexSet:
    """Some elements of an array of this shape, as products of runs without common elements.

    Products may be given in any form, overlapping ones too; they are brought to the one form that equal sets share.
    Raises `PlanError` for runs that leave the array.

    >>> a = IndexSet((8, 6), ((((2, 4),), ((0, 6),)), (((3, 5), (7, 8)), ((0, 6),))))
    >>> a.products, a.elements
    (((((2, 5), (7, 8)), ((0, 6),)),), 24)
    >>> a == IndexSet.read([slice(2, 5), 7], (8, 6))
    True
    """

    shape: tuple[int, ...]
    products: tuple[Product, ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shape = read_items(self.shape)
        if shape is None or any(whole(size) is None for size in shape):
            raise PlanError(f"shape {quoted(self.shape)} of a set of indices: give one size per dim, such as (16, 8)")
        object.__setattr__(self, "shape", tuple(shape))
        products: list[Product] = []
        for product in cast("Iterable[object]", self.products):
            listed = read_items(product)
            if listed is None or len(listed) != len(shape):
                raise PlanError(f"{quoted(product)} is not a product of runs, one list of them for each dim of {shape}")
            dims = tuple([merge_runs(_checked_runs(runs, size)) for runs, size in zip(listed, shape, strict=True)])
            if all(dims):
                products.append(dims)
        object.__setattr__(self, "products", _canonical_products(products))
        # Plans and steps are looked up by what changed, many times, and that may be thousands of runs.
        object.__setattr__(self, "_hash", hash((self.shape, self.products)))

    @classmethod
    def read(cls, given: object, shape: Sequence[int]) -> IndexSet:
        """What a caller gives: a list of boxes, rows, or a mask of bools; None and an empty list are no elements.

        A box is a tuple of ints and slices, of the first dims or of all; an int or a slice alone is of the first dim.
        As in numpy, negative indices count from the end. A mask is over the array, or over its first dims.

        >>> IndexSet.read([(slice(0, 2), 5), -1], (8, 6)).products
        ((((0, 2),), ((5, 6),)), (((7, 8),), ((0, 6),)))
        """
        shape = tuple(shape)
        if given is None:
            return cls(shape)
        if isinstance(given, IndexSet):
            if given.shape != shape:
                raise PlanError(f"what changed is of an array {given.shape}, and this one has the shape {shape}")
            return given
        kind, mask_shape = getattr(getattr(given, "dtype", None), "kind", None), getattr(given, "shape", None)
        if kind == "b" and isinstance(mask_shape, tuple):
            mask: Any = given
            if mask_shape != shape[: mask.ndim]:
                raise PlanError(f"the mask of what changed has the shape {mask_shape}, and the array {shape}; {_CURE}")
            behind = tuple(map(_all_of, shape[mask.ndim :]))
            found = _mask_products(mask) if mask.size and all(behind) else ()
            return cls(shape, tuple([(*product, *behind) for product in found]))
        if isinstance(given, str | bytes | tuple | Mapping) or not isinstance(given, Iterable):
            raise PlanError(f"changed={quoted(cast('object', given))} of an array {shape}: {_CURE}")
        boxes: list[Product] = []
        rows: list[tuple[int, int]] = []
        for box in cast("Iterable[object]", given):
            if len(boxes) + len(rows) >= MOST_BOXES:
                raise PlanError(f"changed lists more than {MOST_BOXES} boxes of an array {shape}; give a mask")
            if isinstance(box, tuple):
                boxes.append(_read_box(cast("tuple[object, ...]", box), shape))
            else:
                rows += _read_box((box,), shape)[0]
        if rows:  # Rows one by one come by the thousand: they are one product.
            boxes.append((merge_runs(rows), *(_all_of(size) for size in shape[1:])))
        return cls(shape, tuple(boxes))

    @cached_property
    def elements(self) -> int:
        """How many elements are in it."""
        return sum(math.prod(sum(stop - start for start, stop in runs) for runs in each) for each in self.products)

    @property
    def boxes(self) -> Iterator[tuple[tuple[int, int], ...]]:
        """Every box of it: (start, stop) of each dim."""
        for product in self.products:
            yield from _multiply_runs(product)

    def __or__(self, other: IndexSet) -> IndexSet:
        """The elements of either: what has changed in two versions that follow each other.

        >>> print(IndexSet.read([2, 3], (8, 6)) | IndexSet.read([4], (8, 6)))
        [2:5, :]
        """
        if self.shape != other.shape:
            raise PlanError(f"elements of an array {self.shape} and of one {other.shape} are not of one array")
        return IndexSet(self.shape, self.products + other.products)

    def __bool__(self) -> bool:
        return bool(self.products)

    def __hash__(self) -> int:
        return self._hash

    def to_json(self) -> str:
        """The set as a JSON object, in as few letters as it has runs; `from_json` reads it back.

        A dim is the distances from the end of a run to the next start, and the lengths; all of a dim is 0.

        >>> IndexSet.read([2, 3, 4, 7], (8, 6)).to_json()
        '{"shape":[8,6],"products":[[[2,3,2,1],0]]}'
        >>> IndexSet.from_json(IndexSet.read([2, 3, 4, 7], (8, 6)).to_json()).elements
        24
        """
        return json.dumps(self.to_dict(), separators=(",", ":"))

    def to_dict(self) -> dict[str, Any]:
        """The set as the plain data of `to_json`."""
        products = [
            [_write_runs(runs, size) for runs, size in zip(product, self.shape, strict=True)]
            for product in self.products
        ]
        return {"shape": list(self.shape), "products": products}

    @classmethod
    def from_json(cls, text: str) -> IndexSet:
        """Reads the text of `to_json`; raises `PlanError` for other text."""
        return cls.from_dict(Fields.read(text, "a set of indices").data)

    @classmethod
    def from_dict(cls, data: object) -> IndexSet:
        """Reads what `to_dict` makes; raises `PlanError` for anything else."""
        fields = Fields.of(data, "a set of indices")
        shape = fields.listed("shape", int)
        products: list[Product] = []
        for dims in cast("Sequence[list[object]]", fields.listed("products", list)):
            if len(dims) != len(shape):
                raise fields.error(f"{quoted(dims)} is not one list of runs for each dim of {quoted(shape)}")
            products.append(tuple([_parse_runs(fields, runs, size) for runs, size in zip(dims, shape, strict=True)]))
        return cls(tuple(shape), tuple(products))

    def __str__(self) -> str:
        """The products, as slices; only the first few.

        >>> print(IndexSet.read([2, 3, (7, slice(0, 2))], (8, 6)))
        [2:4, :] and [7, 0:2]
        """
        if not self.products:
            return "nothing"
        shown: list[str] = []
        for product in self.products[:4]:
            dims: list[str] = []
            for runs, size in zip(product, self.shape, strict=True):
                slices = [f"{start}" if stop - start == 1 else f"{start}:{stop}" for start, stop in runs[:4]]
                more = "+..." if len(runs) > len(slices) else ""
                dims.append(":" if runs == _all_of(size) else "+".join(slices) + more)
            shown.append(f"[{', '.join(dims)}]")
        left = len(self.products) - len(shown)
        return " and ".join([*shown, *([f"{left} more"] if left else [])])


class Holding(NamedTuple):
    """What the devices of a target hold of it already: the tiles of `layout`, of which `stale` has changed since.

    `layout` is of the target's array, on any devices; `stale` are elements of the source.
    """

    layout: Layout
    stale: IndexSet

    def to_dict(self) -> dict[str, Any]:
        """The fields in which moves and plans write it as JSON."""
        layout, stale = self
        return {"have": str(layout), "have_mesh": layout.mesh.to_dict(), "changed": stale.to_dict()}

    @classmethod
    def read_fields(cls, fields: Fields) -> Holding | None:
        """What `to_dict` has written among the fields of a move or a plan; None if that has nothing of it."""
        if fields.data.get("have") is None:
            return None
        layout = Layout.parse(fields.get("have", str), Mesh.from_dict(fields.object("have_mesh")))
        return cls(layout, IndexSet.from_dict(fields.object("changed")))


def _all_of(size: int) -> Runs:
    return ((0, size),) if size else ()


def _multiply_runs(product: Product) -> Iterator[tuple[tuple[int, int], ...]]:
    if not product:
        yield ()
        return
    for run in product[0]:
        yield from ((run, *rest) for rest in _multiply_runs(product[1:]))


def _checked_runs(runs: object, size: int) -> list[tuple[int, int]]:
    if not isinstance(runs, tuple | list):
        raise PlanError(f"runs {quoted(runs)}: give a list of (start, stop)")
    checked: list[tuple[int, int]] = []
    for run in cast("Sequence[object]", runs):
        pair = read_items(run)
        ends = [] if pair is None else [whole(end, 0, size) for end in pair]
        if len(ends) != 2 or ends[0] is None or ends[1] is None or ends[0] > ends[1]:
            raise PlanError(f"the run {quoted(run)} of a dim of {size}: give (start, stop) with 0 <= start <= stop")
        checked.append((ends[0], ends[1]))
    return checked


def merge_runs(runs: Iterable[tuple[int, int]]) -> Runs:
    """Runs in order, those that meet or overlap made one, empty ones left out."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if start == stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)


def _canonical_products(products: Sequence[Product]) -> tuple[Product, ...]:
    """The same elements in the one form: each index of the first dim once, with what is behind it in that form."""
    if not products or not products[0]:
        return tuple(products[:1])
    if len(products) == 1:
        return tuple(products)
    if len(products[0]) == 1:
        return ((merge_runs(run for (runs,) in products for run in runs),),)
    # A sweep along the first dim: between two ends of runs, the same products are there.
    ends: list[tuple[int, bool, int]] = []
    numbers: dict[Product, int] = {}
    for runs, *rest in products:
        number = numbers.setdefault(tuple(rest), len(numbers))
        for start, stop in runs:
            ends += [(start, True, number), (stop, False, number)]
    ends.sort(key=lambda end: end[0])
    behind = list(numbers)
    known: dict[frozenset[int], tuple[Product, ...]] = {}
    found: dict[tuple[Product, ...], list[tuple[int, int]]] = {}
    here: dict[int, int] = {}
    at = 0
    for place, begins, number in ends:
        if place > at and here:
            check_deadline()
            key = frozenset(here)
            if key not in known:
                known[key] = _canonical_products([behind[each] for each in sorted(key)])
            found.setdefault(known[key], []).append((at, place))
        at = place
        here[number] = here.get(number, 0) + (1 if begins else -1)
        if not here[number]:
            del here[number]
    each = sorted((merge_runs(runs), rest) for rest, runs in found.items())
    return tuple((runs, *product) for runs, rest in each for product in rest)


def _read_box(box: tuple[object, ...], shape: tuple[int, ...]) -> Product:
    """A box that a caller gives, of the first dims, as a product."""
    if len(box) > len(shape):
        raise PlanError(f"the box {quoted(box)} has {len(box)} dims, and the array {shape} has {len(shape)}; {_CURE}")
    dims: list[Runs] = []
    for part, size in zip(cast("tuple[Any, ...]", box), shape, strict=False):
        if type(part) is slice:
            start, stop, step = cast("tuple[object, ...]", (part.start, part.stop, part.step))
            whole_ends = all(end is None or whole(end, -MOST) is not None for end in (start, stop))
            if not whole_ends or (step is not None and whole(step, 1) is None):
                raise PlanError(f"the box {quoted(box)}: slices have whole numbers, and a step of at least 1; {_CURE}")
            indices = range(*cast("slice[int, int, int]", part).indices(size))
            dims.append(
                ((indices.start, indices.stop),) * bool(indices)
                if indices.step == 1
                else tuple([(at, at + 1) for at in indices])
            )
            continue
        index = whole(part, -size, size - 1)
        if index is None:
            raise PlanError(f"{quoted(part)} in the box {quoted(box)} is no index of a dim of {size}; {_CURE}")
        dims.append(((index % size, index % size + 1),))
    return (*dims, *map(_all_of, shape[len(box) :]))


def _mask_products(mask: Any) -> Iterator[Product]:
    """Rows of a mask that are alike are looked at once."""
    if not mask.ndim:
        if bool(mask):
            yield ()
        return
    if mask.ndim == 1:
        if runs := tuple([found.span() for found in re.finditer(rb"\x01+", mask.tobytes())]):
            yield (runs,)
        return
    rows: dict[bytes, list[int]] = {}
    for number, row in enumerate(mask):
        rows.setdefault(row.tobytes(), []).append(number)
    for numbers in rows.values():
        runs = merge_runs((at, at + 1) for at in numbers)
        yield from ((runs, *rest) for rest in _mask_products(mask[numbers[0]]))


def _write_runs(runs: Runs, size: int) -> list[int] | int:
    if runs == _all_of(size):
        return 0
    written: list[int] = []
    at = 0
    for start, stop in runs:
        written += [start - at, stop - start]
        at = stop
    return written


def _parse_runs(fields: Fields, given: object, size: int) -> Runs:
    if given == 0 and not isinstance(given, bool):
        return _all_of(size)
    numbers = [whole(each) for each in cast("list[object]", given)] if isinstance(given, list) else [None]
    known = [each for each in numbers if each is not None]
    if len(known) != len(numbers) or len(known) % 2:
        raise fields.error(f"{quoted(numbers)} are not the runs of a dim of {size}")
    ends = list(itertools.accumulate(known))
    return tuple(zip(ends[::2], ends[1::2], strict=True))
