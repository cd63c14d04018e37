"""Formulas instead of lists: true wherever the lists are, and refused if anything about them is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from reshard.errors import UndecidedError
from reshard.geometry.refine import Refinement, refine
from reshard.lower import lower_plan
from reshard.lower.colouring import EvenRounds, RoundShift
from reshard.lower.exchange_rounds import EvenMessages
from reshard.lower.program import Exchange, Permute
from reshard.plans.plan import Step
from reshard.proofs import plan_proof, prove
from reshard.proofs.symbolic import ByFormula, decide_claims, formula_of_step, formulas
from reshard.proofs.symbolic.formulas import RoundDigit, SymbolicCoordinate, SymbolicPosition, formula_claims
from reshard.types import Layout, Mesh
from tests.proofs.contracts import contract_of, formula_plans, one_step


def test_a_formula_says_what_the_lists_say():
    """Its message, rounds and staging are those of the lowered lists."""
    kinds = set()
    for plan in formula_plans(30):
        for step, listed in zip(plan.steps, lower_plan(plan).instructions, strict=True):
            formula = formula_of_step(step)
            if formula is None:
                continue
            kinds.add(type(listed))
            if isinstance(listed, Exchange):
                sent = {t.elements for transfers in listed.rounds for t in transfers if t.sender != t.receiver}
                assert sent <= {formula.message}
                assert (len(listed.rounds), listed.staged) == (formula.rounds, formula.staged), str(plan)
            else:
                assert (formula.rounds, formula.staged) == (1, False)
    assert kinds == {Exchange, Permute}


STAGED = ("f32[{x}5, 6]", "f32[15, {x}2]", Mesh(x=3))
SWAPPED = ("f32[{x}5, {y}7, 9]", "f32[{y}5, 21, {x}3]", Mesh(x=3, y=3))
UNSTAGED = ("f32[{x}5]", "f32[15]", Mesh(x=3))


def exchange(source: str, target: str, mesh: Mesh) -> Step:
    return Step("exchange", Layout.parse(source, mesh), Layout.parse(target, mesh))


@pytest.mark.parametrize(
    ("pair", "formula"),
    [(STAGED, ByFormula(10, 2, True)), (SWAPPED, ByFormula(105, 3, True)), (UNSTAGED, ByFormula(5, 2, False))],
)
def test_formulas_by_hand(pair: tuple, formula: ByFormula):
    """Each device has one of 3 shares already, unless a digit changes holders; columns must be staged, rows not."""
    assert formula_of_step(exchange(*pair)) == formula


@pytest.mark.parametrize(
    ("pair", "change", "what"),
    [
        (STAGED, {"staged": False}, "unstaged"),
        (SWAPPED, {"staged": False}, "unstaged"),
        (STAGED, {"rounds": 1}, "rounds are left out"),
        (SWAPPED, {"rounds": 2}, "rounds are left out"),
        (UNSTAGED, {"rounds": 1}, "rounds are left out"),
        (STAGED, {"message": 9}, "a message of another size"),
    ],
)
def test_other_figures_are_refused(pair: tuple, change: dict, what: str):
    step = exchange(*pair)
    contract, formula = contract_of(step.operand, step.result), formula_of_step(step)
    decide_claims(formula_claims(step, contract, formula))
    with pytest.raises(UndecidedError, match=what):
        formula_claims(step, contract, ByFormula(**{**formula.__dict__, **change}))


def test_staging_where_none_is_needed_is_no_fault():
    step = exchange(*UNSTAGED)
    decide_claims(formula_claims(step, contract_of(step.operand, step.result), ByFormula(5, 2, True)))


def test_steps_without_formulas():
    uneven = ("f32[{x}3/10]", "f32[{y}5]", Mesh(x=4, y=2))
    for plan in (
        one_step("exchange", *uneven),
        one_step("all_to_all", *STAGED),
        one_step("exchange", *STAGED, chunk=4),
    ):
        assert formula_of_step(plan.steps[0]) is None


class Astray(EvenRounds):
    """A sender that is off along one digit, and shares counted from another coordinate."""

    def __init__(self, r: Refinement, *, spread: bool = False) -> None:
        super().__init__(r, spread=spread)
        self._sources = self._sources[1:]
        self.shares = [(digit, digit.src) for digit, _ in self.shares]


class Uneven(EvenRounds):
    """Shares shifted by the coordinate from which they are counted, so that some are sent twice in a round."""

    def __init__(self, r: Refinement, *, spread: bool = False) -> None:
        super().__init__(r, spread=spread)
        chained = [(digit, head) for digit, head in self.shares if head != digit.src]
        self._shifts = {digit.src: [RoundShift(digit.radix - 1, head, digit.radix)] for digit, head in chained}


def replace_rounds(monkeypatch: pytest.MonkeyPatch, rounds: type[EvenRounds]) -> None:
    """Has the prover find other rounds than the lists have."""

    class Replaced(EvenMessages):
        def __init__(self, r: Refinement, devices: int, chunk: int | None) -> None:
            super().__init__(r, devices, chunk)
            self.even = rounds(r, spread=True)

    monkeypatch.setattr(formulas, "EvenMessages", Replaced)


def test_formulas_that_are_wrong_are_not_proved(monkeypatch: pytest.MonkeyPatch):
    plans = [plan for plan in formula_plans(16) if [step.kind for step in plan.steps] == ["exchange"]]
    monkeypatch.setattr(plan_proof, "MANY_TRANSFERS", 0)
    replace_rounds(monkeypatch, Astray)
    refused = 0
    for plan in plans:
        r = refine(plan.source, plan.target)
        if r.swapped:
            with pytest.raises(UndecidedError):
                prove(plan)
            refused += 1
    assert refused > 1


@pytest.mark.parametrize(
    ("mesh", "source", "target"),
    [
        (Mesh(x=3, y=3), "f32[{x}{y}2, 6]", "f32[{y}6, {x}2]"),
        (Mesh(x=2, y=4, z=4), "f32[{z}4, {y}{x}2, 16]", "f32[16, {z}4, {y}{x}2]"),
    ],
)
def test_shifted_rounds_are_proved_unless_some_device_sends_twice(
    mesh: Mesh, source: str, target: str, monkeypatch: pytest.MonkeyPatch
):
    step = exchange(source, target, mesh)
    contract, formula = contract_of(step.operand, step.result), formula_of_step(step)
    decide_claims(formula_claims(step, contract, formula))
    replace_rounds(monkeypatch, Uneven)
    with pytest.raises(UndecidedError, match="fails where"):
        decide_claims(formula_claims(step, contract, formula))


WRONG_BLOCKS: dict[str, Callable[[Any], Any]] = {
    "twice the start": lambda block: block._replace(src=block.src + block.src),
    "the start of the other end": lambda block: block._replace(src=block.dst, dst=block.src),
    "no start": lambda block: block._replace(dst=0),
    "a loop left out": lambda block: block._replace(axes=block.axes[1:]),
    "a loop of one more": lambda block: block._replace(axes=(block.axes[0]._replace(extent=6), *block.axes[1:])),
    "a shorter loop": lambda block: block._replace(axes=(block.axes[0]._replace(extent=4), *block.axes[1:])),
    "loops in another order": lambda block: block._replace(axes=block.axes[::-1]),
    "a loop of other strides": lambda block: block._replace(axes=(block.axes[0]._replace(src=1), *block.axes[1:])),
}


@pytest.mark.parametrize("wrong", WRONG_BLOCKS)
@pytest.mark.parametrize("mesh", [Mesh(x=3), Mesh(x=3, y=1 << 16)], ids=["small", "large"])
def test_blocks_that_are_wrong_are_not_proved(wrong: str, mesh: Mesh, monkeypatch: pytest.MonkeyPatch):
    """On any number of devices: what the formula of a block gives is read, as what it lists is."""
    step = exchange("f32[{x}5, 6]", "f32[15, {x}2]", mesh)
    contract, formula = contract_of(step.operand, step.result), formula_of_step(step)
    right = EvenMessages.blocks
    decide_claims(formula_claims(step, contract, formula))

    def blocks(self: EvenMessages, receiver: Any, numbers: Any) -> list[Any]:
        made = right(self, receiver, numbers)
        return list(map(WRONG_BLOCKS[wrong], made)) if isinstance(receiver, SymbolicPosition) else made

    monkeypatch.setattr(EvenMessages, "blocks", blocks)
    with pytest.raises(UndecidedError):
        decide_claims(formula_claims(step, contract, formula))


def test_a_list_without_a_share_is_not_proved(monkeypatch: pytest.MonkeyPatch):
    """A device that gets one of its shares twice and another one never, at any number of devices."""
    step = exchange("f32[{x}5, 6]", "f32[15, {x}2]", Mesh(x=3, y=1 << 16))
    contract, formula = contract_of(step.operand, step.result), formula_of_step(step)

    def lower(plan: Any, device: int) -> Any:
        program = lower_plan(plan, device)
        (listed,) = program.instructions
        return dataclasses.replace(program, instructions=(dataclasses.replace(listed, rounds=listed.rounds[1:]),))

    monkeypatch.setattr(formulas, "lower_plan", lower)
    with pytest.raises(UndecidedError, match="a device gets 2 of its 3 shares"):
        formula_claims(step, contract, formula)


def test_a_refinement_of_other_digits_is_refused():
    """The contract of one pair and the step of another one with the same radices."""
    mesh = Mesh(x=3, y=3)
    step = exchange("f32[{x}5, {y}3]", "f32[{y}5, {x}3]", mesh)
    other = contract_of(*(Layout.parse(text, mesh) for text in ("f32[{y}5, {x}3]", "f32[{x}5, {y}3]")))
    with pytest.raises(UndecidedError, match="other digits than the layouts have"):
        formula_claims(step, other, formula_of_step(step))


def test_symbols_follow_the_arithmetic_of_positions():
    """(p // 4 % 2 + j) % 2 is a turned coordinate; adding (new - old) * stride replaces one coordinate."""
    here = SymbolicPosition()
    turned = (here // 4 % 2 + RoundDigit("j0")) % 2
    assert turned == SymbolicCoordinate(4, 2, "j0")
    assert (here + (turned - here // 1 % 2) * 1).replaced == {1: turned}
    shifted = (here // 4 % 2 + RoundDigit("j0") + (here // 2 % 2) * 3) % 2
    assert shifted == SymbolicCoordinate(4, 2, "j0", (RoundShift(3, 2, 2),))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda p: (p // 4 % 2 + 1) % 2,  # a number in place of the round's digit
        lambda p: (p // 4 % 2 + RoundDigit("j0")) % 3,  # another modulus
        lambda p: (p // 4 % 2 + RoundDigit("j0") + 1) % 2,  # a shift that is no coordinate
        lambda p: p + (p // 4 % 2 - p // 1 % 2) * 4,  # written to another place
        lambda p: p + (p // 4 % 2 - p // 1 % 3) * 1,  # of another radix
        lambda p: (p + (p // 4 % 2 - p // 1 % 2) * 1) // 4,  # read from the sender
        lambda p: p + (p // 4 % 2 - p // 1 % 2) * 1 + (p // 4 % 2 - p // 1 % 2) * 1,  # replaced twice
    ],
)
def test_other_arithmetic_is_refused(wrong):
    with pytest.raises(UndecidedError):
        wrong(SymbolicPosition())
