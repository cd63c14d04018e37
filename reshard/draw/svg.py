"""Figures as SVG inside a page: lines in the page's colours, ids of their own, and nothing loaded from outside."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from reshard.draw import canvas

_INK = canvas.Ink("#010203", "#fdfcfb")
"""Placeholders that no fill uses; `inline` replaces them by the page's colours."""

_SIZE = re.compile(r'<svg[^>]*? width="([\d.]+)pt" height="[\d.]+pt" viewBox="([^"]*)"[^>]*>')
_APART = re.compile(
    r"<metadata>.*?</metadata>|<style.*?</style>", re.DOTALL
)  # A style element would apply to the whole page.
_ID = re.compile(r'(\bid="|\bhref="#|url\(#)')
_NARROWEST = 0.8  # The least share of its natural width that a figure shrinks to before it scrolls.


def ink() -> canvas.Ink:
    """The colours to draw a figure with before `inline` turns it into SVG."""
    return _INK


def inline(figure: Any, name: str, label: str) -> str:
    """A figure as an `svg` element; `name` makes its ids unique in the page, `label` describes it to screen readers."""
    text = canvas.svg(figure, name)
    text = _APART.sub("", text[text.index("<svg") :])
    text = text.replace("xlink:href=", "href=").replace(_INK.text, "currentColor").replace(_INK.back, "var(--card)")
    text = _ID.sub(lambda match: f"{match[1]}{name}-", text)
    return _SIZE.sub(lambda match: _open(float(match[1]) * 4 / 3, match[2], label), text, count=1).strip()


def _open(width: float, box: str, label: str) -> str:
    """The opening tag: its width follows the page's; HTML needs no XML namespaces."""
    widths = f"width: 100%; min-width: {_NARROWEST * width:.0f}px; max-width: {width:.0f}px; height: auto"
    style = f"display: block; {widths}; stroke-linejoin: round; stroke-linecap: butt"
    return f'<svg viewBox="{box}" style="{style}" role="img" aria-label="{escape(label)}">'
