"""One reader for every notation; and all notations of one real sharding, as JAX and XLA print them."""

import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import reshard as rs
from reshard.errors import LayoutError, MeshError, NotationError
from reshard.geometry.detect import as_layout, as_layouts, read
from reshard.types.layout import Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh

MESH = Mesh(x=4, y=2)
GRID = (16, 16, 16)
EXPECTED = Layout.parse("f32[{y}8, 16, {x}4]", MESH)

SAME = [
    "f32[{y}8, 16, {x}4]",
    " f32[ {y}8, 16, {x}4 ] ",
    "float32[{y}8, 16, {x}4]",
    "P('y', None, 'x')",
    "PartitionSpec('y', None, 'x')",
    "jax.sharding.PartitionSpec('y', None, 'x')",
    '[{"y"}, {}, {"x"}]',
    ' [{"y"}, {}, {"x"}]',
    '<@mesh, [{"y"}, {}, {"x"}]>',
    '#sdy.sharding<@mesh, [{"y"}, {}, {"x"}]>',
    'sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}, {"x"}]>',
    '#sdy.sharding_per_value<[<@mesh, [{"y"}, {}, {"x"}]>]>',
    "[Shard(2), Shard(0)]",
    " (Shard(dim=2), Shard(dim=0))",
    "['S(2)', \"S(-3)\",]",
    "{devices=[2,1,4]<=[4,2]T(1,0)}",
    "{devices=[2,1,4]0,2,4,6,1,3,5,7}",
    "sharding={devices=[2,1,4]<=[4,2]T(1,0)}",
    "{mesh['x'=4,'y'=2], [{'y'}, {}, {'x'}]}",
    "{mesh['a'=2,'b'=2,'c'=2], [{'c'}, {}, {'a', 'b'}]}",
]


@pytest.mark.parametrize("text", SAME)
def test_each_notation_is_recognised(text):
    assert read(text, MESH, GRID, "float32") == EXPECTED


def test_what_the_text_says_need_not_be_given():
    assert read("f32[{y}8, 16, {x}4]", MESH) == EXPECTED
    assert read("{mesh['x'=4,'y'=2], [{'y'}, {}, {'x'}]}", None, GRID, "f32") == EXPECTED
    assert read('<mesh<["x"=4, "y"=2]>, [{"y"}, {}, {"x"}]>', shape=GRID, dtype="f32") == EXPECTED
    made = read("{devices=[2,1,4]<=[4,2]T(1,0)}", shape=GRID, dtype="f32")
    assert made == Layout.from_hlo("{devices=[2,1,4]<=[4,2]T(1,0)}", GRID, "f32")


@pytest.mark.parametrize(
    ("text", "mesh", "layout"),
    [
        ("{devices=[8,2,1]<=[16]}", Mesh(a=2, b=4, c=2), "f32[{a}{b}2, {c}8, 16]"),
        ("{devices=[4,2,1,2]<=[16] last_tile_dim_replicate}", Mesh(a=2, b=8), "f32[{a}{b:(1)2}4, {b:(2)2}8, 16]"),
        (
            "{devices=[1,1,1,4,4]<=[16] last_tile_dims={unreduced, manual}}",
            Mesh(a=2, b=8),
            "f32[16, 16, 16] + sum{a}{b:(1)2}",
        ),
        ("{devices=[3,1,1]<=[3]}", Mesh(one=1, p=3), "f32[{p}6/16, 16, 16]"),
        ("{devices=[2,1,1]1,0}", Mesh(p=2, device_ids=[1, 0]), "f32[{p}8, 16, 16]"),
        ("{replicated}", Mesh(a=2, b=4), "f32[16, 16, 16]"),
        ("{unreduced}", Mesh(a=2, b=4), "f32[16, 16, 16] + sum{a}{b}"),
    ],
)
def test_hlo_is_respelled_in_the_axes_of_the_mesh(text, mesh, layout):
    assert read(text, mesh, GRID, "f32") == Layout.parse(layout, mesh)


REFUSED = [
    (("f32[{y}8, 16, {x}4]",), NotationError, "is in reshard notation, which names axes of a mesh; give the mesh"),
    (("P('x')", None, GRID, "f32"), NotationError, "is in JAX notation, which names axes of a mesh; give the mesh"),
    (("P('x')", MESH), NotationError, "in JAX notation, without shape and dtype; give shape and dtype"),
    (("P('x')", MESH, GRID), NotationError, "in JAX notation, without dtype; give dtype"),
    (('[{"x"}]', MESH, None, "f32"), NotationError, "in Shardy notation, without shape; give shape"),
    (('[{"x"}]', None, (8,), "f32"), MeshError, "no mesh is given"),
    (("{replicated}", MESH), NotationError, "in HLO notation, without shape and dtype"),
    (("f32[8]", MESH, (9,)), LayoutError, "f32[8] has global shape (8,), not (9,); leave shape out"),
    (("f32[8]", MESH, (8,), "f64"), LayoutError, "f32[8] has dtype float32, not float64; leave dtype out"),
    (("f32[8]", MESH, (8,), "f65"), LayoutError, "unknown dtype 'f65'"),
    (("[Shard(0), Foo()]", MESH, GRID, "f32"), NotationError, "cannot read 'Foo()'"),
    (("[Shard(0), Replicate()", MESH, GRID, "f32"), NotationError, "write one placement per axis of the mesh"),
    (("[Shard(0)]", MESH, GRID, "f32"), LayoutError, "1 placements for a mesh of shape (4, 2)"),
    (("[Shard(0)]", None, GRID, "f32"), NotationError, "give the mesh"),
    (("", MESH, GRID, "f32"), NotationError, "cannot tell the notation of ''"),
    (
        ("x=4", MESH, GRID, "f32"),
        NotationError,
        "write f32[{x}8, 16], P('x', None), [{\"x\"}, {}], [Shard(0), Replicate()] or {devices=[2,1]<=[2]}",
    ),
    (("Layout(8)", MESH, GRID, "f32"), NotationError, "cannot tell the notation of 'Layout(8)'"),
    (("{devices=[8,2,1]<=[16]}", MESH, GRID, "f32"), MeshError, "it is over 16 devices, but 8 are given"),
    (("{devices=[2,1,1]1,0}", Mesh(p=2), GRID, "f32"), MeshError, "over the devices [1, 0], mesh <p=2> over 0..1"),
    (
        ("{devices=[3,2,1]<=[6]}", Mesh(a=2, b=3), GRID, "f32"),
        MeshError,
        "whose axes cannot express f32[{d0:(1)3}6/16, {d0:(3)2}8, 16] on <d0=6>",
    ),
    (("{devices=[8,2]<=[16]}", None, (8,), "f32"), LayoutError, "2 tile dims of an array"),
]


@pytest.mark.parametrize(("given", "error", "message"), REFUSED)
def test_refused(given, error, message):
    with pytest.raises(error, match=re.escape(message)):
        read(*given)


# Real shardings. They are made in a process of its own, because the number of devices is fixed there
# once and for all; it prints every notation of each, and which part of the array each device has.

JAX = r"""
import json, re
import jax, numpy as np
from itertools import permutations
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jax._src.lib import xla_client

H = xla_client.HloSharding
SHAPE = (24, 48, 72)

def cases(axes):
    names = list(axes)
    for order in permutations(names):
        yield [[n] for n in order]
        yield [list(order), [], []]
        yield [[], list(order[:2]), list(order[2:])]
    for name in names:
        yield [[], [name], []]
    yield [[], [], []]

def lowered(sharding):
    lowered = jax.jit(lambda x: x, in_shardings=sharding).lower(jax.ShapeDtypeStruct(SHAPE, "float32"))
    return re.search(r"sdy\.sharding = (#sdy\.sharding<.*?>)\}", lowered.as_text())[1]

def named(mesh, spec, ids):
    axes = ",".join(f"'{n}'={s}" for n, s in mesh.items())
    dims = ", ".join("{" + ", ".join(f"'{n}'" for n in dim) + "}" for dim in spec)
    numbers = f", device_ids=({','.join(map(str, ids))})" if ids != sorted(ids) else ""
    return H.from_string("{mesh[%s]%s, [%s]}" % (axes, numbers, dims))

sharded = []
MESHES = [{"x": 4, "y": 2}, {"y": 2, "x": 4}, {"a": 2, "b": 2, "c": 2}, {"d": 8}, {"p": 2, "q": 3}, {"x": 1, "y": 8}]
for axes in MESHES:
    count = int(np.prod(list(axes.values())))
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(*axes.values()), tuple(axes))
    other = np.random.RandomState(0).permutation(count).tolist()
    for spec in cases(axes):
        spec = (spec + [[], [], []])[:3]
        p = P(*(tuple(dim) or None for dim in spec))
        s = NamedSharding(mesh, p)
        hlo = s._to_xla_hlo_sharding(3)
        parts = {d.id: [list(part.indices(n)[:2]) for part, n in zip(index, SHAPE)]
                 for d, index in s.devices_indices_map(SHAPE).items()}
        v3, moved = named(axes, spec, list(range(count))), named(axes, spec, other)
        sharded.append({
            "axes": axes, "spec": spec, "jax": repr(p), "shardy": lowered(s), "hlo": str(hlo), "named": str(v3),
            "iota": str(H.v3_to_v2_sharding(v3)), "ids": other, "moved": str(moved),
            "listed": str(H.v3_to_v2_sharding(moved)), "parts": parts,
        })

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
unreduced = []
for p in [P(None, "x", None, unreduced={"y"}), P("y", unreduced={"x"}), P(unreduced={"x", "y"})]:
    s = NamedSharding(mesh, p)
    struct = jax.ShapeDtypeStruct(SHAPE, "float32", sharding=s)
    text = jax.jit(lambda x: x, in_shardings=s).lower(struct).as_text()
    shardy = re.search(r"sdy\.sharding = (#sdy\.sharding<.*?>)\}", text)[1]
    unreduced.append({"jax": repr(p), "shardy": shardy, "hlo": str(s._to_xla_hlo_sharding(3)),
                      "spec": [list([d] if isinstance(d, str) else d or []) for d in p.partitions],
                      "unreduced": sorted(p.unreduced)})
subs = []
for text in ["{mesh['x'=4,'y'=2], [{'x':(1)2, 'y'}, {}, {'x':(2)2}]}",
             "{mesh['x'=4,'y'=2], [{'x':(2)2, 'x':(1)2}, {}, {}]}",
             "{mesh['u'=8], [{'u':(2)2}, {'u':(1)2}, {}]}", "{mesh['u'=12], [{'u':(2)3}, {'u':(6)2}, {}]}",
             "{mesh['x'=4,'y'=2], device_ids=([4,2]T(1,0)), [{'x':(1)2, 'y'}, {}, {'x':(2)2}]}",
             "{mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)), [{'y'}, {}, {'x'}]}",
             "{mesh['u'=8,'v'=3], [{'v'}, {'u':(4)2}, {}], replicated={'u':(1)2}}",
             "{mesh['x'=4,'y'=2], [{'y'}, {}, {}], manual={'x'}}",
             "{mesh['x'=4,'y'=2], [{'y'}, {}, {}], unreduced={'x':(1)2}}",
             "{mesh['x'=4,'y'=2], [{'y', ?}, {?}, {}], replicated={'x':(2)2}, unreduced={'x':(1)2}}"]:
    h = H.from_string(text)
    subs.append([str(h), str(H.v3_to_v2_sharding(h))])
print(json.dumps({"sharded": sharded, "unreduced": unreduced, "sub_axes": subs, "shape": SHAPE}))
"""


@pytest.fixture(scope="module")
def real():
    """What JAX says, or a skip: the one place in these tests that needs it."""
    pytest.importorskip("jax")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    run = subprocess.run([sys.executable, "-c", JAX], env=env, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def parts(layout, count):
    """Which elements each device has, per dim: the first, and the one past the last."""
    spans = {}
    for device in range(count):
        dims = meaning(layout, device)
        assert all(dim == tuple(range(dim[0], dim[-1] + 1)) for dim in dims)
        spans[str(device)] = [[dim[0], dim[-1] + 1] for dim in dims]
    return spans


def test_every_notation_of_a_real_sharding_means_its_index_map(real):
    shape, seen = real["shape"], set()
    for case in real["sharded"]:
        mesh = Mesh(case["axes"])
        expected = Layout.from_spec(mesh, shape, "f32", case["spec"])
        assert parts(expected, mesh.size) == case["parts"], case
        for notation in ("jax", "shardy", "hlo", "named", "iota"):
            text = case[notation]
            seen.add(text)
            assert read(text, mesh, shape, "f32") == expected, text
            if notation not in ("jax", "shardy"):
                own = Layout.from_hlo(text, shape, "f32", num_devices=1 if "mesh[" in text else mesh.size)
                assert parts(own, mesh.size) == case["parts"], text
    assert len(seen) >= 120


def test_real_shardings_of_devices_in_another_order(real):
    shape, seen = real["shape"], set()
    for case in real["sharded"]:
        mesh = Mesh(case["axes"], device_ids=case["ids"])
        expected = Layout.from_spec(mesh, shape, "f32", case["spec"])
        seen |= {case["moved"], case["listed"]}
        assert Layout.from_hlo(case["moved"], shape, "f32") == expected, case
        listed = Layout.from_hlo(case["listed"], shape, "f32", num_devices=mesh.size)
        assert parts(listed, mesh.size) == parts(expected, mesh.size), case
    assert len(seen) >= 60


def test_real_unreduced_shardings(real):
    assert len(real["unreduced"]) == 3
    for case in real["unreduced"]:
        expected = Layout.from_spec(MESH, real["shape"], "f32", case["spec"], unreduced=case["unreduced"])
        for notation in ("jax", "shardy", "hlo"):
            assert read(case[notation], MESH, real["shape"], "f32") == expected, case


def test_sub_axes_mean_what_xla_makes_of_them(real):
    for named, tiled in real["sub_axes"]:
        expected = Layout.from_hlo(named, real["shape"], "f32")
        layout = Layout.from_hlo(tiled, real["shape"], "f32")
        size = expected.mesh.size
        assert layout.mesh.size == size
        assert parts(layout, size) == parts(expected, size), (named, tiled)
        assert sum_groups(layout) == sum_groups(expected), (named, tiled)


def sum_groups(layout):
    """The devices that hold the same part of a sum, for each part."""
    groups = {}
    for device in layout.mesh.devices:
        at = layout.mesh.position(device)
        groups.setdefault(tuple(at // layout.mesh.stride(s) % s.size for s in layout.partial), set()).add(device)
    return {frozenset(group) for group in groups.values()}


# What JAX and torch say of an array, beside the text of the same layout.


class Shard:
    def __init__(self, dim: int) -> None:
        self.dim = dim


class DeviceMesh:
    """As torch's: a tensor of ranks, and names."""

    mesh = np.arange(8).reshape(4, 2)[::-1]
    mesh_dim_names = ("x", "y")


class DTensor:
    placements, device_mesh, shape, dtype = (Shard(2), Shard(0)), DeviceMesh(), GRID, "float32"


def test_what_jax_says_of_an_array_is_its_layout():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    spec = PartitionSpec("y", None, "x")
    sharding = NamedSharding(mesh, spec)
    x = jax.device_put(np.zeros(GRID, "float32"), sharding)
    for_shape = jax.ShapeDtypeStruct(GRID, "float32", sharding=sharding)
    assert as_layout(x) == as_layout(for_shape) == Layout.from_jax(x) == EXPECTED
    assert as_layout(sharding, None, GRID, "float32") == EXPECTED
    for given in (mesh, MESH, {"x": 4, "y": 2}, "x=4,y=2"):
        assert (
            as_layout(spec, given, GRID, np.float32) == as_layout("P('y', None, 'x')", given, GRID, "f32") == EXPECTED
        )
        assert as_layout(("y", None, ["x"]), given, GRID, "f32") == as_layout(str(EXPECTED), given) == EXPECTED
        assert as_layout([Shard(2), "S(0)"], given, GRID, "f32") == EXPECTED
    alone = as_layout(jax.device_put(np.zeros(3, "int32"), jax.devices()[5]))
    assert (str(alone), alone.mesh.devices) == ("s32[3]", (5,))


def test_what_torch_says_of_an_array_is_its_layout():
    ids = [6, 7, 4, 5, 2, 3, 0, 1]
    there = Layout.parse(str(EXPECTED), Mesh(MESH.axes, device_ids=ids))
    assert as_layout(DTensor()) == as_layout(DTensor.placements, DeviceMesh(), GRID, "float32") == there
    assert Layout.from_dtensor(["S(2)", "S(0)"], DeviceMesh(), GRID, "float32") == there
    assert as_layout("P('y', None, 'x')", DeviceMesh(), GRID, "float32") == there


def test_an_axis_is_no_placement():
    """A mesh may have axes that are called as placements are written."""
    assert str(as_layout(["R", "P"], Mesh(R=2, P=2), (4, 4), "f32")) == "f32[{R}2, {P}2]"
    assert str(as_layout(["R", "P"], Mesh(a=2, b=2), (4, 4), "f32")) == "f32[4, 4] + sum{b}"


@pytest.mark.parametrize(
    ("source", "target", "given"),
    [
        ("f32[{y}8, 16, {x}4]", "P(None, 'x')", {"mesh": MESH}),
        ("P('y', None, 'x')", "f32[16, {x}4, 16]", {"mesh": MESH}),
        ("P('y', None, 'x')", "[{}, {'x'}, {}]", {"mesh": MESH, "shape": GRID, "dtype": "f32"}),
        (EXPECTED, PartitionSpec(None, "x"), {}),
        (EXPECTED, "f32[16, {x}4, 16]", {}),
        ("f32[{y}8, 16, {x}4]", Layout.parse("f32[16, {x}4, 16]", MESH), {}),
        (PartitionSpec("y", None, "x"), Layout.parse("f32[16, {x}4, 16]", MESH), {}),
        (EXPECTED, (None, "x"), {"mesh": MESH}),
    ],
)
def test_each_end_of_a_move_says_what_the_other_one_leaves_out(source, target, given):
    assert as_layouts(source, target, **given) == (EXPECTED, Layout.parse("f32[16, {x}4, 16]", MESH))


def test_a_mesh_is_for_what_has_no_devices_of_its_own():
    sharding = NamedSharding(jax.make_mesh((4, 2), ("x", "y")), PartitionSpec("y"))
    here, there = jax.device_put(np.zeros(GRID, "float32"), sharding), Mesh({"x": 4}, device_ids=range(8, 12))
    plan = rs.plan(here, PartitionSpec(None, "x"), mesh=there)
    assert (plan.source.mesh, plan.target.mesh) == (MESH, there)
    assert rs.plan_tree({"a": (here, "P('x')"), "b": [here, sharding]}, mesh=there).plans["a"].target.mesh == there
    assert rs.plan(sharding, here).steps == ()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: as_layout(7), LayoutError, "7 is a int, not a Layout; give one, text"),
        (lambda: as_layout(MESH), LayoutError, "a mesh goes in mesh="),
        (lambda: as_layout(np.zeros(4)), LayoutError, "give the layout that it has"),
        (lambda: as_layout(PartitionSpec("x")), NotationError, "without mesh and shape and dtype"),
        (lambda: as_layout(["x", 3], MESH, (4,), "f32"), LayoutError, "not a Layout"),
        (lambda: as_layout("P('x')", {"x": 0}, (4,), "f32"), MeshError, "axis 'x' has size 0"),
        (lambda: as_layouts("P('x')", "P()"), NotationError, "without shape and dtype"),
    ],
)
def test_what_says_no_layout_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
