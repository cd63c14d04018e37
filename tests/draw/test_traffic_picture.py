"""The traffic matrix: blocks of devices that share a cell, and the sizes that are refused."""

import numpy as np
import pytest

import reshard as rs
from reshard.draw import canvas
from reshard.draw.traffic_picture import matrix, together, traffic_of
from reshard.errors import ReshardError
from reshard.runtime import Account
from reshard.types import Layout, Mesh
from reshard.types.plan import Plan, StepSpec, chain
from tests.draw.cases import CASES, picture
from tests.draw.cases import planned as case
from tests.draw.reading import labelled, words


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
    """Pieces of 3 become pieces of 4: element 3 goes from device 1 to 0, 6 and 7 from 2 to 1, and 9 from 3 to 2."""
    plan = planned(Mesh(x=4), "f32[{x}3/10]", "f32[1{x}4/10]")
    cells = matrix(traffic_of(plan), [0, 1, 2, 3], 1)
    assert cells.tolist() == [[0, 0, 0, 0], [4, 0, 0, 0], [0, 8, 0, 0], [0, 0, 4, 0]]


def test_too_many_devices_or_launches_are_refused():
    with pytest.raises(ReshardError, match=r"1024 devices .*at most 512"):
        traffic_of(planned(Mesh(x=1024), "f32[{x}1]", "f32[1024]"))
    many = planned(Mesh(x=8), "f32[{x}8192, 65536]", "f32[65536, {x}8192]", budget=2 * 4 * 8192 * 65536)
    with pytest.raises(ReshardError, match="launches on 8 devices are too many"):
        traffic_of(many)


@pytest.mark.parametrize("name", list(CASES))
def test_the_matrix_has_what_each_device_receives(name):
    plan = case(name)
    memory = Account(plan.source.dtype)
    tiles = {device: np.ones(plan.source.tile_shape, plan.source.dtype) for device in plan.source.mesh.devices}
    rs.simulate(plan, tiles, memory)
    cells = labelled(picture(name), "traffic").images[0].get_array().filled(0)
    ids = sorted(plan.source.mesh.devices)
    assert cells.sum(axis=0).tolist() == [memory.received[device] for device in ids]
    assert not cells.diagonal().any()


@pytest.mark.parametrize("name", list(CASES))
def test_the_worst_device_is_named(name):
    plan = case(name)
    written = words(picture(name))
    if not plan.received_bytes:
        assert "nothing moves" in written
        return
    assert f"receives {canvas.bytes_text(plan.received_bytes)}, as planned" in written


def test_fewer_bytes_than_planned_are_named():
    """In each of these two uneven steps, another device receives the most."""
    mesh = Mesh(x=4)
    threes, fours = Layout.parse("f32[{x}3/10]", mesh), Layout.parse("f32[1{x}4/10]", mesh)
    plan = chain(threes, threes, [StepSpec("exchange", fours), StepSpec("exchange", threes)])
    assert plan.received_bytes == 16
    assert "receives 12 B of the 16 B planned" in words(plan.draw("traffic"))


def test_many_devices_share_a_row():
    mesh = Mesh(x=512)
    plan = rs.plan(Layout.parse("f32[{x}1, 512]", mesh), Layout.parse("f32[512, {x}1]", mesh))
    figure = plan.draw("traffic")
    cells = labelled(figure, "traffic").images[0].get_array().filled(0)
    assert cells.shape == (256, 256) and cells.sum() == 512 * plan.received_bytes
    assert "2 x 2 devices" in words(figure)
