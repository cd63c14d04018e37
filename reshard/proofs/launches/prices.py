"""What a step costs by its typing rule, in the way of fewest launches that fits into the memory."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.errors import StepError, UndecidedError
from reshard.types.layout import Layout
from reshard.types.plan import Step
from reshard.types.rules import parts
from reshard.types.rules.cost import PLAIN, StepMode
from reshard.types.rules.exchange import exchange_size

MOST_ELEMENTS = 1 << 12
"""A larger message is not cut in all ways: it is not decided whether it can be cut so that it fits."""


def cheapest(
    kind: str, operand: Layout, result: Layout, retained: int, live: int, most: int, donate: bool
) -> Step | None:
    """The step in at most `most` launches and `live` bytes, in place only if the source is donated."""
    found: list[Step] = []
    for name, mode in _ways(kind, operand, result, most, donate):
        try:
            step = Step(name, operand, result, mode, retained)
        except StepError:
            continue
        if step.live_bytes <= live and step.launches <= most:
            found.append(step)
            if mode == PLAIN:  # Pieces only add launches.
                break
    return min(found, key=lambda step: step.launches, default=None)


def _ways(kind: str, operand: Layout, result: Layout, most: int, donate: bool) -> Iterator[tuple[str, StepMode]]:
    """A step in one go or in parts, an exchange in chunks of all sizes, and one in place, which may be a slice."""
    yield kind, PLAIN
    yield from ((kind, StepMode(parts=count)) for count in parts.counts(operand, result) if count <= most)
    if kind == "slice" and donate:
        yield "exchange", StepMode(in_place=True)
    if kind != "exchange":
        return
    size = exchange_size(operand, result)
    if donate:
        yield from ((kind, StepMode(-(-size.message // count), in_place=True)) for count in range(1, most + 1))
    if size.message > MOST_ELEMENTS:
        raise UndecidedError(f"messages of {size.message} elements are not cut in all ways")
    for cap in range(size.message - 1, 0, -1):
        if size.cut(cap)[0] > most:
            return
        yield kind, StepMode(chunk=cap)
