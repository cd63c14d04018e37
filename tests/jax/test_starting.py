"""Starting compiled programs: under a mesh that is set, and not more than a few at once."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from reshard.jax import running
from tests.jax import worker
from tests.jax.oracle import mesh_of


class Result:
    """Stands in for an array: notes when it is waited for."""

    def __init__(self, number: int, waited: list[int]) -> None:
        self.number, self.waited, self.deleted = number, waited, False

    def is_deleted(self) -> bool:
        return self.deleted

    def block_until_ready(self) -> None:
        assert not self.deleted
        self.waited.append(self.number)


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    running._results.clear()
    yield
    running._results.clear()


def test_the_oldest_is_waited_for_and_what_is_gone_is_covered_by_the_next() -> None:
    waited: list[int] = []
    results = [Result(number, waited) for number in range(running.MOST + 5)]
    for result in results[:-2]:
        running.limit_running(result)  # pyright: ignore[reportArgumentType]
    assert waited == [0, 1, 2]
    results[3].deleted = True
    for result in results[-2:]:
        running.limit_running(result)  # pyright: ignore[reportArgumentType]
    assert waited == [0, 1, 2, 4] and len(running._results) == running.MOST


def test_a_program_runs_without_the_mesh_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[jax.Array] = []
    monkeypatch.setattr(running, "limit_running", noted.append)
    seen: list[bool] = []

    def program(x: float) -> tuple[float, float]:
        seen.append(jax.sharding.get_abstract_mesh().empty)
        return x, 2 * x

    with jax.set_mesh(mesh_of({"x": 8})):
        assert running.start_program(program, 3.0) == (3.0, 6.0)
    assert seen == [True] and noted == [3.0]


def test_a_traced_result_is_not_running() -> None:
    jax.make_jaxpr(lambda x: running.limit_running(x) or x)(1.0)
    assert not running._results


@pytest.mark.slow
def test_many_moves_whose_results_are_kept_or_dropped() -> None:
    worker.check(["crowd"], devices=8)
