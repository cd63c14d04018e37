"""QR of a tall matrix whose rows lie on ranks, as evenly as can be or unevenly: the small factors climb a tree.

    reshard run -n 4 examples/tall_skinny_qr.py

Each rank factorizes its own rows. Then every second rank gets its neighbour's triangle below its own and factorizes
both, until one triangle is left, which is R. Q comes back down the same tree. One turn of it is one move between two
layouts with pieces: those of 4 ranks with 3, 8, 0 and 8 rows become those of 2 ranks with 11 and 8.
"""

import sys

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import reshard as rs
from reshard.mpi import redistribute
from reshard.runtime import measure

COLUMNS = 8
Array = NDArray[np.float64]
comm = MPI.COMM_WORLD


def stack_pieces(heights: list[int], ranks: list[int]) -> rs.Layout:
    """A matrix of which each of these ranks has so many rows, in order."""
    mesh = rs.Mesh({"x": len(ranks)}, device_ids=ranks)
    return rs.Layout.from_sizes(heights, mesh, (sum(heights), COLUMNS), "float64")


def factorize(rows: Array, heights: list[int]) -> tuple[Array, Array | None]:
    """This rank's rows of Q, and R on rank 0; `heights` are the rows of each rank."""
    q, r = np.linalg.qr(rows)
    ranks, turns = list(range(comm.size)), []
    heights = [min(height, COLUMNS) for height in heights]  # A triangle has as many rows as there were, but at most 8.
    while len(ranks) > 1:
        apart = stack_pieces(heights, ranks)
        ranks, heights = ranks[::2], [sum(heights[at : at + 2]) for at in range(0, len(heights), 2)]
        paired = stack_pieces(heights, ranks)
        turns.append((q, apart, paired))
        r = redistribute(r, apart, paired, comm, padded=False)
        if r is not None:
            q, r = np.linalg.qr(r)
        heights = [min(height, COLUMNS) for height in heights]
    result = r
    part = np.eye(COLUMNS) if comm.rank == 0 else None
    for own, apart, paired in reversed(turns):
        part = redistribute(None if part is None else q @ part, paired, apart, comm, padded=False)
        q = own
    return q @ part, result


def count_climbing(heights: list[int]) -> int:
    """The rows of triangles that change ranks on the way up: those of every second rank, in each turn."""
    heights, climbing = [min(height, COLUMNS) for height in heights], 0
    while len(heights) > 1:
        climbing += sum(heights[1::2])
        heights = [min(sum(heights[at : at + 2]), COLUMNS) for at in range(0, len(heights), 2)]
    return climbing


def main() -> bool:
    """Prints a row for each way that rows lie on ranks; whether all figures are as they must be."""
    rng = np.random.default_rng(7)
    uneven = [int(height) for height in rng.integers(1000, 9000, comm.size)]
    short = [3 * (rank % 2) for rank in range(comm.size - 1)] + [4000]  # Some have no rows, some less than a triangle.
    right = True
    if comm.rank == 0:
        print("rows of each rank           moved B   needed B   busiest rank B   all to one rank B   as numpy")
    for heights in ([4000] * comm.size, uneven, short):
        whole = rng.standard_normal((sum(heights), COLUMNS))
        first = sum(heights[: comm.rank])
        with measure() as measured:
            q, r = factorize(whole[first : first + heights[comm.rank]], heights)
        received, every = comm.allgather(measured.received_bytes), comm.gather(q)
        if comm.rank == 0:
            q, wanted = np.vstack(every), np.linalg.qr(whole)[1]
            signs = np.sign(np.diag(r) * np.diag(wanted))  # QR leaves the signs of R's rows open.
            same = np.allclose(signs[:, None] * r, wanted, rtol=1e-12, atol=1e-10)
            same = same and np.allclose(q @ r, whole) and np.allclose(q.T @ q, np.eye(COLUMNS))
            needed = 2 * count_climbing(heights) * COLUMNS * 8  # Up as triangles, and down as rows of Q.
            gathered = (sum(heights) - heights[0]) * COLUMNS * 8
            shown = ", ".join(map(str, heights))
            print(f"{shown:24}{sum(received):11,}{needed:11,}{max(received):17,}{gathered:20,}   {same}")
            right = right and same and sum(received) == needed
    return comm.bcast(right)


if __name__ == "__main__":
    sys.exit(not main())
