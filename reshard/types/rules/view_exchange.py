"""`view_exchange`: from any layout to any other one under a view, as point-to-point messages in rounds.

    mesh <x=8>, view "(three h) d -> three h d", f32[{x}12, 64] -> f32[3, {x}4, 64], three=3, h=32

    device   holds indices   = three, h             wants
    x=0      0-11              0, 0-11              h 0-3 of all three
    x=2      24-35             0, 24-31; 1, 0-3     h 8-11 of all three

It serves where no layout on common units leads from one side to the other: digits that lie across atoms of both sides,
and parts that are taken from, or put into, dims that are spread over devices. Each device receives exactly what it
needs and does not hold. Messages may be cut into chunks, as those of an exchange: more rounds, less scratch.
"""

from __future__ import annotations

from reshard.types.layout import Layout
from reshard.types.pair.view_messages import view_stats
from reshard.types.rules.cost import Cost, StepMode, refusal
from reshard.types.rules.view import view_of


def check_view_exchange(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """The layouts fit the view; nothing is reduced."""
    view = view_of("view_exchange", operand, result, mode._replace(chunk=None))
    if (
        operand.dtype != result.dtype
        or not operand.partial_as(result)
        or (operand.partial and operand.mesh != result.mesh)
    ):
        raise refusal("view_exchange", operand, result, "an exchange keeps the dtype and reduces nothing")
    stats = view_stats(operand, result, view, mode.chunk)
    scratch = 2 * operand.nbytes(stats.message) if stats.staged else 0
    return Cost(operand.nbytes(stats.received), stats.rounds, scratch)
