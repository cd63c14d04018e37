"""A picture as data: areas, lines and words at their places, which painters turn into SVG or a figure.

    draw_tiles(plan)    ->  Scene(width, height, marks, ...)  ->  paint_svg(scene)      an `svg` element of a page
    draw_memory(...)                                          ->  paint_figure(scenes)  a matplotlib `Figure`
    draw_traffic(plan)

Lengths are pixels, 96 to the inch, from the top left; marks lie in order, later ones on top. What has the colour `INK`
is in the colour of the text around it, dark on a light page and light on a dark one. All other colours are the same on
both, and each means one thing in every picture: Okabe and Ito's eight, which differ for every kind of colour vision,
are devices; violets are memory, darker from the source to scratch; green is a bound, as on pages. Nothing is shown by
fill alone.
"""

from __future__ import annotations

import colorsys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from reshard.show.plan_table import IN_PLACE, OPERAND, RESULT, RUNNING, SCRATCH, SOURCE
from reshard.types.mesh import Mesh

Point = tuple[float, float]

INK = "ink"
"""The colour of the text around a picture."""

LEGIBLE, SMALL, NORMAL, LARGE = 7.0, 10.0, 12.0, 14.0
"""Sizes of words; smaller words than LEGIBLE are left out."""

LETTER = 0.61
"""The average width of a character over the size of the words."""

LINE = 13.5
"""From one line of small words to the next."""

_HATCH = 8.0  # Between the lines over padding.
_LONG = 2.5  # Boxes that are longer than this times their width have straight stripes.


def box(left: float, top: float, right: float, bottom: float) -> tuple[Point, ...]:
    """The corners of a rectangle."""
    return (left, top), (right, top), (right, bottom), (left, bottom)


class Area(NamedTuple):
    """Polygons, each with its fill; `title` is what a pointer that rests on them shows."""

    outlines: tuple[tuple[Point, ...], ...]
    fills: tuple[str, ...]
    title: str = ""
    opacity: float = 1.0
    rim: bool = False

    @property
    def bounds(self) -> tuple[Point, ...]:
        """The corners of the box around the polygons."""
        points = [point for outline in self.outlines for point in outline]
        (left, right), (top, bottom) = ((min(side), max(side)) for side in zip(*points, strict=True))
        return box(left, top, right, bottom)


class Lines(NamedTuple):
    """Segments of one colour."""

    segments: tuple[tuple[Point, Point], ...]
    colour: str = INK
    width: float = 1.0
    opacity: float = 1.0
    dashed: bool = False


class Words(NamedTuple):
    """One line of words whose middle is at height `y`; `anchor` says whether `x` is their start, middle or end."""

    x: float
    y: float
    text: str
    size: float = SMALL
    anchor: str = "middle"
    colour: str = INK
    bold: bool = False
    mono: bool = False
    faint: bool = False
    halo: bool = False
    turned: bool = False


Mark = Area | Lines | Words


@dataclass(frozen=True)
class Scene:
    """Marks on a rectangle whose left edge is 0 and whose upper edge is `top`.

    `title` and `caption` stand above and below the picture; `spoken` is for those who do not see it.
    """

    width: float
    height: float
    marks: tuple[Mark, ...]
    title: str = ""
    caption: str = ""
    spoken: str = ""
    top: float = 0.0


def add_words(scene: Scene) -> Scene:
    """The scene with its title and caption as marks, for a picture that no page surrounds.

    >>> add_words(Scene(200, 100, (), "tiles", "Numbers are devices.")).marks[0].text
    'tiles'
    """
    head = 30.0 if scene.title else 0.0
    lines = wrap_words(scene.caption, scene.width - 20, SMALL)
    marks: list[Mark] = [*scene.marks]
    if scene.title:
        marks.insert(0, Words(10, scene.top - head + 8, scene.title, LARGE, "start", bold=True))
    bottom = scene.top + scene.height
    marks += [Words(10, bottom + 14 + LINE * at, line, anchor="start", faint=True) for at, line in enumerate(lines)]
    foot = 12 + LINE * len(lines) if lines else 0.0
    return replace(scene, top=scene.top - head, height=scene.height + head + foot, marks=tuple(marks))


def box_area(left: float, top: float, right: float, bottom: float, fill: str, title: str = "") -> Area:
    """A filled rectangle."""
    return Area((box(left, top, right, bottom),), (fill,), title)


def hatch_box(left: float, top: float, right: float, bottom: float) -> Iterable[Mark]:
    """Marks of padding: a grey box with lines across it at half a right angle."""
    if right <= left or bottom <= top:
        return
    yield Area((box(left, top, right, bottom),), ("#888888",), "padding", 0.1)
    segments: list[tuple[Point, Point]] = []
    total = left + top + _HATCH  # x + y of the points of a line.
    while total < right + bottom:
        start, end = max(left, total - bottom), min(right, total - top)
        segments.append(((start, total - start), (end, total - end)))
        total += _HATCH
    yield Lines(tuple(segments), opacity=0.35)


def arrow_lines(start: Point, end: Point) -> Lines:
    """An arrow to the right or down."""
    (x, y), across = end, end[0] > start[0]
    tips = ((x - 6, y - 4), (x - 6, y + 4)) if across else ((x - 4, y - 6), (x + 4, y - 6))
    return Lines(((start, end), *((tip, end) for tip in tips)), width=1.3)


def fit_words(text: str, width: float, height: float) -> float:
    """The size in which words fit into a box, at most NORMAL; 0 if they would be too small to read.

    >>> fit_words("0", 100, 50), fit_words("0,1 + 2,3", 20, 50)
    (12.0, 0.0)
    """
    size = min(NORMAL, 0.9 * width / (LETTER * max(1, len(text))), 0.8 * height)
    return size if size >= LEGIBLE else 0.0


def measure_words(text: str, size: float) -> float:
    """The approximate width of words."""
    return LETTER * size * len(text)


def wrap_words(text: str, width: float, size: float) -> Sequence[str]:
    """Lines of words that are about this wide; long words stay whole."""
    most = max(1, int(width / (LETTER * size)))
    return textwrap.wrap(text, most, break_long_words=False, break_on_hyphens=False)


# Colours.

FEW = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#0072b2", "#d55e00", "#999999")
PALE = "#d8d8d8"
PART = {
    SOURCE: "#d5cfec",
    OPERAND: "#a99ddb",
    RUNNING: "#a99ddb",
    IN_PLACE: "#8a7ccb",
    RESULT: "#6a58b5",
    SCRATCH: "#3d3470",
}
PROMISE, FLOOR = "#8a6fe0", "#2e9462"


def ink_on(fill: str) -> str:
    """Black or white, whichever is easier to read on a fill.

    >>> ink_on("#f0e442"), ink_on("#0072b2")
    ('#000000', '#ffffff')
    """
    shares = (int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if luminance > 0.18 else "#ffffff"


def colour_by_coordinate(mesh: Mesh) -> dict[int, str]:
    """A colour for each device: eight distinct ones, or a hue by the first axis and a lightness by the others.

    >>> colour_by_coordinate(Mesh(x=2)), len(set(colour_by_coordinate(Mesh(x=8, y=8)).values()))
    ({0: '#56b4e9', 1: '#e69f00'}, 64)
    """
    if mesh.size <= len(FEW):
        return dict(zip(mesh.devices, FEW, strict=False))
    hues = next(size for size in mesh.axes.values() if size > 1)
    tints = mesh.size // hues
    colours: dict[int, str] = {}
    for at, device in enumerate(mesh.devices):
        hue, lightness = 0.85 * (at // tints) / hues + 0.02, 0.42 + 0.38 * (at % tints) / max(1, tints - 1)
        rgb = colorsys.hls_to_rgb(hue, lightness, 0.6)
        colours[device] = "#" + "".join(f"{round(255 * part):02x}" for part in rgb)
    return colours


def colour_devices(meshes: Sequence[Mesh]) -> dict[int, str]:
    """The colour of each device of these meshes, by its coordinates on the largest one if that has them all.

    >>> sorted(colour_devices([Mesh(x=2), Mesh({"y": 2}, device_ids=[2, 3])]))
    [0, 1, 2, 3]
    """
    mesh = max(meshes, key=lambda mesh: mesh.size)
    devices = sorted({device for each in meshes for device in each.devices})
    if not set(devices) <= set(mesh.devices):  # The two ends are on different devices.
        mesh = Mesh({"d": len(devices)}, device_ids=devices)
    return colour_by_coordinate(mesh)


def cut_stripes(corners: Sequence[Point], count: int) -> list[tuple[Point, ...]]:
    """A box cut into `count` stripes, one for each device that holds all of it: diagonal, or along a long box.

    >>> cut_stripes(box(0, 0, 8, 2), 2)
    [((0, 0.0), (8, 0.0), (8, 1.0), (0, 1.0)), ((0, 1.0), (8, 1.0), (8, 2.0), (0, 2.0))]
    """
    (left, top), _, (right, bottom), _ = corners
    ends = [at / count for at in range(count + 1)]
    if right - left > _LONG * (bottom - top):
        levels = [top + end * (bottom - top) for end in ends]
        return [box(left, low, right, high) for low, high in pairwise(levels)]
    if bottom - top > _LONG * (right - left):
        levels = [left + end * (right - left) for end in ends]
        return [box(low, top, high, bottom) for low, high in pairwise(levels)]

    def cut_unit(share: float) -> list[Point]:
        """Where the line at this share of the way from the upper left to the lower right cuts the unit square."""
        t = 2 * share
        return [(t, 0.0), (0.0, t)] if t <= 1 else [(1.0, t - 1), (t - 1, 1.0)]

    parts: list[tuple[Point, ...]] = []
    for low, high in pairwise(ends):
        # The stripe in the middle has the two corners that lie between its lines.
        middle = low < 0.5 < high
        (a, b), (c, d) = cut_unit(low), cut_unit(high)
        unit = [a, *([(1.0, 0.0)] if middle else []), c, d, *([(0.0, 1.0)] if middle else []), b]
        parts.append(tuple([(left + x * (right - left), top + y * (bottom - top)) for x, y in dict.fromkeys(unit)]))
    return parts
