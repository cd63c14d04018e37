"""Whole programs inside `jax.shard_map`: the corpus of planted faults, and random plans between any layouts."""

from __future__ import annotations

import random

import pytest

import reshard as rs
from reshard.errors import PlanError
from reshard.lower import lower_plan
from reshard.lower.to_shard_map import tile_function
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.cost import StepMode
from reshard.plans.rules.parts import counts
from reshard.types import Layout, Mesh
from tests.layouts import random_pair
from tests.lower.to_shard_map.on_xla import check_on_xla, one_step
from tests.oracle import check
from tests.program_faults import CORPUS, plans, planted
from tests.sampling import sampled

# ---- the corpus ------------------------------------------------------------------------------------


NUMBERS = range(len(CORPUS))


@pytest.mark.fast(5)
@pytest.mark.parametrize("number", NUMBERS)
def test_the_corpus(number: int):
    check_on_xla(plans()[number])


@pytest.mark.fast(2)
@pytest.mark.parametrize("number", sampled(NUMBERS, *NUMBERS[::4]))
def test_the_corpus_in_parts(number: int):
    """Every step that can be split runs in as many parts as possible, and in as few."""
    plan = plans()[number]
    for pick in (max, min):
        moves = []
        for step in plan.steps:
            possible = counts(step.operand, step.result) if step.mode == StepMode() else ()
            moves.append(StepSpec(step.kind, step.result, StepMode(parts=pick(possible)) if possible else step.mode))
        in_part = chain(plan.source, plan.target, moves, plan.donate)
        check(in_part)
        check_on_xla(in_part)


@pytest.mark.fast(2)
@pytest.mark.parametrize("number", sampled(NUMBERS, *NUMBERS[1::3]))
def test_faults_of_the_corpus_are_seen(number: int):
    """Two faults of each plan that change values; tests/lower/test_faults plants all of them.

    Faults that only cost time or memory change no value. XLA never sees a group that is dropped or run twice, where
    groups are written as axes, nor the wrong piece of a slot, since a round has one piece for all devices.
    """
    plan, choose = plans()[number], random.Random(number)
    harmless = {"staging forgotten", "a round run twice", "a group run twice"}
    harmless |= {"a group dropped", "a piece of a slot off by one"}
    every = [(kind, program) for kind, _, program in planted(plan) if kind not in harmless]
    for kind, program in choose.sample(every, min(2, len(every))):
        with pytest.raises((AssertionError, ValueError, TypeError, LookupError)):
            check_on_xla(plan, program)
            pytest.fail(f"{kind} is not seen in {plan}", pytrace=False)


# ---- random plans ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", sampled(range(6), 0))
def test_random_plans(seed: int):
    """Between any layouts of the language: some under a budget, some in place, some reductions."""
    choose, done = random.Random(seed), 0
    while done < 6:
        partial = choose.random() < 0.3
        source, target = random_pair(choose, "float32" if partial else "int32", partial, most_rank=2)
        if source.mesh.size > 8 or max(source.tile_bytes, target.tile_bytes) > 1 << 12:
            continue
        tiles = source.tile_bytes + target.tile_bytes
        less = max(0, tiles - choose.randint(0, 64))
        options = choose.choice([{}, {"budget": tiles}, {"budget": less, "donate": True}])
        try:
            plan = rs.plan(source, target, **options)
        except rs.errors.BudgetError:
            continue
        if plan.launches > 60 or not plan.steps:
            continue
        check_on_xla(plan)
        done += 1


# ---- meshes ----------------------------------------------------------------------------------------


def test_a_mesh_of_another_size_is_refused():
    program = lower_plan(one_step("all_gather", "f32[{x}4]", "f32[16]"))
    with pytest.raises(PlanError, match=r"\{'x': 4\} have 4 devices, not 8"):
        tile_function(program, {"x": 4})


def test_the_devices_of_a_program_are_those_of_the_mesh_by_position():
    """Whatever their ids are."""
    mesh = Mesh({"x": 4}, device_ids=[10, 3, 7, 20])
    plan = rs.plan(Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[16, {x}4]", mesh))
    check_on_xla(plan)
