"""What is live on a device, moment by moment, as bars, with the peak and the floor.

                floor 4 KiB      peak 6 KiB
before          ┌──────────┐       :        :      2 KiB      Each bar is stacked by what the bytes are.
1 all_to_all    ├──────────┬───────┼────────┤      6 KiB
after           ├──────────┬───────┤        :      4 KiB
"""

from __future__ import annotations

from reshard.draw.scene import (
    FLOOR,
    INK,
    PART,
    PROMISE,
    SMALL,
    Lines,
    Mark,
    Scene,
    Words,
    box_area,
    ink_on,
    measure_words,
)
from reshard.show.plan_table import Timeline
from reshard.types.units import bytes_text

_WIDE, _NARROW = 460.0, 170.0  # The length of the longest bar, and that on a narrow screen.
_BAR, _PITCH, _EDGE = 22.0, 30.0, 12.0
_NAME = 14.0  # The height of the name of a line above the bars.


def draw_memory(timeline: Timeline, budget: int | None = None, narrow: bool = False) -> Scene:
    """A bar for each moment of a plan of one or many arrays, and lines at the peak, the floor and the budget.

    >>> from reshard.show.plan_table import Moment
    >>> scene = draw_memory(Timeline((Moment("before", (("source", 16),)),), 16, 16))
    >>> [mark.text for mark in scene.marks if isinstance(mark, Words)]
    ['peak = floor 16 B', 'before', 'source 16 B', '16 B']
    """
    peak, floor = timeline.peak_bytes, timeline.floor_bytes
    limits = [("peak = floor" if peak == floor else "peak", peak, PROMISE, False)]
    limits += [] if peak == floor else [("floor", floor, FLOOR, True)]
    limits += [] if budget is None else [("budget", budget, INK, False)]
    longest = _NARROW if narrow else _WIDE
    limits.sort(key=lambda limit: -limit[1])  # The name of a line lies left of it, above the lines that it would cross.
    scale = longest / max(*(size for _, size, _, _ in limits), 1)
    left = _EDGE + 8 + max(measure_words(moment.name, SMALL) for moment in timeline.moments)
    top = _NAME * len(limits) + 8
    bottom = top + _PITCH * len(timeline.moments) - (_PITCH - _BAR)
    bars: list[Mark] = []
    words: list[Mark] = []
    named = True
    for at, moment in enumerate(timeline.moments):
        low, start = top + _PITCH * at, left
        words.append(Words(left - 8, low + _BAR / 2, moment.name, anchor="end"))
        for name, size in moment.parts:
            wide, text = size * scale, bytes_text(size)
            if size:
                bars.append(box_area(start, low, start + wide, low + _BAR, PART[name], f"{moment.name}: {name} {text}"))
            shown = next((each for each in (f"{name} {text}", name) if measure_words(each, SMALL) <= wide - 6), "")
            if size and shown:
                words.append(Words(start + wide / 2, low + _BAR / 2, shown, colour=ink_on(PART[name])))
            named = named and bool(shown or not size)
            start += wide
        words.append(Words(left + longest + 10, low + _BAR / 2, bytes_text(moment.live_bytes), anchor="start"))
    lines: list[Mark] = []
    for row, (name, size, colour, dashed) in enumerate(limits):
        x, y = left + size * scale, 4 + _NAME * row
        anchor = "end" if x > left + longest / 2 else "start"
        lines.append(Words(x - 5 if anchor == "end" else x + 5, y + 5, f"{name} {bytes_text(size)}", anchor=anchor))
        lines.append(Lines((((x, y), (x, bottom + 4)),), colour, 1.6, dashed=dashed))
    if not named:  # A key of the colours, for parts that are too small for their names.
        bottom, x = bottom + 20, left
        for name in dict.fromkeys(name for moment in timeline.moments for name, size in moment.parts if size):
            words += [
                box_area(x, bottom - 6, x + 12, bottom + 6, PART[name]),
                Words(x + 18, bottom, name, anchor="start"),
            ]
            x += 34 + measure_words(name, SMALL)
    spoken = "live bytes on a device: " + ", ".join(
        f"{moment.name} {bytes_text(moment.live_bytes)}" for moment in timeline.moments
    )
    marks = (*bars, *lines, *words)
    right = left + longest + 18 + max(measure_words(bytes_text(each.live_bytes), SMALL) for each in timeline.moments)
    return Scene(right, bottom + 14, marks, "live bytes on a device", spoken=spoken)
