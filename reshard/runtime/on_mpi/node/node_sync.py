"""The notice board of a node: a small shared window in which its ranks agree, wait and report failure.

    line of a member   [arrived | failed | words of even syncs | words of odd syncs]   then a line of text

A member posts its words, then counts its arrival. Nobody posts for sync n + 2 before all have arrived at
n + 1, which they do after reading the words of n, so two sets of words are enough. Waiting here yields the
core: MPICH's own barrier is busy, and a rank that still copies while others wait then gets less of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from mpi4py import MPI

WORDS = 72
"""How many 64-bit words a member can post in one sync."""

_TEXT = 2048
_WORD = 8
_LINE = 2 + 2 * WORDS  # A multiple of no cache line, but two members' counters are never in one.


class Board:
    """One member's view of the window; members are numbered as in `node`, which has this node's ranks."""

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
        """Shows words to the other members, and counts this one's arrival at the next sync."""
        self._synced += 1
        at = self._at(self.me)
        for number, word in enumerate(words, at):
            self._words[number] = word
        self._fence()
        self._words[self.me * _LINE] = self._synced

    def missing(self) -> list[int]:
        """The members that have not arrived at the sync that this one posted for last."""
        return [member for member in range(self.size) if self._words[member * _LINE] < self._synced]

    def complete(self) -> bool:
        """Whether all have arrived; what they wrote before is then visible here."""
        for member in range(self.size):
            if self._words[member * _LINE] < self._synced:
                return False
        self._fence()
        return True

    def read(self, member: int, count: int) -> list[int]:
        """The words that a member posted for the sync that is complete."""
        at = self._at(member)
        return list(self._words[at : at + count])

    def fail(self, text: str) -> None:
        """Reports this member's failure to the others."""
        message = text.encode()[: _TEXT - _WORD]
        at = self.me * _TEXT
        self._text[at : at + len(message)] = message
        self._fence()
        self._words[self.me * _LINE + 1] = len(message) + 1

    def failed(self) -> dict[int, str]:
        """What went wrong, by member; empty as long as nothing has."""
        lengths = {member: self._words[member * _LINE + 1] for member in range(self.size)}
        found = {member: length - 1 for member, length in lengths.items() if length}
        starts = {member: member * _TEXT for member in found}
        return {m: bytes(self._text[starts[m] : starts[m] + n]).decode(errors="replace") for m, n in found.items()}

    def free(self) -> None:
        """Gives the window back; every member must."""
        self._words.release()
        self._text.release()
        self._window.Unlock_all()
        self._window.Free()

    def _at(self, member: int) -> int:
        return member * _LINE + 2 + self._synced % 2 * WORDS

    def _fence(self) -> None:
        # A full memory fence, and the compiler's too: stores above it are seen before stores below.
        self._window.Sync()
