"""The picture of the tiles, element by element, against the meaning of the plan's layouts."""

from __future__ import annotations

import re
import runpy
from itertools import pairwise, product
from pathlib import Path

import pytest

import reshard as rs
from reshard.draw.scene import PALE, Area, Lines, Scene, Words, colour_by_coordinate
from reshard.draw.tile_panels import draw_tiles
from reshard.errors import ReshardError
from reshard.plans.plan import Plan
from reshard.types import Layout, Mesh
from reshard.types.units import bytes_text
from tests.draw.cases import CASES, M222, planned
from tests.draw.reading import area_of, areas, holders, listed, read_tile, texts

DOCS = Path(__file__).resolve().parents[2] / "docs"


def split_panels(plan: Plan, scene: Scene) -> list[tuple[Layout, list[Area], list[Words]]]:
    """Each layout of a plan with its tiles and their labels."""
    names = ["source", *(f"after step {n}" for n in range(1, len(plan.steps))), "target"]
    starts = [at for at, mark in enumerate(scene.marks) if isinstance(mark, Words) and mark.text in names]
    layouts = [plan.source, *(step.result for step in plan.steps)] if plan.steps else []
    found: list[tuple[Layout, list[Area], list[Words]]] = []
    for layout, (low, high) in zip(layouts, pairwise([*starts, len(scene.marks)]), strict=True):
        marks = scene.marks[low:high]
        tiles = [mark for mark in marks if isinstance(mark, Area) and read_tile(mark)]
        labels = [mark for mark in marks if isinstance(mark, Words) and (mark.colour != "ink" or mark.halo)]
        found.append((layout, tiles, labels))
    return found


@pytest.mark.fast(6)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("empty", "identity")])
@pytest.mark.parametrize("narrow", [False, True])
def test_every_tile_has_the_indices_the_colours_and_the_label_of_its_devices(name: str, narrow: bool):
    plan = planned(name)
    colour = colour_by_coordinate(plan.source.mesh)
    for layout, tiles, labels in split_panels(plan, draw_tiles(plan, narrow)):
        held, shown = holders(layout), set[tuple[int, ...]]()
        boxes: list[tuple[tuple[range, ...], Area]] = []
        for tile in tiles:
            devices, spans = read_tile(tile) or (set(), ())
            boxes.append((spans, tile))
            for element in product(*spans):
                assert element not in shown and held[element] == devices, f"{element} of {layout}"
                shown.add(element)
            assert set(tile.fills) == ({colour[device] for device in devices} if len(devices) <= 8 else {PALE})
            (left, top), _, (right, bottom), _ = tile.bounds
            assert sum(map(area_of, tile.outlines)) == pytest.approx((right - left) * (bottom - top))
            own = [word for word in labels if left < word.x < right and top < word.y < bottom]
            assert [listed(word.text, layout.mesh) for word in own] in ([], [devices])
        drawn = {dim for spans, _ in boxes for dim, span in enumerate(spans) if span != range(layout.shape[dim])}
        assert len(shown) == len(held), f"{len(held)} elements of {layout}"
        check_places(boxes, layout, drawn)


def check_places(boxes: list[tuple[tuple[range, ...], Area]], layout: Layout, drawn: set[int]) -> None:
    """Tiles of neighbouring indices touch, and are as wide and as tall as they have indices."""
    for (one, area), (other, beside) in pairwise(boxes):
        differ = [dim for dim in drawn if one[dim] != other[dim]]
        if len(differ) != 1 or one[differ[0]].stop != other[differ[0]].start:
            continue
        (left, top), _, (right, bottom), _ = area.bounds
        (start, head), _, (end, foot), _ = beside.bounds
        here, there = len(one[differ[0]]), len(other[differ[0]])
        across = start == pytest.approx(right) and (end - start) * here == pytest.approx((right - left) * there)
        down = head >= bottom - 1e-6 and (foot - head) * here == pytest.approx((bottom - top) * there)
        assert across or down or len(layout.shape) > 2, f"{one} and {other} of {layout}"


@pytest.mark.parametrize("name", [name for name in CASES if name != "identity"])
def test_padding_is_hatched_and_nothing_else_is(name: str):
    plan = planned(name)
    scene = draw_tiles(plan)
    hatched = [area for area in areas(scene) if area.title == "padding"]
    uneven = any(not layout.even and 0 not in layout.shape for layout in (plan.source, *(s.result for s in plan.steps)))
    assert bool(hatched) == uneven
    tiles = [area for area in areas(scene) if read_tile(area)]
    for padding in hatched:
        (left, top), _, (right, bottom), _ = padding.bounds
        for tile in tiles:
            (start, head), _, (end, foot), _ = tile.bounds
            assert min(right, end) - max(left, start) < 1e-6 or min(bottom, foot) - max(top, head) < 1e-6
    assert not uneven or any(isinstance(mark, Lines) and mark.opacity == 0.35 for mark in scene.marks)


@pytest.mark.parametrize("name", list(CASES))
def test_words_say_what_happens(name: str):
    plan, written = planned(name), texts(draw_tiles(planned(name)))
    for step in plan.steps:
        assert step.kind in written and any(bytes_text(step.received_bytes) in words for words in written)
    for layout in (plan.source, *(step.result for step in plan.steps)):
        assert str(layout) in " ".join(written)
    assert written.count("no elements") == (0 if name != "empty" else 1 + len(plan.steps))


def test_summands_are_joined_by_a_plus_and_replicas_by_a_comma():
    plan = rs.plan(Layout.parse("f32[{z}4] + sum{x}", M222), Layout.parse("f32[8]", M222))
    (_, _, labels), *_ = split_panels(plan, draw_tiles(plan))
    assert [label.text for label in labels] == ["0,2 + 4,6", "1,3 + 5,7"]


@pytest.mark.parametrize(("text", "borders"), [("f32[{x}5/19]", "0 5 10 15 19"), ("f32[{x}3/10]", "0 3 6 10")])
def test_borders_of_runs_have_ticks_unless_they_are_close_to_the_end(text: str, borders: str):
    layout = Layout.parse(text, Mesh(x=4))
    ticks = [mark.text for mark in draw_tiles(rs.plan(layout, layout)).marks if isinstance(mark, Words) and mark.faint]
    assert " ".join(ticks).startswith(f"{borders} dim 0 (")


LARGE = [
    ("f64[64{x}64, 64{y}64]", "the first 16 of 128 runs of dim 0 and 16 of 128 runs of dim 1"),
    ("f64[{x}4096, 4096{y}64]", "the first 16 of 8192 runs of dim 1"),
    ("f64[{x}64{y}64]", ""),
    ("f64[{x}2048{y}64]", "the first 1024 of 8192 runs of dim 0"),
    ("f64[{x:(1)2}64{x:(2)2}2, {y:(1)2}64{y:(2)2}2]", "the first 64 of 256 runs of dim 0 and 64 of 256 runs of dim 1"),
]


@pytest.mark.fast(2)
@pytest.mark.parametrize(("source", "note"), LARGE)
def test_large_arrays_are_cropped_with_a_note(source: str, note: str):
    mesh = Mesh(x=4, y=4) if "(" in source else Mesh(x=2, y=2)
    layout = Layout.parse(source, mesh)
    plan = rs.plan(layout, Layout.from_spec(mesh, layout.shape, "float64", [["x", "y"]]))
    scene = draw_tiles(plan)
    assert f"Source: {note}" in scene.caption if note else "the first" not in scene.caption
    (_, tiles, _), *_ = split_panels(plan, scene)
    assert sum(len(tile.fills) for tile in tiles) <= 4096


def test_a_tile_has_its_first_colour_where_there_is_no_room_for_all_and_a_key_where_there_is_none_for_labels():
    mesh = Mesh(x=4, y=4, z=8)
    layout = Layout.parse("f32[{x:(1)2}8{x:(2)2}, {y:(1)2}8{y:(2)2}]", mesh)
    plan = rs.plan(layout, Layout.from_spec(mesh, layout.shape, "float32", [["x"], ["y"]]))
    scene = draw_tiles(plan)
    assert "its colour is that of the first one" in scene.caption
    (_, tiles, labels), (_, after, _) = split_panels(plan, scene)
    assert {len(tile.fills) for tile in tiles} == {1} and not labels
    assert len(after) == 16 and {len(tile.fills) for tile in after} == {8}
    key = {area.title: area.fills for area in areas(scene) if re.fullmatch(r"device \d+", area.title)}
    assert len(key) == 64 and "device 127" in texts(scene)
    colour = colour_by_coordinate(mesh)
    assert all(fills == (colour[int(name.split()[1])],) for name, fills in key.items())


def test_a_picture_fits_a_phone_and_is_told_to_those_who_do_not_see_it():
    for name in ("two dims", "one dim", "three dims"):
        assert draw_tiles(planned(name), narrow=True).width <= 360
    told = draw_tiles(planned("two dims")).spoken
    assert told == "which device holds what, from f32[{x}4, {y}8] to f32[{y}8, {x}4], by exchange"


def test_too_many_devices_are_refused():
    mesh = Mesh(x=8192)
    with pytest.raises(ReshardError, match="too many to draw"):
        draw_tiles(rs.plan(Layout.parse("f32[{x}1]", mesh), Layout.parse("f32[8192]", mesh)))


def test_the_pictures_in_docs_are_those_that_the_code_draws():
    for name, svg in runpy.run_path(str(DOCS / "make_images.py"))["images"]().items():
        assert (DOCS / "images" / name).read_text(encoding="utf-8") == svg, "python docs/make_images.py"
