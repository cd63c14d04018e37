"""The topics of trees of tiles: random trees against the oracle, and what is refused before anything moves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

import reshard as rs
from benchmarks.endpoints import weights
from benchmarks.fuzz_moves import ArrayTiles, TreeCase
from reshard.errors import AgreementError, BudgetError, PlanError, ReshardError, TileError
from reshard.mpi import redistribute
from reshard.mpi import redistribution as tree_moves
from reshard.runtime import Account
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_mpi.direct_moves import passes_on
from reshard.runtime.on_mpi.node.arena import Arena
from reshard.runtime.on_mpi.team import team_of
from reshard.types import Layout, Mesh
from tests.layouts import random_layout, random_pair
from tests.mpi.crossing import check_result, random_ends, tile_on
from tests.mpi.moving import caught_by, check_refused, counting, forced, slabs
from tests.mpi.worker import Case
from tests.oracle import PADDING
from tests.trees import Pair, random_readers
from tests.view_oracle import KEPT, cut, random_case

LIMIT = 60.0
ODD = 1


def moves(comm: MPI.Intracomm) -> Iterator[Case]:
    """Random trees, some with a budget, some verified."""
    for seed in range(12):
        yield f"seed {seed}", partial(_across, comm, seed, everywhere=True)
    yield "the tree's structure is kept", partial(_structure, comm)
    yield "empty", lambda: _equal(redistribute({}, {}, {}, comm), {})


# ---- other ranks, views, groups -------------------------------------------------------------------------------


def across(comm: MPI.Intracomm) -> Iterator[Case]:
    """Random trees between random sets of ranks, some partial, some with a budget, some verified."""
    for seed in range(12):
        yield f"seed {seed}", partial(_across, comm, seed)


def across_sampled(comm: MPI.Intracomm) -> Iterator[Case]:
    """A few of these, for the fast tier."""
    for seed in range(3):
        yield f"seed {seed}", partial(_across, comm, seed)


def own_readers(comm: MPI.Intracomm) -> Iterator[Case]:
    """Trees of arrays with readers of their own, which gather."""
    for seed in range(6):
        choose = random.Random(seed)
        ends = random_readers(choose, comm.size, choose.randint(10, 40))
        inside = {name: end for name, end in ends.items() if max(end[0].mesh.devices) < comm.size}
        assert any(step.mode.gathers for plan in rs.plan_tree(inside).plans.values() for step in plan.steps)
        yield f"seed {seed}", partial(check_ends, comm, inside)


def _across(comm: MPI.Intracomm, seed: int, everywhere: bool = False) -> None:
    choose = random.Random(seed)
    base: list[Pair] = []
    count = 3 if everywhere else choose.randint(1, 4)
    while len(base) < count:
        if not everywhere:
            base.append(random_ends(choose, comm.size, choose.random() < 0.2))
            continue
        pair = random_pair(choose, choose.choice(["int32", "int16"]), partial=choose.random() < 0.3)
        base += [pair] if all(set(end.mesh.devices) == set(range(comm.size)) for end in pair) else []
    ends = {f"a{number}": choose.choice(base) for number in range(choose.randint(1, 9))}
    check_ends(comm, ends)
    check_ends(comm, ends, verify="hash", version=seed)
    try:
        floor = rs.plan_tree(ends, budget=0).peak_bytes
    except BudgetError as error:
        floor = error.smallest
    check_ends(comm, ends, budget=floor + choose.choice([0, 16, 64]))
    if not any(source.partial for source, _ in ends.values()):
        outs = {
            name: _empty(target) if comm.rank in target.mesh.devices else None for name, (_, target) in ends.items()
        }
        result = check_ends(comm, ends, out=outs)
        assert all(result[name] is out for name, out in outs.items())


def shared(comm: MPI.Intracomm) -> Iterator[Case]:
    """Equal moves into arrays of the caller: with memory that the ranks share, and without room for it."""
    here, some = Mesh(x=comm.size), Mesh({"x": 2}, device_ids=[comm.size - 1, 0])
    rows, uneven = (Layout.from_spec(here, shape, "int32", [["x"], []]) for shape in ((2 * comm.size, 6), (7, 6)))
    columns = Layout.from_spec(here, rows.shape, "int32", [[], ["x"]])
    moves = {"rows": (rows, columns), "uneven": (uneven, Layout.from_spec(some, (7, 6), "int32", [[], ["x"]]))}
    for name, pair in moves.items():
        for ends in (pair, pair[::-1]):
            for room in (True, False):
                yield f"{name}, {ends[0]}, room {room}", partial(_shared, comm, ends, room)


def _shared(comm: MPI.Intracomm, pair: Pair, room: bool) -> None:
    ends = {f"a{number}": pair for number in range(3)}
    outs = {name: _empty(pair[1]) if comm.rank in pair[1].mesh.devices else None for name in ends}
    with nullcontext() if room else mock.patch.object(Arena, "take", lambda *_: 0):
        check_ends(comm, ends, out=outs)


def shared_ends(comm: MPI.Intracomm) -> Iterator[Case]:
    """Moves into parts of one array, and from parts of one, between random sets of ranks, into new and given arrays."""
    for seed in (*range(10), 160):  # In the last, on two nodes, a target is there before a step that leads to a part.
        yield f"seed {seed}", partial(_shared_ends, comm, seed)
    yield "tied", partial(_tied, comm)
    yield "refused", partial(_shared_ends_refused, comm)


def _shared_ends(comm: MPI.Intracomm, seed: int) -> None:
    choose, case = random.Random(f"ends {seed}"), TreeCase({}, {}, {})
    for name in "pq"[: choose.randint(1, 2)]:
        case.add_parts(choose, name, comm.size)
    moves, names = {name: each.make() for name, each in case.moves.items()}, {"sources": case.sources}
    names["targets"] = case.targets
    tree = rs.plan_tree(moves, **names)
    given = choose.random() < 0.5
    options: dict[str, Any] = {"verify": "hash"} if all(not m.casts for m in moves.values()) else {}
    if choose.random() < 0.4:
        ends = [end.tile_bytes for layouts in (tree.source_layouts, tree.target_layouts) for end in layouts.values()]
        tree = rs.plan_tree(moves, budget=sum(ends) + 16, **names)
        options["budget"] = sum(ends) + 16

    def run(tiles: ArrayTiles, into: ArrayTiles) -> ArrayTiles:
        mine = {name: each.get(comm.rank) for name, each in tiles.items()}
        kept = {name: None if tile is None else tile.copy() for name, tile in mine.items()}
        outs = {name: into.get(name, {}).get(comm.rank) for name in tree.filled}
        if given:
            for name, end in tree.target_layouts.items():
                if name not in outs and comm.rank in end.mesh.devices:
                    outs[name] = np.full(end.tile_shape, 77).astype(numpy_dtype(end.dtype))
        memory = Account("uint8")
        out = outs or None
        moved = redistribute(mine, moves, None, comm, memory=memory, out=out, limit=LIMIT, **names, **options)
        for name, tile in mine.items():
            assert tile is None or np.array_equal(tile, kept[name]), f"{name} was written to"
        assert all(out is None or moved[name] is out for name, out in outs.items())
        peaks, received = (comm.allgather(figure) for figure in (memory.peak_bytes, memory.received_bytes))
        still = sum(plan.target.tile_bytes for plan in tree.plans.values() if not plan.steps) if given else 0
        assert max(peaks) <= tree.peak_bytes + still and max(received) <= tree.received_bytes, f"{peaks}: {tree}"
        each = comm.allgather(moved)
        ends = tree.target_layouts
        return {name: {d: each[d][name] for d in end.mesh.devices} for name, end in ends.items()}

    case.run(choose, tree, run)


def _tied(comm: MPI.Intracomm) -> None:
    rows, whole = (Layout.from_spec(Mesh(x=comm.size), (12, 4), "int32", [on, []]) for on in (["x"], []))
    tile, names = tile_on(rows, comm.rank), {"sources": dict.fromkeys(("embed", "head"), "tokens")}
    memory = Account("uint8")
    moves = {name: rs.Move(rows, whole) for name in ("embed", "head")}
    moved = redistribute({"tokens": tile}, moves, None, comm, memory=memory, **names)
    assert moved["embed"] is moved["head"] and memory.received_bytes == rs.plan(rows, whole).received_bytes
    check_result(whole, comm.rank, moved["head"])
    outs = {name: _empty(whole) for name in moves}
    moved = redistribute({"tokens": tile}, moves, None, comm, out=outs, **names)
    assert all(moved[name] is out for name, out in outs.items())
    check_result(whole, comm.rank, outs["embed"])
    check_result(whole, comm.rank, outs["head"])


def _shared_ends_refused(comm: MPI.Intracomm) -> None:
    half, both = (Layout.from_spec(Mesh(x=comm.size), (n, 4), "int32", [["x"], []]) for n in (12, 24))
    low, high = (rs.Move(half, both, into={0: slice(start, start + 12)}) for start in (0, 12))
    tiles = {name: tile_on(half, comm.rank) for name in "ab"}
    move = partial(redistribute, comm=comm, limit=LIMIT)
    targets = dict.fromkeys("ab", "both")
    odd = comm.rank == comm.size - 1

    def refuse(kind: type[Exception], text: str, parts: dict[str, rs.Move], into: dict[str, str], read: str) -> None:
        given = {name: tiles["a"] for name in read}
        check_refused(comm, kind, lambda: move(given, parts, None, targets=into), text)

    good = {"a": low, "b": high}
    swapped, missing = ({"a": high, "b": low}, {"a": low}) if odd else (good, good)
    refuse(AgreementError, "'a' has view", swapped, targets, "ab")
    # A rank whose parts leave something out has no array to leave it to.
    refuse(TileError, "out=", good, {"a": "both", "b": "else"} if odd else targets, "ab")
    refuse(PlanError, "both fill element [0, 0] of 'both'", {"a": low, "b": low}, targets, "ab")
    refuse(TileError, "out=", missing, dict.fromkeys(missing, "both"), "".join(missing))
    refuse(TileError, "out=", {"a": low}, {"a": "both"}, "a")
    refuse(TileError, "'c'", good, targets, "abc")
    refuse(PlanError, "targets", good, {"z": "both"}, "ab")
    moved = move(tiles, {"a": low, "b": high}, None, targets=targets)
    assert list(moved) == ["both"]


def _empty(layout: Layout) -> np.ndarray:
    return np.full(layout.tile_shape, -1).astype(layout.dtype)


def check_ends(comm: MPI.Intracomm, ends: dict[str, Pair], **options: Any) -> dict[str, Any]:
    """Moves a tree between sets of ranks; every element, the bytes received and sent, and the peak are as planned."""
    tree, memory = rs.plan_tree(ends, budget=options.get("budget")), Account("uint8")
    tiles = {name: tile_on(source, comm.rank) for name, (source, _) in ends.items()}
    kept = {name: None if tile is None else tile.copy() for name, tile in tiles.items()}
    sources, targets = ({name: pair[end] for name, pair in ends.items()} for end in (0, 1))
    team = team_of(comm)
    with counting(team) as counted:
        result = redistribute(tiles, sources, targets, comm, memory=memory, limit=LIMIT, **options)
    received, sent = (comm.allgather(figure) for figure in (memory.received_bytes, counted.sent))
    peaks = comm.allgather(memory.peak_bytes)
    for name, (_, target) in ends.items():
        check_result(target, comm.rank, result[name])
        assert tiles[name] is None or np.array_equal(tiles[name], kept[name]), "a source was written to"
    still = sum(plan.target.tile_bytes for plan in tree.plans.values() if not plan.steps) if "out" in options else 0
    assert max(peaks) <= tree.peak_bytes + still, f"{peaks}: {tree}"  # A tile that stays is copied to its array.
    assert max(received) <= tree.received_bytes, f"{received}: {tree}"
    if not any(source.partial for source, _ in ends.values()) and all(plan.crosses for plan in tree.plans.values()):
        assert max(sent) <= tree.sent_bytes or team.facts.nodes != tuple(range(comm.size)), f"{sent}: {tree}"
    return result


def few_messages(comm: MPI.Intracomm) -> Iterator[Case]:
    """Arrays of any shapes travel together: one message for each peer, or one for each peer and step."""
    yield "straight", partial(_few_messages, comm, ("s32[{{x}}{0}, 4]", "s32[{1}, {{y}}2]"), 1)
    yield "crossed and gathered", partial(_few_messages, comm, ("s32[{{x}}{0}, 4]", "s32[{1}, 4]"), 2)


def _few_messages(comm: MPI.Intracomm, texts: Pair, steps: int) -> None:
    one, other = Mesh(x=2), Mesh({"y": 2}, device_ids=[2, 3])
    ends = {
        f"a{n}": (Layout.parse(texts[0].format(2 * n, 4 * n), one), Layout.parse(texts[1].format(2 * n, 4 * n), other))
        for n in range(1, 31)
    }
    assert {len(plan.steps) for plan in rs.plan_tree(ends).plans.values()} == {steps}
    tiles = {name: tile_on(source, comm.rank) for name, (source, _) in ends.items()}
    sources, targets = ({name: pair[end] for name, pair in ends.items()} for end in (0, 1))
    with counting(team_of(comm, nodes=comm.size)) as counted:
        result = redistribute(tiles, sources, targets, comm, limit=LIMIT)
    most = max(comm.allgather(counted.sends))  # Before a rank fails alone.
    for name, (_, target) in ends.items():
        check_result(target, comm.rank, result[name])
    assert 0 < most <= 2, f"{most} messages of a rank to two peers, for {len(ends)} arrays"


def moves_through_views(comm: MPI.Intracomm) -> Iterator[Case]:
    """Random views, parts taken and filled, several in one tree, on all ranks and between sets of ranks."""
    for seed in range(16):
        yield f"seed {seed}", partial(_viewed, comm, seed)


PASSED_ON = (149, 260, 340, 604, 770, 1363, 1624, 3942)
"""Moves of weights on 4 ranks that are relayed through a view, or gathered after it."""


def moves_passed_on(comm: MPI.Intracomm) -> Iterator[Case]:
    """Moves through views in which ranks pass on what they receive: together and one by one, on one node and several,
    as bundles and step by step."""
    cases = {f"w{seed}": weights(seed, 4)[1] for seed in PASSED_ON}
    moves, references = ({name: getattr(case, of) for name, case in cases.items()} for of in ("move", "reference"))
    plans = [rs.plan(move) for move in moves.values()]
    assert all(passes_on(plan) for plan in plans) and plans[-1].steps[0].mode.fresh
    for nodes in (1, 2, comm.size):
        team_of(comm, nodes=nodes)
        yield f"{nodes} nodes", partial(check_moves, comm, moves, references)
        for name, move in moves.items():
            yield f"{nodes} nodes, {name}", partial(_by_steps, comm, move, references[name])


def _by_steps(comm: MPI.Intracomm, move: rs.Move, reference: Callable[[np.ndarray], np.ndarray]) -> None:
    with forced("plan"):
        check_moves(comm, {"w": move}, {"w": reference})


def _viewed(comm: MPI.Intracomm, seed: int) -> None:
    choose = random.Random(seed)
    moves: dict[str, rs.Move] = {}
    references: dict[str, Callable[[np.ndarray], np.ndarray]] = {}
    while len(moves) < 5:
        case = random_case(choose, most=96)
        if case.move.source.mesh.size > comm.size:
            continue
        meshes = [_some_ranks(choose, comm.size, end.mesh) for end in (case.move.source, case.move.target)]
        source, target = (
            replace(end, mesh=mesh) for end, mesh in zip((case.move.source, case.move.target), meshes, strict=True)
        )
        name = f"m{len(moves)}"
        moves[name], references[name] = rs.Move(source, target, case.move.view), case.reference
    check_moves(comm, moves, references)


def _some_ranks(choose: random.Random, size: int, mesh: Mesh) -> Mesh:
    return Mesh(mesh.axes, device_ids=choose.sample(range(size), mesh.size))


def check_moves(
    comm: MPI.Intracomm, moves: dict[str, rs.Move], references: dict[str, Callable[[np.ndarray], np.ndarray]]
) -> None:
    """Moves a tree of moves, and compares every element with numpy's own reshapes."""
    tree, memory = rs.plan_tree(moves), Account("uint8")
    tiles: dict[str, Any] = {}
    outs: dict[str, Any] = {}
    wanted: dict[str, Any] = {}
    for name, move in moves.items():
        source, target = move.source, move.target
        index = np.arange(int(np.prod(source.shape))).reshape(source.shape).astype(source.dtype)
        held = np.arange(KEPT, KEPT + int(np.prod(target.shape))).reshape(target.shape).astype(target.dtype)
        tiles[name] = cut(source, index).get(comm.rank)
        wanted[name] = cut(target, references[name](index).astype(target.dtype)).get(comm.rank)
        if move.view.into:
            outs[name] = cut(target, held).get(comm.rank)
    result = redistribute(tiles, moves, None, comm, out=outs, memory=memory, limit=LIMIT, verify="hash")
    peaks, received = comm.allgather(memory.peak_bytes), comm.allgather(memory.received_bytes)
    for name, tile in wanted.items():
        assert (tile is None) == (result[name] is None), name
        assert name not in outs or result[name] is outs[name]
        if tile is not None:
            real = tile != PADDING
            assert np.array_equal(result[name][real], tile[real]), f"{name}: {moves[name]}"
    assert max(peaks) <= tree.peak_bytes, f"{peaks}: {tree}"
    assert max(received) <= tree.received_bytes, f"{received}: {tree}"


def groups(comm: MPI.Intracomm) -> Iterator[Case]:
    """Trees between the groups of an inter-communicator, in both directions."""
    split = comm.size // 2
    half = comm.Split(comm.rank < split, comm.rank)
    inter = half.Create_intercomm(0, comm, split if comm.rank < split else 0)
    for seed in range(6):
        yield f"seed {seed}", partial(_between_groups, comm, inter, half, split, seed)
    yield "nobody gives", partial(_nobody_gives, comm, inter, half)


def _between_groups(comm: MPI.Intracomm, inter: Any, half: Any, split: int, seed: int) -> None:
    choose = random.Random(seed)
    sizes, side = (split, comm.size - split), seed % 2
    mine = 0 if comm.rank < split else 1
    ends: dict[str, Pair] = {}
    for number in range(choose.randint(1, 6)):
        shape = [choose.choice([4, 6, 7]) for _ in range(2)]
        counts = [choose.randint(1, sizes[group]) for group in (side, 1 - side)]
        meshes = [
            Mesh({"x": count}, device_ids=choose.sample(range(sizes[group]), count))
            for group, count in zip((side, 1 - side), counts, strict=True)
        ]
        ends[f"a{number}"] = tuple(random_layout(choose, mesh, shape, "int32") for mesh in meshes)
    tiles = {name: tile_on(source, half.rank) if mine == side else None for name, (source, _) in ends.items()}
    sources, targets = ({name: pair[end] for name, pair in ends.items()} for end in (0, 1))
    result = redistribute(tiles, sources, targets, inter, version=seed, verify="hash", limit=LIMIT)
    for name, (_, target) in ends.items():
        check_result(target, half.rank if mine != side else -1, result[name])


def _nobody_gives(comm: MPI.Intracomm, inter: Any, half: Any) -> None:
    one = Layout.parse("s32[4]", Mesh(x=1))
    assert "no rank gives a tile" in str(caught_by(lambda: redistribute({"a": None}, one, one, inter, limit=LIMIT)))


def models(comm: MPI.Intracomm) -> Iterator[Case]:
    """A trainer's layers for a server on other ranks: fused query, key and value, gate and up, casts, replicas."""
    for server in ([4, 5], [2, 3, 4, 5]):
        yield f"to ranks {server}", partial(_model, comm, server)


def _model(comm: MPI.Intracomm, server: list[int]) -> None:
    trainer, serving = Mesh(fsdp=2, tp=2), Mesh({"tp": 2, "rep": len(server) // 2}, device_ids=server)

    def layout(text: str, mesh: Mesh) -> Layout:
        return Layout.parse(text, mesh)

    fused, gate_up = layout("s32[{fsdp}{tp}12, 5]", trainer), layout("s32[{fsdp}6, {tp}8]", trainer)
    heads, wide = layout("s32[{tp}8, 5]", serving), layout("s32[{tp}4, 12]", serving)
    moves = {
        "three": rs.Move(fused, layout("s32[3, {tp}8, 5]", serving), view="(three h) m -> three h m", three=3),
        "norm": rs.Move(layout("s32[{fsdp}4]", trainer), layout("s32[8]", serving)),
        "norm2": rs.Move(layout("s32[{fsdp}4]", trainer), layout("s32[8]", serving)),
    }
    references: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "three": lambda a: a.reshape(3, 16, 5),
        "norm": lambda a: a,
        "norm2": lambda a: a,
    }
    for at, name in enumerate("qkv"):
        moves[name] = rs.Move(fused, heads, view="(three h) m -> h m", take={"three": at}, three=3)
        references[name] = lambda a, at=at: a.reshape(3, 16, 5)[at]
    for at, name in enumerate(("gate", "up")):
        moves[name] = rs.Move(gate_up, wide, view="m (two f) -> f m", take={"two": at}, two=2)
        references[name] = lambda a, at=at: a.reshape(12, 2, 8)[:, at].T
    check_moves(comm, moves, references)
    _check_cast(comm, trainer, serving)


def _check_cast(comm: MPI.Intracomm, trainer: Mesh, serving: Mesh) -> None:
    source, target = Layout.parse("f32[{fsdp}4, {tp}4]", trainer), Layout.parse("bf16[{tp}4, 8]", serving)
    values = np.arange(64.0, dtype="float32").reshape(8, 8)
    tile = cut(source, values).get(comm.rank)
    move = rs.Move(source, target, cast=True)
    result = redistribute({"w": tile}, {"w": move}, None, comm, scale={"w": 2.0}, limit=LIMIT)["w"]
    wanted = cut(target, (values / 2).astype(numpy_dtype("bfloat16"))).get(comm.rank)
    assert (result is None) == (wanted is None)
    assert wanted is None or np.array_equal(result, wanted)


def _structure(comm: MPI.Intracomm) -> None:
    rows, columns = slabs(comm)
    tile = np.full(rows.tile_shape, comm.rank, np.int32)
    result = redistribute({"layers": {0: tile, 1: tile}, "head": tile}, rows, columns, comm, limit=LIMIT)
    assert list(result) == ["layers", "head"] and list(result["layers"]) == [0, 1]
    assert result["layers"][1].shape == columns.tile_shape


def _equal(one: object, other: object) -> None:
    assert one == other


# ---- faults that one rank makes --------------------------------------------------------------------


def faults(comm: MPI.Intracomm) -> Iterator[Case]:
    """Names, orders, versions, shapes, layouts and options that differ on one rank: all ranks raise, nothing moves."""
    for name, fault in FAULTS.items():
        yield name, partial(_refused, comm, fault)
    yield "values that changed on the way", partial(_changed, comm)


def _call(comm: MPI.Intracomm) -> dict[str, Any]:
    """The arguments that all ranks make alike."""
    rows, columns = slabs(comm)
    names = ("a", "b", "c")
    tiles = {name: np.full(rows.tile_shape, at, np.int32) for at, name in enumerate(names)}
    ends = {"source": dict.fromkeys(names, rows), "target": dict.fromkeys(names, columns)}
    return {"tile": tiles, **ends, "version": 7, "limit": LIMIT}


def _renamed(call: dict[str, Any], names: dict[str, str]) -> None:
    for what in ("tile", "source", "target"):
        call[what] = {names.get(name, name): value for name, value in call[what].items()}


def _reordered(call: dict[str, Any]) -> None:
    for what in ("tile", "source", "target"):
        call[what] = dict(reversed(call[what].items()))


def _fewer(call: dict[str, Any]) -> None:
    for what in ("tile", "source", "target"):
        call[what] = {name: value for name, value in call[what].items() if name != "c"}


def _more(call: dict[str, Any]) -> None:
    for what in ("tile", "source", "target"):
        call[what] = {**call[what], "d": call[what]["a"]}


def _nested(call: dict[str, Any]) -> None:
    for what in ("tile", "source", "target"):
        call[what] = {"top": call[what]}


def _laid_out(what: str, text: Callable[[int], str]) -> Callable[[dict[str, Any]], None]:
    def change(call: dict[str, Any]) -> None:
        mesh = call[what]["b"].mesh
        layout = Layout.parse(text(mesh.size), mesh)
        call[what] = {**call[what], "b": layout}
        if what == "source":
            call["tile"] = {**call["tile"], "b": np.zeros(layout.tile_shape, layout.dtype)}
            if call["target"]["b"].shape != layout.shape or call["target"]["b"].dtype != layout.dtype:
                call["target"] = {**call["target"], "b": layout}

    return change


def _other_mesh(**axes: Any) -> Callable[[dict[str, Any]], None]:
    def change(call: dict[str, Any]) -> None:
        size = call["target"]["b"].mesh.size
        mesh = Mesh(z=size) if axes else Mesh({"x": size}, device_ids=range(size)[::-1])
        held = "z" if axes else "x"
        call["target"] = {**call["target"], "b": Layout.from_spec(mesh, (2 * size,) * 2, "int32", [[], [held]])}

    return change


def _tile(tile: Callable[[np.ndarray], Any]) -> Callable[[dict[str, Any]], None]:
    return lambda call: call["tile"].update(b=tile(call["tile"]["b"]))


def _set(**options: Any) -> Callable[[dict[str, Any]], None]:
    return lambda call: call.update(options)


FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "an array is missing": _fewer,
    "an array more": _more,
    "an array has another name": lambda call: _renamed(call, {"b": "B"}),
    "two arrays have each other's names": lambda call: _renamed(call, {"a": "b", "b": "a"}),
    "the order is another": _reordered,
    "the names are paths of another tree": _nested,
    "the version is older": _set(version=6),
    "the version is text": _set(version="7"),
    "there is no version": _set(version=None),
    "one array's version is another": _set(version={"a": 7, "b": 6, "c": 7}),
    "the shape is another": _laid_out("source", lambda n: f"s32[{{x}}4, {2 * n}]"),
    "the dtype is another": _laid_out("source", lambda n: f"f32[{{x}}2, {2 * n}]"),
    "the source is laid out otherwise": _laid_out("source", lambda n: f"s32[{2 * n}, {{x}}2]"),
    "the target is laid out otherwise": _laid_out("target", lambda n: f"s32[{2 * n}, {2 * n}]"),
    "the devices are in another order": _other_mesh(),
    "the mesh has other axes": _other_mesh(z=0),
    "a tile has another shape": _tile(lambda tile: tile[1:]),
    "a tile has another dtype": _tile(lambda tile: tile.astype("float64")),
    "a tile is None": _tile(lambda tile: None),
    "the budget is another": _set(budget="64MiB"),
    "the values are verified here only": _set(verify="hash"),
    "verify is unknown": _set(verify="sum"),
    "the network is another": _set(network="h100"),
    "an option is for one tile": _set(donate=True),
    "a single tile": lambda call: call.update({what: call[what]["a"] for what in ("tile", "source", "target")}),
    "a layout is missing": lambda call: call["target"].pop("b"),
    "a layout is text": lambda call: call["target"].update(b="s32[4]"),
}


def _refused(comm: MPI.Intracomm, fault: Callable[[dict[str, Any]], None]) -> None:
    call = _call(comm)
    kept = {name: tile.copy() for name, tile in call["tile"].items()}
    if comm.rank == ODD:
        fault(call)
        if not isinstance(call["tile"], dict):
            call.pop("version")
    refused = caught_by(lambda: redistribute(comm=comm, **call))
    assert isinstance(refused, ReshardError), refused
    kinds = comm.allgather(type(refused).__name__)
    assert len(set(kinds)) == 1, kinds
    texts = comm.allgather(str(refused))
    assert len({text for rank, text in enumerate(texts) if rank != ODD}) == 1, texts
    assert max(map(len, texts)) < 2000, texts[0]
    fresh = _call(comm)
    for name, tile in fresh["tile"].items():
        assert np.array_equal(kept[name], tile)
    redistribute(comm=comm, **fresh)


def _changed(comm: MPI.Intracomm) -> None:
    """A runtime that swaps two arrays of one layout is found out by the values."""
    honest = tree_moves.run_launches

    def swapped(*given: Any) -> Any:
        moved = honest(*given)
        return {**moved, "a": moved["c"], "c": moved["a"]}

    with mock.patch.object(tree_moves, "run_launches", swapped):
        call = partial(redistribute, comm=comm, **_call(comm), verify="hash")
        check_refused(comm, AgreementError, call, "the values of ['a', 'c'] are not what they were")
    redistribute(comm=comm, **_call(comm), verify="hash")
