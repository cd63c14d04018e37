"""Traffic as SVG: every square says who sends what to whom, in the colour that its sender has as tiles."""

import re
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest

import reshard as rs
from reshard.draw.vector_tiles import scene
from reshard.draw.vector_traffic import traffic_svg
from reshard.runtime import Account
from reshard.types import Layout, Mesh
from reshard.types.units import parse_bytes
from tests.draw.cases import CASES, planned

NAME = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", list(CASES))
def test_the_squares_add_up_to_what_each_device_receives(name: str):
    plan = planned(name)
    memory = Account(plan.source.dtype)
    tiles = {device: np.ones(plan.source.tile_shape, plan.source.dtype) for device in plan.source.mesh.devices}
    rs.simulate(plan, tiles, memory)
    received, colour = Counter[int](), scene(plan).colour
    for row in ElementTree.fromstring(traffic_svg(plan)[0]).iter(f"{NAME}g"):
        for title in row.iter(f"{NAME}title"):
            match = re.fullmatch(r"(\d+) to (\d+): (.+)", title.text or "")
            assert match and row.get("fill") == colour[int(match[1])]
            received[int(match[2])] += parse_bytes(match[3].replace(" ", ""))
    assert received == Counter({device: count for device, count in memory.received.items() if count})


def test_larger_squares_are_more_bytes_and_numbers_are_written_where_they_fit():
    mesh = Mesh(x=16)
    uneven = rs.plan(Layout.parse("f32[{x}3/43]", mesh), Layout.parse("f32[1{x}5/43]", mesh), slack=0)
    svg, caption = traffic_svg(uneven)
    paths = [element for element in ElementTree.fromstring(svg).iter(f"{NAME}path") if len(element)]
    sides = {float(path.get("d", "").partition("h")[2].partition("v")[0]): path[0].text or "" for path in paths}
    words = [title.partition(": ")[2] for _, title in sorted(sides.items())]
    assert words == ["4 B", "8 B", "12 B"] and "The larger a square" in caption
    svg, caption = traffic_svg(planned("three dims"))
    assert svg.count(">256 B</text>") == 8 * 7 and "larger" not in caption


def test_devices_share_rows_where_they_are_many():
    mesh = Mesh(x=256)
    svg, caption = traffic_svg(rs.plan(Layout.parse("f32[{x}1, 256]", mesh), Layout.parse("f32[256, {x}1]", mesh)))
    assert "<title>0-3 to 4-7: 64 B</title>" in svg and "4 x 4 devices, their sum" in caption
    assert len(svg) < 1_000_000
