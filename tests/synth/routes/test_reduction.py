"""Sums that end and sums that start: steps, bytes at the bound, and what they make on numpy."""

from __future__ import annotations

import random
import re
from functools import reduce
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.errors import BudgetError, PlanError
from reshard.geometry.refine import refine
from reshard.plans.plan import chain
from reshard.synth.routes import Pair, reduction
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.layouts import MESHES, SIZES, contiguous_layouts, pairs, random_layout, random_pair
from tests.oracle import check
from tests.sampling import few_or_all

MESH = Mesh(x=4, y=2)
ALL = ("sum", "max", "min", "product", "mean")


def planned(source: str, target: str, mesh: Mesh = MESH, **options) -> rs.Plan:
    plan = rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh), **options)
    check(plan)
    return plan


def kinds(plan: rs.Plan) -> list[str]:
    return [step.kind for step in plan.steps]


@pytest.mark.parametrize("op", ALL)
@pytest.mark.parametrize("source", ["f32[16]", "f32[{y}8, 5]", "f32[3{y}2/11]", "f32[7]", "f32[]"])
def test_to_replicated_is_one_all_reduce(source: str, op: str):
    # Where reduce-scatter and all-gather cost the same, one launch is better than two.
    plan = planned(f"{source} + {op}{{x}}", source)
    assert kinds(plan) == ["all_reduce"]
    elements = plan.source.tile_bytes // 4
    assert plan.received_bytes == -(-2 * 3 * elements // 4) * 4


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        # Both axes at once.
        ("f32[16] + sum{x}{y}", "f32[{x}{y}2]", ["reduce_scatter"]),
        ("f32[16] + sum{x}{y}", "f32[{y}{x}2]", ["reduce_scatter"]),
        ("f32[16, 16] + sum{x}{y}", "f32[{y}8, {x}4]", ["reduce_scatter"]),
        ("f32[16] + sum{x}{y}", "f32[16]", ["all_reduce"]),
        # Part of a reduction.
        ("f32[16] + sum{x}{y}", "f32[{x}4] + sum{y}", ["reduce_scatter"]),
        ("f32[16] + sum{x}{y}", "f32[16] + sum{y}", ["all_reduce"]),
        # Part of an axis.
        ("f32[16] + sum{x:(1)2}", "f32[{x:(1)2}8]", ["reduce_scatter"]),
        ("f32[{x:(2)2}8] + sum{x:(1)2}", "f32[{x:(2)2}{x:(1)2}4]", ["reduce_scatter"]),
        # Slice first what the target holds anyway: less to reduce.
        ("f32[16] + sum{x}", "f32[{y}8]", ["slice", "all_reduce"]),
        ("f32[16, 16] + sum{x}", "f32[{y}8, {x}4]", ["slice", "reduce_scatter"]),
        # Reduce before gathering: less to gather.
        ("f32[{y}8, 16] + sum{x}", "f32[16, {x}4]", ["reduce_scatter", "all_gather"]),
        # Moves of what is partial.
        ("f32[{y}8, 16] + sum{x}", "f32[16, {y}8] + sum{x}", ["all_to_all"]),
        ("f32[{y}8] + sum{x}", "f32[16] + sum{x}", ["all_gather"]),
        ("f32[16] + sum{x}", "f32[{y}8] + sum{x}", ["slice"]),
        ("f32[{y}8, 16] + sum{x}", "f32[16, {y}{x}2]", ["reduce_scatter", "all_to_all"]),
    ],
)
def test_routes(source: str, target: str, expected: list[str]):
    assert kinds(planned(source, target)) == expected


@settings(max_examples=100)
@given(pairs("float64", partial=True))
def test_any_reduction(pair: tuple[Layout, Layout]):
    plan = rs.plan(*pair)
    check(plan)
    assert plan.received_bytes >= plan.lower_bound_bytes


@settings(max_examples=100)
@given(pairs("int32", partial=True))
def test_a_reduction_is_kept_while_its_array_moves(pair: tuple[Layout, Layout]):
    """The same partial axes at both ends: data moves at the bound and nothing is reduced."""
    source, target = pair
    free = [d for d in target.dims if not any(_overlap(source, axis.axis) for axis in _held(d))]
    if len(free) < len(target.dims):
        return
    still = Layout(source.mesh, target.dims, source.dtype, source.reduction, source.partial)
    plan = rs.plan(source, still)
    check(plan)
    assert plan.received_bytes == plan.lower_bound_bytes
    assert not {"all_reduce", "reduce_scatter"} & set(kinds(plan))


def _held(dim: object) -> list:
    return [digit.axis for digit in dim.digits if digit.axis is not None]  # type: ignore[attr-defined]


def _overlap(layout: Layout, axis: str) -> bool:
    return any(axis == sub.axis for sub in layout.partial)


NUMPY = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply}


@pytest.mark.parametrize("op", ALL)
@pytest.mark.parametrize("target", ["f32[{x}2, 6]", "f32[8, 6]", "f32[{y}4, {x}2/6]"])
def test_random_summands_are_combined_as_numpy_does(op: str, target: str):
    """Real data, not indices: eight summands, each combined once."""
    source, end = Layout.parse(f"f32[8, 6] + {op}{{x}}{{y}}", MESH), Layout.parse(target, MESH)
    values = np.random.default_rng(1).integers(1, 5, (8, 8, 6)).astype("float32")
    whole = reduce(NUMPY[op], values)
    whole = whole / 8 if op == "mean" else whole
    results = rs.simulate(rs.plan(source, end), dict(enumerate(values)))
    for device in MESH.devices:
        index = [[i for i in dim if i < size] for dim, size in zip(meaning(end, device), end.shape, strict=True)]
        expected = whole[np.ix_(*index)]
        assert np.allclose(results[device][tuple(slice(n) for n in expected.shape)], expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16", "int4", "int8", "complex64"])
def test_small_dtypes_keep_their_type(dtype: str):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    ops = ("sum", "product") if dtype.startswith(("complex", "int")) else ALL
    for op in ops:
        source = Layout.parse(f"{dtype}[4] + {op}{{x}}", Mesh(x=2))
        for text in ("[4]", "[{x}2]"):
            plan = rs.plan(source, Layout.parse(f"{dtype}{text}", Mesh(x=2)))
            tiles = {0: np.array([0, 1, 2, 1]).astype(kind), 1: np.array([2, 1, 2, 3]).astype(kind)}
            results = rs.simulate(plan, tiles)
            parts = np.array([[0, 1, 2, 1], [2, 1, 2, 3]], "float64")
            whole = {"mean": parts.mean(0)}.get(op, reduce(NUMPY[op], parts))
            whole = np.concatenate([results[0], results[1]]) - whole if text == "[{x}2]" else results[1] - whole
            assert results[0].dtype == kind
            assert not np.any(np.asarray(whole, "complex128"))


def test_the_table_in_the_docstring_is_the_plan_and_its_rival():
    """Kinds, layouts and bytes of the worked example, as the module shows them."""
    mesh = Mesh(x=4, y=2, z=2)
    source, target = Layout.parse("f32[16, 16] + sum{x}{z}", mesh), Layout.parse("f32[{y}8, {x}4]", mesh)
    pattern = r"^    (slice|\w+_\w+) +(f32\[.*?\](?: \+ sum\S+)?) +(\d+) B"
    rows = re.findall(pattern, reduction.__doc__ or "", re.MULTILINE)
    plan, rival = rows[:3], rows[3:]
    assert plan == [(s.kind, str(s.result), str(s.received_bytes)) for s in rs.plan(source, target).steps]
    tables = []
    for route in reduction.routes(Pair(source, target), None):
        steps = chain(source, target, route).steps
        tables.append([(s.kind, str(s.result), str(s.received_bytes)) for s in steps])
    assert rival in tables and plan in tables


# ---- sub-axes, padding and devices of a reduction --------------------------------------------------


@pytest.mark.parametrize("count", few_or_all(60, 400))
def test_no_tile_of_an_uneven_reduction_is_larger_than_both_ends(count: int):
    choose = random.Random(0)
    uneven = 0
    while uneven < count:
        source, target = random_pair(choose, "float64", partial=True)
        if source.even and target.even:
            continue
        uneven += bool(source.partial)
        most = max(source.tile_bytes, target.tile_bytes)
        for slack in (0, 0.05):
            plan = rs.plan(source, target, slack=slack)
            assert all(step.result.tile_bytes <= most for step in plan.steps), str(plan)
        check(plan)


@pytest.mark.parametrize("dim", ["7", "36", "{y}", "{y}4/7"])
@pytest.mark.parametrize("size", [6, 12, 18, 30])
def test_part_of_an_axis_is_reduced_whatever_the_order_of_its_primes(size: int, dim: str):
    mesh = Mesh(x=size, y=2)
    kept = [(pre, k) for k in range(2, size) if size % k == 0 for pre in range(1, size) if size // k % pre == 0]
    for pre, factor in kept:
        plan = planned(f"f32[{dim}] + sum{{x}}", f"f32[{dim}] + sum{{x:({pre}){factor}}}", mesh)
        assert plan.target.partial
    between = planned("f32[{y}3] + sum{x}", "f32[{z}2] + sum{x:(1)2}", Mesh(x=6, y=2, z=3))
    assert between.target.partial, "also between numerals that do not nest"


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("target", ["f32[3, {a}4]", "f32[{a}2/3, 8]", "f32[{b}, {a}4]", "f32[3, 2{b}2/8]"])
@pytest.mark.parametrize("source", ["f32[3, 8] + sum{x}", "f32[3, 8] + product{x}{y}", "f32[3, {y}3/8] + max{x}"])
def test_a_reduction_ends_on_axes_that_do_not_nest_in_the_sources(source: str, target: str, donate: bool):
    """<x=2, y=3> and <b=3, a=2> number the devices alike, and no mesh has the axes of both."""
    pair = Layout.parse(source, Mesh(x=2, y=3)), Layout.parse(target, Mesh(b=3, a=2))
    plan = rs.plan(*pair, donate=donate)
    check(plan)
    check(rs.plan(*pair, network="h100"))
    with pytest.raises(BudgetError) as refused:
        rs.plan(*pair, budget=1)
    check(rs.plan(*pair, budget=refused.value.smallest))


@pytest.mark.parametrize("target", ["f32[{b}6/16, {a}6]", "f32[{a}4, {b}8]", "f32[16, {a:(1)2}{b}4]"])
@pytest.mark.parametrize("partial", ["a:(1)2", "a:(2)2"])
def test_a_scatter_between_holders_of_a_dim_moves_none_of_them(target: str, partial: str):
    """f32[16, {b}{a:(2)2}4] scattered to f32[16, {b}{a}2] would move a:(2)2 from place 4 to place 2."""
    plan = planned(f"f32[16, {{b}}8] + sum{{{partial}}}", target, Mesh(a=4, b=3))
    check(plan)


@pytest.mark.parametrize("count", few_or_all(100, 300))
def test_random_reductions_between_meshes_of_equal_devices(count: int):
    choose = random.Random(0)
    for _ in range(count):
        sizes = choose.choice([(2, 2, 3), (4, 3), (2, 2, 2), (6, 2), (12,)])
        meshes = [
            Mesh({f"{name}{at}": size for at, size in enumerate(choose.sample(sizes, len(sizes)))}) for name in "ab"
        ]
        shape = [choose.choice([1, 3, 4, 7, 12]) for _ in range(choose.randint(1, 2))]
        source, target = (random_layout(choose, mesh, shape, "int32", mesh is meshes[0]) for mesh in meshes)
        check(rs.plan(source, target))


# ---- Targets that are partial where the source is not ----


def test_the_table_of_a_start():
    plan = planned("f32[{x}4, 8]", "f32[16, 8] + sum{x:(2)2}{y}")
    results = ["f32[{x}{y}2, 8]", "f32[2{x:(2)2}{y}2, 8]", "f32[16, 8] + sum{x:(2)2}{y}"]
    assert [str(step.result) for step in plan.steps] == results
    assert [step.received_bytes for step in plan.steps] == [0, 64, 0]


def partial_targets(mesh: Mesh, shape: tuple[int, ...]) -> list[Layout]:
    """Every contiguous layout, partial along every set of the axes that it does not use."""
    targets: list[Layout] = []
    for bare in contiguous_layouts(mesh, shape):
        used = {axis.axis for axis in bare.held}
        free = [mesh.sub_axis(name) for name, size in mesh.axes.items() if name not in used and size > 1]
        for chosen in product((False, True), repeat=len(free)):
            partial = tuple(axis for axis, take in zip(free, chosen, strict=True) if take)
            if partial:
                targets.append(Layout(mesh, bare.dims, "float32", "sum", partial))
    return targets


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [(Mesh(x=2, y=2), (8,)), (Mesh(x=4, y=2), (16,)), (Mesh(x=2, y=3), (12,)), (Mesh(x=2, y=2), (4, 8))],
    ids=str,
)
def test_every_start_on_a_small_mesh_is_right_and_at_the_bound(mesh: Mesh, shape: tuple[int, ...]):
    """Even arrays whose tiles every axis divides: no start receives more than any plan must, or needs larger tiles."""
    for source in contiguous_layouts(mesh, shape):
        for target in partial_targets(mesh, shape):
            plan = rs.plan(source, target)
            check(plan)
            least = max(source.tile_bytes, target.tile_bytes)
            assert all(step.result.tile_bytes <= least for step in plan.steps), str(plan)
            assert plan.lower_bound_bytes <= plan.received_bytes, str(plan)
            whole = rs.plan(source, Layout(mesh, target.dims, "float32"))
            assert plan.received_bytes <= whole.received_bytes, str(plan)
            if refine(source, target) is not None and not crosses(source, target):
                assert plan.received_bytes == plan.lower_bound_bytes, str(plan)


def crosses(source: Layout, target: Layout) -> bool:
    """Whether an axis that becomes partial holds a digit that another axis comes to hold, while others are gathered.

    Its devices then have shares of different sizes, which no layout describes.
    """
    starts = {axis.axis for axis in target.partial}
    before, after = ({axis.axis for axis in layout.held} for layout in (source, target))
    return bool(starts & (before - after)) and bool((before - after - starts) | (before & after))


def random_start(choose: random.Random, dtype: str) -> tuple[Layout, Layout]:
    """A random pair whose target is partial and has an identity; the source may be partial, too."""
    while True:
        mesh = choose.choice(MESHES)
        same = [m for m in MESHES if set(m.devices) == set(mesh.devices)]
        other = mesh if choose.randint(0, 4) else choose.choice(same)
        shape = [choose.choice(SIZES) for _ in range(choose.randint(0, 3))]
        source = random_layout(choose, mesh, shape, dtype, bool(choose.randint(0, 1)))
        target = random_layout(choose, other, shape, dtype, True)
        if target.partial and "mean" not in (target.reduction, source.reduction):
            return source, target


@given(st.integers(0, 1 << 32), st.booleans(), st.integers(0, 3))
@settings(max_examples=60)
def test_any_start_within_a_budget(seed: int, donate: bool, spare: int):
    """The memory theorem: budgets from the peak down to the smallest that works are kept."""
    source, target = random_start(random.Random(seed), "int64")
    free = rs.plan(source, target, donate=donate)
    assert free.received_bytes >= free.lower_bound_bytes
    assert free.to_json() == rs.Plan.from_json(free.to_json()).to_json()
    check(free)
    peak = free.peak_bytes
    try:
        plan = rs.plan(source, target, budget=peak * spare // 3, donate=donate)
    except rs.errors.BudgetError as error:
        plan = rs.plan(source, target, budget=error.smallest, donate=donate)
        assert plan.peak_bytes <= error.smallest
    check(plan)


@pytest.mark.parametrize("network", ["tpu-v5p", "h100"])
def test_starts_on_a_network(network: str):
    for source, target in (("f32[{x}4, 8]", "f32[16, 8] + sum{y}"), ("f32[{x}4]", "f32[{y}8] + sum{x}")):
        plan = planned(source, target, network=network)
        assert plan.steps[-1].kind == "split_sum" and plan.steps[-1].seconds == 0


def test_summands_stay_where_they_are_or_are_summed_on_other_devices():
    """Between devices in different orders, a sum is finished and started again."""
    source = Layout.parse("f32[16] + sum{x}", Mesh(x=4))
    target = Layout.parse("f32[16] + sum{x}", Mesh({"x": 4}, device_ids=[0, 3, 1, 2]))
    plan = rs.plan(source, target)
    check(plan)
    assert kinds(plan)[-1] == "split_sum"


@pytest.mark.parametrize("source", ["f32[16]", "f32[{x}4]", "f32[16] + sum{x}", "f32[16] + mean{y}"])
def test_a_mean_is_never_started(source: str):
    with pytest.raises(PlanError, match=r"mean as it is, so nothing can fill .* give a target that is a sum"):
        planned(source, "f32[16] + mean{x}")
