"""The topics of moves with a view: random ones, casts with scales, and mistakes of one rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.errors import AgreementError, ReshardError, TileError
from reshard.mpi import move as move_tile
from reshard.runtime import Account
from tests.mpi.worker import Case
from tests.view_oracle import KEPT, PADDING, cut, random_case


def device_of(comm: MPI.Intracomm, layout: rs.Layout) -> int:
    return sorted(layout.mesh.devices)[comm.rank]


def check(comm: MPI.Intracomm, move: rs.Move, reference: Callable[[np.ndarray], np.ndarray]) -> None:
    source, target, device = move.source, move.target, device_of(comm, move.source)
    index = np.arange(int(np.prod(source.shape))).reshape(source.shape).astype(source.dtype)
    tile = cut(source, index)[device]
    kept = tile.copy()
    held = np.arange(KEPT, KEPT + int(np.prod(target.shape))).reshape(target.shape).astype(target.dtype)
    out = cut(target, held)[device] if move.view.into else None
    memory, plan = Account(source.dtype), rs.plan(move)
    moved = move_tile(tile, move, comm, out=out, memory=memory)
    wanted = cut(target, reference(index).astype(target.dtype))[device]
    real = wanted != PADDING
    assert np.array_equal(moved[real], wanted[real]), f"{plan}"
    assert np.array_equal(tile, kept) and (out is None or moved is out)
    promised = rs.plan_tree({"": move}).peak_bytes  # The result has memory of its own.
    assert max(comm.allgather(memory.peak_bytes)) <= promised
    assert max(comm.allgather(memory.received_bytes)) <= plan.received_bytes


def moves(comm: MPI.Intracomm) -> Iterator[Case]:
    """Random views, parts taken and filled, on meshes of as many devices as there are ranks."""
    for seed in range(150):
        case = random_case(random.Random(seed), most=96)
        if case.move.source.mesh.size == comm.size:
            yield f"{seed}: {case.move}", partial(check, comm, case.move, case.reference)


def casts(comm: MPI.Intracomm) -> Iterator[Case]:
    """Casts with and without scales, and mistakes that all ranks learn of."""
    mesh = rs.Mesh(x=comm.size)
    wide, narrow = (
        rs.Layout.parse(f"{dtype}[{dims}]", mesh)
        for dtype, dims in (("f32", "{x}2, 8"), ("bf16", f"{2 * comm.size}, 8"))
    )
    values = np.arange(16.0 * comm.size, dtype="float32").reshape(-1, 8)
    down, up = rs.Move(wide, narrow, cast=True), rs.Move(narrow, wide, cast=True)

    def there_and_back() -> None:
        scale = np.full((2, 1), 2.0) if comm.rank else 2.0
        rounded = move_tile(cut(wide, values)[comm.rank], down, comm, scale=scale)
        assert np.array_equal(rounded, (values / 2).astype(rounded.dtype))
        back = move_tile(rounded, up, comm, scale=2.0)
        assert np.array_equal(back, cut(wide, (values / 2).astype(rounded.dtype).astype("float32") * 2)[comm.rank])

    def refused(error: type[ReshardError], call: Callable[[], object]) -> None:
        try:
            call()
        except error:
            return
        raise AssertionError(f"no {error.__name__}")

    tile = cut(wide, values)[comm.rank]
    yield "there and back", there_and_back
    bad = np.ones(3) if comm.rank == comm.size - 1 else 1.0
    yield "a scale that does not fit", partial(refused, TileError, lambda: move_tile(tile, down, comm, scale=bad))
    yield (
        "a scale without a cast",
        partial(refused, TileError, lambda: move_tile(tile, rs.Move(wide, wide), comm, scale=2.0)),
    )
    yield "a tile of another shape", partial(refused, TileError, lambda: move_tile(tile[: comm.rank], down, comm))
    yield "no move", partial(refused, ReshardError, lambda: move_tile(tile, wide, comm))
    fill = rs.Move(wide, rs.Layout.parse("f32[{x}2, 16]", mesh), into={1: slice(0, 8)})
    yield "nothing to fill", partial(refused, TileError, lambda: move_tile(tile, fill, comm))
    if comm.size > 1:
        mine = down if comm.rank else rs.Move(wide, wide)
        yield "different moves", partial(refused, AgreementError, lambda: move_tile(tile, mine, comm))
    yield "it works afterwards", there_and_back
