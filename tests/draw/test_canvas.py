"""Areas, colours, stripes and scales."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from reshard.draw import canvas
from reshard.draw.canvas import Area, Size, box, byte_ticks, on, short_bytes, stripes, width_of
from reshard.draw.shapes import FEW, by_coordinate
from reshard.types import Mesh


def area_of(corners) -> float:
    """By the shoelace formula."""
    pairs = zip(corners, [*corners[1:], corners[0]], strict=True)
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairs)) / 2


@pytest.mark.parametrize("size", [(2, 1), (1, 2), (8, 1), (1, 7), (3, 3)])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_stripes_share_a_box_equally_or_along_its_diagonal(size, count):
    corners = box(1, 2, 1 + size[0], 2 + size[1])
    parts = stripes(corners, count)
    areas = [area_of(part) for part in parts]
    assert len(parts) == count and sum(areas) == pytest.approx(size[0] * size[1])
    assert all(1 <= x <= 1 + size[0] and 2 <= y <= 2 + size[1] for part in parts for x, y in part)
    if max(size) > 2.5 * min(size):
        assert areas == pytest.approx([areas[0]] * count)
    else:  # Those near two corners are smaller, symmetrically.
        assert areas == pytest.approx(areas[::-1])


def luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))


def test_words_are_black_or_white_whichever_has_more_contrast():
    for fill in (*FEW, *by_coordinate(Mesh(x=8, y=8)).values(), canvas.PALE, *canvas.PART.values()):
        contrast = {"#000000": (luminance(fill) + 0.05) / 0.05, "#ffffff": 1.05 / (luminance(fill) + 0.05)}
        assert contrast[on(fill)] == max(contrast.values()), fill


@pytest.mark.parametrize("most", [0, 1, 3, 7, 100, 6144, 7373, 10**6, 10**12 + 7])
def test_ticks_are_few_and_a_power_of_two_apart(most):
    ticks = byte_ticks(most)
    steps = {b - a for a, b in itertools.pairwise(ticks)}
    assert ticks[0] == 0 and ticks[-1] <= most and len(ticks) <= 6 and len(steps) <= 1
    assert all(step == 2 ** int(np.log2(step)) and ticks[-1] + step > most for step in steps)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (1, "1 B"), (9999, "9999 B"), (10240, "10 KiB"), (11000, "10.7 KiB"), (3 << 40, "3 TiB")],
)
def test_bytes_on_a_scale(count, text):
    assert short_bytes(count) == text


def test_the_width_of_words_is_that_of_their_longest_line():
    assert width_of("ab\nabcd", 10) == 2 * width_of("ab", 10) == width_of("abcd", 5) * 2
    assert width_of("", 10) == 0


def test_areas_are_in_inches_from_the_top_left():
    area = canvas.blank(Size(4, 2))
    inner = area.inside(1, 0.5, 2, 1)
    assert inner == Area(area.figure, area.ink, 1, 0.5, 2, 1) and inner.inside(0.5, 0.25, 1, 0.5).left == 1.5
    axes = inner.axes()
    assert axes.get_position().bounds == pytest.approx((0.25, 0.25, 0.5, 0.5))
    inner.text(0, 0, "top left")
    (text,) = area.figure.texts
    assert text.get_position() == pytest.approx((0.25, 0.75)) and text.get_color() == area.ink.text
