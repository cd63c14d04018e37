"""`reshard show`: the facts about a layout, and its picture cut to the terminal."""

import re

from tests.cli.cases import MESH


def test_it_draws_a_grid(call):
    ran = call("show", *MESH, "f32[{x}4, {y}8]")
    assert ran.code == 0
    assert "  8:12 │  4   │  5   │" in ran.out
    assert "mesh     <x=4, y=2>, 8 devices" in ran.out
    assert "tile     4 x 8, 128 B a device" in ran.out
    assert "copies   1 of every element" in ran.out


def test_it_draws_strips_that_fit(call):
    ran = call("show", *MESH, "f32[6{x}64]", columns=80)
    assert max(map(len, ran.out.splitlines())) <= 80
    assert ran.out.count("4-5") == 6
    assert "copies   2 of every element: the same along y" in ran.out


def test_it_lists_devices_for_more_dims(call):
    ran = call("show", *MESH, "f32[2{y}4, 16, 3{x}2]")
    assert re.search(r"3 +1 +1 +4:8, 12:16 +0:16 +2:4, 10:12, 18:20\n", ran.out)


def test_it_cuts_large_pictures_and_names_the_rest(call):
    ran = call("show", "--mesh", "x=1024,y=1024", "bf16[{x}1000000, {y}4096, 128]", "--limit", "10", columns=80)
    lines = ran.out.splitlines()
    assert len(lines) < 50
    assert max(map(len, lines)) <= 80
    assert "... and 1019 more pieces of dim 0, up to 1024000000" in lines
    assert "... and 1048566 more devices; --limit shows more rows" in lines
