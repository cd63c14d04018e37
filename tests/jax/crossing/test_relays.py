"""Relays in JAX: what several devices lack is passed on among them, out of their tiles of the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.jax.crossing import across
from reshard.jax.crossing.stages import InProcess
from reshard.jax.request import ReshardRequest, plan_across
from reshard.synth.options import PlanOptions
from tests.jax.crossing.cases import SHAPE, by_messages, check, mesh
from tests.jax.oracle import filled

PAIRS = {
    "one to five": ([0], {"a": 1}, P(), range(5), {"t": 5}, P()),
    "two to six, one in both": ([0, 1], {"a": 2}, P("a"), range(1, 7), {"t": 6}, P()),
    "three to four, two in both": ([3, 1, 2], {"a": 3}, P(None, "a"), [2, 3, 0, 5], {"t": 2, "u": 2}, P(None, "t")),
}


def ends(name: str) -> tuple[NamedSharding, NamedSharding]:
    devices, sizes, before, others, other, after = PAIRS[name]
    return NamedSharding(mesh(list(devices), **sizes), before), NamedSharding(mesh(list(others), **other), after)


@pytest.mark.slow
@pytest.mark.fast(0, slow=2)
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("chunk", [None, 500])
def test_every_element_and_every_byte(name: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle's tiles; each device sends and receives what the plan says, the second round out of results."""
    source, target = ends(name)
    whole = plan_across(ReshardRequest(target, source), SHAPE, "float32")
    assert whole.steps[0].mode.relay
    budget = None
    if chunk is not None:
        budget = whole.peak_bytes - whole.steps[0].cost.scratch + 2 * 4 * chunk
        whole = plan_across(ReshardRequest(target, source, PlanOptions(budget)), SHAPE, "float32")
    sent: Counter[Any] = Counter()
    received: Counter[Any] = Counter()
    real = InProcess.carried

    def carried(self: InProcess, packed: Any, rounds: Sequence[Any], elements: int, relayed: bool) -> Any:
        for t in (t for each in rounds for t in each if t.sender != t.receiver):
            sent[t.sender] += 4 * t.elements
            received[t.receiver] += 4 * t.elements
        return real(self, packed, rounds, elements, relayed)

    monkeypatch.setattr(InProcess, "carried", carried)
    with by_messages(monkeypatch):
        check(source, target, budget=budget, donate=chunk is None)
    assert (max(sent.values()), max(received.values())) == (whole.sent_bytes, whole.received_bytes)
    assert whole.sent_bytes <= 1.05 * whole.endpoint_bound_bytes


def test_on_the_host_nothing_is_passed_on() -> None:
    """There all tiles are one memory."""
    source, target = ends("one to five")
    parts = across.pull_tiles(plan_across(ReshardRequest(target, source), SHAPE, "float32"))
    assert not parts.across.steps[0].mode.relay
    check(source, target)


def test_a_tile_of_one_element_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = ends("one to five")
    with by_messages(monkeypatch):
        check(source, target, values=filled((1,)))
        check(source, target, values=filled((2, 1)))
