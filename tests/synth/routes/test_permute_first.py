"""Routes over permutes: every one runs, and a permute is what makes the numerals nest."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import reshard as rs
from reshard.plans.rules.collectives import check_step
from reshard.synth.routes import Pair, permute_first
from reshard.synth.routes.permute_first import (
    _end_holders,
    _match_leading,
    is_permute,
    list_before_gathers,
    routes,
    slice_source,
)
from reshard.types import Layout, Mesh
from tests.layouts import contiguous_layouts
from tests.synth.routes.candidates import pair_of, runs

MESHES = (Mesh(x=2, y=3), Mesh(x=4, y=3), Mesh(x=3, y=2, z=2), Mesh(x=5, y=2), Mesh(x=6, y=4))


def random_pairs(seed: int, count: int) -> Iterator[Pair]:
    """Pairs of contiguous layouts, of even and uneven sizes."""
    choose = random.Random(seed)
    for _ in range(count):
        mesh = choose.choice(MESHES)
        shape = tuple(choose.choice((mesh.size, 2 * mesh.size, 7, 30)) for _ in range(choose.randint(1, 2)))
        every = list(contiguous_layouts(mesh, shape))
        yield Pair(choose.choice(every), choose.choice(every))


@pytest.mark.fast(1)
@pytest.mark.parametrize("seed", range(2))
def test_every_route_runs(seed: int):
    seen = 0
    for pair in random_pairs(seed, 120):
        for links in (None, rs.Network.uniform(1e-6, 1e9).links(pair.source.mesh)):
            for route in routes(pair, links):
                seen += 1
                runs(pair, route)
    assert seen > 100


def test_the_example_of_the_module():
    mesh = Mesh(y=3, x=2)
    ((permute, gather), *_) = routes(pair_of("f32[{y}{x}2]", "f32[{x}6]", mesh), None)
    assert (permute.kind, str(permute.result)) == ("permute", "f32[{x}{y}2]")
    assert (gather.kind, str(gather.result)) == ("all_gather", "f32[{x}6]")


def test_pairs_that_nest_are_routed_only_for_a_network_and_not_for_too_many_devices(monkeypatch: pytest.MonkeyPatch):
    mesh = Mesh(x=4, y=3)
    pair = pair_of("f32[{x}{y}1, 12]", "f32[12, {y}{x}1]", mesh)
    links = rs.Network.uniform(1e-6, 1e9).links(mesh)
    assert pair.refinement is not None
    assert list(routes(pair, None)) == []
    assert list(routes(pair, links))
    monkeypatch.setattr(permute_first, "MOST_DEVICES", 11)
    assert list(routes(pair, links)) == []


def test_reductions_and_other_layouts_are_left_to_others():
    mesh = Mesh(x=2, y=3)
    assert list(routes(pair_of("f32[6] + sum{x}", "f32[6]", mesh), None)) == []
    assert list(routes(pair_of("f32[2{y}2]", "f32[{x}6]", mesh), None)) == [], "not contiguous"


@pytest.mark.parametrize(
    ("source", "target", "answer"),
    [
        ("f32[{y}{x}]", "f32[{x}{y}]", True),
        ("f32[{x}3]", "f32[{y}2]", False),
        ("f32[{x}3]", "f32[6]", False),
        ("f32[{x}6, 4]", "f32[12, {x}2]", False),
    ],
)
def test_permutes(source: str, target: str, answer: bool):
    pair = pair_of(source, target, Mesh(x=2, y=3))
    assert is_permute(pair.source, pair.target) == answer


def test_one_gather_leads_on_from_layouts_before_gathers():
    seen = 0
    for pair in random_pairs(7, 300):
        for between in list_before_gathers(pair.source, pair.target):
            seen += 1
            assert check_step("all_gather", between, pair.target).received < pair.target.tile_bytes
            assert between.tile_bytes < pair.target.tile_bytes
    assert seen > 50


def test_only_leading_factors_of_the_target_agree():
    two, other, three = (4, 2), (2, 2), (1, 3)
    assert _match_leading([two, other], [other, three]) == ([other], [2])
    assert _match_leading([two, other], [three, other]) == ([], [2, 2])
    assert _match_leading([three], [three, two]) == ([three], [])


def test_the_last_permute_puts_a_dim_in_the_order_of_the_target_and_what_is_spent_last():
    one, two, spent = (1, 2), (2, 2), (4, 3)
    assert _end_holders([[spent, one, two], []], [[two, one], []]) == [[two, one, spent], []]


def test_sliced_takes_what_divides_and_holds_the_rest_back():
    mesh = Mesh(x=2, y=3, z=2)
    source, target = Layout.parse("f32[{x}6, 8]", mesh), Layout.parse("f32[{y}4, {z}4]", mesh)
    assert [str(layout) for layout in slice_source(source, target, []) or ()] == ["f32[{x}{y}2, {z}4]"] * 2
    stride = mesh.stride(mesh.sub_axis("z"))
    first, whole = slice_source(source, target, [(stride, 2 * stride)]) or (None, None)
    assert (str(first), str(whole)) == ("f32[{x}{y}2, 8]", "f32[{x}{y}2, {z}4]")
    short = Layout.parse("f32[{x}5, 8]", mesh), Layout.parse("f32[{y}4/10, {z}4]", mesh)
    assert [str(layout) for layout in slice_source(*short, []) or ()] == ["f32[{x}5, {z}4]"] * 2
    assert slice_source(Layout.parse("f32[2{x}3, 8]", mesh), target, []) is None
