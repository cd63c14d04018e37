"""The text of a layout in our own notation, parsed into plain data; `str(layout)` writes it.

    layout  = dtype "[" [dim {"," dim}] "]" ["+" op held {held}]
    dim     = {digit} ["/" size]             digits most significant first, true size if padded
            | held {held} pieces             a piece for each coordinate
    pieces  = "(" size {"," size} ")"        of these sizes
            | "(" run {"," run} ")"          of these runs
            | "~" size                       as evenly as can be, the larger ones first
    run     = length "@" piece
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
_TOKEN = re.compile(r"\s*(?:([0-9]+)|\{([^{}]*)\}|(/)|\(([^()]*)\)|(~))\s*")
_GROUP = re.compile(r"\{[^{}]*\}|\([^()]*\)")
_RUN = re.compile(r"\s*([0-9]+)\s*(?:@\s*([0-9]+)\s*)?")


class RawDim(NamedTuple):
    """One dimension as written: local radices as numbers, held digits as axis text.

    Of a dim in pieces, `runs` are their lengths, with the numbers of pieces or none; () if they are as even as can be.
    """

    digits: tuple[int | str, ...]
    size: int | None
    runs: tuple[list[int], list[int]] | tuple[()] | None = None


class RawLayout(NamedTuple):
    """A layout as written, its axes as text."""

    dtype: str
    dims: tuple[RawDim, ...]
    reduction: str | None
    partial: tuple[str, ...]


def parse_layout(text: str) -> RawLayout:
    """Reads one layout; raises `NotationError` with the place that does not parse.

    >>> parse_layout("f32[{x}3/10, 8] + sum{y}").dims[0]
    RawDim(digits=('x', 3), size=10, runs=None)
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
    # Dims are split at the commas outside braces and brackets, in one pass over the text.
    masked = _GROUP.sub(lambda group: group[0].replace(",", "\0"), body)
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
        if match[3] or match[5]:
            size = part[at:].strip()
            if not re.fullmatch(r"[0-9]+", size):
                raise NotationError(
                    f"layout {quoted(text)}: cannot read the true size {quoted(size)}; write it last, as in {{x}}3/10"
                )
            return RawDim(tuple(digits), _read_number(size, text), () if match[5] else None)
        if match[4] is not None:
            if part[at:]:
                raise NotationError(
                    f"layout {quoted(text)}: cannot read {quoted(part[at:])}; pieces end a dim, as in {{x}}(3,5,0,2)"
                )
            runs = _parse_lengths(match[4], text)
            return RawDim(tuple(digits), sum(runs[0]), runs)
        if match[1]:
            digits.append(_read_number(match[1], text))
        else:
            digits += [axis.strip() for axis in match[2].split(",")]
    if not digits:
        raise NotationError(f"layout {quoted(text)}: an empty dim; write its size, e.g. 16, or 1 for a dim of size one")
    return RawDim(tuple(digits), None)


def _parse_lengths(pieces: str, text: str) -> tuple[list[int], list[int]]:
    """The lengths of runs, and the piece of each if these are written."""
    lengths: list[int] = []
    numbers: list[int] = []
    for each in pieces.split(","):
        match = _RUN.fullmatch(each)
        if match is None or (lengths and (match[2] is None) == bool(numbers)):
            raise NotationError(
                f"layout {quoted(text)}: cannot read the piece {quoted(each.strip())}; write a size for each piece, as "
                f"in {{x}}(3,5,0,2), or runs of length@piece, as in {{x}}(3@0,2@2,5@0)"
            )
        lengths.append(_read_number(match[1], text))
        if match[2] is not None:
            numbers.append(_read_number(match[2], text))
    return lengths, numbers


def _read_number(digits: str, text: str) -> int:
    """The number that these digits write; the longest ones are refused unread (*whole sizes*)."""
    number = written(digits)
    if number is None:
        raise LayoutError(f"layout {quoted(text)}: a number of {len(digits)} digits is above {MOST} (whole sizes)")
    return number
