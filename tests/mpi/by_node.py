"""The topics of messages that are joined by node: on pretended nodes of several ranks each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.errors import RankError
from reshard.lower.to_mpi import most_stripes
from reshard.mpi import redistribute, schedule_figures
from reshard.runtime import Account
from reshard.runtime.on_mpi import prepare
from reshard.runtime.on_mpi.copies.stream_copy import copy_views
from reshard.runtime.on_mpi.node.arena import Arena
from reshard.runtime.on_mpi.team import Team, team_of
from reshard.runtime.on_mpi.wire import by_node, chunks
from reshard.types import Layout, Mesh
from tests.layouts import SIZES, random_layout
from tests.mpi.cases import MESHES
from tests.mpi.crossing import check_result
from tests.mpi.moving import LIMIT, MoveOptions, any_options, caught_by, check_move, check_tile, counting, given_tile
from tests.mpi.worker import Case


@contextmanager
def joining(handling: float = 1.0) -> Iterator[None]:
    """A message costs so many seconds: with one, messages between nodes are joined wherever there is room."""
    with mock.patch.multiple(by_node, _HANDLING=handling, _WAITS=0.0 if handling else 1.0):
        prepare._plan_tile.cache_clear()
        yield
    prepare._plan_tile.cache_clear()


def joined(comm: MPI.Intracomm) -> Iterator[Case]:
    """All of them, since to start ranks takes longer."""
    yield from moves(comm)
    yield from counted(comm)
    yield from failing(comm)


def moves(comm: MPI.Intracomm) -> Iterator[Case]:
    """Pairs of layouts of every kind, in all memory orders, with budgets and without, joined wherever possible."""
    for nodes in sorted({2, comm.size // 2}):
        team, choose = team_of(comm, nodes=nodes), random.Random(nodes)
        for at in range(20):
            shape = [choose.choice(SIZES) for _ in range(choose.randint(1, 3))]
            mesh = choose.choice(MESHES[comm.size])
            other = choose.choice([each for each in MESHES[comm.size] if set(each.devices) == set(mesh.devices)])
            source, target = random_layout(choose, mesh, shape, "int32"), random_layout(choose, other, shape, "int32")
            move = any_options(choose, source, target)
            name = f"{at}: {source} -> {target} on {source.mesh!r}, {target.mesh}, {nodes} nodes, {move}"
            # In every other move, what goes to a rank is several messages, as it is where tiles are large.
            longest = 16 if at % 2 else chunks.UNBUFFERED
            yield name, partial(_moved, comm, team, source, target, move, longest)


def _moved(comm: MPI.Intracomm, team: Team, source: Layout, target: Layout, move: MoveOptions, longest: int) -> None:
    """The ranks find out when they make the call whether there is room."""
    cuts = mock.patch.object(chunks, "UNBUFFERED", longest)
    with mock.patch.object(prepare, "is_aggregated", lambda *_: True), cuts:
        prepare._plan_tile.cache_clear()
        check_move(comm, team, source, target, move)
    prepare._plan_tile.cache_clear()


def ends(comm: MPI.Intracomm) -> dict[str, tuple[Layout, Layout]]:
    """Moves of many messages: of all ranks, from half of them to the others, and to one."""
    mesh, half = Mesh(x=comm.size), comm.size // 2
    trainer, server = Mesh(t=half), Mesh({"s": half}, device_ids=range(half, comm.size))

    def pair(one: Mesh, other: Mesh, before: list[list[str]], after: list[list[str]]) -> tuple[Layout, Layout]:
        shape = (3 * comm.size - 1, 2 * comm.size, 3)
        return Layout.from_spec(one, shape, "int32", before), Layout.from_spec(other, shape, "int32", after)

    return {
        "slabs": pair(mesh, mesh, [["x"]], [[], ["x"]]),
        "replicated": pair(mesh, mesh, [["x"]], []),
        "other ranks": pair(trainer, server, [["t"]], [[], ["s"]]),
        "to one": pair(mesh, Mesh(one=1), [[], ["x"]], []),
    }


def counted(comm: MPI.Intracomm) -> Iterator[Case]:
    """As many messages as `schedule_figures` says, and fewer than without joining; bytes and memory as promised."""
    for nodes in sorted({2, comm.size // 2}):
        for name, (source, target) in ends(comm).items():
            yield f"{name}, {nodes} nodes", partial(_counted, comm, team_of(comm, nodes=nodes), source, target, nodes)


def _counted(comm: MPI.Intracomm, team: Team, source: Layout, target: Layout, nodes: int) -> None:
    tile = given_tile(source, comm.rank, "int32") if comm.rank in source.mesh.devices else None
    plan, sends = rs.plan(source, target), dict[tuple[bool, int | None], int]()
    for joins in (False, True):
        for budget in (None, plan.peak_bytes, plan.peak_bytes + (64 << 10)):
            memory = Account("int32")
            with joining(1.0 if joins else 0.0), counting(team) as messages:
                result = redistribute(tile, source, target, comm, budget=budget, memory=memory)
                figures = schedule_figures(source, target, rank=comm.rank, nodes=team.nodes, budget=budget)
            sends[joins, budget] = comm.allreduce(messages.sends, MPI.MAX)
            assert (messages.sends, messages.receives) == figures[2:], f"{joins}, {budget}: {figures}"
            check_result(target, comm.rank, result)
            assert memory.peak_bytes <= plan.peak_bytes
            assert memory.received_bytes <= plan.received_bytes
    assert sends[True, None] <= most_stripes(team.nodes), sends
    assert sends[True, None] < sends[False, None], sends


def failing(comm: MPI.Intracomm) -> Iterator[Case]:
    """A rank that fails, or has no memory: `out` is as it was, or all of it is there."""
    source, target = ends(comm)["slabs"]
    yield "a rank fails while it packs", partial(_failed, comm, source, target)
    yield "a node has no memory", partial(_without_memory, comm, source, target)


def _failed(comm: MPI.Intracomm, source: Layout, target: Layout) -> None:
    team_of(comm, nodes=2)
    tile, out = given_tile(source, comm.rank, "int32"), np.full(target.tile_shape, -7, "int32")

    def fails(_: object) -> None:
        raise ZeroDivisionError("no")

    with joining(), mock.patch.object(by_node, "copy_views", fails if comm.rank == 1 else copy_views):
        caught = caught_by(lambda: redistribute(tile, source, target, comm, out=out, limit=LIMIT))
    assert type(caught) is (ZeroDivisionError if comm.rank == 1 else RankError), caught
    assert (out == -7).all()
    with joining():
        redistribute(tile, source, target, comm, out=out, limit=LIMIT)
    check_tile(target, comm.rank, out, comm)


def _without_memory(comm: MPI.Intracomm, source: Layout, target: Layout) -> None:
    team, take = team_of(comm, nodes=2), Arena.take
    needed: list[int] = []

    def no_room(arena: Arena, nbytes: int, *given: Any) -> int:
        needed.append(nbytes)
        return 0 if team.nodes[comm.rank] else take(arena, nbytes, *given)

    tile = given_tile(source, comm.rank, "int32")
    with joining(), mock.patch.object(Arena, "take", no_room), counting(team) as messages:
        result = redistribute(tile, source, target, comm, limit=LIMIT)
    assert needed and messages.sends > 1
    check_tile(target, comm.rank, result, comm)
