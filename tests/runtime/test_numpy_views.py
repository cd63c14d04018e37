"""Views on numpy: what is counted, and what the caller's arrays keep."""

import numpy as np
import pytest

import reshard as rs
from reshard.errors import TileError
from reshard.geometry.view_boxes import StridedBox
from reshard.lower.views import StridedTransfer, ViewExchange
from reshard.runtime import Account
from reshard.runtime.on_numpy import NO_EXTRAS, run_view

MESH = rs.Mesh(x=2)


def test_an_alias_takes_no_memory_and_is_not_the_callers_array():
    layouts = [rs.Layout.parse(text, MESH) for text in ("int64[{x}6]", "int64[{x}, 6]")]
    plan = rs.plan(rs.Move(*layouts, view="(a b) -> a b", a=2))
    tiles = {device: np.arange(6) for device in MESH.devices}
    memory = Account("int64")
    moved = rs.simulate(plan, tiles, memory)
    assert memory.peak_bytes == plan.peak_bytes == 48
    moved[0][...] = -1
    assert tiles[0][1] == 1


def test_a_cast_is_counted_in_both_dtypes():
    layouts = [rs.Layout.parse(text, MESH) for text in ("f32[{x}8]", "bf16[16]")]
    plan = rs.plan(rs.Move(*layouts, cast=True))
    memory = Account("float32")
    rs.simulate(plan, {device: np.zeros(8, "f4") for device in MESH.devices}, memory)
    assert (memory.peak_bytes, memory.received_bytes) == (plan.peak_bytes, plan.received_bytes) == (80, 16)
    assert set(memory.live.values()) == {64}


def test_a_box_outside_of_a_tile_is_refused():
    for place, stride in ((3, 1), (-1, 1), (0, 4)):
        box = StridedBox(place, 0, (2,), (stride,), (1,))
        step = ViewExchange((0,), (StridedTransfer(0, 0, (box,)),), (), False, False)
        with pytest.raises(TileError, match="leaves a tile"):
            run_view(step, {0: np.zeros(4)}, (4,), Account("float64"), NO_EXTRAS)
