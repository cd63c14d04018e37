"""Plans of loads: each element read by one process, moved to where it is wanted, in waves within the budget."""

import random

import numpy as np
import pytest

from reshard.plans.load_plan import LoadPlan
from reshard.synth.reading import plan_reading
from reshard.types.stored import ChunkGrid
from tests.synth.loads import clip, count_readers, draw_problem, expect, fill, run_load


def check_load(plan: LoadPlan, moves, sources, fills, stored) -> None:
    """Each element is read by one process, and all tiles are what views say."""
    for name, counts in count_readers(plan, stored).items():
        assert (counts == 1).all(), (name, counts.min(), counts.max())
    arrays = fill(stored)
    got, want = run_load(plan, arrays), expect(moves, sources, fills, arrays)
    assert set(got) == set(want)
    for name, tiles in want.items():
        layout = plan.targets[name]
        for device, tile in tiles.items():
            np.testing.assert_array_equal(clip(layout, device, got[name][device]), clip(layout, device, tile))


@pytest.mark.parametrize("start", range(0, 150, 30))
def test_random_loads(start):
    seen = dict.fromkeys(("pack", "slab", "split", "box", "waves"), 0)
    for seed in range(start, start + 30):
        problem = draw_problem(random.Random(seed))
        plan = plan_reading(*problem)
        check_load(plan, problem.moves, problem.sources, problem.fills, problem.stored)
        assert LoadPlan.from_json(plan.to_json()) == plan
        readings = [reading for wave in plan.waves for reading in wave.readings]
        seen["pack"] += any(each.packed for each in readings)
        seen["slab"] += any(each.box for each in readings)
        seen["split"] += any(each.split > 1 for each in readings)
        seen["box"] += any(each.box for wave in plan.waves for each in wave.direct)
        seen["waves"] += len(plan.waves) > 1
        if not any(isinstance(each.pieces, ChunkGrid) for each in problem.stored.values()):
            assert sum(plan.read_bytes.values()) == sum(each.nbytes for each in problem.stored.values())
    assert all(seen.values()), seen
