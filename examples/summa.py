"""SUMMA, a matrix product on a grid of ranks, beside ScaLAPACK's `pdgemm` on the same tiles.

    reshard run -n 4 examples/summa.py

The matrices are dealt out in blocks, as ScaLAPACK has them. In each turn the ranks of a row of the grid gather some
columns of A, those of a column as many rows of B, and each adds the product of both to its tile of C. The rows of A and
C may be in pieces of any size: no move touches them. `pdgemm` runs where its library is installed, such as Debian's
libscalapack-mpich, and is timed beside SUMMA by the dgemm that it calls itself, and by numpy's.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # A rank is one core, for numpy as for ScaLAPACK.

import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pdgemm
from mpi4py import MPI
from numpy.typing import NDArray

import reshard as rs
from reshard.mpi import DistArray, redistribute
from reshard.runtime import measure

BLOCK, ROUNDS = 32, 4  # The side of a block, and how many blocks of each rank come in one turn.
M, N, K = 1201, 960, 1067
Array = NDArray[np.float64]
comm = MPI.COMM_WORLD
down = next(rows for rows in range(math.isqrt(comm.size), 0, -1) if comm.size % rows == 0)
mesh = rs.Mesh(r=down, c=comm.size // down)


def deal(size: int, axis: str) -> str:
    """A dim in blocks that are dealt out along an axis of the grid."""
    return f"{-(-size // (BLOCK * mesh.axes[axis]))}{{{axis}}}{BLOCK}/{size}"


def place(rows: object, columns: object) -> rs.Layout:
    return rs.Layout.parse(f"f64[{rows}, {columns}]", mesh)


def multiply(a: Array, b: Array, rows: str, add_product: Callable[[Array, Array, Array], None], c: Array) -> None:
    """Adds the product of A and B to C; a rank's tiles have no padding."""
    width = ROUNDS * math.lcm(*mesh.axes.values()) * BLOCK  # A and B are dealt to unlike numbers of ranks along K.
    left = up = 0
    for first in range(0, K, width):
        count = min(width, K - first)
        of_a, of_b = place(rows, deal(count, "c")), place(deal(count, "r"), deal(N, "c"))
        right, low = left + of_a.tile_shape_of(comm.rank)[1], up + of_b.tile_shape_of(comm.rank)[0]
        panel_a = redistribute(a[:, left:right], of_a, place(rows, count), comm, padded=False)
        panel_b = redistribute(b[up:low], of_b, place(count, deal(N, "c")), comm, padded=False)
        add_product(panel_a, panel_b, c)
        left, up = right, low


def add_by_numpy(a: Array, b: Array, c: Array) -> None:
    c += a @ b


def measure_seconds(run: Callable[[Array], None], c: Array) -> float:
    """The median of three runs, each of the slowest rank."""
    taken: list[float] = []
    for _ in range(3):
        c[...] = 0
        comm.Barrier()
        start = time.perf_counter()
        run(c)
        taken.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
    return statistics.median(taken)


def main() -> bool:
    library, right = pdgemm.load_scalapack(), True
    rng = np.random.default_rng(7)
    wholes = rng.standard_normal((M, K)), rng.standard_normal((K, N)), np.zeros((M, N))
    some = M // (2 * mesh.axes["r"])  # The last ranks of a column have more rows than the first.
    pieces = [some] * (mesh.axes["r"] - 1) + [M - some * (mesh.axes["r"] - 1)]
    if comm.rank == 0:
        print("rows of A       busiest rank: lacks B   in panels   by a @ b   as numpy   time over pdgemm's")
    for rows in (deal(M, "r"), f"{{r}}({','.join(map(str, pieces))})"):
        ends = place(rows, deal(K, "c")), place(deal(K, "r"), deal(N, "c")), place(rows, deal(N, "c"))
        # Every rank has the whole matrices here, and takes its tiles from them.
        moves = [(whole, place(*whole.shape), end) for whole, end in zip(wholes, ends, strict=True)]
        a, b, c = (redistribute(*move, comm, padded=False).copy() for move in moves)
        with measure() as measured:
            multiply(a, b, rows, add_by_numpy, c)
        with measure() as at_once:
            summed = DistArray(ends[0], a, comm) @ DistArray(ends[1], b, comm)
        lacked = 8 * (a.shape[0] * (K - a.shape[1]) + b.shape[1] * (K - b.shape[0]))
        product = redistribute(c, ends[2], place(M, N), comm, padded=False)
        same, times = np.allclose(product, wholes[0] @ wholes[1], rtol=1e-12, atol=1e-11), "-"
        if library and rows == deal(M, "r"):
            peer = np.zeros_like(c)
            scalapack = measure_seconds(
                pdgemm.prepare_pdgemm(library, (*mesh.axes.values(),), BLOCK, (M, N, K), a, b), peer
            )
            same = same and np.allclose(c, peer, rtol=1e-12, atol=1e-11)
            adders = partial(pdgemm.add_by_dgemm, library), add_by_numpy
            times = ", ".join(
                f"{measure_seconds(partial(multiply, a, b, rows, by), c) / scalapack:.2f}" for by in adders
            )
        same = same and summed.layout == ends[2] and np.allclose(summed.unpadded, c, rtol=1e-12, atol=1e-11)
        every = comm.allgather((lacked, measured.received_bytes, at_once.received_bytes, same))
        right = right and all(lacked == panels == whole and same for lacked, panels, whole, same in every)
        if comm.rank == 0:
            lacked, panels, whole, _ = max(every)
            print(f"{rows:15}{lacked:22,}{panels:12,}{whole:11,}   {all(each[3] for each in every)!s:8}   {times}")
    return right


if __name__ == "__main__":
    sys.exit(not main())
