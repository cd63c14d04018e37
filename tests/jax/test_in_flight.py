"""The bound on programs that run at once: which result is waited for, and that results that are gone are skipped."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from reshard.jax import in_flight
from tests.jax import worker


class Result:
    """Stands in for an array: notes when it is waited for."""

    waited: list[int]

    def __init__(self, number: int, waited: list[int]) -> None:
        self.number, self.waited, self.deleted = number, waited, False

    def is_deleted(self) -> bool:
        return self.deleted

    def block_until_ready(self) -> None:
        assert not self.deleted
        self.waited.append(self.number)


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    in_flight._results.clear()
    yield
    in_flight._results.clear()


def started(count: int, waited: list[int]) -> list[Any]:
    return [Result(number, waited) for number in range(count)]


def test_the_oldest_is_waited_for() -> None:
    waited: list[int] = []
    results = started(in_flight.MOST + 3, waited)
    for result in results:
        in_flight.add(result)
    assert waited == [0, 1, 2]


@pytest.mark.slow
def test_what_is_gone_is_covered_by_a_later_one() -> None:
    waited: list[int] = []
    results = started(in_flight.MOST + 1, waited)
    results[0].deleted = True
    for result in results[:-1]:
        in_flight.add(result)
    assert waited == []
    results[1] = results[2] = result = None  # type: ignore[assignment]
    gc.collect()
    in_flight.add(results[-1])
    assert waited == [3]


def test_if_all_others_are_gone_the_last_is_waited_for() -> None:
    waited: list[int] = []
    results = started(in_flight.MOST + 5, waited)
    for result in results:
        in_flight.add(result)
        result.deleted = result is not results[in_flight.MOST]
    assert waited == [in_flight.MOST] and len(in_flight._results) <= in_flight.MOST


@pytest.mark.slow
def test_no_array_is_kept_alive() -> None:
    x = jnp.zeros(3)
    in_flight.add(x)
    note = in_flight._results[-1]
    del x
    gc.collect()
    assert note() is None


def test_a_traced_result_is_not_running() -> None:
    jax.make_jaxpr(lambda x: in_flight.add(x) or x)(1.0)
    assert not in_flight._results


@pytest.mark.slow
def test_many_moves_whose_results_are_kept_or_dropped() -> None:
    """Alone and in a tree; jax 0.10 on CPU aborted the process."""
    worker.check(["crowd"], devices=8)
