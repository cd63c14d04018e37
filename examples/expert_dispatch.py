"""Tokens go to their experts and back: rows that move are those routed to another rank, and no padding.

    reshard run -n 4 examples/expert_dispatch.py

Eight experts, two on a rank, and two of them for each token, as an uneven router chooses. How many tokens go where is
data: `Layout.from_owners` takes it, and `redistribute` moves the rows there and back. A token with two experts on one
rank goes there once. Beside it: rows of an all-to-all with a fixed capacity for each expert, and tokens that it drops.
"""

import sys

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import reshard as rs
from reshard.mpi import redistribute
from reshard.runtime import measure

TOKENS, DIM, EACH, TOP = 512, 64, 2, 2
"""Tokens of a rank, their features, the experts of a rank, and those of a token."""

Array = NDArray[np.float64]
comm = MPI.COMM_WORLD
ranks, experts = comm.size, EACH * comm.size
mesh = rs.Mesh(x=ranks)


def route_tokens(tokens: Array, router: Array) -> Array:
    """The weight of each expert for each token, which is zero for all but its best."""
    scores = tokens @ router - 0.2 * np.arange(experts)  # The first experts are chosen more often than the last.
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights[weights < np.sort(weights, axis=1)[:, -TOP, None]] = 0
    return weights / weights.sum(axis=1, keepdims=True)


def apply_experts(tokens: Array, weights: Array, matrices: Array) -> Array:
    """Each expert's result for its tokens, weighted and added up."""
    added = np.zeros_like(tokens)
    for expert, matrix in enumerate(matrices):
        chosen = weights[:, expert] > 0
        added[chosen] += weights[chosen, expert, None] * np.tanh(tokens[chosen] @ matrix)
    return added


def move_there_and_back(tokens: Array, weights: Array, matrices: Array) -> tuple[Array, int, int]:
    """What the experts make of this rank's tokens, and the bytes that this rank received on both ways."""
    # The rows that leave this rank, sorted by the rank that they go to: a token for each rank with an expert of its.
    of_rank = weights.reshape(TOKENS, ranks, EACH)
    receiver, token = np.nonzero(of_rank.any(axis=2).T)
    counts = np.array(comm.allgather(np.bincount(receiver, minlength=ranks).tolist()))
    receivers = np.repeat(np.tile(np.arange(ranks), ranks), counts.ravel())

    rows = {"tokens": tokens[token], "weights": of_rank[token, receiver]}
    here, there = {}, {}
    for name, row in rows.items():
        shape = (len(receivers), row.shape[1])
        here[name] = rs.Layout.from_sizes(counts.sum(axis=1), mesh, shape, "f64")
        there[name] = rs.Layout.from_owners(receivers, mesh, shape, "f64")

    with measure() as forth:
        got = redistribute(rows, here, there, comm, padded=False)
    result = apply_experts(got["tokens"], got["weights"], matrices)
    with measure() as back:
        returned = redistribute(result, there["tokens"], here["tokens"], comm, padded=False)
    added = np.zeros_like(tokens)
    np.add.at(added, token, returned)
    return added, forth.received_bytes, back.received_bytes


def main() -> bool:
    everyone = np.random.default_rng(7)
    router = everyone.normal(size=(DIM, experts)) / DIM**0.5
    matrices = everyone.normal(size=(experts, DIM, DIM)) / DIM**0.5
    own = matrices[comm.rank * EACH : (comm.rank + 1) * EACH]
    if comm.rank == 0:
        print("batch   rows routed elsewhere   moved there   moved back   capacity 1.25 (dropped)   no drop")
    good = True
    for batch in range(3):
        tokens = np.random.default_rng((batch, comm.rank)).normal(size=(TOKENS, DIM))
        weights = route_tokens(tokens, router)
        result, forth, back = move_there_and_back(tokens, weights, own)

        # The same on one process, and what had to move, counted in the router's own table.
        right = np.allclose(result, apply_experts(tokens, weights, matrices))
        goes = weights.reshape(TOKENS, ranks, EACH).any(axis=2)
        elsewhere = comm.allreduce(int(goes.sum() - goes[:, comm.rank].sum()))
        there, back_again = comm.allreduce(forth) / (8 * (DIM + EACH)), comm.allreduce(back) / (8 * DIM)

        # An all-to-all of equal slots: for each expert, every other rank sends its whole capacity, filled or not.
        loads = np.count_nonzero(weights, axis=0)
        capacity = -(-5 * TOKENS * TOP // (4 * experts))
        dropped = comm.allreduce(int(np.maximum(loads - capacity, 0).sum()))
        largest = comm.allreduce(int(loads.max()), MPI.MAX)
        slots = experts * (ranks - 1)
        if comm.rank == 0:
            print(
                f"{batch:5}{elsewhere:24,}{there:14,.0f}{back_again:13,.0f}"
                f"{slots * capacity:16,}{f'({dropped:,})':>10}{slots * largest:10,}"
            )
        good &= comm.allreduce(right, MPI.LAND) and there == back_again == elsewhere
    if comm.rank == 0:
        print("moved is what was routed elsewhere, and as one process has it:", good)
    return good


if __name__ == "__main__":
    sys.exit(not main())
