"""Messages cut at any element, and the requests that they answer."""

from __future__ import annotations

import itertools
import random
from math import prod

import pytest

from reshard.geometry.message import Message, Runs, cut, elements, requests, tile_of, tile_sizes, tiles
from reshard.geometry.overlap import Progression, Repeat, shared_elements
from reshard.types import Layout, Mesh
from tests.layouts import random_pair

ROWS = (Progression(0, 7, 2), Progression(4, 9, 3, (Repeat(2, 9, 5),)))
COLUMNS = (Progression(1, 0, 2, (Repeat(2, 10, 20), Repeat(2, 4, 4))),)
PLANES = (Progression(5, 5, 3),)


def _listed(products: tuple[Runs, ...]) -> list[tuple[tuple[int, int], ...]]:
    """The (src, dst) indices of every element, in order."""
    listed = []
    for runs in products:
        dims = [[(run.src + i, run.dst + i) for p in dim for run in p.runs for i in range(run.length)] for dim in runs]
        listed += itertools.product(*dims)
    return listed


@pytest.mark.parametrize("runs", [(), (ROWS,), (COLUMNS,), (ROWS, PLANES), (ROWS, COLUMNS, PLANES)], ids=len)
def test_a_cut_has_the_elements_between_two_numbers_in_order(runs: Runs):
    every = _listed((runs,))
    assert elements(runs) == len(every)
    ends = range(0, len(every) + 1, max(1, len(every) // 25))
    for low, high in itertools.combinations_with_replacement(ends, 2):
        part = cut(runs, low, high)
        assert _listed(part) == every[low:high]
        assert Message(0, 1, part).elements == high - low
        assert sum(prod(extents) * times for extents, times in Message(0, 1, part).shape) == high - low


def test_a_cut_needs_few_products():
    """Of rank r, at most 2 r - 1 boxes of runs: a start, a middle and an end in each dim."""
    runs = (PLANES, PLANES, PLANES)
    assert max(len(cut(runs, low, high)) for low in range(27) for high in range(low, 28)) == 5


def test_requests_name_the_tiles_that_a_receiver_needs_a_part_of():
    source, target = Layout.parse("f32[{x}3/10]", Mesh(x=4)), Layout.parse("f32[{d}5]", Mesh(d=2))
    wanted = requests(source, target, [1], lambda _: (), shared_elements)
    assert wanted == {(1,): [(1, (1,))], (2,): [(1, (3,))], (3,): [(1, (1,))]}


def test_a_tile_has_the_summand_of_its_device():
    assert tile_of(Layout.parse("f32[{y}4] + sum{x}", Mesh(x=2, y=3)), 4) == (1, 1)


@pytest.mark.parametrize("part", range(4))
def test_the_size_of_a_tile_is_that_of_every_device_that_holds_it(part: int):
    for seed in range(part * 60, part * 60 + 60):
        for layout in random_pair(random.Random(seed), partial=seed % 2 == 0):
            size_of = tile_sizes(layout)
            sizes = {device: prod(layout.tile_shape_of(device)) for device in layout.mesh.devices}
            assert {device: size_of(tile) for device, tile in tiles(layout).items()} == sizes
