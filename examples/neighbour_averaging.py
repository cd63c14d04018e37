"""Averages over the neighbours of a mesh's points: each rank receives the rows that its points touch, and no others.

    reshard run -n 4 examples/neighbour_averaging.py

Points of an irregular mesh lie on ranks in strips of unequal sizes, each point with the points that it shares an edge
with. A round replaces every point's values by the mean of its neighbours'. The rows that a rank needs of others are
asked for once, by `prepare_gather`; in each round they travel while the rank averages points that need none of them.
What a rank receives is the cut of its strip: every point of another rank that has an edge to it, once.
"""

import sys

import numpy as np
from mpi4py import MPI
from scipy.sparse import csr_array
from scipy.spatial import Delaunay

import reshard as rs
from reshard.mpi import DistArray

POINTS, VALUES, ROUNDS = 6_000, 16, 20

comm = MPI.COMM_WORLD


def make_mesh() -> tuple[csr_array, np.ndarray]:
    """The matrix that averages over neighbours, and the rank of each point: strips, the first ones wider."""
    points = np.random.default_rng(3).random((POINTS, 2))
    starts, neighbours = Delaunay(points).vertex_neighbor_vertices
    averages = csr_array((np.repeat(1 / np.diff(starts), np.diff(starts)), neighbours, starts), (POINTS, POINTS))
    edges = np.linspace(0, 1, comm.size + 1)[1:-1] ** 0.8
    return averages, np.searchsorted(edges, points[:, 0])


def main() -> bool:
    averages, owners = make_mesh()
    layout = rs.Layout.from_owners(owners, rs.Mesh(x=comm.size), (POINTS, VALUES), "f64")
    values = np.random.default_rng(5).normal(size=layout.shape)
    mine = np.flatnonzero(owners == comm.rank)
    x = DistArray.zeros(layout, comm)
    x.unpadded[...] = values[mine]

    # Columns of this rank's rows: its own points, then the points of others, in their order.
    touched = averages[mine]
    others = np.unique(touched.indices[owners[touched.indices] != comm.rank])
    inside, outside = touched[:, mine], touched[:, others]
    border = np.flatnonzero(np.diff(outside.indptr))
    outside = outside[border]

    with x.prepare_gather(others) as gather:
        received = gather.received_rows
        for _ in range(ROUNDS):
            begun = gather.start()
            mean = inside @ x.unpadded  # Meanwhile the rows of other ranks are under way.
            mean[border] += outside @ begun.wait()
            x.unpadded[...] = mean
        neighbours = gather.neighbours

    whole = values
    for _ in range(ROUNDS):
        whole = averages @ whole
    right = bool(np.allclose(x.unpadded, whole[mine]))

    # The cut, counted from the other side: the ranks beside its own at which each point has an edge.
    pairs = averages.tocoo()
    reached = np.unique(np.stack([pairs.col, owners[pairs.row]]), axis=1)
    cut = int(np.count_nonzero(owners[reached[0]] != reached[1]))
    table = comm.gather((len(mine), neighbours, len(border), received))
    if table is not None:
        print("rank   points   neighbours   points at the border   rows received in a round")
        for rank, (points, beside, at_border, rows) in enumerate(table):
            print(f"{rank:4}{points:9,}   {', '.join(map(str, beside)):10}{at_border:23,}{rows:27,}")
    moved = comm.allreduce(received)
    good = comm.allreduce(right, MPI.LAND) and moved == cut
    if comm.rank == 0:
        print(f"{moved} rows a round, the cut is {cut}; after {ROUNDS} rounds as one process has it: {good}")
    return good


if __name__ == "__main__":
    sys.exit(not main())
