"""The figures of places and moves."""

import json
from dataclasses import replace

import pytest

from reshard.doctor.places import PassOutcome, sort_by_waste
from reshard.hlo import Array
from tests.doctor.fragments import FORTH, MOVED, move, place


def test_the_figures_of_one_place():
    """5 runs, each of which receives 192 B for a move that needs 48 B."""
    one = place(["all_gather", "permute", "all_gather"], received=192, times=5, temp_bytes=320, moves=(move(),))
    assert (one.does, one.times, one.runs) == ("2 all_gather, permute", 5, 5)
    assert (one.received_bytes, one.needed_bytes, one.exact, one.wasted_bytes) == (192, 48, True, 720)
    assert (one.planned_bytes, one.saved_bytes) == (48, 720)
    assert (one.planned_peak_bytes, one.planned_temp_bytes, one.saved_temp_bytes) == (192, 64, 256)


def test_what_several_moves_bring_may_be_counted():
    """Elements that two moves bring count once: then less is needed than the sum, but no less than by the largest."""
    one = replace(place(received=192, moves=(move(), move(80)), replaced=False), counted_bytes=100)
    assert (one.needed_bytes, one.exact) == (100, False)
    assert (replace(one, counted_bytes=80).needed_bytes, replace(one, counted_bytes=80).exact) == (80, True)
    assert replace(one, counted_bytes=60).needed_bytes == 80


@pytest.mark.parametrize(
    ("moves", "needed", "exact", "planned"),
    [
        ((), 192, False, None),  # a reduction, for example: it needs what it receives
        ((move(), move(80)), 128, False, 96),  # two moves: at most what both need, and both plans
        ((move(), move(80, exact=False)), 128, False, 96),
        ((replace(move(), arrays=3),), 144, False, 144),  # three arrays that move alike
        ((move(), move(plan=False)), 96, False, None),  # no plan for one of them: none for the place
        ((move(500),), 192, True, 48),  # never more than it receives
    ],
)
def test_the_needs_of_several_moves(moves, needed, exact, planned):
    one = place(received=192, moves=moves, replaced=False)
    assert (one.needed_bytes, one.exact, one.planned_bytes) == (needed, exact, planned)


def test_no_more_is_needed_than_what_takes_its_place_receives():
    one = place(received=192, moves=(move(96),))
    assert (one.needed_bytes, one.planned_bytes, one.wasted_bytes, one.saved_bytes) == (48, 48, 144, 144)


def test_a_place_that_stays_saves_nothing_though_its_layouts_have_a_plan():
    one = place(received=192, temp_bytes=320, moves=(move(),), replaced=False)
    assert (one.planned_bytes, one.saved_bytes, one.saved_temp_bytes, one.wasted_bytes) == (48, 0, 0, 144)


def test_plans_that_cost_more_save_nothing():
    one = place(received=47, temp_bytes=63, moves=(move(),))
    assert (one.planned_bytes, one.saved_bytes, one.saved_temp_bytes, one.wasted_bytes) == (48, 0, 0, 0)


def test_the_most_wasteful_place_comes_first():
    costly, often, cheap = (
        place(received=960, moves=(move(960),)), place(received=96, times=20, moves=(move(),)), place(received=24)
    )  # fmt: skip
    assert sort_by_waste([cheap, costly, often]) == (often, costly, cheap)


def test_places_as_plain_data():
    one = place(received=192, temp_bytes=256, moves=(move(), move(plan=False)), largest=Array("f32", (8, 8)))
    data = json.loads(json.dumps(one.to_dict()))
    assert data["where"] == {
        "file": "train.py", "line": 26, "function": "step", "op_name": "jit(f)/mul", "exact": True,
    }  # fmt: skip
    assert (data["kind"], data["times"], data["largest"], data["rebuilds"]) == ("reshard", 1, "f32[8,8]", "")
    assert (data["received_bytes"], data["needed_bytes"], data["wasted_bytes"]) == (192, 96, 96)
    assert data["collectives"] == [
        {"kind": "all_gather", "name": "g", "dtype": "f32", "operands": [[2, 8]], "results": [[8, 8]],
         "group_size": 4, "combined": False, "received_bytes": 192, "times": 1}
    ]  # fmt: skip
    planned, unplanned = data["moves"]
    assert (planned["before"], planned["after"]) == ("f32[2,8]", "f32[2,8]")
    assert (planned["source"], planned["target"], planned["mesh"]) == (*FORTH, str(MOVED[0].mesh))
    assert planned["plan"]["steps"][0]["kind"] == "all_to_all" and unplanned["plan"] is None


LEFT = PassOutcome(why="it receives no more than is needed between these layouts")


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (None, ""),
        (LEFT, ": left, it receives no more than is needed between these layouts"),
        (PassOutcome(48, (move().plan,)), ": replaced by all_to_all, 48 B"),
        (PassOutcome(8, permutes=2), ": replaced by permute, permute, 8 B"),
        (PassOutcome(0), ": replaced by nothing, 0 B"),
    ],
)
def test_a_place_says_what_became_of_it(outcome, words):
    one = replace(place(["all_gather"] * 2, received=896), outcome=outcome)
    assert str(one) == f"train.py:26: 2 all_gather, 896 B received{words}"
    assert one.replaced == ("replaced" in words)


def test_what_the_pass_says_as_plain_data():
    data = replace(place(received=192), outcome=PassOutcome(8, permutes=2, op="fft")).to_pass_dict()
    assert (data["where"], data["does"], data["permutes"]) == ("train.py:26", "all_gather, fft", 2)
    assert (data["received_bytes"], data["planned_bytes"], data["replaced"], data["why"]) == (192, 8, True, "")
