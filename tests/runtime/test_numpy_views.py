"""Views on numpy: what is counted, and what the caller's arrays keep."""

import numpy as np
import pytest

import reshard as rs
from reshard.errors import TileError
from reshard.geometry.blocks import Axis, Block
from reshard.lower.exchange_rounds import Exchange, Transfer
from reshard.plans.rules.tile_view import TileView
from reshard.runtime import Account
from reshard.runtime.on_numpy import run_instruction

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


def test_a_block_outside_of_a_tile_is_refused():
    tile = TileView((4,), (4,), (4,), (0,), ())
    for place, stride in ((3, 1), (-1, 1), (0, 4)):
        block = Block(place, 0, (Axis(2, stride, 1),))
        step = Exchange(tile, tile, (0,), (Transfer(0, 0, (block,)),), (), staged=False, strided=True)
        with pytest.raises(TileError, match="leaves a tile"):
            run_instruction(step, {0: np.zeros(4)}, (4,), Account("float64"))
