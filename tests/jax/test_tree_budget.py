"""Trees within a budget: what lives on the devices is measured between all launches, and compared with the budget."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.errors import BudgetError, LayoutError
from reshard.jax import Part, Target, redistribute, reshard_pytree, tree_budget
from reshard.jax.tree_budget import bounded_tree, xla_peak_bytes
from reshard.synth.options import PlanOptions
from tests.jax.crossing.cases import by_messages
from tests.jax.oracle import assert_exact, filled, mesh_of

SIZES = {"x": 4, "y": 2}
SHAPES = {"a": (8, 8), "b": (16, 8), "c": (8, 24), "d": (32, 32)}


def on(*entries: Any) -> NamedSharding:
    return NamedSharding(mesh_of(SIZES), P(*entries))


def other(*entries: Any, order: tuple[int, ...] = (4, 5, 6, 7)) -> NamedSharding:
    return NamedSharding(mesh_of({"s": 2, "t": 2}, order=order), P(*entries))


def tree_of(sharding: NamedSharding) -> dict[str, Any]:
    return {name: jax.device_put(filled(shape), sharding) for name, shape in SHAPES.items()}


def checked(moved: dict[str, Any], sharding: NamedSharding) -> None:
    for name, shape in SHAPES.items():
        assert_exact(moved[name], sharding, filled(shape))


def floor_of(source: NamedSharding, target: NamedSharding, donate: bool = False) -> int:
    return floor_of_tree(tree_of(source), target, donate)


def floor_of_tree(tree: dict[str, Any], target: Any, donate: bool) -> int:
    """The smallest budget that the error names."""
    with pytest.raises(BudgetError) as raised:
        redistribute(tree, target, budget=1, donate=donate)
    return raised.value.smallest


@pytest.mark.fast(1)
@pytest.mark.parametrize("move", [redistribute, reshard_pytree])
def test_a_budget_is_for_all_leaves_together(move: Callable[..., Any]) -> None:
    """Sources and targets of all of them, though each alone needs less."""
    rows, columns = on("x"), on(None, "x")
    floor = sum(2 * 4 * int(np.prod(shape)) // 4 for shape in SHAPES.values())
    checked(move(tree_of(rows), columns, budget=floor), columns)
    with pytest.raises(BudgetError, match=f"the smallest that works is {floor} B"):
        move(tree_of(rows), columns, budget=floor - 1)
    alone = 2 * 4 * 32 * 32 // 4
    assert alone < floor - 1
    assert_exact(move(tree_of(rows)["d"], columns, budget=alone), columns, filled(SHAPES["d"]))


# ---- what lives, measured --------------------------------------------------------------------------


class Meter:
    """The most bytes on a device beside what was there before, looked at after every program and every message."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before = live_bytes()
        gc.freeze()  # what is there already is not looked through for garbage each time: that took most of the test
        self.most = 0
        for module in ("tree_budget", "eager", "crossing.across", "crossing.stages"):
            path = f"reshard.jax.{module}.start_program"
            monkeypatch.setattr(path, self.counted)

    def counted(self, function: Callable[..., Any], *arrays: Any) -> Any:
        result = jax.block_until_ready(function(*arrays))
        self.look()
        return result

    def look(self) -> None:
        now = live_bytes()
        self.most = max(self.most, *(now.get(d, 0) - self.before.get(d, 0) for d in jax.devices()))


def live_bytes() -> dict[Any, int]:
    """The bytes of all arrays on each device."""
    gc.collect()
    held: dict[Any, dict[int, int]] = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            held.setdefault(shard.device, {})[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return {device: sum(sizes.values()) for device, sizes in held.items()}


BACKWARDS = NamedSharding(mesh_of({"k": 8}, order=range(7, -1, -1)), P(None, "k"))
CASES = {
    "one mesh": (on("x"), on(None, "x")),
    "another mesh of the same devices": (on("x"), BACKWARDS),
    "other devices": (other("s", order=(0, 1, 2, 3)), other(None, ("t", "s"))),
    "overlapping devices": (other("s", "t", order=(2, 3, 4, 5)), other("t")),
}


@pytest.mark.fast(0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_live_bytes_are_within_the_budget(case: str, donate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = CASES[case]
    budget = floor_of(source, target, donate) + (4096 if donate else 0)  # In place, one element at a time otherwise.
    meter = Meter(monkeypatch)
    tree = tree_of(source)
    meter.look()
    moved = redistribute(tree, target, budget=budget, donate=donate)
    meter.look()
    assert 0 < meter.most <= budget
    assert all(x.is_deleted() == donate for x in tree.values())
    checked(moved, target)


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_target_of_parts_counts_once(case: str, donate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does an array of which several targets are made, until the last of them is."""
    source, target = CASES[case]
    cuts = {name: {0: slice(16 * at, 16 * at + 16)} for at, name in enumerate("abcd")}
    parts = [Part(name, into=cut) for name, cut in cuts.items()]
    fuse = {"w": Target(target, shape=(64, 32), parts=parts)}
    split = {name: Target(source, source="w", take=cut) for name, cut in cuts.items()}
    tree = {name: jax.device_put(filled((16, 32)), source) for name in cuts}
    for targets in (fuse, split):
        budget = floor_of_tree(tree, targets, donate)
        assert budget <= 3 * 64 * 32 * 4 // 4  # Counted by parts, it would be up to nine times a tile.
        meter = Meter(monkeypatch)
        for shard in (shard for x in tree.values() for shard in x.addressable_shards):
            meter.before[shard.device] -= shard.data.nbytes
        moved = redistribute(tree, targets, budget=budget, donate=donate)
        meter.look()
        assert 0 < meter.most <= budget
        assert all(x.is_deleted() == donate for x in tree.values())
        tree = moved
    assert all(np.array_equal(x, filled((16, 32))) for x in moved.values())


@pytest.mark.slow
def test_messages_to_other_devices_count(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = CASES["overlapping devices"]
    budget = floor_of(source, target) + 512
    monkeypatch.setattr("reshard.jax.crossing.stages.TOGETHER", 0)
    with by_messages(monkeypatch):
        meter = Meter(monkeypatch)
        moved = redistribute(tree_of(source), target, budget=budget)
    assert 0 < meter.most <= budget
    checked(moved, target)


@pytest.mark.slow
def test_donated_leaves_are_freed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen arrays and their results never live together."""
    source, target = on("x"), on(None, "x")
    values = filled((64, 64))
    tree = [jax.device_put(values + n, source) for n in range(16)]
    tile = 64 * 64 * 4 // 4
    meter = Meter(monkeypatch)
    moved = redistribute(tree, target, budget=20 * tile, donate=True)  # XLA:CPU stages an all-to-all twice
    meter.look()
    assert meter.most <= 2 * tile  # beside the sources, which were there
    for n, y in enumerate(moved):
        assert_exact(y, target, values + n)


def test_an_array_of_two_leaves_is_freed_by_the_last() -> None:
    """It goes to other devices, which frees a donated source while it is sent."""
    x, targets = jax.device_put(filled((16, 8)), on("x")), {"a": other("s"), "b": other(None, "t")}
    moved = redistribute(dict.fromkeys(targets, x), targets, budget=1 << 20, donate=True)
    for name, target in targets.items():
        assert_exact(moved[name], target, filled((16, 8)))
    assert x.is_deleted()


def test_a_donated_array_that_stays_under_one_name_is_not_deleted() -> None:
    x, targets = jax.device_put(filled((16, 8)), on("x")), {"a": on("x"), "b": other("s"), "c": on(None, "x")}
    moved = redistribute(dict.fromkeys(targets, x), targets, budget=1 << 20, donate=True)
    for name, target in targets.items():
        assert_exact(moved[name], target, filled((16, 8)))


# ---- all kinds of leaves ---------------------------------------------------------------------------


@pytest.mark.slow
def test_leaves_of_every_kind_in_one_tree() -> None:
    """Keys, weak types, numbers, one device, views of one array, other devices."""
    rows, columns = on("x"), on(None, "x")
    x = jax.device_put(filled((24, 8)), rows)
    source = {
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), rows),
        "weak": jax.jit(lambda: jnp.full((8, 8), 2.0), out_shardings=rows)(),
        "step": 3,
        "host": filled((8, 8)),
        "one": jax.device_put(filled((8, 8)), rows),
        "there": jax.device_put(filled((8, 8)), columns),
        "away": jax.device_put(filled((8, 8)), rows),
        "query": x,
        "value": x,
    }
    split = {"view": "(three h) d -> h d", "three": 3}
    target = dict.fromkeys(source, columns) | {
        "keys": on(),
        "step": jax.devices()[1],
        "one": jax.devices()[6],
        "away": other("s"),
        "query": Target(columns, take={"three": 0}, **split),
        "value": Target(other("t"), take={"three": 2}, dtype="bfloat16", **split),
    }
    moved = redistribute(source, target, budget="1MiB", donate=True)
    assert (jax.random.key_data(moved["keys"]) == jax.random.key_data(jax.random.split(jax.random.key(0), 8))).all()
    assert moved["weak"].weak_type and int(moved["step"]) == 3
    assert moved["one"].devices() == {jax.devices()[6]} and np.array_equal(moved["one"], filled((8, 8)))
    for name in ("host", "there", "away"):
        assert_exact(moved[name], target[name], filled((8, 8)))
    assert_exact(moved["query"], columns, filled((24, 8))[:8])
    assert_exact(moved["value"], other("t"), filled((24, 8))[16:].astype(jnp.bfloat16))
    assert x.is_deleted() and source["away"].is_deleted()


def test_what_jax_places_counts() -> None:
    rows, columns = on("x"), on(None, "x")
    tree = {"a": jax.device_put(filled((8, 8)), rows), "b": filled((8, 8))}
    redistribute(tree, columns, budget=2 * 64 + 64)
    with pytest.raises(BudgetError, match="beside 64 B of arrays that JAX places") as raised:
        redistribute(tree, columns, budget=2 * 64 + 63)
    assert raised.value.smallest == 192
    with pytest.raises(BudgetError):
        redistribute([filled((8, 8)), 3], on(), budget=100)


def test_refusals_name_the_leaf() -> None:
    tree = {"a": jax.device_put(filled((6, 8)), on()), "b": jax.device_put(filled((8, 8)), on())}
    with pytest.raises(LayoutError, match=r"a: .*does not divide"):
        redistribute(tree, on("x"), budget="1MiB")


def test_a_trace_keeps_to_the_budget_leaf_by_leaf() -> None:
    rows, columns = on("x"), on(None, "x")
    tree = {name: jax.device_put(filled((8, 8)), rows) for name in "ab"}
    move = jax.jit(lambda t: redistribute(t, columns, source=rows, budget=128))
    assert np.array_equal(move(tree)["a"], filled((8, 8)))


def test_the_peak_on_xla_counts_results_from_the_start() -> None:
    mesh = rs.Mesh(SIZES)
    ends = tuple(rs.Layout.parse(text, mesh) for text in ("f32[8, 64] + sum{x}", "f32[{y}4, {x}16]"))
    tree = rs.plan_tree({"a": ends})
    assert xla_peak_bytes(tree) == tree.peak_bytes + tree.plans["a"].target.tile_bytes * (
        len(tree.plans["a"].steps) > 1
    )
    assert xla_peak_bytes(bounded_tree({"a": ends}, PlanOptions(xla_peak_bytes(tree)))) <= xla_peak_bytes(tree)


@pytest.mark.slow
def test_a_tree_keeps_to_its_budget_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What XLA stages of each batch counts, beside all else that lives then: the program that is asked about runs."""
    source, target = on("x"), on(None, "x")
    values, tile = filled((128, 128)), 128 * 128 * 4 // 4
    asked = list[int]()
    original = tree_budget._compile_peak
    monkeypatch.setattr(tree_budget, "_compile_peak", lambda *given: (asked.append(original(*given)), asked[-1])[1])
    for budget in (20 * tile, 17 * tile + tile // 8):  # XLA's temporaries fit beside 8 sources and results, or do not.
        tree = [jax.device_put(values + n, source) for n in range(8)]
        moved = redistribute(tree, target, budget=budget)
        assert asked and 14 * tile + asked[-1] <= budget  # The last array moves beside 7 sources and 7 results.
        for n, y in enumerate(moved):
            assert_exact(y, target, values + n)
    with pytest.raises(BudgetError) as refused:
        redistribute([jax.device_put(values, source)] * 2, [target, on("x")], budget=1000)
    moved = redistribute([jax.device_put(values, source)] * 2, [target, on("x")], budget=refused.value.smallest)
    assert_exact(moved[0], target, values)
