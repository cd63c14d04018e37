"""Predicted seconds: by hand, peer by peer, against what wires need at least, and equal in every process."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import isclose, prod

import numpy as np
import pytest

import reshard as rs
from reshard.errors import ReshardError
from reshard.geometry.refine import refine
from reshard.plans.plan import Step, StepSpec
from reshard.plans.rules.step_mode import StepMode
from reshard.synth import cost
from reshard.synth.network import PRESETS, Network
from reshard.synth.wires import Torus
from reshard.types import Layout, Mesh
from reshard.types.whole import primes
from tests.layouts import MESHES, random_layout, sample_pairs
from tests.synth.wire_bounds import Graph, flow_seconds, least_seconds

INNER, OUTER = rs.Link(1e-6, 1e11), rs.Link(1e-5, 1e9)
SPLIT = rs.Network.of({"x": INNER, "dcn": OUTER})
WIRES = (
    rs.Network.uniform(1e-6, 1e9),
    rs.Network("two", inner=INNER, outer=OUTER, domain=2),
    PRESETS["tpu-v5p"],
    PRESETS["h100"],
)


# ---- the model, by hand --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "seconds"),
    [
        # Three peers' tiles of 4 KiB each, doubling: one tile, then two.
        ("f32[{x}1024]", "f32[4096]", 2e-6 + 3 * 4096 / 1e11),
        # A quarter of a tile from each of three peers, each by itself.
        ("f32[{x}1024, 4096]", "f32[4096, {x}1024]", 3 * (1e-6 + (1 << 22) / 1e11)),
        # One tile from one peer.
        ("f32[{x:(1)2}{x:(2)2}1024]", "f32[{x:(2)2}{x:(1)2}1024]", 1e-6 + 4096 / 1e11),
        # A quarter of the array to each of three, twice.
        ("f32[4096] + sum{x}", "f32[4096]", 2 * (2e-6 + 3 * 4096 / 1e11)),
        ("f32[4096] + sum{x}", "f32[{x}1024]", 2e-6 + 3 * 4096 / 1e11),
        ("f32[4096]", "f32[{x}1024]", 0),
        # A quarter of a tile across the slow axis, since x is idle; then the quarters along x.
        ("f32[{dcn}2048]", "f32[4096]", 1e-5 + 2048 / 1e9 + 2e-6 + 3 * 4096 / 1e11),
    ],
)
def test_seconds_by_hand(source: str, target: str, seconds: float):
    mesh = Mesh(dcn=2, x=4)
    plan = rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh), network=SPLIT)
    assert isclose(plan.seconds or 0.0, seconds, rel_tol=1e-9), plan
    assert isclose(sum(s.seconds or 0.0 for s in plan.steps), seconds, rel_tol=1e-9)


def test_meshes_whose_axes_end_elsewhere_can_be_priced():
    """Positions in pairs, to a mesh whose innermost axis has 3."""
    source = Layout.parse("s64[1 1 {w}/1, 1 3 5 2/30] + sum{x}", Mesh(w=2, dcn=2, x=3))
    plan = rs.plan(source, Layout.parse("s64[{b}/1, 30]", Mesh(a=6, b=2)), network="ethernet-100g", donate=True)
    assert plan.seconds and plan.seconds > 0


@pytest.mark.parametrize(
    ("source", "target", "mode", "seconds"),
    [
        # Swap and permute cycle in one: two rounds, and every message may cross either axis, so dcn is charged.
        ("f32[{x}4, 16]", "f32[{dcn}8, {x}4]", StepMode(), 2 * (1e-5 + 64 / 1e9)),
        # In chunks of 8 of the 16 elements of a message: four messages of half the size.
        ("f32[{x}4, 16]", "f32[{dcn}8, {x}4]", StepMode(chunk=8), 4 * (1e-5 + 32 / 1e9)),
        # Boxes: all rounds on the slowest axis that either layout uses; 5 elements received.
        ("f32[{x}3/10]", "f32[{dcn}5]", StepMode(), 3 * 1e-5 + 20 / 1e9),
    ],
)
def test_seconds_of_exchanges_by_hand(source: str, target: str, mode: StepMode, seconds: float):
    mesh = Mesh(dcn=2, x=4)
    operand, result = Layout.parse(source, mesh), Layout.parse(target, mesh)
    assert isclose(
        cost.predict_seconds(StepSpec("exchange", result, mode), operand, SPLIT.links(mesh)), seconds, rel_tol=1e-9
    )


# ---- peer by peer --------------------------------------------------------------------------------


def peer_by_peer(mesh: Mesh, over: tuple[str, ...], links: cost.Links, block: float, doubling: bool) -> float:
    """One block from every peer of device 0 along some axes, each charged to the slowest axis on which it differs.

    Messages over different links are under way together; a gather goes link by link, or round rings.
    """

    def slowest(differing: Iterable[str]) -> str:
        return min(differing, key=lambda name: (links[name].bandwidth, -links[name].latency))

    names = list(mesh.axes)
    blocks = dict.fromkeys(names, 0)
    peers = list(np.ndindex(*(mesh.axes[name] if name in over else 1 for name in names)))
    for coordinates in peers:
        if differing := [name for name, at in zip(names, coordinates, strict=True) if at]:
            blocks[slowest(differing)] += 1
    if not doubling:
        totals = Counter[rs.Link]()
        for name, count in blocks.items():
            totals[links[name]] += count
        return max(count * (link.latency + block / link.bandwidth) for link, count in totals.items())
    staged = 0.0
    for name, count in blocks.items():
        if count:
            staged += sum(p - 1 for p in primes(mesh.axes[name])) * links[name].latency
            staged += count * block / links[name].bandwidth
    if len({links[name] for name in over}) < 2:
        return staged
    # Round the ring that leaves the domains of a slow link as seldom as it can: from one device to the next.
    rank = {name: (links[name].bandwidth, -links[name].latency) for name in names}
    outer_first = sorted(range(len(names)), key=lambda at: rank[names[at]])
    ring = sorted(peers, key=lambda each: [each[at] for at in outer_first])
    steps = [
        links[slowest(name for name, a, b in zip(names, one, other, strict=True) if a != b)]
        for one, other in zip(ring, [*ring[1:], ring[0]], strict=True)
    ]
    sent = (len(ring) - 1) / len(ring) * block
    carried = max(count * sent / link.bandwidth for link, count in Counter(steps).items())
    return min(staged, sum(link.latency for link in steps[:-1]) + carried)


@pytest.mark.parametrize("mesh", [Mesh(x=2, y=3), Mesh(x=4, y=3, z=2), Mesh(a=5, b=2), Mesh(a=6, b=4, c=3)], ids=str)
def test_gathers_and_all_to_alls_are_priced_peer_by_peer(mesh: Mesh):
    choose = random.Random(mesh.size)
    for _ in range(20):
        links = {name: rs.Link(choose.choice([1e-6, 1e-5]), choose.choice([1e9, 1e10, 1e11])) for name in mesh.axes}
        over = tuple(n for n in mesh.axes if choose.random() < 0.7) or tuple(mesh.axes)
        axes = [mesh.sub_axis(name) for name in choose.sample(over, len(over))]
        shape = (mesh.size * 2, mesh.size * 3)
        held = Layout.tiled(mesh, shape, "float32", [axes, []])
        whole = Layout.tiled(mesh, shape, "float32", [[], []])
        moved = Layout.tiled(mesh, shape, "float32", [[], axes])
        gather = cost.predict_seconds(StepSpec("all_gather", whole), held, links)
        assert isclose(gather, peer_by_peer(mesh, over, links, held.tile_bytes, doubling=True), rel_tol=1e-9)
        block = held.tile_bytes / prod(axis.size for axis in axes)
        swap = cost.predict_seconds(StepSpec("all_to_all", moved), held, links)
        assert isclose(swap, peer_by_peer(mesh, over, links, block, doubling=False), rel_tol=1e-9)
        summed = Layout.tiled(mesh, shape, "float32", [[], []], axes, "sum")
        scatter = cost.predict_seconds(StepSpec("reduce_scatter", held), summed, links)
        assert isclose(scatter, peer_by_peer(mesh, over, links, held.tile_bytes, doubling=True), rel_tol=1e-9)
        assert isclose(cost.predict_seconds(StepSpec("all_reduce", whole), summed, links), 2 * scatter, rel_tol=1e-9)


def test_the_fastest_routes_are_those_of_the_least_sum():
    mesh = Mesh(dcn=2, x=4)
    links = SPLIT.links(mesh)
    held, inside, whole = (Layout.parse(text, mesh) for text in ("f32[{dcn}{x}64]", "f32[2{x}64]", "f32[512]"))
    at_once = (StepSpec("all_gather", whole),)
    staged = (StepSpec("all_gather", inside), StepSpec("all_gather", whole))
    assert cost.keep_fastest([at_once, staged], held, links) == [staged]
    assert cost.keep_fastest([staged, at_once, staged], held, links) == [staged, staged]


@pytest.mark.fast(5)
@pytest.mark.parametrize("mesh", [m for m in MESHES if m.size > 1], ids=repr)
def test_every_mesh_can_be_priced(mesh: Mesh):
    choose = random.Random(mesh.size)
    for _ in range(30):
        source, target = (random_layout(choose, mesh, (12, 5)) for _ in range(2))
        for network in WIRES:
            try:
                assert (rs.plan(source, target, network=network).seconds or 0.0) >= 0.0
            except ReshardError as error:
                pytest.fail(f"{source} -> {target}: {error}")


PRINTED = """
import reshard as rs
cases = [  # pairs whose seconds have another last digit if equal links are added up in another order
    (rs.Mesh(x=2, y=3), "s32[] + min{x}{y}", "s32[]", "h100"),
    (rs.Mesh(x=4, y=2), "s32[6] + min{x}{y}", "s32[6]", "tpu-v5p"),
    (rs.Mesh(x=6, y=4), "f32[{y}6, {x}4]", "f32[24, 24]", "tpu-v5p"),
    (rs.Mesh(x=6, y=4), "f32[{x}{y}, 24]", "f32[24, {x}4]", "tpu-v5p"),
]
for mesh, source, target, network in cases:
    print(rs.plan(rs.Layout.parse(source, mesh), rs.Layout.parse(target, mesh), network=network).to_json())
"""


def test_every_process_predicts_the_same_to_the_last_digit():
    """Whatever hashes the names of axes have in a process: ranks plan each by itself, and must make one plan."""
    outputs = set()
    for seed in range(2):
        env = {**os.environ, "PYTHONHASHSEED": str(seed)}
        outputs.add(subprocess.run([sys.executable, "-c", PRINTED], env=env, capture_output=True, check=True).stdout)
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("kind", "source", "target"),
    [
        ("all_gather", "f32[{x}{y}5]", "f32[60]"),
        ("permute", "f32[{x}{y}5]", "f32[{y}{x}5]"),
        ("all_to_all", "f32[{x}15, 12]", "f32[60, {x}3]"),
        ("all_reduce", "f32[60] + sum{x}", "f32[60]"),
    ],
)
def test_slower_links_take_more_time(kind: str, source: str, target: str):
    mesh = Mesh(x=4, y=3)
    operand, result = Layout.parse(source, mesh), Layout.parse(target, mesh)
    links = {"x": rs.Link(1e-6, 1e10), "y": rs.Link(1e-6, 1e10)}
    times = [
        cost.predict_seconds(StepSpec(kind, result), operand, {**links, "x": link})
        for link in (rs.Link(1e-6, 1e11), links["x"], rs.Link(2e-6, 1e10), rs.Link(2e-6, 1e9))
    ]
    assert times == sorted(times) and times[0] < times[2] < times[3]


# ---- Predicted times against what the wires of small tori need at least: by cuts, by distances, by flows ----

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
@pytest.mark.parametrize("pairs", [2, pytest.param(20, marks=pytest.mark.sweep)])
def test_no_step_is_faster_than_its_wires(name: str, pairs: int):
    worst = ratios(name, pairs)
    assert worst.get("all_gather", 1.0) <= 1.5 and worst.get("all_to_all", 1.0) <= 1.5, worst
    assert pairs > 2 or worst.get("permute", 1.0) <= 2 * (1 + 1e-6), worst


PERMUTED = {
    "ring 8": ((8,), True),
    "line 8": ((8,), False),
    "ring 9": ((9,), True),
    "rings 4x2": ((4, 2), True),
    "lines 2x2x2": ((2, 2, 2), False),
    "rings 3x3": ((3, 3), True),
}
LARGER = {
    "rings 4x4": ((4, 4), True),
    "lines 4x4": ((4, 4), False),
    "lines 2x4x2": ((2, 4, 2), False),
    "lines 2x2x2x2": ((2,) * 4, False),
}


@pytest.mark.parametrize(
    ("sizes", "wraps"),
    [
        *(pytest.param(*each, id=name) for name, each in PERMUTED.items()),
        *(pytest.param(*each, id=name, marks=pytest.mark.slow) for name, each in LARGER.items()),
    ],
)
def test_every_permutation_of_digits_takes_what_flows_take_and_at_most_half_more(sizes: tuple[int, ...], wraps: bool):
    """All orders of the prime digits of a torus: what their schedules take, against linear programs."""
    radices = [prime for size in sizes for prime in primes(size)]
    mesh = Mesh({f"a{at}": prime for at, prime in enumerate(radices)})
    network = Network("t", inner=(0, 1.0), domain=64, torus=Torus(axes=len(sizes), wrap=int(wraps), shape=sizes))
    graph, axes = Graph(sizes, [wraps] * len(sizes)), [mesh.sub_axis(name) for name in mesh.axes]
    source = Layout.tiled(mesh, (mesh.size,), "float32", [axes])
    for order in itertools.permutations(axes):
        target = Layout.tiled(mesh, (mesh.size,), "float32", [order])
        if target != source:
            seconds, least = priced(Step("permute", source, target), network), flow_seconds(graph, source, target)
            assert least and least * (1 - 1e-6) <= seconds <= least * 1.5 * (1 + 1e-6), (str(target), seconds, least)


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


def test_a_scatter_of_sums_takes_what_the_gather_back_takes_but_among_all_devices():
    mesh = Mesh(x=4, y=2)
    network = Network("t", inner=(0, 1.0), domain=8, torus=Torus(axes=2, wrap=0, shape=(2, 4)))
    texts = "f32[16] + sum{x}{y}", "f32[{x}4] + sum{y}", "f32[{x}{y}2]", "f32[16]"
    summed, between, held, whole = (Layout.parse(text, mesh) for text in texts)
    part = [Layout.parse(text, mesh) for text in ("f32[8] + sum{x}", "f32[{x}2]", "f32[8]")]
    assert priced(Step("all_reduce", summed, whole), network) == 2 * priced(Step("all_gather", held, whole), network)
    assert priced(Step("reduce_scatter", part[0], part[1]), network) == priced(Step("all_gather", *part[1:]), network)
    # libtpu has no scatter among all devices, and takes what the two levels take.
    levels = Step("reduce_scatter", summed, between), Step("reduce_scatter", between, held)
    assert priced(Step("reduce_scatter", summed, held), network) == sum(priced(each, network) for each in levels)


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


def test_parts_of_an_axis_lie_on_wires_as_the_whole_does():
    """3 and 2 of 6 devices along 2 x 3 wires, neither of which nests with them."""
    mesh, network = Mesh(dcn=2, x=6, y=3), Network.preset("tpu-v5p")
    moves = ("f32[{x}64] -> f32[384]", "f32[{x:(1)3}8, {x:(3)2}8] -> f32[24, 16]")
    ends = ([Layout.parse(text, mesh) for text in move.split(" -> ")] for move in moves)
    whole, parts = (cost.predict_seconds(StepSpec("all_gather", b), a, network.links(mesh)) for a, b in ends)
    assert isclose(whole, parts)


@pytest.mark.parametrize("size", [6, 12, 18, 24, 36, 48])
def test_parts_of_an_axis_are_gathered_together_in_a_few_times_what_they_take_one_after_the_other(size: int):
    """Wherever wires end inside of the parts: those of 12 devices are 2, 2 and 3 long."""
    mesh, network = Mesh(data=size), Network.preset("tpu-v5p")
    for pre, one, other in itertools.product([n for n in range(1, size) if size % n == 0], repeat=3):
        if size % (pre * one * other) or 1 in (one, other):
            continue
        held = f"f32[{{data:({pre}){one}}}{2**10}, {{data:({pre * one}){other}}}{2**10}]"
        half = f"f32[{2**10 * one}, {{data:({pre * one}){other}}}{2**10}]"
        layouts = [Layout.parse(text, mesh) for text in (held, half, f"f32[{2**10 * one}, {2**10 * other}]")]
        steps = [(layouts[a], StepSpec("all_gather", layouts[b])) for a, b in ((0, 2), (0, 1), (1, 2))]
        together, *apart = (cost.predict_seconds(step, at, network.links(mesh)) for at, step in steps)
        assert together <= sum(apart) * (1.001 if size == 6 else 3), held


def test_latency_is_that_of_the_hops():
    network = Network("t", inner=(1.0, 1e30), domain=64, torus=Torus(axes=1, shape=(8,)))
    mesh = Mesh(x=8)
    held, whole = Layout.parse("f32[{x}8]", mesh), Layout.parse("f32[64]", mesh)
    assert math.isclose(priced(Step("all_gather", held, whole), network), 4.0)


def test_messages_wait_for_those_issued_before_and_for_hops():
    network = Network("t", inner=rs.Link(1.0, 1e30, issue=0.25), domain=64, torus=Torus(axes=1, shape=(8,)))
    mesh = Mesh(x=8)
    held, moved = Layout.parse("f32[{x}8, 64]", mesh), Layout.parse("f32[64, {x}8]", mesh)
    assert math.isclose(priced(Step("all_to_all", held, moved), network), 4.0 + 6 * 0.25)
    switch = {"x": rs.Link(1.0, 1e30, issue=0.25)}
    assert math.isclose(cost.predict_seconds(StepSpec("all_to_all", moved), held, switch), 1.0 + 6 * 0.25)


def test_an_all_to_all_among_a_cube_of_chips_is_not_split_for_its_messages():
    """63 messages of 32 KiB take 6 hops and 3 us, not 63 hops."""
    mesh = Mesh(x=4, y=4, z=4)
    ends = (Layout.parse(text, mesh) for text in ("bf16[{x}{y}{z}64, 16384]", "bf16[4096, {x}{y}{z}256]"))
    plan = rs.plan(*ends, network="tpu-v5p")
    assert [step.kind for step in plan.steps] == ["all_to_all"] and plan.received_bytes == plan.lower_bound_bytes
