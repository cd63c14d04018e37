"""The traffic matrix as a figure: what each device receives, and the colours of the devices along its edges."""

import numpy as np
import pytest

import reshard as rs
from reshard.draw import canvas
from reshard.plans.plan import StepSpec, chain
from reshard.runtime import Account
from reshard.types import Layout, Mesh
from tests.draw.cases import CASES, picture
from tests.draw.cases import planned as case
from tests.draw.reading import labelled, words


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
