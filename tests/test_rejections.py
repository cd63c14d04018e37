"""Bad inputs, each refused with a `ReshardError` whose message names what is wrong and what to do.

Those that break an invariant of docs/reference/language.md are named for it.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import reshard as rs
from reshard.errors import LayoutError, ReshardError
from reshard.geometry.detect import read
from reshard.lower import lower_plan
from reshard.plans.plan import Plan, Step
from reshard.plans.rules.step_mode import StepMode
from reshard.types import dims

MESH = rs.Mesh(x=4, y=2)
HERE = rs.Layout.parse("f32[{x}4, 8]", MESH)
THERE = rs.Layout.parse("f32[16, {x}2]", MESH)
PLAN = rs.plan(HERE, THERE)
TILES = {device: np.zeros((4, 8), np.float32) for device in MESH.devices}
DIM = "[{x}2]"
HUGE = 10**12
X = rs.types.SubAxis("x", 1, 4)


class Bad(NamedTuple):
    """A call, with two parts of the message that it must raise: what is wrong, and what to do."""

    name: str
    call: Callable[[], Any]
    thing: str
    cure: str


def parse(text: str, mesh: rs.Mesh = MESH) -> Callable[[], Any]:
    return lambda: rs.Layout.parse(text, mesh)


def spec(shape: Any, axes: Any, dtype: Any = "float32", **more: Any) -> Callable[[], Any]:
    return lambda: rs.Layout.from_spec(MESH, shape, dtype, axes, **more)


def digits(*radices: Any, size: Any) -> Callable[[], Any]:
    """A dim with these local radices, after one that is held by x."""
    local = [rs.types.Digit(radix, None) for radix in radices]
    return lambda: rs.Layout(MESH, (rs.types.Dim((rs.types.Digit(4, X), *local), size),), "f32")


def scalapack(at: int, number: Any, grid: Any = (2, 3)) -> Callable[[], Any]:
    """A descriptor with another number at one place."""
    desc: list[Any] = [1, 0, 1000, 800, 64, 32, 0, 0, 512]
    desc[at] = number
    return lambda: rs.Layout.from_scalapack(desc, grid)


def edited(**fields: Any) -> Callable[[], Any]:
    """The plan's JSON with other fields."""
    return lambda: Plan.from_json(json.dumps({**PLAN.to_dict(), **fields}))


def plan(source: Any = HERE, target: Any = THERE, **options: Any) -> Callable[[], Any]:
    return lambda: rs.plan(source, target, **options)


def simulate(tiles: Any, on: Any = PLAN) -> Callable[[], Any]:
    return lambda: rs.simulate(on, tiles)


def changed(device: int, tile: Any) -> dict[int, Any]:
    return {**TILES, device: tile}


def layout(text: str, mesh: rs.Mesh = MESH) -> rs.Layout:
    return rs.Layout.parse(text, mesh)


TABLE = [
    # ---- meshes
    Bad("axis of size 0", lambda: rs.Mesh(x=0), "'x' has size 0", "at least 1"),
    Bad("axis of a fractional size", lambda: rs.Mesh(x=2.5), "2.5", "whole number"),  # type: ignore[arg-type]
    Bad("axis of a boolean size", lambda: rs.Mesh(x=True), "True", "whole number"),
    Bad("axis name with a space", lambda: rs.Mesh({"a b": 2}), "'a b'", "letter"),
    Bad("axis name twice", lambda: rs.Mesh([("x", 2), ("x", 2)]), "twice", "own name"),
    Bad("mesh text", lambda: rs.Mesh.parse("x4"), "'x4'", "name=size"),
    Bad("mesh given as other text", lambda: rs.Mesh("4"), "'4'", "write axes as name=size"),
    Bad("too few device ids", lambda: rs.Mesh({"x": 4}, device_ids=[0, 1]), "lists 2", "one id per device"),
    Bad("device id twice", lambda: rs.Mesh({"x": 2}, device_ids=[1, 1]), "[1, 1]", "distinct"),
    Bad("device ids that are text", lambda: rs.Mesh({"x": 2}, device_ids=["a", "b"]), "'a'", "whole number"),  # type: ignore[list-item]
    # ---- grammar
    Bad("empty text", parse(""), "''", "dtype[dims]"),
    Bad("no dims", parse("f32"), "'f32'", "dtype[dims]"),
    Bad("open bracket", parse("f32[{x}4, 8"), "'f32[{x}4, 8'", "dtype[dims]"),
    Bad("canonical form: a dim without digits", parse("f32[{x}4,,8]"), "an empty dim", "write its size"),
    Bad("empty braces", parse("f32[{}4]"), "''", "write x, or x:(pre)size"),
    Bad("negative digit", parse("f32[-4]"), "'-4'", "digits like {x}4"),
    Bad("fractional digit", parse("f32[4.5]"), "'.5'", "digits like {x}4"),
    Bad("true size that is not a number", parse("f32[{x}3/ten]"), "'ten'", "{x}3/10"),
    Bad("text after the layout", parse("f32[8] on x"), "'f32[8] on x'", "dtype[dims]"),
    Bad("unknown dtype", parse("f33[8]"), "'f33'", "float32"),
    Bad("unknown reduction", parse("f32[8] + avg{x}"), "'avg'", "sum, max, min, product, mean"),
    Bad("reduction over nothing", parse("f32[8] + sum"), "'f32[8] + sum'", "sum{z}"),
    Bad("sub-axis without prefix", parse("f32[{x:2}4]"), "'x:2'", "x:(pre)size"),
    # ---- axes
    Bad("unknown axis", parse("f32[{z}4]"), "unknown axis 'z'", "has axes x, y"),
    Bad("unknown partial axis", parse("f32[8] + sum{z}"), "unknown axis 'z'", "has axes x, y"),
    Bad("sub-axis that does not divide", parse("f32[{x:(1)3}4]"), "x:(1)3", "factors of the axis"),
    Bad("sub-axis past the end", parse("f32[{x:(2)4}4]"), "x:(2)4", "factors of the axis"),
    Bad("single use: an axis twice", parse("f32[{x}4, {x}2]"), "axis 'x'", "once"),
    Bad("single use: an axis twice in a dim", parse("f32[{x}{x}4]"), "axis 'x'", "once"),
    Bad("single use: an axis held and partial", parse("f32[{x}4] + sum{x}"), "axis 'x'", "partial axes included"),
    Bad("single use: overlapping sub-axes", parse("f32[{x:(1)2}4, {x}2]"), "x:(1)2", "once"),
    Bad("single use: sub-axes that do not nest", parse("f32[{a:(1)4}, {a:(2)6}]", rs.Mesh(a=12)), "a:(2)6", "once"),
    Bad("single use: factors that do not divide", parse("f32[{a:(1)4}, {a:(6)2}]", rs.Mesh(a=12)), "a:(6)2", "once"),
    Bad(
        "radix match: another radix",
        lambda: rs.Layout(MESH, (rs.types.layout.Dim((rs.types.layout.Digit(3, MESH.sub_axis("x")),), 3),), "f32"),
        "radix 3",
        "sub-axis's size",
    ),
    # ---- sizes
    Bad("exact cover: too much padding", parse("f32[{x}4/12]"), "multiply to 16", "the product is 12"),
    Bad("exact cover: more elements than fit", parse("f32[{x}2/12]"), "multiply to 8", "the product is 12"),
    Bad("exact cover: no room at all", parse("f32[{x}0/3]"), "true size is 3", "the product is 4"),
    Bad("size that is text", spec(("8",), [["x"]]), "'8'", "whole number"),
    Bad("more entries than dims", spec((8,), [["x"], ["y"]]), "2 entries", "at most one entry per dim"),
    Bad("spec of unknown axis", spec((8,), [["q"]]), "'q'", "has axes x, y"),
    Bad("single use: a spec with an axis twice", spec((8, 8), [["x"], ["x"]]), "axis 'x'", "once"),
    Bad("spec of an unknown dtype", spec((8,), [["x"]], "float99"), "'float99'", "float32"),
    Bad("exact cover: blocks of 0 elements", parse("f32[2{x}0/5]"), "a block of 0", "at least 1"),
    Bad("whole sizes: a negative radix", digits(-2, size=-8), "a radix of -2", "at least 0"),
    Bad("whole sizes: a fractional radix", digits(2.5, size=10), "a radix of 2.5", "are ints"),
    Bad("whole sizes: a true size that is a fraction", digits(2, size=7.5), "the true size 7.5", "are ints"),
    Bad("whole sizes: a negative true size", digits(2, size=-1), "the true size -1", "at least 0"),
    Bad("whole sizes: an absurd radix", digits(1 << 63, size=1 << 65), "9223372036854775808", "at most"),
    Bad("whole sizes: an absurd product", digits(1 << 32, 1 << 32, size=1), "multiply to more", "smaller"),
    Bad(
        "whole sizes: a number of 5000 digits", parse(f"f32[{'9' * 5000}]"), "5000 digits", "above 9223372036854775807"
    ),
    Bad("whole sizes: a true size of 5000 digits", parse(f"f32[{{x}}3/{'1' * 5000}]"), "5000 digits", "above"),
    Bad("whole sizes: a dim of a fractional size", spec((8.0,), [["x"]]), "8.0", "whole number"),
    Bad("whole sizes: a negative dim", spec((-8,), [[]]), "-8", "at least 0"),
    Bad("whole sizes: an absurd dim", spec((10**5000,), [[]]), "an int of 16610 bits", "at most"),
    Bad("a digit that is a number", lambda: rs.Layout(MESH, (rs.types.Dim((4,), 4),), "f32"), "4", "Digit(radix"),  # type: ignore[arg-type]
    Bad("a dim that is a number", lambda: rs.Layout(MESH, (4,), "f32"), "dim 0 is 4", "Dim(("),  # type: ignore[arg-type]
    Bad("dims that are a number", lambda: rs.Layout(MESH, 4, "f32"), "dims 4", "give a list"),  # type: ignore[arg-type]
    Bad("a shape that is None", spec(None, [["x"]]), "None", "one size per dim"),
    Bad("axes of a spec that are numbers", spec((8,), [[0]]), "0", "write x"),
    Bad("a layout on no mesh", parse("f32[8]", None), "None", "Mesh(x=4"),  # type: ignore[arg-type]
    Bad("a layout that is None", parse(None), "None", "dtype[dims]"),  # type: ignore[arg-type]
    Bad("an axis of 5000 digits", lambda: rs.Mesh.parse(f"x={'9' * 5000}"), "5000 digits", "at most"),
    Bad("a sub-axis of 5000 digits", parse(f"f32[{{x:({'9' * 5000})2}}4]"), "x:(999", "factors of the axis"),
    Bad("a mesh of absurd size", lambda: rs.Mesh(x=1 << 40, y=1 << 40), "1208925819614629174706176", "at most"),
    Bad("a mesh that is too large to list", lambda: rs.Mesh(x=HUGE).devices, "1000000000000 devices", "at most"),
    Bad("device ids of a huge mesh", lambda: rs.Mesh({"x": HUGE}, device_ids=range(HUGE)), "1000000000000", "at most"),
    Bad(
        "10^12 device ids",
        lambda: rs.Mesh({"x": 4}, device_ids=range(HUGE)),
        "lists 1000000000000",
        "one id per device",
    ),
    Bad("device ids that are a number", lambda: rs.Mesh({"x": 4}, device_ids=4), "4", "one id per device"),  # type: ignore[arg-type]
    Bad("a device that is None", lambda: MESH.position(None), "None", "8 devices"),  # type: ignore[arg-type]
    Bad("mesh text that is None", lambda: rs.Mesh.parse(None), "None", "name=size"),  # type: ignore[arg-type]
    # ---- ScaLAPACK and DTensor
    Bad("a negative extent", scalapack(2, -5), "-5", "at least 0"),
    Bad("a fractional extent", scalapack(2, 10.5), "10.5", "whole number"),
    Bad("a block of 0", scalapack(4, 0), "descriptor", "at least 1"),
    Bad("a grid of 10^12", scalapack(0, 1, (10**6, 10**6)), "1000000000000 processes", "at most"),
    Bad("a grid that is None", scalapack(0, 1, None), "None", "whole numbers"),
    Bad("a descriptor that is text", lambda: rs.Layout.from_scalapack("1", (2, 3)), "'1'", "whole numbers"),  # type: ignore[arg-type]
    Bad(
        "a fractional DTensor dim", lambda: rs.Layout.from_dtensor(["S(0)"], (2,), (8.5,), "f32"), "8.5", "whole number"
    ),  # type: ignore[list-item]
    Bad("a DTensor mesh of 0", lambda: rs.Layout.from_dtensor(["S(0)"], (0,), (8,), "f32"), "size 0", "at least 1"),
    Bad(
        "a split factor of 0", lambda: rs.Layout.from_dtensor(["_S(0, 0)"], (2,), (8,), "f32"), "_S(0, 0)", "at least 1"
    ),
    Bad("placements that are None", lambda: rs.Layout.from_dtensor(None, (2,), (8,), "f32"), "None", "give a list"),  # type: ignore[arg-type]
    # ---- reductions
    Bad("one reduction: sum of bools", parse("pred[8] + sum{x}"), "bool has no sum", "use max (any) or min (all)"),
    Bad("one reduction: maximum of complex", parse("c64[8] + max{x}"), "complex64 has no max", "sum, mean or product"),
    Bad("one reduction: mean of integers", parse("s32[8] + mean{x}"), "int32 has no mean", "inexact types"),
    Bad("one reduction: an unknown one", spec((8,), [[]], unreduced=["x"], reduction="xor"), "'xor'", "use one of sum"),
    Bad("a mean that is started", plan(layout("f32[8]"), layout("f32[8] + mean{x}")), "+ mean{x}", "that is a sum"),
    Bad("another mean", plan(layout("f32[8] + sum{x}"), layout("f32[8] + mean{x}")), "leaves a mean as it is", "a sum"),
    Bad(
        "a sum of a type without zero",
        plan(layout("f8e8m0fnu[8]"), layout("f8e8m0fnu[8] + sum{x}")),
        "no value of float8_e8m0fnu",
        "not partial",
    ),
    # ---- requests
    Bad("another shape", plan(target=layout("f32[16, 16]")), "(16, 16)", "the same global shape"),
    Bad("another dtype", plan(target=layout("f64[16, 8]")), "float64", "cast"),
    Bad("negative budget", plan(budget=-1), "budget -1", "whole number of at least 0"),
    Bad("budget that is not a size", plan(budget="64 MiB or so"), "'64 MiB or so'", "e.g. 64MiB"),
    Bad("budget that is a fraction", plan(budget=0.5), "0.5", "whole number of at least 0"),
    Bad("budget too small", plan(budget=100), "budget 100 B", "smallest that works is 256 B"),
    Bad("unknown network", plan(network="tpu-v9"), "'tpu-v9'", "tpu-v5p"),
    Bad("network with a typing error", plan(network="h10"), "'h10'", "did you mean 'h100'?"),
    Bad("picture of an unknown kind", lambda: PLAN.draw("tile"), "'tile'", "tiles"),
    Bad("tree of layouts", lambda: rs.plan_tree([HERE, THERE]), "Layout", "(source, target)"),  # type: ignore[list-item]
    Bad("network without an end", plan(network="/dev/zero"), "more than 1048576 bytes", "the path of a JSON file"),
    Bad("network of 5000 characters", plan(network="x" * 5000), "is not a preset", "tpu-v5p"),
    Bad("a sharding of jax", plan(types.SimpleNamespace(spec=(), mesh=None)), "a SimpleNamespace", "a NamedSharding"),
    Bad("links of a mesh that is None", lambda: rs.Network.preset("h100").links(None), "None", "Mesh("),  # type: ignore[arg-type]
    Bad("a proof of text", lambda: rs.prove("plan"), "'plan'", "reshard.plan()"),  # type: ignore[arg-type]
    Bad("a shape of 10^12 dims", spec(range(10**12), []), "range(0, 1000000000000)", "at most 4096 dims"),
    Bad("10^12 axes", lambda: rs.Mesh(range(10**12)), "range(0, 1000000000000)", "name to size"),  # type: ignore[arg-type]
    Bad("10^12 entries", spec((8,), range(10**12)), "range(0, 1000000000000)", "at most 4096 items"),
    Bad("network that is a number", plan(network=3), "3", "Network"),
    Bad("network without the axis", plan(network=rs.Network.of({"x": (0, 1)})), "'y'", "with_axes"),
    Bad("source that is other text", plan("rows"), "'rows'", "write f32["),
    Bad("target that is None", plan(target=None), "None", "Layout"),
    # ---- other notations
    Bad("text in no notation", lambda: read("shard it", MESH), "'shard it'", "write f32["),
    Bad("JAX without a shape", lambda: read("P('x')", MESH), "without shape and dtype", "give shape and dtype"),
    Bad("JAX of unknown axis", lambda: read("P('z')", MESH, (8,), "f32"), "'z'", "has axes x, y"),
    Bad("Shardy that ends early", lambda: rs.Layout.from_shardy('[{"x"', MESH, (8,), "f32"), "ends too early", "{"),
    Bad("Shardy of another rank", lambda: rs.Layout.from_shardy('[{"x"}]', MESH, (8, 8), "f32"), "(8, 8)", "per dim"),
    Bad("HLO on one device", lambda: rs.Layout.from_hlo("{maximal device=3}", (8,), "f32"), "maximal", "device"),
    Bad("HLO of a region", lambda: rs.Layout.from_hlo("{manual}", (8,), "f32"), "manual", "outside the region"),
    Bad("HLO of another rank", lambda: rs.Layout.from_hlo("{devices=[2,4]<=[8]}", (8,), "f32"), "(8,)", "dims"),
    Bad("shape that disagrees", lambda: read("f32[{x}4]", MESH, (8,)), "(16,)", "leave shape out"),
    # ---- plans and steps
    Bad("step of an unknown kind", lambda: Step("send", HERE, THERE), "'send'", "the steps are slice"),
    Bad("step of the wrong kind", lambda: Step("slice", HERE, THERE), "slice: f32[{x}4, 8]", "only local digits"),
    Bad("plan that ends early", lambda: Plan(HERE, THERE, ()), "not in the target", "fix the chain"),
    Bad("JSON that is nested too deep", lambda: Plan.from_json("[" * 100_000), "not a plan in JSON", "to_json()"),
    Bad("JSON that is not UTF-8", lambda: Plan.from_json(b"\xff\xfe{}"), "not a plan in JSON", "to_json()"),  # type: ignore[arg-type]
    Bad("JSON with a long number", lambda: Plan.from_json("9" * 5000), "not a plan in JSON", "to_json()"),
    Bad(
        "JSON with negative seconds", edited(steps=[{**PLAN.to_dict()["steps"][0], "seconds": -1}]), "-1", "at least 0"
    ),
    Bad(
        "JSON with endless seconds",
        edited(steps=[{**PLAN.to_dict()["steps"][0], "seconds": 1e999}]),
        "inf",
        "at least 0",
    ),
    Bad("JSON of another format", edited(format=2), "format 2", "reads format 1"),
    Bad("step between texts", lambda: Step("slice", "f32[8]", THERE), "'f32[8]'", "Layout.parse"),  # type: ignore[arg-type]
    Bad("step of kind None", lambda: Step(None, HERE, THERE), "None", "the steps are"),  # type: ignore[arg-type]
    Bad("step of a negative time", lambda: Step("all_to_all", HERE, THERE, seconds=-1.0), "-1.0", "at least 0"),
    Bad(
        "step that keeps negative bytes", lambda: Step("all_to_all", HERE, THERE, retained_bytes=-1), "-1", "at least 0"
    ),
    Bad("chunk of a fraction", lambda: Step("exchange", HERE, THERE, StepMode(2.5)), "2.5", "at least 1"),  # type: ignore[arg-type]
    Bad("parts that are a list", lambda: Step("slice", HERE, THERE, StepMode(parts=[2])), "[2]", "at least 1"),  # type: ignore[arg-type]
    Bad("mode that is a tuple", lambda: Step("slice", HERE, THERE, (1, 2)), "(1, 2)", "StepMode"),  # type: ignore[arg-type]
    Bad("plan of texts", lambda: Plan("a", "b", ()), "'a'", "Layout.parse"),  # type: ignore[arg-type]
    Bad("plan of steps that are text", lambda: Plan(HERE, HERE, ("slice",)), "'slice'", "chain()"),  # type: ignore[arg-type]
    Bad("lowering text", lambda: lower_plan("plan"), "str", "reshard.plan()"),  # type: ignore[arg-type]
    # ---- tiles
    Bad("a plan whose view is text", lambda: Plan(HERE, HERE, (), view="a -> a"), "'a -> a'", "give that of a Move"),  # type: ignore[arg-type]
    Bad("a tile missing", simulate({d: t for d, t in TILES.items() if d != 5}), "missing [5]", "one tile per device"),
    Bad("a tile too many", simulate({**TILES, 9: TILES[0]}), "unknown [9]", "one tile per device"),
    Bad("no tiles", simulate({}), "0 devices", "one tile per device"),
    Bad("a tile of another shape", simulate(changed(3, np.zeros((8, 4), np.float32))), "device 3", "(4, 8)"),
    Bad(
        "a tile with a mask",
        simulate(changed(3, np.ma.masked_array(TILES[3], TILES[3] == 0))),
        "device 3's tile",
        "is not an array",
    ),
    Bad("a tile of another dtype", simulate(changed(7, np.zeros((4, 8)))), "float64", "cast it"),
    Bad("tiles in a list", simulate(list(TILES.values())), "list", "one tile per device"),
    Bad("a network without links", lambda: rs.Network("none"), "'none'", "give inner, outer or axes"),
    Bad("a link without bandwidth", lambda: rs.Link(0, 0), "bandwidth", "above 0"),
]


def test_there_are_many():
    assert len(TABLE) >= 50
    assert len({bad.name for bad in TABLE}) == len(TABLE)


def invariants() -> list[str]:
    """The names of the invariants, from the bullets of docs/reference/language.md."""
    text = (Path(__file__).parent.parent / "docs" / "reference" / "language.md").read_text(encoding="utf-8")
    return re.findall(r"^- \*\*(.*?)\*\*", text.partition("## Invariants\n")[2].partition("\n## ")[0], re.MULTILINE)


@pytest.mark.parametrize("name", invariants())
def test_every_invariant_has_a_check_and_a_rejection_of_its_name(name: str):
    checks = {"canonical form": ["canonical_dim", "canonical_partial"]}.get(name, [f"check_{name.replace(' ', '_')}"])
    for check in checks:
        assert f"*{name.capitalize()}*" in getattr(dims, check).__doc__
    rejections = [bad for bad in TABLE if bad.name.startswith(f"{name}: ")]
    assert rejections
    for bad in rejections if name != "canonical form" else ():  # a dim without digits does not parse: no layout yet
        with pytest.raises(LayoutError, match=rf"\({name}\)$"):
            bad.call()


@pytest.mark.parametrize("bad", TABLE, ids=[bad.name for bad in TABLE])
def test_rejected(bad: Bad):
    with pytest.raises(ReshardError) as caught:
        bad.call()
    message = str(caught.value)
    assert bad.thing in message, message
    assert bad.cure in message, message
    assert len(message) < 600, "a message is read by a person"


def test_the_plan_and_the_tiles_that_the_table_starts_from_are_right():
    assert rs.simulate(PLAN, TILES).keys() == TILES.keys()
