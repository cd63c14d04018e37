"""Networks: which link an axis gets, the JSON form, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import NetworkError
from reshard.synth.network import LAUNCH_BYTES, PRESETS, Link, Network, launch_bytes
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


@given(st.lists(st.integers(1, 12), max_size=5), st.integers(1, 200))
def test_rule_is_monotone(sizes: list[int], domain: int) -> None:
    """Whatever the mesh, the inner axes are the most minor ones, and exactly those that fit."""
    mesh = Mesh({f"a{i}": size for i, size in enumerate(sizes)})
    inner = [side == "inner" for side in sides(dataclasses.replace(TWO, domain=domain), mesh).values()]
    spans = [Mesh({f"a{i}": size for i, size in enumerate(sizes[at:])}).size for at in range(len(sizes))]
    assert inner == [span <= domain for span in spans] == sorted(inner)


def test_own_axis_wins() -> None:
    network = TWO.with_axes({"x": C, "dcn": (0, 5)})
    assert network.links(Mesh(dcn=2, x=2, y=2)) == {"dcn": Link(0, 5), "x": C, "y": A}
    assert network.with_axes({"x": B}).links(Mesh(x=2)) == {"x": B}
    assert TWO.axes == ()


def test_own_axis_that_the_mesh_lacks_is_no_error() -> None:
    assert Network.of({"x": A, "y": B}).links(Mesh(x=2)) == {"x": A}


def test_network_without_inner_uses_outer() -> None:
    assert Network.uniform(0, 2).links(Mesh(dcn=2, x=1)) == {"dcn": Link(0, 2), "x": Link(0, 2)}


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
links = st.builds(Link, finite, finite.filter(lambda value: value > 0))
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


def test_json_defaults() -> None:
    network = Network.from_json('{"name": "n", "axes": {"x": {"latency": 0, "bandwidth": 1}}}')
    assert network == Network.of({"x": (0, 1)}, name="n")


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
        "inner: unknown key unit; the keys are bandwidth, latency",
    ),
    "JSON value": (bad_json(inner={"latency": "1us", "bandwidth": 1}), "inner: latency '1us' is not a number"),
    "JSON nan": (bad_json(inner={"latency": 0, "bandwidth": float("nan")}), "inner: bandwidth nan is not a finite"),
    "JSON axes": (bad_json(axes=[]), r"axes: '\[\]' is not a JSON object"),
    "JSON null axis": (bad_json(axes={"x": None}), "axis 'x': 'None' is not a JSON object"),
    "JSON axis name": (bad_json(axes={"2x": {"latency": 0, "bandwidth": 1}}), "bad axis name '2x' in a network"),
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
