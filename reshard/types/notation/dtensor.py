"""PyTorch's DTensor placements, read without torch: one placement per mesh dim, left to right.

    [Shard(0), Shard(0)] on (2, 4)                   ->  {d0}{d1}n       d0 major
    [_StridedShard(0, split_factor=4), Shard(0)]     ->  {d1}{d0}n       what FSDP over TP makes
    [Partial("sum"), Replicate()]                    ->  + sum{d0}

Mesh dims act one after the other on what is still local. `Shard` holds the leading part of it, `_StridedShard`
the part after a leading factor of `split_factor`, which stays local. For example, a dim of 16 on (2, 4):

    placement                         digits of the dim, (radix, mesh dim)
                                      (16, local)
    _StridedShard(0, split_factor=4)  (4, local) (2, d0) (2, local)
    Shard(0)                          (4, d1)    (2, d0) (2, local)

Where parts are uneven, as torch's `chunk` makes them, each piece is cut by itself: [Shard(0), Shard(0)] of 10 on (3, 2)
is 4, 4, 2, then 2, 2, 2, 2, 1, 1, which is {d0}{d1}~10.

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
    r"|P(?:artial)?\b(?:\((?:reduce_op=)?['\"]?(\w*)['\"]?\))?)\s*"
)
_LIST = re.compile(r"\s*(?:\[(.*)\]|\((.*)\))\s*", re.DOTALL)

_MOST_CHUNKS = 1 << 20
"""The chunks of an uneven dim, which are listed one by one."""

_Digit = tuple[int, int | None]
"""A radix, and the mesh dim that holds the digit, None if it is local."""


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
    splits: list[list[tuple[int, int]]] = [[] for _ in shape]
    partial: list[int] = []
    reductions: set[str] = set()
    for axis, given in enumerate(each):
        name, dim, split, op = _read_placement(given)
        if name == "Partial":
            if op not in REDUCTIONS:
                raise LayoutError(f"placement {given}: its reduction is {op!r}; use one of {', '.join(REDUCTIONS)}")
            partial.append(axis)
            reductions.add(REDUCTIONS[op])
        elif name != "Replicate":
            if not -len(shape) <= dim < len(shape):
                raise LayoutError(f"placement {given}: the array has {len(shape)} dims")
            splits[dim].append((split, axis))
    if len(reductions) > 1:
        raise LayoutError(f"placements {list(placements)} reduce by {sorted(reductions)}; a layout has one reduction")
    dims = [_split_dim(size, of, mesh_shape) for size, of in zip(shape, splits, strict=True)]
    digits, pieces = [tuple(digits) for digits, _ in dims], [each for _, each in dims]
    return RawDigits(tuple(digits), tuple(partial), next(iter(reductions), None), tuple(pieces))


def _read_placement(given: Any) -> tuple[str, int, int, str]:
    """The class of a placement, its dim, its split factor and its reduction."""
    if isinstance(given, str):
        match = _TEXT.fullmatch(given)
        if match is None:
            raise LayoutError(f"placement {quoted(given)}: write S(dim), _S(dim, split factor), R or P(reduction)")
        replicate, shard, strided, split, op = match.groups()
        if replicate:
            return "Replicate", 0, 1, ""
        if shard is None and strided is None:
            return "Partial", 0, 1, op or "sum"
        return "Shard", _read_int(shard or strided, given), _read_int(split or "1", given, 1), ""
    name = type(given).__name__.lstrip("_")
    if name not in ("Shard", "StridedShard", "Replicate", "Partial"):
        raise LayoutError(
            f"{quoted(given)} is not a placement; give torch's Shard, Replicate or Partial, or their text"
        )
    dim, split = _read_int(getattr(given, "dim", 0), given), _read_int(getattr(given, "split_factor", 1), given, 1)
    return name, dim, split, str(getattr(given, "reduce_op", "sum"))


def _read_int(number: object, given: Any, least: int | None = None) -> int:
    """A dim or a split factor, which is at least 1; a dim may count from the end."""
    if isinstance(number, str):
        size = written(number.removeprefix("-"))
        number = size if size is None or not number.startswith("-") else -size
    checked = whole(number, -MOST if least is None else least)
    if checked is None:
        raise LayoutError(f"placement {quoted(given)}: its dim and split factor are ints, a factor of at least 1")
    return checked


def _split_dim(
    size: int, splits: Sequence[tuple[int, int]], mesh_shape: Sequence[int]
) -> tuple[list[_Digit], Pieces | None]:
    """The digits of a dim that is split so often, each time by (split factor, mesh dim); its pieces if it is uneven."""
    digits: list[_Digit] | None = [(size, None)]
    for skip, axis in splits:
        digits = None if digits is None else _shard_digits(digits, size, skip, mesh_shape[axis], axis)
    if digits is not None:
        return digits, None
    # Every piece is cut into as many chunks as the split factor says, and each of these into one for each device.
    pieces: list[list[tuple[int, int]]] = [[(0, size)]]
    for skip, axis in splits:
        count, cut = mesh_shape[axis], list[list[tuple[int, int]]]()
        for runs in pieces:
            parts: list[list[tuple[int, int]]] = [[] for _ in range(count)]
            if len(pieces) * min(skip, size) * count > _MOST_CHUNKS:
                raise LayoutError(
                    f"placements split a dim of {size} unevenly, by {skip} x {count}, into more than {_MOST_CHUNKS} "
                    f"chunks; give a smaller split factor"
                )
            for chunk in _chunk_runs(runs, min(skip, size or 1)):
                for part, more in zip(parts, _chunk_runs(chunk, count), strict=True):
                    part += more
            cut += parts
        pieces = cut
    listed = sorted((start, stop - start, number) for number, runs in enumerate(pieces) for start, stop in runs)
    table = Pieces([length for _, length, _ in listed], [number for _, _, number in listed], len(pieces))
    return [*((mesh_shape[axis], axis) for _, axis in splits), (table.largest, None)], table


def _chunk_runs(runs: Sequence[tuple[int, int]], count: int) -> list[list[tuple[int, int]]]:
    """Runs of indices in chunks of ceil(n / count) indices, as torch.chunk makes them; the last may be empty.

    >>> _chunk_runs([(0, 3), (6, 8)], 2)
    [[(0, 3)], [(6, 8)]]
    """
    step = -(-sum(stop - start for start, stop in runs) // count)
    chunks: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    at = 0
    for start, stop in runs:
        while start < stop:
            end = min(stop, start + step - at % step)
            chunks[at // step].append((start, end))
            at, start = at + end - start, end
    return chunks


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
