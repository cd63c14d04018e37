"""The rules of the collectives: costs by hand, refusals, what every rule keeps, and random steps on the runtime."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from math import ceil, prod

import numpy as np
import pytest

import reshard as rs
from reshard.errors import StepError
from reshard.geometry.refine import refine
from reshard.plans.rules.bounds import lower_bound
from reshard.plans.rules.collectives import CROSSING, RULES, check_step
from reshard.plans.rules.step_mode import FREE, PLAIN, Cost, StepMode, refuse_step
from reshard.types.layout import Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh
from reshard.types.reductions import REDUCTIONS, has_reduction, identity
from tests.geometry.brute import elements
from tests.layouts import MESHES, SIZES, random_layout, random_pair
from tests.oracle import check, tiles_of
from tests.plans.rules.steps import MESH, cost, derived, one_step

COSTS = [
    # Free where every device holds its share already.
    *(
        ("slice", operand, result, FREE)
        for operand, result in (
            ("f32[16]", "f32[{x}4]"),
            ("f32[{y}8]", "f32[{y}{x}2]"),
            ("f32[16, 4]", "f32[{x}4, {y}2]"),
            ("f32[16]", "f32[4{x}]"),
            ("f32[16]", "f32[2{x:(1)2}4]"),
            ("f32[8] + sum{x}", "f32[{y}4] + sum{x}"),
            ("f32[10]", "f32[{x}3/10]"),
            ("f32[0]", "f32[0]"),
        )
    ),
    # Three tiles of 4 elements arrive in place.
    ("all_gather", "f32[{x}4]", "f32[16]", Cost(3 * 16, 1, 0)),
    # The blocks are columns of the result, so they arrive in a buffer of its size.
    ("all_gather", "f32[4, {x}4]", "f32[4, 16]", Cost(3 * 64, 1, 256)),
    # A dim of size 1 in front makes no difference.
    ("all_gather", "f32[1, {x}4]", "f32[1, 16]", Cost(3 * 16, 1, 0)),
    ("all_gather", "f32[{x}{y}2]", "f32[16]", Cost(7 * 8, 1, 0)),
    # The group is ordered by y, then x, like the blocks of the result: they arrive in place.
    ("all_gather", "f32[{y}{x}2]", "f32[16]", Cost(7 * 8, 1, 0)),
    ("all_gather", "f32[{x}{y}2]", "f32[{x}4]", Cost(8, 1, 0)),
    # Padded tiles are sent whole: three tiles of three elements.
    ("all_gather", "f32[{x}3/10]", "f32[10]", Cost(3 * 12, 1, 48)),
    ("all_gather", "c128[{y}4] + sum{x}", "c128[8] + sum{x}", Cost(64, 1, 0)),
    ("all_gather", "s4[{x}3]", "s4[12]", Cost(5, 1, 0)),
    # A tile of 4 x 16: 3/4 of 256 B arrive. Blocks of columns are packed, rows arrive in place.
    ("all_to_all", "f32[{x}4, 16]", "f32[16, {x}4]", Cost(192, 1, 256)),
    # The way back: rows leave in place, blocks of columns are unpacked.
    ("all_to_all", "f32[16, {x}4]", "f32[{x}4, 16]", Cost(192, 1, 256)),
    # Packed and unpacked; the packed operand is freed before the result is made.
    ("all_to_all", "f32[2, {x}4, 16]", "f32[2, 16, {x}4]", Cost(384, 1, 512)),
    # Neither packed nor unpacked: the digit moves one place down.
    ("all_to_all", "f32[{x}4]", "f32[4{x}]", Cost(12, 1, 0)),
    # Two sub-axes in one step: 7/8 of 128 B.
    ("all_to_all", "f32[{x}2, {y}2, 8]", "f32[8, 4, {x}{y}]", Cost(112, 1, 128)),
    ("all_to_all", "f32[{x}4, 16] + sum{y}", "f32[16, {x}4] + sum{y}", Cost(192, 1, 256)),
    # Rows 0-11 in pieces of 3, of which 10 are true: 48 B packed and 48 B unpacked, less the result's 40 B, which is
    # made once the packed copy is freed.
    ("all_to_all", "f32[{x}3/10, 4]", "f32[10, {x}]", Cost(36, 1, 48 + 48 - 40)),
    ("permute", "f32[{x}{y}2]", "f32[{y}{x}2]", Cost(8, 1, 0)),
    ("permute", "f32[{x:(1)2}8]", "f32[{y}8]", Cost(32, 1, 0)),
    ("permute", "f32[2{x:(1)2}3, 5]", "f32[2{x:(2)2}3, 5]", Cost(120, 1, 0)),
    ("permute", "f32[{y}8] + sum{x:(1)2}", "f32[{x:(2)2}8] + sum{x:(1)2}", Cost(32, 1, 0)),
    ("reduce_scatter", "f32[16] + sum{x}", "f32[{x}4]", Cost(48, 1, 0)),
    ("reduce_scatter", "f32[4, 16] + sum{x}", "f32[4, {x}4]", Cost(192, 1, 256)),
    ("reduce_scatter", "f32[16] + max{x}{y}", "f32[{x}{y}2]", Cost(56, 1, 0)),
    ("reduce_scatter", "f32[16] + sum{x}{y}", "f32[{x}4] + sum{y}", Cost(48, 1, 0)),
    ("reduce_scatter", "f32[{y}8] + product{x}", "f32[{y}{x}2]", Cost(24, 1, 0)),
    ("all_reduce", "f32[16] + sum{x}", "f32[16]", Cost(2 * 3 * 64 // 4, 1, 0)),
    ("all_reduce", "f32[{x}4] + mean{y}", "f32[{x}4]", Cost(16, 1, 0)),
    ("all_reduce", "f32[16] + sum{x}{y}", "f32[16] + sum{x}", Cost(64, 1, 0)),
    ("all_reduce", "f32[3] + min{x}", "f32[3]", Cost(5 * 4, 1, 0)),  # 2 * 3/4 * 3 elements, rounded up
]


@pytest.mark.parametrize(("kind", "operand", "result", "expected"), COSTS)
def test_costs_by_hand(kind: str, operand: str, result: str, expected: Cost):
    assert cost(kind, operand, result) == expected


REFUSED = {
    ("slice", "only local digits may change"): [("f32[{x}4]", "f32[16]"), ("f32[{x}4, 16]", "f32[16, {x}4]")],
    ("slice", "only to sub-axes not in use"): [("f32[{x}{y}2]", "f32[{y}{x}2]")],
    ("slice", "partial sub-axes must stay"): [("f32[16] + sum{x}", "f32[{x}4]")],
    ("all_gather", "only held digits may change"): [
        ("f32[16]", "f32[{x}4]"),
        ("f32[{x}4, 16]", "f32[16, {x}4]"),
        ("f32[{x}{y}2]", "f32[{y}8]"),
        ("f32[{x}{y}2]", "f32[{x:(1)2}{y}4]"),
    ],
    ("all_gather", "partial sub-axes must stay"): [("f32[{x}4] + sum{y}", "f32[16]")],
    ("all_to_all", "must be those that take local ones"): [
        ("f32[{x}4, 16]", "f32[16, {y}8]"),
        ("f32[{x}4, 16]", "f32[16, 16]"),
        ("f32[16, 16]", "f32[{x}4, 16]"),
        ("f32[{x}4, {y}8]", "f32[{y}8, {x}4]"),
    ],
    ("all_to_all", "partial sub-axes must stay"): [("f32[{x}4, 16] + sum{y}", "f32[16, {x}4]")],
    ("permute", "the tiles must be the same ones"): [
        ("f32[{x}4]", "f32[{y}8]"),
        ("f32[{y}8]", "f32[8{y}]"),
        ("f32[{y}8] + sum{x:(1)2}", "f32[{y}8] + sum{x:(2)2}"),
    ],
    ("exchange", "reduces nothing"): [("f32[16] + sum{x}", "f32[16]"), ("f32[16]", "f32[16] + sum{x}")],
    ("reduce_scatter", "must come to hold local digits"): [
        ("f32[16] + sum{x}", "f32[{y}8]"),
        ("f32[16] + sum{x}", "f32[16]"),
        ("f32[16]", "f32[{x}4]"),
        ("f32[16] + sum{x}", "f32[{x}{y}2]"),
        ("f32[{y}8] + sum{x}", "f32[{x}4]"),
        ("f32[16] + sum{x}", "f32[{x:(1)2}8] + sum{y}"),
    ],
    ("all_reduce", "must become replicated"): [
        ("f32[16]", "f32[16]"),
        ("f32[16]", "f32[16] + sum{x}"),
        ("f32[16] + sum{x}", "f32[{x}4]"),
        ("f32[{y}8] + sum{x}", "f32[16]"),
        ("f32[16] + sum{x}", "f32[16] + sum{y}"),
    ],
    ("split_sum", "sub-axes must become partial"): [
        ("f32[16]", "f32[16]"),
        ("f32[16]", "f32[{x}4]"),
        ("f32[16] + sum{x}", "f32[16] + sum{y}"),
        ("f32[16] + sum{x}", "f32[16]"),
    ],
    ("split_sum", "only digits that they held"): [
        ("f32[{x}4]", "f32[16] + sum{y}"),
        ("f32[{x}4, {y}4]", "f32[{y}8, 8] + sum{x}"),
    ],
    ("split_sum", "keeps the reduction"): [("f32[16] + sum{x}", "f32[16] + max{x}{y}")],
    ("split_sum", "no common refinement"): [("f32[{x}3/10]", "f32[{y}5] + sum{x}")],
    ("split_sum", "no value of float32 leaves a mean as it is"): [("f32[16]", "f32[16] + mean{x}")],
    ("split_sum", "no value of float8_e8m0fnu leaves a sum as it is"): [("f8e8m0fnu[16]", "f8e8m0fnu[16] + sum{x}")],
}


@pytest.mark.parametrize(("kind", "why"), REFUSED)
def test_refusals_name_the_step_its_mesh_and_the_reason(kind: str, why: str):
    for operand, result in REFUSED[kind, why]:
        with pytest.raises(StepError) as caught:
            cost(kind, operand, result)
        message = str(caught.value)
        assert message.startswith(f"{kind}: {operand} -> {result} (global ")
        assert why in message and "mesh <x=4, y=2>" in message


def test_a_refusal_has_both_shapes_and_both_meshes_if_they_differ():
    ends = [Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}3/10, 7]", "f32[10, 7]")]
    assert str(refuse_step("permute", *ends, "because")) == (
        "permute: f32[{x}3/10, 7] -> f32[10, 7] (global (10, 7), tile (3, 7) -> (10, 7), mesh <x=4>): because"
    )
    other = Layout.parse("f32[{a}{b}2]", Mesh(a=3, b=2))
    assert "mesh <x=4> to <a=3, b=2>): because" in str(refuse_step("permute", ends[0], other, "because"))


# ---- what every rule keeps -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RULES)
def test_no_rule_changes_reduction_shape_dtype_or_devices(kind: str):
    for operand, result in (
        ("f32[16] + sum{x}", "f32[16] + max{x}"),
        ("f32[16] + sum{x}{y}", "f32[16] + max{y}"),
        ("f32[16] + sum{x}{y}", "f32[{x}4] + max{y}"),
        ("f32[16] + sum{x}", "f32[{y}8] + max{x}"),
        ("f32[{y}8] + sum{x}", "f32[16] + max{x}"),
        ("f32[{y}8, 16] + sum{x}", "f32[16, {y}8] + max{x}"),
        ("f32[{y}8] + sum{x:(1)2}", "f32[{x:(2)2}8] + max{x:(1)2}"),
    ):
        with pytest.raises(StepError):
            cost(kind, operand, result)
    others = [("f32[16]", "f32[17]"), ("f32[16]", "f32[16, 1]"), *([("f32[16]", "s32[16]")] * (kind != "exchange"))]
    for operand, result in others:
        with pytest.raises(StepError, match="keeps the global shape and the dtype"):
            cost(kind, operand, result)
    if kind not in CROSSING:
        with pytest.raises(StepError, match="lead to other devices"):
            check_step(kind, Layout.parse("f32[{x}4]", Mesh(x=4)), Layout.parse("f32[{x}2]", Mesh(x=8)))
    for operand, result in (("f32[{x}4]", "f32[{x}4]"), ("f32[{x}4]", "f32[8]"), ("f32[8]", "f32[{x}4]")):
        before, after = Layout.parse(operand, Mesh(x=2)), Layout.parse(result, Mesh({"x": 2}, device_ids=[4, 5]))
        if kind == "exchange" or (kind == "permute" and operand == result):
            assert check_step(kind, before, after).received == before.nbytes(after.tile_shape[0])
        else:
            with pytest.raises(StepError):
                check_step(kind, before, after)


def test_modes():
    assert StepMode(chunk=None, in_place=False, parts=1) == PLAIN
    for kind in set(RULES) - {"exchange"}:
        for mode in (StepMode(4), StepMode(in_place=True)):
            with pytest.raises(
                StepError, match="only an exchange is chunked, by at least 1 element, in place, relayed"
            ):
                cost(kind, "f32[16]", "f32[{x}4]", mode)
    # Two parts of 128 B each way: each needs copies of both, and packs one.
    assert cost("all_to_all", "f32[{x}4, 16]", "f32[16, {x}4]", StepMode(parts=2)) == Cost(192, 2, 128 + 128 + 128)


def test_unknown_steps():
    with pytest.raises(StepError, match=r"unknown step 'teleport'; the steps are slice, all_gather"):
        cost("teleport", "f32[16]", "f32[16]")


def test_pairs_without_a_common_refinement_need_an_exchange():
    mesh = Mesh(x=2, y=3)
    for kind in ("slice", "all_gather", "all_to_all"):
        with pytest.raises(StepError, match="no common refinement; use an exchange"):
            cost(kind, "f32[{x}3]", "f32[{y}2]", mesh=mesh)
    # Pieces 0-2 and 3-5 against 0-1, 2-3 and 4-5: the middle one has one element of each half.
    assert cost("exchange", "f32[{x}3]", "f32[{y}2]", mesh=mesh).received == 2 * 4


# ---- every step of a small world, and random ones --------------------------------------------------


SMALL = Mesh(x=2, y=2)


def small_layouts(size: int) -> list[Layout]:
    """Few elements on four devices: in blocks and dealt out, whole and as summands."""
    texts: list[str] = []
    for way, summed in product(("", "{x}", "{y}", "{x}{y}", "{y}{x}"), ("", "sum{x}", "sum{y}", "sum{x}{y}", "max{y}")):
        if not any(axis in way and axis in summed for axis in ("{x}", "{y}")):
            each, more = -(-size // 2 ** way.count("{")), f" + {summed}" if summed else ""
            texts += [f"f32[{way}{each}/{size}]{more}", f"f32[{each}{way}/{size}]{more}"]
    return list(dict.fromkeys(Layout.parse(text, SMALL) for text in texts))


@pytest.mark.parametrize("size", [1, 3, 4, 5])
def test_every_small_step_that_a_rule_derives_is_right(size: int):
    """Whatever a rule lets through does what its result means, at the cost that it says."""
    ran = Counter[str]()
    for kind, operand, result in product(RULES, *[small_layouts(size)] * 2):
        try:
            check_step(kind, operand, result)
        except StepError:
            continue
        if kind != "permute" or lower_bound(operand, result):  # It may be of tiles that stay where they are.
            check(one_step(kind, operand, result))
            ran[kind] += 1
    assert set(ran) == set(RULES)


def test_the_kinds_that_derive_a_random_pair():
    """An exchange derives every pair at the bound, and no kind receives less. A slice is derived where every device of
    an even pair has all that it needs, a permute where the tiles are the same ones."""
    choose = random.Random(3)
    seen = dict.fromkeys(RULES, 0)
    for number in range(500):
        source, target = random_pair(choose, most_rank=2 if number % 2 else 3)
        kinds: dict[str, Cost] = {}
        for kind in RULES:
            try:
                kinds[kind] = check_step(kind, source, target)
            except StepError:
                continue
            seen[kind] += source != target
            assert kinds[kind].received >= check_step("exchange", source, target).received
        assert "exchange" in kinds
        before, after = ({meaning(end, device) for device in end.mesh.devices} for end in (source, target))
        assert ("permute" in kinds) == (before == after), f"{source} -> {target}"
        if source.even and target.even and source.mesh == target.mesh and prod(source.shape):
            has_all = all(elements(target, d) <= elements(source, d) for d in source.mesh.devices)
            if "slice" in kinds or (has_all and refine(source, target) is not None):
                assert has_all and kinds.get("slice") == FREE, f"{source} -> {target} on {source.mesh}"
    assert all(seen[kind] > 10 for kind in ("slice", "permute", "all_gather", "all_to_all")), seen


@pytest.mark.parametrize("kind", ["slice", "permute", "all_to_all", "reduce_scatter", "all_reduce"])
def test_random_steps_run_at_the_promised_cost(kind: str):
    pairs = derived(kind, count=40 if kind == "permute" else 25)
    # A permute may be of tiles that stay where they are.
    for operand, result in (pair for pair in pairs if kind != "permute" or lower_bound(*pair)):
        check(one_step(kind, operand, result))
        if kind == "all_to_all" and operand.even and result.even and not operand.partial and operand.tile_bytes:
            missing = [elements(result, d) - elements(operand, d) for d in operand.mesh.devices]
            assert {4 * len(lacked) for lacked in missing} == {check_step(kind, operand, result).received}


def test_the_tiles_of_a_group_make_up_the_result_of_a_gather():
    """Even pairs: a device receives the rest of its result, and needs no buffer if tiles are runs of the result."""
    seen = {True: 0, False: 0}
    for operand, result in derived("all_gather", count=40):
        check(one_step("all_gather", operand, result))
        if not (operand.even and result.even and prod(result.shape)) or operand.partial:
            continue
        step_cost = check_step("all_gather", operand, result)
        assert step_cost.received == result.tile_bytes - operand.tile_bytes
        tiles, results = tiles_of(operand), tiles_of(result)
        for device, gathered in results.items():
            place = {int(index): at for at, index in enumerate(gathered.reshape(-1))}
            group = [tile.reshape(-1) for tile in tiles.values() if int(tile.reshape(-1)[0]) in place]
            runs = [[place[int(index)] for index in tile] for tile in group]
            in_place = all(run == list(range(run[0], run[0] + len(run))) for run in runs)
            assert (step_cost.scratch == 0) == in_place, f"device {device} of {operand} -> {result}"
            assert step_cost.scratch in (0, result.tile_bytes)
            seen[in_place] += 1
    assert min(seen.values()) > 5


@pytest.mark.parametrize("f", [2, 3, 5, 7])
def test_prime_groups(f: int):
    """A reduce-scatter receives f - 1 blocks; an all-reduce the same again, its blocks being unequal here."""
    mesh = Mesh(x=f)
    assert cost("reduce_scatter", f"f32[{6 * f}] + sum{{x}}", "f32[{x}6]", mesh=mesh) == (4 * 6 * (f - 1), 1, 0)
    received = ceil(2 * (f - 1) / f * 11)
    assert cost("all_reduce", "f32[11] + sum{x}", "f32[11]", mesh=mesh) == (4 * received, 1, 0)


def test_permute_to_another_order_of_devices():
    a, b = Mesh(x=4), Mesh({"x": 4}, device_ids=[3, 1, 2, 0])
    assert check_step("permute", Layout.parse("f32[{x}2]", a), Layout.parse("f32[{x}2]", b)) == Cost(8, 1, 0)


# ---- sums that start -------------------------------------------------------------------------------

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
    reductions = [r for r in ufuncs if has_reduction(dtype, r) and identity(dtype, r) is not None]
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
