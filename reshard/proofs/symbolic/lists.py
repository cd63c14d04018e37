"""The finite part of a program: its lists of devices, compared with formulas by arrays, without a solver.

Groups, blocks and pairs are finite data. That they are what a formula in a device's coordinates says
is one comparison per device, exact and vectorised; what the formula then does to elements is shown once
for all devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.errors import UndecidedError
from reshard.proofs.symbolic.form import Atom
from reshard.types.mesh import Mesh

Ints = NDArray[np.int64]
Factors = Sequence[tuple[int, int]]
"""(stride, radix) factors of the positions, major first."""


def need(holds: Any, what: str) -> None:
    """Stops the proof where something that it needs does not hold."""
    if not bool(holds):
        raise UndecidedError(what)


def array(values: object, columns: int, what: str) -> Ints:
    """A list of equal rows as an array."""
    try:
        found = np.array(values, np.int64)
    except (ValueError, TypeError, OverflowError):
        raise UndecidedError(f"{what}: the rows are not equally long") from None
    if found.size == 0:
        return found.reshape(0, columns)
    need(found.ndim == 2 and found.shape[1] == columns, f"{what}: rows of {columns} were expected")
    return found


def positions(mesh: Mesh, ids: Ints) -> Ints:
    """The positions of devices."""
    known = np.array(mesh.devices, np.int64)
    order = np.argsort(known)
    at = np.searchsorted(known[order], ids)
    need(np.all(at < len(known)) and np.all(known[order][np.minimum(at, len(known) - 1)] == ids), "unknown devices")
    return order[at]


def coordinate(position: Ints, stride: int, radix: int) -> Ints:
    """The coordinate along a factor."""
    return position // stride % radix


def factors(atoms: Sequence[Atom], side: str) -> list[tuple[int, int]]:
    """The device factors that hold some atoms, before ('src') or after ('dst')."""
    found = [(a.src if side == "src" else a.dst, a.radix) for a in atoms]
    need(all(stride is not None for stride, _ in found), "a digit that numbers blocks is held by no device")
    return [(stride, radix) for stride, radix in found if stride is not None]


def check_groups(mesh: Mesh, groups: object, along: Factors, ordered: bool) -> None:
    """Groups are the devices that differ along the factors only, in their order if `ordered`, each device once."""
    count = math.prod(radix for _, radix in along)
    at = positions(mesh, array(groups, count, "groups"))
    need(at.size == mesh.size and np.all(np.bincount(at.ravel(), minlength=mesh.size) == 1), "not each device once")
    number = np.zeros_like(at)
    rest = at.copy()
    for stride, radix in along:
        digit = coordinate(at, stride, radix)
        number, rest = number * radix + digit, rest - digit * stride
    need(np.all(rest == rest[:, :1]), "a group's members differ in other coordinates too")
    number = number if ordered else np.sort(number, axis=1)
    need(np.all(number == np.arange(count)), "a group's members are in another order, or not the right ones")


def check_blocks(mesh: Mesh, block: dict[int, int], along: Factors) -> None:
    """Every device keeps the block that its coordinates number."""
    need(set(block) == set(mesh.devices), "a slice for each device")
    at = positions(mesh, np.array(list(block), np.int64))
    number = np.zeros_like(at)
    for stride, radix in along:
        number = number * radix + coordinate(at, stride, radix)
    need(np.all(number == np.array(list(block.values()), np.int64)), "a device keeps another block")
