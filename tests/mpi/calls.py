"""The topics of whole calls and of the team: the modules of `reshard.runtime.on_mpi` above windows and messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.mpi import DistArray, redistribute
from reshard.mpi.measurements import measure_link
from reshard.plans.plan import StepSpec, chain
from reshard.runtime import Account
from reshard.runtime.on_mpi.run_plan import rank_plan, run_plan
from reshard.runtime.on_mpi.team import Team, Watch
from reshard.runtime.on_mpi.window_tiles import WindowTile
from reshard.types import Layout, Mesh
from tests.mpi.modules import new_call
from tests.mpi.moving import LIMIT, caught_by, check_tile, given_tile
from tests.mpi.worker import Case


def plans(comm: MPI.Intracomm) -> Iterator[Case]:
    """Plans of several steps: the source stays as it is, and buffers between steps are given back."""
    mesh = Mesh(x=2, y=2)
    for before, after in (
        ("[{x}{y}4, 16]", "[16, {x}{y}4]"),
        ("[{x}8, 8, 4] + sum{y}", "[16, {x}4, {y}2]"),
        ("[{x}8, 16]", "[{x}8, 16]"),
        ("[{x}5/9, {y}4/7]", "[{y}5/9, {x}4/7]"),
        # Sums that are started, alone and after other steps.
        ("[{x}8, 4]", "[16, 4] + sum{x}"),
        ("[{x}5/9, {y}4/7]", "[9, 7] + max{x}{y}"),
        ("[{x}8, 4]", "[{y}8, 4] + product{x}"),
        ("[{x}8, 4]", "[16, 4] + min{y}"),
        ("[16, 4] + sum{x}", "[16, 4] + sum{y}"),
    ):
        source, target = (Layout.parse(f"s64{text}", mesh) for text in (before, after))
        yield f"{source} -> {target}", partial(_ran, comm, rs.plan(source, target))
    ends = [Layout.parse(f"s64{text}", mesh) for text in ("[{x}8, 16]", "[16, {x}8]", "[16, 16]", "[{y}8, 16]")]
    steps = [StepSpec(kind, end) for kind, end in zip(("all_to_all", "all_gather", "slice"), ends[1:], strict=True)]
    yield "three steps", partial(_ran, comm, chain(ends[0], ends[-1], steps))


def _ran(comm: MPI.Intracomm, plan: rs.Plan) -> None:
    call, source, target = new_call(comm), plan.source, plan.target
    tile = given_tile(source, comm.rank, "int64")
    before = tile.copy()
    placed: list[np.ndarray] = []

    def place() -> WindowTile:
        placed.append(np.full(target.tile_shape, -5))
        return WindowTile(placed[-1])

    call.memory.take(comm.rank, tile.size)
    result = run_plan(call, rank_plan(plan, comm.rank, comm.size, 8), tile, place)
    assert len(placed) == 1
    assert result.tile is placed[0]
    assert np.array_equal(tile, before)
    check_tile(target, comm.rank, result.tile, comm)
    assert call.memory.live[comm.rank] == source.tile_bytes + target.tile_bytes
    assert call.memory.peak_bytes <= max(plan.peak_bytes, source.tile_bytes + target.tile_bytes)


def global_arrays(comm: MPI.Intracomm) -> Iterator[Case]:
    """From one rank to all and back, for even and uneven tiles, replicas and any root."""
    mesh = Mesh(x=comm.size)
    texts = ("[{x}5/13, 3]", "[7, 3]", "[7, 2{x}2/11]", "[]", "[{x}1/1]")
    for text, root in itertools.product(texts, (0, comm.size - 1, None)):
        yield f"{text} from {root}", partial(_there_and_back, comm, Layout.parse(f"s64{text}", mesh), root)


def _there_and_back(comm: MPI.Intracomm, layout: Layout, root: int | None) -> None:
    array = np.arange(int(np.prod(layout.shape))).reshape(layout.shape)
    array = np.array(array, order="F")
    scattered = DistArray.from_global(array if root in (comm.rank, None) else None, layout, comm, root)
    check_tile(layout, comm.rank, scattered.tile, comm)
    to = root or 0
    back = scattered.to_global(to)
    assert (back is not None) == (comm.rank == to)
    if back is not None:
        assert np.array_equal(back, array)
        # Neither is the memory of the other, nor of what was given.
        back[...] = -1
    check_tile(layout, comm.rank, scattered.tile, comm)
    scattered.tile[...] = -2
    assert array.size == 0 or array.max() == array.size - 1


def measurements(comm: MPI.Intracomm) -> Iterator[Case]:
    """Pairs within a node and between nodes, if there are any."""

    def measured() -> None:
        for nodes, near in itertools.product((1, comm.size), (True, False)):
            team = Team(comm, nodes, LIMIT)
            link = measure_link(team, Watch(team, LIMIT), near)
            assert (link is not None) == (near == (nodes == 1)), (nodes, near)
            assert len(set(comm.allgather(link))) == 1
            assert link is None or 0 < link.latency < 1
            assert link is None or 1e6 < link.bandwidth < 1e13

    yield "pairs", measured


def moves(comm: MPI.Intracomm) -> Iterator[Case]:
    """What a call returns: the tile itself, `out`, a new tile with clear padding, or the donated memory."""
    mesh = Mesh(x=comm.size)
    rows = Layout.from_spec(mesh, (4 * comm.size, 2 * comm.size), "int64", [["x"]])
    columns = Layout.from_spec(mesh, rows.shape, "int64", [[], ["x"]])
    flat, uneven = (Layout.from_spec(mesh, (3 * comm.size - 1,), "int64", spec) for spec in ([], [["x"]]))

    def moved(target: Layout, out: Any = None, source: Layout = rows, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        tile, memory = given_tile(source, comm.rank, "int64"), Account("int64")
        result = redistribute(tile, source, target, comm, out=out, memory=memory, limit=LIMIT, **options)
        check_tile(target, comm.rank, result, comm)
        assert memory.peak_bytes <= options.get("budget", 1 << 20)
        return tile, result

    def into_out() -> None:
        tile, result = moved(rows)
        assert result is tile
        for target in (columns, rows):
            out = np.full(target.tile_shape, -5)
            assert moved(target, out)[1] is out

    def padding() -> None:
        # Dirty windows, which are used again.
        for _ in range(3):
            moved(uneven, source=flat)[1][...] = -9
        _, result = moved(uneven, source=flat)
        real = flat.shape[0] - 3 * comm.rank
        assert result.shape == (3,)
        assert (result[max(0, real) :] == 0).all()

    def donated() -> None:
        tile, result = moved(columns, budget=rows.tile_bytes + columns.tile_bytes - 1, donate=True)
        assert np.shares_memory(tile, result)

    yield "into out", into_out
    yield "padding", padding
    yield "donated", donated


def teams(comm: MPI.Intracomm) -> Iterator[Case]:
    """What ranks know of each other, whether on one node or on several."""

    def synced(nodes: int) -> None:
        team, watch = _team(nodes)
        assert team.nodes == tuple(rank * nodes // comm.size for rank in range(comm.size))
        assert team.members == tuple(rank for rank in range(comm.size) if team.near(rank, comm.rank))
        assert team.one_node == (nodes == 1)
        assert len(set(comm.allgather(team.facts))) == 1
        assert team.sync(watch, 5, [comm.rank, 7])
        assert team.posted() == [[member, 7] for member in team.members]
        assert not team.sync(watch, comm.rank)
        assert not team.sync(watch, -1 if comm.rank == 0 else 5)
        for plain in (True, False):
            team.sync(watch, 0, plain=plain or comm.rank != 1)
            assert team.plain == plain
        assert team.gather(watch, [comm.rank]) == [[member] for member in team.members]

    def groups(nodes: int) -> None:
        team, _ = _team(nodes)
        turned = tuple(range(comm.size))[::-1]
        group = team.group(turned)
        assert group.rank == comm.size - 1 - comm.rank
        assert team.group(turned) is group
        assert team.group(tuple(range(comm.size))) is team.comm

    def failures(nodes: int) -> None:
        team, watch = _team(nodes)
        watch.look()
        comm.Barrier()
        if comm.rank == 1:
            team.fail("Odd: no memory left")
            assert team.broken
        comm.Barrier()
        caught = str(caught_by(lambda: watch.until(lambda: False)))
        assert "one failed: rank 1: Odd: no memory left" in caught, caught

    def late(nodes: int) -> None:
        team, _ = _team(nodes)
        text = str(caught_by(lambda: Watch(team, 0.05).until(lambda: False)))
        assert f"rank {comm.rank} waited longer than 0.05 s" in text, text

    def _team(nodes: int) -> tuple[Team, Watch]:
        team = Team(comm, nodes, LIMIT)
        return team, Watch(team, LIMIT)

    for nodes in (1, 2, comm.size):
        for case in (synced, groups, failures, late):
            yield f"{case.__name__}, {nodes} nodes", partial(case, nodes)
