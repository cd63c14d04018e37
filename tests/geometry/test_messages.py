"""The messages of an exchange: every needed element once, from a holder, evenly dealt."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from math import prod

import pytest

from reshard.geometry.messages import Message, all_messages
from reshard.geometry.overlap import Progression, Repeat, Run
from reshard.types.layout import Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh
from tests.geometry import brute
from tests.layouts import random_pair

# An unchanged dim that is padded: devices along y exchange unlike numbers of elements.
PADDED = [
    (Layout.parse("f32[{x}3/7, {y}3/5]", mesh), Layout.parse("f32[7, {y}3/5]", mesh)) for mesh in (Mesh(x=3, y=2),)
]


def some_pairs(seed: int) -> list[tuple[Layout, Layout]]:
    choose = random.Random(seed)
    return PADDED + [random_pair(choose, most_rank=2) for _ in range(100)]


def moved(message: Message, source: Layout, target: Layout) -> list[tuple[int, ...]]:
    """The global indices that a message carries, read from the sender's tile and checked in the receiver's."""
    there, here = meaning(source, message.sender), meaning(target, message.receiver)
    carried = []
    for box in message.boxes:
        sent = product(*(along[r.src : r.src + r.length] for along, r in zip(there, box, strict=True)))
        received = product(*(along[r.dst : r.dst + r.length] for along, r in zip(here, box, strict=True)))
        carried += list(sent)
        assert carried[-prod(r.length for r in box) :] == list(received)
    assert len(carried) == message.elements
    return carried


@pytest.mark.parametrize("seed", range(3))
def test_every_device_gets_each_element_once(seed: int):
    for source, target in some_pairs(seed):
        arrived: dict[int, list[tuple[int, ...]]] = {device: [] for device in target.mesh.devices}
        for message in all_messages(source, target):
            arrived[message.receiver] += moved(message, source, target)
        for device, indices in arrived.items():
            assert len(indices) == len(set(indices))
            assert set(indices) == brute.elements(target, device), f"device {device} of {source} -> {target}"


@pytest.mark.parametrize("seed", range(3))
def test_what_a_device_holds_is_copied_and_the_rest_is_dealt_evenly(seed: int):
    for source, target in some_pairs(seed):
        messages = all_messages(source, target)
        tiles = brute.home_tiles(source)
        holders, expected = Counter(tiles.values()), Counter(brute.requests(source, target).keys())
        assert Counter((m.receiver, tiles[m.sender]) for m in messages) == expected
        assert all((tiles[m.sender] == tiles[m.receiver]) == (m.sender == m.receiver) for m in messages)
        sent = Counter(m.sender for m in messages if m.sender != m.receiver)
        asked_of = Counter(tiles[m.sender] for m in messages if m.sender != m.receiver)
        for device, tile in tiles.items():
            low, rest = divmod(asked_of[tile], holders[tile])
            assert low <= sent[device] <= low + bool(rest)
        busiest = Counter(m.receiver for m in messages if m.sender != m.receiver)
        assert max([0, *sent.values(), *busiest.values()]) == brute.rounds(source, target)


@pytest.mark.parametrize("mesh", [Mesh(x=3, y=2), Mesh({"x": 3, "y": 2}, device_ids=[5, 4, 1, 0, 3, 2])], ids=repr)
def test_summands_are_exchanged_among_their_holders_only(mesh: Mesh):
    source, target = Layout.parse("f32[{x}3/7] + sum{y}", mesh), Layout.parse("f32[7] + sum{y}", mesh)
    for message in all_messages(source, target):
        assert mesh.position(message.sender) % 2 == mesh.position(message.receiver) % 2
    assert len(all_messages(source, target)) == 6 * 3


def test_two_holders_share_the_requests():
    """The last piece is one element; the four devices along y hold it and deal the requests of the eight others."""
    mesh = Mesh(x=3, y=4)
    source, target = Layout.parse("f32[{x}3/7]", mesh), Layout.parse("f32[7]", mesh)
    last = [
        m
        for m in all_messages(source, target)
        if m.sender != m.receiver and m.products == (((Progression(0, 6, 1),),),)
    ]
    assert Counter(m.sender for m in last) == {8: 2, 9: 2, 10: 2, 11: 2}
    assert {m.receiver for m in last} == set(range(8))


def test_a_message_has_elements_and_boxes():
    message = Message(
        0, 1, (((Progression(0, 2, 2), Progression(4, 6, 3, (Repeat(2, 9, 9),))), (Progression(1, 0, 7),)),)
    )
    assert message.elements == 8 * 7
    rows, columns = (Run(0, 2, 2), Run(4, 6, 3), Run(13, 15, 3)), Run(1, 0, 7)
    assert list(message.boxes) == [(row, columns) for row in rows]
    assert message.shape == (((2, 7), 1), ((3, 7), 2))
