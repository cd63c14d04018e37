"""Arguments without their data: what is compiled for them is what is compiled for the arrays themselves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import reshard.jax
from reshard.errors import ProgramError
from reshard.jax.doctor import abstract, placement_of
from tests.jax.moving import BEFORE, numbered


def test_arrays_lose_their_data_and_nothing_else() -> None:
    weak = jnp.asarray(2.0) * 1
    args = ({"x": numbered(), "n": 3}, weak)
    (tree, number), named = abstract(args, {"name": "a"})
    assert isinstance(tree["x"], jax.ShapeDtypeStruct) and tree["x"].sharding == BEFORE and tree["n"] == 3
    assert number.weak_type == weak.weak_type and named == {"name": "a"}
    lowered = [jax.jit(lambda t, y: t["x"] * y).lower(*both).as_text() for both in (args, (tree, number))]
    assert lowered[0] == lowered[1]


def test_an_array_that_jax_may_place_has_no_placement() -> None:
    assert placement_of(jnp.ones(3)) is None and placement_of(3) is None
    assert placement_of(numbered()) == BEFORE
    (key,), _ = abstract((jax.random.key(0),), {})
    assert key.shape == () and key.dtype == jax.random.key(0).dtype


@pytest.mark.parametrize("given", ["step.py", 3, None])
def test_what_is_no_function(given: object) -> None:
    for call in (reshard.jax.report, reshard.jax.jit)[: 1 if given is None else 2]:  # Without one, jit is a decorator.
        with pytest.raises(ProgramError, match="not a function; give one"):
            call(given)
