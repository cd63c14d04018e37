"""What devices fetch in the turns of a relay and through views: these copies fill tiles as the target means them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from reshard.lower.to_mpi import FIRST, SECOND, Block, fetched_as, served_as, tile_shapes
from reshard.types import Mesh
from tests.layouts import SIZES, random_layout
from tests.oracle import PADDING, tiles_of
from tests.view_oracle import cut, random_case


def copied(block: Block, source: np.ndarray, target: np.ndarray) -> None:
    for at in np.ndindex(*block.extents):
        here, there = list(block.src), list(block.dst)
        for number, axis in zip(at, block.axes, strict=True):
            here[axis.dim] += number * axis.src
            there[axis.dim] += number * axis.dst
        target[tuple(there)] = source[tuple(here)]


@pytest.mark.parametrize("seed", range(12))
def test_both_turns_of_a_relay(seed: int) -> None:
    choose = random.Random(seed)
    shape = [choose.choice(SIZES) for _ in range(choose.randint(1, 2))]
    one, other = (Mesh({"x": n}, device_ids=choose.sample(range(8), n)) for n in (choose.randint(1, 4), 5))
    source, target = random_layout(choose, one, shape, "int64"), random_layout(choose, other, shape, "int64")
    held, wanted = tiles_of(source), tiles_of(target)
    filled = {device: np.full(target.tile_shape, PADDING) for device in other.devices}
    for device in other.devices:
        for fetch in fetched_as(source, target, FIRST, device):
            for block in fetch.blocks:
                copied(block, held[fetch.rank], filled[device])
    first = {device: tile.copy() for device, tile in filled.items()}
    for device in other.devices:
        for fetch in fetched_as(source, target, SECOND, device):
            for block in fetch.blocks:
                copied(block, first[fetch.rank], filled[device])
        assert np.array_equal(filled[device][wanted[device] != PADDING], wanted[device][wanted[device] != PADDING])
    assert tile_shapes(source, target, SECOND) == (target.tile_shape, target.tile_shape)


@pytest.mark.parametrize("seed", range(12))
def test_views(seed: int) -> None:
    case = random_case(random.Random(seed), parts=False, most=60)
    source, target = case.move.source, case.move.target
    index = np.arange(int(np.prod(source.shape))).reshape(source.shape)
    held, wanted = cut(source, index), cut(target, case.reference(index))
    for device in target.mesh.devices:
        filled = np.full(tile_shapes(source, target, case.move.view)[1], PADDING)
        for fetch in fetched_as(source, target, case.move.view, device):
            back = {each.rank: each for each in served_as(source, target, case.move.view, fetch.rank)}
            assert back[device].blocks == fetch.blocks
            for block in fetch.blocks:
                copied(block, held[fetch.rank].reshape(-1), filled)
        assert np.array_equal(filled, np.where(wanted[device] == PADDING, PADDING, wanted[device]).reshape(-1))
