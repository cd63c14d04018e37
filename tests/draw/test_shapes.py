"""Colours by coordinate: all differ, and devices of one first coordinate share a hue."""

import colorsys
import itertools

import pytest

from reshard.draw.shapes import by_coordinate
from reshard.types import Mesh


@pytest.mark.parametrize("mesh", [Mesh(x=1), Mesh(x=8), Mesh(x=8, y=8), Mesh(x=1, y=16), Mesh(a=2, b=4, c=8)])
def test_every_device_has_its_own_colour(mesh: Mesh):
    colours = by_coordinate(mesh)
    assert set(colours) == set(mesh.devices) and len(set(colours.values())) == mesh.size


def test_the_first_axis_is_the_hue():
    hues: dict[int, list[float]] = {}
    for device, colour in by_coordinate(Mesh(x=8, y=8)).items():
        rgb = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        hues.setdefault(device // 8, []).append(colorsys.rgb_to_hls(*rgb)[0])
    assert all(max(same) - min(same) < 0.02 for same in hues.values())
    assert all(min(b) - max(a) > 0.05 for a, b in itertools.pairwise(hues.values()))
