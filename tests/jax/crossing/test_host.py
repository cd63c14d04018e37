"""Copies on the host: which are made, by one thread or several, and when a donated source is deleted."""

from __future__ import annotations

import tracemalloc

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.jax import redistribute
from reshard.jax.crossing import host
from tests.jax.crossing.cases import check, mesh, sampled
from tests.jax.oracle import filled
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
    monkeypatch.setattr(host, "THREADED", 0)
    monkeypatch.setattr(host, "_count_threads", lambda: 3)
    host._thread_pool.cache_clear()
    for number, (source, target) in enumerate(sampled(2)):
        check(source, target, donate=number % 2 == 0)
    host._thread_pool.cache_clear()


def test_a_donated_source_is_deleted_shard_by_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows to rows: each shard as soon as its rows are copied, and those that nobody reads before all copies."""
    x = jax.device_put(filled((16, 8)), NamedSharding(mesh(range(4), a=2, b=2), P("a")))
    operand, result = (rs.Layout.parse("f32[{s}8, 8]", m) for m in (rs.Mesh(s=2, r=2), rs.Mesh({"s": 2}, [4, 5])))
    exchange = host.plan_host_exchange(operand, result)
    gone: list[list[int]] = []
    monkeypatch.setattr(host, "_delete_shards", lambda shards: gone.append([shard.device.id for shard in shards]))
    tiles = host.run_host_exchange(exchange, x, donate=True)
    read = sorted({copy.sender for copy in exchange.copies})
    assert gone == [sorted({0, 1, 2, 3} - {*read}), *([at] for at in read)] and x.is_deleted()
    assert np.array_equal(np.concatenate(tiles), filled((16, 8)))


def test_tiles_become_shards_as_they_are() -> None:
    """No copy is made of the memory that was filled."""
    exchange = host.plan_host_exchange(SOURCE, rs.Layout.parse("f32[6, 8]", rs.Mesh({"t": 1}, device_ids=[4])))
    x = jax.device_put(filled((6, 8)), NamedSharding(mesh(range(4), a=2, b=2), P("a", "b")))
    (tile,) = host.run_host_exchange(exchange, x, donate=False)
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
