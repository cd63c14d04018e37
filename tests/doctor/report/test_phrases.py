"""The words for places: which are shown, how alike ones are joined, and how each figure reads."""

import os

import pytest

import reshard as rs
from reshard.doctor import ArrayMove, examine
from reshard.doctor.places import MANUAL, REDUCTION, SHIFT
from reshard.doctor.report import phrases
from reshard.doctor.report.phrases import rows, shown
from reshard.hlo import Array, Source
from tests.doctor.fragments import HLO_DATA, TILE, move, place
from tests.doctor.report.reports import NOTHING, TRAIN, report_of_all_kinds


def test_places_that_are_not_shown_say_why():
    report = report_of_all_kinds()
    assert [(row.place.kind, row.places) for row in rows(shown(report))] == [("reshard", 2)]
    summed = report.accounts()
    why = [phrases.why_summed(line) for line in (*summed.reductions, *summed.others)]
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
    assert phrases.does(place(kinds, times=times)) == words


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
    (row,) = rows([place(where=source)])
    assert (row.where, phrases.origin(source)) == (short, full)


def test_bytes_count_every_run():
    busy = place(received=96, times=5, moves=(move(),))
    assert (phrases.received(busy), phrases.needed(busy)) == ("480 B", "240 B")
    assert phrases.needed(place(moves=(move(40, exact=False),))) == "<= 40 B"
    assert phrases.needed(place()) == "-"


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
        "manual, replaced",
        "by hand",
        "reduction",
    ],
)
def test_the_steps_of_reshard_instead(example, words):
    assert phrases.instead(example) == words


def test_the_plan_with_its_cost():
    assert phrases.plan_text(place(received=192, times=5, temp_bytes=256, moves=(move(),))) == (
        "all_to_all, 240 B received, 64 B of temporary memory; saves 720 B and 192 B of memory"
    )
    assert phrases.plan_text(place(received=48, moves=(move(),))) == ""


def test_slices_are_named_only_if_nothing_else_moves():
    mesh = rs.Mesh(a=2, b=3)
    parsed = {text: rs.Layout.parse(text, mesh) for text in ("f32[6, 6]", "f32[{a}3, {b}2]", "f32[{b}2, {a}3]")}
    cut = rs.plan(parsed["f32[6, 6]"], parsed["f32[{a}3, {b}2]"])
    assert set(phrases.steps(cut).split(", ")) == {"slice"}
    assert phrases.steps(rs.plan(parsed["f32[6, 6]"], parsed["f32[6, 6]"])) == "nothing"
    mesh = rs.Mesh(a=2, b=2)
    both = rs.plan(rs.Layout.parse("f32[{a}4, 8]", mesh), rs.Layout.parse("f32[8, {b}4]", mesh))
    assert [step.kind for step in both.steps] == ["slice", "all_gather"] and phrases.steps(both) == "all_gather"


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
    assert phrases.rebuilt(place(largest=Array("f32", (9, 8)), rebuilds=rebuilds, rebuilt=array)) == words


def test_a_move_as_layouts_or_as_tiles():
    assert phrases.move_text(move()) == ("f32[{a}2, 8]", "f32[8, {a}2]")
    assert phrases.move_text(ArrayMove(TILE, Array("f32", (8, 2)), 48, False)) == ("tiles f32[2,8]", "tiles f32[8,2]")
    assert phrases.move_text(ArrayMove(None, TILE, 48, False)) == ("several arrays", "tiles f32[2,8]")


def test_rows_join_places_that_look_the_same():
    places = [place(), place(received=48), place(), place(where=Source("", "b.py", 1)), place()]
    assert [(row.place.received_bytes, row.where, row.places) for row in rows(places)] == [
        (96, "train.py:26", 3),
        (48, "train.py:26", 1),
        (96, "b.py:1", 1),
    ]


def test_the_totals():
    report = examine(TRAIN)
    assert phrases.title(report) == "jit_step on 8 devices"
    assert [name for name, _ in phrases.facts(report)] == ["received", "not needed", "rebuilt", "live"]
    assert phrases.facts(examine(NOTHING)) == [("received", "0 B a device, 0 collectives")]
    endless = examine((HLO_DATA / "endless_cpu_0.12.0.1.hlo").read_text())
    assert "loops of unknown length are counted once" in phrases.facts(endless)[0][1]
