"""Collectives on symbols: the digits that they read are the elements that the numpy runtime moves."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from reshard.errors import UndecidedError
from reshard.lower import lower_plan
from reshard.lower.program import AllToAll, Permute
from reshard.proofs.symbolic import decide_claims
from reshard.proofs.symbolic.contract import count_values
from reshard.proofs.symbolic.correctness import SOURCES, claim_collective, coordinate_variable, digit_variable
from reshard.runtime import run as run_numpy
from reshard.types import Layout, Mesh
from tests.oracle import summands_of, tiles_of
from tests.proofs.contracts import contract_of, one_step

TWO, SIX, TEN = Mesh(x=3, y=2), Mesh(x=2, y=3), Mesh(x=5, y=2)
STEPS = [
    ("slice", "f32[6, 7]", "f32[{x}2, 7]", TWO),
    ("slice", "f32[30, 6]", "f32[5{x}{y}, 6]", TWO),
    ("all_gather", "f32[{x}5]", "f32[15]", TWO),
    ("all_gather", "f32[5{x}2, {y}3]", "f32[30, 6]", TWO),
    ("all_gather", "f32[{x}{y}2, 3]", "f32[{x}6, 3]", SIX),
    ("all_to_all", "f32[{x}5, 6]", "f32[15, {x}2]", TWO),
    ("all_to_all", "f32[{x}2, {y}3, 12]", "f32[4, 9, {x}{y}2]", SIX),
    ("all_to_all", "f32[3{x}2, 10]", "f32[12, 5{x}]", SIX),
    ("reduce_scatter", "int64[15, 2] + sum{x}", "int64[{x}3, 2]", TEN),
    ("reduce_scatter", "int64[4, 5] + sum{x}{y}", "int64[2{y}, {x}]", TEN),
    ("all_reduce", "int64[7] + sum{x}{y}", "int64[7] + sum{y}", TEN),
    ("all_reduce", "int64[{y}7] + sum{x}", "int64[{y}7]", SIX),
]


@pytest.mark.parametrize(("kind", "source", "target", "mesh"), STEPS)
def test_the_digits_are_the_elements_that_the_numpy_runtime_moves(kind: str, source: str, target: str, mesh: Mesh):
    """For every device and local index: the value is that of the sender (or the sum of all) at the place."""
    plan = one_step(kind, source, target, mesh)
    program = lower_plan(plan)
    contract = contract_of(plan.source, plan.target)
    from_digits = SOURCES[type(program.instructions[0])](program.instructions[0], contract)
    tiles = summands_of(plan.source) if plan.source.partial else tiles_of(plan.source)
    before = {d: tile.astype(plan.source.dtype) for d, tile in tiles.items()}
    after = run_numpy(program, {d: tile.copy() for d, tile in before.items()})
    for device, position in ((d, mesh.position(d)) for d in mesh.devices):
        for values in itertools.product(*(range(d.radix) for d in contract.after)):
            known = {digit_variable(d): v for d, v in zip(contract.after, values, strict=True)}
            strides = {s: d.radix for d in contract.nested for s in (d.src, d.dst) if s is not None}
            known |= {coordinate_variable(s): position // s % n for s, n in strides.items()}
            sender = position
            for stride, variable in from_digits.coordinates.items():
                sender += (known[variable] - position // stride % strides[stride]) * stride
            place = tuple(known[from_digits.digits[d.place]] for d in contract.before)
            read = [
                before[mesh.devices[s]].reshape([d.radix for d in contract.before])[place]
                for s in summed_over(sender, from_digits.summed)
            ]
            assert after[device].reshape([d.radix for d in contract.after])[values] == sum(read)


def summed_over(sender: int, factors: list[tuple[int, int]]) -> list[int]:
    senders = [sender]
    for stride, size in factors:
        senders = [s + (value - s // stride % size) * stride for s in senders for value in range(size)]
    return senders


def test_a_wrong_order_of_blocks_is_a_false_claim():
    """Two block digits of one radix, numbered the other way round at the sender: lists are right, the claim is not."""
    plan = one_step("all_to_all", "f32[{x}2, {y}2, 9]", "f32[6, 6, {x}{y}]", Mesh(x=3, y=3))
    (step,) = lower_plan(plan).instructions
    contract = contract_of(plan.source, plan.target)
    assert isinstance(step, AllToAll) and len(step.send.blocks) == 2
    decide_claims(claim_collective(step, contract))
    wrong = replace(step, send=replace(step.send, blocks=step.send.blocks[::-1]))
    with pytest.raises(UndecidedError, match="fails where"):
        decide_claims(claim_collective(wrong, contract))


@pytest.mark.parametrize(
    ("target", "change", "what"),
    [
        ("f32[7] + sum{y}", {"reduction": "max"}, "combined by max"),
        ("f32[7]", {}, "groups: rows of 10 were expected"),
        ("f32[7] + sum{x}", {}, "groups: rows of 2 were expected"),
    ],
)
def test_other_summands_or_operations_are_refused(target: str, change: dict, what: str):
    """The program combines along x alone, which has 5 members."""
    plan = one_step("all_reduce", "f32[7] + sum{x}{y}", "f32[7] + sum{y}", TEN)
    step = replace(lower_plan(plan).instructions[0], **change)
    contract = contract_of(plan.source, Layout.parse(target, TEN))
    with pytest.raises(UndecidedError, match=what):
        claim_collective(step, contract)


def test_padding_is_part_of_the_claim():
    """Blocks of 2 on 4 devices in 2 rounds have room for 16 rows; the 13 true ones come from inside a tile."""
    plan = one_step("slice", "f32[13]", "f32[2{x}2/13]", Mesh(x=4))
    contract = contract_of(plan.source, plan.target)
    (claim,) = claim_collective(lower_plan(plan).instructions[0], contract)
    assert [limit for _, limit in claim.given] == [limit for _, limit in claim.below] == [13]
    assert count_values(contract.before) == 16
    decide_claims([claim])
    with pytest.raises(UndecidedError, match="fails where"):
        decide_claims([replace(claim, given=())])


def test_an_instruction_without_digits_is_refused():
    with pytest.raises(UndecidedError, match="no such instruction as Permute"):
        claim_collective(Permute(((0, 0),)), contract_of(*[Layout.parse("f32[7]", TEN)] * 2))
