"""Copies on the host: which are made, by one thread or several, and when a donated source is deleted."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.jax import Part, Target, eager, redistribute
from reshard.jax.buckets import run_moves
from reshard.jax.crossing import across, host
from reshard.jax.request import UNLIMITED, ReshardRequest
from reshard.types.notation import einops
from tests.jax.crossing.cases import SHAPE, check, forget_programs, mesh, sampled, some
from tests.jax.oracle import assert_exact, filled, refactored
from tests.oracle import tiles_of

SOURCE = rs.Layout.parse("f32[{a}3, {b}4]", rs.Mesh(a=2, b=2))


@pytest.mark.parametrize("text", ["f32[{t}2, 8]", "f32[6, 8]", "f32[{r}3, {t}3/8]"])
def test_copies_fill_every_tile_once(text: str) -> None:
    target = rs.Layout.parse(text, rs.Mesh({"t": 3, "r": 2}, device_ids=[4, 9, 5, 8, 6, 7]))
    exchange = host.plan_host_exchange(SOURCE, target)
    given, wanted = tiles_of(SOURCE), tiles_of(target)
    tiles = [np.full(target.tile_shape, -7) for _ in range(exchange.tiles)]
    for copy in exchange.copies:
        assert (tiles[copy.receiver][copy.put] == -7).all()
        tiles[copy.receiver][copy.put] = given[SOURCE.mesh.devices[copy.sender]][copy.taken]
    for number, device in zip(exchange.tile_at, target.mesh.devices, strict=True):
        assert np.array_equal(tiles[number], wanted[device])
    assert exchange.tiles == len({tile.tobytes() for tile in wanted.values()})


def test_several_threads_copy_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large copies, those of cut axes too, whose runs are elements of any size."""
    for name, value in (("THREADED", 0), ("UNIT", 1000), ("SHORT", 200), ("count_cores", lambda: 3)):
        monkeypatch.setattr(host, name, value)
    host._thread_pool.cache_clear()
    forget_programs()
    dtypes = itertools.cycle([np.float32, jnp.bfloat16, np.int8, np.complex64])
    for number, (source, target) in enumerate(sampled(2)):
        check(source, target, values=some(next(dtypes), SHAPE), donate=number % 2 == 0)
    host._thread_pool.cache_clear()
    forget_programs()


def test_a_donated_source_is_deleted_shard_by_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows to rows: each shard as soon as its rows are copied, and those that nobody reads before all copies."""
    x = jax.device_put(filled((16, 8)), NamedSharding(mesh(range(4), a=2, b=2), P("a")))
    operand, result = (rs.Layout.parse("f32[{s}8, 8]", m) for m in (rs.Mesh(s=2, r=2), rs.Mesh({"s": 2}, [4, 5])))
    exchange = host.plan_host_exchange(operand, result)
    gone: list[list[int]] = []
    monkeypatch.setattr(host, "_delete_shards", lambda shards: gone.append([shard.device.id for shard in shards]))
    tiles = host.run_host_exchanges([host.HostPart(exchange, x, donate=True)])[0]
    read = sorted({copy.sender for copy in exchange.copies})
    assert gone == [sorted({0, 1, 2, 3} - {*read}), *([at] for at in read)] and x.is_deleted()
    assert np.array_equal(np.concatenate(tiles), filled((16, 8)))


def test_tiles_become_shards_as_they_are() -> None:
    """No copy is made of the memory that was filled."""
    exchange = host.plan_host_exchange(SOURCE, rs.Layout.parse("f32[6, 8]", rs.Mesh({"t": 1}, device_ids=[4])))
    x = jax.device_put(filled((6, 8)), NamedSharding(mesh(range(4), a=2, b=2), P("a", "b")))
    (tile,) = host.run_host_exchanges([host.HostPart(exchange, x)])[0]
    assert tile.ctypes.data % host.ALIGNMENT == 0
    assert jax.device_put(tile, jax.devices()[3]).unsafe_buffer_pointer() == tile.ctypes.data


def test_nothing_is_held_of_the_source() -> None:
    """A source that was read can still be donated: XLA overwrites no memory that someone reads."""
    source, target = NamedSharding(mesh(range(4), a=4), P("a")), NamedSharding(mesh([4, 5], t=2), P("t"))
    x = jax.jit(lambda: jax.numpy.ones((64, 64)), out_shardings=source)()
    pointer = x.addressable_shards[0].data.unsafe_buffer_pointer()
    y = redistribute(x, target)
    doubled = jax.jit(lambda v: 2 * v, donate_argnums=0)(x)
    assert doubled.addressable_shards[0].data.unsafe_buffer_pointer() == pointer
    assert np.array_equal(y, np.ones((64, 64)))


def test_a_move_takes_the_memory_of_its_tiles_and_no_more() -> None:
    """Two replicas of two tiles: the memory of two tiles, the rest of which is Python's."""
    source = NamedSharding(mesh(range(4), a=2, b=2), P("a", "b"))
    target = NamedSharding(mesh([4, 5, 6, 7], rep=2, t=2), P(None, "t"))
    x = jax.device_put(filled((512, 512)), source)
    redistribute(x, target)
    tracemalloc.start()
    try:
        y = redistribute(x, target)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert x.nbytes <= peak < 1.05 * x.nbytes
    assert len({shard.data.unsafe_buffer_pointer() for shard in y.addressable_shards}) == 2


# ---- many arrays in one exchange -------------------------------------------------------------------


def into_move(x: jax.Array, target: NamedSharding, rows: slice, **options: Any) -> eager.EagerMove:
    """The move of an array into these rows of a target of 12 rows."""
    out = options.pop("out", None)
    pattern = einops.parse_pattern("d0 d1 -> d0 d1")
    view = einops.resolve_pattern(pattern, (x.shape, (12, x.shape[1])), {}, {}, {"d0": rows})
    request = ReshardRequest(target, None, UNLIMITED._replace(**options), view)
    move = eager.prepare_move(x, request, lambda program: (out, None))
    assert isinstance(move, eager.EagerMove)
    return move


@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16, jnp.float8_e4m3fn, "bool", "complex64"])
@pytest.mark.parametrize("threaded", [False, True])
def test_parts_fill_one_target(monkeypatch: pytest.MonkeyPatch, dtype: Any, threaded: bool) -> None:
    """Of sources on several meshes, one of them replicated; the target has replicas, which share its memory."""
    if threaded:
        monkeypatch.setattr(host, "THREADED", 0)
        monkeypatch.setattr(host, "UNIT", 8)
        monkeypatch.setattr(host, "count_cores", lambda: 3)
    values = some(dtype, (12, 6))
    sources = [
        NamedSharding(mesh(range(4), a=2, b=2), P("a", "b")),
        NamedSharding(mesh(range(4), a=4), P()),
        NamedSharding(mesh([0, 5], a=2), P(None, "a")),
    ]
    parts = [slice(0, 4), slice(4, 6), slice(6, 12)]
    xs = [jax.device_put(values[rows], there) for rows, there in zip(parts, sources, strict=True)]
    target = NamedSharding(mesh([4, 5, 6, 7], rep=2, t=2), P("t"))
    plain = jax.device_put(values, sources[1])
    moves = [into_move(x, target, rows, donate=True) for x, rows in zip(xs, parts, strict=True)]
    beside, out = eager.prepare_move(plain, ReshardRequest(target)), jax.device_put(values, target)
    y, other, z = run_moves([*moves, beside, into_move(plain[:2], target, slice(3, 5), out=out)], [0, 0, 0, 1, 2])
    for made in (y, other):
        assert_exact(made, target, values)
    assert_exact(z, target, np.concatenate([values[:3], values[:2], values[5:]]))
    assert all(x.is_deleted() for x in xs) and not plain.is_deleted()
    assert len({shard.data.unsafe_buffer_pointer() for shard in y.addressable_shards}) == 2
    # XLA overwrites nothing that a replica still shows.
    doubled = jax.jit(lambda v: v + v, donate_argnums=0)(y)
    assert np.array_equal(np.asarray(doubled), values + values)


@pytest.mark.parametrize("turn", [0, 1 << 30])
def test_a_tree_is_one_exchange_and_its_donated_sources_go_after_their_last_use(
    monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    monkeypatch.setattr(across, "TURN", turn)
    made: list[list[int]] = []
    run = across.run_host_exchanges

    def counted(parts: list[host.HostPart], *given: Any) -> Any:
        made.append([part.result for part in parts])
        return run(parts, *given)

    monkeypatch.setattr(across, "run_host_exchanges", counted)
    here, there = mesh(range(4), a=2, b=2), mesh([4, 5, 6, 7], s=4)
    x, y, z = (jax.device_put(filled((16, 8)) + 200 * n, NamedSharding(here, P("a", "b"))) for n in range(3))
    columns, rows = NamedSharding(there, P(None, "s")), NamedSharding(there, P("s"))
    tree = [(x, columns, True), (y, columns, False), (x, rows, True), (z, NamedSharding(here, P("b", "a")), True)]
    moves = [eager.prepare_move(v, ReshardRequest(to, None, UNLIMITED._replace(donate=gives))) for v, to, gives in tree]
    want = [np.asarray(v) for v, _, _ in tree]
    for result, (_, to, _), value in zip(run_moves(moves), tree, want, strict=True):
        assert_exact(result, to, value)
    assert x.is_deleted() and z.is_deleted() and not y.is_deleted()
    assert made == ([[1], [0], [2], [3]] if turn == 0 else [[1], [0, 2, 3]])


def test_a_part_is_written_into_what_a_part_before_it_has_made() -> None:
    values = filled((12, 6))
    target = NamedSharding(mesh([4, 5, 6, 7], rep=2, t=2), P("t"))
    made, tiles = None, set[int]()
    for rows in (slice(0, 5), slice(5, 12)):
        x = jax.device_put(values[rows], NamedSharding(mesh(range(4), a=2, b=2), P(None, "a")))
        program = into_move(x, target, rows).program
        run = across.compile_across(program.plan, program.request, overwrites=True)
        made = run(x, made)
        tiles |= {shard.data.unsafe_buffer_pointer() for shard in made.addressable_shards}
    assert made is not None and len(tiles) == 2
    assert_exact(made, target, values)


def test_arrays_of_a_tree_on_one_set_of_devices_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random layouts on meshes of the same devices, and a view; inside a trace, each has its program."""
    forget_programs()
    made: list[int] = []
    run = across.run_host_exchanges

    def counted(parts: list[host.HostPart], *given: Any) -> Any:
        made.append(len(parts))
        return run(parts, *given)

    monkeypatch.setattr(across, "run_host_exchanges", counted)
    moves = refactored(3, 12)
    xs = [jax.device_put(filled((16, 24)) + number, source) for number, (source, _) in enumerate(moves)]
    targets = [target for _, target in moves]
    rows = NamedSharding(moves[0][0].mesh, P(moves[0][0].mesh.axis_names[0]))
    turned = Target(rows, view="(a b) c -> (b a) c", b=2)
    results = redistribute([*xs, xs[0]], [*targets, turned], donate=True)
    assert made == [1, 12], "first what frees nothing"
    for number, (result, target) in enumerate(zip(results[:-1], targets, strict=True)):
        assert_exact(result, target, filled((16, 24)) + number)
    assert_exact(results[-1], rows, filled((16, 24)).reshape(8, 2, 24).swapaxes(0, 1).reshape(16, 24))
    assert all(x.is_deleted() for x, result in zip(xs, results, strict=False) if result is not x)
    columns = NamedSharding(rows.mesh, P(None, rows.mesh.axis_names[0]))
    one, two = (jax.device_put(filled((16, 24)), rows) for _ in range(2))
    assert_exact(redistribute(one, columns), columns, filled((16, 24)))
    assert made == [1, 12, 1]
    for moved in jax.jit(lambda: redistribute([one, two], columns))():
        assert_exact(moved, columns, filled((16, 24)))
    assert made == [1, 12, 1]
    # The only part of a target starts from nothing, which no program does.
    part = Part("0", into={0: slice(0, 16)})
    (alone,) = redistribute([one], [Target(columns, shape=(16, 24), parts=[part])])
    assert_exact(alone, columns, filled((16, 24)))
    assert made == [1, 12, 1, 1]
    forget_programs()
