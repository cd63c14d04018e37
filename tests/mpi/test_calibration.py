"""Calibration: measured links become a network, the same on all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.mpi import calibration
from reshard.mpi.calibration import LinkMeasurement
from reshard.synth import Network
from tests.mpi import running

NEAR, FAR = LinkMeasurement(1e-6, 1e10), LinkMeasurement(1e-5, 1e9)


def calibrated(monkeypatch: pytest.MonkeyPatch, nodes: tuple[int, ...], far: LinkMeasurement | None) -> Network:
    """The network of a team with these nodes, whose links are measured as given."""
    team = SimpleNamespace(nodes=nodes, size=len(nodes))
    agreed = nullcontext((team, None, None))
    monkeypatch.setattr(calibration, "collective", lambda *_: agreed)
    monkeypatch.setattr(calibration, "measure", lambda team, watch, near: NEAR if near else far)
    comm: Any = None
    return calibration.calibrate(comm, "mine")


def test_links_within_and_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    network = calibrated(monkeypatch, (0, 0, 0, 1, 1), FAR)
    assert network.inner is not None and network.outer is not None
    assert (network.inner.latency, network.inner.bandwidth) == NEAR[:2]
    assert (network.outer.latency, network.outer.bandwidth) == FAR[:2]
    assert (network.name, network.domain) == ("mine", 2)  # the smallest node
    assert network.source == "measured on 5 ranks on 2 nodes, all ranks exchanging at once"


def test_on_one_node_the_outer_link_is_the_inner_one(monkeypatch: pytest.MonkeyPatch) -> None:
    network = calibrated(monkeypatch, (0, 0, 0), None)
    assert network.outer == network.inner and network.domain == 3
    assert "on 1 node," in str(network.source)


@pytest.mark.slow
def test_calibration_on_ranks(tmp_path: Path) -> None:
    running.check("arrays.calibration", 4, tmp_path)
