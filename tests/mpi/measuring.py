"""The topics of memory: moves measured by the runtime's own account and by Python's allocator."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from functools import partial

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.mpi import DistArray, redistribute
from reshard.runtime import Account, measure
from reshard.runtime.on_mpi.team import team_of
from reshard.types import Layout, Mesh
from tests.mpi.moving import LIMIT, check_tile, given_tile
from tests.mpi.worker import Case

SLACK = 128 << 10
"""Bytes for Python's own objects, such as requests and views. The tiles have several MiB."""


def together(comm: MPI.Intracomm) -> Iterator[Case]:
    """`measure` collects the accounts that calls on plain and distributed arrays fill anyway."""
    mesh = Mesh(x=comm.size)
    rows = Layout.from_spec(mesh, (24, 36), "float64", [["x"]])
    columns = Layout.from_spec(mesh, (24, 36), "float64", [[], ["x"]])

    def calls() -> None:
        tile, own = given_tile(rows, comm.rank, "float64"), Account("float64")
        with measure() as outer:
            redistribute(tile, rows, columns, comm, memory=own)
            with measure() as inner:
                DistArray.zeros(columns, comm).redistribute(rows)
        redistribute(tile, rows, columns, comm)
        there, back = rs.plan(rows, columns), rs.plan(columns, rows)
        assert outer.calls[0] is own
        assert (len(outer.calls), len(inner.calls)) == (2, 1)
        assert inner.received == {comm.rank: back.received_bytes}
        assert outer.received == {comm.rank: there.received_bytes + back.received_bytes}
        assert inner.peak_bytes <= back.peak_bytes
        assert outer.peak_bytes == max(own.peak_bytes, inner.peak_bytes) <= max(there.peak_bytes, back.peak_bytes)

    yield "calls", calls


def allocated(comm: MPI.Intracomm) -> Iterator[Case]:
    """Numpy allocates no more than the plan promises besides the source, and the account equals the allocations."""
    mesh = Mesh(x=comm.size)
    side = 1024 * comm.size
    rows = Layout.from_spec(mesh, (1024, side), "float64", [["x"]])
    columns = Layout.from_spec(mesh, (1024, side), "float64", [[], ["x"]])
    cyclic = Layout.parse(f"f64[{1024 // (64 * comm.size)}{{x}}64, {side}]", mesh)
    summed = Layout.from_spec(mesh, (1024, 1024), "float64", [[]], unreduced=["x"])
    pieces = Layout.from_spec(mesh, (1024, 1024), "float64", [["x"]])
    tight = rows.tile_bytes + columns.tile_bytes
    for source, target, budget in (
        (rows, columns, None),
        (rows, columns, tight + (1 << 20)),
        (rows, columns, tight + (64 << 10)),
        (cyclic, columns, tight + (1 << 20)),
        (summed, pieces, None),
    ):
        yield f"{source} -> {target} in {budget}", partial(_allocated, comm, source, target, budget)


def _allocated(comm: MPI.Intracomm, source: Layout, target: Layout, budget: int | None) -> None:
    tile = given_tile(source, comm.rank, source.dtype)
    plan = rs.plan(source, target, budget=budget)
    # Each rank is a node of its own, so that nothing lies in shared windows, which Python's allocator does not see.
    # The first call fills the caches of plans and messages; the second team has no buffers yet.
    team_of(comm, nodes=comm.size)
    redistribute(tile, source, target, comm, budget=budget, limit=LIMIT)
    team_of(comm, nodes=comm.size)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        with measure() as measured:
            result = redistribute(tile, source, target, comm, budget=budget, limit=LIMIT)
        grown = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    check_tile(target, comm.rank, result, comm)
    counted = measured.peak_bytes - source.tile_bytes
    assert grown <= plan.peak_bytes - source.tile_bytes + SLACK, f"{grown} allocated, {counted} counted: {plan}"
    assert grown >= counted - SLACK, f"{grown} allocated, {counted} counted: {plan}"
    assert counted >= target.tile_bytes >= 4 * SLACK
    assert measured.peak_bytes <= plan.peak_bytes
    assert np.isfinite(result).all()
