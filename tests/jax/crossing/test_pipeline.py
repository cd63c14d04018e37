"""Moves in parts, each gathered while the next one crosses: every element, every byte, and who is started when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.jax.crossing import across
from reshard.jax.crossing.stages import InProcess
from reshard.jax.request import ReshardRequest
from reshard.synth.options import PlanOptions
from tests.jax.crossing.cases import by_messages, check, mesh

WIRES = rs.Network("wires", inner=(1e-9, 1e9), domain=16)
SHAPE = (24, 32)
PAIRS = {
    "rows to columns twice": ([0, 1], {"a": 2}, P("a"), [2, 3, 4, 5], {"t": 2, "r": 2}, P(None, "t")),
    "tiles to six replicas": ([7, 0], {"a": 2}, P(None, "a"), [5, 2, 1, 4, 3, 6], {"r": 6}, P()),
    "one to rows thrice": ([4], {"a": 1}, P(), [0, 1, 2, 5, 6, 7], {"r": 3, "t": 2}, P("t")),
}


def ends(name: str) -> tuple[NamedSharding, NamedSharding]:
    devices, sizes, before, others, other, after = PAIRS[name]
    return NamedSharding(mesh(devices, **sizes), before), NamedSharding(mesh(others, **other), after)


def values() -> np.ndarray:
    return np.arange(24 * 32, dtype="float32").reshape(SHAPE)


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", PAIRS)
def test_every_element_and_what_is_promised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle's tiles; what devices send, receive and hold, and the launches, are the pipeline's."""
    source, target = ends(name)
    request = ReshardRequest(target, source, PlanOptions.read(network=WIRES))
    planned = across.pipeline_across(request, SHAPE, "float32")
    assert planned is not None
    sent: Counter[Any] = Counter()
    received: Counter[Any] = Counter()
    counts: Counter[str] = Counter()
    most: list[int] = []
    real, run = InProcess.carried, across.start_program
    held = {id(x) for x in jax.live_arrays()}

    def carried(self: InProcess, packed: Any, rounds: Sequence[Any], elements: int, relayed: bool) -> Any:
        counts["rounds"] += len(rounds)
        for t in (t for each in rounds for t in each):
            sent[t.sender] += 4 * t.elements
            received[t.receiver] += 4 * t.elements
        return real(self, packed, rounds, elements, relayed)

    def started(function: Any, *arrays: Any) -> Any:
        made = run(function, *arrays)
        most.append(_fullest(held))
        return made

    monkeypatch.setattr(InProcess, "carried", carried)
    monkeypatch.setattr(across, "start_program", started)
    with by_messages(monkeypatch):
        check(source, target, values=values(), network=WIRES)
        check(source, target, values=values(), network=WIRES, donate=True)
    each = planned.each.steps
    gathers = sum(step.launches for step in each[1:]) * planned.parts
    assert counts["rounds"] == 2 * planned.parts * each[0].launches
    assert planned.launches == counts["rounds"] // 2 + gathers
    assert max(sent.values()) == 2 * planned.parts * each[0].sent_bytes
    assert max(received.values()) == 2 * planned.parts * each[0].received_bytes
    assert max(most) <= planned.peak_bytes


def _fullest(but: set[int]) -> int:
    """The bytes of the arrays on the fullest device, each buffer once."""
    live: dict[tuple[Any, int], int] = {}
    for x in jax.live_arrays():
        if id(x) not in but and not x.is_deleted():
            live |= {(s.device, s.data.unsafe_buffer_pointer()): s.data.nbytes for s in x.addressable_shards}
    by_device: Counter[Any] = Counter()
    for (device, _), nbytes in live.items():
        by_device[device] += nbytes
    return max(by_device.values(), default=0)


def test_the_next_part_crosses_before_a_gather_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = ends("tiles to six replicas")
    request = ReshardRequest(target, source, PlanOptions.read(network=WIRES))
    planned = across.pipeline_across(request, SHAPE, "float32")
    assert planned is not None
    events: list[str] = []
    for module, name in ((across, "run_stages"), (jax, "block_until_ready")):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, partial(lambda name, real, *given: [events.append(name), real(*given)][1], name, real)
        )
    with by_messages(monkeypatch):
        check(source, target, values=values(), network=WIRES)
    crosses, waits = "run_stages", "block_until_ready"
    assert events == [crosses] + [crosses, waits] * (planned.parts - 1) + [waits]


@pytest.mark.slow
def test_only_where_it_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the host, without a network, within a budget, and not where parts cost more than they gain."""
    source, target = ends("rows to columns twice")
    ran: list[Any] = []
    monkeypatch.setattr(across, "run_pipeline", lambda *given: ran.append(given))
    check(source, target, values=values(), network=WIRES)
    slow = rs.Network("slow", inner=(1e-3, 1e9), domain=16)
    with by_messages(monkeypatch):
        for options in ({}, {"network": "none"}, {"network": WIRES, "budget": 1 << 20}, {"network": slow}):
            check(source, target, values=values(), **options)
    assert not ran
