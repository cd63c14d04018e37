"""Moves planned and run: shapes of real models, random views of random layouts, budgets, networks, casts and parts."""

import random
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard as rs
from benchmarks.endpoints import weight_figures
from reshard.errors import BudgetError, PlanError, StepError, TileError
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.collectives import check_step
from reshard.plans.rules.step_mode import StepMode
from reshard.types.layout import Layout
from tests.layouts import random_crossing
from tests.view_oracle import KEPT, check_move, cut, random_case, run_plan

MESH = rs.Mesh(fsdp=2, tp=4)


def layout(text: str, mesh: rs.Mesh = MESH) -> Layout:
    return Layout.parse(text, mesh)


def move(source: str, target: str, mesh: rs.Mesh = MESH, **options) -> rs.Move:
    return rs.Move(layout(source, mesh), layout(target, mesh), **options)


MODELS = {
    # Llama: FSDP x TP trainer, fused and interleaved qkv by head, to a server with a dim for each.
    "llama qkv split": (
        move("s64[8, {fsdp}{tp}12, {fsdp:(1)1}6]", "s64[3, 8, {tp}8, 6]", view="l (h three) m -> three l h m", three=3),
        lambda a: a.reshape(8, 32, 3, 6).transpose(2, 0, 1, 3),
    ),
    # The same without interleaving: twelve of 96 rows a device, so that pieces lie across q, k and v.
    "fused qkv, straddling": (
        move("s64[2, {fsdp}{tp}12, 5]", "s64[2, 3, {fsdp}{tp}4, 5]", view="l (three h) m -> l three h m", three=3),
        lambda a: a.reshape(2, 3, 32, 5),
    ),
    "qkv joined": (
        move("s64[3, 2, {tp}4, 4, 5]", "s64[2, {tp}48, 5]", view="three l h d m -> l (three h d) m"),
        lambda a: a.transpose(1, 0, 2, 3, 4).reshape(2, 192, 5),
    ),
    "gate and up split": (
        move("s64[{fsdp}3, {tp}16]", "s64[2, {fsdp}3, {tp}8]", view="m (two f) -> two m f", two=2),
        lambda a: a.reshape(6, 2, 32).transpose(1, 0, 2),
    ),
    "gate and up joined, transposed": (
        move("s64[2, {fsdp}3, {tp}8]", "s64[{tp}16, {fsdp}3]", view="two m f -> (two f) m"),
        lambda a: a.transpose(0, 2, 1).reshape(64, 6),
    ),
    # Two KV heads on four ranks: every rank of a pair gets the head of the pair.
    "GQA, fewer heads than ranks": (
        move("s64[{fsdp}{tp}2, 6]", "s64[{tp:(1)2}, 8, 6]", view="(kv d) m -> kv d m", kv=2),
        lambda a: a.reshape(2, 8, 6),
    ),
    "scanned layers": (
        move("s64[{fsdp}2, {tp}3, 5]", "s64[4, {fsdp}{tp:(1)2}3, {tp:(2)2}3/5]", view="l f m -> l f m"),
        lambda a: a,
    ),
    # Mixtral: experts by EP x TP for training, all experts a rank for serving.
    "mixtral experts": (
        move("s64[{tp}2, {fsdp}3, 8]", "s64[{tp}{fsdp}6, 8]", view="e f m -> (e f) m"),
        lambda a: a.reshape(48, 8),
    ),
    # DeepSeek: kv_b holds nope and v for every head; uneven parts of 5 and 3 are taken.
    "deepseek kv_b": (
        move("s64[{fsdp}{tp}16, 3]", "s64[{tp}4, 5, 3]", view="(h d) r -> h d r", h=16, take={"d": slice(0, 5)}),
        lambda a: a.reshape(16, 8, 3)[:, :5],
    ),
    # Qwen3: 12 heads over 8 devices.
    "12 heads over 8": (
        move("s64[{fsdp}{tp}6, 5]", "s64[12, {tp}, 5]", view="(h d) m -> h d m", d=4),
        lambda a: a.reshape(12, 4, 5),
    ),
    "uneven heads": (
        move("s64[{fsdp}{tp}6, 5]", "s64[{fsdp}{tp}2/12, 4, 5]", view="(h d) m -> h d m", d=4),
        lambda a: a.reshape(12, 4, 5),
    ),
    "transposed weight": (move("s64[{fsdp}4, {tp}3]", "s64[{tp}{fsdp:(1)1}3, 8]", view="i o -> o i"), lambda a: a.T),
}


@pytest.mark.fast(6)
@pytest.mark.parametrize("name", MODELS)
def test_model_shapes(name):
    check_move(*MODELS[name])


def test_heads_and_lanes_are_padded():
    def padded(a: np.ndarray) -> np.ndarray:
        full = np.arange(KEPT, KEPT + 16 * 128).reshape(16, 128)
        full[:12, :100] = a
        return full

    check_move(move("s64[{tp}3, 100]", "s64[{tp}4, {fsdp}64]", into={0: slice(0, 12), 1: slice(0, 100)}), padded)
    check_move(
        move("s64[{tp}4, {fsdp}64]", "s64[{tp}3, 100]", take={0: slice(0, 12), 1: slice(0, 100)}),
        lambda a: a[:12, :100],
    )


def test_a_replicated_target_gathers_nothing_that_it_does_not_need():
    plan = rs.plan(MODELS["GQA, fewer heads than ranks"][0])
    assert plan.received_bytes == plan.lower_bound_bytes == 48 * 8  # one of two heads, where a gather has both


def test_queries_that_replicas_need_leave_their_holders_once():
    """q of a fused qkv, to replicas of 2 parts each: asked for by each replica, every holder would send it 8 times."""
    fused = Layout.parse("f32[{t}48, 16]", rs.Mesh(t=8))
    server = rs.Mesh({"tp": 2, "dp": 8}, device_ids=range(8, 24))
    shares = rs.Move(fused, Layout.parse("f32[{tp}128, 16]", server), take={0: slice(0, 256)})
    plan = rs.plan(shares)
    pull = chain(
        fused, shares.target, [StepSpec("exchange", shares.target, StepMode(view=shares.view))], view=shares.view
    )
    assert [step.kind for step in plan.steps] == ["exchange", "all_gather"]
    assert plan.endpoint_bound_bytes == max(plan.sent_bytes, plan.received_bytes) == 128 * 16 * 4
    assert pull.sent_bytes == 8 * 48 * 16 * 4


@pytest.mark.fast(2)
@pytest.mark.parametrize("part", range(5))
def test_weights_load_no_device_much_more_than_the_linear_program(part: int):
    """They are run and proved as well."""
    for seed in range(8 * part, 8 * part + 8):
        assert weight_figures(seed, 16).to_forwarded <= 1.1


def test_what_widens_into_a_part_is_passed_on_before_it_widens():
    """A part lies across devices, of which four have the same: narrow values are relayed to tiles of their own."""
    there = rs.Mesh({"t": 2, "r": 4}, device_ids=range(1, 9))
    ends = layout("s16[10, 64]", rs.Mesh(x=1)), layout("s64[{t}12, 64]", there)
    plan = check_move(rs.Move(*ends, into={0: slice(7, 17)}, cast=True), put_rows, at_bound=False)
    relayed, filled = plan.steps
    assert relayed.mode.relay and relayed.mode.fresh and not relayed.mode.fills
    assert filled.mode.fills and not filled.launches
    assert max(plan.sent_bytes, plan.received_bytes) == plan.endpoint_bound_bytes == 2 * 10 * 64
    wide = chain(*ends, [StepSpec("exchange", ends[1], StepMode(view=plan.view))], view=plan.view)
    assert wide.sent_bytes == 4 * plan.sent_bytes


def put_rows(a: np.ndarray) -> np.ndarray:
    full = np.arange(KEPT, KEPT + 24 * 64).reshape(24, 64)
    full[7:17] = a
    return full


@given(st.randoms())
def test_random_views(choose):
    case = random_case(choose, most=96)
    even = case.move.source.even and case.move.target.even
    check_move(case.move, case.reference, at_bound=even)


@pytest.mark.sweep
def test_many_random_views():
    for seed in range(4000):
        case = random_case(random.Random(seed))
        check_move(case.move, case.reference, at_bound=case.move.source.even and case.move.target.even)


def test_every_budget_of_source_and_target_is_met():
    for seed in range(30):
        case = random_case(random.Random(seed), most=96)
        move = case.move
        plan = rs.plan(move, budget=move.source.tile_bytes + move.target.tile_bytes)
        run_plan(plan, move, case.reference)
        assert plan.received_bytes >= plan.lower_bound_bytes
        with pytest.raises(BudgetError) as refused:
            rs.plan(move, budget=0)
        assert rs.plan(move, budget=refused.value.smallest).peak_bytes <= refused.value.smallest


@pytest.mark.fast(1)
@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.sweep)])
def test_every_budget_of_source_and_target_is_met_with_a_cast_too(count):
    """Messages are cast as they are packed or unpacked: no tile is there in both dtypes."""
    for seed in range(count):
        choose = random.Random(f"cast {seed}")
        before, after = choose.sample(("int16", "int32", "float32", "int64", "float64"), 2)
        case = random_case(choose, most=96)
        move, reference = case.move, case.reference
        if seed % 2:
            source, target = random_crossing(choose, "int32", choose.random() < 0.2)
            move, reference = rs.Move(source, target), lambda a: a
        if move.source.partial or move.target.partial or (after == "int16" and move.view.into):
            continue
        source, target = replace(move.source, dtype=before), replace(move.target, dtype=after)
        cast = rs.Move(source, target, move.view, cast=True)
        floor = cast.source.tile_bytes + cast.target.tile_bytes
        plan = rs.plan(cast, budget=floor + choose.choice((0, 0, 8, 64)))
        run_plan(plan, cast, reference)
        assert rs.Plan.from_json(plan.to_json()) == plan


def test_a_cast_on_the_way_travels_narrow():
    """Also where it widens and fills a part, which eight bytes an element would fill at eight times the bound."""
    part = rs.plan(rs.Move(layout("u8[{tp}3]"), layout("s64[{tp}6]"), into={0: slice(2, 14)}, cast=True))
    assert [step.kind for step in part.steps] == ["exchange"]
    assert part.received_bytes == part.lower_bound_bytes == 4
    for source, target, wire in (("f32", "bf16", 2), ("bf16", "f32", 2), ("f32", "s32", 4), ("s32", "f32", 4)):
        made = move(f"{source}[{{tp}}2, 8]", f"{target}[8, {{tp}}2]", cast=True)
        plan = rs.plan(made, budget=made.source.tile_bytes + made.target.tile_bytes)
        assert (plan.received_bytes, plan.launches) == (12 * wire, 12)
        staged = rs.plan(made, budget=made.source.tile_bytes + made.target.tile_bytes + 8 * wire)
        assert (staged.received_bytes, staged.launches, staged.steps[0].cost.scratch) == (12 * wire, 3, 8 * wire)


def test_scales_of_a_cast_on_the_way():
    """The scale is that of the wider tile: it divides what is packed, or multiplies what is unpacked."""
    values = (1 + np.arange(64.0)).reshape(8, 8)
    scales = 1 + np.arange(8.0).reshape(8, 1) % 3
    for source, target in (("f32[{tp}2, 8]", "bf16[8, {tp}2]"), ("bf16[{tp}2, 8]", "f32[8, {tp}2]")):
        made = move(source, target, cast=True)
        plan = rs.plan(made, budget=made.source.tile_bytes + made.target.tile_bytes)
        assert [step.kind for step in plan.steps] == ["exchange"]
        narrows = made.target.dtype == "bfloat16"
        before, after = np.dtype(made.source.dtype), np.dtype(made.target.dtype)
        given = values.astype(before)
        wanted = (
            (given / scales.astype(before)).astype(after) if narrows else given.astype(after) * scales.astype(after)
        )
        of_tiles = cut(layout("f32[{tp}2, 1]" if narrows else "f32[8, 1]"), scales)
        moved = rs.simulate(plan, cut(made.source, given), scale=of_tiles)
        expected = cut(made.target, wanted)
        assert all(np.array_equal(tile, expected[device]) for device, tile in moved.items())


@pytest.mark.parametrize(
    ("source", "target", "mode"),
    [
        ("f32[{tp}4, 16]", "bf16[16, {tp}4]", StepMode(in_place=True)),
        ("f32[{tp}4, 16]", "bf16[16, 16]", StepMode(parts=2)),
        ("f32[16, 4] + sum{tp}", "bf16[16, 4] + sum{tp}", StepMode()),
    ],
)
def test_only_an_exchange_of_whole_values_into_another_tile_casts(source, target, mode):
    with pytest.raises(StepError, match=r"cast|split"):
        check_step("exchange", layout(source), layout(target), mode)


TRAINER = rs.Mesh({"fsdp": 4}, device_ids=range(4))
CROSSINGS = {
    "apart": rs.Mesh({"tp": 4, "rep": 2}, device_ids=range(4, 12)),
    "overlapping": rs.Mesh({"tp": 4, "rep": 2}, device_ids=range(2, 10)),
}


@pytest.mark.parametrize("where", CROSSINGS)
def test_a_trainers_layout_on_a_server(where):
    for source, target, options, reference in (
        (
            "s64[2, {fsdp}24, 5]",
            "s64[3, 2, {tp}8, 5]",
            {"view": "l (t h) m -> t l h m", "t": 3},
            lambda a: a.reshape(2, 3, 32, 5).transpose(1, 0, 2, 3),
        ),
        (
            "s64[2, 3{fsdp}8, 5]",
            "s64[2, {tp}8, 5]",
            {"view": "l (t h) m -> l h m", "t": 3, "take": {"t": 1}},
            lambda a: a.reshape(2, 3, 32, 5)[:, 1],
        ),
        (
            "s64[2, {fsdp}24, 5]",
            "s64[2, {tp}8, 5]",
            {"view": "l (t h) m -> l h m", "t": 3, "take": {"t": 1}},
            lambda a: a.reshape(2, 3, 32, 5)[:, 1],
        ),
        (
            "s64[{fsdp}6]",
            "s64[{tp}{rep}3]",
            {"view": "(a b) -> (b a)", "a": 2},
            lambda a: a.reshape(2, 12).T.reshape(-1),
        ),
    ):
        move = rs.Move(Layout.parse(source, TRAINER), Layout.parse(target, CROSSINGS[where]), **options)
        plan = check_move(move, reference, at_bound=False)
        assert plan.crosses and plan.received_bytes == plan.lower_bound_bytes
        assert plan.sent_bytes >= plan.endpoint_bound_bytes or plan.received_bytes >= plan.endpoint_bound_bytes


def test_networks_and_donated_sources():
    network = rs.Network("two", axes={"fsdp": rs.Link(1e-5, 1e9), "tp": rs.Link(1e-6, 1e11)})
    for made, reference in MODELS.values():
        plan = check_move(made, reference, at_bound=False, network=network)
        assert plan.seconds is not None and (plan.seconds > 0) == (plan.launches > 0)
        donated = check_move(made, reference, donate=True)
        assert donated.peak_bytes <= rs.plan(made).peak_bytes


def test_a_reshape_costs_one_tile_and_a_transposition_two():
    opened = move("s64[{tp}4, 6]", "s64[{tp}, 4, 6]", view="(a b) c -> a b c", b=4)
    reshape = check_move(opened, lambda a: a.reshape(4, 4, 6))
    assert (reshape.peak_bytes, [step.kind for step in reshape.steps]) == (reshape.source.tile_bytes, ["view"])
    turn = check_move(move("s64[{tp}4, 6]", "s64[6, {tp}4]", view="a b -> b a"), np.transpose)
    assert turn.peak_bytes == 2 * turn.source.tile_bytes


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        ("f32[{tp}2, 4]", "bf16[8, 4]", ["cast", "all_gather"]),
        ("bf16[{tp}2, 4]", "f32[8, 4]", ["all_gather", "cast"]),
        ("f32[8, 4] + sum{tp}", "bf16[8, 4]", ["all_reduce", "cast"]),
        ("bf16[8, 4] + sum{tp}", "f32[{tp}2, 4]", ["reduce_scatter", "cast"]),
        ("f32[{tp}2, 4]", "f8e4m3fn[{tp}2, 4]", ["cast"]),
    ],
)
def test_the_cast_runs_where_fewer_bytes_move(source, target, kinds):
    plan = rs.plan(move(source, target, cast=True))
    assert [step.kind for step in plan.steps] == kinds
    assert rs.Plan.from_json(plan.to_json()) == plan
    narrow = min((plan.source, plan.target), key=lambda each: each.nbytes(1))
    if not plan.source.partial:
        assert plan.received_bytes == plan.lower_bound_bytes <= narrow.nbytes(24)
    values = np.arange(32.0).reshape(8, 4)
    tiles = cut(plan.source, values.astype(np.dtype(plan.source.dtype)))
    if plan.source.partial:
        tiles = {d: t if d % 4 == 0 else np.zeros_like(t) for d, t in tiles.items()}
    moved = rs.simulate(plan, tiles)
    wanted = cut(plan.target, values.astype(np.dtype(plan.target.dtype)))
    for device, tile in moved.items():
        assert tile.dtype == np.dtype(plan.target.dtype) and np.array_equal(tile, wanted[device])


def test_a_slice_before_a_cast_leaves_less_to_cast():
    made = move("f32[16, 8]", "bf16[{tp}4, 8]", cast=True)
    plan = rs.plan(made)
    assert [step.kind for step in plan.steps] == ["slice", "cast"]
    assert plan.peak_bytes == made.source.tile_bytes + made.source.tile_bytes // 4 + made.target.tile_bytes
    assert rs.plan(made, budget=plan.peak_bytes) == plan


def test_a_view_and_a_cast_at_once():
    for source, target in (("f32", "bf16"), ("bf16", "f32")):
        made = move(f"{source}[{{tp}}12, 4]", f"{target}[3, {{fsdp}}8, 4]", view="(t h) m -> t h m", t=3, cast=True)
        plan = rs.plan(made)
        assert plan.received_bytes == plan.lower_bound_bytes
        values = np.arange(192.0).reshape(48, 4)
        moved = rs.simulate(plan, cut(made.source, values.astype(np.dtype(made.source.dtype))))
        wanted = cut(made.target, values.reshape(3, 16, 4).astype(np.dtype(made.target.dtype)))
        for device, tile in moved.items():
            assert np.array_equal(tile, wanted[device])


def test_fp8_with_scales():
    fp8 = np.dtype(ml_dtypes.float8_e4m3fn)
    choose = np.random.default_rng(0)
    values = choose.normal(size=(16, 8)).astype("float32")
    scales = np.abs(values).max(axis=1, keepdims=True) / 448
    quantize = rs.plan(move("f32[{tp}4, 8]", "f8e4m3fn[16, {tp}2]", cast=True))
    wide, narrow = quantize.source, quantize.target
    of_rows = cut(layout("f32[{tp}4, 1]"), scales)
    moved = rs.simulate(quantize, cut(wide, values), scale=of_rows)
    wanted = cut(narrow, (values / scales).astype(fp8))
    assert all(np.array_equal(tile.view("u1"), wanted[device].view("u1")) for device, tile in moved.items())

    back = rs.plan(move("f8e4m3fn[16, {tp}2]", "f32[{tp}4, 8]", cast=True))
    restored = rs.simulate(back, moved, scale=of_rows)
    exact = cut(wide, (values / scales).astype(fp8).astype("float32") * scales)
    assert all(np.array_equal(tile, exact[device]) for device, tile in restored.items())
    assert back.received_bytes == quantize.received_bytes == 24


@pytest.mark.parametrize("target", ["f32[{tp}6, 5]", "f32[24, 5]"])
def test_what_a_part_does_not_fill_is_neither_cast_nor_scaled(target):
    """The cast comes before the part is written, also where an exchange writes it."""
    part, whole = layout("bf16[{tp}3, 5]"), layout(target)
    plan = rs.plan(rs.Move(part, whole, into={0: slice(6, 18)}, cast=True))
    values = (np.arange(60).reshape(12, 5) % 32).astype(np.dtype(ml_dtypes.bfloat16))
    old = np.full((24, 5), 0.1, "float32")
    moved = rs.simulate(plan, cut(part, values), into=cut(whole, old), scale=2.0)
    old[6:18] = 2 * values.astype("float32")
    wanted = cut(whole, old)
    assert all(np.array_equal(moved[device], wanted[device]) for device in wanted)


def test_scales_that_do_not_fit():
    plan = rs.plan(move("f32[{tp}4, 8]", "bf16[{tp}4, 8]", cast=True))
    tiles = cut(plan.source, np.zeros((16, 8), "float32"))
    for scale in (np.ones(3), {0: 1.0}, "x"):
        with pytest.raises(TileError):
            rs.simulate(plan, tiles, scale=scale)
    same = rs.plan(plan.source, plan.source)
    with pytest.raises(TileError, match="casts nothing"):
        rs.simulate(same, tiles, scale=2.0)


def test_targets_to_fill():
    plan = rs.plan(move("f32[8]", "f32[3, 8]", view="h -> t h", into={"t": 1}, t=3))
    tiles = cut(plan.source, np.zeros(8, "float32"))
    with pytest.raises(TileError, match="into="):
        rs.simulate(plan, tiles)
    for into in ({}, dict.fromkeys(range(8), np.zeros((2, 8), "f4")), dict.fromkeys(range(8), np.zeros((3, 8)))):
        with pytest.raises(TileError):
            rs.simulate(plan, tiles, into=into)
    given = dict.fromkeys(range(8), np.ones((3, 8), "f4"))
    moved = rs.simulate(plan, tiles, into=given)
    assert moved[3].sum() == 16 and given[3].sum() == 24
    with pytest.raises(TileError, match="fills all of the target"):
        rs.simulate(rs.plan(plan.source, plan.source), tiles, into=given)


def test_a_sum_is_finished_through_a_view():
    made = move("s64[8, 6] + sum{tp}", "s64[2, {tp}, 6]", view="(a b) c -> a b c", a=2)
    plan = rs.plan(made)
    assert plan.received_bytes == plan.lower_bound_bytes
    values = np.arange(48).reshape(8, 6)
    moved = rs.simulate(plan, {d: values * (d % 4 + 1) for d in range(8)})
    wanted = cut(made.target, values.reshape(2, 4, 6) * 10)
    assert all(np.array_equal(tile, wanted[device]) for device, tile in moved.items())


def test_a_sum_across_atoms_is_refused():
    made = move("s64[{fsdp}12] + sum{tp}", "s64[{fsdp:(1)1}{tp}6]", view="(a b) -> (b a)", a=3)
    try:
        rs.plan(made)
    except PlanError as error:
        assert "finish the sum" in str(error)


@pytest.mark.parametrize("network", ["tpu-v5p", "h100", "ethernet-100g"])
def test_steps_on_another_mesh_are_priced_by_its_own_links(network: str) -> None:
    mesh = rs.Mesh(data=2, x=3)
    source = rs.Layout.from_spec(mesh, (12,), "f32", [["x"]], unreduced=["data"])
    target = rs.Layout.from_hlo("{devices=[3,2]<=[6]T(0) last_tile_dim_replicate}", (12,), "f32")
    plan = rs.plan(rs.Move(source, target, view="(a b) -> (b a)", a=6), network=network)
    assert len({step.operand.mesh for step in plan.steps}) > 1
    assert plan.seconds == sum(step.seconds or 0.0 for step in plan.steps) > 0


def test_a_part_that_the_target_replicates_is_gathered_where_that_saves_launches():
    """Gate of a fused gate and up: one exchange takes 8 messages, with a gather of columns after it, 3 launches."""
    trainer, server = rs.Mesh(fsdp=8, t=8), rs.Mesh({"rep": 4, "tp": 8}, device_ids=range(64, 96))
    fused, gate = layout("f32[{t}16, {fsdp}8]", trainer), layout("f32[{tp}8, 64]", server)
    plan = rs.plan(rs.Move(fused, gate, take={0: slice(0, 64)}))
    assert [step.kind for step in plan.steps] == ["exchange", "all_gather"]
    assert (plan.launches, max(plan.sent_bytes, plan.received_bytes)) == (3, plan.endpoint_bound_bytes)
