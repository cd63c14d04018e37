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

The two layouts may be on different sets of devices (`pair.crossing`): then a device that is in one set only has no
tile of the other layout, and no buffer for what it never does, to send or to receive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from reshard.geometry import device_loads, exchange_stats, pieces
from reshard.geometry.crossing import crossing
from reshard.geometry.refine import Refinement, refine
from reshard.geometry.relay import relay, relay_figures
from reshard.geometry.remesh import disjoint, one_set
from reshard.geometry.view_messages import view_stats
from reshard.plans.rules.bounds import lower_bound
from reshard.plans.rules.cost import PLAIN, Cost, StepMode, refusal
from reshard.plans.rules.view import view_of
from reshard.types.layout import Layout


def check_exchange(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Any layout to any other; each device receives exactly the elements that it needs and does not hold."""
    if not operand.partial_as(result):
        raise refusal("exchange", operand, result, "an exchange moves data and reduces nothing")
    if not one_set(operand.mesh, result.mesh):
        return _crossing(operand, result, mode)
    if mode.relay:
        raise refusal("exchange", operand, result, "only an exchange to other devices is relayed")
    if mode.in_place:
        return _in_place(operand, result, mode.chunk)
    size = exchange_size(operand, result)
    cap = size.message if mode.chunk is None else min(mode.chunk, size.message)
    rounds, chunk = size.cut(cap)
    # A chunk that is one run of memory in both tiles is sent and received where it lies.
    scratch = 0 if cap <= size.run else 2 * operand.nbytes(chunk)
    return Cost(lower_bound(operand, result), rounds, scratch)


def _crossing(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Between two sets of devices."""
    if operand.partial:
        raise refusal("exchange", operand, result, "a sum cannot stay partial on other devices; finish it first")
    if mode.in_place:
        raise refusal("exchange", operand, result, "only an exchange among the same devices goes in place")
    size = _relay_size(operand, result) if mode.relay else exchange_size(operand, result)
    cap = size.message if mode.chunk is None else min(mode.chunk, size.message)
    rounds, chunk = size.cut(cap)
    buffers = 1 if disjoint(operand.mesh, result.mesh) else 2
    buffers = 2 if mode.relay else buffers  # Receivers pass on in the same round as they receive.
    scratch = 0 if cap <= size.run else buffers * operand.nbytes(chunk)
    return Cost(lower_bound(operand, result), rounds, scratch)


def _relay_size(operand: Layout, result: Layout) -> ExchangeSize:
    """The messages of both turns, one after the other."""
    figures = relay_figures(operand, result)
    turns = relay(operand, result)
    return ExchangeSize(
        sum(t.rounds for t in figures.turns), figures.message, 1, lambda: [*map(device_loads.loads_of, turns)]
    )


def _in_place(operand: Layout, result: Layout, chunk: int | None) -> Cost:
    """Each message arrives where the last one left; a single element needs no buffer."""
    r = refine(operand, result)
    if r is None or not r.exact:
        raise refusal("exchange", operand, result, "only even layouts with a common refinement go in place")
    rounds = _even_rounds(r)
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


class ExchangeSize(NamedTuple):
    """The rounds of an exchange, the elements of its largest message, and those of its shortest run in memory.

    `loads` lists the messages of each device by their shapes, turn by turn; only cutting messages into chunks needs it.
    """

    rounds: int
    message: int
    run: int
    loads: Callable[[], Sequence[Collection[device_loads.Load]]]

    def cut(self, cap: int) -> tuple[int, int]:
        """The rounds with messages cut to at most `cap` elements, and the elements of the largest chunk."""
        if cap >= self.message:
            return self.rounds, self.message
        turns = self.loads()
        rounds = sum(
            max(
                (
                    sum(n * count * pieces.count(box, cap) for n, shape in load for box, count in shape)
                    for load in loads
                ),
                default=0,
            )
            for loads in turns
        )
        boxes = (box for loads in turns for load in loads for _, shape in load for box, _ in shape)
        return rounds, max(pieces.largest(box, cap) for box in boxes)


def exchange_size(operand: Layout, result: Layout) -> ExchangeSize:
    """The rounds and messages of an exchange; for even layouts in closed form, without listing devices."""
    if not one_set(operand.mesh, result.mesh):
        figures = crossing(operand, result)
        run = 1 if figures.cut else exchange_stats.shortest_run(operand, result)
        return ExchangeSize(figures.rounds, figures.message, run, lambda: [device_loads.loads(operand, result)])
    r = refine(operand, result)
    if r is None or not r.exact:
        rounds, message = exchange_stats.rounds(operand, result), exchange_stats.largest_message(operand, result)
        run = exchange_stats.shortest_run(operand, result)
        return ExchangeSize(rounds, message, run, lambda: [device_loads.loads(operand, result)])
    extents = tuple(digit.radix for digit in r.digits if digit.src is None and digit.dst is None)
    rounds = _even_rounds(r)
    return ExchangeSize(rounds, r.common, _even_run(r), lambda: ((((rounds, ((extents, 1),)),),),))


def sent(operand: Layout, result: Layout, mode: StepMode = PLAIN) -> int:
    """Elements that the busiest device sends in an exchange.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> sent(Layout.parse("f32[{x}2/5]", mesh), Layout.parse("f32[5]", mesh))
    6
    """
    if mode.relay:
        return relay_figures(operand, result).sent
    if not one_set(operand.mesh, result.mesh):
        return crossing(operand, result).sent
    r = refine(operand, result)
    return r.common * _even_rounds(r) if r is not None and r.exact else device_loads.most_sent(operand, result)


def _even_rounds(r: Refinement) -> int:
    """Rounds between even layouts, one for each source tile that a device fetches from.

    If no digit moves from one holder to another, one of these tiles is the device's own.
    """
    if not r.common:
        return 0
    return r.pieces if r.swapped else r.pieces - 1


def _even_run(r: Refinement) -> int:
    """Elements that are neighbours in both tiles: the minor digits that are local on both sides."""
    run = 1
    for digit in reversed(r.digits):
        if digit.src is None and digit.dst is None:
            run *= digit.radix
        elif digit.src is None or digit.dst is None:
            break
    return run


# `view_exchange`: from any layout to any other one under a view, as point-to-point messages in rounds.
#
#     mesh <x=8>, view "(three h) d -> three h d", f32[{x}12, 64] -> f32[3, {x}4, 64], three=3, h=32
#
#     device   holds indices   = three, h             wants
#     x=0      0-11              0, 0-11              h 0-3 of all three
#     x=2      24-35             0, 24-31; 1, 0-3     h 8-11 of all three
#
# It serves where no layout on common units leads from one side to the other: digits that lie across atoms of both
# sides, and parts that are taken from, or put into, dims that are spread over devices. Each device receives exactly
# what it needs and does not hold. Messages may be cut into chunks, as those of an exchange: more rounds, less scratch.


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
