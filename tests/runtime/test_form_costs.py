"""What forms are estimated to take, beside what libtpu estimates of them as compiled."""

from __future__ import annotations

import pytest

import reshard as rs
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules import StepMode
from reshard.runtime.form_costs import bound_wires, estimate_form_seconds, estimate_local_seconds
from reshard.types import Layout, Mesh

RING, GRID = Mesh(x=8), Mesh(x=4, y=2)
# Microseconds of a v5p beside the collectives: `estimated_cycles` of the compiled forms, jax 0.12.0.1.
COMPILED = [
    (RING, "bf16[192, 192, 128, {x}8]", "bf16[192, {x}24, 128, 64]", {1: 301, 4: 287, 8: 291}),
    (RING, "bf16[{x}16, 384, 64, 128]", "bf16[128, {x}48, 64, 128]", {1: 402, 4: 363, 8: 367}),
    (RING, "bf16[{x}48, 768, 768]", "bf16[384, {x}96, 768]", {1: 230, 4: 211, 8: 215}),
    (RING, "bf16[{x}768, 8192]", "bf16[6144, {x}1024]", {1: 51, 4: 72, 8: 86}),
    (GRID, "bf16[128, {y}24, {x}32, 384]", "bf16[128, {x}{y}6, 128, 384]", {1: 280}),
]


@pytest.mark.parametrize(("mesh", "source", "target", "compiled"), COMPILED)
def test_estimates_are_near_what_the_compiler_says(mesh: Mesh, source: str, target: str, compiled: dict[int, int]):
    plan = rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh))
    (step,) = plan.steps
    for parts, microseconds in compiled.items():
        form = chain(plan.source, plan.target, [StepSpec(step.kind, step.result, StepMode(parts=parts))])
        assert estimate_local_seconds(form) * 1e6 == pytest.approx(microseconds, rel=0.2)


@pytest.mark.parametrize(
    ("kind", "source", "target", "compiled"),
    [
        # Rounds in turn, of which one or more pass only some of the links; us of the compiled program's pairs.
        ("exchange", "bf16[{x}3072, {z}2048]", "bf16[{z}{x}1536, 4096]", 69.9),
        ("exchange", "bf16[256, 768, {y}{z}{x}64]", "bf16[{z}128, 768, {x}{y}128]", 139.8),
        ("exchange", "bf16[{z}{y}{x}24, 768, 512]", "bf16[192, 768, {x}{y}128]", 367.0),
        ("permute", "bf16[{z}2048, {y}{x}2048]", "bf16[{y}2048, {z}{x}2048]", 46.6),
    ],
)
def test_an_exchange_takes_its_rounds_one_after_another(kind: str, source: str, target: str, compiled: float):
    ends = [Layout.parse(text, Mesh(x=2, y=2, z=2)) for text in (source, target)]
    wires = bound_wires(kind, *ends, rs.Network.preset("tpu-v5p"))
    assert wires is not None and wires * 1e6 == pytest.approx(compiled, rel=0.01)
    assert bound_wires(kind, *ends, rs.Network.preset("h100")) is None  # A switch has no cuts.


def test_wires_are_those_of_the_plan_or_of_a_network():
    plan = rs.plan(*(Layout.parse(text, RING) for text in COMPILED[0][1:3]))
    local = estimate_local_seconds(plan)
    timed = rs.plan(plan.source, plan.target, network="tpu-v5p")
    assert timed.seconds is not None
    assert estimate_form_seconds(timed) == pytest.approx(timed.seconds + local)
    # On 2x2x2 chips 4 devices send 4 others a block each over the 4 links of a cut.
    wires = 16 * plan.source.tile_bytes / 8 / 4 / 90e9
    assert estimate_form_seconds(plan, network=rs.Network.preset("tpu-v5p")) == pytest.approx(wires + local)
    assert estimate_form_seconds(plan) > local
