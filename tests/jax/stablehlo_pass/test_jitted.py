"""`jit` by the pass on StableHLO: which arguments are static, as `jax.jit` itself derives it."""

from __future__ import annotations

import numpy as np

from tests.jax.moving import jit_without_hook as jit
from tests.jax.moving import kept, numbered, program


def test_static_arguments_by_number_from_the_end() -> None:
    f = jit(lambda v, n: program(v) * n, static_argnums=-1)
    np.testing.assert_array_equal(f(numbered(), 3), (np.asarray(numbered()) * 2 + 1) * 3)
    assert kept(f) == ["reshard"]


def test_static_arguments_by_number_are_static_by_name_too() -> None:
    f = jit(lambda v, n: program(v) * n, static_argnums=1)
    np.testing.assert_array_equal(f(numbered(), n=3), (np.asarray(numbered()) * 2 + 1) * 3)
    assert kept(f) == ["reshard"]
