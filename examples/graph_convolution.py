"""A graph convolution on a graph in parts: the rows that move are those that the cut needs, and no others.

    reshard run -n 4 examples/graph_convolution.py

Full-batch training of two layers, forward and backward. A rank has the vertices of one part, METIS's or a block of the
given order, and before each product gathers the rows of their neighbours. What must move has a name, connectivity - 1:
for each vertex, the number of other parts that have a neighbour of it. Networkx ships the karate club, pyamg the mesh
of a wing; without pymetis (pip install pymetis) there are blocks alone.
"""

import sys
from collections.abc import Callable
from typing import Any

import networkx
import numpy as np
import pyamg
from mpi4py import MPI
from numpy.typing import NDArray
from scipy import sparse

import reshard as rs
from reshard.mpi import DistArray
from reshard.runtime import measure

try:
    import pymetis
except ImportError:
    pymetis = None

WIDTH, HIDDEN, STEPS = 16, 8, 30

Array = NDArray[Any]
Product = Callable[[Array], Array]
comm = MPI.COMM_WORLD


class NeighbourProduct:
    """The product of this rank's rows of a sparse matrix with a matrix of which each rank has its own rows."""

    def __init__(self, matrix: sparse.csr_array, parts: Array, width: int) -> None:
        own = matrix[np.flatnonzero(parts == comm.rank)]
        needed = np.unique(own.indices)
        layout = rs.Layout.from_owners(parts, rs.Mesh(x=comm.size), (len(parts), width), "f64")
        self.matrix = own[:, needed]
        self.rows = DistArray.zeros(layout, comm)
        self.gather = self.rows.prepare_gather(needed)

    def __call__(self, rows: Array) -> Array:
        self.rows.unpadded[...] = rows
        return self.matrix @ self.gather()


def train(first: Product, hidden: Product, features: Array, labels: Array, add: Product) -> list[float]:
    """The loss of each step; `first` and `hidden` multiply by the graph's matrix, `add` adds up over all ranks."""
    draw = np.random.default_rng(3)
    weights = draw.normal(size=(WIDTH, HIDDEN)) / 4, draw.normal(size=(HIDDEN, labels.shape[1])) / 3
    count, inputs, losses = add(np.array(len(labels))), first(features), []
    for _ in range(STEPS):
        active = np.maximum(inputs @ weights[0], 0)
        mixed = hidden(active)
        chances = np.exp(mixed @ weights[1])
        chances /= chances.sum(axis=1, keepdims=True)
        losses.append(float(add(-np.log(chances[labels]).sum()) / count))

        # Backwards: the matrix is symmetric, so that gradients come from the same neighbours as values.
        slope = (chances - labels) / count
        through = hidden(slope @ weights[1].T) * (active > 0)
        weights = weights[0] - add(inputs.T @ through), weights[1] - add(mixed.T @ slope)
    return losses


def read_graphs() -> dict[str, tuple[sparse.csr_array, Array]]:
    """Graphs and their vertices' classes: the two clubs, and the quarters of a mesh around a wing."""
    club = networkx.karate_club_graph()
    officers = np.array([club.nodes[member]["club"] == "Officer" for member in club], int)
    graphs = {"karate": (networkx.to_scipy_sparse_array(club, weight=None, dtype=float).tocsr(), officers)}
    stored = pyamg.gallery.load_example("airfoil")
    for name, times in (("airfoil", 0), ("refined", 2)):
        mesh = pyamg.gallery.fem.Mesh(stored["vertices"], stored["elements"].astype(int))
        mesh.refine(times)
        triangles = np.repeat(np.arange(mesh.ne), 3)
        corners = sparse.csr_array((np.ones(3 * mesh.ne), (triangles, mesh.E.ravel())), shape=(mesh.ne, mesh.nv))
        joined = sparse.csr_array((corners.T @ corners) > 0, dtype=float)
        graphs[name] = sparse.csr_array(joined - sparse.eye_array(mesh.nv)), 2 * (mesh.X > 0.5) + (mesh.Y > 0)
    return graphs


def count_moved(graph: sparse.csr_array, parts: Array) -> int:
    """The cut, connectivity - 1, one vertex after the other."""
    neighbours = np.split(graph.indices, graph.indptr[1:-1])
    return sum(len({int(part), *parts[near].tolist()}) - 1 for part, near in zip(parts, neighbours, strict=True))


def main() -> bool:
    good = True
    if comm.rank == 0:
        print("graph    vertices   edges   parts    connectivity - 1   rows moved   loss")
    for name, (graph, classes) in read_graphs().items():
        size = graph.shape[0]
        scale = sparse.diags_array(1 / np.sqrt(graph.sum(axis=1) + 1))
        matrix = sparse.csr_array(scale @ (graph + sparse.eye_array(size)) @ scale)
        features = np.random.default_rng(5).normal(size=(size, WIDTH))
        labels = classes[:, None] == np.arange(classes.max() + 1)
        alone = train(matrix.__matmul__, matrix.__matmul__, features, labels, lambda values: values)

        choices = {"blocks": np.arange(size) * comm.size // size}
        if pymetis is not None:
            near = pymetis.CSRAdjacency(graph.indptr, graph.indices)
            choices["METIS"] = np.array(pymetis.part_graph(comm.size, near).vertex_part)
        for choice, parts in choices.items():
            cut, own = count_moved(graph, parts), parts == comm.rank
            products = [NeighbourProduct(matrix, parts, width) for width in (WIDTH, HIDDEN)]
            with measure() as measured:
                losses = train(*products, features[own], labels[own], comm.allreduce)
            # In all, the features have come once, and the hidden layer and its gradients in each step.
            moved = comm.allreduce(measured.received_bytes) / (8 * (WIDTH + 2 * STEPS * HIDDEN))
            good &= moved == cut and np.allclose(losses, alone) and losses[-1] < losses[0]
            if comm.rank == 0:
                figures = f"{size:9,}{graph.nnz // 2:8,}   {choice:6}{cut:20,}{moved:13,.0f}"
                print(f"{name:8}{figures}   {losses[0]:.3f} -> {losses[-1]:.3f}")
    if comm.rank == 0:
        print("rows moved are the cut, and losses go down as on one process:", good)
    return good


if __name__ == "__main__":
    sys.exit(not main())
