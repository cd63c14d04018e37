"""What each device lacks, against a count of elements one by one."""

from __future__ import annotations

from hypothesis import given, settings

import reshard as rs
from reshard.geometry.exchange_stats import ByDevice, lacking
from tests.layouts import pairs
from tests.oracle import PADDING, tiles_of


@given(pairs())
@settings(max_examples=80, deadline=None)
def test_it_is_a_count_of_elements(ends: tuple[rs.Layout, rs.Layout]):
    source, target = ends
    held, wanted, lacks = tiles_of(source), tiles_of(target), lacking(source, target)
    for device in target.mesh.devices:
        count = len({*wanted[device].flat} - {*held[device].flat} - {PADDING})
        assert count == (lacks.each if lacks.listed is None else lacks.listed[device])


def test_meshes_too_large_to_list_have_the_worst_devices_figure():
    mesh = rs.Mesh(x=1 << 15, y=2)
    source, target = (rs.Layout.parse(text, mesh) for text in ("f32[{x}{y}2]", "f32[{y}{x}2]"))
    assert lacking(source, target) == ByDevice(2)
    uneven = rs.Layout.parse(f"f32[{{x}}4/{(1 << 17) - 1}]", mesh)
    assert lacking(uneven, rs.Layout.parse(f"f32[{{y}}{1 << 16}/{(1 << 17) - 1}]", mesh)) == ByDevice(1 << 16)
