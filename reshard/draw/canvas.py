"""What pictures are drawn on: areas of a matplotlib figure, in inches from the top left.

No other module knows matplotlib. Figures do not use pyplot, and a notebook shows them by itself. Lines and text have
the colours of matplotlib's current style. Fills are the same in light and dark and differ for every kind of colour
vision (Okabe and Ito's eight colours for up to eight devices, viridis beyond), and nothing is shown by fill alone.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import matplotlib
from matplotlib.collections import PolyCollection
from matplotlib.colors import ListedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter

from reshard.show.live_bytes import IN_PLACE, OPERAND, RESULT, SCRATCH, SOURCE
from reshard.types.units import bytes_text

LEGIBLE, SMALL, NORMAL, LARGE = 5.5, 7.5, 9.0, 10.5
"""Sizes of text, in points; smaller text than LEGIBLE is left out."""

FEW = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#0072b2", "#d55e00", "#999999")
PALE = "#d8d8d8"
PART = {SOURCE: "#999999", OPERAND: "#56b4e9", RESULT: "#009e73", IN_PLACE: "#cc79a7", SCRATCH: "#e69f00"}
PROMISE, FLOOR = "#d55e00", "#2f8ccf"

_LONG = 2.5  # Boxes that are longer than this times their width have straight stripes.
_CHARACTER = 0.0086  # The average width in inches of a character of one point.
_RESOLUTION = 180  # Dots per inch of a notebook's PNG, which the notebook shows at half its size.

Point = tuple[float, float]


class Ink(NamedTuple):
    """The colour of text and lines, and that of the background."""

    text: str
    back: str

    @classmethod
    def of_style(cls) -> Ink:
        """The colours of matplotlib's current style."""
        style = cast("Mapping[str, Any]", matplotlib.rcParams)
        return cls(to_hex(style["text.color"]), to_hex(style["figure.facecolor"]))


class Picture(Figure):
    """A figure that a notebook shows even without matplotlib's inline back end."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        into = io.BytesIO()
        cast(Any, self).savefig(into, format="png", dpi=_RESOLUTION)
        width, height = (round(float(inches) * _RESOLUTION / 2) for inches in cast(Any, self).get_size_inches())
        return into.getvalue(), {"width": width, "height": height}


class Size(NamedTuple):
    """Width and height in inches."""

    width: float
    height: float


@dataclass(frozen=True)
class Area:
    """A rectangle of a figure, in inches from the figure's top left corner."""

    figure: Any
    ink: Ink
    left: float
    top: float
    width: float
    height: float

    def inside(self, left: float, top: float, width: float, height: float) -> Area:
        """A part of this area, in inches from its own top left corner."""
        return Area(self.figure, self.ink, self.left + left, self.top + top, width, height)

    def axes(self) -> Any:
        """New axes that fill this area, with faint ticks and no frame at the top and the right."""
        width, height = self._figure_size()
        bottom = height - self.top - self.height
        axes = self.figure.add_axes((self.left / width, bottom / height, self.width / width, self.height / height))
        axes.set_facecolor("none")
        axes.tick_params(colors=self.ink.text, labelsize=SMALL, length=2.5, width=0.6)
        for name, spine in axes.spines.items():
            spine.set_visible(name in ("left", "bottom"))
            spine.set(color=self.ink.text, linewidth=0.6)
        return axes

    def text(self, left: float, top: float, words: str, *, size: float = NORMAL, **style: Any) -> None:
        """Writes words at a point of this area; `style` as for matplotlib's `text`."""
        width, height = self._figure_size()
        x, y = (self.left + left) / width, 1 - (self.top + top) / height
        defaults: dict[str, Any] = {"color": self.ink.text, "ha": "left", "va": "top", "linespacing": 1.25}
        self.figure.text(x, y, words, fontsize=size, **(defaults | style))

    def arrow(self, start: Point, end: Point) -> None:
        """Draws an arrow between two points of this area."""
        axes = self.axes()
        axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        axes.set_axis_off()
        style = {"arrowstyle": "-|>", "color": self.ink.text, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", end, start, arrowprops=style)

    def _figure_size(self) -> Size:
        width, height = self.figure.get_size_inches()
        return Size(float(width), float(height))


def blank(size: Size, ink: Ink | None = None) -> Area:
    """A new figure of this size, as an area."""
    figure = Picture(figsize=size)
    ink = ink or Ink.of_style()
    cast(Any, figure).set_facecolor(ink.back)
    return Area(figure, ink, 0, 0, *size)


def svg(figure: Any, salt: str) -> str:
    """A figure as an SVG document: no background, letters as outlines, and no date, so that it is reproducible."""
    into = io.BytesIO()
    with cast(Any, matplotlib).rc_context({"svg.fonttype": "path", "svg.hashsalt": salt}):
        figure.savefig(into, format="svg", facecolor="none", metadata={"Date": None})
    return into.getvalue().decode()


# ---- colours ---------------------------------------------------------------------------------------


def colours(count: int) -> list[str]:
    """A colour for each of `count` devices: eight distinct ones, or, for more, shades in the order of the devices.

    >>> colours(2), colours(16)[-1]
    (['#56b4e9', '#e69f00'], '#fde725')
    """
    if count <= len(FEW):
        return list(FEW[:count])
    return [_shade(at / (count - 1)) for at in range(count)]


def _shade(share: float) -> str:
    """Viridis without its darkest end, which is invisible on a dark page."""
    return to_hex(cast(Any, matplotlib.colormaps["viridis"])(0.12 + 0.88 * share))


def shades() -> Any:
    """The same shades as a colour map; masked values stay blank."""
    return cast(Any, ListedColormap)([_shade(at / 255) for at in range(256)]).with_extremes(bad="none")


def on(fill: str) -> str:
    """Black or white, whichever is easier to read on a fill.

    >>> on("#f0e442"), on("#0072b2")
    ('#000000', '#ffffff')
    """
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(fill))
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if luminance > 0.18 else "#ffffff"


# ---- drawing ---------------------------------------------------------------------------------------


def polygons(axes: Any, corners: Sequence[Sequence[Point]], fills: Sequence[str], **style: Any) -> None:
    """Draws polygons in the coordinates of the axes; `style` as for matplotlib's `PolyCollection`."""
    axes.add_collection(cast(Any, PolyCollection)(corners, facecolors=fills, **style))


def box(left: float, top: float, right: float, bottom: float) -> list[Point]:
    """The corners of a rectangle."""
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def stripes(corners: Sequence[Point], count: int) -> list[list[Point]]:
    """A box cut into `count` stripes, one for each device that holds all of it: diagonal, or along a long box.

    >>> stripes(box(0, 0, 8, 2), 2)
    [[(0, 0.0), (8, 0.0), (8, 1.0), (0, 1.0)], [(0, 1.0), (8, 1.0), (8, 2.0), (0, 2.0)]]
    """
    (left, top), _, (right, bottom), _ = corners
    ends = [at / count for at in range(count + 1)]
    if right - left > _LONG * (bottom - top):
        levels = [top + end * (bottom - top) for end in ends]
        return [box(left, low, right, high) for low, high in pairwise(levels)]
    if bottom - top > _LONG * (right - left):
        levels = [left + end * (right - left) for end in ends]
        return [box(low, top, high, bottom) for low, high in pairwise(levels)]
    return [_diagonal(corners, low, high) for low, high in pairwise(ends)]


def _diagonal(corners: Sequence[Point], low: float, high: float) -> list[Point]:
    """The part of a box between two lines parallel to its rising diagonal, at shares `low` and `high` of the way.

    >>> _diagonal(box(0.0, 0.0, 2.0, 1.0), 0, 0.5)
    [(0.0, 0.0), (2.0, 0.0), (0.0, 1.0)]
    """
    (left, top), _, (right, bottom), _ = corners

    def line(share: float) -> list[Point]:
        t = 2 * share
        return [(t, 0.0), (0.0, t)] if t <= 1 else [(1.0, t - 1), (t - 1, 1.0)]

    middle = low < 0.5 < high
    (a, b), (c, d) = line(low), line(high)
    unit = [a, *([(1.0, 0.0)] if middle else []), c, d, *([(0.0, 1.0)] if middle else []), b]
    kept = [point for at, point in enumerate(unit) if point not in unit[:at]]
    return [(left + x * (right - left), top + y * (bottom - top)) for x, y in kept]


def words_on(
    axes: Any, x: float, y: float, words: str, size: float, fills: Sequence[str], outlined: bool = False
) -> None:
    """Writes a label centred at a point of a fill, outlined if the fill has several colours."""
    black = outlined or len(fills) > 1
    effects = outline("#ffffff") if black else []
    colour = "#000000" if black else on(fills[0])
    axes.text(x, y, words, fontsize=size, color=colour, ha="center", va="center", path_effects=effects)


def outline(colour: str) -> list[Any]:
    """A path effect that sets words off from their background."""
    return [withStroke(linewidth=2.0, foreground=colour)]


def width_of(words: str, size: float) -> float:
    """The approximate width of words in inches."""
    return max((len(line) for line in words.splitlines()), default=0) * size * _CHARACTER


# ---- scales of bytes -------------------------------------------------------------------------------


def short_bytes(count: float) -> str:
    """Bytes on a scale: `bytes_text` without a fraction of zero.

    >>> short_bytes(1536), short_bytes(16 << 20), short_bytes(0)
    ('1536 B', '16 MiB', '0')
    """
    return bytes_text(round(count)).replace(".0 ", " ") if count else "0"


def byte_ticks(most: float) -> list[float]:
    """At most six ticks from 0 to `most`, a power of two apart.

    >>> byte_ticks(6144)
    [0.0, 2048.0, 4096.0, 6144.0]
    """
    step = 2.0 ** max(0, math.ceil(math.log2(max(most, 1) / 5)))
    return [at * step for at in range(math.floor(most / step) + 1)]


def byte_axis(axis: Any, most: float) -> None:
    """Turns an axis into a scale of bytes up to about `most`."""
    axis.set_major_locator(FixedLocator(byte_ticks(most)))
    axis.set_major_formatter(FuncFormatter(_tick))


def _tick(value: float, position: object) -> str:
    return short_bytes(value)
