"""A scene as SVG: one element, which a page contains or a file is made of. The standard library is enough."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from reshard.draw.colours import Point
from reshard.draw.scene import INK, Area, Lines, Mark, Scene, Words

STANDALONE = """
svg{color:#1c1e21;background:#fff}
@media (prefers-color-scheme:dark){svg{color:#e6e8ea;background:#15171a}}
"""
"""A style for a picture in a file of its own, legible in light and dark."""

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
            return _area(mark)
        case Lines():
            return _lines(mark)
        case Words():
            return _words(mark)


def _area(area: Area) -> str:
    title = f"<title>{escape(area.title)}</title>" if area.title else ""
    clear = f' fill-opacity="{area.opacity:g}"' if area.opacity != 1 else ""
    rim = ' stroke="#fff" stroke-opacity=".75"' if area.rim else ""
    if len(area.outlines) == 1:
        start = f'<path d="{_outline(area.outlines[0])}" fill="{_colour(area.fills[0])}"{clear}{rim}'
        return f"{start}>{title}</path>" if title else f"{start}/>"
    stripes = (
        f'<path d="{_outline(outline)}" fill="{_colour(fill)}"{clear}/>'
        for outline, fill in zip(area.outlines, area.fills, strict=True)
    )
    around = f'<path d="{_outline(area.bounds)}" fill="none"{rim}/>' if area.rim else ""
    return f"<g>{title}{''.join(stripes)}{around}</g>"


def _outline(corners: Sequence[Point]) -> str:
    return f"M{'L'.join(f'{_number(x)} {_number(y)}' for x, y in corners)}z"


def _lines(lines: Lines) -> str:
    path = "".join(f"M{_number(a)} {_number(b)}L{_number(c)} {_number(d)}" for (a, b), (c, d) in lines.segments)
    clear = f' stroke-opacity="{lines.opacity:g}"' if lines.opacity != 1 else ""
    dashes = ' stroke-dasharray="5 3"' if lines.dashed else ""
    return (
        f'<path d="{path}" fill="none" stroke="{_colour(lines.colour)}" stroke-width="{lines.width:g}"{clear}{dashes}/>'
    )


def _words(words: Words) -> str:
    middle = 0.35 * words.size  # From the base line of words to their middle.
    place = f'x="{_number(words.x)}" y="{_number(words.y + middle)}"'
    if words.turned:
        place = f'transform="translate({_number(words.x + middle)} {_number(words.y)}) rotate(-90)"'
    style = f' fill="{words.colour}"' if words.colour != INK else ""
    style += ' font-weight="600"' if words.bold else ""
    style += f' font-family="{_MONO}"' if words.mono else ""
    style += ' opacity=".75"' if words.faint else ""
    style += ' paint-order="stroke" stroke="#fff" stroke-width="2.5"' if words.halo else ""
    size = f'font-size="{_number(words.size)}" text-anchor="{words.anchor}"'
    return f"<text {place} {size}{style}>{escape(words.text)}</text>"


def _colour(colour: str) -> str:
    return "currentColor" if colour == INK else colour


def _number(value: float) -> str:
    return f"{round(value, 2):g}"
