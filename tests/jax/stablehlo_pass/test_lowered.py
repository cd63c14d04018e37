"""The programs before and after the pass, compiled: the candidates, and the decision between them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import reshard as rs
from reshard.jax.stablehlo_pass import lowered
from tests.jax.moving import AFTER, chosen, numbered, program, sharding
from tests.jax.moving import jit_without_hook as jit


def test_the_decision_has_the_figures() -> None:
    compiled = jit(program).lower(numbered()).compile()
    decision = compiled.decision
    assert decision.plain is not None and decision.ours is not None
    assert decision.ours.received_bytes == 1792 == compiled.report.taken[0].plan.received_bytes
    assert decision.plain.received_bytes > 1792 and decision.ours.launches == 1
    assert decision.ours.temp_bytes < decision.plain.temp_bytes
    assert str(decision).startswith("reshard: 1792 B received instead of ")
    assert decision.to_dict()["ours"]["received_bytes"] == 1792


def test_what_would_be_worse_is_not_kept() -> None:
    """Fewer bytes in more collectives are not kept; the report says that the move was possible, and why it was not."""
    f = jit(lambda v: jax.lax.with_sharding_constraint(v, sharding("x", "y")) + 1)
    lowered = f.lower(numbered(sharding(None, "x", "y")))
    assert len(lowered.report.taken) == 1
    compiled = lowered.compile()
    assert compiled.decision.chosen == "plain" and "collectives instead of" in compiled.decision.why
    (left,) = compiled.report.left
    assert not compiled.report.taken and compiled.decision.why in left.why
    fast = rs.Network("wire", inner=(1e-9, 1e9), domain=8)  # where starting a collective costs next to nothing
    assert chosen(jit(f.__wrapped__, network=fast), numbered(sharding(None, "x", "y"))) == "reshard"


def test_what_is_no_better_is_not_kept() -> None:
    compiled = jit(lambda v: jax.lax.with_sharding_constraint(v, sharding(None, "x")) + 1).lower(
        numbered(sharding("x"))
    )
    assert compiled.compile().decision.why == "it would receive as much, in as many collectives"


def test_a_program_that_does_not_compile_after_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    figures, calls = lowered.figures, []

    def fail(compiled: Any) -> Any:
        calls.append(compiled)
        if len(calls) > 1:
            raise RuntimeError("XLA")
        return figures(compiled)

    monkeypatch.setattr(lowered, "figures", fail)
    compiled = jit(program).lower(numbered()).compile()
    assert compiled.decision.failed and "does not compile" in compiled.decision.why
    np.testing.assert_array_equal(compiled(numbered()), np.asarray(numbered()) * 2 + 1)


def test_lines_that_do_not_gain_are_left() -> None:
    """A move of small tiles in many collectives, beside one that gains: only that line is taken."""

    def both(v: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = jax.lax.with_sharding_constraint(v, sharding("x", "y"))
        second = jax.lax.with_sharding_constraint(w, AFTER)
        return first + 1, second + 1

    v, w = numbered(sharding(None, "x", "y")), numbered()
    compiled = jit(both).lower(v, w).compile()
    lines = {reshard.where.rsplit(":")[-1] for reshard in compiled.report.taken}
    assert lines == {str(both.__code__.co_firstlineno + 2)}
    for out, given in zip(compiled(v, w), (v, w), strict=True):
        np.testing.assert_array_equal(out, np.asarray(given) + 1)


def test_the_candidates_are_the_program_before_and_after_the_pass() -> None:
    best, other = jit(program).lower(numbered()).candidates()
    assert (best.decision.chosen, other.decision.chosen) == ("reshard", "plain")
    assert "all-to-all" in best.as_text() and "all-gather" in other.as_text()
    for candidate in (best, other):
        np.testing.assert_array_equal(candidate(numbered()), np.asarray(numbered()) * 2 + 1)


def test_lines_can_be_left_to_xla() -> None:
    lowered = jit(program).lower(numbered())
    (reshard,) = lowered.report.taken
    left = lowered.retry(frozenset({reshard.where}))
    assert not left.report.taken and left.report.left[0].why == "this line would gain nothing from it"
    assert "all-gather" in left.lowered.compile().as_text()


def test_the_text_is_that_after_the_pass() -> None:
    lowered = jit(program).lower(numbered())
    assert "sdy.manual_computation" in lowered.as_text() and "sdy.manual_computation" in str(lowered.compiler_ir())
    assert "sdy.manual_computation" not in lowered.plain.as_text()


def test_results_that_would_be_sharded_otherwise_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowered, "_same_shardings", lambda plain, ours: False)
    compiled = jit(program).lower(numbered()).compile()
    assert str(compiled.decision) == "plain: its results would be sharded in another way"
