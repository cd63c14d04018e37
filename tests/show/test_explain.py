"""The reasons for each kind of step, and the sentences on bytes, memory and time."""

import random

import reshard as rs
from reshard.show import explain
from tests.layouts import random_layout


def test_every_step_of_random_plans_has_a_reason():
    chance = random.Random(1)
    kinds = set()
    for mesh, networks in ((rs.Mesh(x=4, y=2), (None, "h100")), (rs.Mesh(a=2, b=3, c=2), (None,))):
        for _ in range(150):
            source, target = (random_layout(chance, mesh, (12, 24)) for _ in range(2))
            for network in networks:
                plan = rs.plan(source, target, network=network)
                for step in plan.steps:
                    kinds.add(step.kind)
                    assert len(explain.why(step)) > 40
    assert kinds >= {"slice", "all_gather", "all_to_all", "permute", "exchange"}
