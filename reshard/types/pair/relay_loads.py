"""Who passes on how much in a relay, so that the busiest device sends as little as it can.

    f32[{x}12] on <x=2>, devices 0 and 1 -> f32[24] on <d=6>, devices 0 to 5

    elements   held by   lacked by         sent by the holder   passed on
    0-11       0         1 2 3 4 5         12                   48, by those that lack them or by the holder
    12-23      1         0 2 3 4 5         12                   48

    even       each device passes on a fifth of 12: 0 and 1 send 12 + 9.6 elements, the others 9.6 + 9.6
    balanced   0 and 1 pass on 2 elements, the others 5 of both tiles together: all six send 20

Elements that the same devices hold and lack are one class. Their holders send each element at least once, and all other
copies are sent by the holders or by those that have been sent the element. Each class in turn is poured into the
devices that may send it, as water into vessels that the other classes have filled to different heights; after some
sweeps over all classes, no choice of senders makes the highest level lower. Then the shares are made whole elements, in
the same way.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from reshard.types.deadline import check_deadline

_SWEEPS = 32
"""How often all classes are poured anew, at most."""

_ROUNDINGS = 4
"""How often the shares of all classes are rounded anew, at most."""


class Demand(NamedTuple):
    """How many elements a class has, the devices that hold them, and those that lack them."""

    size: int
    holders: Sequence[int]
    lacking: Sequence[int]

    @property
    def further(self) -> int:
        """The copies of each element that remain to be sent when one device has been sent it."""
        return len(self.lacking) - 1


_Loads = dict[int, float]
"""What each device sends."""


def passed_on(demands: Sequence[Demand], enough: int) -> list[tuple[int, ...]]:
    """For each class, how many elements each device that lacks them is sent first and passes on to all others.

    Holders send the rest to all. `enough` elements sent by every device are good enough to stop. Only the four
    operations of floating point are used, so all processes get the same numbers.

    >>> passed_on([Demand(12, [0], [1, 2, 3, 4, 5]), Demand(12, [1], [0, 2, 3, 4, 5])], enough=20)
    [(2, 3, 3, 2, 2), (2, 2, 2, 3, 3)]
    """
    loads: _Loads = dict.fromkeys(itertools.chain.from_iterable((*d.holders, *d.lacking) for d in demands), 0.0)
    poured = [[0.0] * (len(demand.holders) + len(demand.lacking)) for demand in demands]
    _balance(demands, loads, poured, enough)
    best, least = list[tuple[int, ...]](), math.inf
    for _ in range(_ROUNDINGS):
        counts = _rounding(demands, loads, poured)
        most = max(loads.values(), default=0.0)
        if most < least:
            best, least = counts, most
        if least <= enough:
            break
    return best


def _balance(demands: Sequence[Demand], loads: _Loads, poured: list[list[float]], enough: int) -> None:
    """Pours all classes, in as many sweeps as it takes."""
    for _ in range(_SWEEPS):
        check_deadline()
        for at, demand in enumerate(demands):
            _add(loads, demand, poured[at], -1)
            poured[at] = _poured(demand, loads)
            _add(loads, demand, poured[at])
        if max(loads.values(), default=0.0) <= enough:
            break


def _rounding(demands: Sequence[Demand], loads: _Loads, poured: list[list[float]]) -> list[tuple[int, ...]]:
    """Makes the shares of all classes whole elements, one class after the other."""
    check_deadline()
    counts: list[tuple[int, ...]] = []
    for at, demand in enumerate(demands):
        _add(loads, demand, poured[at], -1)
        counts.append(_rounded(demand, _poured(demand, loads), loads))
        poured[at] = _sent(demand, counts[-1], loads)
        _add(loads, demand, poured[at])
    return counts


def levelled(bases: Sequence[int], amount: int) -> list[int]:
    """How much is added to each of these to make the largest sum as small as it can be, in whole numbers.

    >>> levelled([0, 3, 9], 7), levelled([5, 5], 3)
    ([5, 2, 0], [2, 1])
    """
    level = min(-(-(amount + below) // count) for count, below in enumerate(itertools.accumulate(sorted(bases)), 1))
    added = [max(0, level - base) for base in bases]
    over = sum(added) - amount
    for at in [at for at, more in enumerate(added) if more][::-1][:over]:
        added[at] -= 1
    return added


def sends(demands: Sequence[Demand], counts: Sequence[Sequence[int]]) -> Counter[int]:
    """The elements that each device passes on."""
    sent: Counter[int] = Counter()
    for demand, some in zip(demands, counts, strict=True):
        for device, count in zip(demand.lacking, some, strict=True):
            sent[device] += count * demand.further
    return sent


def _add(loads: _Loads, demand: Demand, amounts: Sequence[float], sign: int = 1) -> None:
    """Adds what the holders of a class, and then those that lack it, send of it."""
    for device, amount in zip((*demand.holders, *demand.lacking), amounts, strict=True):
        loads[device] += sign * amount


def _level(bases: Sequence[float], amount: float) -> float:
    """How high an amount of water rises in vessels that are filled to these heights."""
    return min((amount + below) / count for count, below in enumerate(itertools.accumulate(sorted(bases)), 1))


def _pour(bases: Sequence[float], amount: float) -> list[float]:
    level = _level(bases, amount)
    return [max(0.0, level - base) for base in bases]


def _poured(demand: Demand, loads: _Loads) -> list[float]:
    """What the holders of a class, and then those that lack it, best send of it beside what they send of others."""
    held = [loads[device] for device in demand.holders]
    lacking = [loads[device] for device in demand.lacking]
    together = _pour([*held, *lacking], demand.size * len(demand.lacking))
    if sum(together[: len(held)]) >= demand.size:
        return together
    return _pour(held, demand.size) + _pour(lacking, demand.size * demand.further)


def _rounded(demand: Demand, amounts: Sequence[float], loads: _Loads) -> tuple[int, ...]:
    """The shares as whole elements: first rounded down, then one more for who would then send the least."""
    further = demand.further
    if not further:
        return (0,) * len(demand.lacking)
    holders = len(demand.holders)
    counts = [int(amount / further) for amount in amounts[holders:]]
    by_holders = max(0, int((sum(amounts[:holders]) - demand.size) / further))
    held = [loads[device] for device in demand.holders]
    after = [(loads[d] + (n + 1) * further, at) for at, (d, n) in enumerate(zip(demand.lacking, counts, strict=True))]
    heapq.heapify(after)
    for _ in range(demand.size - sum(counts) - by_holders):
        load, at = after[0]
        if _level(held, demand.size + (by_holders + 1) * further) < load:
            by_holders += 1
        else:
            counts[at] += 1
            heapq.heapreplace(after, (load + further, at))
    return tuple(counts)


def _sent(demand: Demand, counts: Sequence[int], loads: _Loads) -> list[float]:
    """What the holders of a class, and then those that lack it, send if the latter pass on these `counts` of
    elements.
    """
    rest = demand.size * len(demand.lacking) - sum(counts) * demand.further
    held = _pour([loads[device] for device in demand.holders], rest)
    return [*held, *(float(count * demand.further) for count in counts)]
