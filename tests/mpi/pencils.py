"""mpi4py-fft's own pencils beside our layouts: its tiles, and what its transfers give. Run where it is installed:

    mpiexec -n 4 python -m tests.mpi.pencils        37 arrays, 4 pencils each: 2,664 tiles on 4, 6 and 8 ranks

`RECORDED` are digests of its tiles, for `tests/types/test_pieces.py`, which needs neither MPI nor it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning

ARRAYS = 37
RECORDED = {4: "5b079bb9e600752c", 6: "ebf14444120cc731", 8: "ab6b2b357cb13db6"}
Tile = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a rank's part of an array starts, and its shape."""


class Grid(NamedTuple):
    """An array on a grid of ranks, and the dims along which its pencils are whole, one after another."""

    shape: tuple[int, ...]
    ranks: tuple[int, int, int]
    whole: tuple[int, ...]

    def layouts(self) -> Iterator[Layout]:
        """The layout of each pencil: to the next one, the axes of two dims change places."""
        held, mesh = ["a", "b", "c"], Mesh(dict(zip("abc", self.ranks, strict=True)))
        for before, after in zip((self.whole[0], *self.whole), self.whole, strict=False):
            held[before], held[after] = held[after], held[before]
            yield Layout.parse(f"s64[{', '.join(f'{{{a}}}~{n}' for a, n in zip(held, self.shape, strict=True))}]", mesh)


def list_grids(size: int) -> Iterator[Grid]:
    """Slabs, and pencils along each dim, of random arrays; grids are those of `MPI_Dims_create`."""
    choose, square = random.Random(f"pencils on {size}"), {4: (2, 2), 6: (3, 2), 8: (4, 2)}[size]
    for _ in range(ARRAYS):
        shape = tuple(choose.randint(size, 41) for _ in range(3))
        yield Grid(shape, (size, 1, 1), (1,))
        yield Grid(shape, (*square, 1), (2, 1, 0))


def tile_of(layout: Layout, rank: int) -> Tile:
    start = tuple(along[0] for along in meaning(layout, rank))
    return start, layout.tile_shape_of(rank)


def digest_tiles(tiles: Iterable[Tile]) -> str:
    return hashlib.sha256(repr([*tiles]).encode()).hexdigest()[:16]


def main() -> None:
    from mpi4py import MPI
    from mpi4py_fft.pencil import Pencil, Subcomm

    from reshard.mpi import redistribute

    comm, theirs, wrong = MPI.COMM_WORLD, list[Tile](), 0
    for grid in list_grids(comm.size):
        whole = np.arange(np.prod(grid.shape)).reshape(grid.shape)
        layouts = [*grid.layouts()]
        pencil = Pencil(Subcomm(comm, list(grid.ranks), reorder=False), grid.shape, grid.whole[0])
        for at, axis in enumerate(grid.whole):
            before, pencil = pencil, pencil.pencil(axis)
            theirs.append((tuple(map(int, pencil.substart)), tuple(map(int, pencil.subshape))))
            wrong += tile_of(layouts[at], comm.rank) != theirs[-1]
            if at:
                here = (slice(s, s + n) for s, n in zip(before.substart, before.subshape, strict=True))
                given, out = whole[tuple(here)].copy(), np.zeros(pencil.subshape, whole.dtype)
                before.transfer(pencil, whole.dtype).forward(given, out)
                moved = redistribute(given, layouts[at - 1], layouts[at], comm, padded=False)
                wrong += not np.array_equal(moved, out)
    every = comm.gather(theirs)
    wrong = comm.allreduce(wrong)
    if comm.rank == 0:
        tiles = [tile for each in zip(*every, strict=True) for tile in each]
        print(f"{len(tiles)} tiles on {comm.size} ranks, {wrong} unlike ours, digest {digest_tiles(tiles)!r}")


if __name__ == "__main__":
    main()
