"""The geometry of a panel: frames, boxes of cells, borders with ticks, and the size of its labels."""

import pytest

import reshard as rs
from reshard.draw import canvas
from reshard.draw.canvas import LEGIBLE, NORMAL, Size, width_of
from reshard.draw.panel import Panel, SliceFrame, fitting
from reshard.draw.vector_tiles import scene
from reshard.types import Layout, Mesh
from tests.draw.cases import CASES, planned
from tests.draw.reading import Seen


def panel(plan, size=None) -> Panel:
    """The first panel of a plan."""
    drawn = scene(plan)
    return Panel(drawn, 0, drawn.colour, size or Size(2.0, 3.0))


def test_a_frame_maps_elements_to_inches():
    frame = SliceFrame(width=2.0, height=1.5, top=0.5, across=8, down=3)
    assert [frame.x(element) for element in (0, 4, 8)] == [0, 1, 2]
    assert [frame.y(element) for element in (0, 1, 3)] == [0.5, 1.0, 2.0]
    assert SliceFrame(2.0, 1.0, 0.0, 0, 0).x(0) == 0


@pytest.mark.parametrize("name", [name for name in CASES if name != "empty"])
def test_slices_lie_one_below_the_other_within_the_panel(name):
    one = panel(planned(name))
    bottoms = [frame.top + frame.height for frame in one.frames]
    assert len(one.frames) == len(one.slices) and bottoms[-1] == pytest.approx(one.size.height)
    assert all(bottom <= frame.top for bottom, frame in zip(bottoms, one.frames[1:], strict=False))
    assert all(frame.width == one.size.width and frame.height > 0 for frame in one.frames)


@pytest.mark.parametrize("name", ["two dims", "uneven", "three dims split", "strided", "replicated"])
def test_what_is_drawn_lies_in_the_area_of_the_panel(name):
    one = panel(planned(name))
    area = canvas.blank(Size(4, 5)).inside(1, 1, *one.size)
    one.draw(area)
    (axes,) = area.figure.axes
    seen = Seen(axes)
    assert seen.fills and seen.labels
    for path, _ in seen.fills:
        (left, top), (right, bottom) = path.vertices.min(axis=0), path.vertices.max(axis=0)
        assert left >= -1e-9 and top >= -1e-9
        assert right <= one.size.width + 1e-9 and bottom <= one.size.height + 1e-9


def test_an_empty_array_has_words_instead():
    layout = Layout.parse("f32[0, {x}2]", Mesh(x=2))
    area = canvas.blank(Size(3, 3))
    panel(rs.plan(layout, layout)).draw(area)
    assert [text.get_text() for text in area.figure.axes[0].texts] == ["no elements"]


@pytest.mark.parametrize(("text", "borders"), [("f32[{x}4]", [0, 4, 8, 12, 16]), ("f32[{x}5/19]", [0, 5, 10, 15, 19])])
def test_borders_of_runs_have_ticks(text, borders):
    layout = Layout.parse(text, Mesh(x=4))
    assert panel(rs.plan(layout, layout))._borders(-1) == borders


def test_a_border_close_to_the_end_has_no_tick():
    layout = Layout.parse("f32[{x}3/10]", Mesh(x=4))
    assert panel(rs.plan(layout, layout))._borders(0) == [0, 3, 6, 10]


def test_words_fit_with_room_to_spare():
    for words in ("0", "0,1 + 2,3"):
        for width, height in ((0.1, 1), (3, 0.05), (5, 5)):
            size = fitting(words, canvas.box(0, 0, width, height))
            assert size <= NORMAL and width_of(words, size) <= width and size / 72 <= height


def test_labels_that_would_be_too_small_are_left_out():
    plan = planned("64 devices")
    small, large = panel(plan, size=Size(0.5, 0.5)), panel(plan, size=Size(8, 8))
    assert small.legible == 0 and LEGIBLE <= large.legible <= NORMAL
