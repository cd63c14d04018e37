"""`exchange`: from any layout to any other of the same array, as point-to-point messages in rounds.

    mesh <x=4, y=2>, f32[{x}3/10] -> f32[{y}5]

    device   holds   needs   receives
    x=0 y=0  0-2     0-4     3-4
    x=0 y=1  0-2     5-9     5, 6-8, 9      the busiest: 5 elements in 3 messages
    x=3 y=1  9       5-9     5, 6-8
    ...

In a round, each device sends and receives at most one message, so the rounds are the most messages that any device
sends or receives. A message may be cut into chunks: more rounds, less scratch. Two even layouts with a common
refinement exchange equal messages, and their figures have a closed form.

The two layouts may be on different sets of devices (`geometry.crossing`): then a device that is in one set only has no
tile of the other layout, and no buffer for what it never does, to send or to receive.

They may also be of different arrays, with a view between the indices of the two:

    mesh <x=8>, view "(three h) d -> three h d", f32[{x}12, 64] -> f32[3, {x}4, 64], three=3, h=32

    device   holds indices   = three, h             wants
    x=0      0-11              0, 0-11              h 0-3 of all three
    x=2      24-35             0, 24-31; 1, 0-3     h 8-11 of all three

That serves where no layout on common units leads from one side to the other: digits that lie across atoms of both
sides, and parts that are taken from, or put into, dims that are spread over devices.
"""

from __future__ import annotations

from reshard.geometry.figures import even_rounds, exchange_figures, received_by_device
from reshard.geometry.refine import refine
from reshard.geometry.remesh import disjoint, one_set
from reshard.plans.rules.bounds import lower_bound
from reshard.plans.rules.cost import Cost, StepMode, refuse_step
from reshard.plans.rules.view import view_of
from reshard.types.layout import Layout


def check_exchange(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Any layout to any other; each device receives exactly the elements that it needs and does not hold."""
    across, view = not one_set(operand.mesh, result.mesh), mode.view
    if view is not None:
        view_of("exchange", operand, result, StepMode(view=view))
        if operand.dtype != result.dtype:
            raise refuse_step("exchange", operand, result, "an exchange keeps the dtype")
    if not operand.partial_as(result):
        raise refuse_step("exchange", operand, result, "an exchange moves data and reduces nothing")
    if operand.partial and (across or (view is not None and operand.mesh != result.mesh)):
        raise refuse_step("exchange", operand, result, "a sum cannot stay partial on other devices; finish it first")
    if mode.in_place:
        if across or view is not None:
            why = "only an exchange among the same devices, without a view, goes in place"
            raise refuse_step("exchange", operand, result, why)
        return _check_in_place(operand, result, mode.chunk)
    if mode.relay and (view is not None or not across):
        raise refuse_step("exchange", operand, result, "only an exchange to other devices, without a view, is relayed")
    figures = exchange_figures(operand, result, view, relayed=mode.relay)
    cap = figures.message if mode.chunk is None else min(mode.chunk, figures.message)
    rounds, chunk = figures.cut(cap)
    # A device of one set only sends or receives. In a relay, receivers pass on in the same round as they receive.
    buffers = 1 if disjoint(operand.mesh, result.mesh) and not mode.relay else 2
    # A chunk that is one run of memory in both tiles is sent and received where it lies.
    scratch = 0 if cap <= figures.run else buffers * operand.nbytes(chunk)
    if view is None:
        return Cost(lower_bound(operand, result), rounds, scratch)
    return Cost(operand.nbytes(received_by_device(operand, result, view).most), rounds, scratch)


def _check_in_place(operand: Layout, result: Layout, chunk: int | None) -> Cost:
    """Each message arrives where the last one left; a single element needs no buffer."""
    r = refine(operand, result)
    if r is None or not r.exact:
        raise refuse_step("exchange", operand, result, "only even layouts with a common refinement go in place")
    rounds = even_rounds(r)
    chunks, largest = in_place_cut(r.common, chunk)
    scratch = 2 * operand.nbytes(largest) if rounds and largest > 1 else 0
    return Cost(lower_bound(operand, result), rounds * chunks, scratch)


def in_place_cut(message: int, chunk: int | None) -> tuple[int, int]:
    """How many chunks of at most `chunk` elements a message is sent in, and the elements of the largest.

    >>> in_place_cut(10, 4), in_place_cut(10, None)
    ((3, 4), (1, 10))
    """
    count = -(-message // min(chunk or message, message)) if message else 0
    return count, -(-message // count) if count else 0
