"""The topics of `reshard.mpi.move`: casts with scales, what ranks hold already, and mistakes of one rank; `trees` has
random views.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import reshard as rs
from benchmarks.fuzz_moves import random_changes
from reshard.errors import AgreementError, PlanError, ReshardError, TileError, VersionError
from reshard.mpi import move as move_tile
from reshard.mpi import redistribute
from reshard.runtime import Account
from tests.layouts import random_layout
from tests.mpi.moving import check_refused
from tests.mpi.worker import Case
from tests.view_oracle import PADDING, cut, random_case


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

    def within_source_and_target() -> None:
        """Messages are cast as they are packed, one element at a time, or as they are unpacked."""
        floor = wide.tile_bytes + narrow.tile_bytes
        for budget in (floor, floor + 16):
            with rs.runtime.measure() as measured:
                rounded = move_tile(cut(wide, values)[comm.rank], down, comm, scale=2.0, budget=budget)
                back = move_tile(rounded, up, comm, scale=np.full((2, 8), 2.0), budget=budget)
            assert np.array_equal(rounded, (values / 2).astype(rounded.dtype)) and measured.peak_bytes <= budget
            assert np.array_equal(back, cut(wide, (values / 2).astype(rounded.dtype).astype("float32") * 2)[comm.rank])

    tile, refused = cut(wide, values)[comm.rank], partial(check_refused, comm)
    yield "there and back", there_and_back
    yield "within source and target", within_source_and_target
    bad = np.ones(3) if comm.rank == comm.size - 1 else 1.0
    yield (
        "a scale that does not fit",
        partial(refused, TileError, lambda: move_tile(tile, down, comm, scale=bad)),
    )
    yield (
        "a scale without a cast",
        partial(refused, TileError, lambda: move_tile(tile, rs.Move(wide, wide), comm, scale=2.0)),
    )
    yield (
        "a tile of another shape",
        partial(refused, TileError, lambda: move_tile(tile[: comm.rank], down, comm)),
    )
    yield "no move", partial(refused, ReshardError, lambda: move_tile(tile, wide, comm))
    fill = rs.Move(wide, rs.Layout.parse("f32[{x}2, 16]", mesh), into={1: slice(0, 8)})
    yield "nothing to fill", partial(refused, TileError, lambda: move_tile(tile, fill, comm))
    if comm.size > 1:
        mine = down if comm.rank else rs.Move(wide, wide)
        yield "different moves", partial(refused, AgreementError, lambda: move_tile(tile, mine, comm))
    yield "it works afterwards", there_and_back


def updates(comm: MPI.Intracomm) -> Iterator[Case]:
    """Random moves of what ranks lack or hold stale, in place and into new tiles, alone and in a tree."""
    for seed in range(12):
        yield f"seed {seed}", partial(_update, comm, seed)
    mesh = rs.Mesh(x=comm.size)
    rows, columns = (
        rs.Layout.parse(text, mesh) for text in (f"f32[{{x}}4, {2 * comm.size}]", f"f32[{4 * comm.size}, {{x}}2]")
    )
    new = np.arange(8.0 * comm.size**2, dtype="float32").reshape(rows.shape)
    tile, held, refused = cut(rows, new)[comm.rank], cut(columns, -new)[comm.rank], partial(check_refused, comm)
    one = comm.rank == comm.size - 1

    def update(changed: Any, have: Any = held, **options: Any) -> Any:
        return redistribute(tile, rows, columns, comm, have=have, changed=changed, **options)

    def in_a_tree() -> None:
        mine = held.copy()
        moves = {"w": rs.Move(rows, columns, changed=[1]), "v": rs.Move(rows, columns)}
        moved = redistribute({"w": tile, "v": tile}, moves, None, comm, out={"w": mine}, verify=None)
        wanted = -new
        wanted[1] = new[1]
        assert moved["w"] is mine and np.array_equal(mine, cut(columns, wanted)[comm.rank])
        assert np.array_equal(moved["v"], cut(columns, new)[comm.rank])

    yield "in a tree", in_a_tree
    yield "other changes on one rank", partial(refused, AgreementError, lambda: update([1 + one]))
    yield "nothing held on one rank", partial(refused, TileError, lambda: update([1], None if one else held))
    yield "a tile of another shape", partial(refused, TileError, lambda: update([1], held[comm.rank :]))
    yield "rows that are none", partial(refused, PlanError, lambda: update([10**6] if one else [1]))
    yield "nothing said of what is held", partial(refused, PlanError, lambda: update(None))
    first, second = rs.Update(41, 42), rs.Update(42, 43)

    def in_order() -> None:
        mine, had = held.copy(), 41
        for update_of in first, second:
            update([1], mine, version=update_of, have_version=had)
            had = update_of.check_held(had)
        wanted = -new
        wanted[1] = new[1]
        assert np.array_equal(mine, cut(columns, wanted)[comm.rank])

    yield "versions in order", in_order
    twice, behind = ({"version": each, "have_version": 42 - one} for each in (first, second))
    yield "an update twice", partial(refused, VersionError, lambda: update([1], **{**twice, "have_version": 41 + one}))
    yield "an update too early", partial(refused, VersionError, lambda: update([1], **behind))
    yield "an update of another", partial(refused, AgreementError, lambda: update([1], version=rs.Update(40 + one, 42)))
    yield "an out beside it", partial(refused, PlanError, lambda: update([1], out=held.copy()))
    assert np.array_equal(held, cut(columns, -new)[comm.rank]), "what a refused call was given is written to"


def _update(comm: MPI.Intracomm, seed: int) -> None:
    choose = random.Random(f"updates/{seed}")
    while True:
        case = random_case(choose, most=96)
        if max(case.move.source.mesh.size, case.move.target.mesh.size) <= comm.size:
            break

    def on_ranks(layout: rs.Layout) -> rs.Layout:
        mesh = layout.mesh
        return replace(layout, mesh=rs.Mesh(mesh.axes, device_ids=choose.sample(range(comm.size), mesh.size)))

    source, target = on_ranks(case.move.source), on_ranks(case.move.target)
    changed, stale = random_changes(choose, source.shape)
    have = None
    if not case.move.view.into and choose.random() < 0.6:
        have = on_ranks(random_layout(choose, choose.choice([source.mesh, target.mesh]), target.shape, target.dtype))
    move = rs.Move(source, target, case.move.view, have=have, changed=changed)
    new = np.arange(stale.size, dtype=source.dtype).reshape(source.shape)
    wanted = case.reference(new)
    fresh = case.view.apply(~stale, np.ones(target.shape, bool))
    old = cut(move.have, np.where(fresh, wanted, -5))
    here = comm.rank in target.mesh.devices
    held = old.get(comm.rank) if here else None
    memory = Account("uint8")
    result = move_tile(cut(source, new).get(comm.rank), move, comm, have=held, memory=memory)
    assert (result is not None) == here and (have is not None or result is held)
    if here:
        tile = cut(target, wanted)[comm.rank]
        assert np.array_equal(result[tile != PADDING], tile[tile != PADDING]), move
    plan = rs.plan(move)
    assert max(comm.allgather(memory.received_bytes)) == plan.received_bytes
    assert max(comm.allgather(memory.peak_bytes)) <= plan.peak_bytes
