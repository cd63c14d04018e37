"""Processes agree on what is new to them before any of it runs.

A compiled move is one program in every process that has some of its devices, and nothing in it says what the other
processes run: two that ask for different targets would exchange bytes and take them for what they are not. So the
processes of a move meet once, before they compile it, in the key-value store of `jax.distributed`:

    process 0   redistribute(x, rows)        comes to the 1st meeting of 0 and 1, asks for rows
    process 1   redistribute(x, columns)     comes to the 1st meeting of 0 and 1, asks for columns; sees that 0 asks for
                                             something else
    both        AgreementError: process 0 asks for rows, process 1 for columns

A meeting is named by its processes and by how many they have had before: all of them make their calls in one order. Its
verdict is written once, by whoever has it first, and all obey what stands there: so all go on, or all raise the same
error, whatever each of them asks for. There are three authors of a verdict: the meeting's first process once all have
come, a process that sees another one ask for something else, there or at a meeting of other processes, and a process
whose time limit is over. What was agreed on costs nothing when it is asked again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh as JaxMesh

from reshard.errors import AgreementError, PlanError, quoted, shortened
from reshard.jax.request import ReshardRequest

LIMIT = 300.0
"""Seconds that a process waits for the others, unless RESHARD_JAX_LIMIT says otherwise: some load data meanwhile."""
_LOOK = 0.2
"""Seconds between two looks at where the others wait."""
_FOLDER = "reshard"
_AGREED = "agreed"


Explain = Callable[[dict[int, str]], str]
"""Makes the line of an error from what each of two processes asks for."""


def explain_asks(asks: dict[int, str]) -> str:
    """What processes ask for, side by side."""
    return "; ".join(f"process {process} asks for {shortened(ask)}" for process, ask in asks.items())


class Store(Protocol):
    """What is used of the client of `jax.distributed`; a missing key, or one that is there, is a `JaxRuntimeError`."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def key_value_try_get(self, key: str) -> str: ...
    def key_value_delete(self, key: str) -> None: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


class Meeting(NamedTuple):
    """Where processes meet for the `number`-th time."""

    processes: tuple[int, ...]
    number: int

    @property
    def verdict(self) -> str:
        return f"{_FOLDER}/{digest_members(self.processes)}/{self.number}/verdict"

    def mark(self, process: int) -> str:
        """The key at which a process says what it asks for, once it has come."""
        return f"{_FOLDER}/{digest_members(self.processes)}/{self.number}/{process}"


@lru_cache(maxsize=64)
def digest_members(processes: tuple[int, ...]) -> str:
    """A short name for some processes."""
    return hashlib.sha256(str(processes).encode()).hexdigest()[:16]


@dataclass
class Agreement:
    """One process's part in all meetings; its number is `process`."""

    store: Store
    process: int
    limit: float = LIMIT
    _met: Counter[tuple[int, ...]] = field(default_factory=Counter[tuple[int, ...]])
    """The meetings of some processes that are over."""
    _known: set[str] = field(default_factory=set[str])
    _last: dict[tuple[int, ...], Meeting] = field(default_factory=dict[tuple[int, ...], Meeting])
    # Two threads would meet others in an order of their own.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def agree(self, processes: set[int], ask: str, *, once: bool = True, explain: Explain = explain_asks) -> None:
        """Returns on all of these processes, or raises `AgreementError` on all: each says what it asks for.

        With `once`, what was agreed on before is not asked again. `explain` makes the line of an error from what two
        processes ask for.
        """
        members = tuple(sorted(processes))
        if len(members) < 2 or self.process not in members:
            return
        subject = hashlib.sha256(f"{members}{ask}".encode()).hexdigest()[:40]
        if once and subject in self._known:
            return
        with self._lock:
            try:
                self._meet(Meeting(members, self._met[members]), ask, explain)
            except jax.errors.JaxRuntimeError as error:
                raise AgreementError(f"the coordination service of jax.distributed does not answer: {error}") from None
            if once:
                self._known.add(subject)

    def _meet(self, meeting: Meeting, ask: str, explain: Explain) -> None:
        place = f"{_FOLDER}/at/{self.process}"
        self.store.key_value_set(place, json.dumps([*meeting, ask]), allow_overwrite=True)
        self.store.key_value_set(meeting.mark(self.process), f"={ask}", allow_overwrite=True)
        deadline = time.monotonic() + self.limit
        try:
            while (verdict := self._read_verdict(meeting, ask, explain)) is None:
                self._refuse_others(meeting, ask, explain)
                if time.monotonic() > deadline:
                    self._refuse_late(meeting, ask)
        finally:
            self.store.key_value_delete(place)
        reason, ended = verdict
        # Its author may not have come to the other meeting yet. A process that waits there would find this one at its
        # next meeting and refuse that, if nothing stood there by then.
        for each in ended:
            if each != meeting:
                self._decide(each, reason, ended)
        self._leave(ended)
        if reason != _AGREED:
            raise AgreementError(reason)
        # All have come here, so all have read what the last meeting of the same processes left behind.
        last, self._last[meeting.processes] = self._last.get(meeting.processes), meeting
        if last is not None:
            self.store.key_value_delete(last.mark(self.process))
            if self.process == last.processes[0]:
                self.store.key_value_delete(last.verdict)

    def _read_verdict(self, meeting: Meeting, ask: str, explain: Explain) -> tuple[str, list[Meeting]] | None:
        """The verdict of a meeting and the meetings that it ends, or None if there is none within a look."""
        first, *others = meeting.processes
        if self.process == first:
            for other in others:
                theirs = self._wait_for(meeting.mark(other))
                if theirs is None:
                    break
                if theirs != f"={ask}":
                    self._decide(meeting, _say_who_differs({first: ask, other: theirs[1:]}, explain), [meeting])
                    break
            else:
                self._decide(meeting, _AGREED, [meeting])
        text = self._wait_for(meeting.verdict)
        if text is None:
            return None
        reason, ended = json.loads(text)
        return reason, [_read_meeting(each) for each in ended]

    def _leave(self, ended: list[Meeting]) -> None:
        """Counts meetings as over. All processes must come to the same counts, or they would never meet there again."""
        for each in ended:
            self._met[each.processes] = max(self._met[each.processes], each.number + 1)

    def _refuse_others(self, meeting: Meeting, ask: str, explain: Explain) -> None:
        """Refuses this meeting if a process asks for something else there, or waits for this one at another."""
        for other in meeting.processes:
            found = None if other == self.process else self._look_up(f"{_FOLDER}/at/{other}")
            if found is None:
                continue
            *there, theirs = json.loads(found)
            elsewhere = _read_meeting(there)
            reason = _say_who_differs({self.process: ask, other: theirs}, explain)
            if elsewhere == meeting and theirs != ask:
                self._decide(meeting, reason, [meeting])
                return
            if elsewhere.processes == meeting.processes or self.process not in elsewhere.processes:
                continue  # It has come, or it waits for others and will come.
            if self._met[elsewhere.processes] > elsewhere.number:
                continue  # It was there with this process, and has left since.
            if self._look_up(elsewhere.verdict) is not None:
                continue  # It is over: what was found is what a process has not cleared away yet.
            if self._look_up(meeting.verdict) is not None:
                return  # The other has been here, and is ahead.
            # Whoever sees these two refuses the same one first, and the other with what stands there: all raise alike.
            first, second = sorted([meeting, elsewhere])
            reason = self._decide(first, reason, [first, second])
            if reason != _AGREED:
                self._decide(second, reason, [first, second])
                self._leave([elsewhere])  # The verdict on `meeting` may be an earlier one, which does not name it.
            return

    def _refuse_late(self, meeting: Meeting, ask: str) -> None:
        late = [each for each in meeting.processes if self._look_up(meeting.mark(each)) is None]
        if not late:
            return  # The last one has come just now, and the first process says so.
        who = f"process {late[0]} has" if len(late) == 1 else f"processes {late} have"
        self._decide(
            meeting,
            f"{who} not asked for what others have within {self.limit:g} s: {shortened(ask)}; nothing was moved. All "
            f"processes that have devices of source or target must make the call; if some are only slow, set "
            f"RESHARD_JAX_LIMIT to more seconds",
            [meeting],
        )

    def _decide(self, meeting: Meeting, reason: str, ended: list[Meeting]) -> str:
        """Writes the verdict of a meeting, unless there is one; the reason that stands there then."""
        try:
            self.store.key_value_set(meeting.verdict, json.dumps([reason, ended]))
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return str(json.loads(self.store.key_value_try_get(meeting.verdict))[0])
        return reason

    def _look_up(self, key: str) -> str | None:
        try:
            return self.store.key_value_try_get(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None

    def _wait_for(self, key: str) -> str | None:
        try:
            return self.store.blocking_key_value_get(key, int(1000 * _LOOK))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None


def _read_meeting(fields: Any) -> Meeting:
    processes, number = fields
    return Meeting(tuple(processes), number)


def _say_who_differs(asks: Mapping[int, str], explain: Explain) -> str:
    return f"the processes do not agree, so nothing was moved: {explain(dict(sorted(asks.items())))}"


def agree_on_moves(moves: Sequence[tuple[ReshardRequest, tuple[int, ...], str]], more: str = "") -> None:
    """Returns on all processes that have devices of these moves, or raises `AgreementError` on all of them.

    A move is a request with the shape and dtype of its array; `more` is what else decides the program that is compiled.
    """
    if jax.process_count() == 1:
        return
    meshes = [end.mesh for request, _, _ in moves for end in request.ends]
    processes = {device.process_index for mesh in meshes if isinstance(mesh, JaxMesh) for device in mesh.devices.flat}
    agree_between(
        processes,
        "; ".join([*filter(None, [more]), *(request.describe(shape, dtype) for request, shape, dtype in moves)]),
    )


def read_time_limit() -> float:
    """The seconds that RESHARD_JAX_LIMIT gives, else `LIMIT`; raises `PlanError` for what is no time."""
    text = os.environ.get("RESHARD_JAX_LIMIT", "").strip()
    try:
        seconds = float(text) if text else LIMIT
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:  # A wait for nan seconds would never end.
        raise PlanError(f"RESHARD_JAX_LIMIT is {quoted(text)}: give a positive number of seconds, or leave it out")
    return seconds


_agreements: list[Agreement] = []
"""That of the present client: there is a new one after a shutdown of `jax.distributed`."""


def find_store() -> Store | None:
    """The key-value store of `jax.distributed`, None where it is not initialized."""
    # jax has no public name for it; orbax and others take it from here as well.
    from jax._src.distributed import global_state

    client: Any = global_state.client
    return client


def agree_between(processes: set[int], ask: str, *, once: bool = True, explain: Explain = explain_asks) -> None:
    """`Agreement.agree` for this process, if `jax.distributed` connects it to others."""
    client = find_store()
    if client is None:
        return
    if not _agreements or _agreements[0].store is not client:
        _agreements[:] = [Agreement(client, jax.process_index(), read_time_limit())]
    _agreements[0].agree(processes, ask, once=once, explain=explain)


_calls = Counter[tuple[int, ...]]()
"""How often the same processes have told each other something: all count alike."""


class JaxProcesses:
    """Processes that tell each other things through the store of `jax.distributed`, by default all of them.

    They make the same calls in the same order.
    """

    def __init__(self, limit: float, members: Sequence[int] | None = None) -> None:
        self._members = tuple(range(jax.process_count())) if members is None else tuple(members)
        self.rank, self.size = self._members.index(jax.process_index()), len(self._members)
        self._folder = f"{_FOLDER}/told/{digest_members(self._members)}"
        self._limit = limit

    def gather(self, mine: str) -> list[str]:
        """What each process gives."""
        client: Any = find_store()
        if self.size == 1 or client is None:
            return [mine]
        number = _calls[self._members]
        _calls[self._members] += 1
        place, before = (f"{self._folder}/{each}" for each in (number, number - 1))
        deadline = time.monotonic() + self._limit
        texts: list[str] = []
        try:
            client.key_value_set(f"{place}/{self.rank}", f"={mine}")
            for process in range(self.size):
                left = max(1, int(1000 * (deadline - time.monotonic())))
                texts.append(str(client.blocking_key_value_get(f"{place}/{process}", left))[1:])
            # All that are here have read what they were told the last time.
            client.key_value_delete(f"{before}/{self.rank}")
        except jax.errors.JaxRuntimeError as error:
            raise AgreementError(
                f"process {self._members[len(texts)]} did not come to the same point within {self._limit:g} s "
                f"({error}); all processes make the same calls in the same order; if some are only slow, give limit= "
                f"or RESHARD_JAX_LIMIT more seconds"
            ) from None
        return texts
