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


def kinds(pair: Pair) -> list[list[str]]:
    return [[step.kind for step in route] for route in boxes.routes(pair, None)]


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


@pytest.mark.parametrize(
    ("source", "target", "mesh", "expected"),
    [
        # Six pieces of two, counted in two orders.
        ("f32[{y}{x}2/11]", "f32[{x}{y}2/11]", Mesh(x=2, y=3), ["permute"]),
        # Dim 1 refines: sliced before, gathered after.
        ("f32[{x}3/10, 16]", "f32[{x}{y}2/10, {z}8]", Mesh(x=4, y=2, z=2), ["slice", "exchange"]),
        ("f32[{x}{y}2/10, {z}8]", "f32[{x}3/10, 16]", Mesh(x=4, y=2, z=2), ["exchange", "all_gather"]),
        ("f32[{x}3/10, 16]", "f32[{x}{y}2/10, {z}8]", Mesh(z=2, x=4, y=2), ["slice", "exchange"]),
        # An exchange to a layout that is cut further than the target, by the spent x, and a gather.
        ("f32[{x}6, 6]", "f32[{y}4, 6]", Mesh(x=2, y=3), ["exchange", "all_gather"]),
        # Counted as the target counts, gathered in part, so that few pieces of either meet.
        ("f32[{y}{x}158/10067]", "f32[{x}1259/10067]", Mesh(x=8, y=8), ["permute", "all_gather", "exchange"]),
        ("f32[{x}{y}158/10067]", "f32[{x}1259/10067]", Mesh(x=8, y=8), ["all_gather", "exchange"]),
        # An exchange to an uneven layout that is cut further, and a gather.
        ("f32[{x}20/119]", "f32[{y}30/119]", Mesh(x=6, y=4), ["exchange", "all_gather"]),
        # Dealt out anew: x last, so that y can stand before it.
        ("f32[{x}3, {y}2]", "f32[{y}2, 6]", Mesh(x=2, y=3), ["exchange", "all_to_all", "all_gather"]),
    ],
)
def test_known_routes(source: str, target: str, mesh: Mesh, expected: list[str]):
    pair = pair_of(source, target, mesh)
    assert pair.refinement is None
    assert expected in kinds(pair)


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
    links = rs.Network.uniform(1e-6, 1e9).links(mesh)
    assert pair.refinement is not None
    assert list(routes(pair, None)) == []
    assert list(routes(pair, links))
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
