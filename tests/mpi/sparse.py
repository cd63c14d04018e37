"""The topics of sparse matrices by rows, against scipy, which cuts the whole matrix by what layouts mean.

The bytes of an account are compared with those of the rows that a rank lacks: nonzeros and counts, nothing else.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from mpi4py import MPI

from reshard.errors import AgreementError, BudgetError, LayoutError, PlanError, TileError
from reshard.mpi import prepare, redistribute
from reshard.runtime import Account
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.mpi.moving import check_refused
from tests.mpi.worker import Case

ROWS, WIDTH = 9, 5


class OwnRows:
    """A class of the caller's, with what a sparse matrix needs to move."""

    def __init__(self, arrays: tuple[np.ndarray, np.ndarray, np.ndarray], shape: tuple[int, int]) -> None:
        self.data, self.indices, self.indptr = arrays
        self.shape = shape


def moves(comm: MPI.Intracomm) -> Iterator[Case]:
    """Random matrices between random layouts of their rows, on all ranks or some."""
    for seed in range(20) if find_spec("scipy") else ():
        yield f"seed {seed}", partial(_check_move, comm, seed)


def of_jax(comm: MPI.Intracomm) -> Iterator[Case]:
    """The same for jax's matrices, which may have room for more nonzeros than they have."""
    if find_spec("scipy") and find_spec("jax"):
        for kind in ("BCSR", "BCOO"):
            for seed in range(3):
                yield f"{kind}, seed {seed}", partial(_check_move, comm, seed, kind)


def mistakes(comm: MPI.Intracomm) -> Iterator[Case]:
    """What is refused on all ranks, before anything moves, and the same call after a dense one."""
    if not find_spec("scipy"):
        return
    import scipy.sparse as sp

    mesh = Mesh(x=comm.size)
    source = Layout.from_spec(mesh, (ROWS, WIDTH), "float64", [["x"]])
    target = Layout.from_sizes([0] * (comm.size - 1) + [ROWS], mesh, (ROWS, WIDTH), "float64")
    whole = sp.random_array((ROWS, WIDTH), density=0.5, format="csr", rng=np.random.default_rng(1))
    own = whole[_rows(source, comm.rank), :]
    first = comm.rank == 0

    def refused(kind: type[Exception], text: str, tile: Any = own, source: Any = source, **options: Any) -> None:
        end = options.pop("target", target)
        check_refused(comm, kind, lambda: redistribute(tile, source, end, comm, **options), text)

    def after_dense() -> None:
        for _ in range(2):
            redistribute(own.toarray(), source, target, comm, padded=False)
        moved = redistribute(own, source, target, comm)
        assert (moved != whole[_rows(target, comm.rank), :]).nnz == 0
        refused(AgreementError, "different things", own.toarray() if first else own)

    def wide_indices() -> None:
        index = "int64" if first else "int32"
        given = OwnRows((own.data, own.indices.astype(index), own.indptr.astype(index)), own.shape)
        moved = redistribute(given, source, target, comm)
        assert moved.indices.dtype == moved.indptr.dtype == np.int64
        assert np.array_equal(moved.indices, whole[_rows(target, comm.rank), :].indices)

    broken = own.copy()
    broken.indptr = broken.indptr[::-1].copy() if broken.nnz else np.array([1] * (own.shape[0] + 1), np.int32)
    yield "after a dense move", after_dense
    yield "a class of the caller's, with wide indices on one rank", wide_indices
    yield "rows of another rank", lambda: refused(TileError, "this rank has", own[:0] if first else own)
    yield "no matrix", lambda: refused(TileError, "the tile is None", None if first else own)
    yield "columns", lambda: refused(TileError, "tocsr", own.tocsc())
    yield "coordinates", lambda: refused(TileError, "tocsr", own.tocoo() if first else own)
    yield "another dtype", lambda: refused(TileError, "values: the tile is float32", own.astype("f4") if first else own)
    yield "two kinds", lambda: refused(AgreementError, "csr_matrix", sp.csr_matrix(own) if first else own)
    yield "offsets", lambda: refused(TileError, "ascend", broken if first else own)
    yield "out", lambda: refused(PlanError, "out: not for a sparse matrix", out=np.zeros(3))
    yield "budget", lambda: refused(BudgetError, "the smallest that works", budget=20)
    columns = Layout.from_spec(mesh, (ROWS, WIDTH), "float64", [[], ["x"]])
    yield "columns split", lambda: refused(LayoutError, "dim 0 alone", target=columns)
    yield "two shapes", lambda: refused(LayoutError, "global shape", target=Layout.parse("f64[9, 6]", mesh))
    tree = {"a": own}
    yield "in a tree", lambda: refused(TileError, "a call of its own", tree, source)
    handle = prepare(source, target, comm)
    yield "by a handle", lambda: check_refused(comm, TileError, lambda: handle(own), "a call of its own")
    yield "no layout", lambda: refused(LayoutError, "is a int", source=9)


def _check_move(comm: MPI.Intracomm, seed: int, kind: str = "") -> None:
    import scipy.sparse as sp

    choose, numbers = random.Random(seed), np.random.default_rng(seed)
    shape = choose.choice([0, 1, 7, 101, 1009]), choose.choice([1, 5, 40])
    whole: Any = sp.random_array(shape, density=choose.choice([0, 0.1, 0.5]), format="csr", rng=numbers, dtype="f4")
    source, target = (_random_rows(choose, numbers, comm.size, shape) for _ in range(2))
    scipy_kind = choose.choice([sp.csr_array, sp.csr_matrix])
    before, after = (scipy_kind(whole[_rows(layout, comm.rank), :]) for layout in (source, target))
    memory = Account("uint8")
    if kind:
        from jax.experimental import sparse as jax_sparse

        data, columns, indptr = (np.append(each, [0, 0]) for each in (before.data, before.indices, before.indptr))
        columns[-2:], rows = shape[1], np.repeat(np.arange(before.shape[0]), np.diff(before.indptr))
        pairs = np.stack([np.append(rows, [before.shape[0]] * 2), columns], 1)
        given = (data, columns, indptr[:-2]) if kind == "BCSR" else (data, pairs)
        moved = redistribute(getattr(jax_sparse, kind)(given, shape=before.shape), source, target, comm, memory=memory)
        assert type(moved).__name__ == kind
        assert np.array_equal(moved.todense(), after.toarray()), (source, target)
    else:
        moved = redistribute(before, source, target, comm, memory=memory, budget=choose.choice([None, "1MiB"]))
        assert type(moved) is type(after)
        for one, other in ((moved.data, after.data), (moved.indices, after.indices), (moved.indptr, after.indptr)):
            assert np.array_equal(one, other), (source, target)
    assert moved.shape == after.shape
    if "RESHARD_MPI_NODES" in os.environ:
        return  # A rank receives what it passes on inside its node, too.
    lacked = set(_rows(target, comm.rank)) - set(_rows(source, comm.rank))
    index = before.indices.itemsize
    assert memory.received_bytes == sum(int(np.diff(whole.indptr)[row]) * (4 + index) + index for row in lacked)


def _rows(layout: Layout, rank: int) -> list[int]:
    there = rank in layout.mesh.devices
    return [*meaning(layout, rank)[0][: layout.tile_shape_of(rank)[0]]] if there else []


def _random_rows(choose: random.Random, numbers: Any, ranks: int, shape: tuple[int, int]) -> Layout:
    """Rows by owner, in ranges, as even as can be, in equal tiles or on every rank; sometimes on some ranks alone."""
    ids = choose.sample(range(ranks), choose.randint(1, ranks)) if choose.random() < 0.3 else range(ranks)
    mesh, rows, kind = Mesh({"x": len(ids)}, device_ids=ids), shape[0], choose.randrange(4)
    if kind == 0:
        return Layout.from_owners(numbers.integers(0, mesh.size, rows), mesh, shape, "float32")
    if kind == 1:
        inner = sorted(choose.randint(0, rows) for _ in range(mesh.size - 1))
        return Layout.from_ranges([0, *inner, rows], mesh, shape, "float32")
    if kind == 2:
        return Layout.parse(f"f32[{{x}}~{rows}, {shape[1]}]", mesh)
    return Layout.from_spec(mesh, shape, "float32", [choose.choice([["x"], None])])
