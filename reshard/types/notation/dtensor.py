"""PyTorch's DTensor placements, read without torch: one placement per mesh dim, left to right.

    [Shard(0), Shard(0)] on (2, 4)                   ->  {d0}{d1}n       d0 major
    [_StridedShard(0, split_factor=4), Shard(0)]     ->  {d1}{d0}n       what FSDP over TP makes
    [Partial("sum"), Replicate()]                    ->  + sum{d0}
    [RaggedShard((0,), (1, 2, 1, 0))] of 8 on (4,)   ->  {d0}(2,4,2,0)
    [Owned(1)] of 8 on (2,)                          ->  {d0}(0,8)

Mesh dims act one after the other on what is still local. `Shard` holds the leading part of it, `_StridedShard`
the part after a leading factor of `split_factor`, which stays local. For example, a dim of 16 on (2, 4):

    placement                         digits of the dim, (radix, mesh dim)
                                      (16, local)
    _StridedShard(0, split_factor=4)  (4, local) (2, d0) (2, local)
    Shard(0)                          (4, d1)    (2, d0) (2, local)

Where parts are uneven, as torch's `chunk` makes them, each piece is cut by itself: [Shard(0), Shard(0)] of 10 on (3, 2)
is 4, 4, 2, then 2, 2, 2, 2, 1, 1, which is {d0}{d1}~10. FlexShard's and veScale's `RaggedShard` says how many units of
what is local each device has, `Owned` which one has all of it.

Placements are torch's objects or their text, short or long: "S(0)", "R", "P(sum)", "_S(0, 4)", "Shard(dim=0)".
`parse_placements` reads the text of a whole list, as torch prints it, `read_placements` plain data of either;
`Layout.from_dtensor` makes the layout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from reshard.errors import LayoutError, NotationError, quoted
from reshard.types.dims import checked_shape
from reshard.types.mesh import Mesh
from reshard.types.pieces import Pieces
from reshard.types.whole import MOST, read_items, whole, written

REDUCTIONS = {"sum": "sum", "avg": "mean", "mean": "mean", "max": "max", "min": "min", "product": "product"}

_TEXT = re.compile(
    r"\s*(?:(R\b|Replicate\(\))|S(?:hard)?\((?:dim=)?(-?\d+)\)"
    r"|_S(?:tridedShard)?\((?:dim=)?(-?\d+),\s*(?:sf=|split_factor=)?(\d+)\)"
    r"|P(?:artial)?\b(?:\((?:reduce_op=)?['\"]?(\w*)['\"]?\))?"
    r"|RaggedShard\((?:dims=)?\(([\d, ]+)\), *(?:local_units=)?\(([\d, ]+)\)\)|Owned\((\d+)\))\s*"
)
_LIST = re.compile(r"\s*(?:\[(.*)\]|\((.*)\))\s*", re.DOTALL)

_MOST_CHUNKS = 1 << 20
"""The chunks of an uneven dim, which are listed one by one."""

_Digit = tuple[int, int | None]
"""A radix, and the mesh dim that holds the digit, None if it is local."""


class _Placement(NamedTuple):
    """A placement of torch: the name of its class, and what it has of a dim, a split factor, a reduction and units.

    `units` are those of each device, or the device that has all; `merged` are the dims that units are counted over.
    """

    name: str
    dim: int = 0
    split: int = 1
    reduction: str = ""
    units: tuple[int, ...] | int | None = None
    merged: int = 1


_Split = tuple[int, int, tuple[int, ...] | None]
"""How a dim is split once: after a leading factor, along a mesh dim, in how many units for each of its devices."""


class RawDigits(NamedTuple):
    """The digits of every dim, major to minor; the partial mesh dims and their reduction; pieces of uneven dims."""

    dims: tuple[tuple[_Digit, ...], ...]
    partial: tuple[int, ...]
    reduction: str | None
    pieces: tuple[Pieces | None, ...] = ()


def make_grid(shape: Sequence[int], names: Sequence[str] | None = None) -> Mesh:
    """Makes a mesh of this shape whose axes have these names, by default d0, d1, ...

    >>> str(make_grid((2, 4)))
    '<d0=2, d1=4>'
    """
    shape = checked_shape(shape)
    given = tuple(f"d{at}" for at in range(len(shape))) if names is None else read_items(names)
    if given is None or len(given) != len(shape):
        raise LayoutError(
            f"{0 if given is None else len(given)} names {quoted(names)} for a mesh of shape {quoted(shape)}; "
            f"give one per mesh dim"
        )
    return Mesh(list(zip(given, shape, strict=True)))


def parse_placements(source: str) -> list[str]:
    """Reads the text of a list of placements, as torch or a person writes it; raises `NotationError`.

    >>> parse_placements("(Shard(dim=0), Replicate())"), parse_placements("[S(0), 'P(sum)']")
    (['Shard(dim=0)', 'Replicate()'], ['S(0)', 'P(sum)'])
    """
    match = _LIST.fullmatch(source)
    rest = (match[1] if match[1] is not None else match[2]).strip() if match else source
    placements: list[str] = []
    while rest:
        quote = rest[0] if rest[0] in "'\"" else ""
        one = _TEXT.match(rest, len(quote))
        end = one.end() + len(quote) if one else 0
        if one is None or rest[one.end() : end] != quote or rest[end : end + 1] not in ("", ","):
            raise NotationError(
                f"DTensor placements {quoted(source)}: cannot read {quoted(rest)}; write one placement per axis of the "
                f"mesh, as in [Shard(0), Replicate()] or [S(0), P(sum)]"
            )
        placements.append(one[0].strip())
        rest = rest[end + 1 :].strip()
    return placements


def read_placements(placements: Sequence[Any], mesh_shape: Sequence[int], shape: Sequence[int]) -> RawDigits:
    """Reads one placement per mesh dim; raises `LayoutError` for one that is unknown.

    >>> read_placements(["_S(0, 4)", "S(0)"], (2, 4), (16, 3)).dims
    (((4, 1), (2, 0), (2, None)), ((3, None),))
    """
    each = read_items(placements) if isinstance(placements, Sequence) else None  # pyright: ignore
    if each is None:
        raise LayoutError(f"placements {quoted(placements)}: give a list of one per mesh dim")
    if len(each) != len(mesh_shape):
        raise LayoutError(f"{len(each)} placements for a mesh of shape {tuple(mesh_shape)}; give one per mesh dim")
    splits: list[list[_Split]] = [[] for _ in shape]
    partial: list[int] = []
    reductions: set[str] = set()
    for axis, given in enumerate(each):
        name, dim, split, op, units, merged = _read_placement(given)
        shown = quoted(given)
        if name == "Partial":
            if op not in REDUCTIONS:
                raise LayoutError(f"placement {shown}: its reduction is {op!r}; use one of {', '.join(REDUCTIONS)}")
            partial.append(axis)
            reductions.add(REDUCTIONS[op])
        elif name != "Replicate":
            if not -len(shape) <= dim < len(shape) or merged > len(shape):
                raise LayoutError(f"placement {shown}: the array has {len(shape)} dims")
            if any(splits[1:merged]):
                raise LayoutError(f"placement {shown}: a dim that it merges into dim 0 is split; split dim 0 alone")
            count = mesh_shape[axis]
            if isinstance(units, int):
                units = tuple(int(at == units) for at in range(count))
            if units is not None and (len(units) != count or not sum(units)):
                raise LayoutError(
                    f"placement {shown}: its mesh dim has {count} devices; give the units of each, or one of them"
                )
            splits[dim].append((split, axis, units))
    if len(reductions) > 1:
        raise LayoutError(f"placements {list(placements)} reduce by {sorted(reductions)}; a layout has one reduction")
    dims = [_split_dim(size, of, mesh_shape) for size, of in zip(shape, splits, strict=True)]
    digits, pieces = [tuple(digits) for digits, _ in dims], [each for _, each in dims]
    return RawDigits(tuple(digits), tuple(partial), next(iter(reductions), None), tuple(pieces))


def _read_placement(given: Any) -> _Placement:
    if isinstance(given, str):
        match = _TEXT.fullmatch(given)
        if match is None:
            raise LayoutError(
                f"placement {quoted(given)}: write S(dim), _S(dim, split factor), R, P(reduction), "
                f"RaggedShard((0,), (units, ...)) or Owned(device)"
            )
        replicate, shard, strided, split, op, merged, units, owner = match.groups()
        if replicate:
            return _Placement("Replicate")
        if owner is not None:
            return _Placement("Owned", units=_read_int(owner, given))
        if units is not None:
            dims, each = ([_read_int(n, given) for n in re.findall(r"\d+", of)] for of in (merged, units))
            return _read_units(dims, each, given)
        if shard is None and strided is None:
            return _Placement("Partial", reduction=op or "sum")
        return _Placement("Shard", _read_int(shard or strided, given), _read_int(split or "1", given, 1))
    name = type(given).__name__.lstrip("_")
    if name == "Owned":
        return _Placement(name, units=_read_int(getattr(given, "owner_rank", None), given, 0))
    if name == "RaggedShard":
        dims, each = (read_items(getattr(given, of, None)) or () for of in ("dims", "local_units"))
        return _read_units(dims, each, given)
    if name not in ("Shard", "StridedShard", "Replicate", "Partial"):
        raise LayoutError(
            f"{quoted(given)} is not a placement; give torch's Shard, Replicate or Partial, FlexShard's RaggedShard or "
            f"Owned, or their text"
        )
    dim, split = _read_int(getattr(given, "dim", 0), given), _read_int(getattr(given, "split_factor", 1), given, 1)
    return _Placement(name, dim, split, str(getattr(given, "reduce_op", "sum")))


def _read_units(dims: Sequence[Any], units: Sequence[Any], given: Any) -> _Placement:
    if not dims or [whole(dim) for dim in dims] != [*range(len(dims))]:
        raise LayoutError(f"placement {quoted(given)}: its dims are the first ones, such as (0,) or (0, 1)")
    each = tuple(_read_int(unit, given, 0) for unit in units)
    return _Placement("RaggedShard", units=each, merged=len(dims))


def _read_int(number: object, given: Any, least: int | None = None) -> int:
    """A dim, which may count from the end, a split factor of at least 1, or units of at least 0."""
    if isinstance(number, str) and re.fullmatch(r"-?\d+", number, re.ASCII):
        size = written(number.removeprefix("-"))
        number = size if size is None or not number.startswith("-") else -size
    checked = whole(number, -MOST if least is None else least)
    if checked is None:
        raise LayoutError(
            f"placement {quoted(given)}: its dim, split factor, units or owner are ints, a factor of at least 1"
        )
    return checked


def _split_dim(size: int, splits: Sequence[_Split], mesh_shape: Sequence[int]) -> tuple[list[_Digit], Pieces | None]:
    """The digits of a dim that is split so often, and its pieces if it is uneven."""
    digits: list[_Digit] | None = [(size, None)]
    for skip, axis, units in splits:
        if digits is not None:
            digits = None if units is not None else _shard_digits(digits, size, skip, mesh_shape[axis], axis)
    if digits is not None:
        return digits, None
    # Every piece is cut into as many chunks as the split factor says, and each of these into one for each device.
    pieces: list[list[tuple[int, int]]] = [[(0, size)]]
    for skip, axis, units in splits:
        count, cut = mesh_shape[axis], list[list[tuple[int, int]]]()
        for runs in pieces:
            parts: list[list[tuple[int, int]]] = [[] for _ in range(count)]
            if len(pieces) * min(skip, size) * count > _MOST_CHUNKS:
                raise LayoutError(
                    f"placements split a dim of {size} unevenly, by {skip} x {count}, into more than {_MOST_CHUNKS} "
                    f"chunks; give a smaller split factor"
                )
            for chunk in _chunk_runs(runs, [1] * min(skip, size or 1), even=True):
                for part, more in zip(parts, _chunk_runs(chunk, units or [1] * count, even=units is None), strict=True):
                    part += more
            cut += parts
        pieces = cut
    listed = sorted((start, stop - start, number) for number, runs in enumerate(pieces) for start, stop in runs)
    table = Pieces([length for _, length, _ in listed], [number for _, _, number in listed], len(pieces))
    return [*((mesh_shape[axis], axis) for _, axis, _ in splits), (table.largest, None)], table


def _chunk_runs(runs: Sequence[tuple[int, int]], units: Sequence[int], even: bool) -> list[list[tuple[int, int]]]:
    """Runs of indices in parts of so many units, which divide them; `even` parts are of ceil(n / parts) indices, as
    torch.chunk makes them, and the last may be empty.

    >>> _chunk_runs([(0, 3), (6, 8)], [1, 1], even=True), _chunk_runs([(0, 3), (6, 8)], [2, 0, 3], even=False)
    ([[(0, 3)], [(6, 8)]], [[(0, 2)], [], [(2, 3), (6, 8)]])
    """
    total, every = sum(stop - start for start, stop in runs), sum(units)
    if not even and any(unit * total % every for unit in units):
        raise LayoutError(
            f"a dim of {total} does not divide into {every} units, of which devices have {quoted(list(units))}; give "
            f"units that make whole rows, or the shape with its first dims merged"
        )
    rooms = [-(-unit * total // every) for unit in units]
    parts: list[list[tuple[int, int]]] = [[] for _ in units]
    at = 0
    for start, stop in runs:
        while start < stop:
            while not rooms[at]:
                at += 1
            end = min(stop, start + rooms[at])
            parts[at].append((start, end))
            rooms[at], start = rooms[at] + start - end, end
    return parts


def _shard_digits(digits: list[_Digit], size: int, skip: int, pieces: int, axis: int) -> list[_Digit] | None:
    """The digits of a dim once `axis` holds `pieces` of its local part, after a local factor of `skip`; None if these
    parts are uneven, so that no digits say them.
    """
    if pieces == 1:
        return digits
    if skip == 1 and digits == [(size, None)]:
        # The first split may be uneven: ceil(n / pieces) elements each, as torch.chunk does.
        return [(pieces, axis), (-(-size // pieces), None)]
    if math.prod(radix for radix, _ in digits) != size:
        return None
    wanted: list[_Digit] = [(skip, None), (pieces, axis)] if skip > 1 else [(pieces, axis)]
    split: list[_Digit] = []
    for radix, holder in digits:
        # Local digits are split into the wanted ones, major first, and a local rest.
        while holder is None and radix > 1 and wanted:
            count, to = wanted.pop(0)
            taken = math.gcd(count, radix)
            if taken not in (count, radix) or (taken < count and to is not None):
                return None
            split.append((taken, to))
            radix //= taken
            if taken < count:
                wanted.insert(0, (count // taken, to))
        if holder is not None or radix > 1:
            split.append((radix, holder))
    return None if wanted else split
