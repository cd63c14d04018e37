"""`rs.simulate` takes a plan or a tree of plans."""

from __future__ import annotations

import numpy as np

import reshard as rs


def test_a_plan_and_a_tree_of_it_give_the_same():
    ends = tuple(rs.Layout.parse(text, rs.Mesh(x=2)) for text in ("s32[{x}2, 4]", "s32[4, {x}2]"))
    tiles = {device: np.arange(8, dtype="int32").reshape(2, 4) + 8 * device for device in range(2)}
    alone = rs.simulate(rs.plan(*ends), tiles)
    together = rs.simulate(rs.plan_tree({"w": ends}), {"w": tiles})["w"]
    for device in range(2):
        np.testing.assert_array_equal(alone[device], together[device])
