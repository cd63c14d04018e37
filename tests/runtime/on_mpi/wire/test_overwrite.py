"""Exchanges inside a tile: on three ranks (`tests.mpi.modules`), and permutations of runs in place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from hypothesis import given
from hypothesis import strategies as st

from reshard.lower.to_mpi import Axis, Block
from reshard.runtime.on_mpi.wire.overwrite import _rearrange, _RunPermutation, _sources


@pytest.mark.slow
def test_three_ranks(tmp_path: Path):
    running.check("modules.in_place", 3, tmp_path)


@given(st.permutations(range(7)), st.integers(0, 7), st.integers(1, 3), st.integers(0, 2))
def test_runs_are_permuted_as_if_all_moved_at_once(order: list[int], count: int, run: int, rest: int):
    """Any part of a permutation: cycles, and chains whose first run nobody reads."""
    target, source = np.arange(7)[:count], np.array(order[:count], int)
    buffer = np.arange(7 * run + rest)
    wanted = buffer.copy()
    for to, at in zip(target, source, strict=True):
        wanted[to * run : (to + 1) * run] = np.arange(at * run, (at + 1) * run)
    _rearrange(buffer, _RunPermutation(run, target, source))
    assert np.array_equal(buffer, wanted)


def test_the_runs_of_slots_are_as_long_as_they_can_be():
    """Two slots of the columns of a 4 x 6 tile: runs of 3."""
    blocks = [Block((0, 3 * at), (0, 3 * at), (Axis(0, 4, 1, 1), Axis(1, 3, 1, 1))) for at in (1, 0)]
    runs = _sources([(0, blocks[0]), (1, blocks[1])], 12, (4, 6))
    assert runs.run == 3
    assert runs.target.tolist() == list(range(8))
    assert runs.source.tolist() == [1, 3, 5, 7, 0, 2, 4, 6]


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 4), (5,)])
def test_slots_hold_their_blocks(shape: tuple[int, ...]):
    tile = np.arange(int(np.prod(shape)))
    whole = Block((0,) * len(shape), (0,) * len(shape), tuple(Axis(d, n, 1, 1) for d, n in enumerate(shape))[::-1])
    buffer = tile.copy()
    _rearrange(buffer, _sources([(0, whole)], tile.size, shape))
    assert np.array_equal(buffer, tile.reshape(shape).transpose().reshape(-1))


def test_no_slots_at_all():
    buffer = np.arange(3)
    _rearrange(buffer, _sources([], 1, (3,)))
    assert buffer.tolist() == [0, 1, 2]
