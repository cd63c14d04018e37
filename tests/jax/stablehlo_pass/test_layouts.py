"""Programs after the pass on StableHLO move every element to its place: pairs of layouts, against the array itself.

Many pairs share one program, because a test's cost is mostly that of a compilation.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from reshard import hlo
from reshard.runtime.on_jax import spell_spec
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from tests.jax.moving import lowered_twice
from tests.layouts import contiguous_layouts, sample_pairs
from tests.sampling import sampled

Pair = tuple[Layout, Layout]
GRID = Mesh(x=4, y=2)
LAYOUTS = list(contiguous_layouts(GRID, (16, 8)))
PAIRS = list(permutations(LAYOUTS, 2))
PART = 22
OTHER_MESHES = [((2, 3), (12, 6)), ((2, 2, 2), (8, 8, 8)), ((6,), (6, 36))]


def specs(pair: Pair) -> tuple[PartitionSpec, PartitionSpec]:
    return spell_spec(pair[0], pair[0].mesh), spell_spec(pair[1], pair[1].mesh)


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def after_the_pass(f: Any, *args: Any, **options: Any) -> Any:
    """The compiled module after the pass, which takes something over."""
    lowered = lowered_twice(f, *args, **options)
    assert lowered.report.taken
    return lowered.ours.compile()


def check(out: jax.Array, whole: np.ndarray, sharding: NamedSharding) -> None:
    assert out.sharding.is_equivalent_to(sharding, whole.ndim), (out.sharding, sharding)
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])


@pytest.mark.parametrize("start", sampled(range(0, len(PAIRS), PART), 0, rest=pytest.mark.sweep))
def test_all_pairs(start: int) -> None:
    mesh = JaxMesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
    places = [[NamedSharding(mesh, s) for s in specs(pair)] for pair in PAIRS[start : start + PART]]
    whole = numbered((16, 8))
    arrays = [jax.device_put(whole, before) for before, _ in places]

    def move(arrays: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(arrays, places, strict=True)
        return [jax.lax.with_sharding_constraint(array, after) for array, (_, after) in pairs]

    for out, (_, after) in zip(after_the_pass(move, arrays)(arrays), places, strict=True):
        check(out, whole, after)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "shape"), sampled(OTHER_MESHES, OTHER_MESHES[0], rest=pytest.mark.sweep))
def test_other_meshes(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    names = "xyz"[: len(sizes)]
    mesh = JaxMesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), tuple(names))
    pairs = sample_pairs(Mesh(zip(names, sizes, strict=True)), len(shape), 24, seed=5)
    places = [[NamedSharding(mesh, s) for s in specs(pair)] for pair in pairs]
    whole = numbered(shape)

    def move(arrays: list[jax.Array]) -> list[jax.Array]:
        return [
            jax.lax.with_sharding_constraint(jax.numpy.sin(array) * 0 + array, after)
            for array, (_, after) in zip(arrays, places, strict=True)
        ]

    arrays = [jax.device_put(whole, before) for before, _ in places]
    for out, (_, after) in zip(after_the_pass(move, arrays)(arrays), places, strict=True):
        check(out, whole, after)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "step"),
    sampled([((10, 7), 9), ((1, 17), 9), ((10, 7), 45)], ((10, 7), 45), rest=pytest.mark.sweep),
    ids=str,
)
def test_uneven(shape: tuple[int, ...], step: int) -> None:
    """Replicated, to uneven tiles, to other ones, and replicated again: padding never turns into data."""
    mesh = JaxMesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
    whole = numbered(shape)
    everywhere = NamedSharding(mesh, PartitionSpec())
    places = [[NamedSharding(mesh, s) for s in specs(pair)] for pair in PAIRS[::step]]

    def move(array: jax.Array) -> list[jax.Array]:
        results: list[jax.Array] = []
        for number, (before, after) in enumerate(places):
            moved = jax.lax.with_sharding_constraint(array + number, before)
            moved = jax.lax.with_sharding_constraint(moved, after)
            results.append(jax.lax.with_sharding_constraint(moved, everywhere))
        return results

    array = jax.device_put(whole, everywhere)
    for number, out in enumerate(after_the_pass(move, array)(array)):
        check(out, whole + number, everywhere)


@pytest.mark.fast(3)
@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "int32", "complex64", "float64", "uint64"])
def test_dtypes(dtype: str) -> None:
    mesh = JaxMesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
    before, after = (NamedSharding(mesh, PartitionSpec(*s)) for s in (("x", "y"), (None, ("y", "x"))))
    whole = (np.arange(16 * 8).reshape(16, 8) * 3 % 100).astype(jax.numpy.dtype(dtype))
    with jax.enable_x64(True):
        array = jax.device_put(whole, before)
        out = after_the_pass(lambda v: jax.lax.with_sharding_constraint(v, after), array)(array)
        check(out, whole, after)


def test_sub_axes_and_other_meshes() -> None:
    """The second mesh has the same devices on other axes, which are parts of axes on the first mesh."""
    first = JaxMesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
    second = JaxMesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))
    before = NamedSharding(first, PartitionSpec("x", "y"))
    targets = [("b", "a"), (("b", "a"),), (None, "b"), ("a", None), (None, ("a", "b"))]
    places = [NamedSharding(second, PartitionSpec(*target)) for target in targets]
    whole = numbered((16, 8))
    array = jax.device_put(whole, before)
    compiled = after_the_pass(lambda v: [jax.lax.with_sharding_constraint(v, after) for after in places], array)
    for out in compiled(array):  # With two meshes, JAX reports every result on the first one.
        for shard in out.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index])


def test_a_budget_in_turns() -> None:
    mesh = JaxMesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
    before, after = (NamedSharding(mesh, PartitionSpec(*s)) for s in (("x", "y"), (None, ("y", "x"))))
    whole = numbered((64, 64))
    array = jax.device_put(whole, before)
    tile = whole.nbytes // 8
    compiled = after_the_pass(lambda v: jax.lax.with_sharding_constraint(v, after), array, budget=2 * tile + tile // 4)
    check(compiled(array), whole, after)
    assert hlo.traffic(hlo.parse(compiled.as_text())).launches > 1
