"""Messages joined by node, on pretended nodes, against the oracle (see `tests.mpi.by_node`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.runtime.on_mpi.wire.by_node import table_bytes


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_joined_messages(ranks: int, tmp_path: Path):
    running.check("by_node.joined", ranks, tmp_path)


def test_a_rank_tells_its_node_what_goes_to_each_rank_and_comes_from_each_node():
    assert table_bytes((0, 0, 1, 1)) == 6 * 8
