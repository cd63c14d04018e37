"""Bad inputs, each refused with a `ReshardError` whose message names what is wrong and what to do.

Those that break an invariant of docs/language.md are named for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import reshard as rs
from reshard.errors import LayoutError, ReshardError
from reshard.lower import lower_plan
from reshard.types import canonical
from reshard.types.notation.detect import read
from reshard.types.plan import Plan, Step

MESH = rs.Mesh(x=4, y=2)
HERE = rs.Layout.parse("f32[{x}4, 8]", MESH)
THERE = rs.Layout.parse("f32[16, {x}2]", MESH)
PLAN = rs.plan(HERE, THERE)
TILES = {device: np.zeros((4, 8), np.float32) for device in MESH.devices}
DIM = "[{x}2]"


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
    Bad("axis of negative size", lambda: rs.Mesh(x=-4), "-4", "at least 1"),
    Bad("axis of a fractional size", lambda: rs.Mesh(x=2.5), "2.5", "whole number"),  # type: ignore[arg-type]
    Bad("axis of a boolean size", lambda: rs.Mesh(x=True), "True", "whole number"),
    Bad("axis name with a space", lambda: rs.Mesh({"a b": 2}), "'a b'", "letter"),
    Bad("axis name twice", lambda: rs.Mesh([("x", 2), ("x", 2)]), "twice", "own name"),
    Bad("mesh text", lambda: rs.Mesh.parse("x4"), "'x4'", "name=size"),
    Bad("mesh given as text", lambda: rs.Mesh("x=4"), "x=4", "Mesh.parse"),  # type: ignore[arg-type]
    Bad("too few device ids", lambda: rs.Mesh({"x": 4}, device_ids=[0, 1]), "lists 2", "one id per device"),
    Bad("device id twice", lambda: rs.Mesh({"x": 2}, device_ids=[1, 1]), "[1, 1]", "distinct"),
    Bad("device ids that are text", lambda: rs.Mesh({"x": 2}, device_ids=["a", "b"]), "'a'", "whole number"),  # type: ignore[list-item]
    Bad("device ids that are fractions", lambda: rs.Mesh({"x": 2}, device_ids=[0, 1.5]), "1.5", "whole number"),  # type: ignore[list-item]
    # ---- grammar
    Bad("empty text", parse(""), "''", "dtype[dims]"),
    Bad("no dims", parse("f32"), "'f32'", "dtype[dims]"),
    Bad("open bracket", parse("f32[{x}4, 8"), "'f32[{x}4, 8'", "dtype[dims]"),
    Bad("open brace", parse("f32[{x4, 8]"), "{x4", "digits like {x}4"),
    Bad("canonical form: a dim without digits", parse("f32[{x}4,,8]"), "an empty dim", "write its size"),
    Bad("empty braces", parse("f32[{}4]"), "''", "write x, or x:(pre)size"),
    Bad("negative digit", parse("f32[-4]"), "'-4'", "digits like {x}4"),
    Bad("fractional digit", parse("f32[4.5]"), "'.5'", "digits like {x}4"),
    Bad("true size that is not a number", parse("f32[{x}3/ten]"), "'ten'", "{x}3/10"),
    Bad("two true sizes", parse("f32[{x}3/10/9]"), "'10/9'", "{x}3/10"),
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
    Bad("sub-axis of size 0", parse("f32[{x:(1)0}4]"), "x:(1)0", "factors of the axis"),
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
    Bad("negative size", spec((-3,), [["x"]]), "-3", "at least 0"),
    Bad("fractional size", spec((2.5,), [["x"]]), "2.5", "whole number"),
    Bad("size that is text", spec(("8",), [["x"]]), "'8'", "whole number"),
    Bad("more entries than dims", spec((8,), [["x"], ["y"]]), "2 entries", "at most one entry per dim"),
    Bad("spec of unknown axis", spec((8,), [["q"]]), "'q'", "has axes x, y"),
    Bad("single use: a spec with an axis twice", spec((8, 8), [["x"], ["x"]]), "axis 'x'", "once"),
    Bad("spec of an unknown dtype", spec((8,), [["x"]], "float99"), "'float99'", "float32"),
    # ---- reductions
    Bad("one reduction: sum of bools", parse("pred[8] + sum{x}"), "bool has no sum", "use max (any) or min (all)"),
    Bad("one reduction: maximum of complex", parse("c64[8] + max{x}"), "complex64 has no max", "sum, mean or product"),
    Bad("one reduction: mean of integers", parse("s32[8] + mean{x}"), "int32 has no mean", "inexact types"),
    Bad("one reduction: an unknown one", spec((8,), [[]], unreduced=["x"], reduction="xor"), "'xor'", "use one of sum"),
    Bad(
        "a target that starts a reduction",
        plan(layout("f32[8]"), layout("f32[8] + sum{x}")),
        "+ sum{x}",
        "fewer of the same sub-axes",
    ),
    Bad(
        "another reduction", plan(layout("f32[8] + sum{x}"), layout("f32[8] + max{x}")), "+ max{x}", "fewer of the same"
    ),
    # ---- requests
    Bad("another shape", plan(target=layout("f32[16, 16]")), "(16, 16)", "the same global shape"),
    Bad("another rank", plan(target=layout("f32[16]")), "(16,)", "the same global shape"),
    Bad("another dtype", plan(target=layout("f64[16, 8]")), "float64", "cast"),
    Bad("smaller mesh", plan(target=layout("f32[16, 8]", rs.Mesh(x=4))), "<x=4>", "the same devices"),
    Bad(
        "other devices",
        plan(target=layout("f32[16, 8]", rs.Mesh({"x": 8}, device_ids=range(8, 16)))),
        "<x=8>",
        "the same devices",
    ),
    Bad("negative budget", plan(budget=-1), "budget -1", "whole number of at least 0"),
    Bad("budget that is text", plan(budget="64MiB"), "'64MiB'", "bytes a device"),
    Bad("budget that is a boolean", plan(budget=True), "True", "whole number of at least 0"),
    Bad("budget that is a fraction", plan(budget=0.5), "0.5", "whole number of at least 0"),
    Bad("budget that is a list", plan(budget=[1]), "[1]", "whole number of at least 0"),
    Bad("budget too small", plan(budget=100), "budget 100 B", "smallest that works is 256 B"),
    Bad("unknown network", plan(network="tpu-v9"), "'tpu-v9'", "tpu-v5p"),
    Bad("network that is a number", plan(network=3), "3", "Network"),
    Bad("network without the axis", plan(network=rs.Network.of({"x": (0, 1)})), "'y'", "with_axes"),
    Bad("source that is text", plan("f32[8]"), "'f32[8]'", "Layout.parse"),
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
    Bad("text that is not JSON", lambda: Plan.from_json("{"), "not a plan in JSON", "to_json()"),
    Bad("lowering text", lambda: lower_plan("plan"), "str", "reshard.plan()"),  # type: ignore[arg-type]
    # ---- tiles
    Bad("a tile missing", simulate({d: t for d, t in TILES.items() if d != 5}), "missing [5]", "one tile per device"),
    Bad("a tile too many", simulate({**TILES, 9: TILES[0]}), "unknown [9]", "one tile per device"),
    Bad("no tiles", simulate({}), "0 devices", "one tile per device"),
    Bad("a tile of another shape", simulate(changed(3, np.zeros((8, 4), np.float32))), "device 3", "(4, 8)"),
    Bad("a tile of the global shape", simulate(changed(0, np.zeros((16, 8), np.float32))), "device 0", "(4, 8)"),
    Bad("a tile of another rank", simulate(changed(0, np.zeros(32, np.float32))), "(32,)", "(4, 8)"),
    Bad("a tile of another dtype", simulate(changed(7, np.zeros((4, 8)))), "float64", "cast it"),
    Bad("tiles in a list", simulate(list(TILES.values())), "list", "one tile per device"),
    Bad("a network without links", lambda: rs.Network("none"), "'none'", "give inner, outer or axes"),
    Bad("a link without bandwidth", lambda: rs.Link(0, 0), "bandwidth", "above 0"),
]


def test_there_are_many():
    assert len(TABLE) >= 50
    assert len({bad.name for bad in TABLE}) == len(TABLE)


def invariants() -> list[str]:
    """The names of the invariants, from the bullets of docs/language.md."""
    text = (Path(__file__).parent.parent / "docs" / "language.md").read_text(encoding="utf-8")
    return re.findall(r"^- \*\*(.*?)\*\*", text.partition("## Invariants\n")[2].partition("\n## ")[0], re.MULTILINE)


@pytest.mark.parametrize("name", invariants())
def test_every_invariant_has_a_check_and_a_rejection_of_its_name(name: str):
    checks = {"canonical form": ["canonical_dim", "canonical_partial"]}.get(name, [f"check_{name.replace(' ', '_')}"])
    for check in checks:
        assert f"*{name.capitalize()}*" in getattr(canonical, check).__doc__
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
