"""A scene as SVG: one element, which a page contains or a file is made of. The standard library is enough."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from reshard.draw.scene import INK, Area, Lines, Mark, Point, Scene, Words

STANDALONE = """
svg{color:#1c1e21;background:#fff}
@media (prefers-color-scheme:dark){svg{color:#e6e8ea;background:#1d2024}}
"""
"""A style for a picture in a file of its own, legible in light and dark: the words and cards of `show/html.py`."""

_MONO = "ui-monospace,Menlo,Consolas,monospace"


def paint_svg(scene: Scene, style: str = "") -> str:
    """The scene as one `svg` element; `style` is CSS to put into it.

    >>> print(paint_svg(Scene(20, 10, (Words(10, 5, "0", 10),)))[-100:])
    <g pointer-events="none"><text x="10" y="8.5" font-size="10" text-anchor="middle">0</text></g></svg>
    """
    width, height = _number(scene.width), _number(scene.height)
    parts: list[str] = []
    for are_words, marks in groupby(scene.marks, lambda mark: isinstance(mark, Words)):
        elements = "".join(map(_element, marks))
        # Words let the pointer through, so that the area under them shows its title.
        parts.append(f'<g pointer-events="none">{elements}</g>' if are_words else elements)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {_number(scene.top)} {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="system-ui,sans-serif" fill="currentColor" '
        f'aria-label="{escape(scene.spoken)}">{f"<style>{style}</style>" if style else ""}{"".join(parts)}</svg>'
    )


def _element(mark: Mark) -> str:
    match mark:
        case Area():
            title = f"<title>{escape(mark.title)}</title>" if mark.title else ""
            clear = f' fill-opacity="{mark.opacity:g}"' if mark.opacity != 1 else ""
            rim = ' stroke="#fff" stroke-opacity=".75"' if mark.rim else ""
            if len(mark.outlines) == 1:
                start = f'<path d="{_outline(mark.outlines[0])}" fill="{_colour(mark.fills[0])}"{clear}{rim}'
                return f"{start}>{title}</path>" if title else f"{start}/>"
            stripes = (
                f'<path d="{_outline(outline)}" fill="{_colour(fill)}"{clear}/>'
                for outline, fill in zip(mark.outlines, mark.fills, strict=True)
            )
            around = f'<path d="{_outline(mark.bounds)}" fill="none"{rim}/>' if mark.rim else ""
            return f"<g>{title}{''.join(stripes)}{around}</g>"
        case Lines():
            path = "".join(f"M{_number(a)} {_number(b)}L{_number(c)} {_number(d)}" for (a, b), (c, d) in mark.segments)
            clear = f' stroke-opacity="{mark.opacity:g}"' if mark.opacity != 1 else ""
            dashes = ' stroke-dasharray="5 3"' if mark.dashed else ""
            stroke = f'stroke="{_colour(mark.colour)}" stroke-width="{mark.width:g}"'
            return f'<path d="{path}" fill="none" {stroke}{clear}{dashes}/>'
        case Words():
            middle = 0.35 * mark.size  # From the base line of words to their middle.
            place = f'x="{_number(mark.x)}" y="{_number(mark.y + middle)}"'
            if mark.turned:
                place = f'transform="translate({_number(mark.x + middle)} {_number(mark.y)}) rotate(-90)"'
            style = f' fill="{mark.colour}"' if mark.colour != INK else ""
            style += ' font-weight="600"' if mark.bold else ""
            style += f' font-family="{_MONO}"' if mark.mono else ""
            style += ' opacity=".75"' if mark.faint else ""
            style += ' paint-order="stroke" stroke="#fff" stroke-width="2.5"' if mark.halo else ""
            size = f'font-size="{_number(mark.size)}" text-anchor="{mark.anchor}"'
            return f"<text {place} {size}{style}>{escape(mark.text)}</text>"


def _outline(corners: Sequence[Point]) -> str:
    return f"M{'L'.join(f'{_number(x)} {_number(y)}' for x, y in corners)}z"


def _colour(colour: str) -> str:
    return "currentColor" if colour == INK else colour


def _number(value: float) -> str:
    return f"{round(value, 2):g}"
