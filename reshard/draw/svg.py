"""Figures as SVG inside a page: lines in the page's colours, names of their own, nothing from outside."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from reshard.draw import canvas

_INK = canvas.Ink("#010203", "#fdfcfb")
"""Stands for the page's colours: no fill is one of these."""

_SIZE = re.compile(r'<svg[^>]*? width="([\d.]+)pt" height="[\d.]+pt" viewBox="([^"]*)"[^>]*>')
_APART = re.compile(r"<metadata>.*?</metadata>|<style.*?</style>", re.DOTALL)  # A style would be the whole page's.
_ID = re.compile(r'(\bid="|\bhref="#|url\(#)')
_NARROWEST = 0.8  # Of its natural width; in less room it scrolls.


def ink() -> canvas.Ink:
    """The colours to draw a figure with that is to become SVG."""
    return _INK


def inline(figure: Any, name: str, label: str) -> str:
    """A figure as an `svg` element; `name` makes its ids unique in the page, `label` says what it shows."""
    text = canvas.svg(figure, name)
    text = _APART.sub("", text[text.index("<svg") :])
    text = text.replace("xlink:href=", "href=").replace(_INK.text, "currentColor").replace(_INK.back, "var(--card)")
    text = _ID.sub(lambda found: f"{found[1]}{name}-", text)
    return _SIZE.sub(lambda found: _open(float(found[1]) * 4 / 3, found[2], label), text, count=1).strip()


def _open(width: float, box: str, label: str) -> str:
    """The opening tag, with a width that follows the page's; the names of XML are not needed in HTML."""
    widths = f"width: 100%; min-width: {_NARROWEST * width:.0f}px; max-width: {width:.0f}px; height: auto"
    style = f"display: block; {widths}; stroke-linejoin: round; stroke-linecap: butt"
    return f'<svg viewBox="{box}" style="{style}" role="img" aria-label="{escape(label)}">'
