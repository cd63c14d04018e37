"""`Torus`: the physical axes that the devices of a fabric lie on, chosen from their number or given.

A mesh is a way to count devices; the wires are where they are. 64 chips of TPU v5p are wired as 4x4x4, whatever the
axes of a mesh over them:

    mesh <x=8, y=8>    positions   1 ... 4 ... 8 ... 16 ... 64
    y                              |-----------|                   a ring of 4, and half of the next ring
    x                                          |------------|      the other half, and a ring of 4
    physical axes                  |-----|-----------|------|
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from reshard.errors import NetworkError, quoted
from reshard.types.flags import checked_flag
from reshard.types.mesh import is_chain
from reshard.types.primes import primes
from reshard.types.whole import listed, whole

_MOST_AXES = 6


@dataclass(frozen=True)
class Torus:
    """How the devices of a fabric are wired: a torus of `axes` physical axes, as large as it must be.

    An axis wraps around if its size is a multiple of `wrap` (0: none does); with `cubes` only if that holds for all.
    `cores` devices share a chip, and count fastest. `shape` gives the sizes of the physical axes, major to minor, where
    they are known; else they are as equal as the number of devices allows. Raises `NetworkError` for bad figures.

    >>> v5p = Torus(axes=3, wrap=4, cubes=True)
    >>> v5p.sizes(64), v5p.sizes(256), v5p.wraps((4, 8, 8)), v5p.wraps((2, 4, 4))
    ((4, 4, 4), (4, 8, 8), (True, True, True), (False, False, False))
    """

    axes: int = 3
    wrap: int = 1
    cubes: bool = False
    cores: int = 1
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, low, most in (("axes", 1, _MOST_AXES), ("wrap", 0, 1 << 40), ("cores", 1, 1 << 10)):
            if whole(getattr(self, name), low, most) is None:
                raise NetworkError(
                    f"{name} {quoted(getattr(self, name))} of a torus: give a whole number, {low} to {most}"
                )
        object.__setattr__(self, "cubes", checked_flag(self.cubes, "torus cubes", NetworkError))
        sizes = listed(self.shape)
        if sizes is None or len(sizes) > _MOST_AXES or any(whole(size, 1, 1 << 40) is None for size in sizes):
            raise NetworkError(
                f"shape {quoted(self.shape)} of a torus: give the sizes of at most {_MOST_AXES} physical axes, such as "
                f"(4, 4, 4)"
            )
        object.__setattr__(self, "shape", tuple(sizes))

    def sizes(self, devices: int) -> tuple[int, ...]:
        """The sizes of the physical axes of a number of devices: ascending, or as given, major to minor.

        Raises `NetworkError` if the shape that was given has another number of devices.
        """
        chips = devices // self.cores if devices % self.cores == 0 else devices
        if self.shape:
            if math.prod(self.shape) * self.cores != devices:
                shape = "x".join(map(str, self.shape))
                raise NetworkError(
                    f"the torus {shape} has {math.prod(self.shape) * self.cores} devices, but the inner axes of the "
                    f"mesh have {devices}; give the shape of the slice that the mesh is on, or none"
                )
            return self.shape
        cube = self.wrap**self.axes if self.cubes else 0
        start = self.wrap if cube and chips % cube == 0 else 1
        sizes = [start] * self.axes
        for prime in sorted(primes(chips // start**self.axes), reverse=True):
            sizes[sizes.index(min(sizes))] *= prime
        return tuple(sorted(size for size in sizes if size > 1))

    def wraps(self, sizes: Sequence[int]) -> tuple[bool, ...]:
        """Which physical axes of these sizes wrap around."""
        each = tuple(self.wrap > 0 and size % self.wrap == 0 for size in sizes)
        return (all(each),) * len(each) if self.cubes else each

    def under(self, mesh_axes: Sequence[int]) -> tuple[tuple[int, bool], ...]:
        """The physical axes (size, wraps) below mesh axes of these sizes, major to minor.

        The physical axes are in the order in which most of them end where a mesh axis does. If no order nests with the
        mesh axes, every mesh axis counts as a physical one.

        >>> Torus(axes=3, wrap=4, cubes=True).under([4, 8, 4])
        ((4, True), (8, True), (4, True))
        """
        devices = math.prod(mesh_axes)
        sizes = self.sizes(devices)
        cores = (self.cores,) if self.cores > 1 and devices % self.cores == 0 else ()
        orders = [sizes] if self.shape else sorted(set(permutations(sizes)))
        ends = set(_ends(mesh_axes))
        nested = [order for order in orders if is_chain(sorted(ends | set(_ends((*order, *cores)))))]
        if not nested:
            sizes = tuple(size for size in mesh_axes if size > 1)
            return tuple(zip(sizes, self.wraps(sizes), strict=True))
        best = max(nested, key=lambda order: len(ends & set(_ends((*order, *cores)))))
        wraps = self.wraps(best)
        return (*zip(best, wraps, strict=True), *((size, True) for size in cores))


def _ends(sizes: Sequence[int]) -> list[int]:
    """Where the factors of these sizes, major to minor, start and end among the positions."""
    ends = [1]
    for size in reversed(sizes):
        ends.append(ends[-1] * size)
    return ends
