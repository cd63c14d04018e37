"""Messages through a view against the elements that devices hold and need, one by one."""

import random
from collections import Counter
from itertools import product

import numpy as np

from reshard.geometry.view_boxes import StridedBox
from reshard.geometry.view_messages import view_messages, view_stats
from tests.view_oracle import KEPT, PADDING, cut, random_case


def places(box: StridedBox) -> list[tuple[int, int]]:
    """The places of every element in both flat tiles."""
    return [
        (
            box.src + sum(v * s for v, s in zip(at, box.src_strides, strict=True)),
            box.dst + sum(v * s for v, s in zip(at, box.dst_strides, strict=True)),
        )
        for at in product(*map(range, box.extents))
    ]


def test_every_needed_element_is_sent_once_by_a_device_that_has_it():
    for seed in range(250):
        case = random_case(random.Random(seed), most=96)
        source, target = case.move.source, case.move.target
        index = np.arange(int(np.prod(source.shape))).reshape(source.shape)
        held, wanted = cut(source, index), cut(target, case.reference(index))
        arrived = {device: np.full(tile.size, PADDING) for device, tile in wanted.items()}
        times = {device: Counter() for device in wanted}
        messages = view_messages(source, target, case.move.view)
        for message in messages:
            flat = held[message.sender].reshape(-1)
            every = [place for box in message.boxes for place in places(box)]
            assert len(every) == message.elements
            for src, dst in every:
                arrived[message.receiver][dst] = flat[src]
                times[message.receiver][dst] += 1
        received = {device: 0 for device in wanted}
        for device, tile in wanted.items():
            needed = (tile.reshape(-1) != PADDING) & (tile.reshape(-1) < KEPT)
            assert np.array_equal(arrived[device][needed], tile.reshape(-1)[needed]), (seed, device)
            assert set(times[device]) == set(np.flatnonzero(needed)) and set(times[device].values()) <= {1}
            own = set(held[device].reshape(-1)) - {PADDING}
            received[device] = sum(value not in own for value in tile.reshape(-1)[needed])
        assert view_stats(source, target, case.move.view).received == max(received.values()), seed


def test_rounds_are_the_most_messages_of_a_device():
    for seed in range(60):
        case = random_case(random.Random(seed), most=96)
        both = (case.move.source, case.move.target, case.move.view)
        crossing = [m for m in view_messages(*both) if m.sender != m.receiver]
        loads = [*Counter(m.sender for m in crossing).values(), *Counter(m.receiver for m in crossing).values()]
        stats = view_stats(*both)
        assert (stats.rounds, stats.message) == (max(loads, default=0), max((m.elements for m in crossing), default=0))
        assert stats.staged or all(next(m.boxes).one_run for m in crossing)
