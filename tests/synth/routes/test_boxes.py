"""Routes between layouts that do not refine: exchanges of boxes, and permutes before structured steps."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import reshard as rs
from reshard.plans.plan import StepSpec, chain
from reshard.synth.routes import Pair, boxes, permute_first
from reshard.synth.routes.permute_first import (
    routes,
    slice_source,
)
from reshard.types import Layout, Mesh
from tests.layouts import contiguous_layouts, random_pair
from tests.synth.routes.candidates import pair_of, runs


def random_pairs(seed: int, count: int) -> Iterator[Pair]:
    """Random pairs that have no common refinement."""
    choose = random.Random(seed)
    while count:
        pair = Pair(*random_pair(choose))
        if pair.refinement is None:
            count -= 1
            yield pair


def test_every_route_runs_and_the_exchange_alone_meets_the_bound():
    for pair in random_pairs(0, 100):
        routes = list(boxes.routes(pair, None))
        assert (StepSpec("exchange", pair.target),) in routes
        for route in routes:
            plan = runs(pair, route)
            assert plan.received_bytes >= plan.lower_bound_bytes
        alone = chain(pair.source, pair.target, (StepSpec("exchange", pair.target),))
        assert alone.received_bytes == alone.lower_bound_bytes


# ---- Routes over permutes: every one runs, and a permute is what makes the numerals nest ----

MESHES = (Mesh(x=2, y=3), Mesh(x=4, y=3), Mesh(x=3, y=2, z=2), Mesh(x=5, y=2), Mesh(x=6, y=4))


def random_pairs_permute_first(seed: int, count: int) -> Iterator[Pair]:
    """Pairs of contiguous layouts, of even and uneven sizes."""
    choose = random.Random(seed)
    for _ in range(count):
        mesh = choose.choice(MESHES)
        shape = tuple(choose.choice((mesh.size, 2 * mesh.size, 7, 30)) for _ in range(choose.randint(1, 2)))
        every = list(contiguous_layouts(mesh, shape))
        yield Pair(choose.choice(every), choose.choice(every))


def test_every_route_runs():
    seen = 0
    for pair in random_pairs_permute_first(0, 100):
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
    links = rs.Network.of({"x": (1e-5, 1e8), "y": (1e-6, 1e9)}).links(mesh)
    assert pair.refinement is not None
    assert list(routes(pair, None)) == []
    assert list(routes(pair, links))
    assert list(routes(pair, rs.Network.uniform(1e-6, 1e9).links(mesh))) == []  # Equal links gain nothing by it.
    monkeypatch.setattr(permute_first, "MOST_DEVICES", 11)
    assert list(routes(pair, links)) == []


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
