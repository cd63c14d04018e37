"""The figures of an exchange, between any two layouts, sets of devices, and through any view.

    mesh <x=4, y=2>, f32[{x}3/10] -> f32[{y}5]        the busiest device receives 5 elements in 3 messages

Where there is a closed form it is taken, and no message is listed:

    even layouts on the same devices     equal messages (`refine`)
    uneven ones                          from the pieces of each group of dims (`exchange_stats`)
    two sets of devices                  from queues of requests (`crossing`), or in two rounds of messages (`relay`)
    through a view                       from the messages, which are listed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.geometry import crossing, device_loads, exchange_stats, pieces
from reshard.geometry.exchange_stats import ByDevice, count_lacked, lacked_by_device
from reshard.geometry.messages import exchange_messages
from reshard.geometry.refine import Refinement, refine
from reshard.geometry.relay import relay_figures, relay_messages
from reshard.geometry.remesh import one_set
from reshard.types.layout import Layout
from reshard.types.view import View


class ExchangeFigures(NamedTuple):
    """The rounds of an exchange, the elements of its largest message, and those of its shortest run in memory.

    `loads` lists the messages of each device by their shapes, once for each time that all devices wait for each other;
    only cutting messages into chunks needs it.
    """

    rounds: int
    message: int
    run: int
    loads: Callable[[], Sequence[Collection[device_loads.Load]]]

    def cut(self, cap: int) -> tuple[int, int]:
        """The rounds with messages cut to at most `cap` elements, and the elements of the largest chunk.

        >>> from reshard.types import Mesh
        >>> both = [Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4, 16]", "f32[16, {x}4]")]
        >>> exchange_figures(*both).cut(100), exchange_figures(*both).cut(5)
        ((3, 16), (12, 4))
        """
        if cap >= self.message:
            return self.rounds, self.message
        rounds, largest = 0, 0
        for loads in self.loads():
            most = 0
            for load in loads:
                here = 0
                for number, shape in load:
                    for extents, times in shape:
                        here += number * times * pieces.count(extents, cap)
                        largest = max(largest, pieces.largest(extents, cap))
                most = max(most, here)
            rounds += most
        return rounds, largest


def exchange_figures(
    operand: Layout, result: Layout, view: View | None = None, *, relayed: bool = False
) -> ExchangeFigures:
    """The figures of the exchange; `relayed`, of one to other devices in which receivers pass elements on.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> exchange_figures(Layout.parse("f32[{x}3/10]", mesh), Layout.parse("f32[10]", mesh))[:3]
    (3, 3, 1)
    """
    if view is not None:
        return _view_figures(operand, result, view)
    if relayed:
        figures = relay_figures(operand, result)
        # Both turns follow each other, and what is passed on lies in pieces of a tile.
        return ExchangeFigures(
            sum(turn.rounds for turn in figures.turns),
            figures.message,
            1,
            lambda: [*map(device_loads.loads_of, relay_messages(operand, result))],
        )
    if not one_set(operand.mesh, result.mesh):
        across = crossing.crossing_figures(operand, result)
        run = 1 if across.cut else exchange_stats.shortest_run(operand, result)
        return ExchangeFigures(across.rounds, across.message, run, lambda: [device_loads.loads(operand, result)])
    r = refine(operand, result)
    if r is None or not r.exact:
        rounds, message = exchange_stats.count_rounds(operand, result), exchange_stats.largest_message(operand, result)
        run = exchange_stats.shortest_run(operand, result)
        return ExchangeFigures(rounds, message, run, lambda: [device_loads.loads(operand, result)])
    extents = tuple(digit.radix for digit in r.digits if digit.src is None and digit.dst is None)
    rounds = even_rounds(r)
    return ExchangeFigures(rounds, r.common, _even_run(r), lambda: ((((rounds, ((extents, 1),)),),),))


@lru_cache(maxsize=256)
def _view_figures(operand: Layout, result: Layout, view: View) -> ExchangeFigures:
    sent = [m for m in exchange_messages(operand, result, view) if m.sender != m.receiver]
    sends, receipts = Counter(m.sender for m in sent), Counter(m.receiver for m in sent)
    message = max((m.elements for m in sent), default=0)
    run = message if all(m.is_run for m in sent) else 1
    rounds = max((*sends.values(), *receipts.values()), default=0)
    return ExchangeFigures(rounds, message, run, lambda: [device_loads.loads_of(sent)])


def most_sent(operand: Layout, result: Layout, view: View | None = None, *, relayed: bool = False) -> int:
    """Elements that the busiest device sends.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> most_sent(Layout.parse("f32[{x}2/5]", mesh), Layout.parse("f32[5]", mesh))
    6
    """
    if relayed:
        return relay_figures(operand, result).sent
    if view is not None:
        return max(_view_loads(operand, result, view)[1].values(), default=0)
    if not one_set(operand.mesh, result.mesh):
        return crossing.crossing_figures(operand, result).sent
    r = refine(operand, result)
    return r.common * even_rounds(r) if r is not None and r.exact else device_loads.most_sent_among(operand, result)


def received_by_device(operand: Layout, result: Layout, view: View | None = None) -> ByDevice:
    """The elements that each device receives: those of its target tile that it does not hold.

    >>> from reshard.types import Mesh
    >>> both = [Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}3/5]", "f32[5]")]
    >>> received_by_device(*both).listed
    {0: 2, 1: 3}
    """
    if view is not None:
        return ByDevice(0, _view_loads(operand, result, view)[0])
    if not one_set(operand.mesh, result.mesh):
        return ByDevice(0, count_lacked(operand, result))
    return lacked_by_device(operand, result)


_MOST_LISTED = 1 << 10
"""The messages of an uneven exchange are listed on meshes of at most this many devices."""


def sent_by_device(operand: Layout, result: Layout, view: View | None = None) -> ByDevice:
    """The elements that each device sends.

    In an even exchange every round is a bijection of the devices, so each sends what it receives; so it is taken for
    uneven ones on more devices than are listed.

    >>> from reshard.types import Mesh
    >>> both = [Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}3/5]", "f32[5]")]
    >>> sent_by_device(*both).listed
    {0: 3, 1: 2}
    """
    if view is not None:
        return ByDevice(0, _view_loads(operand, result, view)[1])
    if not one_set(operand.mesh, result.mesh):
        return ByDevice(0, crossing.count_sent_across(operand, result))
    r = refine(operand, result)
    if (r is not None and r.exact) or operand.mesh.size > _MOST_LISTED:
        return lacked_by_device(operand, result)
    return ByDevice(0, device_loads.count_sent_among(operand, result))


@lru_cache(maxsize=256)
def _view_loads(operand: Layout, result: Layout, view: View) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """What each device receives and sends through a view."""
    received, sent = (dict.fromkeys(layout.mesh.devices, 0) for layout in (result, operand))
    for message in exchange_messages(operand, result, view):
        if message.sender != message.receiver:
            received[message.receiver] += message.elements
            sent[message.sender] += message.elements
    return received, sent


def even_rounds(r: Refinement) -> int:
    """Rounds between even layouts, one for each source tile that a device fetches from.

    If no digit moves from one holder to another, one of these tiles is the device's own.

    >>> from reshard.types import Mesh
    >>> r = refine(*[Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4, 16]", "f32[16, {x}4]")])
    >>> even_rounds(r)
    3
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
