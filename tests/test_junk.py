"""Values of the wrong kind at every entry: whatever is given in place of one argument, only `ReshardError` leaves.

A call that takes the value is fine: some junk is a valid argument. What may not happen is another exception, or a
wait for memory or time that no machine has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reshard as rs
from benchmarks.fuzz_inputs import KINDS, Kind, OverTimeError, make_input, try_input
from benchmarks.fuzz_oracle import must
from reshard import hlo
from reshard.doctor import examine
from reshard.doctor.xla_log import LogReport
from reshard.errors import ReshardError
from reshard.geometry import detect
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from reshard.proofs import fewest, instance
from reshard.types import Digit, Dim, Pieces, SubAxis
from reshard.types.units import parse_bytes, parse_shape
from tests.sampling import for_each

MESH = rs.Mesh(x=4, y=2)
HERE, THERE = (rs.Layout.parse(text, MESH) for text in ("f32[{x}4, 8]", "f32[16, {x}2]"))
PLAN = rs.plan(HERE, THERE)
TILES = {device: np.zeros((4, 8), np.float32) for device in MESH.devices}
NETWORK = rs.Network.uniform(1e-6, 1e9)
TREE = rs.plan_tree({"w": (HERE, THERE)})
PROOF, TREE_PROOF = rs.prove(PLAN), rs.prove(TREE)
ENDS = rs.Layout.parse("f32[{x}24, 5]", MESH), rs.Layout.parse("f32[3, {x}8, 5]", MESH)
HALF = rs.Layout.parse("f32[8, 16]", MESH)
NAMES = rs.names.read('[sizes]\nn = 1\n[[rule]]\nsource = "{l}.w"\ntarget = "w[{l}]"\nsizes = { l = "n" }\n')
STACKED = rs.Layout.parse("f32[1, {x}4, 8]", MESH)
TEXT = 'HloModule m\n\nENTRY %e {\n  ROOT %p = f32[2]{0} parameter(0), backend_config={"known_trip_count":{"n":"3"}}\n}'
MODULE = hlo.parse(TEXT)
SEARCHED = rs.plan(HERE, rs.Layout.parse("f32[{y}8, {x}2]", MESH))


class Named:
    """As an xarray.DataArray."""

    dims, shape, dtype = ("t", "s"), (16, 8), "float32"


@dataclass
class RaggedShard:
    """As FlexShard's."""

    dims: Any
    local_units: Any


@dataclass
class Owned:
    """As FlexShard's."""

    owner_rank: Any


class NoRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class NoEquality:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")


class Endless(Mapping[int, Any]):
    """A dict of 10^12 tiles, which takes no memory as long as nobody lists it."""

    def __len__(self) -> int:
        return 10**12

    def __iter__(self) -> Iterator[int]:
        return iter(range(10**12))

    def __getitem__(self, key: int) -> Any:
        return TILES[0]


def junk() -> list[Any]:
    """Values of all kinds; made anew, since some are used up."""
    numbers = [7, -3, 10**30, 2.5, float("nan"), float("inf"), True, 1j, np.float32(1.5), np.bool_(True), np.int64(-1)]
    texts = ["", "zz", "{", "x\x00", "9" * 5000, "f32[{x}4, 8]", "sum", "x", b"", b"x", bytearray(b"ab")]
    lists = [[], [None], ["x"], [["x"], 5], [[1, 2], [3]], (), (1,), (2,) * 5000, {}, {"x": None}, {1: 2}, set(), {1}]
    endless = [range(10**12), range(10**30), iter([1]), Endless(), MappingProxyType({}), (n for n in range(3))]
    arrays = [np.array(7), np.array([1, 2]), np.zeros((2, 2)), np.array(["a"]), np.ma.masked, np.dtype("V3")]
    others = [
        None,
        object(),
        NoRepr(),
        NoEquality(),
        junk,
        type,
        ...,
        NotImplemented,
        slice(1),
        rs,
        np.datetime64(0, "s"),
    ]
    return [*numbers, *texts, *lists, *endless, *arrays, *others, MESH, HERE, PLAN]


class Entry(NamedTuple):
    """A call that works with these arguments."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]


def a_layout(dims: Any, reduction: Any = None, partial: Any = ()) -> rs.Layout:
    return rs.Layout(MESH, dims, "f32", reduction, partial)


ENTRIES = {
    "Mesh": Entry(lambda axes, ids: rs.Mesh(axes, device_ids=ids), ({"x": 4}, [0, 1, 2, 3])),
    "Mesh by name": Entry(lambda x: rs.Mesh(x=x), (4,)),
    "Mesh.parse": Entry(rs.Mesh.parse, ("x=4", None)),
    "sub_axis": Entry(MESH.sub_axis, ("x",)),
    "SubAxis": Entry(lambda *parts: MESH.checked(SubAxis(*parts)), ("x", 1, 4)),
    "position": Entry(MESH.position, (1,)),
    "Layout": Entry(rs.Layout, (MESH, HERE.dims, "f32", None, ())),
    "Layout, partial": Entry(a_layout, (HERE.dims, "sum", (SubAxis("y", 1, 2),))),
    "Dim": Entry(lambda digits, size: a_layout((Dim(digits, size),)), ((Digit(4, None),), 4)),
    "Digit": Entry(lambda radix, axis: a_layout((Dim((Digit(radix, axis),), 4),)), (4, None)),
    "parse": Entry(rs.Layout.parse, ("f32[{x}4]", MESH)),
    "tiled": Entry(rs.Layout.tiled, (MESH, (16,), "f32", [[]], (), None)),
    "from_spec": Entry(
        lambda m, s, d, p, u, r: rs.Layout.from_spec(m, s, d, p, unreduced=u, reduction=r),
        (MESH, (16,), "f32", ["x"], ["y"], "sum"),
    ),
    "from_shardy": Entry(rs.Layout.from_shardy, ('[{"x"}]', MESH, (16,), "f32")),
    "from_hlo": Entry(lambda t, s, d, n: rs.Layout.from_hlo(t, s, d, num_devices=n), ("{replicated}", (16,), "f32", 4)),
    "from_jax_text": Entry(rs.Layout.from_jax_text, ("P('x')", MESH, (16,), "f32")),
    "from_jax": Entry(rs.Layout.from_jax, (None, (16,), "f32")),
    "from_dtensor": Entry(
        lambda p, m, s, d, n: rs.Layout.from_dtensor(p, m, s, d, names=n), (["S(0)"], (4,), (16,), "f32", ["x"])
    ),
    "from_owners": Entry(rs.Layout.from_owners, ([0, 0, 7, 2], MESH, (4, 8), "f32", 0)),
    "from_sizes": Entry(rs.Layout.from_sizes, ([3, 5, 0, 2], MESH, (10, 8), "f32", 0, ["x"])),
    "from_ranges": Entry(rs.Layout.from_ranges, ([0, 3, 8, 8, 10], MESH, (10, 8), "f32", 0, ["x"])),
    "from_chunks": Entry(rs.Layout.from_chunks, (((3, 5, 0, 2), (8,)), MESH, "f32", ["x", None])),
    "chunks of a dim": Entry(lambda c, a: rs.Layout.from_chunks((c, (8,)), MESH, "f32", [a, None]), ((1, 7), "y")),
    "from_csr": Entry(rs.Layout.from_csr, (range(17), HERE, "f32")),
    "Pieces": Entry(Pieces, ([3, 2, 5], [0, 2, 0], 3)),
    "Pieces of a dim": Entry(lambda p: a_layout((Dim((Digit(4, MESH.sub_axis("x")), Digit(1, None)), 4, p),)), (None,)),
    "tile_shape_of": Entry(HERE.tile_shape_of, (1,)),
    "RaggedShard": Entry(
        lambda dims, units: rs.Layout.from_dtensor([RaggedShard(dims, units)], (2,), (9,), "f32"), ((0,), (1, 2))
    ),
    "Owned": Entry(lambda owner: rs.Layout.from_dtensor([Owned(owner)], (2,), (9,), "f32"), (1,)),
    "from_scalapack": Entry(
        lambda d, g, t, o: rs.Layout.from_scalapack(d, g, t, order=o),
        ([1, 0, 100, 100, 8, 8, 0, 0, 50], (2, 2), "f32", "R"),
    ),
    "read ours": Entry(detect.read, ("f32[{x}4, 8]", MESH, (16, 8), "f32")),
    "read JAX's": Entry(detect.read, ("P('x')", MESH, (16, 8), "f32")),
    "read HLO's": Entry(detect.read, ("{replicated}", MESH, (16, 8), "f32")),
    "read Shardy's": Entry(detect.read, ('[{"x"}, {}]', MESH, (16, 8), "f32")),
    "plan": Entry(rs.plan, (HERE, THERE, None, None, False, 0.05)),
    "Plan": Entry(rs.Plan, (HERE, THERE, PLAN.steps, False, None)),
    "Step": Entry(rs.Step, ("all_to_all", HERE, THERE, StepMode(), 0, None)),
    "StepMode": Entry(lambda *mode: rs.Step("exchange", HERE, THERE, StepMode(*mode)), (1, False, 1)),
    "chain": Entry(chain, (HERE, THERE, [StepSpec("all_to_all", THERE)], False, None)),
    "StepSpec": Entry(lambda *spec: chain(HERE, THERE, [StepSpec(*spec)]), ("all_to_all", THERE, StepMode())),
    "from_json": Entry(rs.Plan.from_json, (PLAN.to_json(),)),
    "to_json": Entry(PLAN.to_json, (None,)),
    "Link": Entry(rs.Link, (1e-6, 1e9, "ring")),
    "Network": Entry(rs.Network, ("lab", (1e-6, 1e9), (1e-6, 1e9), 8, {"x": (1e-6, 1e9)}, "here")),
    "Network.of": Entry(rs.Network.of, ({"x": (1e-6, 1e9)}, "lab", "here")),
    "Network.uniform": Entry(rs.Network.uniform, (1e-6, 1e9)),
    "Network.preset": Entry(rs.Network.preset, ("h100",)),
    "Network.load": Entry(rs.Network.load, ("h100",)),
    "Network.from_json": Entry(rs.Network.from_json, (NETWORK.to_json(),)),
    "links": Entry(NETWORK.links, (MESH,)),
    "with_axes": Entry(NETWORK.with_axes, ({"x": (1e-6, 1e9)},)),
    "simulate": Entry(rs.simulate, (PLAN, TILES, None)),
    "a tile of simulate": Entry(lambda tile: rs.simulate(PLAN, {**TILES, 3: tile}), (TILES[3],)),
    "simulate, padded": Entry(lambda padded: rs.simulate(PLAN, TILES, padded=padded), (True,)),
    "simulate a tree": Entry(rs.simulate, (TREE, {"w": TILES}, None)),
    "prove": Entry(lambda plan, program, launches: rs.prove(plan, program, launches=launches), (PLAN, None, False)),
    "fewest": Entry(fewest, (PLAN, 1.0)),
    "a search of fewest": Entry(lambda limit: fewest(SEARCHED, limit), (0.01,)),
    "Proof.explain": Entry(lambda width: PROOF.explain(width), (80,)),
    "TreeProof.explain": Entry(lambda width: TREE_PROOF.explain(width), (80,)),
    "instance": Entry(instance, (PLAN, PROOF.form, PROOF.form.sizes)),
    "join_tiles": Entry(PLAN.steps[0].join_tiles, (8, 16)),
    "coordinates": Entry(MESH.coordinates, (1, [MESH.sub_axis("x")])),
    "Move": Entry(
        lambda view, take, into, cast, three: rs.Move(*ENDS, view, take=take, into=into, cast=cast, three=three),
        ("(three h) d -> three h d", None, None, False, 3),
    ),
    "take": Entry(lambda take, part: rs.Move(HERE, HALF, take=take, into={1: part}), ({0: slice(0, 8)}, slice(0, 8))),
    "collectives": Entry(hlo.collectives, (MODULE, False)),
    "traffic": Entry(hlo.traffic, (MODULE,)),
    "parse_groups": Entry(hlo.parse_groups, ("{{0,1},{2,3}}", 4)),
    "trip_count": Entry(hlo.trip_count, (MODULE, MODULE.entry, MODULE.entry.instructions[0])),
    "computation": Entry(MODULE.computation, ("e",)),
    "known moves": Entry(lambda known: examine(TEXT, known=known), ([],)),
    "LogReport": Entry(LogReport.of, ("a log", "h100")),
    "plan_tree": Entry(rs.plan_tree, ({"w": (HERE, THERE)}, None, None, False, 0.05)),
    "TreePlan.to_json": Entry(TREE.to_json, (None,)),
    "TreePlan.from_json": Entry(rs.TreePlan.from_json, (TREE.to_json(),)),
    "names.read": Entry(rs.names.read, ("llama-to-vllm",)),
    "resolve": Entry(NAMES.resolve, ({"0.w": (4, 2)},)),
    "a shape of resolve": Entry(lambda shape: NAMES.resolve({"0.w": shape}), ((4, 2),)),
    "a size of resolve": Entry(lambda size: NAMES.resolve({"0.w": (4, 2)}, n=size), (1,)),
    "target_shapes": Entry(NAMES.target_shapes, ({"0.w": (4, 2)},)),
    "moves": Entry(NAMES.moves, ({"0.w": HERE}, {"w": STACKED})),
    "a layout of moves": Entry(lambda layout: NAMES.moves({"0.w": HERE}, {"w": layout}), (STACKED,)),
    "Manifest": Entry(rs.Manifest, (rs.Manifest.of({"w": HERE}).entries,)),
    "Manifest.of": Entry(rs.Manifest.of, ({"w": HERE}, 1)),
    "from_xarray": Entry(rs.from_xarray, (Named, MESH, {"t": "x"})),
    "Mesh.from_dict": Entry(rs.Mesh.from_dict, (MESH.to_dict(),)),
    "examine": Entry(lambda text, platform: examine(text, platform=platform), (TEXT, "cpu")),
    "parse_bytes": Entry(parse_bytes, ("64MiB",)),
    "parse_shape": Entry(parse_shape, ("16,16",)),
}


def refused_or_taken(entry: Entry, at: int, value: Any) -> None:
    arguments = list(entry.arguments)
    arguments[at] = value
    try:
        entry.call(*arguments)
    except ReshardError as error:
        assert len(str(error)) < 3000, "a message that quotes all it was given"


@for_each(ENTRIES)
def test_the_entry_works(name: str):
    if name != "from_jax":  # It takes jax's shardings: tests/types/notation/test_jax_sharding.py.
        ENTRIES[name].call(*ENTRIES[name].arguments)


@pytest.mark.parametrize("name", ENTRIES)
def test_one_argument_of_another_kind(name: str):
    for at in range(len(ENTRIES[name].arguments)):
        for value in junk():
            refused_or_taken(ENTRIES[name], at, value)


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=4),
        st.sampled_from(["x", "y", "sum", "f32", "R", 1, 4, 16, MESH, HERE, THERE, PLAN, SubAxis("x", 1, 4)]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=3),
    ),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_nested_values_in_place_of_an_argument(data: st.DataObject):
    entry = ENTRIES[data.draw(st.sampled_from([name for name in ENTRIES if name != "prove"]))]
    at = data.draw(st.integers(0, len(entry.arguments) - 1))
    refused_or_taken(entry, at, data.draw(VALUES))


# Damaged inputs, a sample of `benchmarks/fuzz_inputs.py`, where each kind has a process of its own.

IN_PROCESS = [name for name in KINDS if name not in ("array files", "serialized", "StableHLO", "HLO for the pass")]


@pytest.mark.parametrize("kind", IN_PROCESS)
def test_damaged_inputs_are_refused_or_right(kind: str):
    seeds = KINDS[kind].seeds()
    for number in range(12 if "HLO" in kind else 40):
        outcome = try_input(kind, make_input(kind, 26, number, seeds))
        assert outcome in ("refused", "taken"), f"{kind} {number}: {outcome}"


def test_what_else_leaves_a_door_is_reported(monkeypatch: pytest.MonkeyPatch):
    doors: dict[str, Callable[[Any], Any]] = {
        "KeyError": lambda given: {}[given],
        "WrongError": lambda given: must(False, "{} is not right", given),
        "more than": lambda given: spin(),
        "MemoryError": lambda given: np.ones(1 << 62, np.int8),
    }
    for what, take in doors.items():
        monkeypatch.setitem(KINDS, "broken", Kind(lambda: ["whole"], lambda choose, seed, other: other, take))
        assert try_input("broken", "whole").startswith(f"wrong: {what}")


def spin() -> None:
    raise OverTimeError
