"""The order of copies: every element once, by address, and gaps filled in turns."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from reshard.runtime.on_mpi.copies import copy_order
from reshard.runtime.on_mpi.wire.chunks import Region

HALVES = [Region((0, at), ((0, 1), (1, 1)), (4096, 32)) for at in (0, 32)]


def test_halves_of_rows_take_turns():
    order = copy_order.copy_order(HALVES, (4096, 64), 8)
    assert [part.number for part in order] == [0, 1, 0, 1]


def test_long_runs_and_single_copies_are_not_cut():
    rows = [Region((at, 0), ((0, 2), (1, 1)), (4, 4096)) for at in (1, 0)]
    assert [part.number for part in copy_order.copy_order(rows, (8, 4096), 8)] == [1, 0]
    assert len(copy_order.copy_order(HALVES[:1], (4096, 64), 8)) == 1


@pytest.mark.parametrize("part", [64, 300, 1 << 20])
def test_the_parts_of_a_copy_are_the_copy(part: int, monkeypatch: pytest.MonkeyPatch):
    """Interleaved columns of 13 rows: each element of the tile is counted once, and addresses never go back."""
    monkeypatch.setattr(copy_order, "_PART", part)
    tile = np.zeros((13, 30), "u4")
    regions = [Region((0, at), ((0, 1), (1, 3)), (13, 10)) for at in range(3)]
    order = copy_order.copy_order(regions, tile.shape, tile.itemsize)
    starts = []
    for number, where, _ in order:
        view = regions[number].of(tile)[where]
        starts.append(view.__array_interface__["data"][0])
        view += 1
    assert (tile == 1).all()
    assert starts == sorted(starts)
    assert len(order) > len(regions) or part > tile.nbytes


def test_steps_copy_what_their_views_say():
    source, target = np.arange(4096 * 64, dtype="u8").reshape(4096, 64), np.zeros((4096, 64), "u8")
    order = copy_order.copy_order(HALVES, target.shape, 8)
    steps = copy_order.copy_steps([(region.of(target), region.of(source)) for region in HALVES], order)
    assert len(steps) == 4
    for step in steps:
        step()
    assert np.array_equal(target, source)


def test_short_runs_of_a_tile_are_read_ahead(monkeypatch: pytest.MonkeyPatch):
    """Every byte of the tile is read once, before the copies that take it; not long runs, nor a tile hardly used."""
    monkeypatch.setattr(copy_order, "stream_steps", lambda views: None)  # Numpy's copies alone are read ahead.
    source, target = np.arange(1 << 19, dtype="u8").reshape(8192, 64), np.zeros((8192, 64), "u8")
    halves = [region._replace(extents=(8192, 32)) for region in HALVES]
    order = copy_order.copy_order(halves, source.shape, 8, True)
    ahead = [part.ahead for part in order if part.ahead]
    assert ahead[0][0] == 0 and ahead[-1][1] == source.nbytes and len(ahead) > 1
    assert all(one[1] == other[0] for one, other in itertools.pairwise(ahead))
    assert order[0].ahead and not order[1].ahead
    steps = copy_order.copy_steps([(region.of(target), region.of(source)) for region in halves], order, source)
    assert len(steps) == len(order) + len(ahead)
    for step in steps:
        step()
    assert np.array_equal(target, source)
    assert not any(part.ahead for part in copy_order.copy_order(halves, (8192, 128), 8, True))
    wide = [region._replace(extents=(64, 2048)) for region in (HALVES[0], Region((0, 2048), *HALVES[0][1:]))]
    assert not any(part.ahead for part in copy_order.copy_order(wide, (64, 4096), 8, True))


def test_transposing_copies_go_one_by_one():
    source, target = np.arange(512 * 512, dtype="u4").reshape(512, 512), np.zeros((512, 512), "u4")
    views = [(target[:256], source.T[:256]), (target[256:], source.T[256:])]
    steps = copy_order.copy_steps(views, (copy_order.CopyPart(0, (...,)), copy_order.CopyPart(1, (...,))))
    assert len(steps) == 2
    for step in steps:
        step()
    assert np.array_equal(target, source.T)
