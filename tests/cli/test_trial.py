"""Random data: tiles of the source, and the check of tiles of the target."""

import numpy as np

import reshard as rs
from reshard.cli import trial


def test_random_data_differs_by_seed_and_not_by_run():
    layout = rs.Layout.parse("f32[{x}4]", rs.Mesh(x=4))
    tiles = [trial.Trial(layout, layout, seed).source_tiles()[0] for seed in (1, 1, 2)]
    assert np.array_equal(tiles[0], tiles[1])
    assert not np.array_equal(tiles[0], tiles[2])
