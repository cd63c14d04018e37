"""Parts on their way while others are written: results by the oracle, and what waits for what."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Literal

import reshard as rs
from reshard.errors import StepError
from reshard.lower.to_shard_map.parts import overlapped
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.plans.rules.cost import StepMode
from reshard.types import Layout
from tests.lower.to_shard_map.on_xla import MESH, check_on_xla, one_step
from tests.oracle import check

# ---- moves -----------------------------------------------------------------------------------------

STEPS = [
    ("all_to_all", "f32[{x}5, 3, 24]", "f32[20, 3, {x}6]", (2, 3)),
    ("all_to_all", "i32[{x}{y}2, 8, 5]", "i32[{x}4, {y}4, 5]", (5,)),
    ("all_gather", "f32[{x}{y}2, 12]", "f32[16, 12]", (6,)),
    ("all_gather", "f32[12, {x}2, {y}5]", "f32[12, 8, 10]", (4,)),  # along dims behind the parts
    ("permute", "f32[{x}{y}4, 7]", "f32[{y}{x}4, 7]", (7,)),
    ("reduce_scatter", "f32[8, 12] + sum{x}", "f32[{x}2, 12]", (3,)),
    ("reduce_scatter", "f32[12, 7] + mean{y}", "f32[12, {y}4/7]", (4,)),
]


def parted(kind: str, source: str, target: str, parts: int) -> Plan:
    return one_step(kind, source, target, StepMode(parts=parts, overlap=True))


@pytest.mark.parametrize(("kind", "source", "target", "counts"), STEPS)
def test_every_part_arrives(kind: str, source: str, target: str, counts: tuple[int, ...]):
    """Even and odd numbers of parts, from two on: a turn of the loop does two."""
    for parts in counts:
        plan = parted(kind, source, target, parts)
        check(plan)
        check_on_xla(plan)


def test_steps_before_the_last_are_done_with_what_is_packed():
    steps = [("slice", "f32[{x}{y}8, 3, 6]"), ("permute", "f32[{y}{x}8, 3, 6]"), ("all_gather", "f32[{y}32, 3, 6]")]
    moves = [StepSpec(kind, Layout.parse(result, MESH), StepMode(parts=6)) for kind, result in steps]
    moves[-1] = moves[-1]._replace(mode=StepMode(parts=6, overlap=True))
    plan = chain(Layout.parse("f32[{x}16, 3, 6]", MESH), moves[-1].result, moves)
    check_on_xla(plan)


@pytest.mark.parametrize(
    ("kind", "source", "target", "mode"),
    [
        ("permute", "f32[{x}{y}4, 9]", "f32[{y}{x}4, 9]", StepMode(overlap=True)),  # there is one part only
        ("slice", "f32[8, 4]", "f32[{x}2, 4]", StepMode(parts=2, overlap=True)),
        ("exchange", "f32[{x}4, 4]", "f32[16, {x}1]", StepMode(parts=2, overlap=True)),
    ],
)
def test_what_does_not_overlap_is_refused(kind: str, source: str, target: str, mode: StepMode):
    with pytest.raises(StepError, match="overlap=True"):
        one_step(kind, source, target, mode)


def test_two_parts_live_at_once():
    plan = parted("permute", "f32[{x}{y}4, 9]", "f32[{y}{x}4, 9]", 3)
    tile = 4 * 9 * 4
    assert plan.peak_bytes == 2 * tile + 2 * 2 * tile // 3
    assert rs.Plan.from_json(plan.to_json()) == plan
    assert rs.prove(plan)


# ---- the loop --------------------------------------------------------------------------------------


def test_a_part_is_written_beside_the_next_but_before_the_one_after():
    """In a turn of the loop, cosine n writes a part while sine n sends the next one."""
    count = 7

    def written(filled: jax.Array, part: jax.Array, number: jax.Array | int) -> jax.Array:
        return filled.at[number].set(jnp.cos(part))

    traced = jax.make_jaxpr(lambda tile: overlapped(count, tile, lambda at: tile[at], jnp.sin, written))(
        jnp.zeros(count)
    )
    (loop,) = [one for one in traced.eqns if one.primitive.name == "scan"]
    body = loop.params["jaxpr"].jaxpr
    *_, filled, _ = body.invars
    before: dict[object, set[str]] = {filled: {"cos 0"}}
    waits: dict[str, set[str]] = {}
    for one in body.eqns:
        name = one.primitive.name
        needs = set[str]().union(*(before.get(of, ()) for of in one.invars if not isinstance(of, Literal)))
        if name in ("sin", "cos"):
            number = 1 + sum(other.startswith(name) for other in waits)
            waits[f"{name} {number}"] = needs
            needs = {*needs, f"{name} {number}"}
        before |= dict.fromkeys(one.outvars, needs)
    for number in (1, 2):
        assert f"cos {number - 1}" in waits[f"sin {number}"]
        assert f"cos {number}" not in waits[f"sin {number}"]
        assert f"sin {number}" not in waits[f"cos {number}"]
