"""Synchronization of a node's ranks: a little shared memory in which they post words, wait, and report failure.

    member 0   arrived | failed | words of even syncs | words of odd syncs
    member 1   arrived | failed | words of even syncs | words of odd syncs
    ...
    whether any member has failed
    member 0   text of its failure
    ...

A member posts its words and then increments `arrived`. Two sets of words suffice: nobody posts for sync n + 2 before
all members have arrived at n + 1, which each does after it has read the words of n. Waiting here yields the core;
MPICH's own barrier spins, which takes time from ranks that are still copying.
"""

from __future__ import annotations

import platform
import threading
from array import array
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from reshard.runtime.on_mpi.copies.strided_copy import Array

WORDS = 72
"""The number of 64-bit words that a member can post in one sync."""

STATES = 8
"""What a rank does in a small move is a number below this; the number of a head is a multiple of it plus that."""

_LOGGED = 6  # The word of a sync's head that says how long the rank's log is.

_TEXT = 2048
_WORD = 8
_ORDERED = platform.machine().lower() in ("x86_64", "amd64")  # These show stores to others in their order.
_LINE = 2 + 2 * WORDS  # Not a multiple of a cache line, but no two members' counters share one.


def sync_bytes(size: int) -> int:
    """The bytes of memory that the ranks of a node of this size need."""
    return size * (_LINE * _WORD + _TEXT) + _WORD


class NodeSync:
    """One member's view of the memory, zeroed at first; members are numbered from 0 to `size` - 1, this one is `me`."""

    def __init__(self, size: int, me: int, memory: Array) -> None:
        self.size = size
        self.me = me
        view = memoryview(cast(Any, memory))
        split = (size * _LINE + 1) * _WORD
        self._words = view[:split].cast("B").cast("q")
        self._text = view[split:].cast("B")
        self._some_failed = size * _LINE
        self._heads = [[member * _LINE + 2 + half * WORDS for member in range(size)] for half in (0, 1)]
        self._arrived = me * _LINE
        self._others = [member * _LINE for member in range(size) if member != me]
        self.synced = 0
        """The number of this member's last sync."""
        lock = threading.Lock()
        lock.acquire()
        self._release, self._acquire = lock.release, lock.acquire

    def post(self, words: Sequence[int]) -> None:
        """Posts words for the next sync, and this member's arrival at it."""
        self.synced += 1
        at = self._at(self.me)
        self._words[at : at + len(words)] = memoryview(array("q", words))
        self.fence()
        self._words[self._arrived] = self.synced

    def post_head(self, number: int, log: int) -> None:
        """Posts what a small move has to say (see `Team.sync`), in less time: the words that nobody reads stay."""
        self.synced = synced = self.synced + 1
        words, at = self._words, self._heads[synced & 1][self.me]
        words[at], words[at + 1], words[at + _LOGGED] = number, -number, log
        if not _ORDERED:
            self.fence()
        words[self._arrived] = synced

    def where_heads_lie(self, looks: int, yields: int) -> list[int]:
        """What compiled code needs to post heads and to wait for those of others: see `Small` in `copies/_stream.c`."""
        start = np.frombuffer(self._words, np.int64).ctypes.data
        return [start, self.size, self.me, _LINE, *(2 + half * WORDS for half in (0, 1)), _LOGGED, looks, yields]

    @property
    def half(self) -> int:
        """Which of two buffers the next sync uses: nobody reads it any more."""
        return (self.synced + 1) % 2

    def common(self, number: int) -> int | None:
        """Of the last complete sync: the bits of all members' states, if the number of all is `number` but for them."""
        words, bits = self._words, 0
        for head in self._heads[self.synced & 1]:
            state = words[head] - number
            if not 0 <= state < STATES:
                return None
            bits |= state
        return bits

    def logs(self) -> list[int]:
        """How long the log of each member was at the last complete sync."""
        words = self._words
        return [words[head + _LOGGED] for head in self._heads[self.synced & 1]]

    @property
    def reported(self) -> bool:
        """Whether some member has reported a failure."""
        return self._words[self._some_failed] != 0

    def missing(self) -> list[int]:
        """The members that have not arrived at this member's last sync."""
        return [member for member in range(self.size) if self._words[member * _LINE] < self.synced]

    def complete(self, looks: int = 1) -> bool:
        """Whether all members have arrived, after this number of looks at each; what each wrote before that is then
        visible here.
        """
        words, synced = self._words, self.synced
        for other in self._others:
            if words[other] < synced:
                for _ in range(looks - 1):
                    if words[other] >= synced:
                        break
                else:
                    return False
        self._release()
        self._acquire()
        return True

    def read(self, member: int, count: int) -> list[int]:
        """The first `count` words that a member posted for the last complete sync."""
        at = self._at(member)
        return list(self._words[at : at + count])

    def fail(self, text: str) -> None:
        """Reports this member's failure to the other members."""
        message = text.encode()[: _TEXT - _WORD]
        at = self.me * _TEXT
        self._text[at : at + len(message)] = message
        self.fence()
        self._words[self._arrived + 1] = len(message) + 1
        self.fence()
        self._words[self._some_failed] = 1

    def failed(self) -> dict[int, str]:
        """The texts of the failures reported so far, by member."""
        if not self.reported:
            return {}
        counters = {member: self._words[member * _LINE + 1] for member in range(self.size)}
        lengths = {member: counter - 1 for member, counter in counters.items() if counter}
        texts = {member: bytes(self._text[member * _TEXT :][:length]) for member, length in lengths.items()}
        return {member: text.decode(errors="replace") for member, text in texts.items()}

    def _at(self, member: int) -> int:
        return member * _LINE + 2 + self.synced % 2 * WORDS

    def fence(self) -> None:
        # Stores before it are visible to other members before stores after it, and loads stay in order likewise: to
        # release a lock and acquire it again is such a barrier, also on processors that reorder stores.
        self._release()
        self._acquire()
