"""Plans as a TPU runs them: steps at once, as exchanges and in parts that overlap, and what they need of memory."""

from __future__ import annotations

import pytest

import reshard as rs
from reshard.plans.plan import Plan
from reshard.runtime import xla_parts
from reshard.runtime.xla_parts import in_parts_on_tpu
from reshard.types import Layout, Mesh
from tests.oracle import check

CUBE = Mesh(x=2, y=2, z=2)
MOVE = ("bf16[512, {x}{y}128, 512]", "bf16[{x}{y}128, 512, 512]")


def modes(plan: Plan) -> list[tuple[str, int]]:
    return [(step.kind, step.mode.parts) for step in plan.steps]


def planned(source: str, target: str, mesh: Mesh = CUBE) -> Plan:
    return rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh))


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        ("bf16[512, {x}{y}128, 512]", "bf16[{x}{y}128, 512, 512]", [("all_to_all", 1)]),  # sent as it lies
        ("bf16[512, {x}256, 512]", "bf16[{x}256, 512, 512]", [("exchange", 8)]),  # half of it stays
        ("bf16[{x}{y}128, 512, 512]", "bf16[512, {x}{y}128, 512]", [("all_to_all", 8)]),  # packed
        ("bf16[512, 512, {x}{y}128]", "bf16[{x}{y}128, 512, 512]", [("all_to_all", 1)]),  # to full lanes
        ("bf16[4096, {x}{y}1024, 512]", "bf16[{x}{y}1024, 4096, 512]", [("all_to_all", 8)]),  # too large a buffer
        ("bf16[512, {x}256, {y}256]", "bf16[{y}{x}128, 512, 512]", [("all_to_all", 8)]),  # copied twice at once
        ("bf16[512, {x}{y}128, 512]", "bf16[512, {y}{x}128, 512]", [("permute", 16)]),
        ("bf16[512, {x}256, 512]", "bf16[512, {y}{x}128, 512]", [("slice", 16), ("permute", 16)]),
        ("bf16[64, {x}{y}16, 512]", "bf16[64, {y}{x}16, 512]", [("permute", 1)]),  # small
        ("bf16[128, {x}{y}64, 512]", "bf16[128, {y}{x}64, 512]", [("permute", 8)]),  # too small to overlap
    ],
)
def test_the_form_of_each_step(source: str, target: str, steps: list[tuple[str, int]]):
    plan = planned(source, target)
    form = in_parts_on_tpu(plan)
    assert modes(form) == steps
    assert form.received_bytes == plan.received_bytes
    overlap = [step.mode.overlap for step in form.steps]
    assert overlap == [(kind, parts) == ("permute", 16) for kind, parts in steps]
    ends = plan.source.tile_bytes + plan.target.tile_bytes
    assert xla_parts.peak_bytes(form, padded=True) <= 1.5 * ends


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("f32[4, {x}8, 128]", "f32[{x}2, 16, 128]"),
        ("f32[16, {x}{y}2, 4]", "f32[16, {y}{x}2, 4]"),
        ("f32[16, {x}4, 4]", "f32[16, {y}{x}2, 4]"),
    ],
)
def test_the_forms_move_each_element(source: str, target: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("reshard.runtime.xla_parts.TPU_OVERLAPPED", 0)
    plan = planned(source, target)
    form = in_parts_on_tpu(plan, least=0)
    assert form != xla_parts.in_parts(plan, least=0)
    check(form)


def test_a_donated_source_is_overwritten_and_not_sent_at_once():
    source, target = (Layout.parse(text, CUBE) for text in MOVE)
    plan = rs.plan(source, target, donate=True)
    assert in_parts_on_tpu(plan) == xla_parts.in_parts(plan)


def test_one_exchange_where_tiles_between_steps_need_much_memory():
    """Three steps in loops of their own, whose tiles a TPU pads to twice their bytes: 64 lanes of 128."""
    mesh = Mesh(x=2, y=2, z=2)
    narrow = planned("bf16[{z}32, {y}64, {x}64, 64]", "bf16[64, 128, {z}{x}32, 64]", mesh)
    steps = modes(xla_parts.in_parts(narrow, least=0))
    assert len(steps) == 3 and modes(in_parts_on_tpu(narrow, least=0)) == [("exchange", 16)]
    straight = in_parts_on_tpu(narrow, least=0)
    assert straight.received_bytes == narrow.received_bytes
    assert xla_parts.peak_bytes(straight, padded=True) < 0.6 * xla_parts.peak_bytes(narrow, padded=True)
    shared = planned("bf16[{x}{y}{z}64, 512, 512]", "bf16[{x}{z}128, 512, 512]", mesh)
    assert in_parts_on_tpu(shared, least=0) == xla_parts.in_parts(shared, least=0)
    assert in_parts_on_tpu(narrow, least=1 << 40) == narrow
