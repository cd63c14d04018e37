"""The network of a call: what the environment names, and the text by which ranks tell networks apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.runtime.platform_network import VARIABLE, named, network_text
from reshard.synth import Network

LAB, SLOWER = (Network.of({"x": (1e-6, bandwidth)}, "lab") for bandwidth in (9e10, 8e10))


def test_what_the_environment_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "h100")
    assert (named(None), named("none"), named(LAB)) == ("h100", "none", LAB)
    monkeypatch.setenv(VARIABLE, "")
    assert named(None) is None


def test_a_preset_is_its_name_and_any_other_network_its_figures(tmp_path: Path):
    """Each node has files of its own, so the path of one says nothing."""
    assert network_text("h100") == network_text(Network.preset("h100")) == "h100"
    assert network_text(Network("h100", outer=(0, 1))) != "h100"
    file = tmp_path / "lab.json"
    for network in (LAB, SLOWER):
        file.write_text(network.to_json())
        assert network_text(str(file)) == network_text(network)
    assert network_text(LAB) != network_text(SLOWER)


def test_what_is_no_network_is_quoted():
    assert network_text("lab") == "'lab'" and network_text([7]) == "[7]" and network_text("\x00") == "'\\x00'"
    assert network_text("none") == network_text(None) == "None"
