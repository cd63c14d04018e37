"""Seconds of a step against the memory that it may use, with what experts would take.

3.1 ms ┤ ░░░░│              · tensor parallel        A choice needs its own peak, and is the best
       │ ░░░░└────┐   · FSDP                         up to the budget at which another one fits:
1.0 ms ┤ ░░░░     └─────────────                     a stair. Left of it nothing fits.
       └─────┴────┴─────────────
         16 GiB  32 GiB  64 GiB
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from reshard.draw.scene import (
    FLOOR,
    INK,
    LINE,
    PROMISE,
    SMALL,
    Area,
    Lines,
    Mark,
    Point,
    Scene,
    Words,
    add_words,
    hatch_box,
    measure_words,
)
from reshard.errors import join_first
from reshard.types.units import bytes_text, seconds_text

_LEFT, _TOP, _WIDE, _HIGH, _EDGE = 70.0, 26.0, 460.0, 230.0, 24.0
_DOT = 4.0
_GAP = 0.01  # A choice that may be so much slower than the best is called the best.
_HIGHEST = 1.6  # What takes longer than this times the slowest choice is named at the upper edge.


def draw_trade_off(
    choices: Sequence[tuple[int, float]],
    others: Mapping[str, tuple[int, float]],
    budget: int | None = None,
    gap: float = 0.0,
) -> Scene:
    """A stair of the choices, each its bytes and seconds, a dot for each of the others, and a line at the budget.

    Title and caption are there already, since no page of a plan surrounds it; the caption says by how much a choice may
    exceed the best one, the `gap`.
    """
    best: list[tuple[int, float]] = []
    for size, seconds in sorted(choices):
        # With a gap, a choice with more memory may take longer than one with less; the stair leaves it out.
        if not best or seconds < best[-1][1]:
            best.append((size, seconds))
    # A step of scalars holds nothing, and takes no time by the model.
    sizes = [max(1, size) for size, _ in [*best, *others.values()]] + ([budget] if budget else [])
    slowest = max(seconds for _, seconds in best)
    top = 1.2 * max([slowest, *(seconds for _, seconds in others.values() if seconds <= _HIGHEST * slowest)]) or 1.0
    # A factor of two in memory is the same length everywhere; time starts at 0.
    first, last = math.log2(min(sizes) * 0.85), math.log2(max(sizes) * 1.6)
    right, bottom = _LEFT + _WIDE, _TOP + _HIGH

    def place(size: float, seconds: float) -> Point:
        across = (math.log2(max(1, size)) - first) / (last - first)
        return _LEFT + _WIDE * across, bottom - _HIGH * min(1.0, seconds / top)

    marks: list[Mark] = []
    wall = place(best[0][0], 0)[0]  # No choice needs less.
    marks += hatch_box(_LEFT, _TOP, wall, bottom)
    marks.append(Lines((((_LEFT, _TOP), (_LEFT, bottom)), ((_LEFT, bottom), (right, bottom)))))
    ticks: list[tuple[Point, Point]] = []
    # Steps of 1, 2 or 5 times a power of ten, such that there are three to six.
    step = 10 ** math.floor(math.log10(top / 2))
    step *= next(times for times in (1, 2, 5) if top / (step * times) <= 6)
    for at in range(int(top / step) + 1):
        y = bottom - _HIGH * at * step / top
        ticks.append(((_LEFT - 4, y), (_LEFT, y)))
        marks.append(Lines((((_LEFT, y), (right, y)),), INK, 0.6, 0.2))
        marks.append(Words(_LEFT - 8, y, seconds_text(at * step), anchor="end"))
    # Powers of two, or one tick if there is none in between.
    powers = range(math.ceil(first), math.floor(last) + 1)
    for power in [*powers] if powers else [round((first + last) / 2)]:
        x = place(2.0**power, 0)[0]
        ticks.append(((x, bottom), (x, bottom + 4)))
        marks.append(Words(x, bottom + 14, bytes_text(2**power)))
    marks.append(Lines(tuple(ticks)))
    marks.append(Words(right, bottom + 14 + LINE, "memory at the peak of a device", anchor="end", faint=True))
    corners = [(wall, _TOP), place(*best[0])]
    for (_, before), (size, seconds) in pairwise(best):
        corners += [place(size, before), place(size, seconds)]
    corners.append((right, corners[-1][1]))
    marks.append(Lines(tuple(pairwise(corners)), PROMISE, 2.2))
    marks += [_draw_dot(place(*point), PROMISE, f"{_say_point(*point)}, chosen") for point in best]
    if budget:
        x = place(budget, 0)[0]
        marks.append(Lines((((x, _TOP - 8), (x, bottom)),), FLOOR, 1.6, dashed=True))
        marks.append(Words(x, _TOP - 16, f"budget {bytes_text(budget)}"))
    # Others that are as good as the same have one name, so that all names have room.
    alike: dict[tuple[int, ...], list[str]] = {}
    for name, point in sorted(others.items(), key=lambda other: other[1][1]):
        alike.setdefault(tuple(round(at / _DOT) for at in place(*point)), []).append(name)
    # Names lie above the stair, beside their dots or further up.
    taken = [(a, y, b) for (a, y), (b, _) in pairwise(corners)]
    taken += [(x - 6, y, x + 6) for x, y in (place(*others[names[0]]) for names in alike.values())]
    for names in alike.values():
        size, seconds = others[names[0]]
        x, y = place(size, seconds)
        text = join_first(names, 1) + (f", {seconds_text(seconds)}" if seconds > top else "")
        wide = measure_words(text, SMALL)
        start, level = max(_LEFT + 4, x - 9 - wide if x + wide + 10 > right else x + 9), y
        while any(
            abs(level - other) < LINE - 1 and start < end and begin < start + wide for begin, other, end in taken
        ):
            level -= LINE / 2
        taken.append((start, level, start + wide))
        if level != y:
            marks.append(Lines((((x, y), (start - 1, level)),), INK, 0.8, 0.5))
        marks.append(_draw_dot((x, y), INK, f"{', '.join(names)}: {_say_point(size, seconds)}"))
        marks.append(Words(start, level, text, anchor="start"))
    said = "; ".join(_say_point(*point) for point in best)
    compared = "".join(f"; {name}: {_say_point(size, seconds)}" for name, (size, seconds) in others.items())
    found = "the best choice" + (" found" if gap > _GAP else "")
    found += f", at most {gap:.0%} slower than any" if _GAP < gap < math.inf else ""
    caption = (
        f"The stair is {found} that fits; nothing is known to fit on the hatched side. Dots are others, by the model."
    )
    scene = Scene(
        right + _EDGE, bottom + 28 + LINE, tuple(marks), "time of a step against memory", caption, said + compared
    )
    return add_words(scene)


def _say_point(size: int, seconds: float) -> str:
    return f"{seconds_text(seconds)} in {bytes_text(size)}"


def _draw_dot(middle: Point, fill: str, title: str) -> Area:
    x, y = middle
    corners = [(x + _DOT * math.cos(turn * math.pi / 4), y + _DOT * math.sin(turn * math.pi / 4)) for turn in range(8)]
    return Area((tuple(corners),), (fill,), title)
