"""The matrix of bytes that each device sends to each other one, over all steps of a plan."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.draw import canvas
from reshard.draw.canvas import LARGE, LEGIBLE, SMALL, Area, Size, byte_ticks, short_bytes, width_of
from reshard.errors import ReshardError
from reshard.lower import lower
from reshard.lower.traffic import TrafficMatrix, traffic
from reshard.types.plan import Plan
from reshard.types.units import bytes_text

MOST_CELLS = 256  # Rows and columns: more devices share one.
MOST_DEVICES = 512
MOST_TRANSFERS = 1 << 18

_SIDE, _HEAD, _LEFT, _RIGHT, _FOOT = 2.6, 0.62, 0.75, 1.35, 0.62
_RULED = 32  # Rows with lines between them.
_WIDTH = _LEFT + _SIDE + _RIGHT


class Traffic:
    """The picture; `put` draws it on an area of its `size`."""

    size = Size(_WIDTH, _HEAD + _SIDE + _FOOT)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.traffic = traffic_of(plan)
        self.devices = sorted(self.traffic.devices)
        self.together = together(len(self.devices))

    def put(self, area: Area) -> None:
        """Draws it."""
        area.text(0.15, 0.0, "bytes from device to device", size=LARGE, weight="bold")
        cells = matrix(self.traffic, self.devices, self.together)
        self._matrix(area.inside(_LEFT, _HEAD, _SIDE, _SIDE), cells)
        if cells.any():
            self._bar(area.inside(_LEFT + _SIDE + 0.15, _HEAD, 0.14, _SIDE), float(cells.max()))
        area.text(0.15, _HEAD + _SIDE + 0.16, self._words(), size=SMALL)

    def _matrix(self, area: Area, cells: NDArray[np.float64]) -> None:
        axes = area.axes()
        rows = len(cells)
        how = {"cmap": canvas.shades(), "vmin": 0, "vmax": max(1.0, float(cells.max())), "interpolation": "nearest"}
        axes.imshow(np.ma.masked_equal(cells, 0), extent=(0, rows, rows, 0), aspect="auto", **how)
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
        """The bytes in the cells, if they fit into all of them: in one line, or the unit below the number."""
        counts = [float(count) for count in np.unique(cells) if count]
        for gap in (" ", "\n"):
            words = {count: short_bytes(count).replace(" ", gap) for count in counts}
            size = min([SMALL, 0.4 * side * 72, *(0.92 * side / width_of(word, 1) for word in words.values())])
            if size >= LEGIBLE:
                break
        else:
            return
        shade, most = canvas.shades(), float(cells.max())
        fills = {count: canvas.to_hex(shade(count / most)) for count in words}
        for (row, column), count in np.ndenumerate(cells):
            if count:
                canvas.words_on(axes, column + 0.5, row + 0.5, words[float(count)], size, [fills[float(count)]])

    def _bar(self, area: Area, most: float) -> None:
        """What the colours mean."""
        axes = area.axes()
        axes.imshow(np.linspace(1, 0, 256)[:, None], extent=(0, 1, 0, most), aspect="auto", cmap=canvas.shades())
        axes.set(xticks=[])
        axes.yaxis.tick_right()
        ticks = [tick for tick in byte_ticks(most) if tick <= 0.9 * most]
        axes.set_yticks([*ticks, most], [short_bytes(tick) for tick in (*ticks, most)])
        for spine in axes.spines.values():
            spine.set_visible(False)

    def _words(self) -> str:
        """The sums, and what the plan promised."""
        received = self.traffic.received
        if not self.traffic.elements:
            return "nothing moves"
        worst = self.traffic.busiest_receiver
        lines = [f"worst device: {worst} receives {bytes_text(received[worst])}{self._promised(received[worst])}"]
        lines.append(f"all devices together: {bytes_text(self.traffic.nbytes(sum(self.traffic.elements.values())))}")
        if self.together > 1:
            lines.append(f"each cell: {self.together} x {self.together} devices, their sum")
        return "\n".join(lines)

    def _promised(self, worst: int) -> str:
        promised = self.plan.received_bytes
        return ", as planned" if worst == promised else f" of the {bytes_text(promised)} planned"


def traffic_of(plan: Plan) -> TrafficMatrix:
    """Who sends how much to whom in all steps of a plan together.

    Raises `ReshardError` for more devices or transfers than can be counted one by one.
    """
    size = plan.source.mesh.size
    if size > MOST_DEVICES:
        raise ReshardError(
            f"{size} devices on mesh {plan.source.mesh} are too many for a matrix of who sends to whom (at most "
            f"{MOST_DEVICES}); draw the same plan on smaller axes, or use draw('memory')"
        )
    if size * plan.launches > MOST_TRANSFERS:
        raise ReshardError(
            f"{plan.launches} launches on {size} devices are too many to count one by one (at most "
            f"{MOST_TRANSFERS // size} on so many devices); plan with a larger budget, or use draw('memory')"
        )
    return traffic(lower(plan))


def matrix(traffic: TrafficMatrix, devices: list[int], together: int) -> NDArray[np.float64]:
    """Bytes by sender (down) and receiver (across), so many devices in one row."""
    place = {device: at // together for at, device in enumerate(devices)}
    cells = np.zeros((len(devices) // together,) * 2)
    for (sender, receiver), count in traffic.elements.items():
        cells[place[sender], place[receiver]] += traffic.nbytes(count)
    return cells


def together(devices: int) -> int:
    """How many devices share a row, so that there are not too many rows.

    >>> together(256), together(512), together(2 * 257)
    (1, 2, 257)
    """
    return next(size for size in range(1, devices + 1) if devices % size == 0 and devices // size <= MOST_CELLS)
