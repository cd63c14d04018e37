"""Moves between two sets of ranks, checked against the meaning of the target's layout on every rank.

What each rank receives and holds live is compared with the plan, with what the numpy runtime counts for the same plan,
and with the messages that MPI is given.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.errors import AgreementError, BudgetError, PlanError, RankError, TileError
from reshard.geometry.figures import count_sent_across
from reshard.geometry.holders import count_lacked
from reshard.geometry.relay import relay_messages
from reshard.mpi import DistArray, redistribute
from reshard.runtime import Account
from reshard.runtime.on_mpi.team import Team, team_of
from reshard.types import Layout, Mesh
from tests.layouts import SIZES, random_layout
from tests.mpi.moving import (
    LIMIT,
    CountingComm,
    MoveOptions,
    any_budget,
    check_refused,
    counting,
    elements,
    forced,
    laid,
)
from tests.mpi.worker import Case
from tests.oracle import PADDING, summands_of, tiles_of

SIZES_OF_SETS = {2: [(1, 2), (2, 1), (1, 1)], 3: [(2, 3), (3, 1), (2, 2)], 4: [(4, 2), (2, 4), (2, 2), (3, 2)]}
SIZES_OF_SETS |= {6: [(4, 2), (2, 6), (3, 3), (4, 4)], 8: [(4, 2), (2, 6), (3, 5), (8, 4), (6, 6)]}


# ---- moves ---------------------------------------------------------------------------------------------------


def moves(comm: MPI.Intracomm) -> Iterator[Case]:
    """Random layouts on random sets of ranks, in every way, on one node, on two, and on one node per rank."""
    choose = random.Random(comm.size)
    for nodes in sorted({1, min(2, comm.size), comm.size}):
        team = team_of(comm, nodes=nodes)
        for at in range(60):
            source, target = random_ends(choose, comm.size, at % 6 == 5)
            move = _any_options(choose, source, target)
            name = f"{at}: {source} on {source.mesh!r} -> {target} on {target.mesh!r}, {nodes} nodes, {move}"
            yield name, partial(check_crossing, comm, team, source, target, move, padded=at % 4 > 0)


def moves_sampled(comm: MPI.Intracomm) -> Iterator[Case]:
    """A sample of these cases, for the fast tier."""
    yield from islice(moves(comm), None, None, 5)


def random_ends(choose: random.Random, size: int, partial_too: bool) -> tuple[Layout, Layout]:
    """Two random layouts of one array, on any two sets of ranks: disjoint, overlapping, nested or equal."""
    shape = [choose.choice(SIZES) for _ in range(choose.choice([0, 1, 2, 2, 3, 3]))]
    dtype = choose.choice(["int32", "int32", "float64"])
    one, other = choose.choice(SIZES_OF_SETS[size])
    source = random_layout(choose, _any_mesh(choose, size, one), shape, dtype, partial_too)
    return source, random_layout(choose, _any_mesh(choose, size, other), shape, dtype)


def _any_mesh(choose: random.Random, size: int, count: int) -> Mesh:
    """A mesh of so many ranks, in any order."""
    cut = choose.choice([k for k in range(1, count + 1) if count % k == 0])
    return Mesh({"x": cut, "y": count // cut}, device_ids=choose.sample(range(size), count))


def _any_options(choose: random.Random, source: Layout, target: Layout) -> MoveOptions:
    way = choose.choice(["natural", "natural", "read", "stage", "plan"])
    order = choose.choice(["C", "F", "strided", "reversed"])
    budget = any_budget(choose, source, target) if choose.random() < 0.4 else None
    return MoveOptions(way, choose.random() < 0.4, choose.random() < 0.4, False, budget, order)


def tile_on(layout: Layout, rank: int, order: str = "C") -> np.ndarray | None:
    """The tile that a rank has of a layout whose device ids are ranks: elements are their global indices."""
    tiles = summands_of(layout) if layout.partial else tiles_of(layout)
    return laid(elements(tiles[rank], np.dtype(layout.dtype)), order) if rank in tiles else None


def check_result(layout: Layout, rank: int, result: np.ndarray | None, padded: bool = True) -> None:
    """Asserts that a rank has what the layout demands: nothing, or every element in its place."""
    wanted = tiles_of(layout).get(rank)
    assert (result is None) == (wanted is None), f"{result} on rank {rank} of {layout.mesh!r}"
    if result is None or wanted is None:
        return
    if not padded:
        wanted = wanted[tuple(map(slice, layout.tile_shape_of(rank)))]
    assert result.shape == wanted.shape and result.dtype == np.dtype(layout.dtype), (result.shape, result.dtype)
    real = wanted != PADDING
    assert np.array_equal(result[real], wanted[real].astype(layout.dtype)), f"{result} instead of {wanted}"


def check_crossing(
    comm: MPI.Intracomm, team: Team, source: Layout, target: Layout, move: MoveOptions, padded: bool = True
) -> None:
    rank, memory, padded = comm.rank, Account(source.dtype), padded or move.shared or move.budget is not None
    plan = rs.plan(source, target, budget=move.budget)
    tile = tile_on(source, rank, move.order)
    before = None if tile is None else tile.copy()
    options: dict[str, Any] = {"budget": move.budget, "memory": memory, "limit": LIMIT}
    with forced(move.way), counting(team) as counted:
        if move.shared:
            result = _moved_array(comm, source, target, move, tile, options)
        else:
            result = _moved_tile(comm, source, target, move, tile, options, padded)
    most = comm.allreduce(memory.received[rank], MPI.MAX)  # Before a rank fails alone.
    if tile is not None and before is not None:
        assert np.array_equal(tile, before), "the source was written to"
        if plan.steps and not move.shared:
            tile[...] = 0  # The call is over: no other rank may still read the tile.
    check_result(target, rank, result, padded)
    _check_accounts(comm, team, plan, memory, most, counted, move)


def _moved_tile(
    comm: MPI.Intracomm,
    source: Layout,
    target: Layout,
    move: MoveOptions,
    tile: np.ndarray | None,
    options: dict[str, Any],
    padded: bool,
) -> np.ndarray | None:
    out = None
    if move.out and comm.rank in target.mesh.devices:
        shape = target.tile_shape if padded else target.tile_shape_of(comm.rank)
        out = laid(np.full(shape, -1).astype(target.dtype), move.order)
    result = redistribute(tile, source, target, comm, out=out, padded=padded, **options)
    assert out is None or result is out
    return result


def _moved_array(
    comm: MPI.Intracomm,
    source: Layout,
    target: Layout,
    move: MoveOptions,
    tile: np.ndarray | None,
    options: dict[str, Any],
) -> np.ndarray | None:
    array = DistArray.empty(source, comm, limit=LIMIT)
    assert array.has_tile == (tile is not None)
    if tile is not None:
        array.tile[...] = tile
    out = DistArray.empty(target, comm, limit=LIMIT) if move.out else None
    moved = array.redistribute(target, out=out, **options)
    assert moved.layout == target and (out is None or moved is out)
    return moved.tile if moved.has_tile else None


def _check_accounts(
    comm: MPI.Intracomm, team: Team, plan: rs.Plan, memory: Account, most: int, counted: CountingComm, move: MoveOptions
) -> None:
    received = memory.received[comm.rank]
    assert most <= plan.received_bytes, f"{most} received: {plan}"
    more = plan.source.tile_bytes if plan.source.partial and move.order != "C" else 0
    more += 0 if plan.steps else plan.target.tile_bytes  # A copy of what is there already.
    if (
        move.order == "reversed"
    ):  # MPI takes none: one message in each direction is packed, without a buffer of the plan.
        more += plan.source.tile_bytes + plan.target.tile_bytes
    assert memory.peak_bytes <= plan.peak_bytes + more, f"{memory.peak_bytes} live: {plan}"
    if plan.source.partial or any(step.kind != "exchange" for step in plan.steps):
        return
    if team.facts.nodes == tuple(range(comm.size)):
        assert counted.received == received, f"{counted.received} B on the wire, {received} in the account"
    if plan.crosses and plan.steps and (len(plan.steps) == 1 or (move.way == "natural" and move.budget is None)):
        wanted = count_lacked(plan.source, plan.target).on(plan.target.mesh.devices).get(comm.rank, 0)
        assert received == plan.source.nbytes(wanted), f"{received} received, {wanted} elements lacking: {plan}"
        if team.facts.nodes == tuple(range(comm.size)):
            sent = _sent(plan).get(comm.rank, 0)
            assert counted.sent == plan.source.nbytes(sent), f"{counted.sent} sent, not {sent} elements: {plan}"


def _sent(plan: rs.Plan) -> Mapping[int, int]:
    """The elements that each rank sends in a plan of one exchange."""
    if not plan.steps[0].mode.relay:
        return count_sent_across(plan.source, plan.target)
    turns = relay_messages(plan.source, plan.target)
    sent = Counter[int]()
    for message in (*turns.first, *turns.second):
        sent[message.sender] += message.elements * (message.sender != message.receiver)
    return sent


# ---- plans ---------------------------------------------------------------------------------------------------


def plans(comm: MPI.Intracomm) -> Iterator[Case]:
    """The steps of plans: each rank receives what it receives in the numpy runtime, step by step of the same plan."""
    choose = random.Random(comm.size)
    for nodes in (1, comm.size):
        team = team_of(comm, nodes=nodes)
        for at in range(24):
            source, target = random_ends(choose, comm.size, at % 2 == 0)
            name = f"{at}: {source} on {source.mesh!r} -> {target} on {target.mesh!r}, {nodes} nodes"
            yield name, partial(_check_plan, comm, team, source, target)


def _check_plan(comm: MPI.Intracomm, team: Team, source: Layout, target: Layout) -> None:
    plan, memory, simulated = rs.plan(source, target), Account(source.dtype), Account(source.dtype)
    every = summands_of(source) if source.partial else tiles_of(source)
    rs.simulate(plan, {device: tile.astype(source.dtype) for device, tile in every.items()}, simulated)
    out = None if comm.rank not in target.mesh.devices else np.zeros(target.tile_shape, target.dtype)
    with forced("plan"):
        result = redistribute(tile_on(source, comm.rank), source, target, comm, out=out, memory=memory, limit=LIMIT)
    check_result(target, comm.rank, result)
    if plan.steps and not source.partial and team.one_node:
        assert memory.received[comm.rank] == simulated.received[comm.rank], plan
    more = 0 if plan.steps else target.tile_bytes  # A copy of what is there already.
    assert memory.peak_bytes <= plan.peak_bytes + more, plan


# ---- relays ---------------------------------------------------------------------------------------------------


def relays(comm: MPI.Intracomm) -> Iterator[Case]:
    """Plans whose one exchange runs in two turns: in every way, with and without an `out`, cut by a budget or not."""
    choose, options = random.Random(comm.size), random.Random(-comm.size)
    for nodes in sorted({1, min(2, comm.size), comm.size}):
        team = team_of(comm, nodes=nodes)
        for at in range(12):
            # One rank draws: of hundreds of pairs that are planned, one is a relay.
            source, target = comm.bcast(_relayed_ends(choose, comm.size) if comm.rank == 0 else None)
            move = _any_options(options, source, target)
            name = f"{at}: {source} on {source.mesh!r} -> {target} on {target.mesh!r}, {nodes} nodes, {move}"
            yield name, partial(check_crossing, comm, team, source, target, move)
            yield f"{name}, steps", partial(_check_plan, comm, team, source, target)


def _relayed_ends(choose: random.Random, size: int) -> tuple[Layout, Layout]:
    """Random layouts whose plan is a relay."""
    while True:
        source, target = random_ends(choose, size, False)
        plan = rs.plan(source, target)
        if plan.crosses and any(step.mode.relay for step in plan.steps):
            return source, target


# ---- arrays --------------------------------------------------------------------------------------------------


def arrays(comm: MPI.Intracomm) -> Iterator[Case]:
    """DistArrays on some ranks: made, moved, gathered, saved and loaded; the rest is refused."""
    choose = random.Random(7 * comm.size)
    for nodes in (1, comm.size):
        team_of(comm, nodes=nodes)
        for at in range(8):
            source, target = random_ends(choose, comm.size, False)
            name = f"{source} on {source.mesh!r} -> {target} on {target.mesh!r}, {nodes} nodes"
            yield f"{at}: there and back, {name}", partial(_there_and_back, comm, source, target)
        yield f"refused, {nodes} nodes", partial(_refused_functions, comm)


def _there_and_back(comm: MPI.Intracomm, source: Layout, target: Layout) -> None:
    whole = np.arange(int(np.prod(source.shape))).reshape(source.shape).astype(source.dtype)
    a = DistArray.from_global(whole if comm.rank == comm.size - 1 else None, source, comm, comm.size - 1, limit=LIMIT)
    _check_array(comm, a, whole)
    b = a.redistribute(target, limit=LIMIT)
    _check_array(comm, b, whole)
    _check_array(comm, b.redistribute(source, limit=LIMIT), whole)
    made = DistArray.from_function(
        lambda *at: np.ravel_multi_index(at, whole.shape) if at else 0, target, comm, limit=LIMIT
    )
    _check_array(comm, made, whole)
    folder = Path(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None))
    try:
        b.save(folder, limit=LIMIT)
        _check_array(comm, DistArray.load(folder, source, comm, limit=LIMIT), whole)
    finally:
        comm.Barrier()
        if comm.rank == 0:
            shutil.rmtree(folder)


def _check_array(comm: MPI.Intracomm, array: DistArray, whole: np.ndarray) -> None:
    check_result(array.layout, comm.rank, array.tile if array.has_tile else None)
    assert array.dtype == whole.dtype and array.shape == whole.shape
    for root in (None, 0, comm.size - 1):
        gathered = array.to_global(root, limit=LIMIT)
        assert (gathered is None) == (root not in (None, comm.rank))
        assert gathered is None or np.array_equal(gathered, whole)


def _refused_functions(comm: MPI.Intracomm) -> None:
    """All ranks refuse numpy's functions, and a rank without a tile its tile."""
    last = Mesh({"x": 1}, device_ids=[comm.size - 1])
    a = DistArray.full(Layout.parse("f64[4, 6]", last), 3.0, comm, limit=LIMIT)
    for call in (np.sqrt, np.sum, np.transpose, lambda b: b @ b.T, lambda b: b[0], lambda b: b.reshape(24), np.copy):
        refused(comm, lambda call=call: call(a), TypeError, "take arrays with a tile on each of")
    if comm.rank == comm.size - 1:
        assert (a.tile == 3).all() and a.unpadded.shape == (4, 6)
        assert a.local_index_ranges() == ((range(4),), (range(6),))
        return
    assert a.local_index_ranges() == ((), ())
    for get in (lambda: a.tile, lambda: a.unpadded):
        try:
            get()
        except TileError as error:
            assert "has no tile" in str(error)
        else:
            raise AssertionError("a tile that is not there")
    try:
        DistArray(a.layout, np.zeros((4, 6)), comm)
    except TileError as error:
        assert "give None" in str(error)
    assert not DistArray(a.layout, None, comm).has_tile


# ---- inter-communicators --------------------------------------------------------------------------------------


def groups(comm: MPI.Intracomm) -> Iterator[Case]:
    """Moves between the groups of inter-communicators, in both directions, of any two sizes, also from some of a
    group's ranks to some of the other's."""
    choose = random.Random(comm.size)
    for split in sorted({1, comm.size // 2, comm.size - 1}):
        half = comm.Split(comm.rank < split, comm.rank)
        inter = half.Create_intercomm(0, comm, split if comm.rank < split else 0)
        sizes = (split, comm.size - split)
        yield f"a rank is late, {sizes}", partial(_group_late, comm, inter)
        for at in range(8):
            side = at % 2
            counts = [choose.randint(1, sizes[side]), choose.randint(1, sizes[1 - side])]
            shape = [choose.choice(SIZES) for _ in range(2)]
            ends = [
                random_layout(choose, _any_mesh(choose, sizes[group], count), shape, "int32")
                for group, count in zip((side, 1 - side), counts, strict=True)
            ]
            name = f"{ends[0]} on {ends[0].mesh!r} -> {ends[1]} on {ends[1].mesh!r}, {sizes}, from group {side}"
            yield name, partial(_between, comm, half, inter, side, ends[0], ends[1])
        yield f"mistakes, {sizes}", partial(_group_mistakes, comm, half, inter, sizes)
        yield f"free {sizes}", inter.Free
        yield f"free half of {sizes}", half.Free


def _between(
    comm: MPI.Intracomm, half: MPI.Intracomm, inter: MPI.Intercomm, side: int, source: Layout, target: Layout
) -> None:
    giving = (comm.rank == half.rank) == (side == 0) if comm.rank else side == 0
    tile = tile_on(source, half.rank) if giving else None
    result = redistribute(tile, source, target, inter, limit=LIMIT)
    if giving:
        assert result is None
    else:
        check_result(target, half.rank, result)


def _group_late(comm: MPI.Intracomm, inter: MPI.Intercomm) -> None:
    """The others give up the first call, and make it again with the late one in the next case."""
    one = Layout.parse("s32[4]", Mesh(x=1))
    if comm.rank < comm.size - 1:
        try:
            redistribute(None, one, one, inter, limit=0.1)
        except RankError as error:
            assert "did not make their first call within 0.1 s" in str(error), error
        else:
            raise AssertionError("a rank did not come, and nothing was raised")
    comm.Barrier()


def _group_mistakes(comm: MPI.Intracomm, half: MPI.Intracomm, inter: MPI.Intercomm, sizes: tuple[int, int]) -> None:
    one = Layout.parse("s32[4]", Mesh(x=1))
    tile = np.arange(4, dtype="int32") if half.rank == 0 else None
    refused(comm, lambda: redistribute(tile, one, one, inter, limit=LIMIT), TileError, "ranks of both groups")
    refused(comm, lambda: redistribute(None, one, one, inter, limit=LIMIT), TileError, "no rank gives a tile")
    wide = Layout.parse("s32[{x}2]", Mesh({"x": 2}, device_ids=[0, max(sizes)]))
    given = tile if comm.rank == 0 else None
    refused(comm, lambda: redistribute(given, wide, one, inter, limit=LIMIT), PlanError, "give a mesh whose device ids")
    refused(comm, lambda: DistArray.zeros(one, inter), AgreementError, "comm.Merge()")  # pyright: ignore
    _between(comm, half, inter, 0, one, one)


# ---- mistakes ------------------------------------------------------------------------------------------------


def mistakes(comm: MPI.Intracomm) -> Iterator[Case]:
    """One rank gives a tile where it has none, None where it has one, an `out` without a result, or meshes of devices
    that are not ranks: one error on all ranks, and the next call works."""
    for nodes in (1, comm.size):
        team_of(comm, nodes=nodes)
        for name in ("tile", "none", "shape", "out", "some outs", "mesh", "budget", "other target", "relabelled array"):
            yield f"{name}, {nodes} nodes", partial(_mistake, comm, name)


def _mistake(comm: MPI.Intracomm, name: str) -> None:
    size, rank = comm.size, comm.rank
    source = Layout.parse("s32[{x}4, 6]", Mesh(x=2))
    target = Layout.from_spec(Mesh({"y": size - 1}, device_ids=range(1, size)), (8, 6), "int32", [[], ["y"]])
    tile = tile_on(source, rank)
    out = np.zeros(target.tile_shape, "int32") if rank else None
    call: dict[str, Any] = {"tile": tile, "source": source, "target": target, "out": None}
    far = Mesh({"y": 2}, device_ids=[0, size])
    kind: type[Exception] = TileError
    match name:
        case "tile":
            call["tile"] = np.zeros((4, 6), "int32") if rank == size - 1 else tile
            text = f"rank {size - 1} is not in Mesh({{'x': 2}})" if size > 2 else ""
        case "none":
            call["tile"], text = (None if rank == 1 else tile), "the tile is None"
        case "shape":
            call["tile"], text = (np.zeros((3, 6), "int32") if rank == 1 else tile), "the tile has shape (3, 6)"
        case "out":
            call["out"], text = (np.zeros((8, 6), "int32") if rank == 0 else out), "and has no tile there; give None"
        case "some outs":
            call["out"], text, kind = (out if rank == 1 else None), "with an out", AgreementError
        case "mesh":
            call["target"], text, kind = Layout.parse("s32[8, 6]", far), f"one of the {size} ranks", PlanError
        case "budget":
            text, kind = "smallest that works", BudgetError
        case "other target":
            call["target"] = target if rank else Layout.parse("s32[8, 6]", target.mesh)
            text, kind = "the ranks ask for different things", AgreementError
        case _:
            text, kind = "not every device is one of", PlanError
    if name == "some outs" and size < 3:
        return
    if name == "tile" and size < 3:
        return

    def move() -> Any:
        if name == "relabelled array":
            return DistArray.zeros(source, comm, limit=LIMIT).redistribute(Layout.parse("s32[8, 6]", far), limit=LIMIT)
        return redistribute(**call, comm=comm, budget=3 if name == "budget" else None, limit=LIMIT)

    refused(comm, move, kind, text)
    check_result(target, rank, redistribute(tile, source, target, comm, out=out, limit=LIMIT))


def refused(comm: MPI.Intracomm, call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    """Asserts that all ranks raise an error of this kind that contains this text; the one to blame may say more."""
    check_refused(comm, kind, call, text, alike=False)
