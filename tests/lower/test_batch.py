"""Batches as programs: collectives on packed tiles, and instructions that cannot be join_instructions."""

from __future__ import annotations

import pytest

import reshard as rs
from reshard.errors import PlanError
from reshard.lower import lower_plan
from reshard.lower.program import (
    AllReduce,
    Exchange,
    PackedCollective,
    Permute,
    join_instructions,
    join_launches,
    lower_batch,
)
from tests.trees import llama

MESH = rs.Mesh(x=4, y=2)


def program(source: str, target: str, mesh: rs.Mesh = MESH, **options: object):
    return lower_plan(rs.plan(rs.Layout.parse(source, mesh), rs.Layout.parse(target, mesh), **options)).instructions


def test_blocks_of_all_arrays_lie_side_by_side():
    (step,) = joined_of(("f32[{x}4, 16]", "f32[16, {x}4]"), ("f32[{x}2, 4]", "f32[8, {x}1]"))
    assert isinstance(step, PackedCollective)
    assert step.packed.send.digits == (4, 16 + 2)
    assert step.packed.groups == ((0, 2, 4, 6), (1, 3, 5, 7))


def joined_of(*ends: tuple[str, str]):
    return [join_instructions(steps) for steps in zip(*(program(*pair) for pair in ends), strict=True)]


def test_exchanges_have_rounds_in_common():
    (step,) = joined_of(*[("f32[{x}3/10]", "f32[{y}5]")] * 2)
    assert [type(each) for each in step] == [Exchange] * 2


def test_a_local_step_is_not_joined():
    tree = rs.plan_tree({name: (rs.Layout.parse("f32[16]", MESH), rs.Layout.parse("f32[{x}4]", MESH)) for name in "ab"})
    assert join_launches(lower_batch(tree.batches[0])) == [None]


@pytest.mark.parametrize(
    "steps",
    [
        [Permute(((0, 1), (1, 0))), Permute(((0, 0), (1, 1)))],
        [AllReduce(((0, 1),), "sum"), AllReduce(((0, 1),), "max")],
        [AllReduce(((0, 1),), "sum"), Permute(((0, 1), (1, 0)))],
        [*program("f32[{x}4]", "f32[16]"), *program("f32[{y}8]", "f32[16]")],
        [*program("f32[{x}3/10]", "f32[{y}5]"), *program("f32[{x}3/11]", "f32[{y}6/11]"), Permute(((0, 0),))],
        [*program("f32[16]", "f32[{x}4]")] * 2,
    ],
)
def test_instructions_between_different_devices_are_refused(steps):
    with pytest.raises(PlanError):
        join_instructions(steps)


def test_only_a_checked_batch_is_lowered():
    with pytest.raises(PlanError, match="a checked Batch"):
        lower_batch(None)


def test_every_batch_of_a_model_is_lowered():
    for batch in rs.plan_tree(llama(MESH)).batches:
        programs = lower_batch(batch)
        assert len(programs) == len(batch.names)
        shares = [len(programs) > 1 and steps[0].cost.launches > 0 for steps in batch.steps]
        assert [each is not None for each in join_launches(programs)] == shares
