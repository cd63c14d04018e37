"""Queues of requests: their sums say what dealing them one by one gives."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from reshard.geometry import dealing
from reshard.geometry.dealing import Queue, dealt


def test_requests_stay_whole_where_that_loads_nobody_more():
    assert [tuple(s) for s in dealt([6, 6, 6], 4, limit=6)] == [(0, 0, 0, 6), (1, 1, 0, 6), (2, 2, 0, 6)]
    shares = list(dealt([6, 6, 6], 4, limit=5))
    assert [sum(s.high - s.low for s in shares if s.holder == h) for h in range(4)] == [5, 5, 5, 3]
    assert list(dealt([], 3, limit=0)) == []


def random_requests(choose: random.Random) -> list[tuple[int, int]]:
    """Up to seven requests, half of the time all alike."""
    size = choose.randint(1, 6)
    alike = choose.random() < 0.5
    return [(at, size if alike else choose.randint(1, 7)) for at in choose.sample(range(20), choose.randint(0, 7))]


@pytest.mark.parametrize("seed", range(4))
def test_a_queue_knows_what_its_shares_are(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dealing, "_FEW", 2)
    choose = random.Random(seed)
    for _ in range(500):
        requests, gone = random_requests(choose), choose.sample(range(20), choose.randint(0, 6))
        holders, limit = choose.randint(1, 6), choose.randint(0, 20)
        rest = sorted((at, size) for at, size in requests if at not in gone)
        queue = Queue.of(requests).without(gone)
        assert [*zip(queue.listed().positions, queue.sizes(), strict=True)] == rest
        assert [queue.first(number) for number in range(queue.requests + 1)] == list(queue.listed().ends)
        shares = list(dealt([size for _, size in rest], holders, limit))
        sends, parts, sent = Counter(s.holder for s in shares), Counter(s.request for s in shares), Counter()
        for share in shares:
            sent[share.holder] += share.high - share.low
        figures = queue.figures(holders, limit)
        assert figures.sends == tuple(sends[holder] for holder in range(holders))
        assert figures.sent == tuple(sent[holder] for holder in range(holders))
        assert figures.message == max((share.high - share.low for share in shares), default=0)
        assert figures.extra == {rest[at][0]: number - 1 for at, number in parts.items() if number > 1}
        for at, (position, _) in enumerate(rest):
            assert list(queue.shares(position, holders, limit)) == [share for share in shares if share.request == at]


def test_the_requests_of_some_positions_only():
    queue = Queue.of([(2, 6), (5, 3), (7, 6)])
    assert queue.only([7, 2, 4]) == Queue([2, 7], range(0, 18, 6))
    assert not list(queue.shares(4, 2, 9)) and not list(queue.without([5]).shares(5, 2, 9))
