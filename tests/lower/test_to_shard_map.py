"""Lowered programs inside `jax.shard_map`, on tiles of indices: the oracle of the reference runtime, on XLA.

Tiles are stacked along a new first dim, one per device, so that any layout can be run: strided and block-cyclic
ones, padded ones, parts of axes, and partial ones of every reduction, whether or not a `NamedSharding` says them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard import hlo
from reshard.errors import PlanError
from reshard.lower import Program, lower
from reshard.lower.program import ExchangeInPlace
from reshard.lower.to_shard_map import shares_lie_in_order, tile_function
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.types import Layout, Mesh
from reshard.types.plan import Plan, StepSpec, chain
from reshard.types.rules.checker import RULES
from reshard.types.rules.cost import StepMode
from reshard.types.rules.parts import counts
from tests.faults import CORPUS, plans, planted
from tests.layouts import random_pair
from tests.oracle import check, check_target, source_tiles


def stacked(program: Program, axes: Mapping[str, int]) -> tuple[jax.stages.Wrapped, NamedSharding]:
    """The program as a function of all tiles, one after another in the order of its devices."""
    names, sizes = tuple(axes) or ("one",), tuple(axes.values()) or (1,)
    grid = np.array(jax.devices()[: len(program.devices)]).reshape(sizes)
    sharding = NamedSharding(jax.sharding.Mesh(grid, names), P(names))
    run = tile_function(program, dict(zip(names, sizes, strict=True)))
    spec = sharding.spec
    whole = jax.shard_map(
        lambda tile: run(tile[0])[None], mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(whole, in_shardings=sharding), sharding


def run(program: Program, axes: Mapping[str, int], tiles: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    f, sharding = stacked(program, axes)
    given = jax.device_put(np.stack([tiles[device] for device in program.devices]), sharding)
    return dict(zip(program.devices, np.asarray(f(given)), strict=True))


def check_on_xla(plan: Plan, program: Program | None = None) -> None:
    """Every device ends with what the target means."""
    check_target(plan, run(program or lower(plan), plan.source.mesh.axes, source_tiles(plan)))


# ---- the corpus ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(CORPUS)))
def test_the_corpus(number: int):
    check_on_xla(plans()[number])


@pytest.mark.parametrize("number", range(len(CORPUS)))
def test_the_corpus_in_parts(number: int):
    """Every step that can be, in the most parts, and in two."""
    plan = plans()[number]
    for pick in (max, min):
        moves = []
        for step in plan.steps:
            able = counts(step.operand, step.result) if step.mode == StepMode() else ()
            moves.append(StepSpec(step.kind, step.result, StepMode(parts=pick(able)) if able else step.mode))
        in_part = chain(plan.source, plan.target, moves, plan.donate)
        check(in_part)
        check_on_xla(in_part)


@pytest.mark.parametrize("number", range(len(CORPUS)))
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


# ---- each kind of step -----------------------------------------------------------------------------

MESH = Mesh(x=4, y=2)
STEPS = [
    # Along rows and columns; of strided digits; over parts of axes and axes in either order; padded.
    ("slice", "f32[16, 8]", "f32[16, {x}2]"),
    ("slice", "f32[16, 8]", "f32[{y}{x}2, 8]"),
    ("slice", "f32[16, 8]", "f32[2{x}2, {y}4]"),
    ("slice", "f32[10, 8]", "f32[{x}3/10, 8]"),
    ("slice", "f32[{x:(1)2}8, 8]", "f32[{x:(1)2}8, {x:(2)2}4]"),
    ("all_gather", "f32[{x}4, 8]", "f32[16, 8]"),
    ("all_gather", "f32[16, {y}4]", "f32[16, 8]"),
    ("all_gather", "f32[{y}{x}2, 8]", "f32[16, 8]"),
    ("all_gather", "f32[{x}4, {y}4]", "f32[16, 8]"),
    ("all_gather", "f32[2{x}2, 8]", "f32[16, 8]"),
    ("all_gather", "f32[{x}3/10, 8]", "f32[10, 8]"),
    ("all_gather", "f32[{x}4, 8]", "f32[{x:(1)2}8, 8]"),
    ("all_to_all", "f32[{x}4, 8]", "f32[16, {x}2]"),
    ("all_to_all", "f32[{x}{y}2, 16]", "f32[16, {y}{x}2]"),
    ("all_to_all", "f32[{x}4, {y}8, 16]", "f32[16, 16, {y}{x}2]"),
    ("all_to_all", "f32[2{x}2, 8]", "f32[16, {x}2]"),
    ("all_to_all", "f32[{x}4, 8]", "f32[{x:(1)2}8, {x:(2)2}4]"),
    ("permute", "f32[{x}{y}2, 8]", "f32[{y}{x}2, 8]"),
    ("permute", "f32[{x:(1)2}8, {y}4]", "f32[{y}8, {x:(2)2}4]"),
    ("exchange", "f32[{x}4, 8]", "f32[{y}8, 8]"),
    ("exchange", "f32[{x}4, 8]", "f32[16, {x}2]"),
    ("exchange", "f32[{x}3/10, 8]", "f32[{y}5, 8]"),
    ("exchange", "f32[{x}{y}2, 8]", "f32[16, 8]"),
    ("reduce_scatter", "f32[16, 8] + sum{x}", "f32[{x}4, 8]"),
    ("reduce_scatter", "f32[16, 8] + mean{x}{y}", "f32[{y}{x}2, 8]"),
    ("reduce_scatter", "f32[{y}8, 8] + max{x}", "f32[{y}8, {x}2]"),
    ("reduce_scatter", "f32[16, 8] + min{x:(2)2}", "f32[16, {x:(2)2}4]"),
    ("reduce_scatter", "s32[16, 8] + product{y}", "s32[{y}8, 8]"),
    ("all_reduce", "f32[{y}8, 8] + sum{x}", "f32[{y}8, 8]"),
    ("all_reduce", "f32[16, 8] + mean{x}{y}", "f32[16, 8]"),
    ("all_reduce", "f32[16, 8] + max{x:(1)2}", "f32[16, 8]"),
    ("all_reduce", "s32[16, 8] + min{y}", "s32[16, 8]"),
    ("all_reduce", "f32[16, 8] + product{x}", "f32[16, 8]"),
]


def one_step(kind: str, source: str, target: str, mode: StepMode | None = None, donate: bool = False) -> Plan:
    before, after = Layout.parse(source, MESH), Layout.parse(target, MESH)
    return chain(before, after, [StepSpec(kind, after, mode or StepMode())], donate)


@pytest.mark.parametrize(("kind", "source", "target"), STEPS)
def test_steps(kind: str, source: str, target: str):
    check_on_xla(one_step(kind, source, target))


def test_all_steps_are_here():
    assert {kind for kind, _, _ in STEPS} == set(RULES)


@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("f32[{x}4, 8]", "f32[16, {x}2]"),  # even, many shares of a device's own
        ("f32[{x}4, 8]", "f32[{y}8, 8]"),
        ("f32[{x}3/10, 8]", "f32[{y}5, 8]"),
        ("f32[{x}{y}2, 8]", "f32[16, 8]"),
    ],
)
def test_exchanges_in_pieces(source: str, target: str, chunk: int):
    """What stays on a device is in pieces too."""
    check_on_xla(one_step("exchange", source, target, StepMode(chunk)))


@pytest.mark.parametrize("chunk", [1, 2, 5, None])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("f32[{x}4, 16]", "f32[16, {x}4]"),
        ("f32[{x}4]", "f32[16]"),
        ("f32[16]", "f32[{x}4]"),
        ("f32[2{x}{y}2, 8]", "f32[2{y}{x}2, 8]"),
        ("f32[{x}4, {y}4]", "f32[{y}8, {x}2]"),
    ],
)
def test_exchanges_in_place(source: str, target: str, chunk: int | None):
    check_on_xla(one_step("exchange", source, target, StepMode(chunk, in_place=True), donate=True))


def test_what_xla_can_overwrite():
    """Where no share is packed or unpacked; else it would hold the tile twice."""
    for source, target, able in (
        ("f32[{x}4]", "f32[{y}8]", False),
        ("f32[{x}4, {y}8]", "f32[{y}8, {x}4]", False),
        ("f32[2{x}2]", "f32[2{x:(2)2}{x:(1)2}2]", True),
    ):
        program = lower(one_step("exchange", source, target, StepMode(None, in_place=True), donate=True))
        assert isinstance(program.instructions[0], ExchangeInPlace)
        assert shares_lie_in_order(program) == able, (source, target)


# ---- random plans ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_random_plans(seed: int):
    """Of any layouts of the language, some under a budget, some in place, some reductions."""
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


# ---- what is compiled ------------------------------------------------------------------------------


def collectives(plan: Plan) -> list[tuple[str, int]]:
    f, sharding = stacked(lower(plan), plan.source.mesh.axes)
    shape = (plan.source.mesh.size, *plan.source.tile_shape)
    compiled = f.lower(jax.ShapeDtypeStruct(shape, plan.source.dtype, sharding=sharding)).compile()
    return [(c.kind, c.received_bytes) for c in hlo.collectives(hlo.parse(compiled.as_text()))]


@pytest.mark.parametrize(("kind", "source", "target"), [s for s in STEPS if s[0] not in ("slice", "exchange")])
def test_a_step_is_one_collective(kind: str, source: str, target: str):
    """Also over parts of axes, in any order of the axes, and of several dims. XLA reduces and scatters sums only."""
    plan = one_step(kind, source, target)
    ((found, received),) = collectives(plan)
    if "product" in source and kind == "all_reduce":
        assert found == "all_gather"  # XLA:CPU reduces no products through this door
        return
    other = kind == "reduce_scatter" and not any(op in source for op in ("sum", "mean"))
    assert found == ("all_to_all" if other else kind)
    assert received == plan.received_bytes


def test_groups_are_whole_axes_where_they_can_be():
    """XLA then writes a mesh and axes, not lists."""
    place = MeshPlace(range(8), {"x": 4, "y": 2})
    assert place.group(((0, 2, 4, 6), (1, 3, 5, 7))) == {"axis_name": ("x",)}
    assert place.group(((0, 1), (2, 3), (4, 5), (6, 7))) == {"axis_name": ("y",)}
    assert place.group((tuple(range(8)),)) == {"axis_name": ("x", "y")}
    assert place.group(((0, 2, 4, 6, 1, 3, 5, 7),)) == {"axis_name": ("y", "x")}


@pytest.mark.parametrize(
    "groups",
    [
        ((0, 4), (1, 5), (2, 6), (3, 7)),  # the major half of x
        ((0, 2), (1, 3), (4, 6), (5, 7)),  # the minor half
        ((0, 4, 1, 5), (2, 6, 3, 7)),
        ((0, 2, 4, 6), (1, 3, 7, 5)),  # one group in another order
    ],
)
def test_groups_of_parts_of_axes_are_listed(groups: tuple[tuple[int, ...], ...]):
    place = MeshPlace(range(8), {"x": 4, "y": 2})
    assert place.group(groups) == {"axis_name": ("x", "y"), "axis_index_groups": groups}


def test_axes_of_one_device_are_left_out():
    place = MeshPlace(range(4), {"x": 4, "one": 1})
    assert place.group(((0, 1, 2, 3),)) == {"axis_name": ("x",)}


def test_a_mesh_of_another_size_is_refused():
    program = lower(one_step("all_gather", "f32[{x}4]", "f32[16]"))
    with pytest.raises(PlanError, match=r"\{'x': 4\} have 4 devices, not 8"):
        tile_function(program, {"x": 4})


def test_the_devices_of_a_program_are_those_of_the_mesh_by_position():
    """Whatever their ids are."""
    mesh = Mesh({"x": 4}, device_ids=[10, 3, 7, 20])
    plan = rs.plan(Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[16, {x}4]", mesh))
    check_on_xla(plan)
