"""`calibrate`: measures a communicator's latencies and bandwidths as a `Network` to plan for."""

from __future__ import annotations

from reshard.runtime.on_mpi.collective import collective
from reshard.runtime.on_mpi.measure import LinkMeasurement, measure
from reshard.runtime.on_mpi.team import TIME_LIMIT, Comm, Team
from reshard.synth import Link, Network


def calibrate(comm: Comm, name: str = "calibrated", limit: float = TIME_LIMIT) -> Network:
    """Measures the network of a communicator: `inner` within a node, `outer` between nodes, `domain` ranks per node.

    All ranks call it and get the same network, in seconds and bytes per second. On a single node `outer` equals
    `inner`. Write `network.to_json()` to a file for `Network.load`, `--network` and `network=`.

    >>> from mpi4py import MPI
    >>> network = calibrate(MPI.COMM_WORLD, "here")
    >>> network.name, network.domain == MPI.COMM_WORLD.size
    ('here', True)
    """

    def prepare(_: Team) -> None:
        Network(name, Link(0.0, 1.0))  # Checks the name.

    with collective(comm, limit, prepare, lambda _: "calibrate") as (team, watch, _):
        inner, outer = (_link(measure(team, watch, near)) for near in (True, False))
    domain = min(team.nodes.count(node) for node in set(team.nodes))
    nodes = len(set(team.nodes))
    source = f"measured on {team.size} ranks on {nodes} node{'s' if nodes > 1 else ''}, all ranks exchanging at once"
    return Network(name, inner, outer or inner, domain, source=source)


def _link(measured: LinkMeasurement | None) -> Link | None:
    return None if measured is None else Link(measured.latency, measured.bandwidth)
