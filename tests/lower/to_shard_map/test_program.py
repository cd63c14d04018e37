"""Whole programs on tiles: of one array and of several, through views, with casts by a scale, and faults in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from benchmarks.endpoints import weights
from reshard.errors import LayoutError, PlanError
from reshard.lower import lower_plan
from reshard.lower.exchange_rounds import Exchange
from reshard.lower.to_shard_map import Beside, batch_function, run_exchange, run_program, tile_function
from reshard.plans.plan import Batch, StepSpec, chain
from reshard.plans.rules.split_steps import possible_counts
from reshard.plans.rules.step_mode import StepMode
from reshard.runtime.on_jax import apply_batch
from reshard.types import Layout, Mesh
from tests.jax.oracle import mesh_of, on
from tests.layouts import random_pair
from tests.lower.to_shard_map.on_xla import check_on_xla
from tests.oracle import check, tiles_of
from tests.program_faults import CORPUS, plans, planted
from tests.sampling import sampled
from tests.synth.test_moves import MODELS
from tests.view_oracle import KEPT, PADDING, Case, cut, random_case

# ---- the corpus ------------------------------------------------------------------------------------


NUMBERS = range(len(CORPUS))


@pytest.mark.fast(5)
@pytest.mark.parametrize("number", NUMBERS)
def test_the_corpus(number: int):
    check_on_xla(plans()[number])


@pytest.mark.fast(2, slow=2)
@pytest.mark.parametrize("number", sampled(NUMBERS[::2], *NUMBERS[::4]))
def test_the_corpus_in_parts(number: int):
    """Every step that can be split runs in as many parts as possible, and in as few."""
    plan = plans()[number]
    for pick in (max, min):
        moves = []
        for step in plan.steps:
            possible = possible_counts(step.operand, step.result) if step.mode == StepMode() else ()
            moves.append(StepSpec(step.kind, step.result, StepMode(parts=pick(possible)) if possible else step.mode))
        in_part = chain(plan.source, plan.target, moves, plan.donate)
        check(in_part)
        check_on_xla(in_part)


@pytest.mark.fast(2, slow=2)
@pytest.mark.parametrize("number", NUMBERS[1::3])
def test_faults_of_the_corpus_are_seen(number: int):
    """Two faults of each plan that change values; tests/lower/test_faults plants all of them.

    Faults that only cost time or memory change no value. XLA never sees a group that is dropped or run twice, where
    groups are written as axes, nor the wrong piece of a slot, since a round has one piece for all devices.
    """
    plan, choose = plans()[number], random.Random(number)
    harmless = {"staging forgotten", "a round run twice", "a group run twice"}
    harmless |= {"a group dropped", "a piece of a slot off by one"}
    every = [(kind, program) for kind, _, program in planted(plan) if kind not in harmless]
    for kind, program in choose.sample(every, min(2, len(every))):
        with pytest.raises((AssertionError, ValueError, TypeError, LookupError)):
            check_on_xla(plan, program)
            pytest.fail(f"{kind} is not seen in {plan}", pytrace=False)


# ---- random plans ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", sampled(range(3), 0))
def test_random_plans(seed: int):
    """Between any layouts of the language: some under a budget, some in place, some reductions."""
    choose, done = random.Random(seed), 0
    while done < 6:
        partial = choose.random() < 0.3
        source, target = random_pair(choose, "float32" if partial else "int32", partial, most_rank=2)
        if source.mesh.size > 8 or max(source.tile_bytes, target.tile_bytes) > 1 << 12:
            continue
        tiles = source.tile_bytes + target.tile_bytes
        less = max(0, tiles - choose.randint(0, 64))
        options = choose.choice([{}, {"budget": tiles}, {"budget": less, "donate": True}])
        try:
            plan = rs.plan(source, target, **options)
        except rs.errors.BudgetError:
            continue
        if plan.launches > 60 or not plan.steps:
            continue
        check_on_xla(plan)
        done += 1


def test_the_devices_of_a_program_are_those_of_the_mesh_by_position():
    """Whatever their ids are; a mesh of another size is refused."""
    mesh = Mesh({"x": 4}, device_ids=[10, 3, 7, 20])
    plan = rs.plan(Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[16, {x}4]", mesh))
    check_on_xla(plan)
    for function in (tile_function, lambda program, axes: batch_function([program], axes)):
        with pytest.raises(PlanError, match=r"\{'x': 2\} have 2 devices, not 4"):
            function(lower_plan(plan), {"x": 2})


# ---- of several arrays -----------------------------------------------------------------------------

SIZES = {"x": 4, "y": 2}
BATCH_MESH = rs.Mesh(SIZES)
COLLECTIVES = ("all-gather", "all-to-all", "collective-permute")
CASES = {
    "gather": ("s32[{x}2, 8]", "s32[8, 8]", "all_gather"),
    "all-to-all": ("s32[{x}2, 8]", "s32[8, {x}2]", "all_to_all"),
    "permute": ("s32[{x}{y}1, 8]", "s32[{y}{x}1, 8]", "permute"),
    "permute and gather": ("s32[{x}2, {y}4]", "s32[{y}4, 8]", "permute all_gather"),
}


@pytest.mark.parametrize("name", CASES)
def test_arrays_of_several_shapes_share_a_collective(name: str) -> None:
    source, target, steps = CASES[name]
    ends = _ends(source, target)
    (batch,) = rs.plan_tree({str(n): pair for n, pair in enumerate(ends)}).batches
    assert [step.kind for step in batch.plans[0].steps] == steps.split()
    assert _collectives(batch) == batch.launches


@pytest.mark.parametrize("platform", ["cpu", "default"])
def test_exchanges_share_a_message_a_round(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def take_way(*tiles: Any, default: Any, **ways: Any) -> Any:
        return ways.get(platform, default)(*tiles)

    monkeypatch.setattr(run_exchange.lax, "platform_dependent", take_way)
    plans = tuple(chain(*pair, [StepSpec("exchange", pair[1])]) for pair in _ends("s32[{x}2, 8]", "s32[{y}4, 8]"))
    batch = Batch(("a", "b", "c"), plans)
    assert _collectives(batch) == batch.launches == plans[0].launches


def _ends(source: str, target: str) -> list[tuple[Layout, Layout]]:
    return [(_sized(source, shape), _sized(target, shape)) for shape in ((8, 8), (16, 8), (8, 24))]


def _collectives(batch: Batch) -> int:
    """The collectives of a compiled batch, whose results are the oracle's."""
    mesh = mesh_of(SIZES)
    arrays = [jax.device_put(_filled(plan.source), on(mesh, plan.source)) for plan in batch.plans]
    targets = [plan.target for plan in batch.plans]
    move = jax.jit(lambda *xs: apply_batch(batch, mesh, xs), out_shardings=[on(mesh, each) for each in targets])
    for moved, layout in zip(move(*arrays), targets, strict=True):
        wanted = tiles_of(layout)
        for shard in moved.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), wanted[shard.device.id])
    text = move.lower(*arrays).compile().as_text()
    return sum(text.count(f" {name}(") for name in COLLECTIVES)


def _sized(text: str, shape: tuple[int, ...]) -> Layout:
    """The layout of this text for another global shape: the same axes in each dim."""
    like = Layout.parse(text, BATCH_MESH)
    axes = [[digit.axis for digit in dim.digits if digit.axis is not None] for dim in like.dims]
    return Layout.tiled(BATCH_MESH, shape, "int32", axes)


def _filled(layout: Layout) -> np.ndarray:
    return np.arange(np.prod(layout.shape), dtype="int32").reshape(layout.shape)


# ---- through views ---------------------------------------------------------------------------------


def on_xla(plan: rs.Plan, tiles: list[dict[int, np.ndarray]]) -> dict[int, np.ndarray]:
    """The plan's program on tiles, and on the target's where it fills a part, stacked by device."""
    program = lower_plan(plan)
    axes = dict(plan.source.mesh.axes) or {"one": 1}
    grid = np.array(jax.devices()[: len(program.devices)]).reshape(tuple(axes.values()))
    sharding = NamedSharding(jax.sharding.Mesh(grid, tuple(axes)), P(tuple(axes)))
    run = tile_function(program, axes)
    whole = jax.shard_map(
        lambda tile, *into: run(tile[0], Beside(*(each[0] for each in into)))[None],
        mesh=sharding.mesh,
        in_specs=tuple(sharding.spec for _ in tiles),
        out_specs=sharding.spec,
        check_vma=False,
    )
    given = [jax.device_put(np.stack([each[d] for d in program.devices]), sharding) for each in tiles]
    return dict(zip(program.devices, np.asarray(jax.jit(whole)(*given)), strict=True))


def check_move(move: rs.Move, reference: Callable[..., Any], plan: rs.Plan | None = None) -> None:
    index = np.arange(int(np.prod(move.source.shape)), dtype=np.int32).reshape(move.source.shape)
    tiles = [cut(move.source, index)]
    if move.view.into:
        held = np.arange(KEPT, KEPT + int(np.prod(move.target.shape)), dtype=np.int32)
        tiles.append(cut(move.target, held.reshape(move.target.shape)))
    moved = on_xla(plan or rs.plan(move), tiles)
    wanted = cut(move.target, np.asarray(reference(index)).astype(np.int32))
    for device, tile in moved.items():
        real = wanted[device] != PADDING
        assert np.array_equal(tile[real], wanted[device][real]), f"device {device} of {move}"


def narrow(move: rs.Move) -> rs.Move:
    layouts = (Layout.parse("s32" + str(each)[3:], each.mesh) for each in (move.source, move.target))
    return rs.Move(*layouts, move.view)


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", ["llama qkv split", "fused qkv, straddling", "deepseek kv_b", "12 heads over 8"])
def test_model_shapes(name: str):
    move, reference = MODELS[name]
    check_move(narrow(move), reference)


def cases(count: int, kind: str) -> list[Case]:
    """Random cases whose plans have a step of this kind."""
    drawn: list[Case] = []
    for seed in range(10_000):
        case = random_case(random.Random(seed), "int32", most=96)
        if case.move.source.mesh.size <= 8 and kind in {step.kind for step in rs.plan(case.move).steps}:
            drawn.append(case)
        if len(drawn) == count:
            break
    return drawn


@pytest.mark.fast(2)
@pytest.mark.parametrize("kind", ["view", "take", "put", "exchange"])
def test_random_views(kind: str):
    for case in cases(2, kind):
        check_move(case.move, case.reference)


@pytest.mark.fast(1)
@pytest.mark.parametrize("seed", [99, 326])
def test_devices_without_a_message_in_a_round_keep_what_they_have(seed: int):
    """What arrives on them is zeros, which belong nowhere: the element at place 0 has been copied there before."""
    case = random_case(random.Random(seed), "int32", most=96)
    move = case.move
    plan = chain(
        move.source, move.target, [StepSpec("exchange", move.target, StepMode(view=move.view))], view=move.view
    )
    (step,) = lower_plan(plan).instructions
    assert isinstance(step, Exchange) and step.local
    check_move(move, case.reference, plan)


@pytest.mark.fast(1)
@pytest.mark.parametrize("seed", [398, 329])
def test_weights_passed_on_among_the_same_devices(seed: int):
    """Experts that fewer devices hold than need them are filled in beside others."""
    case = weights(seed, 8)[1]
    move, mode = case.move, StepMode(relay=True, view=case.move.view)
    plan = chain(move.source, move.target, [StepSpec("exchange", move.target, mode)], view=move.view)
    (step,) = lower_plan(plan).instructions
    assert not plan.crosses and isinstance(step, Exchange) and any(t.relayed for t in step.rounds[-1])
    check_move(move, case.reference, plan)


def test_a_cast():
    layouts = [Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4]", "bf16[16]")]
    plan = rs.plan(rs.Move(*layouts, cast=True))
    moved = on_xla(plan, [cut(plan.source, np.arange(16, dtype="float32"))])
    assert moved[2].dtype.name == "bfloat16" and list(moved[2]) == list(range(16))


def test_a_target_to_fill_is_needed():
    move = rs.Move(*(Layout.parse(text, Mesh(x=2)) for text in ("s32[4]", "s32[6]")), into={0: slice(0, 4)})
    with pytest.raises(PlanError, match="fills part"):
        on_xla(rs.plan(move), [cut(move.source, np.arange(4, dtype=np.int32))])


# ---- the scale of a cast -----------------------------------------------------------------------------

SCALED = Mesh(x=4, y=2)


@pytest.mark.fast(2, slow=2)
@pytest.mark.parametrize("shape", [(), (24, 1), (8, 4), (2, 1), (12, 16), (3, 1)])
@pytest.mark.parametrize(("text", "spec"), [("f32[{x}6, {y}8]", P("x", "y")), ("f32[{y}{x}3, 16]", P(("y", "x")))])
def test_each_tile_has_its_own(shape: tuple[int, ...], text: str, spec: P):
    layout = Layout.parse(text, SCALED)
    scale = np.arange(1, 1 + int(np.prod(shape)), dtype="float32").reshape(shape)
    full = np.broadcast_to(scale, (1, 1)) if not shape else scale
    for axis, size in enumerate(layout.shape):
        full = np.repeat(full, size // full.shape[axis], axis=axis)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    parts, held = run_program.spread_scale(jax.numpy.asarray(scale), layout, spec)

    def expanded(part: jax.Array) -> jax.Array:
        return jax.numpy.broadcast_to(run_program.expand_scale(part, layout.tile_shape), layout.tile_shape)

    whole = jax.shard_map(expanded, mesh=mesh, in_specs=held, out_specs=spec, check_vma=False)(parts)
    assert np.array_equal(whole, full)


def test_uneven_tiles_have_ones_where_they_are_padded():
    layout = Layout.parse("f32[{x}3/10]", SCALED)
    parts, held = run_program.spread_scale(jax.numpy.full(5, 2.0), layout, P("x"))
    assert parts.tolist() == [2.0] * 10 + [1.0] * 2 and held == P("x")


@pytest.mark.parametrize("shape", [(5, 1), (24, 3), (2, 2, 2), (0, 1)])
def test_other_shapes_are_refused(shape: tuple[int, ...]):
    with pytest.raises(LayoutError, match="do not divide"):
        run_program.check_scale(shape, (24, 16))
