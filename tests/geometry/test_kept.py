"""What devices of two sets keep, tile sizes and overlaps of pieces, against the meaning of layouts."""

from __future__ import annotations

import random

import pytest

from reshard.geometry.exchange_stats import kept, overlaps, sizes
from reshard.geometry.overlap import shared_elements
from tests.geometry import brute
from tests.layouts import random_crossing


@pytest.mark.parametrize("seed", range(60))
def test_what_devices_keep(seed: int):
    source, target = random_crossing(random.Random(seed))
    wanted = {device: brute.elements(target, device) for device in target.mesh.devices}
    both = {device: brute.elements(source, device) for device in source.mesh.devices if device in wanted}
    assert list(sizes(target)) == [len(elements) for elements in wanted.values()]
    counts = {device: len(elements & wanted[device]) for device, elements in both.items()}
    assert dict(kept(source, target)) == {device: count for device, count in counts.items() if count}


@pytest.mark.parametrize("seed", range(60))
def test_overlaps_are_those_of_the_pieces(seed: int):
    source, target = random_crossing(random.Random(seed))
    for one, other in zip(source.dims, target.dims, strict=True):
        shared = shared_elements(one, other)
        of_source, of_target, largest = overlaps(one, other)
        assert list(of_target) == [len(by) for by in shared]
        assert list(of_source) == [sum(p in by for by in shared) for p in range(len(of_source))]
        assert largest == max((count for by in shared for count in by.values()), default=0)
