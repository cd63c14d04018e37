"""Layouts in pieces of any size beside tables of who owns what: an oracle that knows numpy and no digits.

    choose = random.Random(7)
    Owned.random(choose, rs.Mesh(x=2, y=2), (10, 3))       a layout, and for each dim the axes and owners of its indices

A device has the indices of a dim whose owner is its own coordinate along the dim's axes, counted row by row.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import reshard as rs
from reshard.types import Digit, Dim, Pieces

PADDING = -7


@dataclass(frozen=True)
class Owned:
    """A layout, and what it must mean: for each dim, the mesh axes that split it, and the owner of each index."""

    layout: rs.Layout
    axes: Sequence[Sequence[str]]
    owners: Sequence[np.ndarray]

    @classmethod
    def random(
        cls,
        choose: random.Random,
        mesh: rs.Mesh,
        shape: tuple[int, ...],
        dtype: str = "int32",
        like: Owned | None = None,
        sums: bool = False,
    ) -> Owned:
        """Some dims may be those of a layout on the same mesh, and axes that no dim uses those of a sum."""
        kept = [like is not None and choose.random() < 0.6 for _ in shape]
        names = [name for name in mesh.axes if not any(k and name in like.axes[at] for at, k in enumerate(kept))]
        choose.shuffle(names)
        dims: list[Dim] = []
        axes: list[list[str]] = []
        owners: list[np.ndarray] = []
        for at, size in enumerate(shape):
            if kept[at]:
                dims.append(like.layout.dims[at])
                axes.append(like.axes[at])
                owners.append(like.owners[at])
                continue
            own = [names.pop() for _ in range(min(len(names), choose.choice([0, 1, 1, 2])))]
            count = int(np.prod([mesh.axes[name] for name in own]))
            owner = random_owners(choose, size, count)
            pieces = Pieces.from_owners(owner, count)
            held = tuple(Digit(mesh.axes[name], mesh.sub_axis(name)) for name in own)
            dims.append(Dim((*held, Digit(pieces.largest, None)), size, pieces))
            axes.append(own)
            owners.append(owner)
        partial = [mesh.sub_axis(name) for name in names if sums and choose.random() < 0.6]
        return cls(rs.Layout(mesh, tuple(dims), dtype, "sum" if partial else None, tuple(partial)), axes, owners)

    def indices(self, device: int) -> list[np.ndarray]:
        """The indices of each dim that a device has."""
        mesh = self.layout.mesh
        at = dict(zip(mesh.axes, np.unravel_index(mesh.position(device), tuple(mesh.axes.values())), strict=True))
        numbers = []
        for names in self.axes:
            number = 0
            for name in names:
                number = number * mesh.axes[name] + int(at[name])
            numbers.append(number)
        return [np.flatnonzero(owner == number) for owner, number in zip(self.owners, numbers, strict=True)]

    def tiles(self, whole: np.ndarray) -> dict[int, np.ndarray]:
        """The tile of each device, as large as the layout says, with `PADDING` past its own elements."""
        made: dict[int, np.ndarray] = {}
        for device in self.layout.mesh.devices:
            part = whole[np.ix_(*self.indices(device))]
            made[device] = np.full(self.layout.tile_shape, PADDING, whole.dtype)
            made[device][tuple(map(slice, part.shape))] = part
        return made

    def summands(self, device: int) -> tuple[int, list[int]]:
        """The number of a device's summand, and the devices that have the summands of its elements, in order."""
        mesh = self.layout.mesh
        strides = [(mesh.stride(axis), axis.size) for axis in self.layout.partial]
        here = mesh.position(device)
        number, first = 0, here
        for stride, size in strides:
            number = number * size + here // stride % size
            first -= here // stride % size * stride
        group = [first]
        for stride, size in strides:
            group = [at + value * stride for at in group for value in range(size)]
        return number, [mesh.devices[at] for at in group]

    def held(self, size: int) -> dict[int, np.ndarray]:
        """For each device, which elements of the flat array it has."""
        shape = tuple(map(len, self.owners))
        held: dict[int, np.ndarray] = {}
        for device in self.layout.mesh.devices:
            mask = np.zeros(shape, bool)
            mask[np.ix_(*self.indices(device))] = True
            held[device] = mask.reshape(-1)
        return held


def assert_moved(target: Owned, whole: np.ndarray, result: Mapping[int, np.ndarray]) -> None:
    """Asserts that every device has its elements of the array, in tiles of the target's shape."""
    for device, wanted in target.tiles(whole).items():
        real = wanted != PADDING
        assert result[device].shape == wanted.shape, f"device {device} of {target.layout}"
        assert np.array_equal(result[device][real], wanted[real]), f"device {device} of {target.layout}"


def random_owners(choose: random.Random, size: int, count: int, sort: bool = False) -> np.ndarray:
    """Owners of each kind that programs have: by a table, in blocks of any size, nearly even, in rounds.

    With `sort`, pieces are intervals in order.
    """
    kind = choose.choice((1, 2, 3)) if sort else choose.randrange(5)
    if kind == 0:
        return np.array([choose.randrange(count) for _ in range(size)], np.int64)
    if kind == 1:
        cuts = sorted(choose.randint(0, size) for _ in range(count - 1))
        return np.searchsorted(cuts, np.arange(size), side="right").astype(np.int64)
    if kind == 2:
        parts = np.array_split(np.arange(size), count)
        return np.repeat(np.arange(count), [len(part) for part in parts])
    if kind == 3:
        return np.arange(size) // max(1, -(-size // count))
    return np.arange(size) // choose.randint(1, 3) % count


def spell_pieces(owners: np.ndarray, count: int) -> str:
    """The text of pieces: as even as can be, sizes in order, or runs of an owner each."""
    sizes = np.bincount(owners, minlength=count).tolist()
    if np.array_equal(owners, np.repeat(np.arange(count), [len(each) for each in np.array_split(owners, count)])):
        return f"~{len(owners)}"
    if np.all(np.diff(owners) >= 0):
        return f"({','.join(map(str, sizes))})"
    starts = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
    return f"({','.join(f'{high - low}@{owners[low]}' for low, high in itertools.pairwise(starts))})"
