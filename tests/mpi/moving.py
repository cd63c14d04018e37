"""One move on this rank, in one of the ways that it can go, checked against what the target's layout means.

The bytes on the wire are counted by a communicator that looks at what it is given, not by the runtime.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.errors import BudgetError
from reshard.lower.to_mpi import ranks
from reshard.mpi import DistArray, redistribute
from reshard.runtime import Account
from reshard.runtime.on_mpi import prepare
from reshard.runtime.on_mpi.node import cma_read, huge_pages
from reshard.runtime.on_mpi.team import Team
from reshard.runtime.on_mpi.wire import datatypes
from reshard.types import Layout
from tests.oracle import PADDING, finished, summands_of, tiles_of

LIMIT = 30.0
WAYS = ("natural", "read", "stage", "plan")


@dataclass(frozen=True)
class How:
    """What a move is asked for; `shared` moves a DistArray, `order` is how its plain tile lies in memory, and MPI is
    given runs of `long` bytes and more as they lie there.
    """

    way: str = "natural"
    shared: bool = False
    out: bool = False
    donate: bool = False
    budget: int | None = None
    order: str = "C"
    long: int | None = None

    def __str__(self) -> str:
        said = [self.way, "DistArray" if self.shared else self.order]
        said += [name for name in ("out", "donate") if getattr(self, name)]
        said += [f"long={self.long}"] if self.long else []
        return " ".join([*said, *([f"budget={self.budget}"] if self.budget is not None else [])])


def any_how(choose: random.Random, source: Layout, target: Layout) -> How:
    way, order = choose.choice(WAYS), choose.choice(["C", "F", "strided", "reversed"])
    how = How(way, choose.random() < 0.4, choose.random() < 0.4, choose.random() < 0.3, None, order)
    how = replace(how, long=choose.choice([None, 16, 64]))
    if how.donate and not how.out and choose.random() < 0.5 and (least := overwriting_budget(source, target)):
        return replace(how, budget=least, order="C")
    return replace(how, budget=any_budget(choose, source, target)) if choose.random() < 0.4 else how


def any_budget(choose: random.Random, source: Layout, target: Layout) -> int:
    """Between the smallest that can be met, which is the likeliest, and what the move takes without one."""
    most = rs.plan(source, target).peak_bytes
    try:
        least = rs.plan(source, target, budget=source.tile_bytes + target.tile_bytes).peak_bytes
    except BudgetError as error:
        least = error.smallest
    return choose.choice([least, choose.randint(min(least, most), most)])


def overwriting_budget(source: Layout, target: Layout) -> int | None:
    """A budget below two tiles, if one can be met in the memory of one."""
    try:
        plan = rs.plan(source, target, budget=max(0, source.tile_bytes + target.tile_bytes - 1), donate=True)
    except BudgetError:
        return None
    alone = len(plan.steps) == 1 and plan.steps[0].mode.in_place and target.tile_bytes <= source.tile_bytes
    return plan.peak_bytes if alone else None


class CountingComm:
    """A communicator that counts the bytes of the messages that it is asked to receive."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.received = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Irecv(self, spec: list[Any], source: int, tag: int) -> MPI.Request:
        described = isinstance(spec[-1], MPI.Datatype) and spec[-1] != MPI.BYTE
        self.received += spec[-1].Get_size() if described else memoryview(spec[0]).nbytes
        return self._comm.Irecv(spec, source, tag)


@contextmanager
def counting(team: Team) -> Iterator[CountingComm]:
    comm, counted = team.comm, CountingComm(team.comm)
    team.comm = counted
    try:
        yield counted
    finally:
        team.comm = comm


@contextmanager
def forced(way: str, scratch: int | None = None) -> Iterator[None]:
    """Moves go this way wherever it is possible, with a buffer of so many bytes for reading short runs."""
    natural = prepare._way

    def chosen(request: Any, facts: Any, spare: int, judged: Any) -> str:
        if way == "natural" or request.shared:
            return natural(request, facts, spare, judged)
        if (way == "stage" and request.source.tile_bytes > spare) or (way == "read" and not facts.reads):
            return "plan"
        return way

    with ExitStack() as patches:
        for module in (prepare, cma_read) if scratch else ():
            patches.enter_context(mock.patch.multiple(module, SCRATCH=scratch, STRAIGHT=min(scratch, 16)))
        patches.enter_context(mock.patch.object(prepare, "_way", chosen))
        patches.callback(prepare._prepared.cache_clear)
        prepare._prepared.cache_clear()
        yield


@contextmanager
def taking_runs(long: int | None) -> Iterator[None]:
    """MPI is given runs of so many bytes as they lie in a tile, if any."""
    with mock.patch.multiple(datatypes, TAKES_RUNS=long is not None, LONG=long):
        yield


def given_tile(layout: Layout, rank: int, dtype: np.dtype | str, order: str = "C") -> np.ndarray:
    tiles = summands_of(layout) if layout.partial else tiles_of(layout)
    return laid(elements(tiles[ranks(layout.mesh)[rank]], np.dtype(dtype)), order)


def elements(index: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Global indices as elements of any dtype, those of complex numbers and structures in each part."""
    if dtype.names:
        made = np.zeros(index.shape, dtype)
        for name in dtype.names:
            made[name] = index.reshape(index.shape + (1,) * len(dtype[name].shape))
        return made
    if dtype.kind == "c":
        return (index - 2j * index).astype(dtype)
    if dtype.kind == "b":
        return index % 3 == 0
    return index.astype(dtype)


def laid(tile: np.ndarray, order: str) -> np.ndarray:
    """The same tile, otherwise in memory."""
    if order in ("C", "F") or not tile.ndim:
        return np.array(tile, order=order if order in ("C", "F") else "C")
    if order == "reversed":
        return np.array(tile[::-1], order="C")[::-1]
    wide = np.full([2 * extent + 1 for extent in tile.shape], -1).astype(tile.dtype)
    into = wide[tuple(slice(1, None, 2) for _ in tile.shape)]
    into[...] = tile
    return into


def check_tile(layout: Layout, rank: int, tile: np.ndarray, comm: MPI.Intracomm) -> None:
    """That every element of a tile is in its place; what is still partial is summed up first."""
    device = ranks(layout.mesh)[rank]
    wanted = tiles_of(layout)[device]
    assert tile.shape == layout.tile_shape, f"shape {tile.shape}"
    if layout.partial:
        tiles = dict(zip(ranks(layout.mesh), comm.allgather(tile), strict=True))
        tile = finished(layout, tiles)[device]
    real = wanted != PADDING
    expected = elements(wanted, tile.dtype)
    assert np.array_equal(tile[real], expected[real]), f"{np.sum(tile[real] != expected[real])} wrong elements"


def check_move(
    comm: MPI.Intracomm, team: Team, source: Layout, target: Layout, how: How, dtype: np.dtype | str | None = None
) -> None:
    tile = given_tile(source, comm.rank, dtype or source.dtype, how.order)
    before, memory = tile.copy(), Account(source.dtype)
    plan = plan_of(source, target, how)
    options = {"budget": how.budget, "donate": how.donate, "memory": memory, "limit": LIMIT}
    scratch = max(0, plan.peak_bytes - source.tile_bytes - target.tile_bytes) // 2
    mapped_again = mock.patch.object(huge_pages, "WORTHWHILE", 4096)
    with forced(how.way, scratch), taking_runs(how.long), mapped_again, counting(team) as counted:
        if how.shared:
            array = DistArray.empty(source, comm, dtype=tile.dtype, limit=LIMIT)
            array.tile[...] = tile
            tile = array.tile
            out = DistArray.empty(target, comm, dtype=tile.dtype, limit=LIMIT) if how.out else None
            result = array.redistribute(target, out=out, **options).tile
            assert out is None or result is out.tile
        else:
            out = laid(np.full(target.tile_shape, -1).astype(tile.dtype), how.order) if how.out else None
            result = redistribute(tile, source, target, comm, out=out, **options)
            assert out is None or result is out
    assert how.donate or np.array_equal(tile, before), "the source was written to"
    if plan.steps and not how.donate:
        tile[...] = np.zeros((), tile.dtype)  # The call is over: nobody may still read it.
    check_tile(target, comm.rank, result, comm)
    if plan.steps:
        assert how.donate or not np.shares_memory(tile, result)
        check_accounts(comm, plan, memory, counted.received, team, how.order)
    else:
        assert counted.received == 0
        assert (result is tile) == (not how.out and tile.flags.c_contiguous)


def plan_of(source: Layout, target: Layout, how: How) -> rs.Plan:
    """What a move promises: a donated tile is overwritten only where the budget asks for it."""
    try:
        return rs.plan(source, target, budget=how.budget)
    except BudgetError:
        assert how.donate
        return rs.plan(source, target, budget=how.budget, donate=True)


def check_accounts(comm: MPI.Intracomm, plan: rs.Plan, memory: Account, wire: int, team: Team, order: str) -> None:
    """Bytes on the wire and in memory, beside the plan's."""
    device = ranks(plan.source.mesh)[comm.rank]
    received = memory.received[device]
    if team.facts.nodes == tuple(range(comm.size)) and not plan.source.partial:
        assert wire == received, f"{wire} B on the wire, {received} B in the account"
    most = comm.allreduce(received, MPI.MAX)
    assert most <= plan.received_bytes, f"{most} received: {plan}"
    if plan.source.even and plan.target.even and not plan.source.partial:
        assert most == plan.received_bytes, f"{most} received: {plan}"
    # Tiles that are not C-ordered are packed for a reduction, which a plan does not foresee.
    more = plan.source.tile_bytes if plan.source.partial and order != "C" else 0
    assert memory.peak_bytes <= plan.peak_bytes + more, f"{memory.peak_bytes} live: {plan}"
