"""The topic of `reshard.mpi.move`: casts with scales, and mistakes of one rank; `trees` has random views."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.errors import AgreementError, ReshardError, TileError
from reshard.mpi import move as move_tile
from tests.mpi.moving import check_refused
from tests.mpi.worker import Case
from tests.view_oracle import cut


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
