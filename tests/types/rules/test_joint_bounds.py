"""Joint bounds: below what runs, and above what one array alone makes necessary."""

from __future__ import annotations

import random

import reshard as rs
from reshard.types.rules.bounds import lower_bound
from reshard.types.rules.joint_bounds import joint_lower_bound
from tests.oracle import PADDING, tiles_of
from tests.trees import random_tree


def test_it_is_the_busiest_devices_sum():
    """Against a count of the elements that each device lacks, one by one."""
    choose = random.Random(3)
    for _ in range(40):
        moves = [ends for ends in random_tree(choose).values() if ends[0].partial_as(ends[1])]
        lacks: dict[int, int] = {}
        for source, target in moves:
            held, wanted = tiles_of(source), tiles_of(target)
            for device in target.mesh.devices:
                more = {*wanted[device].flat} - {*held[device].flat} - {PADDING}
                lacks[device] = lacks.get(device, 0) + target.nbytes(len(more))
        assert joint_lower_bound(moves) == max(lacks.values(), default=0)


def test_it_is_no_less_than_the_bound_of_one_array():
    choose = random.Random(5)
    for _ in range(60):
        moves = list(random_tree(choose).values())
        joint = joint_lower_bound(moves)
        assert max(lower_bound(*ends) for ends in moves) <= joint <= sum(lower_bound(*ends) for ends in moves)


def test_reductions_of_all_arrays_add_up():
    mesh = rs.Mesh(x=4)
    ends = tuple(rs.Layout.parse(text, mesh) for text in ("f32[16] + sum{x}", "f32[{x}4]"))
    assert joint_lower_bound([ends, ends]) == 2 * lower_bound(*ends)
    uneven = tuple(rs.Layout.parse(text, mesh) for text in ("f32[15] + sum{x}", "f32[{x}4/15]"))
    assert joint_lower_bound([uneven, uneven]) >= lower_bound(*uneven)
