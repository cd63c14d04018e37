"""A picture of the bytes that each device sends to each other one, over all steps of a plan."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.draw import canvas
from reshard.draw.canvas import LARGE, LEGIBLE, SMALL, Area, Size, byte_ticks, short_bytes, width_of
from reshard.errors import ReshardError
from reshard.lower import lower_plan
from reshard.lower.traffic import TrafficMatrix, traffic
from reshard.show.headings import meshes_text
from reshard.types.plan import Plan
from reshard.types.units import bytes_text

MOST_CELLS = 256  # Rows and columns; more devices share them.
MOST_DEVICES = 512
MOST_TRANSFERS = 1 << 18

_SIDE, _HEAD, _LEFT, _RIGHT, _FOOT = 2.6, 0.62, 0.75, 1.35, 0.62
_RULED = 32  # The most rows that have lines between them.
_WIDTH = _LEFT + _SIDE + _RIGHT


class TrafficPicture:
    """A matrix of senders and receivers; `put` draws it on an area of `size`."""

    size = Size(_WIDTH, _HEAD + _SIDE + _FOOT)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.traffic = traffic_of(plan)
        self.devices = sorted(self.traffic.devices)
        self.together = together(len(self.devices))

    def put(self, area: Area) -> None:
        """Draws the matrix, a scale of its colours, and the sums."""
        area.text(0.15, 0.0, "bytes from device to device", size=LARGE, weight="bold")
        cells = matrix(self.traffic, self.devices, self.together)
        self._matrix(area.inside(_LEFT, _HEAD, _SIDE, _SIDE), cells)
        if cells.any():
            self._bar(area.inside(_LEFT + _SIDE + 0.15, _HEAD, 0.14, _SIDE), float(cells.max()))
        area.text(0.15, _HEAD + _SIDE + 0.16, self._words(), size=SMALL)

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
        names = [str(self.devices[at * self.together]) for at in shown]
        axes.set_xticks([at + 0.5 for at in shown], names)
        axes.set_yticks([at + 0.5 for at in shown], names)
        axes.xaxis.tick_top()
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

    def _words(self) -> str:
        """The sums, beside what the plan predicts."""
        received = self.traffic.received
        if not self.traffic.elements:
            return "nothing moves"
        worst = self.traffic.busiest_receiver
        lines = [f"worst device: {worst} receives {bytes_text(received[worst])}{self._predicted(received[worst])}"]
        lines.append(f"all devices together: {bytes_text(self.traffic.nbytes(sum(self.traffic.elements.values())))}")
        if self.together > 1:
            lines.append(f"each cell: {self.together} x {self.together} devices, their sum")
        return "\n".join(lines)

    def _predicted(self, worst: int) -> str:
        planned = self.plan.received_bytes
        return ", as planned" if worst == planned else f" of the {bytes_text(planned)} planned"


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


def traffic_of(plan: Plan) -> TrafficMatrix:
    """The traffic of all steps of a plan together.

    Raises `ReshardError` for more devices or transfers than can be counted one by one.
    """
    size = plan.source.mesh.size + (plan.target.mesh.size if plan.crosses else 0)
    if size > MOST_DEVICES:
        raise ReshardError(
            f"{size} devices on mesh {meshes_text(plan.source, plan.target)} are too many for a matrix of who sends to "
            f"whom (at most {MOST_DEVICES}); draw the same plan on smaller axes, or use draw('memory')"
        )
    if size * plan.launches > MOST_TRANSFERS:
        raise ReshardError(
            f"{plan.launches} launches on {size} devices are too many to count one by one (at most "
            f"{MOST_TRANSFERS // size} on so many devices); plan with a larger budget, or use draw('memory')"
        )
    return traffic(lower_plan(plan))


def matrix(traffic: TrafficMatrix, devices: list[int], together: int) -> NDArray[np.float64]:
    """Bytes by sender (down) and receiver (across); `together` neighbouring devices share a row or column."""
    place = {device: at // together for at, device in enumerate(devices)}
    cells = np.zeros((len(devices) // together,) * 2)
    for (sender, receiver), count in traffic.elements.items():
        cells[place[sender], place[receiver]] += traffic.nbytes(count)
    return cells


def together(devices: int) -> int:
    """The smallest number of devices that have to share a row, so that there are at most `MOST_CELLS` rows.

    >>> together(256), together(512), together(2 * 257)
    (1, 2, 257)
    """
    return next(size for size in range(1, devices + 1) if devices % size == 0 and devices // size <= MOST_CELLS)
