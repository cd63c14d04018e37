"""Faults planted in lowered programs: `prove` must refuse each, with a counterexample that the numpy runtime shows."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import reshard as rs
from reshard.lower import Program, lower
from reshard.proofs import ProofError, UndecidedError, prove
from reshard.runtime import run
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.faults import KINDS, WHOLE, detected, plans, planted
from tests.layouts import random_pair
from tests.oracle import tiles_of

EACH = 6


@pytest.fixture(scope="module")
def faults() -> list[tuple[str, rs.Plan, Program]]:
    """At most six of every kind in every plan of the drill."""
    found = []
    for plan in plans():
        seen: Counter = Counter()
        for kind, _, program in planted(plan):
            seen[kind] += 1
            if seen[kind] <= EACH:
                found.append((kind, plan, program))
    return found


def test_every_planted_fault_is_refuted(faults: list[tuple[str, rs.Plan, Program]]):
    parts: dict[str, set[str]] = {}
    for kind, plan, program in faults:
        with pytest.raises(ProofError) as error:
            prove(plan, program)
        parts.setdefault(kind, set()).add(error.value.counterexample.part)
    assert set(parts) == KINDS
    assert len(KINDS) >= 20
    assert parts["staging forgotten"] == {"bounded"}
    assert parts["a round run twice"] == {"minimal"}
    assert "right" in parts["a wrong slice"]


def test_counterexamples_are_what_the_numpy_runtime_does(faults: list[tuple[str, rs.Plan, Program]]):
    """Each device and local index that is named holds, after a run on global indices, the named element or none."""
    shown: Counter = Counter()
    for kind, plan, program in random.Random(0).sample(faults, 120):
        with pytest.raises(ProofError) as error:
            prove(plan, program)
        counterexample = error.value.counterexample
        if plan.source.partial or counterexample.index is None:
            continue
        given = {d: (tile + 1).astype(plan.source.dtype) for d, tile in tiles_of(plan.source).items()}
        tile = run(program, given)[counterexample.device]
        index = meaning(plan.target, counterexample.device)
        assert counterexample.element == tuple(dim[at] for dim, at in zip(index, counterexample.index, strict=True))
        # One more than the index: a place that nothing was written to is 0.
        assert tile[counterexample.index] != 1 + np.ravel_multi_index(counterexample.element, plan.source.shape)
        if counterexample.actual is not None:
            assert tile[counterexample.index] == 1 + np.ravel_multi_index(counterexample.actual, plan.source.shape)
        shown[kind] += 1
    assert len(shown) >= 15


@pytest.mark.parametrize("kind", WHOLE)
def test_faults_of_the_whole_program_are_never_proved(kind: str):
    mesh = Mesh(x=2, y=2, z=2)
    source, target = Layout.parse("f32[{x}4, {z}4, 8, 8]", mesh), Layout.parse("f32[8, 8, {z}4, {y}4]", mesh)
    plan = rs.plan(source, target)
    wrong = WHOLE[kind](lower(plan))
    with pytest.raises((ProofError, UndecidedError)):
        prove(plan, wrong)


def test_groups_listed_in_another_order_are_proved():
    mesh = Mesh(x=4, y=2)
    plan = rs.plan(Layout.parse("f32[{x}2, {y}4]", mesh), Layout.parse("f32[8, {y}4]", mesh))
    program = lower(plan)
    (gather,) = program.instructions
    prove(plan, replace(program, instructions=(replace(gather, groups=gather.groups[::-1]),)))


def test_a_program_that_is_right_by_chance_is_not_decided():
    """A swap of two devices that hold the same is no fault, and no formula either: nothing is claimed."""
    mesh = Mesh(x=2, y=2, z=2)
    plan = rs.plan(Layout.parse("f32[{x}4, 8]", mesh), Layout.parse("f32[8, 8]", mesh))
    program = lower(plan)
    (gather,) = program.instructions
    a, b, *rest = gather.groups
    wrong = replace(program, instructions=(replace(gather, groups=((a[0], b[1]), (b[0], a[1]), *rest)),))
    with pytest.raises(UndecidedError):
        prove(plan, wrong)


@pytest.mark.parametrize("seed", range(3))
def test_a_mutated_program_that_is_proved_does_run_right(seed: int):
    """Random plans, whose faults often change nothing: what is proved must pass the oracle.

    Staging is left out: the promise may count a buffer that no message of this plan needs.
    """
    choose, refuted, proved = random.Random(seed), 0, 0
    for number in range(60):
        plan = rs.plan(*random_pair(choose, "float32", partial=number % 3 == 0))
        if any(step.mode.parts > 1 for step in plan.steps):
            continue
        every = [fault for fault in planted(plan) if fault[0] != "staging forgotten"]
        for _, _, program in choose.sample(every, min(len(every), 6)):
            try:
                prove(plan, program)
            except ProofError:
                refuted += 1
            except UndecidedError:
                continue
            else:
                assert not detected(plan, program)
                proved += 1
    assert refuted > 100
    assert proved > 0
