"""Words, arrivals and failures of a node's ranks, see `tests.mpi.modules`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.runtime.on_mpi.node.node_sync import WORDS, NodeSync, sync_bytes


@pytest.mark.slow
def test_three_ranks(tmp_path: Path):
    running.check("modules.node_sync", 3, tmp_path)


def alone() -> NodeSync:
    return NodeSync(1, 0, np.zeros(sync_bytes(1), np.uint8))


def test_all_words_of_a_sync_are_kept_until_the_next_but_one():
    sync = alone()
    for number in range(5):
        words = list(range(number, number + WORDS))
        sync.post(words)
        assert sync.complete()
        assert sync.missing() == []
        assert sync.read(0, WORDS) == words


def test_a_text_of_no_words_is_a_failure_too():
    sync = alone()
    assert sync.failed() == {}
    sync.fail("")
    assert sync.failed() == {0: ""}
    sync.fail("a longer text")
    assert sync.failed() == {0: "a longer text"}
