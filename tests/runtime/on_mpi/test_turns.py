"""Turns of threads on a communicator: one at a time, and overlapping calls know it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.errors import AgreementError, RankError
from reshard.runtime.on_mpi import turns as module
from reshard.runtime.on_mpi.turns import Turn, Turns, turns_of


@contextmanager
def turn_on(turns: Turns, seconds: float = 5) -> Iterator[Turn]:
    turn = turns.take(time.monotonic() + seconds)
    try:
        yield turn
    finally:
        turn.release()


def test_one_thread_has_the_turn_as_often_as_it_likes():
    turns = Turns()
    with turn_on(turns) as outer, turn_on(turns) as inner:
        assert not outer.overlapped and not inner.overlapped
    with turn_on(turns) as outer:
        assert not outer.overlapped


def test_both_of_two_overlapping_threads_know_it():
    turns = Turns()
    waited: list[bool] = []

    def other() -> None:
        with turn_on(turns) as turn:
            waited.append(turn.overlapped)

    with turn_on(turns) as turn:
        assert not turn.overlapped
        thread = threading.Thread(target=other)
        thread.start()
        while not turn.overlapped:
            time.sleep(0.001)
        assert not waited
    thread.join()
    assert waited == [True]
    with turn_on(turns) as turn:
        assert not turn.overlapped


def test_a_thread_waits_until_its_deadline():
    turns = Turns()
    errors: list[Exception] = []

    def other() -> None:
        try:
            with turn_on(turns, 0.05):
                pass
        except RankError as error:
            errors.append(error)

    with turn_on(turns):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "another thread of this rank is in a call" in str(errors[0])


def test_communicators_have_their_own_turns_and_one_lock_if_mpi_takes_one_thread(monkeypatch: pytest.MonkeyPatch):
    one, other = MPI.COMM_SELF.Dup(), MPI.COMM_SELF.Dup()
    assert turns_of(one) is turns_of(one) is not turns_of(other)
    assert turns_of(one)._lock is not turns_of(other)._lock
    monkeypatch.setattr(module, "_LEVEL", MPI.THREAD_SERIALIZED)
    one, other = MPI.COMM_SELF.Dup(), MPI.COMM_SELF.Dup()
    assert turns_of(one) is not turns_of(other)
    assert turns_of(one)._lock is turns_of(other)._lock
    monkeypatch.setattr(module, "_LEVEL", MPI.THREAD_FUNNELED)
    turns_of(one)
    monkeypatch.setattr(module.MPI, "Is_thread_main", lambda: False)
    with pytest.raises(AgreementError, match="main thread"):
        turns_of(one)
