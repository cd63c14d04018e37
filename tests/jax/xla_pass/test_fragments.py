"""Plans, shifts and operations compiled to fragments, and what a proposal asks for."""

import random
from dataclasses import fields, replace
from itertools import pairwise, permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
import reshard.jax
from reshard import hlo
from reshard.doctor.batch_ops import BatchOp
from reshard.doctor.dataflow.index_maps import Untraceable
from reshard.doctor.shifts import Shift, ShiftCell
from reshard.errors import SpliceError
from reshard.hlo import Array
from reshard.hlo.proto import ModuleProto
from reshard.jax.xla_pass import fragments, measured_programs, program_peaks, xla_hook
from reshard.jax.xla_pass.fragments import (
    FragmentKey,
    Fragments,
    MoveKey,
    OpFragmentKey,
    ShiftKey,
    in_places,
    print_module,
    rows_function,
)
from reshard.jax.xla_pass.measured_programs import measure_program
from tests.hlo.splices import DATA

MESH = rs.Mesh(y=2, x=4)


def key(before="2,1,0", after="2,1,0"):
    """The move of jax-ml/jax#21562 on tiles 8 x 16 x 4, dims in the order of the program."""
    plan = rs.plan(*(rs.Layout.parse(text, MESH) for text in ("f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]")))
    places = ((8, 64), (16, 4), (4, 1))
    move = MoveKey(plan, Array("f32", (16, 2, 16), after), places)
    return FragmentKey((Array("f32", (8, 16, 4), before),), (move,))


@pytest.fixture
def hook():
    with xla_hook.enabled():
        yield


@pytest.mark.parametrize(("before", "after"), [("2,1,0", "2,1,0"), ("1,0,2", "0,2,1")])
def test_it_takes_and_yields_the_layouts_asked_for(hook, before, after):
    module = ModuleProto.decode(Fragments(jax.devices()).get(key(before, after)).module)
    (parameter,) = module.entry.parameters
    text = print_module(Fragments(jax.devices()).get(key(before, after)).module)
    entry = text[text.index("ENTRY") :]
    assert f"f32[8,16,4]{{{before}}} parameter(0)" in entry
    assert any(f"f32[16,2,16]{{{after}}}" in line for line in entry.splitlines() if "ROOT" in line)
    assert parameter.opcode == "parameter"


def test_each_is_compiled_once(hook, monkeypatch):
    known = Fragments(jax.devices())
    first = known.get(key())
    monkeypatch.setattr(fragments, "_lower_fragment", None)
    assert known.get(key()) is first


def test_what_does_not_compile_is_refused(hook):
    with pytest.raises(SpliceError, match=r"does not compile here"):
        Fragments(jax.devices()[:4]).get(key())


def test_an_unknown_memory_layout_is_refused():
    with pytest.raises(SpliceError, match=r"memory layout 2,1,0:X\(3\) is not known"):
        fragments._layout_of(Array("f32", (2, 2, 2), "2,1,0:X(3)"))


@pytest.mark.parametrize(
    ("text", "order", "tiles"),
    [("1,0", (0, 1), None), ("0,2,1", (1, 2, 0), None), ("2,1,0:T(8,128)(2,1)", (0, 1, 2), ((8, 128), (2, 1)))],
)
def test_memory_layouts_of_hlo(text, order, tiles):
    layout = fragments._layout_of(Array("f32", (2,) * len(order), text))
    assert tuple(layout.major_to_minor) == order
    assert (layout.tiling or None) == tiles


def test_the_tile_function_rearranges_the_tile():
    """With one device the plan does nothing, so what is left is the order of the digits."""
    mesh = rs.Mesh(x=1)
    plan = rs.plan(rs.Layout.parse("f32[4, 6]", mesh), rs.Layout.parse("f32[4, 6]", mesh))
    one = MoveKey(plan, Array("f32", (4, 6), "1,0"), ((4, 1), (6, 4)))
    run = one.function({"axis0": 1})
    tile = np.arange(24, dtype="float32").reshape(6, 4)
    np.testing.assert_array_equal(np.asarray(run(jax.numpy.asarray(tile))), tile.T)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_digits_come_in_the_order_that_is_given(order):
    tile = np.arange(24).reshape(4, 6)
    places = [((2, 12), (3, 4), (4, 1))[at] for at in order]
    np.testing.assert_array_equal(
        np.asarray(in_places(jnp.array(tile), places)), tile.reshape(2, 3, 4).transpose(order)
    )


PARTS = {
    "the second half of each row": (np.s_[:, 16:], [(8, 32), (16, 1)], 16),
    "a window": (np.s_[:, 5:27], [(8, 32), (22, 1)], 5),
    "a window that ends with the tile": (np.s_[2:, 3:32], [(6, 32), (29, 1)], 67),
    "a window in blocks": (np.s_[:, 5:29], [(8, 32), (3, 8), (8, 1)], 5),
    "every third column": (np.s_[:, 1::3], [(8, 32), (11, 3)], 1),
    "one column": (np.s_[:, 31], [(8, 32)], 31),
    "one row": (np.s_[5], [(32, 1)], 160),
    "pairs of every fourth row": (np.s_[1::4, 6:8], [(2, 128), (2, 1)], 38),
    "one element": (np.s_[7, 31], [], 255),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_digits_of_a_part_of_a_tile(name):
    indices, places, start = PARTS[name]
    tile = np.arange(256).reshape(8, 32)
    np.testing.assert_array_equal(
        np.asarray(in_places(jnp.array(tile), places, start)), tile[indices].reshape([radix for radix, _ in places])
    )


def test_a_part_beyond_the_tile_is_refused():
    with pytest.raises(Untraceable, match="reaches beyond the tile"):
        in_places(jnp.arange(8), [(3, 4)], 0)


@pytest.mark.parametrize("of", [FragmentKey, OpFragmentKey, ShiftKey])
def test_a_fragment_serves_only_what_it_was_compiled_for(of):
    """Keys that differ in any field are different."""
    assert all(field.compare and field.hash in (None, True) for field in fields(of)) and of.__eq__ is not object.__eq__


@pytest.mark.parametrize("seed", range(3))
def test_shifts_bring_each_device_its_cells(seed):
    """Each cell of a tile of 3 x 4 is a random box of a random device, or padding."""
    choose = random.Random(seed)
    cuts = (0, choose.choice((1, 2)), 3), (0, choose.choice((1, 2, 3)), 4)
    cells = []
    for size in [(b - a, d - c) for a, b in pairwise(cuts[0]) for c, d in pairwise(cuts[1])]:
        homes = tuple(choose.choice((-1, *range(4))) for _ in range(4))
        starts = tuple(tuple(choose.randint(0, 5 - extent) for extent in size) for _ in range(4))
        cells.append(ShiftCell(size, homes, starts))
    one = ShiftKey((Shift(cuts, tuple(cells)),), (Array("f32", (5, 5)),), (Array("f32", (3, 4)),), "float32")
    tiles = np.arange(100, dtype="float32").reshape(4, 5, 5)
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    run = jax.shard_map(one.function({"d": 4}), mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    (moved,) = jax.jit(run)(tiles.reshape(20, 5))
    for device, tile in enumerate(np.asarray(moved).reshape(4, 3, 4)):
        boxes = []
        for cell in cells:
            spans = tuple(slice(*span) for span in cell.box(device))
            home = cell.homes[device]
            boxes.append(np.zeros(cell.sizes) if home < 0 else tiles[home][spans])
        np.testing.assert_array_equal(tile, np.block([boxes[:2], boxes[2:]]))


def test_compiling_it_quickly_changes_nothing_that_is_kept(hook, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(measured_programs, "read_executable", None)  # Its compilation stops before machine code.
        quick = Fragments(jax.devices()).get(key())
    monkeypatch.setattr(fragments, "measure_program", lambda _, compile_it: measure_program("", compile_it))
    slow = Fragments(jax.devices()).get(key())
    assert quick[1:] == slow[1:]
    assert program_peaks.digest_module(quick.module) == program_peaks.digest_module(slow.module)


LINE = np.arange(12, dtype="float32").reshape(3, 4) % 5


def op(kind, dtype, target="", dims=(9, 4), results=None, **options):
    operand = Array(dtype, dims, "1,0")
    return BatchOp(kind, target, (0,), (operand,), results or (operand,), **options)


def test_top_k_of_some_rows():
    results = (Array("f32", (9, 2)), Array("s32", (9, 2)))
    values, at = rows_function(op("top_k", "f32", "TopK", results=results), (None,))(jnp.array(LINE))
    assert values.tolist() == jax.lax.top_k(LINE, 2)[0].tolist() and at.shape == (3, 2)


def both(f, spec, shape, mesh):
    """A function compiled plain and with the pass: what both receive, and what the pass says."""
    sharding = NamedSharding(mesh, spec)
    a = jax.device_put(np.arange(np.prod(shape), dtype="float32").reshape(shape), sharding)
    plain = jax.jit(lambda x: f(x), out_shardings=sharding).lower(a).compile()
    with reshard.jax.enabled() as log:
        ours = jax.jit(lambda x: f(x), out_shardings=sharding).lower(a).compile()
    assert np.array_equal(ours(a), plain(a)), str(log)
    assert np.array_equal(ours(a), jax.device_get(f(jnp.asarray(np.asarray(a)))))
    return *(hlo.traffic(hlo.parse(one.as_text())) for one in (plain, ours)), log


def differences(a, first, last):
    """What a library of fluids does: pads a periodic array by one or two, and takes parts of that."""
    wide = jnp.pad(a, [(first, last), (first, last)], mode="wrap")
    inner = slice(first, wide.shape[1] - last)
    return wide[first + last :, inner] - wide[: a.shape[0], inner]


@pytest.mark.fast(1)
@pytest.mark.parametrize(("first", "last"), [(1, 1), (2, 1)])
def test_a_periodic_halo_takes_what_the_neighbour_has(first, last):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("y", "x"))
    plain, ours, log = both(lambda a: differences(a, first, last), P("y", "x"), (16, 32), mesh)
    assert ours.received_bytes <= plain.received_bytes and ours.launches <= plain.launches, str(log)
    assert any(place.outcome.permutes for report in log.reports for place in report.replaced), str(log)


def test_a_roll_of_an_uneven_part():
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    plain, ours, log = both(lambda a: jnp.roll(a, 3, 0) + jnp.roll(a, -5, 0), P("x"), (64, 3), mesh)
    assert ours.received_bytes <= plain.received_bytes, str(log)


# ---- planted faults: fragments that are wrong, and must be refused --------------------------------------------------

plan, run, cut, cell = (
    getattr(fragments, name) for name in ("plan_exchange", "run_halo_exchange", "_cut_where", "_make_cell")
)


def from_the_next_neighbour(shifts, dims):
    exchange = plan(shifts, dims)
    first, *rest = exchange.launches
    return exchange._replace(launches=(first._replace(senders=(*first.senders[1:], first.senders[0])), *rest))


def to_nobody(shifts, dims):
    exchange = plan(shifts, dims)
    nobody = tuple(one._replace(senders=(-1,) * len(one.senders)) for one in exchange.launches)
    return exchange._replace(launches=nobody)


def corners_of_each_other(shifts, dims):
    """What is passed on is cut from what another neighbour has sent."""
    exchange = plan(shifts, dims)
    launches = []
    for launch in exchange.launches:
        kept = [one for one in launch.parcels if one.passed_on is None]
        passed = [one.passed_on for one in launch.parcels if one.passed_on is not None]
        pairs = zip(launch.parcels[len(kept) :], passed[::-1], strict=True)
        launches.append(launch._replace(parcels=(*kept, *(one._replace(passed_on=other) for one, other in pairs))))
    return exchange._replace(launches=tuple(launches))


def one_off(held, starts, sizes, axis):
    """Each box begins one further, or at the beginning."""
    bounds = [have - size + 1 for have, size in zip(held.shape, sizes, strict=True)]
    moved = [one and tuple((at + 1) % bound for at, bound in zip(one, bounds, strict=True)) for one in starts]
    return cut(held, moved, sizes, axis)


def along_another_dim(held, starts, sizes, axis):
    """Boxes that fit are cut as if rows were columns."""
    bounds = [have - size for have, size in zip(held.shape, sizes[::-1], strict=True)]
    if min(bounds) < 0:
        return cut(held, starts, sizes, axis)
    turned = [one and tuple(map(min, one[::-1], bounds)) for one in starts]
    return jnp.swapaxes(cut(held, turned, sizes[::-1], axis), 0, 1)


def upside_down(*given):
    return jnp.flip(cell(*given), 0)


def of_another_dtype(exchange, tile, axis):
    received = run(exchange, tile.astype("bfloat16"), axis)
    return {at: one.astype(tile.dtype) for at, one in received.items()}


def minus_zero(exchange, one, tile, received, axis):
    return cell(exchange, replace(one, fill=int(np.float64(-0.0).view(np.int64))), tile, received, axis)


@pytest.mark.fast(0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("plan_exchange", from_the_next_neighbour),
        ("plan_exchange", to_nobody),
        ("plan_exchange", corners_of_each_other),
        ("run_halo_exchange", of_another_dtype),
        ("_cut_where", one_off),
        ("_cut_where", along_another_dim),
        ("_make_cell", upside_down),
        ("_make_cell", minus_zero),
    ],
)
def test_planted_faults_are_refused(monkeypatch, name, fault):
    monkeypatch.setattr(xla_hook._state, "fragments", {})
    monkeypatch.setattr(fragments, name, fault)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("y", "x"))
    program = framed if fault in (minus_zero, corners_of_each_other) else edges
    plain, ours, log = both(program, P("y", "x"), (16, 16), mesh)
    assert ours.received_bytes == plain.received_bytes, str(log)
    places = [place for report in log.reports for place in report.places]
    assert any(place.why_left for place in places), str(log)
    assert not any(place.outcome.permutes for place in places if place.replaced), str(log)


@pytest.mark.parametrize(("program", "received", "launches"), [("edges", 112, 2), ("framed", 88, 3)])
def test_each_neighbour_is_asked_once(program, received, launches):
    """Several parts of neighbours' tiles, corners and padding: what is needed of others arrives once."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("y", "x"))
    _, ours, log = both(globals()[program], P("y", "x"), (16, 16), mesh)
    assert (ours.received_bytes, ours.launches) == (received, launches), str(log)


def test_a_module_that_xla_does_not_read_is_refused():
    with pytest.raises(SpliceError, match="XLA does not read the module"):
        module = ModuleProto.decode((DATA / "train_cpu.pb").read_bytes())
        module.entry.root.opcode = "nonsense"
        fragments.read_module(module.encode())


def edges(a):
    """Parts of neighbours' tiles along both dims; at the edges of the array it is the array's own."""
    wide = jnp.pad(a, [(2, 1), (2, 1)], mode="wrap")
    return wide[3:, 2:-1] - wide[: a.shape[0], 2:-1] + wide[2:-1, : a.shape[1]]


def framed(a):
    """The sum of all neighbours, with zeros beyond the edges."""
    wide = jnp.pad(a, 1)
    return sum(wide[1 + y : 17 + y, 1 + x : 17 + x] * (1 + y * y + x) for y in (-1, 0, 1) for x in (-1, 0, 1))
