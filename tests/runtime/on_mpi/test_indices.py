"""Global indices of a tile against the meaning of its layout."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from reshard.lower.to_mpi import ranks
from reshard.runtime.on_mpi.indices import clear_padding, index_ranges, indices, padding
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.layouts import layouts
from tests.oracle import PADDING, tiles_of


@given(layouts())
@settings(max_examples=150)
def test_ranges_indices_and_padding_are_those_of_the_meaning(layout: Layout):
    for rank, device in enumerate(ranks(layout.mesh)):
        along = meaning(layout, device)
        for dim, (size, wanted) in enumerate(zip(layout.shape, along, strict=True)):
            real = np.array([at < size for at in wanted], bool)
            assert [at for run in index_ranges(layout, rank)[dim] for at in run] == [at for at in wanted if at < size]
            assert np.array_equal(np.asarray(wanted)[real], indices(layout, dim, rank)[real])
            assert np.array_equal(np.flatnonzero(~real), padding(layout, rank)[dim])
            assert not size or (indices(layout, dim, rank) < size).all()


@given(layouts())
@settings(max_examples=60)
def test_padding_is_cleared_and_nothing_else(layout: Layout):
    for rank, device in enumerate(ranks(layout.mesh)):
        wanted = tiles_of(layout)[device]
        tile = wanted.copy()
        clear_padding(layout, rank, tile)
        assert np.array_equal(tile, np.where(wanted == PADDING, 0, wanted))


def test_blocks_dealt_in_rounds():
    layout = Layout.parse("f32[3{x}2/11]", Mesh(x=2))
    assert index_ranges(layout, 1) == ((range(2, 4), range(6, 8), range(10, 11)),)
    assert padding(layout, 1)[0].tolist() == [5]
