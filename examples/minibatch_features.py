"""Features for minibatches of a graph, with a cache: the bytes that move are its misses.

    reshard run -n 4 examples/minibatch_features.py

Each rank owns the rows of one part of a graph of few hubs and many leaves, and samples neighbours of neighbours of its
own vertices. `gather_rows` brings their features, in the order of the sample; rows in `have=` do not move. The cache is
filled once, with vertices at random or with those that have the most neighbours, which samples hit most often.
"""

import sys
from typing import Any

import networkx
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import reshard as rs
from reshard.mpi import DistArray
from reshard.runtime import measure

VERTICES, FEATURES, BATCHES = 20_000, 32, 8
SEEDS, FANOUT = 32, (10, 5)
"""Vertices of a batch, and the neighbours that are drawn of each, and of each of these."""

Array = NDArray[Any]
comm = MPI.COMM_WORLD


def sample_batches(owned: Array, indptr: Array, indices: Array) -> list[Array]:
    """The vertices whose features each batch of this rank needs, as its layers list them: with duplicates."""
    draw = np.random.default_rng((11, comm.rank))
    batches: list[Array] = []
    for _ in range(BATCHES):
        layers = [draw.choice(owned, SEEDS, replace=False)]
        for fanout in FANOUT:
            last = np.repeat(layers[-1], fanout)
            degrees = indptr[last + 1] - indptr[last]
            layers.append(indices[indptr[last] + draw.integers(degrees)])
        batches.append(np.concatenate(layers))
    return batches


def main() -> bool:
    graph = networkx.to_scipy_sparse_array(networkx.barabasi_albert_graph(VERTICES, 5, seed=1)).tocsr()
    degrees = np.diff(graph.indptr)
    owners = np.random.default_rng(2).permutation(np.arange(VERTICES) % comm.size)
    owned, others = np.flatnonzero(owners == comm.rank), np.flatnonzero(owners != comm.rank)
    layout = rs.Layout.from_owners(owners, rs.Mesh(x=comm.size), (VERTICES, FEATURES), "f32")
    features = DistArray.from_function(lambda row, column: row + column / FEATURES, layout, comm)
    row_bytes = 4 * FEATURES
    batches = sample_batches(owned, graph.indptr, graph.indices)

    good = True
    if comm.rank == 0:
        print("cache                    rows asked   distinct   not own   misses   rows moved   to fill it")
    by_degree = others[np.argsort(-degrees[others], kind="stable")]
    at_random = np.random.default_rng(comm.rank).permutation(others)
    caches = {"none": by_degree[:0], "5% at random": at_random[: VERTICES // 20]}
    caches |= {f"{percent}% of most neighbours": by_degree[: VERTICES * percent // 100] for percent in (5, 20)}
    for name, cached in caches.items():
        with measure() as filling:
            held = features.gather_rows(cached)
        counts = np.zeros(6, int)
        for batch in batches:
            with measure() as moving:
                rows = features.gather_rows(batch, have=(cached, held))
            distinct = np.unique(batch)
            foreign = distinct[owners[distinct] != comm.rank]
            misses = np.setdiff1d(foreign, cached)
            good &= np.array_equal(rows, batch[:, None] + np.arange(FEATURES, dtype="f4") / FEATURES)
            good &= moving.received_bytes == len(misses) * row_bytes
            counts += len(batch), len(distinct), len(foreign), len(misses), moving.received_bytes // row_bytes, 0
        counts[-1] = filling.received_bytes // row_bytes
        total = comm.allreduce(counts)
        if comm.rank == 0:
            asked, distinct, foreign, missed, moved, filled = total
            print(f"{name:25}{asked:10,}{distinct:11,}{foreign:10,}{missed:9,}{moved:13,}{filled:13,}")
    good = comm.allreduce(good, MPI.LAND)
    if comm.rank == 0:
        print("the bytes received are the misses, and every row is right:", good)
    return good


if __name__ == "__main__":
    sys.exit(not main())
