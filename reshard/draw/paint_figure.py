"""Scenes as a matplotlib figure: the only module that knows matplotlib.

Figures do not use pyplot, and a notebook shows them by itself. Lines and words have the colours of matplotlib's current
style; fills are the same in light and dark.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import matplotlib
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from reshard.draw.scene import INK, Area, Lines, Scene, Words

_INCH = 96.0  # Pixels.
_POINT = 0.75  # Points of a pixel.
_RESOLUTION = 180  # Dots per inch of a notebook's PNG, which the notebook shows at half its size.
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


class Picture(Figure):
    """A figure that a notebook shows even without matplotlib's inline back end."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        into = io.BytesIO()
        cast(Any, self).savefig(into, format="png", dpi=_RESOLUTION)
        width, height = (round(float(inches) * _RESOLUTION / 2) for inches in cast(Any, self).get_size_inches())
        return into.getvalue(), {"width": width, "height": height}


class PlacedScene(NamedTuple):
    """A scene, the label of its axes, and where its upper left corner lies in the figure."""

    label: str
    scene: Scene
    left: float
    top: float


def paint_figure(placed: Sequence[PlacedScene], width: float, height: float) -> Any:
    """A new figure with each scene on axes of its own, in pixels."""
    style: Any = matplotlib.rcParams
    figure: Any = Picture(figsize=(width / _INCH, height / _INCH))
    figure.set_facecolor(style["figure.facecolor"])
    for label, scene, left, top in placed:
        place = left / width, 1 - (top + scene.height) / height, scene.width / width, scene.height / height
        axes = figure.add_axes(place, label=label)
        axes.set(xlim=(0, scene.width), ylim=(scene.top + scene.height, scene.top))
        axes.set_axis_off()
        _paint_marks(axes, scene, style["text.color"])
    return figure


def _paint_marks(axes: Any, scene: Scene, ink: str) -> None:
    areas: list[Area] = []
    for order, mark in enumerate(scene.marks):
        # Areas in a row are one collection: matplotlib takes a millisecond for an artist, and panels have thousands.
        if isinstance(mark, Area) and (not areas or areas[-1].opacity == mark.opacity):
            areas.append(mark)
            continue
        _paint_areas(axes, areas, ink, order)
        areas = []
        match mark:
            case Area():
                areas = [mark]
            case Lines():
                style = {"colors": ink if mark.colour == INK else mark.colour, "alpha": mark.opacity, "zorder": order}
                dashes = "dashed" if mark.dashed else "solid"
                lines = cast(Any, LineCollection)(
                    mark.segments, linewidths=mark.width * _POINT, linestyles=dashes, **style
                )
                axes.add_collection(lines, autolim=False)
            case Words():
                _paint_words(axes, mark, ink, order)
    _paint_areas(axes, areas, ink, len(scene.marks))


def _paint_areas(axes: Any, areas: Sequence[Area], ink: str, order: int) -> None:
    if not areas:
        return
    outlines = [outline for area in areas for outline in area.outlines]
    fills = [ink if fill == INK else fill for area in areas for fill in area.fills]
    # Smoothed edges would leave a faint seam between neighbouring boxes; stripes are slanted and need them.
    smooth = len(outlines) > len(areas)
    collection: Any = PolyCollection
    style = {"alpha": areas[0].opacity, "zorder": order}
    axes.add_collection(collection(outlines, facecolors=fills, linewidths=0, antialiaseds=smooth, **style), False)
    if any(area.rim for area in areas):
        rims = [area.bounds for area in areas if area.rim]
        style = {"facecolors": "none", "edgecolors": "#ffffff", "alpha": 0.75, "linewidths": _POINT, "zorder": order}
        axes.add_collection(collection(rims, **style), False)


def _paint_words(axes: Any, words: Words, ink: str, order: int) -> None:
    middle = 0.35 * words.size  # From the base line of words to their middle, as in SVG.
    x, y = (words.x + middle, words.y) if words.turned else (words.x, words.y + middle)
    style: dict[str, Any] = {"color": ink if words.colour == INK else words.colour, "zorder": order}
    style |= {"fontweight": "bold"} if words.bold else {}
    style |= {"family": "monospace"} if words.mono else {}
    style |= {"alpha": 0.75} if words.faint else {}
    style |= {"path_effects": [withStroke(linewidth=2.0, foreground="#ffffff")]} if words.halo else {}
    anchor = {"ha": _ANCHORS[words.anchor], "va": "baseline"}
    if words.turned:
        anchor = {"rotation": 90, "rotation_mode": "anchor", **anchor}
    text = words.text.replace("$", r"\$")  # Two dollars would be a formula.
    axes.text(x, y, text, fontsize=words.size * _POINT, **anchor, **style)
