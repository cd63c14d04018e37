"""Networks: their links and wires, presets and their citations, JSON, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import NetworkError
from reshard.synth.network import LAUNCH_BYTES, PRESETS, Network, launch_bytes
from reshard.synth.wires import Link, Torus
from reshard.types.mesh import Mesh

A, B, C = Link(1e-6, 1e11), Link(1e-5, 1e10), Link(1e-4, 1e9)
TWO = Network("two", inner=A, outer=B, domain=8)


def sides(network: Network, mesh: Mesh) -> dict[str, str]:
    names = {network.inner: "inner", network.outer: "outer"}
    return {axis: names.get(link, "own") for axis, link in network.links(mesh).items()}


# ---- which link an axis gets -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "mesh", "inner", "outer"),
    [
        ("h100", "x=8", "x", ""),
        ("h100", "x=2,y=4", "x y", ""),
        ("h100", "x=2,y=2,z=2", "x y z", ""),
        ("h100", "x=16", "", "x"),
        ("h100", "dp=16,tp=8", "tp", "dp"),
        ("h100", "tp=8,dp=16", "", "tp dp"),
        ("h100", "pp=2,dp=4,tp=4", "tp", "pp dp"),
        ("h100", "node=2,tp=4", "tp", "node"),
        ("gb200-nvl72", "dp=9,tp=8", "dp tp", ""),
        ("gb200-nvl72", "dp=10,tp=8", "tp", "dp"),
        ("tpu-v5p", "x=512", "x", ""),
        ("tpu-v5p", "x=8,y=8,z=8", "x y z", ""),
        ("tpu-v5e", "x=8,y=8,z=8", "y z", "x"),
        ("tpu-v5e", "x=16,y=16", "x y", ""),
        ("tpu-v5p", "dcn=64,x=16,y=32,z=32", "y z", "dcn x"),
        ("tpu-7x", "dcn=64,x=16,y=32,z=32", "x y z", "dcn"),
        ("tpu-v4", "x=4,slice_a=2,y=4", "x y", "slice_a"),
        ("tpu-v4", "DCN=2,Pods=2,host0=2,Node=2,slices=2,x=2", "x", "DCN Pods host0 Node slices"),
        ("tpu-v4", "replica=2,expod=2", "replica expod", ""),
        ("shm-mpi", "x=4", "x", ""),
        ("ethernet-10g", "node=2,x=1", "", "node x"),
        ("h100", "", "", ""),
    ],
)
def test_links_of_presets(preset: str, mesh: str, inner: str, outer: str) -> None:
    by_axis = sides(Network.preset(preset), Mesh.parse(mesh))
    assert list(by_axis) == list(Mesh.parse(mesh).axes)
    assert [a for a, side in by_axis.items() if side == "inner"] == inner.split()
    assert [a for a, side in by_axis.items() if side == "outer"] == outer.split()


def test_own_axis_wins() -> None:
    network = TWO.with_axes({"x": C, "dcn": (0, 5)})
    assert network.links(Mesh(dcn=2, x=2, y=2)) == {"dcn": Link(0, 5), "x": C, "y": A}
    assert network.with_axes({"x": B}).links(Mesh(x=2)) == {"x": B}
    assert TWO.axes == ()


# ---- values ----------------------------------------------------------------------------------------


def test_equal_hashable_immutable() -> None:
    one = Network("n", A, B, 4, {"x": C, "y": A}, "s")
    two = Network("n", (1e-6, 1e11), (1e-5, 1e10), 4, {"y": A, "x": (1e-4, 1e9)}, "s")
    assert one == two and hash(one) == hash(two) and {one: 1}[two] == 1
    assert one != dataclasses.replace(one, domain=5)
    assert len(set(PRESETS.values())) == len(PRESETS)
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.domain = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert str(one) == "n" and Link(1, 2) == Link(1.0, 2.0)


finite = st.floats(0, 1e300, allow_nan=False)
shapes = st.sampled_from(("switch", "ring", "line"))
links = st.builds(Link, finite, finite.filter(lambda value: value > 0), shapes, st.none() | finite)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,6}", fullmatch=True)
texts = st.text(min_size=1).filter(lambda text: bool(text.strip()))
networks = st.builds(
    Network,
    name=texts,
    inner=st.none() | links,
    outer=links,
    domain=st.integers(1, 2**70),
    axes=st.dictionaries(names, links, max_size=4),
    source=texts,
)


@settings(max_examples=25)
@given(networks)
def test_json_round_trip(network: Network) -> None:
    again = Network.from_json(network.to_json())
    assert again == network and hash(again) == hash(network)
    assert again.to_json() == network.to_json()


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip_of_presets(name: str, tmp_path: Path) -> None:
    file = tmp_path / "network.json"
    file.write_text(PRESETS[name].to_json(), encoding="utf-8")
    assert Network.load(file) == Network.load(str(file)) == Network.load(name) == PRESETS[name]


# ---- rejections ------------------------------------------------------------------------------------


def bad_json(**fields: object) -> Callable[[], object]:
    shown = {"name": "n", "outer": {"latency": 0, "bandwidth": 1}, **fields}
    return lambda: Network.from_json(json.dumps(shown))


UNTYPED: Any = Network
UNTYPED_LINK: Any = Link

REJECTED: dict[str, tuple[Callable[[], object], str]] = {
    "negative latency": (lambda: Link(-1e-6, 1), "latency -1e-06 is negative: give seconds, at least 0"),
    "latency nan": (lambda: Link(float("nan"), 1), "latency nan is not a finite number: give seconds"),
    "latency text": (lambda: UNTYPED_LINK("1us", 1), "latency '1us' is not a number: give seconds"),
    "latency bool": (lambda: UNTYPED_LINK(True, 1), "latency True is not a number"),
    "bandwidth zero": (lambda: Link(0, 0), "bandwidth 0.0 is not positive: give bytes/second, above 0"),
    "bandwidth negative": (lambda: Link(0, -5), "bandwidth -5.0 is not positive"),
    "bandwidth infinite": (lambda: Link(0, float("inf")), "bandwidth inf is not a finite number"),
    "bandwidth huge": (lambda: Link(0, 10**400), "bandwidth .* is not a finite number"),
    "bandwidth none": (lambda: UNTYPED_LINK(0, None), "bandwidth None is not a number"),
    "no link": (lambda: Network("n"), "network 'n' has no link at all: give inner, outer or axes"),
    "domain zero": (lambda: Network("n", A, domain=0), "domain 0: give how many devices share the inner fabric"),
    "domain fraction": (lambda: UNTYPED("n", A, domain=2.5), "domain 2.5: .* a whole number"),
    "domain bool": (lambda: Network("n", A, domain=True), "domain True: "),
    "no name": (lambda: Network(" ", A), "name ' ' of a network: give a text"),
    "source": (lambda: UNTYPED("n", A, source=None), "source None of a network: give a text"),
    "sub-axis": (lambda: Network.of({"x:(1)2": A}), r"bad axis name 'x:\(1\)2' in a network: .* without sub-axes"),
    "axis number": (lambda: UNTYPED.of({3: A}), "bad axis name 3 in a network"),
    "axes number": (lambda: UNTYPED("n", axes=3), "axes 3: give a mapping from axis name to Link"),
    "axis twice": (lambda: Network("n", axes=(("x", A), ("x", B))), "an axis occurs twice in .*; give each axis one"),
    "link triple": (lambda: UNTYPED.of({"x": (1, 2, 3)}), r"axis 'x': \(1, 2, 3\) is not a link; give a Link or"),
    "link number": (lambda: UNTYPED("n", inner=9e10), "inner: 90000000000.0 is not a link; give a Link or"),
    "link in axis": (lambda: Network.of({"x": (1, -2)}), "axis 'x': bandwidth -2.0 is not positive"),
    "preset": (lambda: Network.preset("tpu-v9"), "unknown network 'tpu-v9': the presets are tpu-v4, .*ethernet-100g"),
    "no such file": (lambda: Network.load("no/such.json"), "'no/such.json' is not a preset and .*; give one of tpu-v4"),
    "a folder": (lambda: Network.load(Path(__file__).parent), "cannot be read as a file"),
    "null byte": (lambda: Network.load("\0"), "is not a preset and cannot be read"),
    "no link: name": (
        lambda: Network.preset("shm-mpi").links(Mesh(dcn=2, x=4)),
        "'shm-mpi' has no link for axis 'dcn' of mesh <dcn=2, x=4>: its name starts .*; add one: network.with_axes",
    ),
    "no link: size": (
        lambda: Network.preset("shm-mpi").links(Mesh(x=2, y=1024)),
        "no link for axis 'x' of mesh <x=2, y=1024>: with .* it spans 2048 devices, the inner domain 1024, .* add one",
    ),
    "no link: of": (
        lambda: Network.of({"x": A, "z": A}).links(Mesh(x=2, y=4)),
        "no link for axis 'y' of mesh <x=2, y=4>: it lists only x, z, .* add one: .*{'y': Link",
    ),
    "JSON syntax": (lambda: Network.from_json("{"), r"network JSON is not JSON \(.*\); write it with Network.to_json"),
    "JSON nested": (lambda: Network.from_json("[" * 100_000), "network JSON is not JSON"),
    "JSON bytes": (lambda: UNTYPED.from_json(None), "network JSON is not JSON"),
    "JSON list": (lambda: Network.from_json("[1]"), "network JSON: .* is not a JSON object"),
    "JSON empty": (lambda: Network.from_json("{}"), "network JSON: the outermost value: name is missing"),
    "JSON key": (
        bad_json(iner=None),
        "network JSON: the outermost value: unknown key iner; the keys are axes, between, domain, inner",
    ),
    "JSON twice": (lambda: Network.from_json('{"name": "a", "name": "b"}'), "JSON: a key occurs twice in .*'name'"),
    "JSON name": (bad_json(name=3), "network JSON: name 3 of a network: give a text"),
    "JSON domain": (bad_json(domain="8"), "network JSON: domain '8': give how many"),
    "JSON link": (bad_json(inner=[1, 2]), "network JSON: inner: .* is not a JSON object"),
    "JSON half": (bad_json(inner={"latency": 0}), "network JSON: inner: bandwidth is missing; its keys are .*latency"),
    "JSON unit": (
        bad_json(inner={"latency": 0, "bandwidth": 1, "unit": "GB"}),
        "inner: unknown key unit; the keys are bandwidth, issue, latency",
    ),
    "JSON value": (bad_json(inner={"latency": "1us", "bandwidth": 1}), "inner: latency '1us' is not a number"),
    "JSON nan": (bad_json(inner={"latency": 0, "bandwidth": float("nan")}), "inner: bandwidth nan is not a finite"),
    "JSON axes": (bad_json(axes=[]), r"axes: '\[\]' is not a JSON object"),
    "JSON null axis": (bad_json(axes={"x": None}), "axis 'x': 'None' is not a JSON object"),
    "JSON axis name": (bad_json(axes={"2x": {"latency": 0, "bandwidth": 1}}), "bad axis name '2x' in a network"),
    "torus axes": (lambda: Torus(axes=0), "axes 0 of a torus: give a whole number, 1 to 6"),
    "torus wrap": (lambda: Torus(wrap=-1), "wrap -1 of a torus"),
    "torus cubes": (lambda: Torus(cubes=1), "torus cubes 1: give True or False"),  # pyright: ignore[reportArgumentType]
    "torus shape zero": (lambda: Torus(shape=(4, 0)), r"shape \(4, 0\) of a torus: give the sizes"),
    "torus shape text": (lambda: Torus(shape="4x4"), "shape '4x4' of a torus"),  # pyright: ignore[reportArgumentType]
    "torus shape dict": (lambda: Torus(shape={}), r"shape {} of a torus: give the sizes"),  # pyright: ignore[reportArgumentType]
    "link shape": (lambda: Link(0, 1, "star"), "shape 'star' of a link: give one of switch, ring, line"),
    "network torus": (lambda: Network("n", (0, 1), torus=3), "torus 3 of a network: give a Torus"),  # pyright: ignore[reportArgumentType]
    "torus without links": (
        lambda: Network("n", outer=(0, 1), torus=Torus()),
        "how inner links are wired, and there is none",
    ),
    "JSON torus": (
        lambda: Network.from_json('{"name": "n", "torus": {"axis": 3}}'),
        "torus: unknown key axis; the keys are",
    ),
    "torus size": (
        lambda: Network("n", (0, 1), domain=64, torus=Torus(shape=(4, 4))).links(Mesh(x=8)),
        "the torus 4x4 has 16 devices, but the inner axes of the mesh have 8; give the shape of the slice",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_rejections(case: str) -> None:
    build, message = REJECTED[case]
    with pytest.raises(NetworkError, match=message):
        build()


def test_errors_of_a_file_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "lab.json"
    file.write_text('{"name": "lab"}', encoding="utf-8")
    with pytest.raises(NetworkError, match=r"network file '.*lab\.json': network 'lab' has no link at all"):
        Network.load(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(NetworkError, match=r"lab\.json' is not a preset and cannot be read as a file"):
        Network.load(file)


def test_the_cost_of_a_launch() -> None:
    """The bytes that the link with the largest product carries during its latency."""
    assert launch_bytes(None) == LAUNCH_BYTES
    network = Network("two", inner=(1e-6, 1e9), outer=(1e-5, 1e8), domain=2)
    assert launch_bytes(network) == pytest.approx(1000, abs=1)
    by_axis = Network("axes", axes={"x": (1e-6, 3e9), "y": (1e-3, 1e5)})
    assert launch_bytes(by_axis) == pytest.approx(3000, abs=1)


# ---- The presets: their figures, their citations, and their table in the docs ----

DOC = Path(__file__).parents[2] / "docs" / "explanation" / "networks.md"
WANTED = "tpu-v4 tpu-v5e tpu-v5p tpu-v6e tpu-7x h100 h200 b200 gb200-nvl72 shm-mpi ethernet-10g ethernet-100g"


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
    inner = network.inner
    issue = "-" if inner is None else f"{(inner.latency if inner.issue is None else inner.issue) * 1e6:g}"
    return [shown[0], issue, *shown[1:], str(network.domain) if inner else "-"]


@pytest.mark.parametrize("name", PRESETS)
def test_doc_table_has_the_figures_of_the_code(name: str) -> None:
    row = table()[name]
    assert row == cells(PRESETS[name])


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


# ---- Links: what is one, and how it is shown ----


@pytest.mark.filterwarnings("error")
def test_a_masked_number_is_refused_without_a_warning():
    with pytest.raises(NetworkError, match=r"latency .* is not a number: give seconds"):
        Link(np.ma.masked, 9e10)  # pyright: ignore[reportArgumentType]
