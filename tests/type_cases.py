"""What type checkers know of the calls that users make: `make types` reads this, and nothing runs it."""

from __future__ import annotations

from typing import Any, assert_type

import jax
import numpy as np

import reshard as rs


def check_moves(x: jax.Array, a: rs.mpi.DistArray, tiles: dict[int, np.ndarray[Any, Any]], p: rs.Layout) -> None:
    assert_type(rs.redistribute(x, p), jax.Array)
    assert_type(rs.redistribute(a, p), rs.mpi.DistArray)
    assert_type(rs.redistribute(tiles, p, source=p), dict[int, np.ndarray[Any, Any]])
    assert_type(rs.jax.redistribute(x, p), jax.Array)
    assert_type(rs.plan("f32[4]", "f32[4]", mesh="x=2"), rs.Plan)
    assert_type(rs.sweep([(p, p)])[0], dict[str, Any])
