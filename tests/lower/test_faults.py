"""Faults planted in lowered programs: the oracle must find each on the reference runtime."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import reshard as rs
from reshard.lower import lower_plan
from reshard.lower.program import AllGather
from reshard.plans.rules.collectives import RULES
from reshard.types import Layout, Mesh
from tests.oracle import check
from tests.program_faults import CORPUS, KINDS, WHOLE, detected, plans, planted


@pytest.mark.parametrize("number", range(len(CORPUS)))
def test_the_oracle_finds_every_planted_fault(number: int):
    plan = plans()[number]
    check(plan)
    every = planted(plan)
    assert len(every) >= 6
    missed = [(kind, at) for kind, at, program in every if not detected(plan, program)]
    assert not missed, f"{missed} in {plan}"


def test_the_corpus_has_every_kind_of_step_and_fault():
    kinds = Counter(step.kind for plan in plans() for step in plan.steps)
    assert set(kinds) == set(RULES)
    counts = Counter(kind for plan in plans() for kind, _, _ in planted(plan))
    assert len(counts) == KINDS
    assert min(counts.values()) >= 2, counts


def test_the_order_in_which_groups_are_listed_is_irrelevant():
    plan = rs.plan(Layout.parse("f32[{x}2, {y}4]", Mesh(x=4, y=2)), Layout.parse("f32[8, {y}4]", Mesh(x=4, y=2)))
    program = lower_plan(plan)
    (gather,) = program.instructions
    assert isinstance(gather, AllGather)
    check(plan, replace(program, instructions=(replace(gather, groups=gather.groups[::-1]),)))


@pytest.mark.parametrize("kind", WHOLE)
def test_the_oracle_finds_faults_of_whole_programs(kind: str):
    mesh = Mesh(x=2, y=2, z=2)
    source, target = Layout.parse("f32[{x}4, {z}4, 8, 8]", mesh), Layout.parse("f32[8, 8, {z}4, {y}4]", mesh)
    plan = rs.plan(source, target)
    assert len(plan.steps) == 3
    assert detected(plan, WHOLE[kind](lower_plan(plan)))
