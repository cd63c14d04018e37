"""The presets: their figures, their citations, and their table in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reshard.synth.network import PRESETS, Link, Network
from reshard.synth.presets import FIGURES
from reshard.types.mesh import Mesh

DOC = Path(__file__).parents[2] / "docs" / "networks.md"
WANTED = "tpu-v4 tpu-v5e tpu-v5p tpu-v6e tpu-7x h100 h200 b200 gb200-nvl72 shm-mpi ethernet-10g ethernet-100g"


def sides(network: Network, mesh: Mesh) -> dict[str, str]:
    names = {network.inner: "inner", network.outer: "outer"}
    return {axis: names.get(link, "own") for axis, link in network.links(mesh).items()}


def test_presets_are_complete() -> None:
    assert list(PRESETS) == WANTED.split()
    assert all(network.name == name for name, network in PRESETS.items())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_positive_and_cited(name: str) -> None:
    network = PRESETS[name]
    links = [link for link in (network.inner, network.outer) if link]
    assert links and network.domain >= 1
    for link in links:
        assert 1e-7 < link.latency < 1e-4 and 1e9 <= link.bandwidth <= 1e12
    if network.inner and network.outer:
        assert network.inner.bandwidth > network.outer.bandwidth
        assert network.inner.latency < network.outer.latency
    bandwidth, latency = network.source.split("latency: ")
    for text in (bandwidth, latency):
        assert re.search(r"https?://|IEEE|measured|assumed", text), f"{name} does not say where {text!r} is from"


def table() -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in DOC.read_text().splitlines()]
    return {row[0].strip("`"): row[1:] for row in rows if len(row) == 7 and row[0].startswith("`")}


def cells(network: Network) -> list[str]:
    shown: list[str] = []
    for link in (network.inner, network.outer):
        shown += [f"{link.latency * 1e6:g}", f"{link.bandwidth / 1e9:g}"] if link else ["-", "-"]
    return [*shown, str(network.domain) if network.inner else "-"]


def test_doc_table_lists_every_preset() -> None:
    assert list(table()) == list(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_doc_table_has_the_figures_of_the_code(name: str) -> None:
    row = table()[name]
    assert row[:5] == cells(PRESETS[name])
    cited = re.findall(r"\((https?://[^)]*)\)", row[5])
    assert cited == list(dict.fromkeys(re.findall(r"https?://[^\s,;)]+", PRESETS[name].source)))


def test_doc_states_the_rule_as_it_is() -> None:
    for line in DOC.read_text().splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if len(row) == 4 and row[0].startswith("`<"):
            network, mesh = Network.preset(row[1].strip("`")), Mesh.parse(row[0].strip("`"))
            by_axis = sides(network, mesh)
            for side, cell in (("inner", row[2]), ("outer", row[3])):
                assert [a for a in by_axis if by_axis[a] == side] == re.findall(r"`(\w+)`", cell), line


def test_doc_json_loads() -> None:
    (shown,) = re.findall(r"```json\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert Network.from_json(shown).links(Mesh(pp=2, dp=2, tp=4))["pp"] == Link(2e-5, 2.5e9, "ring")


@pytest.mark.parametrize(
    ("name", "inner", "outer", "domain"),
    [
        # 4.5e10 one way, two links of a ring; 9216 chips of two devices each, which share the chip's links.
        ("tpu-v4", 9e10, 6.25e9, 4096),
        ("tpu-7x", 9e10, 6.25e9, 18432),
        ("h100", 4.5e11, 5e10, 8),
        ("ethernet-10g", None, 1.25e9, 1),
    ],
)
def test_figures_by_hand(name: str, inner: float | None, outer: float, domain: int) -> None:
    (figures,) = (f for f in FIGURES if f.name == name)
    assert (figures.inner and figures.inner[1]) == inner
    assert figures.outer is not None and figures.outer[1] == outer
    assert figures.domain == domain == PRESETS[name].domain
