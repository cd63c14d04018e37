"""The topics of trees of tiles: random trees against the oracle, and what is refused before anything moves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.errors import AgreementError, BudgetError, ReshardError
from reshard.lower.to_mpi import ranks
from reshard.mpi import redistribute
from reshard.mpi import trees as tree_moves
from reshard.runtime import Account
from reshard.types import Layout, Mesh
from tests.layouts import random_pair
from tests.mpi.worker import Case
from tests.oracle import PADDING, source_tiles, tiles_of
from tests.trees import Pair

LIMIT = 20.0
ODD = 1


def moves(comm: MPI.Intracomm) -> Iterator[Case]:
    """Random trees, some with a budget, some verified."""
    for seed in range(12):
        yield f"seed {seed}", partial(_random, comm, seed)
    yield "the tree's structure is kept", partial(_structure, comm)
    yield "empty", lambda: _equal(redistribute({}, {}, {}, comm), {})


def _random(comm: MPI.Intracomm, seed: int) -> None:
    choose = random.Random(seed)
    base: list[Pair] = []
    while len(base) < 3:
        pair = random_pair(choose, choose.choice(["int32", "int16"]), partial=choose.random() < 0.3)
        base += [pair] if pair[0].mesh.size == comm.size else []
    ends = {f"a{number}": choose.choice(base) for number in range(choose.randint(1, 9))}
    _moved(comm, ends)
    _moved(comm, ends, verify="hash", version=seed)
    try:
        floor = rs.plan_tree(ends, budget=0).peak_bytes
    except BudgetError as error:
        floor = error.smallest
    _moved(comm, ends, budget=floor + choose.choice([0, 16, 64]))


def _moved(comm: MPI.Intracomm, ends: dict[str, Pair], **options: Any) -> None:
    """Moves a tree and compares it with the oracle, and what it took with the plan."""
    tree, memory = rs.plan_tree(ends, budget=options.get("budget")), Account("uint8")
    tiles = {name: source_tiles(plan)[ranks(plan.source.mesh)[comm.rank]].copy() for name, plan in tree.plans.items()}
    kept = {name: tile.copy() for name, tile in tiles.items()}
    sources, targets = ({name: pair[end] for name, pair in ends.items()} for end in (0, 1))
    result = redistribute(tiles, sources, targets, comm, memory=memory, limit=LIMIT, **options)
    for name, (_, target) in ends.items():
        wanted = tiles_of(target)[ranks(target.mesh)[comm.rank]]
        real = wanted != PADDING
        assert result[name].shape == wanted.shape
        assert np.array_equal(result[name][real], wanted[real].astype(result[name].dtype)), name
        assert np.array_equal(tiles[name], kept[name])
    assert memory.peak_bytes <= tree.peak_bytes


def _layouts(comm: MPI.Intracomm) -> Pair:
    mesh, side = Mesh(x=comm.size), 2 * comm.size
    return tuple(Layout.from_spec(mesh, (side, side), "int32", spec) for spec in ([["x"]], [[], ["x"]]))


def _structure(comm: MPI.Intracomm) -> None:
    rows, columns = _layouts(comm)
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
    rows, columns = _layouts(comm)
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
    refused = None
    try:
        redistribute(comm=comm, **call)
    except ReshardError as error:
        refused = error
    kinds = comm.allgather(None if refused is None else type(refused).__name__)
    assert kinds[0] is not None and len(set(kinds)) == 1, kinds
    texts = comm.allgather(str(refused))
    assert len({text for rank, text in enumerate(texts) if rank != ODD}) == 1, texts
    assert max(map(len, texts)) < 2000, texts[0]
    fresh = _call(comm)
    for name, tile in fresh["tile"].items():
        assert np.array_equal(kept[name], tile)
    redistribute(comm=comm, **fresh)


def _changed(comm: MPI.Intracomm) -> None:
    """A runtime that swaps two arrays of one layout is found out by the values."""
    honest = tree_moves.move_stack

    def swapped(team: Any, watch: Any, stack: Any, tiles: Any, memory: Any) -> Any:
        return honest(team, watch, stack, tiles, memory)[::-1]

    tree_moves.move_stack = swapped
    try:
        redistribute(comm=comm, **_call(comm), verify="hash")
    except AgreementError as error:
        assert "the values of ['a', 'c'] are not what they were" in str(error), error
    else:
        raise AssertionError("nobody noticed")
    finally:
        tree_moves.move_stack = honest
    redistribute(comm=comm, **_call(comm), verify="hash")
