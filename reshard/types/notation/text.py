"""The text of a layout in our own notation, parsed into plain data; `str(layout)` writes it.

    layout  = dtype "[" [dim {"," dim}] "]" ["+" op held {held}]
    dim     = {digit} ["/" size]             digits most significant first, true size if padded
    digit   = radix | held
    held    = "{" axis {"," axis} "}"
    axis    = name [":(" pre ")" size]
    op      = "sum" | "max" | "min" | "product" | "mean"

Axes stay text here: `Layout.parse` looks them up on a mesh.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from reshard.errors import LayoutError, NotationError, quoted
from reshard.types.reductions import REDUCTIONS
from reshard.types.whole import MOST, written

_LAYOUT = re.compile(r"\s*([A-Za-z_]\w*)\s*\[(.*)\]\s*(?:\+\s*([A-Za-z]+)\s*((?:\{[^{}]*\}\s*)+))?", re.DOTALL)
_TOKEN = re.compile(r"\s*(?:([0-9]+)|\{([^{}]*)\}|(/))\s*")


class RawDim(NamedTuple):
    """One dimension as written: local radices as numbers, held digits as axis text."""

    digits: tuple[int | str, ...]
    size: int | None


class RawLayout(NamedTuple):
    """A layout as written, its axes as text."""

    dtype: str
    dims: tuple[RawDim, ...]
    reduction: str | None
    partial: tuple[str, ...]


def parse(text: str) -> RawLayout:
    """Reads one layout; raises `NotationError` with the place that does not parse.

    >>> parse("f32[{x}3/10, 8] + sum{y}").dims[0]
    RawDim(digits=('x', 3), size=10)
    """
    match = _LAYOUT.fullmatch(text) if isinstance(text, str) else None  # pyright: ignore
    if match is None:
        raise NotationError(
            f"cannot read layout {quoted(text)}; write dtype[dims], e.g. f32[{{y}}8, 16, {{x}}4] + sum{{z}}"
        )
    dtype, body, reduction, held = match.groups()
    if reduction is not None and reduction not in REDUCTIONS:
        raise NotationError(
            f"layout {quoted(text)}: unknown reduction {quoted(reduction)}; use one of {', '.join(REDUCTIONS)}"
        )
    dims = tuple(_dim(part.strip(), text) for part in _split(body)) if body.strip() else ()
    return RawLayout(dtype, dims, reduction, _axes(held) if held else ())


def _split(body: str) -> list[str]:
    """Splits at the commas outside braces, in one pass over the text."""
    masked = re.sub(r"\{[^{}]*\}", lambda held: held[0].replace(",", "\0"), body)
    return [part.replace("\0", ",") for part in masked.split(",")]


def _axes(held: str) -> tuple[str, ...]:
    return tuple(axis.strip() for group in re.findall(r"\{([^{}]*)\}", held) for axis in group.split(","))


def _dim(part: str, text: str) -> RawDim:
    digits: list[int | str] = []
    at = 0
    while at < len(part):
        match = _TOKEN.match(part, at)
        if match is None:
            raise NotationError(
                f"layout {quoted(text)}: cannot read {quoted(part[at:].strip())}; a dim is digits like {{x}}4 or 16"
            )
        if match[3]:
            return RawDim(tuple(digits), _size(part[match.end() :], text))
        digits.extend([_number(match[1], text)] if match[1] else _axes(f"{{{match[2]}}}"))
        at = match.end()
    if not digits:
        raise NotationError(f"layout {quoted(text)}: an empty dim; write its size, e.g. 16, or 1 for a dim of size one")
    return RawDim(tuple(digits), None)


def _size(part: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]+", part.strip()):
        raise NotationError(
            f"layout {quoted(text)}: cannot read the true size {quoted(part.strip())}; write it last, as in {{x}}3/10"
        )
    return _number(part.strip(), text)


def _number(digits: str, text: str) -> int:
    """The number that these digits write; the longest ones are refused unread (*whole sizes*)."""
    number = written(digits)
    if number is None:
        raise LayoutError(f"layout {quoted(text)}: a number of {len(digits)} digits is above {MOST} (whole sizes)")
    return number
