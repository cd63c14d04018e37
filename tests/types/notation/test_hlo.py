"""HLO shardings, against the device assignment as numpy computes it: iota, reshape, transpose, reshape."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import LayoutError, MeshError, NotationError, ReshardError
from reshard.types.layout import Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh

GRID = (16, 16, 16)


def read(text, shape=GRID, **options):
    return Layout.from_hlo(text, shape, "float32", **options)


def assigned(sizes, dims, order=None):
    """The device of each tile."""
    iota = np.arange(math.prod(dims)).reshape(dims)
    return iota.transpose(order if order is not None else range(len(dims))).reshape(sizes)


def assert_means(layout, owners, shape, unreduced=()):
    """Each device has the tile at its place in `owners`; dims past the shape's say who shares a tile."""
    tiles = [-(-size // count) for size, count in zip(shape, owners.shape, strict=False)]
    assert sorted(layout.mesh.devices) == sorted(owners.flat)
    parts = {}
    for place in np.ndindex(owners.shape):
        device = int(owners[place])
        here = zip(place, tiles, strict=False)
        assert meaning(layout, device) == tuple(tuple(range(at * tile, (at + 1) * tile)) for at, tile in here), device
        position = layout.mesh.position(device)
        held = tuple(position // layout.mesh.stride(sub) % sub.size for sub in layout.partial)
        parts.setdefault(tuple(place[at] for at in unreduced), set()).add(held)
    # Devices are of one part of the sum exactly where their unreduced coordinates are the same.
    assert all(len(held) == 1 for held in parts.values())
    assert len(set.union(*parts.values())) == len(parts)


def same_meaning(a, b):
    return all(meaning(a, device) == meaning(b, device) for device in a.mesh.devices)


# Iotas ("V2").

V2 = [
    ("{devices=[2,1,4]<=[4,2]T(1,0)}", "<d0=4, d1=2>", "f32[{d1}8, 16, {d0}4]"),
    ("{devices=[1,8,1]<=[8]}", "<d0=8>", "f32[16, {d0}2, 16]"),
    ("{devices=[2,1,4]<=[8]}", "<d0=8>", "f32[{d0:(1)2}8, 16, {d0:(2)4}4]"),
    ("{devices=[2,1,2,2]<=[8] last_tile_dim_replicate}", "<d0=8>", "f32[{d0:(1)2}8, 16, {d0:(2)2}8]"),
    ("{devices=[1,4,1,4]<=[4,4]T(1,0) last_tile_dim_replicate}", "<d0=4, d1=4>", "f32[16, {d1}4, 16]"),
    ("{devices=[8,2,1]<=[2,8]T(1,0)}", "<d0=2, d1=8>", "f32[{d1}2, {d0}8, 16]"),
    ("{devices=[4,4,1]<=[2,8]T(1,0)}", "<d0=2, d1=8>", "f32[{d1:(1)4}4, {d1:(4)2}{d0}4, 16]"),
    ("{devices=[4,1,2]<=[2,2,2]T(2,1,0)}", "<d0=2, d1=2, d2=2>", "f32[{d2}{d1}4, 16, {d0}8]"),
    ("{devices=[1,1,1]<=[1]}", "<>", "f32[16, 16, 16]"),
    ("{devices=[2,1,2]<=[1,2,1,2]T(3,2,1,0)}", "<d0=2, d1=2>", "f32[{d1}8, 16, {d0}8]"),
]


@pytest.mark.parametrize(("text", "mesh", "layout"), V2)
def test_iota_text(text, mesh, layout):
    made = read(text)
    assert (str(made.mesh), str(made), made.mesh.device_ids) == (mesh, layout, None)


@pytest.mark.parametrize(
    "same",
    [
        "{devices=[2,1,4]0,1,2,3,4,5,6,7}",
        "{devices=[2,1,4]<=[2,4]}",
        "{devices=[2,1,4]<=[2,4]T(0,1)}",
        "{devices=[2,1,4]<=[1,8]T(1,0)}",
        "sharding={devices=[2,1,4]<=[8]}",
        "  sharding = { devices = [ 2 , 1 , 4 ] <= [ 8 ] } ",
        '{devices=[2,1,4]<=[8] metadata={op_name="jit(f)/a}b\\"c" source_line=3}}',
        '{devices=[2,1,4]<=[8] metadata={{op_name="a"}, {op_name="b"}}}',
        '{devices=[2,1,4]<=[8], metadata={op_name="a"}}',
        'sharding={devices=[2,1,4]<=[8]}, metadata={op_name="x"}',
        'sharding={devices=[2,1,4]<=[8]}, frontend_attributes={a="{"}, metadata={op_name="x"}',
        "{devices=[2,1,4]<=[8] shard_as 1}",
        "{devices=[2,1,4]<=[8] shard_like 12}",
    ],
)
def test_one_sharding_is_one_object(same):
    assert read(same) == read("{devices=[2,1,4]<=[8]}")


@st.composite
def assignments(draw, lasts=2):
    """Tile sizes, iota dims and their order, and how many of the tile dims are past the array's."""
    dims = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5, 6]), min_size=1, max_size=4))
    while math.prod(dims) > 72:
        dims.pop()
    order = draw(st.permutations(range(len(dims))))
    last = draw(st.integers(0, lasts))
    sizes = [1] * (draw(st.integers(1, 3)) + last)
    for prime in primes(math.prod(dims)):
        sizes[draw(st.integers(0, len(sizes) - 1))] *= prime
    return tuple(sizes), tuple(dims), tuple(order), last


def primes(number):
    factors = []
    for prime in (2, 3, 5, 7):
        while number % prime == 0:
            factors.append(prime)
            number //= prime
    return factors


def spelled(numbers):
    return ",".join(map(str, numbers))


@given(assignments(), st.lists(st.integers(1, 30), min_size=3, max_size=3), st.randoms(use_true_random=False))
def test_an_iota_assigns_the_devices_that_numpy_computes(assignment, scale, random):
    sizes, dims, order, last = assignment
    kinds = [random.choice(["replicated", "manual", "unreduced"]) for _ in range(last)]
    shape = tuple(scale[: len(sizes) - last])
    tail = f" last_tile_dims={{{', '.join(kinds)}}}" if kinds else ""
    owners = assigned(sizes, dims, order)
    unreduced = [len(shape) + at for at, kind in enumerate(kinds) if kind == "unreduced"]
    layout = read(f"{{devices=[{spelled(sizes)}]<=[{spelled(dims)}]T({spelled(order)}){tail}}}", shape)
    assert_means(layout, owners, shape, unreduced)
    listed = read(f"{{devices=[{spelled(sizes)}]{spelled(owners.flat)}{tail}}}", shape)
    assert listed == layout, "the list of ids of an iota is that iota"


def test_tiles_that_cut_no_axes_keep_their_own_with_device_ids():
    layout = read("{devices=[2,3]<=[2,3]T(1,0)}", (8, 9))
    assert (str(layout.mesh), layout.mesh.device_ids) == ("<d0=2, d1=3>", (0, 3, 1, 4, 2, 5))
    assert_means(layout, assigned((2, 3), (2, 3), (1, 0)), (8, 9))


def test_a_large_regular_mesh_lists_no_devices():
    layout = read("{devices=[1024,1,65536,1048576]<=[65536,1073741824]T(1,0) last_tile_dim_replicate}", (2**20,) * 3)
    assert layout.mesh.size == 2**46
    assert layout.tile_shape == (1024, 2**20, 16)


# Lists ("V1").


@given(st.permutations(range(12)), st.sampled_from([(12,), (3, 4), (2, 6), (2, 3, 2)]))
def test_any_list_of_devices(ids, sizes):
    owners = np.array(ids).reshape(sizes)
    assert_means(read(f"{{devices=[{spelled(sizes)}]{spelled(ids)}}}", (13,) * len(sizes)), owners, (13,) * len(sizes))


@pytest.mark.parametrize("ids", [(3, 5), (5, 3), (0, 2), (1, 0), (7, 1), (0, 4)])
def test_ids_need_not_be_dense(ids):
    layout = read(f"{{devices=[2,1,1]{spelled(ids)}}}")
    assert layout.mesh.devices == ids
    assert_means(layout, np.array(ids).reshape(2, 1, 1), GRID)


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("{devices=[2,1,4]0,2,4,6,1,3,5,7}", "Mesh({'d0': 4, 'd1': 2})"),
        ("{devices=[8,1,1]0,4,2,6,1,5,3,7}", "Mesh({'d0': 2, 'd1': 2, 'd2': 2})"),
        ("{devices=[2,1,4]0,2,4,6,1,3,7,5}", "Mesh({'d0': 2, 'd1': 4}, device_ids=[0, 2, 4, 6, 1, 3, 7, 5])"),
        ("{devices=[2,1,2]3,2,1,0}", "Mesh({'d0': 2, 'd1': 2}, device_ids=[3, 2, 1, 0])"),
        ("{devices=[1,1,1]0}", "Mesh({})"),
        ("{devices=[1,1,1]3}", "Mesh({}, device_ids=[3])"),
        ("{devices=[3,1,2]0,1,3,2,4,5 last_tile_dims={}}", "Mesh({'d0': 3, 'd1': 2}, device_ids=[0, 1, 3, 2, 4, 5])"),
    ],
)
def test_the_mesh_of_a_list(text, mesh):
    assert repr(read(text).mesh) == mesh


# Last tile dims, and what is the same everywhere.


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("{devices=[2,1,2,2]<=[8] last_tile_dims={manual}}", "f32[{d0:(1)2}8, 16, {d0:(2)2}8]"),
        ("{devices=[2,1,2,2]<=[8] last_tile_dims={replicated}}", "f32[{d0:(1)2}8, 16, {d0:(2)2}8]"),
        ("{devices=[2,1,2,2]<=[8] last_tile_dims={unreduced}}", "f32[{d0:(1)2}8, 16, {d0:(2)2}8] + sum{d0:(4)2}"),
        ("{devices=[1,2,1,2,2]<=[8] last_tile_dims={manual, replicated}}", "f32[16, {d0:(1)2}8, 16]"),
        ("{devices=[1,2,1,2,2]<=[8] last_tile_dims={unreduced,manual}}", "f32[16, {d0:(1)2}8, 16] + sum{d0:(2)2}"),
        ("{devices=[1,1,1,8]<=[8] last_tile_dim_replicate}", "f32[16, 16, 16]"),
        ("{devices=[1,1,1,4,2]<=[8] last_tile_dims={unreduced, unreduced}}", "f32[16, 16, 16] + sum{d0}"),
    ],
)
def test_last_tile_dims(text, layout):
    assert str(read(text)) == layout


def test_replicated_has_num_devices_devices():
    assert read("{replicated}") == Layout.from_spec(Mesh(), GRID, "float32", [])
    assert read("{replicated}", num_devices=8) == Layout.from_spec(Mesh(d0=8), GRID, "float32", [])
    assert read('{replicated metadata={op_name="a"}}', num_devices=8) == read("{mesh[], replicated}", num_devices=8)
    assert str(read("{unreduced}", num_devices=4)) == "f32[16, 16, 16] + sum{d0}"
    assert read("{devices=[8,1,1]<=[8]}", num_devices=8) == read("{devices=[8,1,1]<=[8]}")
    assert str(read("{replicated}", ())) == "f32[]"


# Named axes.

NAMED = [
    ("{mesh['x'=4,'y'=2], [{'y'}, {}, {'x'}]}", "f32[{y}8, 16, {x}4]"),
    ("{mesh['x'=4,'y'=2], [{}, {'x', 'y'}, {}]}", "f32[16, {x}{y}2, 16]"),
    ("{mesh['x'=4,'y'=2], [{'x':(1)2,'y'}, {}, {'x':(2)2}]}", "f32[{x:(1)2}{y}4, 16, {x:(2)2}8]"),
    ("{mesh['x'=4,'y'=2], [{'y', ?}, {?}, {'x'}]}", "f32[{y}8, 16, {x}4]"),
    ("{mesh['x'=4,'y'=2], [{'y'}, {}, {}], replicated={'x'}}", "f32[{y}8, 16, 16]"),
    ("{mesh['x'=4,'y'=2], [{'y'}, {}, {}], manual={'x'}}", "f32[{y}8, 16, 16]"),
    ("{mesh['x'=4,'y'=2], [{'y'}, {}, {}], unreduced={'x'}}", "f32[{y}8, 16, 16] + sum{x}"),
    ("{mesh['x'=4,'y'=2], [{'y'}, {}, {}], unreduced=max{'x':(2)2}}", "f32[{y}8, 16, 16] + max{x:(2)2}"),
    ("{mesh['x'=4,'y'=2], [], unreduced=min{'x', 'y'}}", "f32[16, 16, 16] + min{x}{y}"),
    ("{mesh['x'=4,'y'=2], []}", "f32[16, 16, 16]"),
    ("{mesh['x'=4,'y'=2], replicated}", "f32[16, 16, 16]"),
    ("{mesh['x'=4,'y'=2], unreduced}", "f32[16, 16, 16] + sum{x}{y}"),
    ("{mesh['x'=4,'y'=2], unreduced=max}", "f32[16, 16, 16] + max{x}{y}"),
    ("{mesh[x=4,y=2], [{y}, {}, {x}]}", "f32[{y}8, 16, {x}4]"),
    (
        "sharding={mesh['x'=4,'y'=2], [{'y'}, {}, {}], replicated={'x':(1)2}, unreduced={'x':(2)2}, "
        'metadata={op_name="}"}}, metadata={op_name="a"}',
        "f32[{y}8, 16, 16] + sum{x:(2)2}",
    ),
]


@pytest.mark.parametrize(("text", "layout"), NAMED)
def test_named_text(text, layout):
    assert read(text) == Layout.parse(layout, Mesh(x=4, y=2))


@pytest.mark.parametrize(
    ("numbers", "ids"),
    [
        ("[8]", None),
        ("[4,2]T(1,0)", (0, 2, 4, 6, 1, 3, 5, 7)),
        ("[2,4]T(1,0)", (0, 4, 1, 5, 2, 6, 3, 7)),
        ("<=[2,4]T(1,0)", (0, 4, 1, 5, 2, 6, 3, 7)),
        ("0,2,4,6,1,3,7,5", (0, 2, 4, 6, 1, 3, 7, 5)),
        ("0,2,4,6,1,3,5,7", (0, 2, 4, 6, 1, 3, 5, 7)),
        ("0,1,2,3,4,5,6,7", None),
    ],
)
def test_named_device_ids(numbers, ids):
    layout = read(f"{{mesh['x'=4,'y'=2], device_ids=({numbers}), [{{'y'}}, {{}}, {{'x'}}]}}")
    assert layout == Layout.from_spec(Mesh(x=4, y=2, device_ids=ids), GRID, "float32", [["y"], [], ["x"]])


@st.composite
def named(draw):
    """A mesh of up to three axes and the devices at its places, and disjoint (axis, pre, size) per dim."""
    axes = {
        name: draw(st.sampled_from([1, 2, 3, 4, 6])) for name in draw(st.permutations("abc"))[: draw(st.integers(1, 3))]
    }
    ids = draw(st.permutations(range(math.prod(axes.values()))))
    refs = []
    for name, size in axes.items():
        pre = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        refs += [(name, 1, pre), (name, pre, size // pre)]
    rank = draw(st.integers(1, 3))
    places = [draw(st.integers(0, rank)) for _ in refs]
    refs = draw(st.permutations(list(zip(refs, places, strict=True))))
    return axes, ids, [[ref for ref, place in refs if place == dim] for dim in range(rank)]


def coordinates(place, axes, refs):
    """The number that a device at `place` has along these sub-axes, major to minor."""
    number = 0
    for name, pre, size in refs:
        at = place[list(axes).index(name)]
        number = number * size + at // (axes[name] // (pre * size)) % size
    return number


@given(named(), st.lists(st.integers(1, 40), min_size=3, max_size=3))
def test_named_means_what_its_axes_say(sharding, sizes):
    axes, ids, dims = sharding
    shape = sizes[: len(dims)]
    mesh = ",".join(f"'{name}'={size}" for name, size in axes.items())
    spec = ", ".join("{" + ", ".join(f"'{n}':({p}){s}" for n, p, s in dim) + "}" for dim in dims)
    layout = read(f"{{mesh[{mesh}], device_ids=({spelled(ids)}), [{spec}]}}", shape)
    for place, device in np.ndenumerate(np.array(ids).reshape(*axes.values())):
        tiles = [-(-size // math.prod(s for _, _, s in dim)) for size, dim in zip(shape, dims, strict=True)]
        starts = [coordinates(place, axes, dim) * tile for dim, tile in zip(dims, tiles, strict=True)]
        assert meaning(layout, device) == tuple(
            tuple(range(start, start + tile)) for start, tile in zip(starts, tiles, strict=True)
        )


# Real users' shardings: mesh, global shape, axes per dim, and the HLO of the report; where a report
# leaves out the devices ({devices=[1,64,1]}), those of its mesh are written here.

REPORTED = [
    ({"x": 4, "y": 2}, (16, 16, 16), [["y"], [], ["x"]], "{devices=[2,1,4]<=[4,2]T(1,0)}"),
    ({"a": 16, "b": 4}, (3, 128, 128), [[], [], ["b"]], "{devices=[1,1,4,16]<=[16,4]T(1,0) last_tile_dim_replicate}"),
    ({"c": 4, "e": 16}, (64, 3072, 6144), [[], [], ["e", "c"]], "{devices=[1,1,64]<=[4,16]T(1,0)}"),
    ({"c": 4, "e": 16}, (64, 3072, 6144), [["c"]], "{devices=[4,1,1,16]<=[64] last_tile_dim_replicate}"),
    ({"x": 4, "y": 4}, (36, 600, 600), [["x", "y"], [], []], "{devices=[16,1,1]<=[16]}"),
    ({"x": 8, "y": 10}, (144, 200, 160), [[], ["y"]], "{devices=[1,10,1,8]<=[8,10]T(1,0) last_tile_dim_replicate}"),
    ({"x": 4, "y": 4}, (1, 1504, 1964), [["x", "y"], [], []], "{devices=[16,1,1]<=[16]}"),
    (
        {"C": 1, "D": 2, "Y": 8, "X": 4, "T": 4},
        (2048, 2048),
        [[], ["X", "T"]],
        "{devices=[1,16,16]<=[16,16]T(1,0) last_tile_dim_replicate}",
    ),
]


@pytest.mark.parametrize(("axes", "shape", "spec", "text"), REPORTED)
def test_a_reported_sharding_matches_its_axes(axes, shape, spec, text):
    expected = Layout.from_spec(Mesh(axes), shape, "float32", spec)
    layout = read(text, shape)
    assert layout.mesh.devices == expected.mesh.devices
    assert same_meaning(layout, expected)


# Texts that are refused, and the message of each.

REFUSED = [
    ("", NotationError, "it ends too early; write {replicated}"),
    ("{}", NotationError, "cannot read '}'; write {replicated}"),
    ("devices=[8]<=[8]", NotationError, "cannot read 'devices=[8]<=[8]'"),
    ("{devices=[8,1,1]}", NotationError, "which device has which tile; write <=[8]"),
    ("{devices=[8,1,1]<=[8]", NotationError, "it ends too early; close the sharding with }"),
    ("{devices=[8,1,1]<=[8]} and more", NotationError, "cannot read 'and more'; nothing may follow"),
    ("{devices=[8,1,1]<=[8] ...}", NotationError, "cannot read '...}'; close the sharding with }"),
    ("{devices=[8,1,1<=[8]}", NotationError, "close the list with ]"),
    ("{devices=[]<=[8]}", NotationError, "at least one size"),
    ("{devices=[8,0,1]<=[8]}", NotationError, "all of them at least 1"),
    ("{devices=[8,-1,1]<=[8]}", NotationError, "cannot read '-1,1]<=[8]}'; sizes are whole numbers"),
    ("{devices=[8,1,1]<=[4]}", NotationError, "4 is not the 8 devices"),
    ("{devices=[8,1,1]<=[4,2]T(0,0)}", NotationError, "must order the 2 dims before it, each of 0..1 once"),
    ("{devices=[8,1,1]<=[4,2]T(1)}", NotationError, "must order the 2 dims"),
    ("{devices=[8,1,1]<=[4,2]T1,0}", NotationError, "write a transposition as T(1,0)"),
    ("{devices=[4,1,1]0,1,2}", NotationError, "lists 3 device ids, 3 of them different, for 4 tiles"),
    ("{devices=[4,1,1]<=0,1,2,3}", NotationError, "which device has which tile; write <=[4]"),
    ("{devices=[" + "9" * 5000 + ",1,1]<=[8]}", NotationError, "sizes are whole numbers"),
    ("{devices=[1,1,1]" + "9" * 5000 + "}", NotationError, "which device has which tile"),
    (
        "{devices=[2,1,4]<=[8] last_tile_dims={partial}}",
        NotationError,
        "the last tile dims are replicated, manual, unre",
    ),
    ("{devices=[2,4]<=[8]}", LayoutError, "2 tile dims of an array (2 less 0 for last tile dims), but the array has 3"),
    ("{devices=[2,1,4]<=[8] last_tile_dim_replicate}", LayoutError, "2 tile dims of an array (3 less 1"),
    ("{devices=[8]<=[8] last_tile_dims={manual, manual}}", LayoutError, "(1 less 2"),
    ("{devices=[2,3,3037000507]<=[2,3,3037000507]T(2,1,0)}", MeshError, "at most 4194304 can be listed"),
    ("{manual}", LayoutError, "no global array to lay out; use the sharding that the array has outside"),
    ("{mesh['x'=2], manual}", LayoutError, "no global array to lay out"),
    ("{unknown}", LayoutError, "has not chosen a sharding yet"),
    ("{maximal device=3}", LayoutError, "use Layout.from_spec([], Mesh(device_ids=[3]), shape, dtype)"),
    ("{maximal_mesh[device_id=5]}", LayoutError, "Mesh(device_ids=[5])"),
    ("{single_device[device_id=5]}", LayoutError, "every device of the mesh holds a tile"),
    ("{unreduced}", MeshError, "unknown number of devices; say how many, 2 or more, with num_devices"),
    ("{{replicated}, {replicated}}", NotationError, "the sharding of a tuple; give that of one element"),
    ("{mesh['x'=4,'y'=2]}", NotationError, "one {} per dim in [] follows the mesh"),
    ("{mesh['x'=4,'y'=2], [{'y'}, {}]}", LayoutError, "2 dims of axes for global shape (16, 16, 16) of rank 3"),
    ("{mesh['x'=4,'y'=2], [{'x'}, {}, {}], manual={'x'}}", LayoutError, "(single use)"),
    (
        "{mesh['x'=4,'y'=2], device_ids=([4]), [{}, {}, {}]}",
        NotationError,
        "4 is not the 8 devices of the tiles or axes",
    ),
    ("{mesh['x'=2], device_ids=(0,0), [{}, {}, {}]}", NotationError, "lists 2 device ids, 1 of them different"),
    (
        "{mesh['x'=2], [{}, {}, {}], open={'x'}}",
        NotationError,
        "cannot read \"open={'x'}}\"; each of replicated, unred",
    ),
    ("{mesh['x'=2], sharded}", NotationError, "cannot read 'sharded}'"),
    ('{replicated metadata={op_name="}"}', NotationError, "close the sharding with }"),
]


@pytest.mark.parametrize(("text", "error", "message"), REFUSED)
def test_refused(text, error, message):
    with pytest.raises(error, match=re.escape(message)):
        read(text)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("{devices=[8,1,1]<=[8]}", {"num_devices": 4}, "it is over 8 devices, but 4 are given"),
        ("{replicated}", {"num_devices": 0}, "size 0"),
        ("{replicated}", {"num_devices": "8"}, "a size is a whole number"),
    ],
)
def test_refused_num_devices(text, options, message):
    with pytest.raises(MeshError, match=re.escape(message)):
        read(text, **options)


def test_errors_name_the_sharding_and_the_global_shape():
    with pytest.raises(ReshardError) as error:
        read("{devices=[2,4]<=[8]}")
    assert "sharding '{devices=[2,4]<=[8]}' of an array of global shape (16, 16, 16)" in str(error.value)


def test_the_advice_for_one_device_works():
    layout = Layout.from_spec(Mesh(device_ids=[3]), GRID, "float32", [])
    assert meaning(layout, 3) == (tuple(range(16)),) * 3


@given(st.text(alphabet="{}[]()<=,'? :dxT0123mesh=devices replicated unreduced manual last_tile_dims", max_size=40))
def test_no_text_breaks_the_reader(text):
    try:
        read("{" + text + "}")
    except ReshardError as error:
        assert len(str(error)) < 1000
