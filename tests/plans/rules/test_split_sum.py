"""`split_sum`: what it leads to, refusals, and the summands on the reference runtime."""

from __future__ import annotations

import random

import numpy as np
import pytest

import reshard as rs
from reshard.errors import StepError
from reshard.plans.rules.collectives import check_step
from reshard.plans.rules.step_mode import FREE
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.reductions import REDUCTIONS, identity, supports
from tests.layouts import MESHES, SIZES, random_layout
from tests.oracle import check
from tests.plans.rules.steps import MESH, cost, one_step, refuses

RIGHT = [
    ("f32[16]", "f32[16] + sum{x}"),
    ("f32[{x}4]", "f32[16] + sum{x}"),
    ("f32[{x}4]", "f32[16] + sum{x}{y}"),
    ("f32[{x}4]", "f32[2{x:(2)2}4] + sum{x:(1)2}"),
    ("f32[{y}8, {x}2]", "f32[16, 8] + max{x}{y}"),
    ("f32[{x}4]", "f32[{y}8] + min{x}"),
    ("f32[{x}4, 8]", "f32[16, {y}4] + sum{x}"),
    ("f32[16] + sum{x}", "f32[16] + sum{x}{y}"),
    ("f32[{y}8] + product{x}", "f32[16] + product{x}{y}"),
    ("f32[{x}3/10]", "f32[10] + sum{x}"),
    ("f32[]", "f32[] + sum{x}"),
    ("f32[0, {x}2]", "f32[0, 8] + sum{x}"),
]


@pytest.mark.parametrize(("operand", "result"), RIGHT)
def test_it_is_free_and_right(operand: str, result: str):
    assert cost("split_sum", operand, result) == FREE
    check(one_step("split_sum", Layout.parse(operand, MESH), Layout.parse(result, MESH)))


@pytest.mark.parametrize(
    ("operand", "result", "why"),
    [
        ("f32[16]", "f32[16]", "sub-axes must become partial"),
        ("f32[16]", "f32[{x}4]", "sub-axes must become partial"),
        ("f32[{x}4]", "f32[16] + sum{y}", "only digits that they held"),
        ("f32[{x}4, {y}4]", "f32[{y}8, 8] + sum{x}", "only digits that they held"),
        ("f32[16] + sum{x}", "f32[16] + sum{y}", "sub-axes must become partial"),
        ("f32[16] + sum{x}", "f32[16]", "sub-axes must become partial"),
        ("f32[16] + sum{x}", "f32[16] + max{x}{y}", "keeps the reduction"),
        ("f32[{x}3/10]", "f32[{y}5] + sum{x}", "no common refinement"),
        ("f32[16]", "f32[16] + mean{x}", "no value of float32 leaves a mean as it is"),
        ("f8e8m0fnu[16]", "f8e8m0fnu[16] + sum{x}", "no value of float8_e8m0fnu leaves a sum as it is"),
    ],
)
def test_refusals(operand: str, result: str, why: str):
    refuses("split_sum", operand, result, why)


def test_the_table_of_the_docstring():
    """f32[{x}4] -> f32[16] + sum{x}{y}: the device x=2, y=0 has 8 to 11, and y=1 has zeros alone."""
    plan = one_step("split_sum", Layout.parse("f32[{x}4]", MESH), Layout.parse("f32[16] + sum{x}{y}", MESH))
    tiles = rs.simulate(plan, {d: 4 * (d // 2) + np.arange(4, dtype="float32") + 1 for d in MESH.devices})
    assert tiles[4].tolist() == [0] * 8 + [9, 10, 11, 12] + [0] * 4
    assert not tiles[5].any()


@pytest.mark.parametrize(
    ("operand", "result", "inverse"),
    [
        ("f32[{y}8]", "f32[{y}8] + sum{x}", ["all_reduce"]),  # replicated_to_unreduced of Shardy
        ("f32[{x}4]", "f32[16] + sum{x}", ["all_gather"]),  # sharded_to_unreduced
    ],
)
def test_an_all_reduce_undoes_it_as_shardy_says(operand: str, result: str, inverse: list[str]):
    """all-reduce(split_sum(a)) is a where the axis held nothing, and all-gather(a) where it held a digit."""
    source, partial = Layout.parse(operand, MESH), Layout.parse(result, MESH)
    whole = Layout(MESH, partial.dims, partial.dtype)
    pieces = np.random.default_rng(1).random((4, *source.tile_shape), "float32")
    start = {device: pieces[device // 2 if "x" in operand else device % 2] for device in MESH.devices}
    split = rs.simulate(one_step("split_sum", source, partial), start)
    summed = rs.simulate(one_step("all_reduce", partial, whole), split)
    wanted = start if inverse == ["all_reduce"] else rs.simulate(one_step("all_gather", source, whole), start)
    assert all(np.array_equal(summed[d], wanted[d]) for d in MESH.devices)


KINDS = ["float32", "float16", "bfloat16", "int8", "uint16", "int64", "uint64", "bool", "complex64", "int4"]
KINDS += ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn"]


@pytest.mark.parametrize("dtype", KINDS)
def test_every_dtype_and_operation(dtype: str):
    """The summands combine to the array, bit by bit, whatever fills them."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = np.array([1, 0, 2, 1, 3, 1, 2, 0]).astype(kind)
    ufuncs = {"sum": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply}
    reductions = [r for r in ufuncs if supports(dtype, r) and identity(dtype, r) is not None]
    assert reductions
    for reduction in reductions:
        source = Layout.parse(f"{dtype}[{{x}}2]", Mesh(x=4))
        target = Layout.parse(f"{dtype}[8] + {reduction}{{x}}", Mesh(x=4))
        tiles = rs.simulate(one_step("split_sum", source, target), {d: values[2 * d : 2 * d + 2] for d in range(4)})
        total = tiles[0]
        for device in (1, 2, 3):
            total = ufuncs[reduction](total, tiles[device])
        assert total.astype(kind).tobytes() == values.tobytes()  # numpy widens int4


def test_no_other_start_is_derived_than_the_meaning_allows():
    """Random steps that the rule derives are right, and what it refuses for its digits, no device could do alone."""
    choose = random.Random(7)
    right = 0
    while right < 60:
        mesh = choose.choice(MESHES)
        shape = [choose.choice(SIZES) for _ in range(choose.randint(0, 2))]
        pair = random_layout(choose, mesh, shape), random_layout(choose, mesh, shape, partial=True)
        try:
            check_step("split_sum", *pair)
        except StepError:
            continue
        right += 1
        check(one_step("split_sum", *pair))


def test_every_reduction_but_the_mean_has_an_identity():
    assert [r for r in REDUCTIONS if identity("float64", r) is None] == ["mean"]
