"""The pool of buffers: reuse, the best fit, and never more than the limit."""

from __future__ import annotations

import random

import numpy as np

from reshard.runtime.on_mpi.node.arena import Pool


def base(array: np.ndarray) -> np.ndarray:
    while array.base is not None:
        array = array.base
    return array


def test_a_buffer_that_was_given_back_is_used_again():
    pool = Pool()
    pool.limit(1000)
    first = pool.take(100)
    pool.give(first[10:].view(np.uint8).reshape(9, 10))
    assert base(pool.take(90)) is base(first)
    assert base(pool.take(90)) is not base(first)


def test_the_smallest_buffer_that_fits_is_used():
    pool = Pool()
    pool.limit(1000)
    taken = [pool.take(size) for size in (300, 100, 200)]
    for buffer in taken:
        pool.give(buffer)
    assert base(pool.take(150)) is base(taken[2])


def test_a_buffer_of_more_than_twice_the_size_is_spared_if_there_is_no_room():
    pool = Pool()
    pool.limit(300)
    large = pool.take(300)
    pool.give(large)
    small = pool.take(290)
    assert base(small) is base(large)
    pool.give(small)
    pool.limit(100)
    assert pool.take(10).size == 10
    assert base(pool.take(10)) is not base(large)


def test_all_buffers_stay_within_the_limit():
    choose, pool, live = random.Random(7), Pool(), []
    pool.limit(500)
    for _ in range(2000):
        used = sum(base(buffer).size for buffer in live)
        size = choose.randint(0, 120)
        if live and (choose.random() < 0.5 or used + size > 500):
            pool.give(live.pop(choose.randrange(len(live))))
        else:
            live.append(pool.take(size))
            assert live[-1].size == size
            assert len({id(base(buffer)) for buffer in live}) == len(live), "one buffer for two"
        idle = sum(buffer.size for buffer in pool._idle)
        used = sum(base(buffer).size for buffer in live)
        assert used == pool._used
        assert used + idle <= max(500, used)
