"""A picture of the array before, between and after the steps, each element in its device's colour."""

from __future__ import annotations

import textwrap
from functools import cached_property

from reshard.draw.canvas import LARGE, NORMAL, SMALL, Area, Size, box, polygons, width_of, words_on
from reshard.draw.panel import SLICE_NAME, Panel
from reshard.draw.vector_tiles import scene
from reshard.plans.plan import Plan, Step
from reshard.types.units import bytes_text, counted

_PER_ROW = 3
_PANEL, _SHORTEST, _TALLEST = 2.1, 0.9, 2.9
_GAP, _LEFT, _BELOW = 1.5, 0.7, 0.5  # Between panels, before the first one, and below each for its ticks.
_STRIP, _STRIP_WIDTH, _STRIP_LEFT, _STRIP_BELOW, _STRIP_GAP = 0.42, 7.4, 0.2, 0.3, 0.5
_NAME, _LINE, _RAMP = 0.22, 0.165, 0.35
_MOST_SLICED = 3.6
_RAMP_WIDTH, _NUMBERED = 3.0, 16


class TilesPicture:
    """A panel for each layout, in rows, or strips one below the other; `put` draws them on an area of `size`.

    Raises `ReshardError` for too many devices or runs.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.scene = scene(plan)
        self.colour = self.scene.colour
        self.strips = len(self.scene.grid) < 2
        self.count = len(self.scene.panels)
        self.columns = 1 if self.strips else min(_PER_ROW, self.count)
        rows = -(-self.count // self.columns)
        self.size = Size(self._width, rows * self._pitch - (_STRIP_GAP if self.strips else 0) + self._foot)

    @cached_property
    def _width(self) -> float:
        if self.strips:
            return _STRIP_WIDTH + 2 * _STRIP_LEFT
        return max(self._left + self.columns * (_PANEL + _GAP) - _GAP + 0.5, 4.8)

    @cached_property
    def _left(self) -> float:
        """The room before the first panel of a row, which holds an arrow if there are several rows."""
        return _STRIP_LEFT if self.strips else _LEFT if self.count <= _PER_ROW else _GAP

    @cached_property
    def _pitch(self) -> float:
        """The distance from one row to the next."""
        return self._head + self._height + (_STRIP_BELOW + _STRIP_GAP if self.strips else _BELOW)

    @cached_property
    def _head(self) -> float:
        return _NAME + _LINE * max(title.count("\n") + 1 for title in self._titles) + 0.06

    @cached_property
    def _foot(self) -> float:
        return 0.15 + _LINE * (self._caption.count("\n") + 1) + (0 if self._labelled else _RAMP)

    @cached_property
    def _labelled(self) -> bool:
        """Whether the cells of all panels have room for the numbers of their devices."""
        return len(self.colour) == 1 or all(panel.legible for panel in self._panels)

    @cached_property
    def _panels(self) -> list[Panel]:
        size = Size(_STRIP_WIDTH if self.strips else _PANEL, self._height)
        return [Panel(self.scene, at, self.colour, size) for at in range(self.count)]

    @cached_property
    def _height(self) -> float:
        """The height of a panel without its title and ticks."""
        if self.strips:
            return _STRIP
        down, across = self.scene.grid
        extents = [(self.scene.extent(at, down), self.scene.extent(at, across)) for at in range(self.count)]
        ratio = sum(high / max(1, wide) for high, wide in extents) / self.count
        one = min(max(_PANEL * ratio, _SHORTEST), _TALLEST)
        slices = max(len(self.scene.slices_of(at)) for at in range(self.count))
        return one if slices <= 1 else max(1.2, min(slices * (one + SLICE_NAME), _MOST_SLICED))

    @cached_property
    def _titles(self) -> list[str]:
        most = _STRIP_WIDTH if self.strips else _PANEL + 0.9
        return [_wrapped(str(layout), most) for layout in self.scene.layouts]

    @cached_property
    def _caption(self) -> str:
        return _wrapped(" ".join(self.scene.notes()), self._width - 0.4)

    def put(self, area: Area) -> None:
        """Draws the panels, the colours by device if no cell is labelled, and the caption."""
        for at, panel in enumerate(self._panels):
            self._place(area, at, panel)
        top = area.height - self._foot + 0.1
        if not self._labelled:
            self._ramp(area.inside(0.2, top, area.width - 0.4, _RAMP))
            top += _RAMP
        area.text(0.2, top, self._caption, size=SMALL, alpha=0.75)

    def _place(self, area: Area, at: int, panel: Panel) -> None:
        """Draws a panel with its titles and the arrow that leads to it."""
        row, column = divmod(at, self.columns)
        left, top = self._left + column * (_PANEL + _GAP), row * self._pitch
        middle, aligned = (left, "left") if self.strips else (left + panel.size.width / 2, "center")
        area.text(middle, top, self.scene.names[at], size=LARGE, weight="bold", ha=aligned)
        area.text(middle, top + _NAME, self._titles[at], size=SMALL, ha=aligned)
        if at and self.strips:
            self._arrow_down(area, left, top - _STRIP_GAP, self.plan.steps[at - 1])
        elif at:
            self._arrow(area, left - _GAP, top + self._head + self._height / 2, self.plan.steps[at - 1])
        panel.draw(area.inside(left, top + self._head, *panel.size))

    def _arrow(self, area: Area, left: float, middle: float, step: Step) -> None:
        """Draws the arrow from the panel before, with the step's kind and the bytes that the worst device receives."""
        start, width = left + 0.08, _GAP - 0.62
        area.text(start + width / 2, middle - 0.09, step.kind, size=SMALL, ha="center", va="bottom", weight="bold")
        area.inside(start, middle - 0.1, width, 0.2).arrow((0, 0.1), (width, 0.1))
        area.text(start + width / 2, middle + 0.09, "\n".join(_received(step)), size=SMALL, ha="center")

    def _arrow_down(self, area: Area, left: float, top: float, step: Step) -> None:
        area.inside(left, top, 0.3, _STRIP_GAP - 0.08).arrow((0.12, 0.02), (0.12, _STRIP_GAP - 0.1))
        words = f"{step.kind}: {' '.join(_received(step))}"
        area.text(left + 0.32, top + _STRIP_GAP / 2 - 0.05, words, size=NORMAL, va="center")

    def _ramp(self, area: Area) -> None:
        """Draws the colours by device."""
        ids = self.scene.devices[:: -(-len(self.scene.devices) // 64)]
        axes = area.inside(0.85, 0.02, _RAMP_WIDTH, 0.16).axes()
        axes.set(xlim=(0, len(ids)), ylim=(0, 1))
        axes.set_axis_off()
        shades = [self.colour[device] for device in ids]
        polygons(axes, [box(at, 0, at + 1, 1) for at in range(len(ids))], shades, linewidths=0, antialiaseds=False)
        if len(ids) <= _NUMBERED:
            for at, device in enumerate(ids):
                words_on(axes, at + 0.5, 0.5, str(device), SMALL, [self.colour[device]])
        area.text(0.78, 0.1, f"device {self.scene.devices[0]}", size=SMALL, va="center", ha="right")
        area.text(0.92 + _RAMP_WIDTH, 0.1, f"device {self.scene.devices[-1]}", size=SMALL, va="center")


def _received(step: Step) -> list[str]:
    calls = [f"in {counted(step.launches, 'launch')}"] if step.launches > 1 else []
    return [f"{bytes_text(step.received_bytes)}", "received", *calls]


def _wrapped(words: str, inches: float) -> str:
    most = int(inches / width_of("x", SMALL))
    return "\n".join(textwrap.wrap(words, most, break_long_words=False, break_on_hyphens=False))
