"""Trees of arrays: each lands exactly where it should, in few programs, of which few are compiled."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.errors import LayoutError
from reshard.jax import buckets, eager, redistribute
from reshard.jax.buckets import MOST, fill_buckets
from reshard.jax.request import ReshardRequest
from tests.jax.oracle import AUTO, EXPLICIT, assert_exact, filled, mesh_of, specs
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("by_programs")
SIZES = {"x": 4, "y": 2}
SPECS = specs(SIZES, 2)
BEFORE, AFTER = P("x", "y"), P(None, ("y", "x"))


def on(spec: P, kind: Any = AUTO) -> NamedSharding:
    return NamedSharding(mesh_of(SIZES, kind), spec)


def values_of(number: int, shape: tuple[int, ...] = (8, 8), dtype: Any = np.float32) -> np.ndarray:
    return (filled(shape) + 1000 * number).astype(dtype)


# ---- which programs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counts", [[500], [9] * 56, [1] * 70, [2, 2, 17, 40, 16, 15, 1], [3], [167, 167, 166], [8, 9, 9] * 18], ids=str
)
def test_buckets_cover_every_place(counts: list[int]) -> None:
    kinds: list[Any] = [f"kind {number}" for number in range(len(counts))]
    places = iter(range(sum(counts)))
    listed = {kind: [next(places) for _ in range(count)] for kind, count in zip(kinds, counts, strict=True)}
    made = list(fill_buckets(listed, str))
    moved = [at for bucket in made for at in bucket.places]
    assert set(moved) == set(range(sum(counts)))
    assert len(moved) <= 1.2 * sum(counts), "few move twice"
    for bucket in made:
        assert 1 <= len(bucket.places) == bucket.stack * len(bucket.kinds) <= MOST
        wanted = [kind for kind in bucket.kinds for _ in range(bucket.stack)]
        assert all(at in listed[kind] for at, kind in zip(bucket.places, wanted, strict=True))
    compiled = Counter(kind for kinds, stack in {(b.kinds, b.stack) for b in made} for kind in kinds)
    assert max(compiled.values()) == 1


def test_kinds_of_equal_counts_share_programs() -> None:
    kinds: list[Any] = list(range(56))
    made = list(fill_buckets({kind: list(range(9 * kind, 9 * kind + 9)) for kind in kinds}, str))
    assert len(made) == 6 and len({(bucket.kinds, bucket.stack) for bucket in made}) == 2


def test_kinds_of_like_counts_share_one_program() -> None:
    """Those that no stack divides too: the last start moves some arrays of the first one again."""
    kinds: list[Any] = list(range(3))
    listed = {kind: range(200 * kind, 200 * kind + 167 - kind // 2) for kind in kinds}
    made = list(fill_buckets(listed, str))
    assert len({(bucket.kinds, bucket.stack) for bucket in made}) == 1 and len(made[0].kinds) == 3


def test_many_kinds_start_seldom() -> None:
    """A start of ten kinds has ten kinds' collectives: five arrays of each share them."""
    kinds: list[Any] = list(range(10))
    made = list(fill_buckets({kind: list(range(50 * kind, 50 * kind + 50)) for kind in kinds}, str))
    assert [bucket.stack for bucket in made] == [5] * 10


def test_kinds_of_one_lane_are_side_by_side() -> None:
    kinds: list[Any] = [f"{lane}{number}" for number in range(20) for lane in "abc"]
    made = list(fill_buckets({kind: [at] for at, kind in enumerate(kinds)}, lambda kind: str(kind)[0]))
    order = [str(kind)[0] for bucket in made for kind in bucket.kinds]
    assert order == sorted(order) and len(made) == 2


def test_kinds_whose_steps_agree_share_a_collective() -> None:
    """Arrays of several shapes: one all-to-all for all of them, and the same elements."""
    shapes = [(8, 8), (16, 8), (8, 8, 3), (24, 16)]
    xs = [jax.device_put(values_of(n, shape), on(P("x"))) for n, shape in enumerate(shapes)]
    ys = redistribute(xs, on(P(None, "x")))
    for n, (y, shape) in enumerate(zip(ys, shapes, strict=True)):
        assert_exact(y, on(P(None, "x")), values_of(n, shape))
    kinds = tuple(eager.program_of(ReshardRequest(on(P(None, "x")), on(P("x"))), x.shape, x.dtype, False) for x in xs)
    text = buckets._bucket_program(kinds, 1, alone=True).lower(*xs).compile().as_text()
    assert text.count(" all-to-all(") == 1


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "before, after", [(P("x"), P("y")), (P(("x", "y")), P(("y", "x"))), (P("x", "y"), P("y", "x"))]
)
def test_exchanges_and_permutes_of_several_shapes(before: P, after: P) -> None:
    shapes = [(8, 8), (16, 8), (8, 8, 3), (24, 16)] * 3
    xs = [jax.device_put(values_of(n, shape), on(before)) for n, shape in enumerate(shapes)]
    for n, (y, shape) in enumerate(zip(redistribute(xs, on(after)), shapes, strict=True)):
        assert_exact(y, on(after), values_of(n, shape))


def test_programs_are_compiled_once() -> None:
    buckets._bucket_program.cache_clear()
    xs = [jax.device_put(values_of(number), on(BEFORE)) for number in range(50)]
    for _ in range(3):
        redistribute(xs, on(AFTER))
    assert buckets._bucket_program.cache_info().misses == 1


# ---- exactness -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", sampled([AUTO, EXPLICIT], AUTO, rest=pytest.mark.sweep), ids=str)
def test_a_tree_of_many_kinds(kind: Any) -> None:
    """Sources, targets, shapes, dtypes and weak types that differ; stacks and single arrays."""
    choose = random.Random(3)
    moves = [(choose.choice(SPECS), choose.choice(SPECS)) for _ in range(6)]
    drawn: list[tuple[np.ndarray, P, P]] = []
    for number in range(80):
        before, after = moves[0] if number % 2 else choose.choice(moves)
        shape = (8, 8) if number % 3 else choose.choice([(8, 16), (24, 8), (8, 8, 3)])
        drawn.append((values_of(number, shape, choose.choice(["float32", "int16"])), before, after))
    tree = {number: jax.device_put(v, on(before, kind)) for number, (v, before, _) in enumerate(drawn)}
    targets = {number: on(after, kind) for number, (_, _, after) in enumerate(drawn)}
    moved = redistribute(tree, targets)
    for number, (v, _, _) in enumerate(drawn):
        assert_exact(moved[number], targets[number], v)
        assert_exact(tree[number], tree[number].sharding, v)


def test_concrete_arrays_inside_jit() -> None:
    """They become a part of the program that is traced, whose options are its own."""
    xs = [jax.device_put(values_of(n), on(BEFORE)) for n in range(3)]
    ys = jax.jit(lambda two: [two * y for y in redistribute(xs, on(AFTER))], out_shardings=on(AFTER))(2)
    for n, y in enumerate(ys):
        assert_exact(y, on(AFTER), 2 * values_of(n))


def test_nothing_moves_if_one_leaf_is_refused() -> None:
    xs = [jax.device_put(values_of(n), on(BEFORE)) for n in range(3)]
    with pytest.raises(LayoutError):
        redistribute([*xs, "text"], on(AFTER), donate=True)
    for n, x in enumerate(xs):
        assert_exact(x, on(BEFORE), values_of(n))


def test_stacks_of_unreduced_arrays_are_not_made() -> None:
    with jax.set_mesh(mesh_of(SIZES, EXPLICIT)):
        left, right = (jax.device_put(values_of(0) % 5, P(*spec)) for spec in ([None, "x"], ["x"]))
        product = jax.numpy.einsum("ij,jk->ik", left, right, out_sharding=P(unreduced={"x"}))
        for y in redistribute([product] * 20, P("x")):
            assert_exact(y, on(P("x"), EXPLICIT), (values_of(0) % 5) @ (values_of(0) % 5))
