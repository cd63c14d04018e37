"""Loads of devices against their messages, one by one."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from reshard.geometry.device_loads import loads, loads_of, most_sent, sent_by_device
from reshard.geometry.messages import all_messages
from reshard.types import Layout, Mesh
from tests.layouts import random_crossing, random_pair


@pytest.mark.parametrize("seed", range(4))
def test_loads_are_those_of_the_messages(seed: int):
    """Among the same devices and between two sets; of tiles that have one holder, and several."""
    choose = random.Random(seed)
    for number in range(60):
        source, target = random_crossing(choose) if number % 3 == 0 else random_pair(choose, most_rank=2)
        messages = [m for m in all_messages(source, target) if m.sender != m.receiver]
        assert loads(source, target) == loads_of(messages), f"{source} -> {target}"
        sent: Counter[int] = Counter()
        for message in messages:
            sent[message.sender] += message.elements
        if number % 3:
            assert most_sent(source, target) == max(sent.values(), default=0)
            assert sent_by_device(source, target) == {device: sent[device] for device in source.mesh.devices}


def test_loads_of_thousands_of_devices_are_few():
    """Pieces of 157 rows to pieces of 3: a device receives of at most two pieces of rows, from 64 of columns."""
    mesh = Mesh(x=64, y=64)
    before = Layout.parse("f32[{x}157/10007, {y}65/4099]", mesh)
    every = loads(before, Layout.parse("f32[{x}{y}3/10007, 4099]", mesh))
    rows = {length for load in every for _, shape in load for (length, _), _ in shape}
    assert rows == {1, 2, 3} and len(every) < 100
    assert max(sum(number for number, _ in load) for load in every) == 2 * 64


def test_the_shape_of_a_message_of_a_million_boxes_is_counted_not_listed():
    """An exchange of a long cyclic array is cut into chunks without a walk over its boxes."""
    mesh, n = Mesh(x=2, y=2), 1_024_001
    source = Layout.parse(f"f64[{-(-n // 20)}{{y}}{{x}}5/{n}]", mesh)
    target = Layout.parse(f"f64[{-(-n // 16)}{{x}}4{{y}}/{n}]", mesh)
    every = loads(source, target)
    assert max(len(shape) for load in every for _, shape in load) < 20
    boxes = sum(count for load in every for number, shape in load for _, count in shape)
    assert boxes > 100_000
