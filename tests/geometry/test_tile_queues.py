"""Queues of tiles against all requests, listed."""

from __future__ import annotations

import random

import pytest

from reshard.geometry.dealing import tile_queues
from reshard.geometry.message import requests
from reshard.geometry.overlap import shared_elements
from reshard.types import Layout, Mesh
from tests.layouts import random_crossing


@pytest.mark.parametrize("seed", range(60))
def test_a_queue_has_the_requests_for_a_tile(seed: int):
    source, target = random_crossing(random.Random(seed))
    listed = requests(source, target, target.mesh.devices, lambda _: (), shared_elements)
    queues = tile_queues(source, target)
    for tile, wanted in listed.items():
        queue = queues.of(tile)
        assert [target.mesh.devices[at] for at in queue.positions] == [device for device, _ in wanted]
        assert sum(queue.sizes()) == queue.ends[-1]


def test_tiles_that_are_asked_for_alike_share_a_queue():
    source, target = Layout.parse("f32[{x}3/17, 8]", Mesh(x=6)), Layout.parse("f32[17, {y}2]", Mesh(y=4))
    queues = tile_queues(source, target)
    assert queues.of((0, 0)) is queues.of((4, 0)) is not queues.of((5, 0))
