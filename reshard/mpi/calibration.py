"""`calibrate`: a communicator's latencies and bandwidths as a `Network` that plans can be made for."""

from __future__ import annotations

from reshard.runtime.on_mpi.measure import Measured, measure
from reshard.runtime.on_mpi.team import TIME_LIMIT, Comm, team_of
from reshard.synth import Link, Network


def calibrate(comm: Comm, name: str = "calibrated", limit: float = TIME_LIMIT) -> Network:
    """The network of a communicator, measured: `inner` within a node, `outer` between nodes, `domain` ranks a node.

    Seconds and bytes/second, the same on all ranks, of which each must call it. On one node, `outer` is as
    `inner`. Write `network.to_json()` to a file for `Network.load`, `--network` and `network=`.
    """
    team = team_of(comm, limit)
    inner, outer = (_link(measure(team, near)) for near in (True, False))
    domain = min(team.nodes.count(node) for node in set(team.nodes))
    nodes = len(set(team.nodes))
    source = f"measured on {team.size} ranks on {nodes} node{'s' if nodes > 1 else ''}, all ranks exchanging at once"
    return Network(name, inner, outer or inner, domain, source=source)


def _link(found: Measured | None) -> Link | None:
    return None if found is None else Link(found.latency, found.bandwidth)
