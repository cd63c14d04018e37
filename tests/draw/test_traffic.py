"""The picture of the traffic: every square says who sends what to whom, in the colour that its sender has as tiles."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

import reshard as rs
from reshard.draw.tile_panels import choose_panels
from reshard.draw.traffic_matrix import draw_traffic, group_traffic
from reshard.errors import ReshardError
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.runtime import Account
from reshard.types import Layout, Mesh
from reshard.types.units import bytes_text, parse_bytes
from tests.draw.cases import CASES
from tests.draw.cases import planned as case
from tests.draw.reading import areas, texts


def planned(mesh: Mesh, source: str, target: str, budget: int | None = None) -> Plan:
    return rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh), budget)


@pytest.mark.parametrize("name", list(CASES))
def test_the_squares_add_up_to_what_each_device_receives(name: str):
    plan = case(name)
    account = Account(plan.source.dtype)
    tiles = {device: np.ones(plan.source.tile_shape, plan.source.dtype) for device in plan.source.mesh.devices}
    rs.simulate(plan, tiles, account)
    received, colour, scene = Counter[int](), choose_panels(plan).colour, draw_traffic(plan)
    for square in areas(scene):
        match = re.fullmatch(r"(\d+) to (\d+): (.+)", square.title)
        assert match and square.fills == (colour[int(match[1])],) and match[1] != match[2]
        received[int(match[2])] += parse_bytes(match[3].replace(" ", ""))
    assert received == Counter({device: count for device, count in account.received.items() if count})
    worst = f"receives {bytes_text(plan.received_bytes)}, as planned"
    assert (worst if plan.received_bytes else "Nothing moves.") in scene.caption


def test_larger_squares_are_more_bytes_and_numbers_are_written_where_they_fit():
    mesh = Mesh(x=16)
    uneven = draw_traffic(rs.plan(Layout.parse("f32[{x}3/43]", mesh), Layout.parse("f32[1{x}5/43]", mesh), slack=0))
    sides = {round(square.bounds[1][0] - square.bounds[0][0], 3): square.title for square in areas(uneven)}
    words = [title.partition(": ")[2] for _, title in sorted(sides.items())]
    assert words == ["4 B", "8 B", "12 B"] and "The larger a square" in uneven.caption
    even = draw_traffic(case("three dims"))
    assert texts(even).count("256 B") == 8 * 7 and "larger" not in even.caption


def test_devices_share_rows_where_they_are_many_and_nothing_is_lost():
    plan = planned(Mesh(x=512), "f32[{x}1, 512]", "f32[512, {x}1]")
    cells = group_traffic(plan, 64)
    assert len(cells.rows) == 64 and cells.groups[1] == list(range(8, 16))
    assert sum(map(sum, cells.rows)) == 512 * plan.received_bytes
    scene = draw_traffic(plan)
    assert "0-7 to 8-15: 256 B" in {square.title for square in areas(scene)}
    assert scene.caption.endswith("each cell: 8 x 8 devices, their sum.")


def test_senders_are_rows_and_receivers_columns():
    """Pieces of 3 become pieces of 4: element 3 goes from device 1 to 0, 6 and 7 from 2 to 1, and 9 from 3 to 2."""
    plan = planned(Mesh(x=4), "f32[{x}3/10]", "f32[1{x}4/10]")
    assert group_traffic(plan, 64).rows == [[0, 0, 0, 0], [4, 0, 0, 0], [0, 8, 0, 0], [0, 0, 4, 0]]
    for square in areas(draw_traffic(plan)):
        (left, top), _, _, _ = square.bounds
        sender, receiver = map(int, square.title.partition(":")[0].split(" to "))
        assert (int((left - 62) / 75), int((top - 58) / 75)) == (receiver, sender)


def test_fewer_bytes_than_planned_are_named():
    """In each of these two uneven steps, another device receives the most."""
    mesh = Mesh(x=4)
    threes, fours = Layout.parse("f32[{x}3/10]", mesh), Layout.parse("f32[1{x}4/10]", mesh)
    plan = chain(threes, threes, [StepSpec("exchange", fours), StepSpec("exchange", threes)])
    assert plan.received_bytes == 16
    assert "receives 12 B of the 16 B planned" in draw_traffic(plan).caption


def test_too_many_devices_or_launches_are_refused():
    with pytest.raises(ReshardError, match=r"1024 devices .*at most 512"):
        draw_traffic(planned(Mesh(x=1024), "f32[{x}1]", "f32[1024]"))
    many = planned(Mesh(x=8), "f32[{x}8192, 65536]", "f32[65536, {x}8192]", 2 * 4 * 8192 * 65536)
    with pytest.raises(ReshardError, match="launches on 8 devices are too many"):
        draw_traffic(many)
