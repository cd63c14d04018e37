"""The pass on StableHLO of whole programs: they compile, and compute what plain `jax.jit` computes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

import reshard as rs
from reshard.jax.compare import figures
from tests.jax.moving import lowered_twice
from tests.jax.programs import BY_NAME, PROGRAMS, Program
from tests.jax.programs.base import assert_same
from tests.sampling import sampled_by_name

# The arrays of the corpus are small, so that launches would outweigh all bytes: on this network they cost nothing.
WIRE = rs.Network("wire", inner=(1e-9, 1e9), domain=1 << 20)
# Programs that must gain: after the pass they receive at most this fraction of what XLA's own program receives.
GAINS = {"jax-21562": 0.2, "xla-15207": 0.2, "xla-4062": 0.2, "lorrax-wsolve": 0.2, "dnsjax-snapshot": 0.2}


def to_numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize(
    "program", sampled_by_name(PROGRAMS, "jax-21562", "no-reshard", rest=pytest.mark.sweep), ids=lambda p: p.name
)
def test_a_program(program: Program) -> None:
    """Runs both modules; each gets arguments of its own, because they may be donated."""
    mesh = program.make_mesh()
    with program.entered(mesh):
        case = program.build(mesh)
        lowered = lowered_twice(case.f, *case.args, network=WIRE, **case.jit)
        plain, ours = (each.compile() for each in (lowered.plain, lowered.ours))
        results = [to_numpy(compiled(*program.build(mesh).traced_args)) for compiled in (plain, ours)]
    assert_same(*results, case.tolerance)
    if program.name in GAINS:
        assert lowered.report.taken
        assert figures(ours).received_bytes <= figures(plain).received_bytes * GAINS[program.name]


def test_the_report_that_started_it() -> None:
    """jax-ml/jax#21562, with the arguments of `jax.jit` alone: no device rebuilds the array."""
    program = BY_NAME["jax-21562"]
    case = program.build(program.make_mesh())
    lowered = lowered_twice(case.f, *case.args, **case.jit)
    kinds = Counter(step.kind for reshard in lowered.report.taken for step in reshard.plan.steps)
    assert kinds == {"all_to_all": 1} and "all-gather" not in lowered.ours.compile().as_text()
    assert "/tests/jax/programs/reports_" in lowered.report.taken[0].where
