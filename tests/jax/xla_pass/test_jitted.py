"""`jit` inside XLA: one compilation, the dispatch of `jax.jit`, and programs that never mix with others."""

from __future__ import annotations

import copy
from typing import Any

import jax
import numpy as np
import pytest

import reshard.jax
from reshard.errors import StrictError
from reshard.jax.jit import Jitted, jit
from tests.jax.moving import AFTER, BEFORE, SIZE, kept, numbered, program


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the modules that jax compiles from now on; fragments are compiled in other threads."""
    from jax._src import compiler

    names: list[str] = []
    plain = compiler.compile_or_get_cached

    def count(backend: Any, module: Any, *rest: Any, **named: Any) -> Any:
        names.append(str(module.operation.attributes["sym_name"]).strip('"'))
        return plain(backend, module, *rest, **named)

    monkeypatch.setattr(compiler, "compile_or_get_cached", count)
    return names


def counted(names: list[str]) -> int:
    return sum("step" in name for name in names)


def step_of_its_own() -> Any:
    def step(v: jax.Array) -> jax.Array:
        return program(v)

    return step


def test_a_call_compiles_once(compilations: list[str]) -> None:
    f = jit(step_of_its_own())
    assert isinstance(f, Jitted)
    for _ in range(3):
        f(numbered())
    assert counted(compilations) == 1 and kept(f) == ["reshard"]


def test_a_compiled_program_is_that_of_the_next_call(compilations: list[str]) -> None:
    f = jit(step_of_its_own())
    first, second = f.lower(numbered()).compile(), f.lower(numbered()).compile()
    f(numbered())
    assert counted(compilations) == 1
    assert first.decision is second.decision and first.decision.chosen == "reshard"


@pytest.mark.slow
def test_a_program_that_was_called_first_has_its_decision_too(compilations: list[str]) -> None:
    """It is compiled once more, because jax does not hand out what the pass did before."""
    f = jit(step_of_its_own())
    f(numbered())
    decisions = [f.lower(numbered()).compile().decision for _ in range(2)]
    assert decisions[0].chosen == decisions[1].chosen == "reshard" and decisions[0].plain is not None


def test_programs_with_and_without_it_do_not_mix() -> None:
    step = step_of_its_own()
    plain, ours = jax.jit(step), jit(step)
    plain(numbered())
    ours(numbered())
    assert kept(ours) == ["reshard"]
    assert "all-gather" in plain.lower(numbered()).compile().as_text()
    assert "all-gather" not in ours.lower(numbered()).compile().as_text()
    narrow = jit(step, budget=10)
    narrow(numbered())
    assert kept(narrow) == ["plain"] and "all-gather" in narrow.lower(numbered()).compile().as_text()


def test_the_pass_is_off_after_a_call_and_after_an_error() -> None:
    from reshard.jax.xla_pass import xla_hook

    f = jit(lambda v: v + 1)
    f(numbered())
    assert not xla_hook.is_on()
    with pytest.raises(TypeError):
        f(numbered(), 1)
    assert not xla_hook.is_on()
    with reshard.jax.enabled():
        f(numbered())
        assert xla_hook.is_on()


def test_strict_mode_refuses_at_the_call_and_checks_once(compilations: list[str]) -> None:
    refused = jit(step_of_its_own(), strict=True, budget=10)
    with pytest.raises(
        StrictError, match=r"moving\.py:\d+: the whole array .* is rebuilt .*; it was left to XLA: budget"
    ):
        refused(numbered())
    compilations.clear()
    f = jit(step_of_its_own(), strict=True)
    for _ in range(3):
        np.testing.assert_array_equal(f(numbered()), np.asarray(numbered()) * 2 + 1)
    assert counted(compilations) == 1
    with reshard.jax.strict(max_bytes=1), pytest.raises(StrictError, match="max_bytes allows 1 B"):
        f(numbered())


def test_it_is_a_function_like_that_of_jax_jit() -> None:
    f = jit(program)
    assert f.__name__ == "program" and f.__wrapped__ is program
    assert copy.copy(f)(numbered()).sharding.is_equivalent_to(AFTER, 3)
    shape = jax.ShapeDtypeStruct((SIZE,) * 3, np.float32, sharding=BEFORE)
    assert f.lower(shape).out_info.shape == (SIZE,) * 3
