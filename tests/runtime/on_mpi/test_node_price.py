"""When messages between nodes are joined: many short ones, on networks where a message costs more than the copies."""

from __future__ import annotations

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.runtime.on_mpi.node_price import FREE, NodeLoad, joins, stripe_bytes
from reshard.synth import Network

NODES = tuple(rank // 64 for rank in range(1024))
KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("load", "room", "network", "joined"),
    [
        (NodeLoad(960, 240 * KIB, 16 * KIB), FREE, None, True),
        (NodeLoad(960, 240 * KIB, 16 * KIB), 500 * KIB, None, False),  # no room
        (NodeLoad(15, 240 * KIB, 0), FREE, None, False),  # no more messages than nodes
        (NodeLoad(1, 8, 0), FREE, Network.uniform(1, 1e9), False),  # nothing to join
        (NodeLoad(960, 15 * MIB, 0), 64 * MIB, None, False),  # long messages: copies cost more
        (NodeLoad(960, 15 * MIB, 0), 64 * MIB, Network.uniform(1e-4, 1e9), True),  # unless each is slow to arrive
    ],
)
def test_which_moves_are_joined(load: NodeLoad, room: int, network: Network | None, joined: bool):
    assert joins(load, NODES, room, network) == joined


def test_what_a_rank_carries_is_what_it_sends_if_there_is_a_stripe_for_each():
    assert stripe_bytes(NodeLoad(4, 400, 0), (0, 0, 0, 0, 1, 1, 1, 1)) == (400, 400)
    assert stripe_bytes(NodeLoad(6, 600, 0), (0, 0, 1, 1, 2, 2, 3, 3)) == (800, 400)  # two of three stripes
