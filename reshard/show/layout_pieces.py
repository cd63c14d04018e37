"""The pieces of a layout, for drawing: runs of global indices, and the devices that hold them.

    f32[2{x}64] on <x=4>     indices   0:64   64:128   128:192   192:256   256:320   ...
                             device    0      1        2         3         0         ...

A piece is a run of indices that the same devices hold: the minor local digit of a dim. The held digits of its number
fix coordinates of its devices; the coordinates left free are its copies. Nothing here loops over all devices or
elements, so an array of 2^40 elements on 2^20 devices is drawn as fast as a small one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reshard.types import Digit, Dim, Layout, Mesh
from reshard.types.dims import number_piece

SOME = 64  # Devices of one set that are listed; the others are only counted.


class Piece(NamedTuple):
    """A run of global indices of a dim, and the number that its held digits form."""

    start: int
    stop: int
    number: int


class Fixed(NamedTuple):
    """A known coordinate of a device: its value along the (stride, size) factor of the positions."""

    stride: int
    size: int
    value: int


def split_digits(dim: Dim) -> tuple[tuple[Digit, ...], int]:
    """The digits that number the runs of a dim, and the length of a run: its minor local digit; 1 for any pieces."""
    if dim.pieces is None and dim.digits and dim.digits[-1].axis is None:
        return dim.digits[:-1], dim.digits[-1].radix
    return dim.digits, 1


def number_run(dim: Dim, at: int) -> int:
    """The number that the held digits of a run form, which may be all padding.

    >>> [number_run(Layout.parse("f32[2{x}2/7]", Mesh(x=2)).dims[0], at) for at in range(4)]
    [0, 1, 0, 1]
    """
    number, weight = 0, 1
    for radix, axis in reversed(split_digits(dim)[0]):
        at, value = divmod(at, radix)
        if axis is not None:
            number += value * weight
            weight *= radix
    return number


def count_pieces(dim: Dim) -> int:
    """The number of runs of a dim that hold elements.

    >>> count_pieces(Layout.parse("f32[2{x}2/7]", Mesh(x=2)).dims[0])
    4
    """
    if dim.pieces is not None:
        return len(dim.pieces.lengths)
    run = split_digits(dim)[1]
    return -(-dim.size // run) if run else 0


def list_pieces(dim: Dim) -> Iterator[Piece]:
    """The runs of a dim that hold elements, in global order.

    >>> layout = Layout.parse("f32[2{x}2/7]", Mesh(x=2))
    >>> [tuple(piece) for piece in list_pieces(layout.dims[0])]
    [(0, 2, 0), (2, 4, 1), (4, 6, 0), (6, 7, 1)]
    """
    if dim.pieces is not None:
        runs = zip(dim.pieces.starts, dim.pieces.lengths, dim.pieces.numbers, strict=True)
        yield from (Piece(start, start + length, number) for start, length, number in runs)
        return
    run = split_digits(dim)[1]
    for at in range(count_pieces(dim)):
        yield Piece(at * run, min(dim.size, (at + 1) * run), number_run(dim, at))


def fix_coordinates(dim: Dim, mesh: Mesh, number: int) -> list[Fixed]:
    """The coordinates of the devices that hold the pieces of this number.

    >>> layout = Layout.parse("f32[{x}{y}2]", Mesh(x=4, y=2))
    >>> fix_coordinates(layout.dims[0], layout.mesh, 5)  # Piece 5 of 8 is at y = 1, x = 2.
    [Fixed(stride=1, size=2, value=1), Fixed(stride=2, size=4, value=2)]
    """
    coordinates: list[Fixed] = []
    for radix, axis in reversed(dim.digits):
        if axis is not None:
            number, value = divmod(number, radix)
            coordinates.append(Fixed(mesh.stride(axis), radix, value))
    return coordinates


def list_ranges(dim: Dim, mesh: Mesh, position: int) -> Iterator[tuple[int, int]]:
    """The runs of global indices that the device at a position holds of a dim.

    >>> layout = Layout.parse("f32[4{x}64]", Mesh(x=4))
    >>> list(list_ranges(layout.dims[0], layout.mesh, 1))
    [(64, 128), (320, 384), (576, 640), (832, 896)]
    """
    if dim.pieces is not None:
        own = dim.pieces.runs_of(number_piece(dim, mesh, position))
        yield from ((run.start, run.start + run.length) for run in own)
        return
    digits, run = split_digits(dim)
    values = [range(r) if a is None else (mesh.coordinate(position, a),) for r, a in digits]
    for number in itertools.product(*values):
        at = 0
        for (radix, _), value in zip(digits, number, strict=True):
            at = at * radix + value
        # Positions grow with the number, so all later runs are padding, too.
        if at * run >= dim.size:
            return
        yield at * run, min(dim.size, (at + 1) * run)


def find_free_factors(mesh: Mesh, used: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The (stride, size) factors of the positions that are not in use, major first.

    >>> find_free_factors(Mesh(x=4, y=2), [(2, 2)])
    [(4, 2), (1, 2)]
    """
    ends = [1, *(end for stride, size in sorted(used) for end in (stride, stride * size)), mesh.size]
    gaps = zip(ends[::2], ends[1::2], strict=True)
    return [(low, high // low) for low, high in reversed(list(gaps)) if low < high]


def list_owners(mesh: Mesh, known: Sequence[Fixed], most: int = SOME) -> tuple[list[int], int]:
    """The first devices at these coordinates, at most so many, sorted by id, and their total number.

    >>> list_owners(Mesh(x=4, y=2), [Fixed(1, 2, 1)])
    ([1, 3, 5, 7], 4)
    """
    base = sum(f.stride * f.value for f in known)
    # Only the first devices are listed: a set may have a million.
    open_ = find_free_factors(mesh, [(f.stride, f.size) for f in known if f.size > 1])
    places = itertools.product(*(range(0, stride * size, stride) for stride, size in open_))
    first = itertools.islice(places, most)
    return sorted(device_at_position(mesh, base + sum(place)) for place in first), math.prod(size for _, size in open_)


def device_at_position(mesh: Mesh, position: int) -> int:
    """The id of the device at a position; `mesh.devices` would list all of them."""
    return position if mesh.device_ids is None else mesh.device_ids[position]


def label_piece(layout: Layout, known: Sequence[Fixed]) -> str:
    """The devices that hold a piece, or those of each summand of a partial array: `0-1 + 4-5`.

    >>> label_piece(Layout.parse("f32[{x}4]", Mesh(x=4, y=2)), [Fixed(2, 4, 1)])
    '2-3'
    """
    most = math.prod(axis.size for axis in layout.partial)
    # Two of many summands show the pattern.
    summands = itertools.islice(list_summands(layout), 2 if most > 4 else 4)
    sets = [set_text(*list_owners(layout.mesh, [*known, *summand])) for summand in summands]
    return " + ".join([*sets, *([f".. ({most})"] if most > 4 else [])])


def list_summands(layout: Layout) -> Iterator[list[Fixed]]:
    """The coordinates of the devices of each summand of a partial array; none for the only one of any other."""
    factors = [(layout.mesh.stride(axis), axis.size) for axis in layout.partial]
    for values in itertools.product(*(range(size) for _, size in factors)):
        yield [Fixed(stride, size, value) for (stride, size), value in zip(factors, values, strict=True)]


def set_text(devices: Sequence[int], total: int) -> str:
    """A set of devices in a few characters; `total` is its size, and `devices` the first of them.

    >>> set_text([0, 1, 2, 3], 4), set_text([0, 2, 4, 6], 4), set_text([0, 1, 8, 9], 4), set_text([0, 1], 99)
    ('0-3', '0,2,..,6', '0-1,8-9', '0-1,.. (99)')
    """
    gaps = {b - a for a, b in itertools.pairwise(devices)}
    if len(devices) == total > 3 and len(gaps) == 1 and gaps != {1}:
        return f"{devices[0]},{devices[1]},..,{devices[-1]}"
    runs: list[list[int]] = []  # The first and last of each run of consecutive ids, or the one id of a run of one.
    for device in devices:
        if runs and runs[-1][-1] + 1 == device:
            runs[-1][1:] = [device]
        else:
            runs.append([device])
    words = ["-".join(map(str, ends)) for ends in runs]
    if len(words) <= 3 and len(devices) == total:
        return ",".join(words)
    return f"{','.join(words[:2])},.. ({total})"
