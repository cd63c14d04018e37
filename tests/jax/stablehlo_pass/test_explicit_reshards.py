"""Explicit reshards: which operations are inserted, joined and shared, with which layouts and marks."""

from __future__ import annotations

import pytest
from jax.interpreters.mlir import make_ir_context

from reshard.jax.stablehlo_pass.explicit_reshards import ReshardOp, make_explicit, reshard_ops
from reshard.jax.stablehlo_pass.module_pass import transform
from reshard.lower.to_stablehlo import Module, ir, list_operations
from tests.jax.modules import COLUMNS, ROWS, SWAPPED, TYPE, constraint, count, layouts, module


def parsed(text: str) -> Module:
    return ir.Module.parse(text, make_ir_context())


def explicit(text: str) -> tuple[Module, list[ReshardOp]]:
    parsed_module = parsed(text)
    make_explicit(parsed_module)
    return parsed_module, reshard_ops(parsed_module)


ADDITION = f"""{constraint(SWAPPED, result="%b")}
  %r = stablehlo.add %a, %b {{sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{{"x"}}, {{"y"}}]>]>}} : {TYPE}"""


def test_a_users_reshard_and_one_that_an_operation_requires() -> None:
    _, ops = explicit(module(ADDITION))
    assert [op.by_user for op in ops] == [True, False]
    assert [(str(op.source), str(op.target)) for op in ops] == [
        ("f32[{x}4, {y}8]", "f32[{y}8, {x}4]"),
        ("f32[{y}8, {x}4]", "f32[{x}4, {y}8]"),
    ]


def test_makers_and_users() -> None:
    """The first one moves the argument, which no operation makes; the second one's result is added."""
    _, (first, second) = explicit(module(ADDITION))
    assert first.maker is None and first.around == first.users == [second.op]
    assert second.maker == first.op
    assert [op.name for op in second.around] == ["stablehlo.add", "sdy.reshard"]


def test_a_chain_is_one_move_unless_the_user_wrote_the_stop() -> None:
    """Propagation gives the sine the constraint's sharding, and insertion moves its result there: one move."""
    sine = f"%b = stablehlo.sine %a : {TYPE}\n{constraint(COLUMNS, '%b')}"
    assert layouts(transform(module(sine)).report) == [("f32[{x}4, {y}8]", "f32[16, {y}{x}2]", True)]
    stop = f"{constraint(COLUMNS, result='%b')}\n{constraint(ROWS, '%b')}"
    assert [row[1] for row in layouts(transform(module(stop)).report)] == ["f32[16, {y}{x}2]", "f32[{y}{x}2, 16]"]


def test_one_value_is_moved_once_to_one_place() -> None:
    body = f"""{constraint(SWAPPED, result="%b")}
      {constraint(SWAPPED, result="%c")}
      %r = stablehlo.add %b, %c : {TYPE}"""
    transformed = transform(module(body))
    assert count(transformed.text, "sdy.manual_computation") == 1 and len(transformed.report.taken) == 1


def test_a_constraint_on_a_stop_that_is_the_target_counts_as_the_users() -> None:
    """Two constraints to one sharding in a row are one move, and the user's."""
    body = f"{constraint(COLUMNS, result='%b')}\n{constraint(COLUMNS, '%b')}"
    _, ops = explicit(module(body))
    moves = [op for op in ops if op.source != op.target]
    assert [op.by_user for op in moves] == [True]


def test_a_layout_that_the_notation_does_not_have_is_said() -> None:
    """An integer of 17 bits: its reshard is listed without layouts."""
    odd = TYPE.replace("f32", "i17")
    _, (op,) = explicit(module(constraint(COLUMNS)).replace(TYPE, odd))
    assert op.source is None and op.target is None and "i17" in op.why


SPLIT, SUMS = "f32[{x}4, {y}8]", "f32[16, 16] + sum{x}"
STARTS = {
    # Shardy makes a replicated_to_unreduced, a sharded_to_unreduced, and a reshard before the former.
    "replicated": ("<@mesh, [{}, {}]>", '<@mesh, [{}, {}], unreduced={"x"}>', SPLIT, SUMS),
    "sharded": ('<@mesh, [{"x"}, {}]>', '<@mesh, [{}, {}], unreduced={"x"}>', SPLIT, SUMS),
    "moved": ('<@mesh, [{"x"}, {}]>', '<@mesh, [{}, {}], unreduced={"y"}>', "f32[{x}4, 16]", "f32[16, 16] + sum{y}"),
}


@pytest.mark.parametrize(("before", "after", "source", "target"), STARTS.values(), ids=STARTS)
def test_a_sum_that_starts_is_one_reshard_of_the_users(before: str, after: str, source: str, target: str) -> None:
    body = f"%b = sdy.sharding_constraint %a {before} : {TYPE}\n%r = sdy.sharding_constraint %b {after} : {TYPE}"
    result = f"({TYPE} {{sdy.sharding = #sdy.sharding{after}}})"
    transformed, ops = explicit(module(body).replace(f"-> {TYPE} {{", f"-> {result} {{"))
    assert not [op.name for op in list_operations(transformed.operation) if "unreduced" in op.name]
    (start,) = (op for op in ops if op.target is not None and op.target.partial)
    assert (str(start.source), str(start.target), start.by_user) == (source, target, True)


def test_a_sum_that_is_started_and_finished_at_once_is_a_gather() -> None:
    """Shardy turns the all-reduce of a sharded_to_unreduced into an all-gather of its own."""
    constraints = ('[{"x"}, {}]>', '[{}, {}], unreduced={"x"}>', "[{}, {}]>")
    body = "\n".join(
        f"%{to} = sdy.sharding_constraint %{at} <@mesh, {sharding} : {TYPE}"
        for at, to, sharding in zip("abc", "bcr", constraints, strict=True)
    )
    transformed, ops = explicit(module(body))
    assert not [op.name for op in list_operations(transformed.operation) if op.name == "sdy.all_gather"]
    assert ("f32[{x}4, 16]", "f32[16, 16]") in {(str(op.source), str(op.target)) for op in ops}
