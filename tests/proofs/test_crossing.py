"""Proofs of plans between two sets of devices, and programs for them that are wrong."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

import reshard as rs
from reshard.errors import ProofError, UndecidedError
from reshard.geometry.blocks import Block
from reshard.lower import Program, lower_plan
from reshard.lower.exchange_rounds import Transfer
from reshard.lower.program import Exchange
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from tests.layouts import random_crossing

Rounds = tuple[tuple[Transfer, ...], ...]


@pytest.mark.fast(20)
@pytest.mark.parametrize("seed", range(40))
def test_a_crossing_is_proved_and_a_wrong_one_refused(seed: int):
    plan = rs.plan(*random_crossing(random.Random(seed), partial=True))
    proof = rs.prove(plan)
    assert proof.right.holds
    assert proof.bounded.holds
    if proof.minimal.holds:
        assert plan.received_bytes == plan.lower_bound_bytes
    for fault in _faults(lower_plan(plan)):
        with pytest.raises((ProofError, UndecidedError)):
            rs.prove(plan, fault)


def _faults(program: Program) -> Iterator[Program]:
    """A message lost, one sent to another device, a receiver forgotten, and a box taken from elsewhere."""
    for at, exchange in enumerate(program.instructions):
        if not isinstance(exchange, Exchange) or not exchange.rounds:
            continue
        (first, *others), *later = exchange.rounds
        wrong = [
            replace(exchange, rounds=(tuple(others), *later)),
            replace(exchange, receivers=exchange.receivers[1:]),
        ]
        elsewhere = [device for device in exchange.receivers if device != first.receiver]
        if elsewhere:
            misled = first._replace(receiver=elsewhere[0])
            wrong.append(replace(exchange, rounds=((misled, *others), *later)))
        for instruction in wrong:
            before, after = program.instructions[:at], program.instructions[at + 1 :]
            yield replace(program, instructions=(*before, instruction, *after))


def test_the_proof_says_what_no_device_can_do_without():
    source, target = rs.Layout.parse("f32[{x}4]", rs.Mesh(x=4)), rs.Layout.parse("f32[{d}8]", rs.Mesh.parse("d=2@4"))
    proof = rs.prove(rs.plan(source, target))
    assert proof.minimal.statement == "the worst device receives 32 bytes, as few as in any plan"
    assert proof.bounded.statement == "at most 32 bytes live on a device"


@pytest.mark.parametrize("seed", range(25))
def test_a_relay_is_proved_and_a_wrong_one_refused(seed: int):
    source, target = random_crossing(random.Random(seed))
    plan = chain(source, target, [StepSpec("exchange", target, StepMode(relay=True))])
    assert rs.prove(plan).right.holds
    program = lower_plan(plan)
    (exchange,) = program.instructions
    assert isinstance(exchange, Exchange)
    passed = [(at, t) for at, turn in enumerate(exchange.rounds) for t in turn if t.relayed]
    for at, transfer in passed[:: max(1, len(passed) // 3)]:
        reversed_ends = transfer._replace(sender=transfer.receiver, receiver=transfer.sender)
        for wrong in (None, transfer._replace(relayed=False), reversed_ends):
            rounds = tuple(_with(turn, transfer, wrong) for turn in exchange.rounds)
            with pytest.raises((ProofError, UndecidedError)):
                rs.prove(plan, replace(program, instructions=(replace(exchange, rounds=rounds),)))
        too_early = (*exchange.rounds[at:], *exchange.rounds[:at])
        with pytest.raises((ProofError, UndecidedError)):
            rs.prove(plan, replace(program, instructions=(replace(exchange, rounds=too_early),)))


def test_two_devices_that_each_wait_for_the_other_are_refused():
    """Every element is brought by somebody; one device has it from a second, which would have it from the first."""
    planted = [wrong for seed in range(60, 140) for wrong in _waiting(random.Random(seed))]
    assert len(planted) >= 10
    for plan, wrong in planted:
        with pytest.raises(ProofError):
            rs.prove(plan, wrong)


def _waiting(choose: random.Random) -> Iterator[tuple[rs.Plan, Program]]:
    """Relays in which the device that passes elements on has them from the one it passes them to."""
    source, target = random_crossing(choose)
    plan = chain(source, target, [StepSpec("exchange", target, StepMode(relay=True))])
    program = lower_plan(plan)
    (exchange,) = program.instructions
    assert isinstance(exchange, Exchange)
    transfers = list(itertools.chain.from_iterable(exchange.rounds))
    for later in [t for t in transfers if t.relayed][:6]:
        passed = {_in_result(block) for block in later.blocks}
        for first in transfers:
            if first.relayed or first.receiver != later.sender or passed.isdisjoint(map(_in_result, first.blocks)):
                continue
            back = first._replace(sender=later.receiver, blocks=tuple(map(_in_result, first.blocks)), relayed=True)
            if (rounds := _moved(exchange.rounds, first, back)) is not None:
                yield plan, replace(program, instructions=(replace(exchange, rounds=rounds),))


def _in_result(block: Block) -> Block:
    """A block read where it is written."""
    return Block(block.dst, block.dst, tuple(axis._replace(src=axis.dst) for axis in block.axes))


def _moved(rounds: Rounds, first: Transfer, back: Transfer) -> Rounds | None:
    """The rounds without the first transfer and with the other in the second turn; None if there is no place."""
    turns = [_with(turn, first, None) for turn in rounds]
    for at, turn in enumerate(turns):
        free = all(t.relayed and t.sender != back.sender and t.receiver != back.receiver for t in turn)
        if turn and free and all(turns):
            return (*turns[:at], (*turn, back), *turns[at + 1 :])
    return None


def _with(turn: tuple[Transfer, ...], old: Transfer, new: Transfer | None) -> tuple[Transfer, ...]:
    """A round with one transfer replaced, or left out."""
    changed = (new if transfer is old else transfer for transfer in turn)
    return tuple(transfer for transfer in changed if transfer is not None)
