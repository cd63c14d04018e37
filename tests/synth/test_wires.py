"""Predicted times against what the wires of small tori need at least: by cuts, by distances, by flows."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import pytest

import reshard as rs
from reshard.geometry.refine import refine
from reshard.plans.plan import Step, StepSpec
from reshard.synth import cost
from reshard.synth.link import Link
from reshard.synth.network import Network
from reshard.synth.wires import Torus
from reshard.types import Layout, Mesh
from tests.layouts import random_layout, sample_pairs
from tests.synth.wire_bounds import Graph, flow_seconds, least_seconds

TORI: dict[str, tuple[tuple[int, ...], bool, tuple[tuple[int, ...], ...]]] = {
    "ring 4": ((4,), True, ((4,), (2, 2))),
    "ring 5": ((5,), True, ((5,),)),
    "ring 6": ((6,), True, ((6,), (2, 3), (3, 2))),
    "ring 7": ((7,), True, ((7,),)),
    "ring 8": ((8,), True, ((8,), (2, 4), (2, 2, 2))),
    "line 4": ((4,), False, ((4,), (2, 2))),
    "line 5": ((5,), False, ((5,),)),
    "line 8": ((8,), False, ((8,), (4, 2))),
    "lines 2x4": ((2, 4), False, ((2, 4), (4, 2), (8,), (2, 2, 2))),
    "rings 2x4": ((2, 4), True, ((2, 4), (4, 2))),
    "rings 3x3": ((3, 3), True, ((3, 3), (9,))),
    "lines 2x2x2": ((2, 2, 2), False, ((2, 2, 2), (2, 4), (8,))),
    "rings 4x4": ((4, 4), True, ((4, 4), (2, 8), (2, 4, 2))),
}
"""Physical axes, whether they wrap around, and meshes over them, whose axes share them and are split by them."""


def torus_of(name: str) -> tuple[Graph, Network, list[Mesh]]:
    sizes, wraps, meshes = TORI[name]
    network = Network("t", inner=(0, 1.0), domain=64, torus=Torus(axes=len(sizes), wrap=int(wraps), shape=sizes))
    named = [Mesh({f"a{i}": size for i, size in enumerate(each)}) for each in meshes]
    return Graph(sizes, [wraps] * len(sizes)), network, named


def steps_between(source: Layout, target: Layout, network: Network) -> Iterator[Step]:
    """The steps of the plans with and without the network, and of one exchange."""
    for plan in (rs.plan(source, target, network=network), rs.plan(source, target)):
        yield from (step for step in plan.steps if step.launches)
    if source != target:
        yield Step("exchange", source, target)


def priced(step: Step, network: Network) -> float:
    return cost.predict_seconds(
        StepSpec(step.kind, step.result, step.mode), step.operand, network.links(step.operand.mesh)
    )


def ratios(name: str, pairs: int) -> dict[str, float]:
    """The largest ratio of predicted seconds to what the wires need, by kind of step; none is below 1.

    Gathers and all-to-alls count where they use all wires, or where flows are the bound: others leave wires idle, which
    the bound uses.
    """
    graph, network, meshes = torus_of(name)
    worst: dict[str, float] = {}
    for mesh in meshes:
        for source, target in sample_pairs(mesh, 2, pairs, 1):
            for step in steps_between(source, target, network):
                least, flow = least_seconds(graph, step.operand, step.result), None
                if least and graph.count <= 9:
                    flow = flow_seconds(graph, step.operand, step.result)
                    least = max(least, flow or 0.0)
                seconds = priced(step, network)
                assert seconds >= least * (1 - 1e-6), f"{step.kind} {step.operand} -> {step.result} on {mesh}: {least}"
                if least and (flow or _all_wires(step)):
                    worst[step.kind] = max(worst.get(step.kind, 0.0), seconds / least)
    return worst


def _all_wires(step: Step) -> bool:
    refinement = refine(step.operand, step.result)
    digits = () if refinement is None else refinement.digits
    return math.prod(d.radix for d in digits if d.src is not None and d.src != d.dst) == step.operand.mesh.size


@pytest.mark.fast(6)
@pytest.mark.parametrize("name", TORI)
def test_no_step_is_faster_than_its_wires(name: str):
    worst = ratios(name, pairs=2)
    assert worst.get("all_gather", 1.0) <= 1.5 and worst.get("all_to_all", 1.0) <= 1.5, worst
    assert worst.get("permute", 1.0) <= 2 * (1 + 1e-6), worst


@pytest.mark.sweep
@pytest.mark.parametrize("name", TORI)
def test_no_step_of_many_pairs_is_faster_than_its_wires(name: str):
    worst = ratios(name, pairs=20)
    assert worst.get("all_gather", 1.0) <= 1.5 and worst.get("all_to_all", 1.0) <= 1.5, worst


@pytest.mark.parametrize("name", ["ring 6", "lines 2x4", "rings 3x3"])
def test_no_exchange_of_any_digits_is_faster_than_its_wires(name: str):
    graph, network, meshes = torus_of(name)
    choose = random.Random(3)
    for mesh in meshes:
        for _ in range(6):
            source, target = (random_layout(choose, mesh, (12, 5)) for _ in range(2))
            if source == target:
                continue
            step = Step("exchange", source, target)
            assert priced(step, network) >= least_seconds(graph, source, target) * (1 - 1e-6), (source, target, mesh)


def test_a_scatter_of_sums_takes_what_the_gather_back_takes():
    mesh = Mesh(x=4, y=2)
    network = Network("t", inner=(0, 1.0), domain=8, torus=Torus(axes=2, wrap=0, shape=(2, 4)))
    held, whole = Layout.parse("f32[{x}{y}2]", mesh), Layout.parse("f32[16]", mesh)
    summed = Layout.parse("f32[16] + sum{x}{y}", mesh)
    gather = priced(Step("all_gather", held, whole), network)
    assert priced(Step("reduce_scatter", summed, held), network) == gather
    assert priced(Step("all_reduce", summed, whole), network) == 2 * gather


# ---- by hand: t bytes a tile over W ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("torus", "sizes", "before", "after", "times"),
    [
        ("ring", (8,), "f32[{x}8, 64]", "f32[64, {x}8]", 8 / 4),
        ("ring", (7,), "f32[{x}7, 49]", "f32[49, {x}7]", (49 - 1) / 28),
        ("line", (8,), "f32[{x}8, 64]", "f32[64, {x}8]", 8 / 2),
        ("ring", (8,), "f32[{x}8]", "f32[64]", 7),
        ("line", (8,), "f32[{x}8]", "f32[64]", 14),
        ("ring", (2, 4), "f32[{y}4]", "f32[16]", 6),
        ("ring", (2, 4), "f32[{x}4]", "f32[8]", 4),
        ("ring", (4, 2), "f32[{x}4]", "f32[16]", 6),
    ],
)
def test_seconds_on_one_physical_axis_by_hand(torus: str, sizes: Sequence[int], before: str, after: str, times: float):
    """A contiguous sub-axis is a line; a strided one is a ring, whose wires the others' tiles pass, too."""
    mesh = Mesh(dict(zip("xy", sizes, strict=False)))
    wiring = Torus(axes=1, wrap=int(torus == "ring"), shape=(math.prod(sizes),))
    network = Network("t", inner=(0, 1.0), domain=8, torus=wiring)
    operand, result = Layout.parse(before, mesh), Layout.parse(after, mesh)
    kind = "all_to_all" if len(operand.shape) == 2 else "all_gather"
    assert math.isclose(priced(Step(kind, operand, result), network), times * operand.tile_bytes)


def test_axes_of_a_torus_carry_a_gather_together_and_an_all_to_all_takes_the_longest():
    mesh = Mesh(x=4, y=8)
    network = Network("t", inner=(0, 1.0), domain=32, torus=Torus(axes=2, shape=(4, 8)))
    held = Layout.parse("f32[{x}{y}1, 32]", mesh)
    assert priced(Step("all_gather", held, Layout.parse("f32[32, 32]", mesh)), network) == 31 / 2 * 128
    assert priced(Step("all_to_all", held, Layout.parse("f32[32, {x}{y}1]", mesh)), network) == 8 / 4 * 128


def test_latency_is_that_of_the_hops():
    network = Network("t", inner=(1.0, 1e30), domain=64, torus=Torus(axes=1, shape=(8,)))
    mesh = Mesh(x=8)
    held, whole = Layout.parse("f32[{x}8]", mesh), Layout.parse("f32[64]", mesh)
    assert math.isclose(priced(Step("all_gather", held, whole), network), 4.0)


def test_rings_and_lines_of_named_axes():
    mesh = Mesh(x=4, y=4)
    held, moved = Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[16, {x}4]", mesh)
    times = {}
    for shape in ("switch", "ring", "line"):
        network = Network.of({"x": Link(0, 1.0, shape), "y": (0, 1.0)})
        times[shape] = priced(Step("all_to_all", held, moved), network) / held.tile_bytes
        assert Network.from_json(network.to_json()) == network
    assert times == {"switch": 3 / 4, "ring": 1.0, "line": 2.0}
