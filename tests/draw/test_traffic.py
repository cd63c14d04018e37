"""The traffic matrix: blocks of devices that share a cell, and the sizes that are refused."""

import numpy as np
import pytest

import reshard as rs
from reshard.draw.traffic import matrix, together, traffic_of
from reshard.errors import ReshardError
from reshard.types import Layout, Mesh
from reshard.types.plan import Plan


def planned(mesh: Mesh, source: str, target: str, **options) -> Plan:
    return rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh), **options)


def test_blocks_of_devices_share_a_cell_and_nothing_is_lost():
    mesh = Mesh(x=512)
    plan = planned(mesh, "f32[{x}1, 512]", "f32[512, {x}1]")
    cells = matrix(traffic_of(plan), sorted(mesh.devices), together(mesh.size))
    assert cells.shape == (256, 256) and cells.sum() == 512 * plan.received_bytes


def test_a_cell_for_each_pair_of_devices():
    plan = planned(Mesh(x=4), "f32[{x}4, 4]", "f32[16, {x}1]")
    assert np.array_equal(matrix(traffic_of(plan), [0, 1, 2, 3], 1), 16 * (1 - np.eye(4)))


def test_senders_are_rows_and_receivers_columns():
    """Uneven pieces: device 3 holds one element of ten and lacks nine, the others lack seven."""
    plan = planned(Mesh(x=4), "f32[{x}3/10]", "f32[10]")
    cells = matrix(traffic_of(plan), [0, 1, 2, 3], 1)
    assert cells.sum(axis=0).tolist() == [28, 28, 28, 36]
    assert cells[3].tolist() == [4, 4, 4, 0]


def test_too_many_devices_or_launches_are_refused():
    with pytest.raises(ReshardError, match=r"1024 devices .*at most 512"):
        traffic_of(planned(Mesh(x=1024), "f32[{x}1]", "f32[1024]"))
    many = planned(Mesh(x=8), "f32[{x}8192, 65536]", "f32[65536, {x}8192]", budget=2 * 4 * 8192 * 65536)
    with pytest.raises(ReshardError, match="launches on 8 devices are too many"):
        traffic_of(many)
