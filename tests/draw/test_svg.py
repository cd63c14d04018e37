"""Figures inside a page: its colours, unique ids, and nothing that would reach beyond them."""

import re

import pytest

from reshard.draw import canvas, svg
from tests.markup import Read, check_self_contained


def inline(name: str) -> str:
    area = canvas.blank(canvas.Size(3, 1.5), svg.ink())
    area.text(0.1, 0.1, "words")
    axes = area.inside(0.5, 0.5, 1, 0.5).axes()
    canvas.polygons(axes, [canvas.box(0, 0, 1, 1)], ["#123456"], edgecolors=area.ink.back, hatch="//")
    return svg.inline(area.figure, name, 'a "label" & <more>')


def test_lines_are_in_the_pages_colours_and_fills_in_their_own():
    text = inline("one")
    assert "currentColor" in text and "var(--card)" in text and "#123456" in text
    assert svg.ink().text not in text and svg.ink().back not in text


def test_the_label_is_escaped():
    read = Read(inline("one"))
    check_self_contained(read)
    assert read.all("aria-label") == ['a "label" & <more>'] and read.tags[0] == "svg"


def test_ids_have_the_figures_name_and_references_follow():
    first, second = (set(Read(inline(name)).all("id")) for name in ("one", "two"))
    assert first and not first & second and all(each.startswith("one-") for each in first)
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', inline("one"))) <= first


def test_nothing_applies_to_the_rest_of_the_page():
    text = inline("one")
    assert "<style" not in text and "<metadata" not in text and "xmlns" not in text.partition(">")[0]


def test_the_width_follows_the_page():
    """3 inches are 288 pixels: it shrinks to 80% of them, and does not grow."""
    (style,) = re.findall(r'<svg [^>]*style="([^"]*)"', inline("one"))
    widths = dict(part.split(": ") for part in style.split("; "))
    assert float(widths["max-width"][:-2]) == pytest.approx(288, abs=1)
    assert float(widths["min-width"][:-2]) == pytest.approx(0.8 * 288, abs=1)
