"""Rows by a random table of owners, or in random ranges, moved on MPI ranks: beside a hand-written Alltoallv.

    reshard run -n 4 benchmarks/rows_by_owner.py [--rows 20000] [--width 8] [--nonzeros 40] [--repeat 9] [--seed N]

Every rank has an even share of the rows, and gets those of its piece: dense float64 rows of `width`, then a scipy CSR
matrix with `nonzeros` in a row, on average. The hand-written move sorts its rows by receiver, once for all its calls,
packs them and calls Alltoallv: once if they are dense, and for counts, columns and values of a matrix. Results are
compared, and both are timed in turn; `first` includes planning, which tables of another seed would take again.
"""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np
import scipy.sparse as sp
from mpi4py import MPI

import reshard as rs
from reshard.mpi import MoveHandle, prepare, redistribute

COMM = MPI.COMM_WORLD
COLUMNS = 10**5


class ByHand:
    """What a program writes that knows who gets each of its rows: they are sorted by receiver, and exchanged."""

    def __init__(self, owners: np.ndarray) -> None:
        self.order = np.argsort(owners, kind="stable")
        self.sent = np.bincount(owners, minlength=COMM.size)
        self.received = np.empty(COMM.size, np.int64)
        COMM.Alltoall(self.sent.astype(np.int64), self.received)

    def dense(self, tile: np.ndarray) -> np.ndarray:
        width, out = tile.shape[1], np.empty((self.received.sum(), tile.shape[1]))
        COMM.Alltoallv([tile[self.order], self.sent * width], [out, self.received * width])
        return out

    def sparse(self, matrix: Any) -> Any:
        ordered = matrix[self.order]
        counts, taken = np.diff(ordered.indptr), np.empty(self.received.sum(), ordered.indptr.dtype)
        COMM.Alltoallv([counts, self.sent], [taken, self.received])
        ends = np.append(0, np.cumsum(taken))
        sent = np.diff(ordered.indptr[np.append(0, np.cumsum(self.sent))])
        received = np.diff(ends[np.append(0, np.cumsum(self.received))])
        columns, values = np.empty(ends[-1], ordered.indices.dtype), np.empty(ends[-1])
        COMM.Alltoallv([ordered.indices, sent], [columns, received])
        COMM.Alltoallv([ordered.data, sent], [values, received])
        return sp.csr_array((values, columns, ends.astype(columns.dtype)), shape=(len(taken), matrix.shape[1]))


def time_both(
    what: str, ours: Callable[[], Any], again: Callable[[], Any], hand: Callable[[], Any], repeat: int
) -> None:
    def seconds(call: Callable[[], Any]) -> float:
        COMM.Barrier()
        start = time.perf_counter()
        call()
        COMM.Barrier()
        return time.perf_counter() - start

    first = seconds(ours)
    seconds(hand)
    times = np.median([[seconds(again), seconds(hand)] for _ in range(repeat)], axis=0)
    if COMM.rank == 0:
        first, again, by_hand = 1e3 * first, *(1e3 * times)
        figures = (
            f"first {first:7.1f} ms   again {again:7.1f} ms   by hand {by_hand:7.1f} ms   ratio {again / by_hand:.2f}"
        )
        print(f"{what:28} {figures}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, usual in (("rows", 20000), ("width", 8), ("nonzeros", 40), ("repeat", 9)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--seed", type=int, default=COMM.bcast(secrets.randbelow(10**6)))
    options = parser.parse_args()
    numbers = np.random.default_rng(options.seed)
    rows, mesh, rank = options.rows, rs.Mesh(x=COMM.size), COMM.rank
    if rank == 0:
        print(f"{COMM.size} ranks, {rows} rows, seed {options.seed}")
    cuts = np.sort(numbers.integers(0, rows, COMM.size - 1))
    tables = {
        "by owner": numbers.integers(0, COMM.size, rows),
        "in ranges": np.searchsorted(cuts, np.arange(rows), side="right"),
    }
    parts = np.array_split(np.arange(rows), COMM.size)
    own = np.random.default_rng([options.seed, rank])
    tile = own.random((len(parts[rank]), options.width))
    indptr = np.append(0, np.cumsum(own.integers(0, 2 * options.nonzeros + 1, len(tile)))).astype(np.int32)
    columns = own.integers(0, COLUMNS, indptr[-1], dtype=np.int32)
    matrix = sp.csr_array((own.random(indptr[-1]), columns, indptr), shape=(len(tile), COLUMNS))
    for name, owners in tables.items():
        hand = ByHand(owners[parts[rank]])
        before, after = layouts_of(owners, mesh, options.width)
        padded = np.zeros(before.tile_shape)
        padded[: len(tile)] = tile
        first = partial(redistribute, padded, before, after, COMM)
        with_handle = partial(Handle(before, after), padded)
        time_both(f"dense rows {name}", first, with_handle, partial(hand.dense, tile), options.repeat)
        mine = with_handle()[: after.tile_shape_of(rank)[0]]
        assert np.array_equal(mine, hand.dense(tile))
        call = partial(redistribute, matrix, *layouts_of(owners, mesh, COLUMNS), COMM)
        time_both(f"sparse rows {name}", call, call, partial(hand.sparse, matrix), options.repeat)
        assert (call() != hand.sparse(matrix)).nnz == 0


def layouts_of(owners: np.ndarray, mesh: rs.Mesh, width: int) -> tuple[rs.Layout, rs.Layout]:
    shape = len(owners), width
    return rs.Layout.parse(f"f64[{{x}}~{shape[0]}, {width}]", mesh), rs.Layout.from_owners(owners, mesh, shape, "f64")


class Handle:
    """A handle that is prepared when it is first called, so that the first call of the other move plans."""

    def __init__(self, before: rs.Layout, after: rs.Layout) -> None:
        self.ends = before, after

    @cached_property
    def handle(self) -> MoveHandle:
        return prepare(*self.ends, COMM)

    def __call__(self, tile: np.ndarray) -> Any:
        return self.handle(tile)


if __name__ == "__main__":
    main()
