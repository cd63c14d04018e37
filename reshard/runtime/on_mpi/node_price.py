"""Whether messages between nodes are better joined by node: fewer messages against more copies.

a slab on 1,024 ranks in 16 nodes, 240 KiB a rank        each rank by itself     joined by node
messages that a rank sends                               960                     1
time, at 2 us each and 2 us to handle one                3.8 ms                  0.2 ms: copies, and waits
"""

from __future__ import annotations

import math
from typing import NamedTuple

from reshard.lower.to_mpi import most_stripes, number_of_groups, ranks_of_nodes
from reshard.runtime.on_mpi.wire.messages import DIRECT
from reshard.synth import Network

FREE = 4 << 20
"""Bytes a rank, in the memory that its node keeps, that a call without a budget may use uncounted."""

_LATENCY, _BANDWIDTH = 2e-6, 2e9  # Seconds, and bytes/second of a rank, between nodes whose network is unknown.
_HANDLING = 2e-6  # Seconds that a message takes a rank's processor, measured: to post, test and complete both ends.
_COPY = 5e9  # Bytes/second that one core copies, where the network has no inner link.
_WAITS = 60e-6  # Seconds of the four waits for the other ranks of the node.


class NodeLoad(NamedTuple):
    """What a rank receives if every message is sent separately: from other nodes in messages, and from its own."""

    messages: int
    far_bytes: int
    near_bytes: int


def count_stripe_bytes(load: NodeLoad, nodes: tuple[int, ...]) -> tuple[int, int]:
    """The bytes that a rank carries in one direction, and those of a stripe, if all ranks have the same load."""
    every = ranks_of_nodes(nodes)
    count = (len(every) - 1) * number_of_groups(nodes)
    each = -(-load.far_bytes * max(map(len, every)) // max(1, count))
    return each * most_stripes(nodes), each


def is_aggregated(load: NodeLoad, nodes: tuple[int, ...], room: int, network: Network | None) -> bool:
    """Whether messages joined by node are faster, and fit into `room` bytes a rank.

    >>> slab, nodes = NodeLoad(960, 240 << 10, 16 << 10), tuple(rank // 64 for rank in range(1024))
    >>> is_aggregated(slab, nodes, FREE, None), is_aggregated(slab, nodes, 64 << 10, None)
    (True, False)
    """
    carried, each = count_stripe_bytes(load, nodes)
    fits = 2 * carried + load.near_bytes <= room and each <= DIRECT
    if not fits or load.messages <= most_stripes(nodes):
        return False
    link = None if network is None else network.crossing
    latency, bandwidth = (_LATENCY, _BANDWIDTH) if link is None else (link.latency, link.bandwidth)
    copy = _COPY if network is None or network.inner is None else network.inner.bandwidth
    alone = load.messages * (latency + _HANDLING) + load.far_bytes / bandwidth
    together = most_stripes(nodes) * (latency + _HANDLING) + carried / bandwidth
    copies = 2 * (load.far_bytes + load.near_bytes) / copy
    return together + copies + _WAITS + 2 * latency * math.log2(len(nodes)) < alone
