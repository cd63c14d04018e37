"""What a step costs by its typing rule, in the way with the fewest launches that fits into the memory."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.errors import StepError, UndecidedError
from reshard.types.layout import Layout
from reshard.types.plan import Step
from reshard.types.rules import parts
from reshard.types.rules.cost import PLAIN, StepMode
from reshard.types.rules.exchange import exchange_size

MOST_ELEMENTS = 1 << 12
"""A larger message is not tried in chunks of every size, so whether some chunk fits is undecided."""


def cheapest(
    kind: str, operand: Layout, result: Layout, retained: int, live: int, most: int, donate: bool
) -> Step | None:
    """The step with the fewest launches, within `most` launches and `live` bytes; None if there is none.

    `retained` bytes are live beside it. Only if the source is donated may it run in place.

    >>> from reshard.types import Mesh
    >>> operand, result = (Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4, 16]", "f32[16, {x}4]"))
    >>> [cheapest("all_to_all", operand, result, 0, live, 4, donate=False).launches for live in (768, 767)]
    [1, 4]
    """
    fitting: list[Step] = []
    for name, mode in _ways(kind, operand, result, most, donate):
        try:
            step = Step(name, operand, result, mode, retained)
        except StepError:
            continue
        if step.live_bytes <= live and step.launches <= most:
            fitting.append(step)
            if mode == PLAIN:  # Pieces only add launches.
                break
    return min(fitting, key=lambda step: step.launches, default=None)


def _ways(kind: str, operand: Layout, result: Layout, most: int, donate: bool) -> Iterator[tuple[str, StepMode]]:
    """A step as a whole and in parts; an exchange also in chunks of all sizes; and in place, which a slice can be."""
    yield kind, PLAIN
    for count in parts.counts(operand, result):
        if count <= most:
            yield from ((kind, StepMode(parts=count, in_place=in_place)) for in_place in {False, donate})
    if kind == "slice" and donate:
        yield "exchange", StepMode(in_place=True)
    if kind == "exchange":
        yield from ((kind, mode) for mode in _chunks(operand, result, most, donate))


def _chunks(operand: Layout, result: Layout, most: int, donate: bool) -> Iterator[StepMode]:
    """The ways to cut the messages of an exchange; the larger the chunks, the fewer the launches."""
    size = exchange_size(operand, result)
    if donate:
        yield from (StepMode(-(-size.message // count), in_place=True) for count in range(1, most + 1))
    if size.message > MOST_ELEMENTS:
        raise UndecidedError(f"messages of {size.message} elements are not cut in all ways")
    for cap in range(size.message - 1, 0, -1):
        if size.cut(cap)[0] > most:
            return
        yield StepMode(chunk=cap)
