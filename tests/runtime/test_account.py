"""Accounts and `measure`, on the numpy runtime and on MPI, compared with Python's own allocator."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import reshard as rs
from reshard.errors import TileError
from reshard.lower import lower_plan
from reshard.runtime import Account, measure, run
from reshard.runtime.account import begin_account
from tests.mpi import running

MESH = rs.Mesh(x=4)
ROWS = rs.Layout.from_spec(MESH, (1024, 1024), "float64", [["x"]])
COLUMNS = rs.Layout.from_spec(MESH, (1024, 1024), "float64", [[], ["x"]])
SLACK = 256 << 10


def _tiles(layout: rs.Layout) -> dict[int, np.ndarray]:
    return {device: np.ones(layout.tile_shape) for device in layout.mesh.devices}


def test_measurements_are_what_plans_promise():
    plan, back = rs.plan(ROWS, COLUMNS), rs.plan(COLUMNS, ROWS)
    with measure() as measured:
        rs.simulate(back, rs.simulate(plan, _tiles(ROWS)))
    rs.simulate(plan, _tiles(ROWS))
    assert len(measured.calls) == 2
    assert measured.peak == dict.fromkeys(MESH.devices, max(plan.peak_bytes, back.peak_bytes))
    assert measured.received == dict.fromkeys(MESH.devices, plan.received_bytes + back.received_bytes)
    assert measured.peak_bytes == plan.peak_bytes
    assert measured.received_bytes == plan.received_bytes + back.received_bytes
    figures = f"received_bytes={measured.received_bytes}, peak_bytes={measured.peak_bytes}"
    assert repr(measured) == f"Measured(calls=2, {figures})"


def test_a_measurement_without_calls_is_zero():
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


def test_a_callers_own_account_is_measured():
    own = Account("float64")
    with measure() as measured:
        run(lower_plan(rs.plan(ROWS, COLUMNS)), _tiles(ROWS), own)
    assert measured.calls == [own]


def test_an_account_is_measured_once():
    """A call that passes its account on to another one counts as one call."""
    with measure() as measured:
        outer = begin_account("float32")
        assert begin_account("float32", outer) is outer
        other = begin_account("float32")
    assert measured.calls == [outer, other]
    assert begin_account("float32") not in measured.calls


def test_an_account_by_hand():
    account = Account("int4")
    for elements in (3, 4):
        account.take(0, elements)
    assert (account.live[0], account.peak_bytes) == (4, 4)  # 2 bytes each
    account.free(0, 3)
    account.take(1, 1)
    account.receive(1, 2)
    account.receive(1, 3)
    assert (account.live, account.peak) == ({0: 2, 1: 1}, {0: 4, 1: 1})
    assert account.received == {1: 3}  # five half bytes, packed
    assert (account.peak_bytes, account.received_bytes) == (4, 3)
    assert Account("float32").peak_bytes == Account("float32").received_bytes == 0


def test_maxima_and_sums_over_calls():
    """Device 0 has its peak in the first call and device 1 in the second; received bytes add up."""
    with measure() as measured:
        one, other = begin_account("float32"), begin_account("float64")
    for account, device in ((one, 0), (other, 1)):
        account.take(device, 6)
        account.take(1 - device, 1)
        account.receive(0, 2)
    assert measured.peak == {0: 24, 1: 48}
    assert measured.received == {0: 8 + 16}
    assert (measured.peak_bytes, measured.received_bytes) == (48, 24)


def test_the_numpy_runtime_allocates_what_it_counts():
    """All devices share one process here, so that the sum of their buffers is live at once."""
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


@pytest.mark.slow
def test_on_ranks(tmp_path: Path):
    pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")
    running.check_all(["measuring.together", "measuring.allocated"], 4, tmp_path)
