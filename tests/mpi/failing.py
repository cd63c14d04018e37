"""The topics of calls that fail: ranks that disagree, raise errors, are stuck or die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.errors import AgreementError, BudgetError, LayoutError, PlanError, RankError, ReshardError, TileError
from reshard.mpi import DistArray, redistribute
from reshard.runtime.on_mpi import direct_moves, run_plan, transports
from reshard.runtime.on_mpi.node import cma
from reshard.runtime.on_mpi.team import team_of
from reshard.runtime.on_mpi.wire import by_node, chunks, message_exchange
from reshard.types import Layout, Mesh
from tests.mpi.moving import LIMIT, MoveOptions, caught_by, check_move, check_refused, check_tile, forced, given_tile
from tests.mpi.worker import Case

ODD = 1
"""The rank that fails."""


class Odd(Exception):
    """The error that it raises."""


def _layouts(size: int) -> dict[str, Layout]:
    mesh, side = Mesh(x=size), 4 * size
    return {
        "rows": Layout.from_spec(mesh, (side, side), "int32", [["x"]]),
        "columns": Layout.from_spec(mesh, (side, side), "int32", [[], ["x"]]),
        "wider": Layout.from_spec(mesh, (side, 2 * side), "int32", [[], ["x"]]),
        "small": Layout.from_spec(Mesh(x=2), (side, side), "int32", [["x"]]),
        "partial": Layout.from_spec(mesh, (side, side), "int32", [], unreduced=["x"]),
    }


# ---- before data move --------------------------------------------------------------------------------


def disagreement(comm: MPI.Intracomm) -> Iterator[Case]:
    """One rank requests another move, or gives a wrong tile: the same error on all ranks, and nothing has moved."""
    for nodes in (1, 2):
        team_of(comm, nodes=nodes)
        for name, (error, text, odd) in _odd(comm.size).items():
            yield f"{name}, {nodes} nodes", partial(_refused, comm, error, text, odd)


def _odd(size: int) -> dict[str, tuple[type[ReshardError], str, dict[str, Any]]]:
    """For each case: the error on all ranks, a part of its text, and the arguments of the odd rank."""
    at, shape = _layouts(size), (4, 4 * size)
    differ = "the ranks ask for different things, so nothing was moved"
    array = np.zeros(shape, "int32")
    return {
        "another source": (AgreementError, differ, {"source": at["columns"], "tile": np.zeros(shape[::-1], "int32")}),
        "another target": (AgreementError, differ, {"target": at["rows"], "out": np.zeros(shape, "int32")}),
        "another dtype": (AgreementError, differ, {"every": "uint32"}),
        "another budget": (AgreementError, differ, {"budget": 10**6}),
        "another network": (AgreementError, differ, {"network": "shm-mpi"}),
        "donate": (AgreementError, differ, {"donate": True}),
        "no out": (AgreementError, differ, {"out": None}),
        "a tile of another shape": (TileError, "the tile has shape (3, 3)", {"tile": np.zeros((3, 3), "int32")}),
        "a tile of another dtype": (TileError, "the tile is float32", {"tile": array.astype("f4")}),
        "no tile at all": (TileError, "the tile is None", {"tile": None}),
        "a version of a single tile": (PlanError, "sources and targets are for a tree", {"version": 3}),
        "out of another shape": (TileError, "out has shape (2, 2)", {"out": np.zeros((2, 2), "int32")}),
        "out of another dtype": (TileError, "out is int64", {"out": np.zeros(shape[::-1], "int64")}),
        "out that is a list": (TileError, "out is a list", {"out": [1]}),
        "out that is read-only": (TileError, "out is read-only", {"out": np.broadcast_to(np.int32(0), shape[::-1])}),
        "a budget that is not met": (BudgetError, "the smallest that works is 512 B", {"budget": 100}),
        "another shape": (PlanError, "shape", {"target": at["wider"], "out": None}),
        "a mesh of another size": (AgreementError, "2", {"source": at["small"], "tile": np.zeros((8, 16), "int32")}),
    }


def _refused(comm: MPI.Intracomm, error: type[ReshardError], text: str, odd: dict[str, Any]) -> None:
    at = _layouts(comm.size)
    given = {"source": at["rows"], "target": at["columns"], "budget": None, "network": None, "donate": False}
    tile = given_tile(at["rows"], comm.rank, "int32")
    out = np.full(at["columns"].tile_shape, -5, "int32")
    given |= {"tile": tile, "out": out} | (odd if comm.rank == ODD else {})
    if (dtype := given.pop("every", None)) is not None:
        given["tile"], given["out"] = given["tile"].astype(dtype), given["out"].astype(dtype)
        given |= {end: Layout(given[end].mesh, given[end].dims, dtype) for end in ("source", "target")}
    before = tile.copy()
    caught = check_refused(comm, error, lambda: redistribute(**given, comm=comm, limit=LIMIT), text)
    assert np.array_equal(tile, before)
    assert (out == -5).all()
    assert f"rank {ODD}" in str(caught) or f"[{ODD}]" in str(caught), caught
    check_move(comm, team_of(comm), at["rows"], at["columns"], MoveOptions(out=True))


def arrays_disagree(comm: MPI.Intracomm) -> Iterator[Case]:
    """Disagreement in the other collective calls of a DistArray."""
    at = _layouts(comm.size)
    rows = DistArray.zeros(at["rows"], comm)
    odd = comm.rank == ODD

    wide = np.zeros((1, 1), "int32")
    whole = np.zeros(at["rows"].shape, "int32")
    calls: dict[str, tuple[type[ReshardError], Callable[[], Any]]] = {
        "two calls": (AgreementError, lambda: rows.to_global() if odd else DistArray.zeros(at["rows"], comm)),
        "two layouts": (AgreementError, lambda: DistArray.empty(at["rows" if odd else "columns"], comm)),
        "two roots": (AgreementError, lambda: rows.to_global(int(odd))),
        "no rank": (PlanError, lambda: rows.to_global(comm.size)),
        "out of another layout": (TileError, lambda: rows.redistribute(at["columns"], out=rows)),
        "an array that does not fit": (
            TileError,
            lambda: DistArray.from_global(wide if odd else whole, at["rows"], comm, root=None),
        ),
        "a partial array": (LayoutError, lambda: DistArray.from_global(whole, at["partial"], comm)),
        "nothing saved there": (LayoutError, lambda: DistArray.load("/nonexistent/array", at["rows"], comm)),
        "a dtype that does not fit": (TileError, lambda: DistArray.zeros(at["rows"], comm, dtype="f8")),
    }
    for name, (error, call) in calls.items():
        yield name, partial(check_refused, comm, error, call)


# ---- while data move ---------------------------------------------------------------------------------

_WORK: list[tuple[Any, str]] = [
    (direct_moves, "list_copy_steps"),
    (run_plan, "copy_views"),
    (message_exchange, "copy_views"),
    (by_node, "copy_views"),
    (transports, "copy_view"),
    (run_plan, "_run_reduction"),
    (run_plan, "permute_runs"),
]


@contextmanager
def _going_wrong(wrong: Callable[..., None] | None) -> Iterator[None]:
    """Replaces all that packs, copies or reads on this rank by `wrong`, if given."""
    with ExitStack() as patches:
        for module, name in [*_WORK, (cma.RemoteMemory, "read")] if wrong else ():
            patches.enter_context(mock.patch.object(module, name, wrong))
        yield


def failure(comm: MPI.Intracomm) -> Iterator[Case]:
    """A rank that fails during a move ends the call on all ranks, in every way; the next call works."""
    at = _layouts(comm.size)
    rows, columns = at["rows"], at["columns"]
    for nodes in (1, 2, comm.size):
        for way in ("stage", "read", "plan", "pull", "push", "reduce", "overwrite"):
            options: dict[str, Any] = {"nodes": nodes, "way": way}
            source = at["partial"] if way == "reduce" else rows
            if way == "overwrite":
                options |= {"budget": rs.plan(rows, columns, budget=rows.tile_bytes, donate=True).peak_bytes}
            yield f"{way}, {nodes} nodes", partial(_fails, comm, source, columns, **options)


def _raising(*_: Any, **__: Any) -> None:
    raise Odd("no memory left")


def _fails(
    comm: MPI.Intracomm, source: Layout, target: Layout, nodes: int, way: str, budget: int | None = None
) -> None:
    team_of(comm, nodes=nodes)
    array = DistArray.empty(source, comm, limit=LIMIT)
    array.tile[...] = given_tile(source, comm.rank, "int32")
    tile = array.tile if way == "pull" else array.tile.copy()
    odd = comm.rank == ODD
    options: dict[str, Any] = {"limit": LIMIT, "budget": budget, "donate": budget is not None}
    if way in ("stage", "read", "plan"):
        options["out"] = np.empty(target.tile_shape, "int32")  # A new result would be written to by the others.
    with forced(way if "out" in options else "natural"), _going_wrong(_raising if odd else None):
        caught = caught_by(lambda: redistribute(tile, source, target, comm, **options))
    raised = comm.allgather((type(caught).__name__, str(caught)))
    assert type(caught) is (Odd if odd else RankError), raised
    assert odd or f"rank {ODD}: Odd: no memory left" in str(caught), caught
    assert budget is not None or np.array_equal(tile, given_tile(source, comm.rank, "int32")), (
        "the source was written to"
    )
    # The array lies in a window of the broken team, and can still be moved.
    check_tile(target, comm.rank, array.redistribute(target, limit=LIMIT).tile, comm)


def untouched(comm: MPI.Intracomm) -> Iterator[Case]:
    """If packing fails, `out` is untouched or complete on each rank, never half written."""
    at = _layouts(comm.size)
    for first, nodes in enumerate((1, 2, comm.size)):
        for number, way in enumerate(("stage", "read", "plan", "reduce", "pull", "push")):
            source, turn = at["partial"] if way == "reduce" else at["rows"], (first + number) % 3
            case = partial(_leaves_out, comm, source, at["columns"], nodes, way, turn)
            yield f"{way}, {nodes} nodes, after {turn} messages", case


_PACKING: list[tuple[Any, str]] = [(chunks.Chunk, "packing"), (transports, "copy_view"), (transports, "pack_for_node")]


def _after(turns: int, wrapped: Callable[..., Any], wrong: Callable[..., None]) -> Callable[..., Any]:
    """Calls `wrapped` for the first `turns` calls and `wrong` afterwards."""
    left = iter(range(turns))

    def run(*arguments: Any) -> Any:
        return (wrong if next(left, None) is None else wrapped)(*arguments)

    return run


@contextmanager
def _packing_wrong(turn: int, wrong: Callable[..., None] | None) -> Iterator[None]:
    """Replaces the packing of messages and the staging of tiles on this rank by `wrong`, after `turn` calls."""
    with ExitStack() as patches:
        for module, name in _PACKING if wrong else ():
            patches.enter_context(mock.patch.object(module, name, _after(turn, getattr(module, name), wrong)))
        yield


def _leaves_out(comm: MPI.Intracomm, source: Layout, target: Layout, nodes: int, way: str, turn: int) -> None:
    team_of(comm, nodes=nodes)
    array = DistArray.empty(source, comm, limit=LIMIT)
    array.tile[...] = given_tile(source, comm.rank, "int32")
    tile = array.tile if way == "pull" else array.tile.copy()
    out = DistArray.empty(target, comm, limit=LIMIT).tile if way == "push" else np.empty(target.tile_shape, "int32")
    out[...] = -5
    odd = comm.rank == ODD
    way = way if way in ("stage", "read", "plan") else "natural"
    with forced(way), _packing_wrong(turn, _raising if odd else None):
        caught = caught_by(lambda: redistribute(tile, source, target, comm, limit=LIMIT, out=out))
    raised = comm.allgather(type(caught).__name__)
    assert (out == -5).all() or np.array_equal(out, given_tile(target, comm.rank, "int32")), "out is half written"
    assert len(set(raised)) == (1 if caught is None else 2), raised
    assert np.array_equal(tile, given_tile(source, comm.rank, "int32"))


def stuck(comm: MPI.Intracomm) -> Iterator[Case]:
    """A rank that is late: the others end with an error that names it, and so does the late rank, later."""
    at = _layouts(comm.size)

    def waits(nodes: int) -> None:
        team_of(comm, nodes=nodes)
        tile = given_tile(at["rows"], comm.rank, "int32")
        redistribute(tile, at["rows"], at["columns"], comm)
        if comm.rank == ODD:
            time.sleep(2)
        caught = caught_by(lambda: redistribute(tile, at["rows"], at["columns"], comm, limit=0.5))
        raised = comm.allgather((type(caught).__name__, str(caught)))
        assert type(caught) is RankError, raised
        assert comm.rank == ODD or "waited longer than 0.5 s" in str(caught) or "one failed" in str(caught), raised
        check_move(comm, team_of(comm), at["rows"], at["columns"], MoveOptions())

    for nodes in (1, 2):
        yield f"{nodes} nodes", partial(waits, nodes)


def _shared_files() -> set[str]:
    """The files in /dev/shm that this process maps: nobody deletes MPI's own if a rank dies."""
    maps = Path("/proc/self/maps")
    places = (line.split()[-1] for line in maps.read_text().splitlines()) if maps.exists() else ()
    return {place for place in places if place.startswith("/dev/shm/")}


def killed(comm: MPI.Intracomm) -> Iterator[Case]:
    """A rank dies during a move: after its first message, or before it stages its tile."""
    at = _layouts(comm.size)
    nodes = int(os.environ["NODES_OF_THE_KILLED"])
    team_of(comm, nodes=nodes)
    tile = given_tile(at["rows"], comm.rank, "int32")
    report = Path(f"{os.environ['REPORT_OF_THE_KILLED']}-{comm.rank}")
    report.touch()
    Path(f"{os.environ['FILES_OF_THE_KILLED']}-{comm.rank}").write_text("\n".join(_shared_files()))

    def dies() -> None:
        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        out, wanted = np.full(at["columns"].tile_shape, -5, "int32"), given_tile(at["columns"], comm.rank, "int32")
        start = time.monotonic()
        with _packing_wrong(nodes > 1, die if comm.rank == ODD else None):
            caught = caught_by(lambda: redistribute(tile, at["rows"], at["columns"], comm, limit=3, out=out))
        took = time.monotonic() - start
        kept = "kept" if (out == -5).all() else "whole" if np.array_equal(out, wanted) else "half written"
        report.write_text(f"{took:.1f} s: {caught!r} {kept}")
        os._exit(0)  # MPI's own end would wait for the dead rank.

    yield "a rank that dies", dies
