"""Threads that compile for the pass: their marks, their results and their errors."""

import pytest

from reshard.jax.xla_pass.compiling_thread import CompilingThread


def test_a_mark_is_that_of_its_own_thread_and_purpose() -> None:
    peaks, fragments = CompilingThread[int]("peaks"), CompilingThread[int]("fragments")
    assert peaks.run(3, lambda: fragments.run(4, lambda: (peaks.mark, fragments.mark))) == (None, 4)
    assert (peaks.mark, fragments.mark) == (None, None)


def test_an_error_is_raised_where_the_thread_was_started() -> None:
    def fails() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        CompilingThread[int]("peaks").run(1, fails)
