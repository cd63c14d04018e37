"""`reshard.runtime.account`, on the numpy runtime and on MPI, beside what Python's allocator sees."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import reshard as rs
from reshard.errors import TileError
from reshard.runtime import Account, measure
from tests.mpi import running

MESH = rs.Mesh(x=4)
ROWS = rs.Layout.from_spec(MESH, (1024, 1024), "float64", [["x"]])
COLUMNS = rs.Layout.from_spec(MESH, (1024, 1024), "float64", [[], ["x"]])
SLACK = 256 << 10


def _tiles(layout: rs.Layout) -> dict[int, np.ndarray]:
    return {device: np.ones(layout.tile_shape) for device in layout.mesh.devices}


def test_it_reports_what_the_plan_promises():
    plan, back = rs.plan(ROWS, COLUMNS), rs.plan(COLUMNS, ROWS)
    with measure() as measured:
        rs.simulate(back, rs.simulate(plan, _tiles(ROWS)))
    rs.simulate(plan, _tiles(ROWS))
    assert len(measured.calls) == 2
    assert measured.peak == dict.fromkeys(MESH.devices, max(plan.peak_bytes, back.peak_bytes))
    assert measured.received == dict.fromkeys(MESH.devices, plan.received_bytes + back.received_bytes)
    assert measured.peak_bytes == plan.peak_bytes
    assert measured.received_bytes == plan.received_bytes + back.received_bytes


def test_nothing_inside_is_nothing():
    with measure() as measured:
        pass
    assert (measured.calls, measured.peak_bytes, measured.received_bytes) == ([], 0, 0)


def test_measurements_nest_and_end_with_an_error():
    plan = rs.plan(ROWS, COLUMNS)
    with measure() as outer:
        with pytest.raises(TileError), measure() as inner:
            rs.simulate(plan, {})
        rs.simulate(plan, _tiles(ROWS))
    assert inner.peak_bytes == 0
    assert outer.peak_bytes == plan.peak_bytes


def test_an_account_that_a_caller_gives_is_the_one_that_is_measured():
    from reshard.lower import lower
    from reshard.runtime import run

    own = Account("float64")
    with measure() as measured:
        run(lower(rs.plan(ROWS, COLUMNS)), _tiles(ROWS), own)
    assert measured.calls == [own]


def test_the_numpy_runtime_allocates_what_it_counts():
    """All devices are in one process here, so their buffers are live together."""
    plan, tiles = rs.plan(ROWS, COLUMNS), _tiles(ROWS)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        with measure() as measured:
            rs.simulate(plan, tiles)
        grown = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    counted = sum(measured.peak.values()) - sum(tile.nbytes for tile in tiles.values())
    assert counted - SLACK <= grown <= counted + SLACK


@pytest.mark.parametrize("topic", ["together", "allocated"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks(topic: str, ranks: int, tmp_path: Path):
    pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")
    running.check(f"measuring.{topic}", ranks, tmp_path)
