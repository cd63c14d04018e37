"""Both passes on whole programs: they compile, compute what plain `jax.jit` computes, and receive no more bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reshard as rs
from reshard.jax import jit
from reshard.jax.pass_report import read_figures
from tests.jax.moving import lowered_twice
from tests.jax.programs import BY_NAME, PROGRAMS, Case, Program
from tests.jax.programs.base import assert_same
from tests.sampling import sampled_by_name

# The arrays of the corpus are small, so that launches would outweigh all bytes: on this network they cost nothing.
WIRE = rs.Network("wire", inner=(1e-9, 1e9), domain=1 << 20)
# Programs that must gain: after the pass they receive at most this fraction of what XLA's own program receives.
GAINS = {"jax-21562": 0.2, "xla-15207": 0.2, "xla-4062": 0.2, "lorrax-wsolve": 0.2, "dnsjax-snapshot": 0.2}
FAST = ("jax-21562", "no-reshard")
# XLA's own partitioner rearranges the other two, so that the pass inside XLA finds little in them.
GAINS_INSIDE = {name: GAINS[name] for name in ("jax-21562", "xla-15207", "lorrax-wsolve")}
SLOW = [program for number, program in enumerate(PROGRAMS) if number % 16 == 4 or program.name in GAINS_INSIDE]


def to_numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def marked(slow: list[Program]) -> list[Any]:
    """All programs: a few in the fast tier, these in the slow one, the others in sweeps."""
    every = sampled_by_name(PROGRAMS, *FAST, rest=pytest.mark.sweep)
    names = {program.name for program in slow} - {*FAST}
    return [pytest.param(one.values[0], id=one.id, marks=pytest.mark.slow) if one.id in names else one for one in every]


@pytest.mark.parametrize("program", marked(SLOW))
def test_the_pass_inside_xla(program: Program) -> None:
    """Each program gets arguments of its own, because they may be donated."""
    mesh = program.make_mesh()
    with program.entered(mesh):
        case = program.build(mesh)
        plain = case.jitted().lower(*case.args).compile()
        ours = jit(case.f, network=WIRE, **case.jit).lower(*case.args).compile()
        assert not ours.decision.failed, ours.decision.why
        results = [to_numpy(compiled(*program.build(mesh).traced_args)) for compiled in (ours, plain)]
    assert_same(*results, case.tolerance)
    before, after = read_figures(plain), read_figures(ours.executable)
    assert after.received_bytes <= before.received_bytes * GAINS_INSIDE.get(program.name, 1)
    assert after.loop_bytes <= before.loop_bytes
    assert bool(before.launches) == program.moves


@pytest.mark.parametrize("program", marked([]))
def test_the_pass_on_stablehlo(program: Program) -> None:
    mesh = program.make_mesh()
    with program.entered(mesh):
        case = program.build(mesh)
        lowered = lowered_twice(case.f, *case.args, network=WIRE, **case.jit)
        plain, ours = (each.compile() for each in (lowered.plain, lowered.ours))
        results = [to_numpy(compiled(*program.build(mesh).traced_args)) for compiled in (ours, plain)]
    assert_same(*results, case.tolerance)
    if program.name in GAINS:
        assert read_figures(ours).received_bytes <= read_figures(plain).received_bytes * GAINS[program.name]


def test_the_report_that_started_it() -> None:
    """jax-ml/jax#21562, with the arguments of `jax.jit` alone: no device rebuilds the array."""
    program = BY_NAME["jax-21562"]
    case = program.build(program.make_mesh())
    lowered = lowered_twice(case.f, *case.args, **case.jit)
    kinds = Counter(step.kind for reshard in lowered.report.taken for step in reshard.plan.steps)
    assert kinds == {"all_to_all": 1} and "all-gather" not in lowered.ours.compile().as_text()
    assert "/tests/jax/programs/reports_" in lowered.report.taken[0].where


def test_the_corpus() -> None:
    names = [program.name for program in PROGRAMS]
    assert len(names) == len(set(names)) == len(BY_NAME) >= 55
    assert sum("https://" in program.about for program in PROGRAMS) >= 25
    assert sum(program.remat for program in PROGRAMS) >= 15
    assert {program.device_count for program in PROGRAMS} == {4, 6, 8}
    assert sum(program.explicit for program in PROGRAMS) >= 4 and sum(program.ambient for program in PROGRAMS) >= 4
    with pytest.raises(RuntimeError, match=r"'many' needs 4096 devices .*XLA_FLAGS"):
        Program("many", "", {"x": 4096}, lambda mesh: Case(jnp.sin, ())).make_mesh()


@pytest.mark.parametrize(
    "other",
    [
        {"a": np.float32([1, 2]), "b": np.int32([3, 5])},  # an integer
        {"a": np.float32([1, np.nan]), "b": np.int32([3, 4])},
        {"a": np.float64([1, 2]), "b": np.int32([3, 4])},  # a dtype
        {"a": np.float32([[1, 2]]), "b": np.int32([3, 4])},  # a shape
        {"a": np.float32([1, 2])},  # the structure
    ],
)
def test_what_differs_is_seen(other: Any) -> None:
    tree = {"a": np.float32([1, 2]), "b": np.int32([3, 4])}
    assert_same(tree, {"a": np.float32([1, 2.00001]), "b": np.int32([3, 4])}, 1e-5)
    with pytest.raises(AssertionError):
        assert_same(other, tree, 1e-5)
