"""The picture of time against memory: where the stair, its dots and the names of others are, and what it tells."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from reshard.draw.paint_svg import STANDALONE, paint_svg
from reshard.draw.scene import INK, LINE, PROMISE, Area, Lines, Words, measure_words
from reshard.draw.trade_off import draw_trade_off

GIB = 2**30
CHOSEN = ((11, 3.1e-3), (13, 2.2e-3), (26, 1.4e-3), (48, 1.1e-3))
OTHERS = {"FSDP": (15, 2.4e-3), "FSDP+TP": (16, 2.3e-3), "data parallel": (60, 1.5e-3), "tensor parallel": (40, 12e-3)}


def scene_arguments() -> tuple[list[tuple[int, float]], dict[str, tuple[int, float]], int]:
    # More memory that gains nothing makes no step of its own.
    stair = [(gib * GIB, seconds) for gib, seconds in [*CHOSEN, (50, 1.1e-3)]]
    return stair, {name: (gib * GIB, seconds) for name, (gib, seconds) in OTHERS.items()}, 20 * GIB


def middle(area: Area) -> tuple[float, float]:
    points = area.outlines[0]
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def test_time_starts_at_zero_and_a_factor_of_two_in_memory_has_one_length():
    marks = draw_trade_off(*scene_arguments()).marks
    dots = [middle(mark) for mark in marks if isinstance(mark, Area) and mark.fills == (PROMISE,)]
    assert len(dots) == len(CHOSEN)
    words = {mark.text: mark for mark in marks if isinstance(mark, Words)}
    doubled = words["32.0 GiB"].x - words["16.0 GiB"].x
    assert dots[2][0] - dots[1][0] == pytest.approx(doubled, abs=0.1)  # 13 and 26 GiB
    zero, one = words["0 s"].y, words["1 ms"].y
    for (_, seconds), (_, y) in zip(CHOSEN, dots, strict=True):
        assert (zero - y) / (zero - one) == pytest.approx(seconds / 1e-3, abs=0.01)


def test_the_stair_holds_each_time_until_the_next_choice_fits():
    marks = draw_trade_off(*scene_arguments()).marks
    [stair] = [mark for mark in marks if isinstance(mark, Lines) and mark.colour == PROMISE]
    dots = [middle(mark) for mark in marks if isinstance(mark, Area) and mark.fills == (PROMISE,)]
    ends = [end for _, end in stair.segments]
    assert all(any(end == pytest.approx(dot, abs=0.1) for end in ends) for dot in dots)
    assert all(a[0] == pytest.approx(b[0]) or a[1] == pytest.approx(b[1]) for a, b in stair.segments)


def test_names_of_others_do_not_cover_each_other_and_stay_inside():
    scene = draw_trade_off(*scene_arguments())
    named = [mark for mark in scene.marks if isinstance(mark, Words) and mark.text.partition(",")[0] in OTHERS]
    assert sorted(mark.text for mark in named) == ["FSDP", "FSDP+TP", "data parallel", "tensor parallel, 12 ms"]
    boxes = [(mark.x, mark.y, mark.x + measure_words(mark.text, mark.size)) for mark in named]
    for at, (left, y, right) in enumerate(boxes):
        assert left > 0 and right < scene.width
        assert all(abs(y - b) >= LINE - 2 or right <= a or c <= left for a, b, c in boxes[at + 1 :])
    assert sum(isinstance(mark, Area) and mark.fills == (INK,) for mark in scene.marks) == len(OTHERS)


def test_the_svg_says_in_words_what_it_shows_and_follows_the_page():
    svg = paint_svg(draw_trade_off(*scene_arguments()), STANDALONE)
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label", "").startswith("3.1 ms in 11.0 GiB; 2.2 ms in 13.0 GiB")
    assert "data parallel: 1.5 ms in 60.0 GiB" in root.get("aria-label", "")
    assert "prefers-color-scheme:dark" in svg and "budget 20.0 GiB" in svg
    assert not re.search(r"\bnan\b|\binf\b", svg)
    assert "budget" not in paint_svg(draw_trade_off(*scene_arguments()[:2]))
    assert "25% slower" not in svg and "25% slower" in paint_svg(draw_trade_off(*scene_arguments(), gap=0.25))


def test_one_choice_alone_is_drawn_as_well():
    assert "1 ms in 1.0 GiB" in paint_svg(draw_trade_off([(GIB, 1e-3)], {}))
    assert "0 s in 0 B" in paint_svg(draw_trade_off([(0, 0.0)], {}))  # A step of scalars.


def test_others_that_are_as_good_share_a_name():
    others = {f"expert {at}": (2 * GIB, 1.5e-3) for at in range(40)}
    marks = draw_trade_off([(GIB, 1e-3)], others).marks
    assert [one.text for one in marks if isinstance(one, Words) and "expert" in one.text] == ["expert 0 and 39 more"]
