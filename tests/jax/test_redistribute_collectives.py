"""The compiled program of a move is its plan: kinds, launches and received bytes of every collective, on CPU.

In float32, because XLA:CPU carries narrower floats as float32. On TPU: test_redistribute_tpu.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard import hlo
from reshard.errors import ReshardError
from reshard.jax import redistribute
from reshard.lower import lower_plan
from reshard.lower.program import AllGather, AllToAll, InParts, Permute, Program, Slice
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.collectives import RULES
from reshard.plans.rules.step_mode import StepMode
from reshard.runtime import on_jax
from reshard.types import Layout
from tests.jax.oracle import as_plan, assert_exact, executed, filled, mesh_of, on, promised
from tests.layouts import contiguous_layouts
from tests.sampling import sampled

MESHES = ({"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2}, {"k": 8}, {"x": 2, "y": 3})
SHAPES = {1: (48,), 2: (48, 24), 3: (24, 24, 24)}
Pair = tuple[Layout, Layout]


@lru_cache
def sample() -> tuple[Pair, ...]:
    """60 pairs between which data moves, of all ranks and meshes."""
    choose, drawn = random.Random(0), []
    while len(drawn) < 60:
        sizes, rank = MESHES[len(drawn) % 4], 1 + len(drawn) // 4 % 3
        every = list(contiguous_layouts(rs.Mesh(sizes), SHAPES[rank]))
        source, target = choose.sample(every, 2)
        if rs.plan(source, target).launches:
            drawn.append((source, target))
    return tuple(drawn)


def shardings(pair: Pair) -> tuple[NamedSharding, NamedSharding]:
    mesh = mesh_of(dict(pair[0].mesh.axes))
    return on(mesh, pair[0]), on(mesh, pair[1])


def moved(pair: Pair, **options: Any) -> Any:
    """The compiled move, after a check that it moves indices exactly."""
    source, target = shardings(pair)
    f = jax.jit(lambda x: redistribute(x, target, source=source, **options), in_shardings=source, out_shardings=target)
    values = filled(pair[0].shape)
    assert_exact(f(jax.device_put(values, source)), target, values)
    return f.lower(jax.ShapeDtypeStruct(pair[0].shape, jnp.float32)).compile()


@pytest.mark.fast(2, slow=3)
@pytest.mark.parametrize("number", sampled(range(28), *range(0, 28, 7)))
def test_the_compiled_program_is_the_plan(number: int):
    pair = sample()[number]
    assert executed(moved(pair)) == promised(rs.plan(*pair)), rs.plan(*pair)


@pytest.mark.parametrize("number", sampled((8, 20, 31, 35), 8, 35))
def test_rounds_of_large_all_to_alls_are_the_plan(number: int, monkeypatch: pytest.MonkeyPatch):
    """As if all were large: after a slice, in another order, before a gather, and two rounds."""
    rounds = on_jax.in_rounds(rs.plan(*sample()[number]), least=0)
    assert "exchange" in [step.kind for step in rounds.steps]
    monkeypatch.setattr(on_jax, "in_rounds", partial(on_jax.in_rounds, least=0))
    assert executed(moved(sample()[number])) == promised(rounds), rounds


def test_the_sample_has_every_step_that_moves():
    kinds = Counter(step.kind for pair in sample() for step in rs.plan(*pair).steps)
    assert set(kinds) == set(RULES) - {"reduce_scatter", "all_reduce", "split_sum"}, kinds
    assert min(kinds.values()) >= 5, kinds


def test_it_receives_the_lower_bound():
    """Each plan of the sample, and so each program."""
    for pair in sample():
        plan = rs.plan(*pair)
        assert plan.received_bytes == plan.lower_bound_bytes, plan


# ---- parts -----------------------------------------------------------------------------------------


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize("number", sampled(range(0, 60, 4), 8, 20, 52))
def test_in_parts_every_collective_runs_once_a_part(number: int):
    pair = sample()[number]
    plan = on_jax.in_parts(rs.plan(*pair), least=0, count=4)
    source, target = shardings(pair)
    f = jax.jit(lambda x: on_jax.apply_plan(plan, source.mesh, x), in_shardings=source, out_shardings=target)
    values = filled(pair[0].shape)
    x = jax.device_put(values, source)
    assert_exact(f(x), target, values)
    assert executed(f.lower(x).compile()) == promised(plan), plan


def test_parts_receive_what_the_plan_receives():
    whole, in_parts = Counter(), Counter()
    for pair in sample():
        plan = rs.plan(*pair)
        in_part = on_jax.in_parts(plan, least=0, count=4)
        assert in_part.received_bytes == plan.received_bytes
        whole[plan.launches] += 1
        in_parts[max((step.mode.parts for step in in_part.steps), default=1)] += 1
        for before, after in zip(plan.steps, in_part.steps, strict=True):
            if before.kind == after.kind:
                assert after.launches == before.launches * after.mode.parts
            else:
                assert (after.kind, after.mode) == ("exchange", StepMode()) and after.launches <= 16
    assert sum(count for parts, count in in_parts.items() if parts > 1) >= 40, in_parts


def test_a_step_with_too_few_parts_is_an_exchange():
    """As for prime sizes: two parts are half of source and target each, sixteen messages a sixteenth."""
    mesh = rs.Mesh(x=4, y=4)
    pair = Layout.parse("f32[32, {x}13, {y}26]", mesh), Layout.parse("f32[{x}{y}2, 52, 104]", mesh)
    plan = on_jax.in_parts(rs.plan(*pair), least=0)
    assert [(step.kind, step.mode.parts, step.launches) for step in plan.steps] == [("exchange", 1, 15)]
    assert plan.received_bytes == rs.plan(*pair).received_bytes


def test_small_moves_are_not_in_parts():
    source, target = shardings(sample()[0])
    plan = as_plan(source, target, sample()[0][0].shape, "float32")
    assert on_jax.in_parts(plan) == plan


# ---- other meshes ----------------------------------------------------------------------------------


def test_sub_axes():
    """Between two factorings of eight devices; a collective along part of an axis is one call."""
    before, after = NamedSharding(mesh_of({"k": 8}), P("k")), NamedSharding(mesh_of({"x": 2, "y": 4}), P("y", "x"))
    f = jax.jit(lambda x: redistribute(x, after, source=before), in_shardings=before, out_shardings=after)
    compiled = f.lower(jax.ShapeDtypeStruct((16, 16), jnp.float32)).compile()
    mesh = rs.Mesh(k=8)
    plan = rs.plan(Layout.parse("f32[{k}2, 16]", mesh), Layout.parse("f32[{k:(2)4}4, {k:(1)2}8]", mesh))
    assert executed(compiled) == promised(plan)


@pytest.mark.slow
def test_uneven_arrays():
    """Padding is local and moves nothing: besides the plan, there is only the all-reduce of the final sum."""
    mesh = mesh_of({"x": 4, "y": 2})
    everywhere, pin = NamedSharding(mesh, P()), jax.lax.with_sharding_constraint
    for before, after in ((P("x"), P()), (P("x"), P(None, "x")), (P("y"), P("y", "x")), (P("x", "y"), P("y", "x"))):
        source, target = NamedSharding(mesh, before), NamedSharding(mesh, after)

        def f(x: Any, source: NamedSharding = source, target: NamedSharding = target) -> Any:
            moved = redistribute(pin(jnp.sin(x), source), target, source=source)
            return pin(jnp.cos(moved), target).sum()

        compiled = jax.jit(f, in_shardings=everywhere).lower(jax.ShapeDtypeStruct((13, 9), jnp.float32)).compile()
        plan = as_plan(source, target, (13, 9), "float32")
        calls = Counter({kind: 0 for kind, _ in executed(compiled)})
        for (kind, _), times in executed(compiled).items():
            calls[kind] += times
        del calls["all_reduce"]
        assert calls == Counter(kind for kind, _ in promised(plan).elements()), plan


def test_messages_of_pieces_that_do_not_nest_are_padded():
    """Padding adds at most half of the plan's bytes, for axes of 2 and 3."""
    padded = 0
    for source, target in (pair for pair in sample() if pair[0].mesh.size == 6):
        plan = chain(source, target, [StepSpec("exchange", target)])  # The planner finds better ones.
        received = sum(size * times for (_, size), times in promised(plan).items())
        assert plan.received_bytes <= received <= 1.5 * plan.received_bytes, plan
        padded += received > plan.received_bytes
    assert padded


@pytest.mark.slow
def test_many_messages_are_a_loop():
    """The size of a program for a budget near the floor does not depend on the number of its messages."""
    mesh = mesh_of({"x": 4, "y": 2})
    source, target = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P(None, ("y", "x")))
    budget = 2 * 64 * 64 * 4 // 8
    plan = as_plan(source, target, (64, 64), "float32", budget=budget)
    f = jax.jit(lambda x: redistribute(x, target, source=source, budget=budget), in_shardings=source)
    compiled = f.lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile()
    assert plan.launches == 48
    assert len(hlo.collectives(hlo.parse(compiled.as_text()))) <= 6


# ---- faults ----------------------------------------------------------------------------------------


def first(kind: type, program: Program) -> tuple[int, Any]:
    return next((at, one) for at, one in enumerate(program.instructions) if isinstance(one, kind))


def traded(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The last members of the first two groups, swapped."""
    one, two = groups[:2]
    return ((*one[:-1], two[-1]), (*two[:-1], one[-1]), *groups[2:])


def wrong_group(program: Program) -> tuple[int, Any]:
    at, gather = first(AllGather, program)
    return at, replace(gather, groups=traded(gather.groups))


def wrong_order(program: Program) -> tuple[int, Any]:
    at, exchange = first(AllToAll, program)
    return at, replace(exchange, groups=tuple(group[::-1] for group in exchange.groups))


def flipped_pair(program: Program) -> tuple[int, Any]:
    at, permute = first(Permute, program)
    senders = [sender for sender, _ in permute.pairs]
    return at, Permute(tuple(zip(senders[1:] + senders[:1], (to for _, to in permute.pairs), strict=True)))


def wrong_block(program: Program) -> tuple[int, Any]:
    at, cut = first(Slice, program)
    return at, replace(cut, block={d: (b + (d == 0)) % cut.send.count for d, b in cut.block.items()})


def transposed_pack(program: Program) -> tuple[int, Any]:
    at, exchange = first(AllToAll, program)
    return at, replace(exchange, send=replace(exchange.send, blocks=exchange.send.blocks[::-1]))


def wrong_part(program: Program) -> tuple[int, Any]:
    """The result's parts go elsewhere: the inner and outer places of the loop's digit are swapped."""
    at, parts = first(InParts, program)
    put = parts.put
    return at, replace(parts, put=put._replace(outer=put.inner, inner=put.outer))


TWO = rs.Mesh(x=4, y=2)
FAULTS: dict[str, tuple[Callable[[Program], tuple[int, Any]], str, str, int]] = {
    "a wrong group": (wrong_group, "f32[{x}2, {y}4]", "f32[8, {y}4]", 1),
    "members in another order": (wrong_order, "f32[{x}2, 8]", "f32[8, {x}2]", 1),
    "a flipped pair": (flipped_pair, "f32[{x}{y}, 8]", "f32[{y}{x}, 8]", 1),
    "a wrong block": (wrong_block, "f32[8, 8]", "f32[{x}2, {y}4]", 1),
    "a transposed pack": (transposed_pack, "f32[{x}{y}2, 16, 16]", "f32[16, {x}4, {y}8]", 1),
    "a wrong part": (wrong_part, "f32[{x}4, 16]", "f32[16, {x}4]", 2),
}


@pytest.mark.fast(3)
@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "planted"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str, planted: bool, monkeypatch: pytest.MonkeyPatch):
    """The comparison with the oracle fails, and only if the fault is planted."""
    plant, before, after, parts = FAULTS[name]
    source, target = Layout.parse(before, TWO), Layout.parse(after, TWO)
    plan = rs.plan(source, target)
    if parts > 1:
        plan = on_jax.in_parts(plan, least=0, count=parts)
    program = lower_plan(plan)
    at, wrong = plant(program)
    wrong = replace(program, instructions=(*program.instructions[:at], wrong, *program.instructions[at + 1 :]))
    if planted:
        monkeypatch.setattr(on_jax, "lower_plan", lambda plan: wrong)
    ends = shardings((source, target))
    values = filled(source.shape)

    def run() -> None:
        f = jax.jit(lambda x: on_jax.apply_plan(plan, ends[0].mesh, x))
        assert_exact(f(jax.device_put(values, ends[0])), ends[1], values)

    if not planted:
        return run()
    with pytest.raises((AssertionError, ReshardError, ValueError, TypeError)):
        run()


def test_a_collective_too_many_is_seen():
    """Values alone would not show it."""
    pair = Layout.parse("f32[{x}2, 8]", TWO), Layout.parse("f32[8, {x}2]", TWO)
    source, target = shardings(pair)

    def f(x: Any) -> Any:
        there = redistribute(x, target, source=source)
        return redistribute(redistribute(there + 1, source, source=target) - 1, target, source=source)

    compiled = jax.jit(f, in_shardings=source, out_shardings=target).lower(jnp.zeros((8, 8))).compile()
    once = promised(rs.plan(*pair))
    assert executed(compiled) == once + promised(rs.plan(*pair[::-1])) + once != once
