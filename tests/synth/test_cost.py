"""Predicted seconds: by hand, against a count peer by peer, and equal in every process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from math import isclose, prod

import numpy as np
import pytest

import reshard as rs
from reshard.errors import ReshardError
from reshard.plans.plan import StepSpec
from reshard.plans.rules.cost import StepMode
from reshard.synth import cost
from reshard.synth.network import PRESETS
from reshard.types import Layout, Mesh
from reshard.types.whole import primes
from tests.layouts import MESHES, random_layout

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


def test_no_network_no_seconds():
    mesh = Mesh(x=4)
    plan = rs.plan(Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh))
    assert plan.seconds is None
    assert all(step.seconds is None for step in plan.steps)


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
    """One block from every peer of device 0 along some axes, each charged to the slowest axis on which it differs."""
    names = list(mesh.axes)
    blocks = dict.fromkeys(names, 0)
    for coordinates in np.ndindex(*(mesh.axes[name] if name in over else 1 for name in names)):
        differing = [name for name, at in zip(names, coordinates, strict=True) if at]
        if differing:
            blocks[min(differing, key=lambda name: (links[name].bandwidth, -links[name].latency))] += 1
    time = 0.0
    for name, count in blocks.items():
        if count:
            messages = sum(p - 1 for p in primes(mesh.axes[name])) if doubling else count
            time += messages * links[name].latency + count * block / links[name].bandwidth
    return time


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
    for seed in range(4):
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
