"""The bound of a move, against the elements that some device needs and does not hold."""

import random

import numpy as np
import pytest

import reshard as rs
from reshard.plans.rules.bounds import lower_bound
from tests.view_oracle import KEPT, PADDING, cut, random_case

MESH = rs.Mesh(x=4)


def test_the_bound_is_what_the_neediest_device_lacks():
    for seed in range(300, 500):
        move = (case := random_case(random.Random(seed), most=96)).move
        index = np.arange(int(np.prod(move.source.shape))).reshape(move.source.shape)
        held, wanted = cut(move.source, index), cut(move.target, case.reference(index))
        lacked = [
            sum(e not in set(held[d].reshape(-1)) for e in tile.reshape(-1) if e != PADDING and e < KEPT)
            for d, tile in wanted.items()
        ]
        assert lower_bound(move.source, move.target, move.view) == 8 * max(lacked), (seed, str(move))


@pytest.mark.parametrize(("source", "target", "bound"), [("f32", "bf16", 24), ("bf16", "f32", 24), ("s4", "f32", 6)])
def test_a_cast_is_bound_by_the_narrower_dtype(source, target, bound):
    layouts = [rs.Layout.parse(text, MESH) for text in (f"{source}[{{x}}4]", f"{target}[16]")]
    assert lower_bound(*layouts) == bound
