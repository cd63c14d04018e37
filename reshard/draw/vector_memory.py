"""The live bytes of a plan as bars of HTML, without matplotlib: a bar for each moment, and a mark at the floor."""

from __future__ import annotations

from html import escape

from reshard.draw.shapes import PART
from reshard.show.live_bytes import Moment, moments
from reshard.types.plan import Plan
from reshard.types.units import bytes_text


def memory_bars(plan: Plan, budget: int | None = None) -> str:
    """A row for each moment of a plan: its name, a bar of what is live, and the bytes; then a key.

    The end of the scale is the budget, where there is one, else the peak; a mark in each bar is the floor.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=4)
    >>> bars = memory_bars(plan(Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh)))
    >>> bars.count("<svg"), "80 B" in bars
    (3, True)
    """
    rows, scale = moments(plan), max(plan.peak_bytes, budget or 0, 1)
    lines = "".join(
        f"<span>{escape(moment.name)}</span>{_bar(moment, scale, plan.floor_bytes)}"
        f'<span class="end">{bytes_text(moment.live_bytes)}</span>'
        for moment in rows
    )
    names = dict.fromkeys(name for moment in rows for name, size in moment.parts if size)
    key = "".join(f'<span><i style="background:{PART[name]}"></i>{escape(name)}</span>' for name in names)
    end = f"the budget, {bytes_text(budget)}" if budget else f"the peak, {bytes_text(scale)}"
    return (
        f'<div class="bars">{lines}</div><p class="key">{key}'
        f"<span>a bar ends at {end}; the line is the floor, {bytes_text(plan.floor_bytes)}</span></p>"
    )


def _bar(moment: Moment, scale: int, floor: int) -> str:
    parts: list[str] = []
    start = 0.0
    for name, size in moment.parts:
        wide = 100 * size / scale
        parts.append(f'<rect x="{start:.3f}" width="{wide:.3f}" height="1" fill="{PART[name]}"/>')
        start += wide
    mark = f'<rect x="{min(99.4, 100 * floor / scale):.3f}" width=".6" height="1" style="fill:var(--text)"/>'
    return f'<svg viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">{"".join(parts)}{mark}</svg>'
