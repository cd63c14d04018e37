"""Who sends how much to whom: blocks of devices that share a cell, and the sizes that are refused."""

import pytest

import reshard as rs
from reshard.draw.vector_traffic import TrafficCells, traffic_of
from reshard.errors import ReshardError
from reshard.plans.plan import Plan
from reshard.types import Layout, Mesh


def planned(mesh: Mesh, source: str, target: str, budget: int | None = None) -> Plan:
    return rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh), budget)


def test_blocks_of_devices_share_a_cell_and_nothing_is_lost():
    plan = planned(Mesh(x=512), "f32[{x}1, 512]", "f32[512, {x}1]")
    cells = TrafficCells(plan, 64)
    assert len(cells.rows) == 64 and cells.together == 8 and cells.groups[1] == list(range(8, 16))
    assert sum(map(sum, cells.rows)) == 512 * plan.received_bytes
    assert cells.notes[-1] == "each cell: 8 x 8 devices, their sum"


def test_senders_are_rows_and_receivers_columns():
    """Pieces of 3 become pieces of 4: element 3 goes from device 1 to 0, 6 and 7 from 2 to 1, and 9 from 3 to 2."""
    plan = planned(Mesh(x=4), "f32[{x}3/10]", "f32[1{x}4/10]")
    assert TrafficCells(plan, 64).rows == [[0, 0, 0, 0], [4, 0, 0, 0], [0, 8, 0, 0], [0, 0, 4, 0]]


def test_too_many_devices_or_launches_are_refused():
    with pytest.raises(ReshardError, match=r"1024 devices .*at most 512"):
        traffic_of(planned(Mesh(x=1024), "f32[{x}1]", "f32[1024]"))
    many = planned(Mesh(x=8), "f32[{x}8192, 65536]", "f32[65536, {x}8192]", 2 * 4 * 8192 * 65536)
    with pytest.raises(ReshardError, match="launches on 8 devices are too many"):
        traffic_of(many)
