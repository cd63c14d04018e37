"""What a report says: totals, lists that add up to what is received, the words for each place, and JSON."""

import json
import os

import pytest

from reshard import hlo
from reshard.doctor import CompiledMemory, examine
from reshard.doctor.places import MANUAL, REDUCTION, SHIFT
from reshard.doctor.report.findings import Finding, format_origin, join_alike
from reshard.errors import PlanError
from reshard.hlo import Array, Source
from tests.doctor.fragments import GATHER, OFFSET, RECORDED, SLICE, ZERO, move, place, text
from tests.doctor.reports import TRAIN, report_of_all_kinds

BRANCH = """%{name} {{
  %p = f32[2,8]{{1,0}} parameter(0)
  {lines}
  ROOT %r{at} = f32[2,8]{{1,0}} reshape(%d{at})
}}
"""

LOOP = """%condition {
  %c = (s32[], f32[2,8]{1,0}) parameter(0)
  ROOT %less = pred[] custom-call(%c)
}

%body {
  %b = (s32[], f32[2,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %v = f32[2,8]{1,0} get-tuple-element(%b), index=1
  %sine = f32[2,8]{1,0} sine(%v)
  %chosen = f32[2,8]{1,0} conditional(%i, %sine, %sine), branch_computations={%one, %two}
  ROOT %next = (s32[], f32[2,8]{1,0}) tuple(%i, %chosen)
}
"""


def branch(name, at, twice):
    """A branch that gathers everything and uses a slice; if `twice`, of two arrays."""
    lines = [*OFFSET, ZERO, GATHER, SLICE]
    lines += ["%f = f32[2,8]{1,0} cosine(%p)", GATHER.replace("%g", "%h").replace("%p", "%f")] if twice else []
    lines += ["%e = f32[8,2]{1,0} dynamic-slice(%h, %zero, %at), dynamic_slice_sizes={8,2}"] if twice else []
    lines += [f"%d{at} = f32[8,2]{{1,0}} {'add(%d, %e)' if twice else 'add(%d, %d)'}"]
    return BRANCH.format(name=name, at=at, lines="\n  ".join(lines))


def conditional_in_a_loop():
    """A loop whose body runs one of two branches, which waste 144 and 288 B."""
    known = 'backend_config={"known_trip_count":{"n":"5"}}'
    loop = f"%w = (s32[], f32[2,8]{{1,0}}) while(%start), condition=%condition, body=%body, {known}"
    lines = ["%zero = s32[] constant(0)", "%start = (s32[], f32[2,8]{1,0}) tuple(%zero, %p)", loop]
    before = branch("one", 1, False) + branch("two", 2, True) + LOOP
    return text(*lines, "ROOT %r = f32[2,8]{1,0} get-tuple-element(%w), index=1", before=before)


def check_sum(data, received):
    """The lists of a report's JSON add up, and no more is wasted than is received."""
    places = sum(place["total_bytes"] for place in data["places"] if place["counted"])
    rest = sum(line["received_bytes"] for line in (*data["reductions"], *data["others"]))
    assert places + rest == data["received_bytes"] == received
    assert data["saved_bytes"] >= 0 and 0 <= data["wasted_bytes"] <= received


@pytest.mark.fast(20)
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_the_lists_of_recorded_programs_add_up(file, every):
    """And each collective is in exactly one place, which needs no more than it receives."""
    report, module = examine(file.read_text()), hlo.parse(file.read_text())
    check_sum(json.loads(report.to_json(every=every)), hlo.traffic(module).received_bytes)
    found = sorted(one.name for place in report.places for one in place.collectives)
    assert found == sorted(one.name for one in hlo.collectives(module, every_branch=True))
    assert all(0 <= place.needed_bytes <= place.received_bytes for place in report.places)


def test_a_branch_that_receives_less_is_shown_but_not_counted():
    report = examine(conditional_in_a_loop())
    assert sorted(place.counted for place in report.places) == [False, True, True]
    assert [place.total_bytes for place in report.places] == [960, 960, 960]
    assert (report.received_bytes, report.wasted_bytes, report.saved_bytes) == (1920, 1440, 1440)
    check_sum(report.to_dict(), 1920)
    assert str(report).count("not part of the totals") == 1 == report.to_html().count("not part of the totals")


def test_what_is_not_shown_is_summed_by_line_and_kind():
    report = report_of_all_kinds()
    sums = report.accounts()
    assert [(line.kind, line.does, line.launches, line.received_bytes) for line in sums.reductions] == [
        ("reduction", "all_reduce", 1, 96)
    ]
    assert [(line.kind, line.does, line.launches, line.received_bytes) for line in sums.others] == [
        ("manual", "all_gather", 1, 192),
        ("shift", "permute", 1, 4),
    ]
    assert sums.received_bytes == report.received_bytes


def test_json_is_plain_data_and_round_trips():
    report = examine(TRAIN, compiled=CompiledMemory(8, 4, 20, 3))
    data = json.loads(report.to_json(indent=2))
    assert data == report.to_dict() == json.loads(report.to_json())
    assert (data["program"], data["devices"], data["rebuilt"], data["launches"]) == ("jit_step", 8, 1, 3)
    assert data["compiled"] == {"argument_bytes": 8, "output_bytes": 4, "temp_bytes": 20, "alias_bytes": 3}
    first = data["places"][0]
    assert first["where"]["file"] == "train.py" and first["where"]["line"] == 17
    assert (first["received_bytes"], first["needed_bytes"], first["planned_bytes"]) == (7 << 25, 7 << 22, 7 << 22)
    assert first["moves"][0]["plan"]["steps"][0]["kind"] == "all_to_all"
    every = json.loads(report.to_json(every=True))
    assert every == report.to_dict(every=True) and every["reductions"] == every["others"] == []
    names = [one["name"] for place in every["places"] for one in place["collectives"]]
    assert sorted(names) == sorted(one.name for one in hlo.collectives(hlo.parse(TRAIN)))


def test_options_of_other_kinds_are_refused():
    report = report_of_all_kinds()
    with pytest.raises(PlanError, match="every 'no': give True or False"):
        report.to_dict(every="no")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="indent -1: give a whole number"):
        report.to_json(indent=-1)


def test_places_that_are_not_shown_say_why():
    report = report_of_all_kinds()
    assert [(one.place.kind, one.alike) for one in report.shown()] == [("reshard", 2)]
    summed = report.accounts()
    why = [line.why for line in (*summed.reductions, *summed.others)]
    assert why == ["reduction", "your shard_map", "receives little"]
    assert all(reason in str(report) for reason in why)


@pytest.mark.parametrize(
    ("kinds", "times", "words"),
    [
        (["all_gather"], 1, "all_gather"),
        (["all_gather", "permute", "all_gather"], 1, "2 all_gather, permute"),
        (["permute"], 5, "5 x permute"),
        (["all_to_all", "permute"], 7, "7 x (all_to_all, permute)"),
        (["permute"], None, "n x permute"),
    ],
)
def test_the_collectives_of_a_place(kinds, times, words):
    assert Finding(place(kinds, times=times)).does == words


@pytest.mark.parametrize(
    ("source", "short", "full"),
    [
        (Source("jit(f)/mul", "train.py", 26, "step"), "train.py:26", "train.py:26, step, jit(f)/mul"),
        (Source("w", "train.py", 26, exact=False), "near train.py:26", "near train.py:26, w"),
        (Source("jit(f)/mul"), "mul", "mul, jit(f)/mul"),
        (Source("x"), "x", "x"),
        (Source(""), "unknown", "unknown"),
        (Source("", "/far/away/in/model.py", 3), "model.py:3", "in/model.py:3"),
        (Source("", os.path.join(os.getcwd(), "lib", "model.py"), 3), "model.py:3", "lib/model.py:3"),
    ],
)
def test_the_line_of_a_place(source, short, full):
    assert (Finding(place(where=source)).where, format_origin(source)) == (short, full)


def test_bytes_count_every_run():
    busy = Finding(place(received=96, times=5, moves=(move(),)))
    assert (busy.received, busy.needed) == ("480 B", "240 B")
    assert Finding(place(moves=(move(40, exact=False),))).needed == "<= 40 B"
    assert Finding(place()).needed == "-"


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (place(received=192, moves=(move(),)), "all_to_all"),
        (place(received=48, moves=(move(),)), "the same"),
        (place(received=192, moves=(move(plan=False),)), "-"),  # it wastes, but nothing better is known
        (place(received=48, moves=(move(plan=False),)), "the same"),
        (place(received=192, kind=SHIFT, moves=(move(plan=False),)), "-"),
        (place(received=192, kind=MANUAL, moves=(move(),), replaced=False), "-"),
        (place(received=192, kind=MANUAL, moves=(move(),)), "all_to_all"),
        (place(received=192, moves=(move(),), replaced=False), "all_to_all"),  # not by the pass, but by hand
        (place(received=192, kind=REDUCTION), "-"),
    ],
    ids=[
        "saves",
        "nothing to save",
        "no plan",
        "no plan needed",
        "shift",
        "manual",
        "replaced",
        "by hand",
        "reduction",
    ],
)
def test_the_steps_of_reshard_instead(example, words):
    assert Finding(example).instead == words


def test_the_plan_with_its_cost():
    assert Finding(place(received=192, times=5, temp_bytes=256, moves=(move(),))).plan == (
        "all_to_all, 240 B received, 64 B of temporary memory; saves 720 B and 192 B of memory"
    )
    assert Finding(place(received=48, moves=(move(),))).plan == ""


@pytest.mark.parametrize(
    ("rebuilds", "words"),
    [
        ("", ""),
        ("whole", "rebuilds the whole array on every device: f32[8,8], 256 B"),
        ("group", "rebuilds all that its group of devices has: f32[8,8], 256 B"),
    ],
)
def test_an_array_that_is_rebuilt(rebuilds, words):
    array = Array("f32", (8, 8), "1,0") if rebuilds else None
    assert Finding(place(largest=Array("f32", (9, 8)), rebuilds=rebuilds, rebuilt=array)).rebuilt == words


def test_places_that_look_the_same_are_joined():
    places = [place(), place(received=48), place(), place(where=Source("", "b.py", 1)), place()]
    assert [(one.place.received_bytes, one.where, one.alike) for one in join_alike(places)] == [
        (96, "train.py:26", 3),
        (48, "train.py:26", 1),
        (96, "b.py:1", 1),
    ]
