"""Logistic regression by Newton's method, written as for numpy, on rows that lie on ranks evenly or unevenly.

    reshard run -n 4 examples/logistic_regression.py

`fit` takes numpy's arrays and distributed ones alike. Of a DistArray with split rows, each rank multiplies its own, and
a plan adds up gradient and Hessian: what is received in a step does not grow with the rows.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.mpi import DistArray
from reshard.runtime import measure

ROWS, FEATURES, STEPS, PENALTY = 20_011, 12, 8, 1.0  # A prime number of rows, which no number of ranks divides.
comm = MPI.COMM_WORLD
mesh = rs.Mesh(x=comm.size)


def fit(x: Any, y: Any, place: Callable[[np.ndarray], Any], whole: Callable[[Any], np.ndarray]) -> np.ndarray:
    """The weights of least loss. `place` puts small arrays to where `x` is, and `whole` takes small results back."""
    weights, penalty = np.zeros(FEATURES), PENALTY * np.eye(FEATURES)
    for _ in range(STEPS):
        chance = 1 / (1 + np.exp(-(x @ place(weights))))
        gradient = x.T @ (chance - y)
        hessian = x.T @ (x * (chance * (1 - chance)).reshape(-1, 1))
        step = np.linalg.solve(whole(hessian) + penalty, whole(gradient) + PENALTY * weights)
        weights = weights - step
    return weights


def everywhere(array: np.ndarray) -> DistArray:
    """An array that every rank has, as a distributed one."""
    layout = rs.Layout.from_spec(mesh, array.shape, "float64", [])
    return DistArray.from_global(array, layout, comm, root=None)


def main() -> bool:
    """Prints a row for each way that rows lie on ranks; whether all figures are as they must be."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((ROWS, FEATURES)) * rng.uniform(0.1, 3, FEATURES)
    y = (rng.random(ROWS) < 1 / (1 + np.exp(-(x @ rng.standard_normal(FEATURES))))).astype("float64")
    wanted = fit(x, y, np.asarray, np.asarray)  # All rows in one process.
    right = bool(np.abs(x.T @ (1 / (1 + np.exp(-(x @ wanted))) - y) + PENALTY * wanted).max() < 1e-8)

    # What a step must receive: the sums of gradient and Hessian, of which every rank has a summand and wants all.
    needed = 0
    for shape in ((FEATURES,), (FEATURES, FEATURES)):
        summands = rs.Layout.from_spec(mesh, shape, "float64", [], unreduced=["x"])
        needed += rs.plan(summands, rs.Layout.from_spec(mesh, shape, "float64", [])).received_bytes

    owners = rng.integers(0, comm.size, ROWS) * rng.integers(0, 2, ROWS)  # Half of the rows are on rank 0.
    sizes = np.bincount(owners, minlength=comm.size)
    layouts = {
        "in equal blocks": lambda shape: rs.Layout.from_spec(mesh, shape, "float64", ["x"]),
        "in unequal blocks": lambda shape: rs.Layout.from_sizes(sizes, mesh, shape, "float64"),
        "by owner": lambda shape: rs.Layout.from_owners(owners, mesh, shape, "float64"),
    }
    if comm.rank == 0:
        print("rows              received B in a step   needed   all rows B   weights as numpy's")
    for name, split in layouts.items():
        a, b = (DistArray.from_global(each, split(each.shape), comm, root=None) for each in (x, y))
        with measure() as measured:
            weights = fit(a, b, everywhere, lambda small: small.tile)
        every = comm.allgather((measured.received_bytes / STEPS, np.allclose(weights, wanted, rtol=1e-12, atol=1e-12)))
        right = right and all(received == needed and same for received, same in every)
        if comm.rank == 0:
            received, same = max(every)[0], all(same for _, same in every)
            print(f"{name:18}{received:20,.0f}{needed:9,}{x.nbytes:13,}   {same}")
    return right


if __name__ == "__main__":
    sys.exit(not main())
