"""Synchronization of a node's ranks: a small shared window in which they post words, wait, and report failure.

    member 0   arrived | failed | words of even syncs | words of odd syncs
    member 1   arrived | failed | words of even syncs | words of odd syncs
    ...
    member 0   text of its failure
    ...

A member posts its words and then increments `arrived`. Two sets of words suffice: nobody posts for sync n + 2 before
all members have arrived at n + 1, which each does after it has read the words of n. Waiting here yields the core;
MPICH's own barrier spins, which takes time from ranks that are still copying.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from mpi4py import MPI

WORDS = 72
"""The number of 64-bit words that a member can post in one sync."""

_TEXT = 2048
_WORD = 8
_LINE = 2 + 2 * WORDS  # Not a multiple of a cache line, but no two members' counters share one.


class NodeSync:
    """One member's view of the window; members are numbered by their rank in `node`, this node's communicator."""

    def __init__(self, node: MPI.Intracomm) -> None:
        self.size = node.size
        self.me = node.rank
        nbytes = node.size * (_LINE * _WORD + _TEXT)
        self._window = MPI.Win.Allocate_shared(nbytes if node.rank == 0 else 0, _WORD, comm=node)
        memory = memoryview(cast(Any, self._window.Shared_query(0)[0]))
        split = node.size * _LINE * _WORD
        self._words = memory[:split].cast("B").cast("q")
        self._text = memory[split:].cast("B")
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self._synced = 0
        if node.rank == 0:
            self._words[:] = memoryview(bytes(split)).cast("q")
        self._fence()
        node.Barrier()

    def post(self, words: Sequence[int]) -> None:
        """Posts words for the next sync, and this member's arrival at it."""
        self._synced += 1
        at = self._at(self.me)
        for number, word in enumerate(words, at):
            self._words[number] = word
        self._fence()
        self._words[self.me * _LINE] = self._synced

    def missing(self) -> list[int]:
        """The members that have not arrived at this member's last sync."""
        return [member for member in range(self.size) if self._words[member * _LINE] < self._synced]

    def complete(self) -> bool:
        """Whether all members have arrived; what each wrote before that is then visible here."""
        for member in range(self.size):
            if self._words[member * _LINE] < self._synced:
                return False
        self._fence()
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
        self._fence()
        self._words[self.me * _LINE + 1] = len(message) + 1

    def failed(self) -> dict[int, str]:
        """The texts of the failures reported so far, by member."""
        if not any(self._words[1 : self.size * _LINE : _LINE]):
            return {}
        counters = {member: self._words[member * _LINE + 1] for member in range(self.size)}
        lengths = {member: counter - 1 for member, counter in counters.items() if counter}
        texts = {member: bytes(self._text[member * _TEXT :][:length]) for member, length in lengths.items()}
        return {member: text.decode(errors="replace") for member, text in texts.items()}

    def free(self) -> None:
        """Frees the window; collective among the members."""
        self._words.release()
        self._text.release()
        self._window.Unlock_all()
        self._window.Free()

    def _at(self, member: int) -> int:
        return member * _LINE + 2 + self._synced % 2 * WORDS

    def _fence(self) -> None:
        # A full memory fence: stores before it are visible to other members before stores after it.
        self._window.Sync()
