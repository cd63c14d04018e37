"""One move on this rank, in a given way, checked against the meaning of the target's layout.

The bytes on the wire are counted by a communicator that inspects its arguments, not by the runtime.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.errors import BudgetError, ReshardError
from reshard.lower.to_mpi import devices_by_id
from reshard.mpi import DistArray, redistribute
from reshard.runtime import Account
from reshard.runtime.on_mpi import direct_moves, prepare
from reshard.runtime.on_mpi.node import arena
from reshard.runtime.on_mpi.team import Team
from reshard.runtime.on_mpi.wire import chunks
from reshard.types import Layout, Mesh
from tests.oracle import PADDING, finished, summands_of, tiles_of

LIMIT = 60.0
TRANSPORTS = ("natural", "read", "stage", "plan")


@dataclass(frozen=True)
class MoveOptions:
    """The options of a move: `shared` moves a DistArray, `order` is the memory order of a plain tile, and runs of
    `long` bytes or more are sent from a datatype.
    """

    way: str = "natural"
    shared: bool = False
    out: bool = False
    donate: bool = False
    budget: int | None = None
    order: str = "C"
    long: int | None = None

    def __str__(self) -> str:
        words = [self.way, "DistArray" if self.shared else self.order]
        words += [name for name in ("out", "donate") if getattr(self, name)]
        words += [f"long={self.long}"] if self.long else []
        return " ".join([*words, *([f"budget={self.budget}"] if self.budget is not None else [])])


def any_options(choose: random.Random, source: Layout, target: Layout) -> MoveOptions:
    way, order = choose.choice(TRANSPORTS), choose.choice(["C", "F", "strided", "reversed"])
    move = MoveOptions(way, choose.random() < 0.4, choose.random() < 0.4, choose.random() < 0.3, None, order)
    move = replace(move, long=choose.choice([None, 16, 64]))
    if move.donate and not move.out and choose.random() < 0.5 and (least := overwriting_budget(source, target)):
        return replace(move, budget=least, order="C")
    return replace(move, budget=any_budget(choose, source, target)) if choose.random() < 0.4 else move


def any_budget(choose: random.Random, source: Layout, target: Layout) -> int:
    """A budget from the smallest possible one, which is the most likely, up to what the move takes without a budget."""
    most = rs.plan(source, target).peak_bytes
    try:
        least = rs.plan(source, target, budget=source.tile_bytes + target.tile_bytes).peak_bytes
    except BudgetError as error:
        least = error.smallest
    return choose.choice([least, choose.randint(min(least, most), most)])


def overwriting_budget(source: Layout, target: Layout) -> int | None:
    """A budget below two tiles that is met by overwriting the source's tile; None if there is none."""
    try:
        plan = rs.plan(source, target, budget=max(0, source.tile_bytes + target.tile_bytes - 1), donate=True)
    except BudgetError:
        return None
    alone = len(plan.steps) == 1 and plan.steps[0].mode.in_place and target.tile_bytes <= source.tile_bytes
    return plan.peak_bytes if alone else None


class CountingComm:
    """A communicator that counts the messages that a rank sends and receives, and their bytes."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.sends = self.receives = self.sent = self.received = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Isend(self, spec: list[Any], to: int, tag: int) -> MPI.Request:
        self.sends, self.sent = self.sends + 1, self.sent + _size_of_message(spec)
        return self._comm.Isend(spec, to, tag)

    def Irecv(self, spec: list[Any], source: int, tag: int) -> MPI.Request:
        self.receives, self.received = self.receives + 1, self.received + _size_of_message(spec)
        return self._comm.Irecv(spec, source, tag)


def _size_of_message(spec: list[Any]) -> int:
    described = isinstance(spec[-1], MPI.Datatype) and spec[-1] != MPI.BYTE
    return spec[-1].Get_size() if described else memoryview(spec[0]).nbytes


@contextmanager
def counting(team: Team) -> Iterator[CountingComm]:
    """Counts the messages of a team."""
    with mock.patch.object(team, "comm", CountingComm(team.comm)) as counted:
        yield counted


@contextmanager
def forced(way: str, scratch: int | None = None) -> Iterator[None]:
    """Moves go this way if possible; reads of short runs go through a buffer of `scratch` bytes."""
    natural = prepare._choose_transport

    def chosen(request: Any, facts: Any, spare: int, judged: Any) -> str:
        if way == "natural" or request.shared:
            return natural(request, facts, spare, judged)
        if (way == "stage" and request.source.tile_bytes > spare) or (way == "read" and not facts.reads):
            return "plan"
        return way

    with ExitStack() as patches:
        for module in (prepare, direct_moves) if scratch else ():
            patches.enter_context(mock.patch.multiple(module, SCRATCH=scratch, STRAIGHT=min(scratch, 16)))
        patches.enter_context(mock.patch.object(prepare, "_choose_transport", chosen))
        patches.callback(prepare._plan_tile.cache_clear)
        prepare._plan_tile.cache_clear()
        yield


@contextmanager
def taking_runs(long: int | None) -> Iterator[None]:
    """MPI packs messages whose runs have at least `long` bytes; None if it packs none."""
    with mock.patch.multiple(chunks, TAKES_RUNS=long is not None, LONG=long):
        yield


def given_tile(layout: Layout, rank: int, dtype: np.dtype | str, order: str = "C") -> np.ndarray:
    tiles = summands_of(layout) if layout.partial else tiles_of(layout)
    return laid(elements(tiles[devices_by_id(layout.mesh)[rank]], np.dtype(dtype)), order)


def elements(index: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Global indices as elements of any dtype; the fields of a structure all have them."""
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
    """The same tile in another memory order."""
    if order in ("C", "F") or not tile.ndim:
        return np.array(tile, order=order if order in ("C", "F") else "C")
    if order == "reversed":
        return np.array(tile[::-1], order="C")[::-1]
    wide = np.full([2 * extent + 1 for extent in tile.shape], -1).astype(tile.dtype)
    into = wide[tuple(slice(1, None, 2) for _ in tile.shape)]
    into[...] = tile
    return into


def check_tile(layout: Layout, rank: int, tile: np.ndarray, comm: MPI.Intracomm) -> None:
    """Asserts that every element of a tile is in its place; a partial array is reduced first."""
    device = devices_by_id(layout.mesh)[rank]
    wanted = tiles_of(layout)[device]
    assert tile.shape == layout.tile_shape, f"shape {tile.shape}"
    if layout.partial:
        tiles = dict(zip(devices_by_id(layout.mesh), comm.allgather(tile), strict=True))
        tile = finished(layout, tiles)[device]
    real = wanted != PADDING
    expected = elements(wanted, tile.dtype)
    assert np.array_equal(tile[real], expected[real]), f"{np.sum(tile[real] != expected[real])} wrong elements"


def check_move(
    comm: MPI.Intracomm,
    team: Team,
    source: Layout,
    target: Layout,
    move: MoveOptions,
    dtype: np.dtype | str | None = None,
) -> None:
    tile = given_tile(source, comm.rank, dtype or source.dtype, move.order)
    before, memory = tile.copy(), Account(source.dtype)
    plan = plan_of(source, target, move)
    options = {"budget": move.budget, "donate": move.donate, "memory": memory, "limit": LIMIT}
    scratch = max(0, plan.peak_bytes - source.tile_bytes - target.tile_bytes) // 2
    mapped_again = mock.patch.object(arena, "WORTHWHILE", 4096)
    with forced(move.way, scratch), taking_runs(move.long), mapped_again, counting(team) as counted:
        if move.shared:
            array = DistArray.empty(source, comm, dtype=tile.dtype, limit=LIMIT)
            array.tile[...] = tile
            tile = array.tile
            out = DistArray.empty(target, comm, dtype=tile.dtype, limit=LIMIT) if move.out else None
            result = array.redistribute(target, out=out, **options).tile
            assert out is None or result is out.tile
        else:
            out = laid(np.full(target.tile_shape, -1).astype(tile.dtype), move.order) if move.out else None
            result = redistribute(tile, source, target, comm, out=out, **options)
            assert out is None or result is out
    assert move.donate or np.array_equal(tile, before), "the source was written to"
    if plan.steps and not move.donate:
        tile[...] = np.zeros((), tile.dtype)  # The call is over: no other rank may still read the tile.
    check_tile(target, comm.rank, result, comm)
    if plan.steps:
        assert move.donate or not np.shares_memory(tile, result)
        check_accounts(comm, plan, memory, counted.received, team, move.order)
    else:
        assert counted.received == 0
        assert (result is tile) == (not move.out and tile.flags.c_contiguous)


def plan_of(source: Layout, target: Layout, move: MoveOptions) -> rs.Plan:
    """The plan of a move: a donated tile is overwritten only if the budget requires it."""
    try:
        return rs.plan(source, target, budget=move.budget)
    except BudgetError:
        assert move.donate
        return rs.plan(source, target, budget=move.budget, donate=True)


def check_accounts(comm: MPI.Intracomm, plan: rs.Plan, memory: Account, wire: int, team: Team, order: str) -> None:
    """Compares the bytes on the wire and in memory with the plan's."""
    device = devices_by_id(plan.source.mesh)[comm.rank]
    received = memory.received[device]
    if team.facts.nodes == tuple(range(comm.size)) and not plan.source.partial:
        assert wire == received, f"{wire} B on the wire, {received} B in the account"
    most = comm.allreduce(received, MPI.MAX)
    assert most <= plan.received_bytes, f"{most} received: {plan}"
    if plan.source.even and plan.target.even and not plan.source.partial:
        assert most == plan.received_bytes, f"{most} received: {plan}"
    # Tiles that are not C-ordered are packed for a reduction; plans do not count that.
    more = plan.source.tile_bytes if plan.source.partial and order != "C" else 0
    if order == "reversed":  # MPI takes none: one message in each direction is packed, without a buffer of the plan.
        more += plan.source.tile_bytes + plan.target.tile_bytes
    assert memory.peak_bytes <= plan.peak_bytes + more, f"{memory.peak_bytes} live: {plan}"


def caught_by(call: Callable[[], Any]) -> Exception | None:
    """The error that a call raises on this rank; None if it raises none."""
    try:
        call()
    except Exception as error:
        return error
    return None


def check_refused(
    comm: MPI.Intracomm, kind: type[Exception], call: Callable[[], Any], text: str = "", alike: bool = True
) -> Exception:
    """Asserts that all ranks raise an error of this kind that contains a text, soon, and the same one if `alike`."""
    start = time.monotonic()
    caught = caught_by(call)
    raised = comm.allgather((type(caught).__name__, str(caught), time.monotonic() - start))
    assert caught is not None and (type(caught) is kind or (kind is ReshardError and isinstance(caught, kind))), raised
    assert len({each[:2] for each in raised}) == 1 or not alike, raised
    assert text in str(caught), raised
    assert max(seconds for *_, seconds in raised) < LIMIT / 2, raised
    return caught


def slabs(comm: MPI.Intracomm, dtype: str = "int32") -> tuple[Layout, Layout]:
    """A square matrix by rows and by columns."""
    mesh, side = Mesh(x=comm.size), 2 * comm.size
    return tuple(Layout.from_spec(mesh, (side, side), dtype, spec) for spec in ([["x"]], [[], ["x"]]))
