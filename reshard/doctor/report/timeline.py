"""A picture of the bytes live on a device while a program runs, instruction by instruction, as inline SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard.doctor.memory import InstructionMemory
from reshard.types.units import bytes_text

STYLE = """
.timeline { display: block; width: 100%; height: 9rem; background: var(--track); border-radius: 3px; }
.ends { display: flex; justify-content: space-between; color: var(--faint); font-size: .78rem; }
.timeline .live { fill: var(--mark); opacity: .55; } .timeline .moves { fill: var(--bad); }
"""
_POINTS = 300  # bars that a page has room for


def timeline(moments: Sequence[InstructionMemory]) -> str:
    """An area for the bytes live at each instruction, on a scale up to the peak; red where a move makes data.

    >>> timeline([InstructionMemory("p", 64, False), InstructionMemory("g", 320, True)]).count("<rect")
    2
    """
    bars = list(_bars(moments))
    peak = max((bar.live_bytes for bar in bars), default=0)
    if not peak:
        return ""
    rects = (
        f'<rect class="{"moves" if bar.moves else "live"}" x="{at}" y="{100 - 100 * bar.live_bytes / peak:.2f}" '
        f'width="1.02" height="{100 * bar.live_bytes / peak:.2f}"><title>{bytes_text(bar.live_bytes)}</title></rect>'
        for at, bar in enumerate(bars)
    )
    return (
        f'<svg class="timeline" viewBox="0 0 {len(bars)} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="live bytes, at most {bytes_text(peak)}">{"".join(rects)}</svg>'
        f'<div class="ends"><span>start</span><span>top: {bytes_text(peak)}</span><span>end</span></div>'
    )


def _bars(moments: Sequence[InstructionMemory]) -> Iterator[InstructionMemory]:
    """At most `_POINTS` bars: neighbouring moments share one, which shows the highest of them."""
    each = -(-len(moments) // _POINTS) or 1
    for start in range(0, len(moments), each):
        group = moments[start : start + each]
        most = max(group, key=lambda moment: moment.live_bytes)
        yield most._replace(moves=any(moment.moves for moment in group))
