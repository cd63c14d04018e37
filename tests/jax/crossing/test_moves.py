"""Every element of moves to other devices, on every way that one process has; what is donated; what is refused."""

from __future__ import annotations

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.errors import BudgetError, LayoutError, PlanError
from reshard.jax import eager, redistribute
from reshard.jax.crossing import across
from reshard.jax.request import ReshardRequest, plan_across
from tests.jax.crossing.cases import (
    MESHES,
    SHAPE,
    by_messages,
    check,
    divides,
    forget_programs,
    mesh,
    sampled,
    shardings,
    some,
)
from tests.jax.oracle import assert_exact, filled, mesh_of

FOUR = {"a": 2, "b": 2}


@pytest.mark.parametrize("donate", [False, True])
def test_sampled_pairs_on_the_host(donate: bool) -> None:
    for source, target in sampled(6, seed=donate):
        check(source, target, donate=donate)


def test_a_pair_by_messages(way: str) -> None:
    check(
        NamedSharding(mesh(range(4), **FOUR), P("a", "b")), NamedSharding(mesh([3, 4], t=2), P(None, "t")), donate=True
    )


@pytest.mark.slow
def test_sampled_pairs_by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    with by_messages(monkeypatch):
        for number, (source, target) in enumerate(sampled(1)):
            check(source, target, donate=number % 2 == 0)


@pytest.mark.sweep
@pytest.mark.parametrize("number", range(len(MESHES)))
def test_all_pairs(way: str, number: int) -> None:
    """By messages a dozen, each of which compiles for seconds: some programs of up to 16 rounds."""
    sizes, devices, other, others = MESHES[number]
    ends = [filter(divides, shardings(*each)) for each in ((sizes, devices), (other, others))]
    pairs = list(itertools.product(*ends))
    for source, target in pairs if way == "host" else random.Random(number).sample(pairs, min(12, len(pairs))):
        check(source, target, donate=number % 2 == 0)


@pytest.mark.fast(2, slow=2)
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, np.complex64, np.bool_, np.float16, jnp.int4]
)
def test_dtypes(way: str, dtype: object) -> None:
    source, target = NamedSharding(mesh(range(4), **FOUR), P("a", "b")), NamedSharding(mesh([4, 5], t=2), P(None, "t"))
    check(source, target, values=some(dtype))


def test_arrays_without_elements(way: str) -> None:
    source = NamedSharding(mesh(range(4), **FOUR), P("a"))
    check(source, NamedSharding(mesh([4, 5], t=2), P(None, "t")), values=np.zeros((0, 8), np.float32))


def test_explicit_axes_and_a_mesh_that_is_set(way: str) -> None:
    values = filled((16, 8))
    here = mesh_of(FOUR, AxisType.Explicit)
    there = NamedSharding(mesh_of({"t": 2, "u": 2}, AxisType.Explicit, [4, 5, 6, 7]), P("u", "t"))
    x = jax.device_put(values, NamedSharding(here, P("a", "b")))
    assert jax.typeof(redistribute(x, there)).sharding.spec == P("u", "t")
    with jax.set_mesh(here):
        assert_exact(redistribute(x, there), there, values)


def test_sums_are_finished_before_and_started_after(way: str) -> None:
    values = filled((16, 8))
    here = mesh_of(FOUR, AxisType.Explicit)
    there = mesh_of({"t": 2, "u": 2}, AxisType.Explicit, [4, 5, 6, 7])
    started = NamedSharding(here, P("b", unreduced={"a"}))
    x = redistribute(jax.device_put(values, NamedSharding(here, P("b"))), started)
    for spec in (P(None, "t"), P(), P(("u", "t"))):
        assert_exact(redistribute(x, NamedSharding(there, spec)), NamedSharding(there, spec), values)
    y = redistribute(x, NamedSharding(there, P("u", unreduced={"t"})))
    assert y.sharding.spec.unreduced == {"t"}
    assert np.array_equal(redistribute(y, NamedSharding(there, P("u", "t"))), values)


def test_a_memory_of_another_kind(way: str) -> None:
    values = filled((16, 8))
    source = NamedSharding(mesh(range(4), **FOUR), P("a"), memory_kind="pinned_host")
    target = NamedSharding(mesh([4, 5], t=2), P(None, "t"), memory_kind="pinned_host")
    y = redistribute(jax.device_put(values, source), target)
    assert y.sharding.memory_kind == "pinned_host" and np.array_equal(y, values)


def test_a_transfer_guard_lets_moves_pass(way: str) -> None:
    values = filled((16, 8))
    x = jax.device_put(values, NamedSharding(mesh(range(4), **FOUR), P("a", "b")))
    target = NamedSharding(mesh([4, 5], t=2), P("t"))
    with jax.transfer_guard("disallow"):
        y = redistribute(x, target)
    assert_exact(y, target, values)


def test_trees(way: str) -> None:
    values = filled((16, 8))
    here, there = mesh(range(4), **FOUR), NamedSharding(mesh([4, 5], t=2), P(None, "t"))
    tree = {
        "stays": jax.device_put(values, there),
        "crosses": [jax.device_put(values + n, NamedSharding(here, P("b", "a"))) for n in range(20)],
    }
    moved = redistribute(tree, there)
    assert moved["stays"] is tree["stays"]
    for number, y in enumerate(moved["crosses"]):
        assert_exact(y, there, values + number)


def test_the_result_can_be_donated(way: str) -> None:
    """Devices that hold the same tile share memory on the host: a program that may overwrite it must not."""
    target = NamedSharding(mesh([4, 5, 6, 7], t=2, u=2), P("t"))
    y = check(NamedSharding(mesh(range(4), **FOUR), P("a")), target)

    def own(tile: jax.Array) -> jax.Array:
        return tile + jax.lax.axis_index("u").astype(tile.dtype)

    wanted = [np.asarray(shard.data) + number % 2 for number, shard in enumerate(y.addressable_shards)]
    add = jax.shard_map(own, mesh=target.mesh, in_specs=P("t"), out_specs=P("t"), check_vma=False)
    z = jax.jit(add, donate_argnums=0)(y)
    assert all(np.array_equal(shard.data, tile) for shard, tile in zip(z.addressable_shards, wanted, strict=True))


# ---- budgets ---------------------------------------------------------------------------------------


@pytest.mark.fast(1)
def test_budgets_are_kept_or_refused(way: str) -> None:
    source = NamedSharding(mesh(range(4), **FOUR), P("a", "b"))
    target = NamedSharding(mesh([4, 5], t=2), P(None, "t"))
    whole = plan_across(ReshardRequest(target, source), (60, 120), "float32")
    for budget in (whole.peak_bytes, whole.floor_bytes + 3000):
        check(source, target, budget=budget)
    with pytest.raises(BudgetError):
        check(source, target, budget=whole.floor_bytes - 1)
    if way == "host":
        check(source, target, budget=whole.floor_bytes)
        return
    with pytest.raises(BudgetError) as raised:  # A message needs a buffer, if only for one element.
        check(source, target, budget=whole.floor_bytes)
    assert raised.value.smallest == whole.floor_bytes + 4


# ---- refusals --------------------------------------------------------------------------------------


def test_uneven_targets_are_refused(way: str) -> None:
    with pytest.raises(LayoutError, match=r"'t': 3.*does not divide.*16, 8"):
        check(
            NamedSharding(mesh(range(4), **FOUR), P("a")),
            NamedSharding(mesh([4, 5, 6], t=3), P("t")),
            values=filled((16, 8)),
        )


def test_a_source_that_contradicts_the_array_is_refused() -> None:
    here = mesh(range(4), **FOUR)
    x = jax.device_put(filled((16, 8)), NamedSharding(here, P("a", "b")))
    with pytest.raises(PlanError, match="leave source out"):
        redistribute(x, NamedSharding(mesh([4, 5], t=2), P("t")), source=NamedSharding(here, P("b")))


def test_compiled_moves_are_refused_and_derivatives_are_not() -> None:
    source, target = NamedSharding(mesh(range(4), **FOUR), P("a", "b")), NamedSharding(mesh([4, 5], t=2), P("t"))
    x = jax.device_put(filled((16, 8)), source)
    for known in (source, None):
        gradient = jax.grad(lambda v, s=known: (redistribute(v, target, source=s) ** 2).sum())(x)
        assert gradient.sharding == source and np.array_equal(gradient, 2 * filled((16, 8)))
    with pytest.raises(PlanError, match=r"different devices.*a concrete array"):
        jax.jit(lambda v: redistribute(v, target, source=source))(x)
    with pytest.raises(ValueError, match="incompatible devices"):  # JAX's own: tracing knows no devices.
        jax.jit(lambda v: redistribute(v, target))(x)


# ---- what is compiled ------------------------------------------------------------------------------


def test_equal_moves_are_compiled_once(way: str) -> None:
    source, target = NamedSharding(mesh(range(4), **FOUR), P("a", "b")), NamedSharding(mesh([4, 5], t=2), P("t"))
    forget_programs()
    for _ in range(3):
        check(source, target)
    assert eager.program_of.cache_info().misses == 1


@pytest.mark.slow
def test_no_message_is_as_large_as_a_tile_of_a_large_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside its tiles, a device has one message, an eighth of what it would be."""
    monkeypatch.setattr(across.on_jax, "LEAST", 1 << 10)
    source, target = NamedSharding(mesh(range(4), **FOUR), P("a", "b")), NamedSharding(mesh([4, 5], t=2), P(None, "t"))
    whole = plan_across(ReshardRequest(target, source), (60, 120), "float32")
    cut = across.cut_messages(across.split_legs(whole), None, buffers=1, pieces=False)
    message = whole.source.tile_bytes
    assert cut.across.peak_bytes <= max(whole.source.tile_bytes, whole.target.tile_bytes) + message // 7
    with by_messages(monkeypatch):
        check(source, target)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(
    "before, near, after, far",
    [
        (P("a"), [0, 1, 2, 3], P("t"), [4, 5, 6, 7]),
        (P(None, "a"), [0, 1, 2, 3], P(None, "t"), [2, 3, 4, 5]),
        (P("a"), [0, 1, 2, 3], P("t"), [0, 5, 6, 7]),
        (P(), [0, 1, 2, 3], P(), [4, 5, 6, 7]),
    ],
)
def test_tiles_that_stay_as_they_are(before: P, near: list[int], after: P, far: list[int], donate: bool) -> None:
    """Their memory is the result's own on other devices, too."""
    source, target = NamedSharding(mesh(near, a=4), before), NamedSharding(mesh(far, t=4), after)
    moved = check(source, target, donate=donate)
    x = jax.device_put(filled(SHAPE), source)
    ends = x, redistribute(x, target)
    pointers = [{shard.data.unsafe_buffer_pointer() for shard in each.addressable_shards} for each in ends]
    assert pointers[0].isdisjoint(pointers[1]) and moved.sharding == target
