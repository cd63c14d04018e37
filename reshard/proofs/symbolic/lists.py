"""The finite part of a program: its lists of devices, compared with formulas by arrays, without a solver.

Groups, blocks and pairs are finite data. Whether they are what a formula in a device's coordinates gives is one exact,
vectorized comparison per device; what the formula then does to elements is proved once for all devices.

The lowering writes such lists (`lower.groups`) and the prover reads them, so the two share no code: `check_groups`
takes the members' coordinates apart instead of building the groups again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.errors import UndecidedError
from reshard.proofs.symbolic.form import FormDigit
from reshard.types.layout import Dim, Layout
from reshard.types.mesh import Mesh

Ints = NDArray[np.int64]
Factors = Sequence[tuple[int, int]]
"""(stride, radix) factors of the positions, major first."""


def require(holds: Any, what: str) -> None:
    """Stops the proof with `UndecidedError(what)` unless a condition holds."""
    if not bool(holds):
        raise UndecidedError(what)


def array(values: object, columns: int, what: str) -> Ints:
    """A list of rows as an array with a given number of columns."""
    try:
        rows = np.array(values, np.int64)
    except (ValueError, TypeError, OverflowError):
        raise UndecidedError(f"{what}: the rows are not equally long") from None
    if rows.size == 0:
        return rows.reshape(0, columns)
    require(rows.ndim == 2 and rows.shape[1] == columns, f"{what}: rows of {columns} were expected")
    return rows


def positions(mesh: Mesh, ids: Ints) -> Ints:
    """The positions of devices, given by their ids.

    >>> positions(Mesh({"x": 3}, device_ids=[10, 7, 20]), np.array([20, 10])).tolist()
    [2, 0]
    """
    if mesh.device_ids is None:
        require(np.all((ids >= 0) & (ids < mesh.size)), "unknown devices")
        return ids
    known = ids_of(mesh)
    order = np.argsort(known)
    at = np.searchsorted(known[order], ids)
    require(np.all(at < len(known)) and np.all(known[order][np.minimum(at, len(known) - 1)] == ids), "unknown devices")
    return order[at]


def ids_of(mesh: Mesh) -> Ints:
    """The device at each position.

    >>> ids_of(Mesh({"x": 3}, device_ids=[10, 7, 20])).tolist(), ids_of(Mesh(x=2)).tolist()
    ([10, 7, 20], [0, 1])
    """
    return np.arange(mesh.size) if mesh.device_ids is None else np.array(mesh.device_ids, np.int64)


def coordinate(position: Ints, stride: int, radix: int) -> Ints:
    """The coordinate of each position along a factor."""
    return position // stride % radix


def held_offset(dim: Dim, layout: Layout, position: Ints) -> Ints:
    """What the held digits add to the global index of a dim, for the device at each position.

    >>> layout = Layout.parse("f32[4{x}2]", Mesh(x=3))
    >>> held_offset(layout.dims[0], layout, np.arange(3)).tolist()
    [0, 2, 4]
    """
    offset, low = np.zeros_like(position), 1
    for radix, axis in reversed(dim.digits):
        if axis is not None:
            offset = offset + coordinate(position, layout.mesh.stride(axis), radix) * low
        low *= radix
    return offset


def factors(digits: Sequence[FormDigit], side: str) -> list[tuple[int, int]]:
    """The device factors that hold some digits, before ('src') or after ('dst')."""
    strides = [digit.src if side == "src" else digit.dst for digit in digits]
    require(None not in strides, "a digit that numbers blocks is held by no device")
    return [(stride, digit.radix) for stride, digit in zip(strides, digits, strict=True) if stride is not None]


def check_groups(mesh: Mesh, groups: object, along: Factors, ordered: bool) -> None:
    """Checks that groups are the devices that differ along the factors only, each once, and in order if `ordered`."""
    count = math.prod(radix for _, radix in along)
    at = positions(mesh, array(groups, count, "groups"))
    once = at.size == mesh.size and np.all(np.bincount(at.ravel(), minlength=mesh.size) == 1)
    require(once, "the groups do not have each device once")
    number = np.zeros_like(at)
    rest = at.copy()
    for stride, radix in along:
        digit = coordinate(at, stride, radix)
        number, rest = number * radix + digit, rest - digit * stride
    require(np.all(rest == rest[:, :1]), "the members of a group differ in other coordinates too")
    number = number if ordered else np.sort(number, axis=1)
    require(np.all(number == np.arange(count)), "the members of a group are in another order, or not the right ones")


def check_places(
    mesh: Mesh,
    place: Mapping[int, int | None],
    along: Factors,
    first: Factors,
    equal: Sequence[tuple[int, int, int]],
) -> None:
    """Checks that the devices with data are those at coordinate 0 along the factors `first` and at equal coordinates
    along the pairs of strides `equal`, and that each has it at the block that its coordinates number.
    """
    require(len(place) == mesh.size, "not every device has a summand")
    at = positions(mesh, np.array(list(place), np.int64))
    number, has_data = np.zeros_like(at), np.ones(len(at), bool)
    for stride, radix in along:
        number = number * radix + coordinate(at, stride, radix)
    for stride, radix in first:
        has_data &= coordinate(at, stride, radix) == 0
    for one, other, radix in equal:
        has_data &= coordinate(at, one, radix) == coordinate(at, other, radix)
    given = np.array([-1 if block is None else block for block in place.values()], np.int64)
    require(np.all(given == np.where(has_data, number, -1)), "a device has data in another summand or block")


def check_blocks(mesh: Mesh, block: dict[int, int], along: Factors) -> None:
    """Checks that every device keeps the block that its coordinates number."""
    require(len(block) == mesh.size, "not every device has a slice")
    at = positions(mesh, np.array(list(block), np.int64))
    number = np.zeros_like(at)
    for stride, radix in along:
        number = number * radix + coordinate(at, stride, radix)
    require(np.all(number == np.array(list(block.values()), np.int64)), "a device keeps another block")
