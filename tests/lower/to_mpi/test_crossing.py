"""Fetches between two sets of devices: every element arrives, and holders share what is asked of them as planned."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from reshard.geometry.blocks import Block
from reshard.geometry.figures import count_sent_across
from reshard.geometry.holders import count_lacked
from reshard.lower.to_mpi import list_across
from reshard.types import Layout, Mesh
from tests.layouts import SIZES, random_layout
from tests.lower.to_mpi.elements import put, taken
from tests.oracle import PADDING, tiles_of

ONE_NODE, HALVES = [0] * 8, [device // 4 for device in range(8)]


def random_ends(choose: random.Random) -> tuple[Layout, Layout]:
    shape = [choose.choice(SIZES) for _ in range(choose.choice([1, 2, 2, 3]))]
    ends: list[Layout] = []
    for _ in range(2):
        count = choose.randint(1, 6)
        axes = {"x": 2, "y": count // 2} if count % 2 == 0 else {"x": count}
        mesh = Mesh(axes, device_ids=choose.sample(range(8), count))
        ends.append(random_layout(choose, mesh, shape, "int32"))
    return ends[0], ends[1]


def elements(blocks: tuple[Block, ...]) -> int:
    return sum(block.elements for block in blocks)


@pytest.mark.fast(20)
@pytest.mark.parametrize("nodes", [ONE_NODE, HALVES], ids=["one node", "two nodes"])
@pytest.mark.parametrize("seed", range(40))
def test_every_element_arrives_once(seed: int, nodes: Sequence[int]):
    source, target = random_ends(random.Random(seed))
    held, wanted = tiles_of(source), tiles_of(target)
    sent: Counter[int] = Counter()
    for device in target.mesh.devices:
        tile = np.full(target.tile_shape, PADDING)
        fetched = list_across(source, target, device, nodes, given=False)
        for giver, blocks in fetched.items():
            put(tile, blocks, taken(held[giver], blocks))
            sent[giver] += elements(blocks) if giver != device else 0
        real = wanted[device] != PADDING
        assert np.array_equal(tile[real], wanted[device][real])
        lacking = sum(elements(blocks) for giver, blocks in fetched.items() if giver != device)
        assert lacking == count_lacked(source, target)[device]
    if nodes is ONE_NODE:
        assert +sent == +Counter(count_sent_across(source, target)), "the shares are those of the plan"


@pytest.mark.fast(20)
@pytest.mark.parametrize("nodes", [ONE_NODE, HALVES], ids=["one node", "two nodes"])
@pytest.mark.parametrize("seed", range(40))
def test_givers_and_takers_agree(seed: int, nodes: Sequence[int]):
    source, target = random_ends(random.Random(seed))
    taken_from = {
        (giver, device): blocks
        for device in range(8)
        for giver, blocks in list_across(source, target, device, nodes, given=False).items()
    }
    given_to = {
        (device, taker): blocks
        for device in range(8)
        for taker, blocks in list_across(source, target, device, nodes, given=True).items()
    }
    assert taken_from == given_to


@pytest.mark.parametrize("seed", range(12))
def test_copies_on_several_nodes_answer_their_own_node_and_share_the_rest(seed: int):
    """Four to eight copies on two nodes of five devices, asked by devices of these nodes and of a third one."""
    choose = random.Random(seed)
    nodes = [device // 5 for device in range(15)]
    source = Layout.parse("s32[{x}7/13, 5]", Mesh({"x": 2, "r": 4}, device_ids=choose.sample(range(10), 8)))
    if seed % 3 == 0:
        source = Layout.parse("s32[13, 5]", source.mesh)
    target = Layout.parse("s32[{y}3/13, {z}3/5]", Mesh({"y": 5, "z": 2}, device_ids=choose.sample(range(15), 10)))
    held, wanted = tiles_of(source), tiles_of(target)
    for device in target.mesh.devices:
        tile = np.full(target.tile_shape, PADDING)
        for giver, blocks in list_across(source, target, device, nodes, given=False).items():
            put(tile, blocks, taken(held[giver], blocks))
            assert list_across(source, target, giver, nodes, given=True)[device] == blocks
        real = wanted[device] != PADDING
        assert np.array_equal(tile[real], wanted[device][real])


NODES = {"one node": lambda _: 0, "nodes of 64": lambda rank: rank // 64, "a node a rank": lambda rank: rank}


@pytest.mark.fast(2)
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize(
    ("before", "after"),
    [("f32[{x}8, 4096]", "f32[4096, {y}2]"), ("f32[{x}8/4091, 4093]", "f32[4091, {y}2/4093]")],
)
def test_givers_and_takers_agree_among_thousands(before: str, after: str, nodes: str):
    """Eight copies on 4,096 ranks to columns on 2,048 of these: every tile has thousands of requests."""
    source, target = Layout.parse(before, Mesh(r=8, x=512)), Layout.parse(after, Mesh(y=2048))
    node_of, device = [NODES[nodes](rank) for rank in range(4096)], 1234
    fetched = list_across(source, target, device, node_of, given=False)
    assert sum(map(elements, fetched.values())) == math.prod(target.shape[:1]) * 2
    for giver in list(fetched)[:: len(fetched) // 3]:
        assert list_across(source, target, giver, node_of, given=True)[device] == fetched[giver]


def test_a_holder_on_the_same_node_is_asked():
    source, target = Layout.parse("s32[6]", Mesh(x=4)), Layout.parse("s32[6]", Mesh({"d": 2}, device_ids=[5, 7]))
    nodes = [0, 1, 2, 3, 4, 1, 4, 3]
    asked = {d: list(list_across(source, target, d, nodes, given=False)) for d in (5, 7)}
    assert asked == {5: [1], 7: [3]}
