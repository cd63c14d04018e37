"""A picture of the bytes that each device sends to each other one, over all steps of a plan."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.draw import canvas
from reshard.draw.canvas import LARGE, LEGIBLE, SMALL, Area, Size, box, byte_ticks, polygons, short_bytes, width_of
from reshard.draw.shapes import colours
from reshard.draw.vector_traffic import TrafficCells
from reshard.plans.plan import Plan

MOST_CELLS = 256  # Rows and columns; more devices share them.
_SIDE, _HEAD, _LEFT, _RIGHT, _FOOT = 2.6, 0.62, 0.75, 1.35, 0.62
_EDGE, _STRIP = 0.1, 0.08  # From a strip of colours to the matrix, and across it.
_RULED = 32  # The most rows that have lines between them.
_WIDTH = _LEFT + _SIDE + _RIGHT


class TrafficPicture:
    """A matrix of senders and receivers; `put` draws it on an area of `size`."""

    size = Size(_WIDTH, _HEAD + _SIDE + _FOOT)

    def __init__(self, plan: Plan) -> None:
        self.shown = TrafficCells(plan, MOST_CELLS)
        self.rows = np.array(self.shown.rows, dtype=float)
        self.colour = colours([plan.source.mesh, *(step.result.mesh for step in plan.steps)])

    def put(self, area: Area) -> None:
        """Draws the matrix, a scale of its colours, and the sums."""
        area.text(0.15, 0.0, "bytes from device to device", size=LARGE, weight="bold")
        self._matrix(area.inside(_LEFT, _HEAD, _SIDE, _SIDE), self.rows)
        self._strip(area.inside(_LEFT, _HEAD - _EDGE, _SIDE, _STRIP), True)
        self._strip(area.inside(_LEFT - _EDGE, _HEAD, _STRIP, _SIDE), False)
        if self.rows.any():
            self._bar(area.inside(_LEFT + _SIDE + 0.15, _HEAD, 0.14, _SIDE), float(self.rows.max()))
        area.text(0.15, _HEAD + _SIDE + 0.16, "\n".join(self.shown.notes), size=SMALL)

    def _strip(self, area: Area, across: bool) -> None:
        """Draws the colours of the devices along an edge of the matrix: those that they have as tiles."""
        axes = area.axes()
        axes.set_axis_off()
        ends, fills = range(len(self.shown.groups)), [self.colour[group[0]] for group in self.shown.groups]
        axes.set(xlim=(0, len(ends) if across else 1), ylim=(1, 0) if across else (len(ends), 0))
        boxes = [box(at, 0, at + 1, 1) if across else box(0, at, 1, at + 1) for at in ends]
        polygons(axes, boxes, fills, linewidths=0, antialiaseds=False)

    def _matrix(self, area: Area, cells: NDArray[np.float64]) -> None:
        axes = area.axes()
        rows = len(cells)
        scale = {"cmap": canvas.shades(), "vmin": 0, "vmax": max(1.0, float(cells.max())), "interpolation": "nearest"}
        axes.imshow(np.ma.masked_equal(cells, 0), extent=(0, rows, rows, 0), aspect="auto", **scale)
        axes.set_label("traffic")
        for spine in axes.spines.values():
            spine.set_visible(True)
        for at in range(1, rows if rows <= _RULED else 0):
            axes.axhline(at, color=area.ink.back, linewidth=0.8)
            axes.axvline(at, color=area.ink.back, linewidth=0.8)
        every = -(-rows // 8)
        shown = list(range(0, rows, every))
        names = [str(self.shown.groups[at][0]) for at in shown]
        axes.set_xticks([at + 0.5 for at in shown], names)
        axes.set_yticks([at + 0.5 for at in shown], names)
        axes.xaxis.tick_top()
        axes.tick_params(length=0, pad=2 + _EDGE * 72)
        axes.xaxis.set_label_position("top")
        style = {"fontsize": SMALL, "labelpad": 3, "color": area.ink.text}
        axes.set_xlabel("receiver", **style)
        axes.set_ylabel("sender", **style)
        self._numbers(axes, cells, area.width / rows)

    def _numbers(self, axes: Any, cells: NDArray[np.float64], side: float) -> None:
        """Writes the bytes into the cells, if they fit into all of them."""
        fitting = _fitting_words([float(count) for count in np.unique(cells) if count], side)
        if fitting is None:
            return
        words, size = fitting
        shade, most = canvas.shades(), float(cells.max())
        for (row, column), count in np.ndenumerate(cells):
            if count:
                fill = canvas.to_hex(shade(float(count) / most))
                canvas.words_on(axes, column + 0.5, row + 0.5, words[float(count)], size, [fill])

    def _bar(self, area: Area, most: float) -> None:
        """Draws the scale of the colours."""
        axes = area.axes()
        axes.imshow(np.linspace(1, 0, 256)[:, None], extent=(0, 1, 0, most), aspect="auto", cmap=canvas.shades())
        axes.set(xticks=[])
        axes.yaxis.tick_right()
        ticks = [tick for tick in byte_ticks(most) if tick <= 0.9 * most]
        axes.set_yticks([*ticks, most], [short_bytes(tick) for tick in (*ticks, most)])
        for spine in axes.spines.values():
            spine.set_visible(False)


def _fitting_words(counts: list[float], side: float) -> tuple[dict[float, str], float] | None:
    """The counts as text and the size of that text, in points, if it fits into cells this many inches wide.

    Text that is too wide on one line may fit with the unit below the number.
    """
    for gap in (" ", "\n"):
        words = {count: short_bytes(count).replace(" ", gap) for count in counts}
        size = min([SMALL, 0.4 * side * 72, *(0.92 * side / width_of(word, 1) for word in words.values())])
        if size >= LEGIBLE:
            return words, size
    return None
