"""The network of a call: what the environment names, and the text by which ranks tell networks apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.runtime.platform_network import VARIABLE, name_network, spell_network
from reshard.synth import Network

LAB, SLOWER = (Network.of({"x": (1e-6, bandwidth)}, "lab") for bandwidth in (9e10, 8e10))


def test_what_the_environment_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "h100")
    assert (name_network(None), name_network("none"), name_network(LAB)) == ("h100", "none", LAB)
    monkeypatch.setenv(VARIABLE, "")
    assert name_network(None) is None


def test_a_preset_is_its_name_and_any_other_network_its_figures(tmp_path: Path):
    """Each node has files of its own, so the path of one says nothing."""
    assert spell_network(Network.preset("h100")) == "h100"
    assert spell_network(Network("h100", outer=(0, 1))) != "h100"
    file = tmp_path / "lab.json"
    for network in (LAB, SLOWER):
        file.write_text(network.to_json())
        assert name_network(str(file)) == network
    assert spell_network(LAB) != spell_network(SLOWER)


def test_what_is_no_network_is_left_to_whoever_reads_it():
    assert name_network("lab") == "lab" and name_network("\x00") == "\x00"
