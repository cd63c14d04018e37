"""Every step of a move with a view has its words."""

import reshard as rs
from reshard.show.explain import assessed, move_of, why
from tests.proofs.test_view_proof import PLANS


def test_words():
    words = {name: [why(step) for step in plan.steps] for name, plan in PLANS.items()}
    assert "keeps it" in words["take"][1] and "t=1 of the source's 3" in words["take"][1]
    assert "its other parts stay" in words["put"][-2]
    assert words["cast"][0].startswith("every device casts its tile from float32 to bfloat16: ")
    assert "transposed" in words["turn"][-1] and "memory stays as it is" in words["turn"][0]
    assert "no collective fits" in words["boxes"][0]
    assert all(assessed(plan, None) for plan in PLANS.values())


def test_the_move_of_a_plan():
    for plan in PLANS.values():
        assert rs.plan(move_of(plan)) == plan
