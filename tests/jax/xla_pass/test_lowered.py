"""The stages of `jit` inside XLA: what the decision and the report say, and strict mode on what was compiled."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reshard.jax
from reshard import hlo
from reshard.jax.jit import jit
from reshard.jax.strict import Limits
from tests.jax.moving import AFTER, numbered, program, sharding


def received(compiled: Any) -> int:
    return hlo.traffic(hlo.parse(compiled.as_text())).received_bytes


def test_the_figures_are_those_of_both_programs() -> None:
    plain, ours = jax.jit(program).lower(numbered()).compile(), jit(program).lower(numbered()).compile()
    decision = ours.decision
    assert decision.plain is not None and decision.ours is not None
    assert decision.plain.received_bytes == received(plain) and decision.ours.received_bytes == received(ours) == 1792
    assert decision.ours.temp_bytes == ours.memory_analysis().temp_size_in_bytes and decision.plain.temp_bytes is None
    assert re.fullmatch(
        r"reshard: 1792 B received instead of 14336 B, in 1 collectives instead of 2; \d+ B of temporary memory "
        r"\(XLA's own program was not compiled\)",
        str(decision),
    )
    assert decision.to_dict()["plain"]["received_bytes"] == 14336


def test_the_report_has_a_line_for_each_place() -> None:
    def both(v: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return program(v), jnp.sin(jax.lax.with_sharding_constraint(w, sharding()))  # gathered, and used as a whole

    report = jit(both).lower(numbered(), numbered(sharding("x"))).compile().report
    (taken,), (left,) = report.taken, report.left
    assert taken.plan is not None and taken.does == "2 all_gather, 14336 B received"
    assert "moving.py" in str(taken) and str(taken).endswith("f32[16, {x}{y}2, 16]: all_to_all")
    assert left.where.split(":")[0] == __file__
    assert str(left).endswith("all_gather, 12288 B received: left, it receives no more than is needed, 12288 B")
    assert report.to_dict()["reshards"][0]["does"] and str(report).startswith("reshards taken: 1 of 2\n")


def test_why_nothing_could_be_gained() -> None:
    def why(f: Any, *args: Any, **options: Any) -> str:
        decision = jit(f, **options).lower(*args).compile().decision
        assert decision.chosen == "plain"
        return decision.why

    assert why(lambda v: v + 1, 1.0) == "it runs on one device"
    assert why(lambda v: v + 1, numbered()) == "it has no collectives"
    needed = "none of its chains of collectives can be replaced: 1 of 1: it receives no more than is needed"
    assert why(lambda v: jax.lax.with_sharding_constraint(v, sharding()) + 1, numbered(sharding("x"))) == needed
    assert "1 of 1: budget 10 B is too small" in why(program, numbered(), budget=10)


def test_the_limits_hold_for_the_compiled_program() -> None:
    compiled = jit(program).lower(numbered()).compile()
    needs = int(compiled.memory_analysis().temp_size_in_bytes)
    compiled.check(Limits(rebuild=False, max_bytes=needs))
    with pytest.raises(reshard.errors.StrictError, match=f"needs {needs} B"):
        compiled.check(Limits(max_bytes=needs - 1))


def test_a_compiled_program_as_bytes_keeps_its_decision() -> None:
    compiled = jit(program).lower(numbered()).compile()
    again = reshard.jax.deserialize(compiled.serialize())
    assert str(again.decision) == str(compiled.decision) and str(again.report) == str(compiled.report)
    np.testing.assert_array_equal(again(numbered()), np.asarray(numbered()) * 2 + 1)


def test_the_lowered_program_is_that_of_jax_jit() -> None:
    lowered = jit(program).lower(numbered())
    assert lowered.as_text() == jax.jit(program).lower(numbered()).as_text()
    assert lowered.out_info.shape == (16, 16, 16) and "stablehlo" in str(lowered.compiler_ir())
    with pytest.raises(AttributeError):
        _ = lowered.nothing


def test_options_of_the_compiler_pass_through() -> None:
    compiled = jit(program).lower(numbered()).compile({"xla_embed_ir_in_executable": True})
    assert compiled.output_shardings.is_equivalent_to(AFTER, 3)
    assert compiled.decision.chosen == "reshard"
