"""What pictures are drawn on: areas of a matplotlib figure, in inches from the top left.

No other module knows matplotlib. Figures do not use pyplot, and a notebook shows them by itself. Lines and text have
the colours of matplotlib's current style. Fills are the same in light and dark: those of `shapes` for devices,
viridis for amounts.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import matplotlib
from matplotlib.collections import PolyCollection
from matplotlib.colors import ListedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter

from reshard.draw.shapes import FLOOR as FLOOR
from reshard.draw.shapes import PALE as PALE
from reshard.draw.shapes import PART as PART
from reshard.draw.shapes import PROMISE as PROMISE
from reshard.draw.shapes import Point as Point
from reshard.draw.shapes import box as box
from reshard.draw.shapes import on as on
from reshard.draw.shapes import stripes as stripes
from reshard.types.units import bytes_text

LEGIBLE, SMALL, NORMAL, LARGE = 5.5, 7.5, 9.0, 10.5
"""Sizes of text, in points; smaller text than LEGIBLE is left out."""

_CHARACTER = 0.0086  # The average width in inches of a character of one point.
_RESOLUTION = 180  # Dots per inch of a notebook's PNG, which the notebook shows at half its size.


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


def blank(size: Size) -> Area:
    """A new figure of this size, as an area."""
    figure = Picture(figsize=size)
    ink = Ink.of_style()
    cast(Any, figure).set_facecolor(ink.back)
    return Area(figure, ink, 0, 0, *size)


# ---- colours ---------------------------------------------------------------------------------------


def _shade(share: float) -> str:
    """Viridis without its darkest end, which is invisible on a dark page."""
    return to_hex(cast(Any, matplotlib.colormaps["viridis"])(0.12 + 0.88 * share))


def shades() -> Any:
    """A colour map for amounts; masked values stay blank."""
    return cast(Any, ListedColormap)([_shade(at / 255) for at in range(256)]).with_extremes(bad="none")


# ---- drawing ---------------------------------------------------------------------------------------


def polygons(axes: Any, corners: Sequence[Sequence[Point]], fills: Sequence[str], **style: Any) -> None:
    """Draws polygons in the coordinates of the axes; `style` as for matplotlib's `PolyCollection`."""
    axes.add_collection(cast(Any, PolyCollection)(corners, facecolors=fills, **style))


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
