"""Strict mode: refuses programs that still rebuild an array or need too much memory, and names the user's line."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.errors import StrictError
from reshard.jax.jit import jit
from reshard.jax.strict import Limits, check, effective_limits, strict

SIZE = 16
NOTHING_FITS = 10
"""A budget in bytes that no plan meets, so that all moves are left to XLA."""


def mesh(*sizes: int) -> JaxMesh:
    return JaxMesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), tuple("xyz"[: len(sizes)]))


def move(after: NamedSharding) -> Any:
    return lambda v: jax.lax.with_sharding_constraint(v, after) + 1


GRID = mesh(4, 2)
BEFORE, AFTER = NamedSharding(GRID, P("y", None, "x")), NamedSharding(GRID, P(None, ("x", "y")))
LINE = f"{__file__}:{move.__code__.co_firstlineno + 1}"


def numbered(place: NamedSharding) -> jax.Array:
    return jax.device_put(np.arange(SIZE**3, dtype=np.float32).reshape(SIZE, SIZE, SIZE), place)


def test_a_program_that_rebuilds_an_array_is_refused_and_its_line_named() -> None:
    with pytest.raises(StrictError) as caught:
        jit(move(AFTER), strict=True, budget=NOTHING_FITS)(numbered(BEFORE))
    message = str(caught.value)
    assert message.startswith(f"{LINE}: the whole array of global shape (16, 16, 16) is rebuilt on every device by")
    assert "f32[{y}8, 16, {x}4]" in message and "f32[16, {x}{y}2, 16]" in message and "budget" in message
    jit(move(AFTER), budget=NOTHING_FITS)(numbered(BEFORE))


def test_a_program_that_does_not_is_compiled() -> None:
    out = jit(move(AFTER), strict=True)(numbered(BEFORE))
    np.testing.assert_array_equal(out, np.asarray(numbered(BEFORE)) + 1)


def test_a_gather_that_the_user_wrote_is_not_a_rebuilding() -> None:
    everywhere = NamedSharding(GRID, P())
    compiled = jit(move(everywhere), strict=True).lower(numbered(BEFORE)).compile()
    assert "all-gather" in compiled.as_text()


def test_memory() -> None:
    f = move(AFTER)
    needs = jit(f).lower(numbered(BEFORE)).compile().memory_analysis().temp_size_in_bytes
    jit(f, max_bytes=needs)(numbered(BEFORE))
    with pytest.raises(StrictError, match=f"max_bytes allows {needs - 1} B"):
        jit(f, max_bytes=needs - 1)(numbered(BEFORE))


def test_the_context() -> None:
    """The context applies when a program is called, also to programs compiled outside of it."""
    f, x = jit(move(AFTER), budget=NOTHING_FITS), numbered(BEFORE)
    f(x)
    with strict(), pytest.raises(StrictError, match="rebuilt"):
        f(x)
    f(x)
    with strict(max_bytes=1), pytest.raises(StrictError, match="max_bytes allows 1 B"):
        jit(move(AFTER))(x)


def test_the_tighter_limit_holds() -> None:
    assert effective_limits(Limits()) == Limits(True, None)
    with strict(max_bytes=5):
        assert effective_limits(Limits()) == Limits(False, 5)
        assert effective_limits(Limits(max_bytes=3)) == Limits(False, 3)
        with strict(max_bytes=9):
            assert effective_limits(Limits()).max_bytes == 5


def test_strict_mode_takes_a_slower_program() -> None:
    """XLA's program rebuilds the array in fewer collectives than ours: it is kept, except in strict mode."""
    cube = mesh(2, 2, 2)
    before, after = NamedSharding(cube, P("y", "x", "z")), NamedSharding(cube, P(("z", "y", "x")))
    f = move(after)
    assert jit(f).lower(numbered(before)).compile().decision.chosen == "plain"
    compiled = jit(f, strict=True).lower(numbered(before)).compile()
    assert compiled.decision.chosen == "reshard" and compiled.report.taken
    np.testing.assert_array_equal(compiled(numbered(before)), np.asarray(numbered(before)) + 1)


def test_the_text_of_a_module_is_enough() -> None:
    """For example of a dump: the compiled text, and the report of the same program."""
    lowered = jit(move(AFTER)).lower(numbered(BEFORE))
    text = lowered.plain.compile().as_text()
    check(text, lowered.report, Limits(rebuild=False))  # the report says that the move is taken
    with pytest.raises(StrictError, match="rebuilt"):
        check(text, lowered.report.given_up("it was not"), Limits(rebuild=False))
    check(text, lowered.report.given_up("it was not"), Limits(rebuild=True))
