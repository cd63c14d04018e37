"""The pass on whole programs: the same results as plain `jax.jit`, never more bytes, and no failures."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

import reshard as rs
from tests.jax.moving import ONLY_WITHOUT_HOOK
from tests.jax.moving import jit_without_hook as jit
from tests.jax.programs import BY_NAME, PROGRAMS, Program
from tests.jax.programs.base import assert_same
from tests.sampling import sampled_by_name

# The arrays of the corpus are small, so that launches would outweigh all bytes: on this network they cost nothing.
WIRE = rs.Network("wire", inner=(1e-9, 1e9), domain=1 << 20)
# Programs that must gain: after the pass they receive at most this fraction of what XLA's own program receives.
GAINS = {"jax-21562": 0.2, "xla-15207": 0.2, "xla-4062": 0.2, "lorrax-wsolve": 0.2, "dnsjax-snapshot": 0.2}


def to_numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize("program", sampled_by_name(PROGRAMS, "jax-21562", "no-reshard", rest=ONLY_WITHOUT_HOOK))
def test_a_program(program: Program) -> None:
    """Runs both modules, whichever is kept; each gets arguments of its own, because they may be donated."""
    mesh = program.make_mesh()
    with program.entered(mesh):
        case = program.build(mesh)
        lowered = jit(case.f, network=WIRE, **case.jit).lower(*case.args)
        assert not lowered.failed, lowered.why
        best, *others = lowered.candidates()
        assert not best.decision.failed, best.decision.why
        results = [to_numpy(compiled(*program.build(mesh).traced_args)) for compiled in (best, *others)]
    for result in results[1:]:
        assert_same(result, results[0], case.tolerance)
    plain, ours = best.decision.plain, best.decision.ours
    if best.decision.chosen == "reshard":
        assert plain is not None and ours is not None
        assert ours.received_bytes <= plain.received_bytes and ours.loop_bytes <= plain.loop_bytes
        assert ours.received_bytes <= plain.received_bytes * GAINS.get(program.name, 1)
        assert best.report.taken
    else:
        assert not best.report.taken and program.name not in GAINS


def test_the_report_that_started_it() -> None:
    """jax-ml/jax#21562, with the arguments of `jax.jit` alone: no device rebuilds the array."""
    program = BY_NAME["jax-21562"]
    case = program.build(program.make_mesh())
    compiled = jit(case.f, **case.jit).lower(*case.args).compile()
    assert compiled.decision.chosen == "reshard"
    kinds = Counter(step.kind for reshard in compiled.report.taken for step in reshard.plan.steps)
    assert kinds == {"all_to_all": 1} and "all-gather" not in compiled.as_text()
    assert "/tests/jax/programs/reports_" in compiled.report.taken[0].where
