"""A picture of the live bytes on a device, moment by moment, stacked by what they are, with the peak and the floor."""

from __future__ import annotations

import textwrap
from typing import Any

from reshard.draw.canvas import (
    FLOOR,
    LARGE,
    PART,
    PROMISE,
    SMALL,
    Area,
    Ink,
    Size,
    box,
    byte_axis,
    outline,
    polygons,
    width_of,
    words_on,
)
from reshard.show.plan_table import Timeline
from reshard.types.units import bytes_text

_HEIGHT, _HEAD, _FOOT, _KEY, _LEFT, _RIGHT = 2.6, 0.35, 0.5, 0.25, 0.8, 1.2
_SLOT, _NARROWEST, _WIDEST = 1.05, 3.2, 9.0
_BAR = 0.74  # The share of a slot that its bar takes.
_LINE = SMALL * 1.3 / 72  # The height in inches of a line of small text.


class MemoryPicture:
    """A stacked bar for each moment of a plan or a tree; `put` draws them on an area of `size`."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.moments = timeline.moments
        self.scale = 1.2 * max(timeline.peak_bytes, 1)
        self.width = max(_NARROWEST, min(_SLOT * len(self.moments), _WIDEST))
        self.words = [[self._words(name, size) for name, size in moment.parts] for moment in self.moments]
        self.named = all(
            words or not size
            for moment, column in zip(self.moments, self.words, strict=True)
            for (_, size), words in zip(moment.parts, column, strict=True)
        )
        self.size = Size(_LEFT + self.width + _RIGHT, _HEAD + _HEIGHT + _FOOT + (0 if self.named else _KEY))

    def _words(self, name: str, size: int) -> str:
        """The label of a part of a bar."""
        width = self.width * _BAR / len(self.moments)
        return _fitting(name, bytes_text(size), width, _HEIGHT * size / self.scale)

    def put(self, area: Area) -> None:
        """Draws the bars on an area of their size."""
        area.text(0.15, 0.0, "live bytes on a device", size=LARGE, weight="bold")
        axes = area.inside(_LEFT, _HEAD, self.width, _HEIGHT).axes()
        axes.set(xlim=(-0.5, len(self.moments) - 0.5), ylim=(0, self.scale), label="memory")
        byte_axis(axes.yaxis, self.scale)
        names = [moment.name.replace(" ", "\n") for moment in self.moments]
        axes.set_xticks(range(len(names)), names)
        axes.tick_params(axis="x", length=0)
        self._lines(axes, area.ink)
        for at in range(len(self.moments)):
            self._bar(axes, area.ink, at)
        if not self.named:
            self._key(area.inside(0.15, self.size.height - _KEY, self.size.width - 0.15, _KEY))

    def _lines(self, axes: Any, ink: Ink) -> None:
        """Draws the peak and the floor as lines behind the bars, with their names at the right."""
        end = len(self.moments) - 0.5
        peak, floor = self.timeline.peak_bytes, self.timeline.floor_bytes
        same = peak == floor
        lines = [(peak, PROMISE, "-", "peak = floor" if same else "peak", "center" if same else "bottom")]
        lines += [] if same else [(floor, FLOOR, "--", "floor", "top")]
        for count, colour, style, name, aligned in lines:
            axes.axhline(count, color=colour, linestyle=style, linewidth=1.3, zorder=1)
            axes.text(end, count, f" {name}\n {bytes_text(count)}", fontsize=SMALL, color=ink.text, va=aligned)

    def _bar(self, axes: Any, ink: Ink, at: int) -> None:
        """Draws the bar of one moment."""
        left, right, start = at - _BAR / 2, at + _BAR / 2, 0
        for (name, size), words in zip(self.moments[at].parts, self.words[at], strict=True):
            if size:
                polygons(axes, [box(left, start, right, start + size)], [PART[name]], linewidths=0, zorder=2)
                words_on(axes, at, start + size / 2, words, SMALL, [PART[name]])
            start += size
        polygons(axes, [box(left, 0, right, start)], ["none"], edgecolors=ink.back, linewidths=0.8, zorder=2)
        style = {"fontsize": SMALL, "color": ink.text, "ha": "center", "textcoords": "offset points"}
        axes.annotate(bytes_text(start), (at, start), (0, 3), path_effects=outline(ink.back), **style)

    def _key(self, area: Area) -> None:
        """Draws a key of the colours, for parts too small for their names."""
        shown = dict.fromkeys(name for moment in self.moments for name, size in moment.parts if size)
        at = 0.0
        for name in shown:
            axes = area.inside(at, 0.05, 0.14, 0.12).axes()
            axes.set_axis_off()
            axes.set(xlim=(0, 1), ylim=(0, 1))
            polygons(axes, [box(0, 0, 1, 1)], [PART[name]], linewidths=0)
            area.text(at + 0.2, 0.11, name, size=SMALL, va="center")
            at += 0.45 + width_of(name, SMALL)


def _fitting(name: str, size: str, width: float, height: float) -> str:
    """A part's name and bytes if they fit into a box, else its name alone, or ""."""
    lines = textwrap.fill(name, max(1, int(width / width_of("x", SMALL))), break_long_words=False)
    for words in (f"{lines}\n{size}", lines):
        if width_of(words, SMALL) <= width and (words.count("\n") + 1) * _LINE <= height:
            return words
    return ""
