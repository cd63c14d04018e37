"""Starting compiled programs: under a mesh that is set, and noted as running."""

from __future__ import annotations

import jax
import pytest

from reshard.jax import in_flight
from reshard.jax.starting import started
from tests.jax.oracle import mesh_of


def test_a_program_runs_without_the_mesh_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[jax.Array] = []
    monkeypatch.setattr(in_flight, "add", noted.append)
    seen: list[bool] = []

    def program(x: float) -> tuple[float, float]:
        seen.append(jax.sharding.get_abstract_mesh().empty)
        return x, 2 * x

    with jax.set_mesh(mesh_of({"x": 8})):
        assert started(program, 3.0) == (3.0, 6.0)
    assert started(program, 4.0) == (4.0, 8.0)
    assert seen == [True, True] and noted == [3.0, 4.0]
