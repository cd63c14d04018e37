"""numpy's expressions on distributed arrays, compared with numpy on the whole array, on ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from tests.mpi import running

RUNS = [
    ("values_sampled", 3),
    *(pytest.param("values", ranks, marks=pytest.mark.slow) for ranks in (1, 2)),
    pytest.param("values_sampled", 4, marks=pytest.mark.slow),
    *(pytest.param("values", ranks, marks=pytest.mark.sweep) for ranks in (3, 4)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("topic", "ranks"), RUNS)
def test_numpys_expressions_on_ranks(topic: str, ranks: int, tmp_path: Path) -> None:
    running.check(f"numpy_protocol.conformance.{topic}", ranks, tmp_path)


@pytest.mark.slow
def test_the_table_in_the_docs_is_what_runs(tmp_path: Path) -> None:
    running.check("numpy_protocol.conformance.documented", 3, tmp_path)
