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


def parse_layout(text: str) -> RawLayout:
    """Reads one layout; raises `NotationError` with the place that does not parse.

    >>> parse_layout("f32[{x}3/10, 8] + sum{y}").dims[0]
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
    # Dims are split at the commas outside braces, in one pass over the text.
    masked = re.sub(r"\{[^{}]*\}", lambda braced: braced[0].replace(",", "\0"), body)
    parts = [part.replace("\0", ",").strip() for part in masked.split(",")] if body.strip() else []
    groups = re.findall(r"\{([^{}]*)\}", held or "")
    partial = tuple(axis.strip() for group in groups for axis in group.split(","))
    return RawLayout(dtype, tuple(_read_dim(part, text) for part in parts), reduction, partial)


def _read_dim(part: str, text: str) -> RawDim:
    digits: list[int | str] = []
    at = 0
    while at < len(part):
        match = _TOKEN.match(part, at)
        if match is None:
            raise NotationError(
                f"layout {quoted(text)}: cannot read {quoted(part[at:].strip())}; a dim is digits like {{x}}4 or 16"
            )
        at = match.end()
        if match[3]:
            size = part[at:].strip()
            if not re.fullmatch(r"[0-9]+", size):
                raise NotationError(
                    f"layout {quoted(text)}: cannot read the true size {quoted(size)}; write it last, as in {{x}}3/10"
                )
            return RawDim(tuple(digits), _read_number(size, text))
        if match[1]:
            digits.append(_read_number(match[1], text))
        else:
            digits += [axis.strip() for axis in match[2].split(",")]
    if not digits:
        raise NotationError(f"layout {quoted(text)}: an empty dim; write its size, e.g. 16, or 1 for a dim of size one")
    return RawDim(tuple(digits), None)


def _read_number(digits: str, text: str) -> int:
    """The number that these digits write; the longest ones are refused unread (*whole sizes*)."""
    number = written(digits)
    if number is None:
        raise LayoutError(f"layout {quoted(text)}: a number of {len(digits)} digits is above {MOST} (whole sizes)")
    return number
