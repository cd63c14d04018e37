"""Both painters show every mark of a scene, at its place and in its colour; stripes, and how words fit."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import matplotlib.style
import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb

from reshard.draw.paint_figure import PlacedScene, paint_figure
from reshard.draw.paint_svg import paint_svg
from reshard.draw.pictures import NAMES, draw_scene
from reshard.draw.scene import (
    FEW,
    FLOOR,
    LEGIBLE,
    NORMAL,
    PALE,
    PART,
    PROMISE,
    Area,
    Lines,
    Scene,
    Words,
    add_words,
    box,
    colour_by_coordinate,
    cut_stripes,
    fit_words,
    ink_on,
    measure_words,
)
from reshard.types import Mesh
from tests.draw.cases import planned
from tests.draw.reading import area_of

NAME = "{http://www.w3.org/2000/svg}"
PICTURES = [draw_scene(name, planned(case)) for case in ("three dims", "uneven", "partial") for name in NAMES]


@pytest.mark.parametrize("scene", PICTURES, ids=lambda scene: f"{scene.spoken[:20]}-{len(scene.marks)}")
def test_the_svg_has_every_mark(scene: Scene):
    root = ElementTree.fromstring(paint_svg(scene))
    assert root.tag == f"{NAME}svg" and root.get("role") == "img" and root.get("aria-label") == scene.spoken
    assert root.get("viewBox") == f"0 0 {round(scene.width, 2):g} {round(scene.height, 2):g}"
    wanted = [mark.text for mark in scene.marks if isinstance(mark, Words)]
    assert [element.text for element in root.iter(f"{NAME}text")] == wanted
    titles = [mark.title for mark in scene.marks if isinstance(mark, Area) and mark.title]
    assert [element.text for element in root.iter(f"{NAME}title")] == titles
    fills = [fill for mark in scene.marks if isinstance(mark, Area) for fill in mark.fills]
    paths = [path for path in root.iter(f"{NAME}path") if path.get("fill") != "none"]
    assert [path.get("fill") for path in paths] == fills
    corners = [outline for mark in scene.marks if isinstance(mark, Area) for outline in mark.outlines]
    for path, outline in zip(paths, corners, strict=True):
        numbers = list(map(float, re.findall(r"-?[\d.]+(?:e-?\d+)?", path.get("d", ""))))
        assert np.allclose(np.reshape(numbers, (-1, 2)), outline, atol=0.01)


@pytest.mark.parametrize("scene", PICTURES, ids=lambda scene: f"{scene.spoken[:20]}-{len(scene.marks)}")
def test_the_figure_has_every_mark(scene: Scene):
    (axes,) = paint_figure([PlacedScene("one", scene, 0, 0)], scene.width, scene.height).axes
    assert axes.get_xlim() == (0, scene.width) and axes.get_ylim() == (scene.height, 0)
    wanted = [mark.text for mark in scene.marks if isinstance(mark, Words)]
    assert [text.get_text() for text in axes.texts] == wanted
    filled = [each for each in axes.collections if len(each.get_facecolors())]
    shown = [
        (np.array(path.vertices[:-1]), to_hex(face))
        for each in filled
        for path, face in zip(
            each.get_paths(), np.resize(each.get_facecolors(), (len(each.get_paths()), 4)), strict=True
        )
    ]
    wanted_areas = [
        (outline, fill)
        for mark in scene.marks
        if isinstance(mark, Area)
        for outline, fill in zip(mark.outlines, mark.fills, strict=True)
    ]
    assert [fill for _, fill in shown] == [fill for _, fill in wanted_areas]
    assert all(np.allclose(path, outline) for (path, _), (outline, _) in zip(shown, wanted_areas, strict=True))
    segments = [each for each in axes.collections if hasattr(each, "get_segments")]
    assert sum(len(each.get_segments()) for each in segments) == sum(
        len(mark.segments) for mark in scene.marks if isinstance(mark, Lines)
    )


def test_ink_is_the_colour_around_and_fills_are_the_same_on_both():
    scene = Scene(20, 10, (Area((box(0, 0, 5, 5),), ("#56b4e9",)), Words(5, 5, "$a$ & b"), Lines((((0, 0), (1, 1)),))))
    svg = paint_svg(scene)
    assert '<svg xmlns="http://www.w3.org/2000/svg"' in svg and 'fill="currentColor"' in svg and "$a$ &amp; b" in svg
    assert 'stroke="currentColor"' in svg and 'fill="#56b4e9"' in svg
    with matplotlib.style.context("dark_background"):
        dark = paint_figure([PlacedScene("one", scene, 0, 0)], 20, 10)
    light = paint_figure([PlacedScene("one", scene, 0, 0)], 20, 10)
    for figure, back, ink in ((dark, "#000000", "#ffffff"), (light, "#ffffff", "#000000")):
        areas, lines = figure.axes[0].collections
        assert to_hex(figure.get_facecolor()) == back and to_hex(figure.axes[0].texts[0].get_color()) == ink
        assert to_hex(lines.get_edgecolors()[0]) == ink and to_hex(areas.get_facecolors()[0]) == "#56b4e9"


def test_a_title_stands_above_and_a_caption_below():
    scene = Scene(200, 100, (), "bytes", "many words " * 12)
    framed = add_words(scene)
    title, *lines = (mark for mark in framed.marks if isinstance(mark, Words))
    assert title.text == "bytes" and framed.top < title.y < 0
    assert " ".join(line.text for line in lines) == scene.caption.strip()
    assert all(100 < line.y < framed.top + framed.height for line in lines)
    assert all(measure_words(line.text, line.size) <= scene.width for line in lines)


def test_words_fit_with_room_to_spare_or_are_left_out():
    for words in ("0", "0,1 + 2,3"):
        for width, height in ((10, 100), (300, 5), (500, 500), (60, 20)):
            size = fit_words(words, width, height)
            assert size == 0 or (LEGIBLE <= size <= NORMAL and measure_words(words, size) <= width and size <= height)


@pytest.mark.parametrize("size", [(2, 1), (1, 2), (8, 1), (1, 7), (3, 3)])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_stripes_share_a_box_equally_or_along_its_diagonal(size: tuple[int, int], count: int):
    parts = cut_stripes(box(1, 2, 1 + size[0], 2 + size[1]), count)
    shares = [area_of(part) for part in parts]
    assert len(parts) == count and sum(shares) == pytest.approx(size[0] * size[1])
    assert all(1 <= x <= 1 + size[0] and 2 <= y <= 2 + size[1] for part in parts for x, y in part)
    if max(size) > 2.5 * min(size):
        assert shares == pytest.approx([shares[0]] * count)
    else:  # Those near two corners are smaller, symmetrically.
        assert shares == pytest.approx(shares[::-1])


def luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))


def test_words_are_black_or_white_whichever_has_more_contrast():
    for fill in (*FEW, *colour_by_coordinate(Mesh(x=8, y=8)).values(), PALE, *PART.values()):
        contrast = {"#000000": (luminance(fill) + 0.05) / 0.05, "#ffffff": 1.05 / (luminance(fill) + 0.05)}
        assert contrast[ink_on(fill)] == max(contrast.values()), fill


def test_a_colour_means_one_thing():
    meanings = [set(FEW), {*PART.values()}, {PROMISE}, {FLOOR}, {PALE}]
    assert len(set.union(*meanings)) == sum(map(len, meanings))
    assert len(set(PART.values())) == len(PART) - 1  # What is running is the operand of many arrays.


@pytest.mark.parametrize("mesh", [Mesh(x=1), Mesh(x=8), Mesh(x=8, y=8), Mesh(x=1, y=16), Mesh(a=2, b=4, c=8)])
def test_every_device_has_its_own_colour(mesh: Mesh):
    colours = colour_by_coordinate(mesh)
    assert set(colours) == set(mesh.devices) and len(set(colours.values())) == mesh.size
