"""Exchanges and permutes: right lists are accepted on any pair, and every changed list is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from reshard.errors import UndecidedError
from reshard.geometry.blocks import Axis, block_part
from reshard.lower import lower_plan
from reshard.lower.program import Exchange
from reshard.plans.plan import StepSpec, chain
from reshard.proofs.symbolic import transfers
from reshard.proofs.symbolic.contract import StepContract
from reshard.proofs.symbolic.form import Tied
from reshard.proofs.symbolic.transfers import boxes_of, check_exchange, check_permute
from reshard.types import Layout, Mesh
from tests.layouts import random_pair
from tests.proofs.contracts import contract_of, one_step


def lowered(kind: str, source: str, target: str, mesh: Mesh, **mode: object) -> tuple[Any, StepContract]:
    plan = one_step(kind, source, target, mesh, **mode)
    contract = contract_of(plan.source, plan.target)
    return lower_plan(plan).instructions[0], contract


def check_with_sizes_tied(step: Exchange, contract: StepContract) -> None:
    """Checks as the prover does: digits that boxes cut get no name, and the check starts again."""
    try:
        check_exchange(step, contract)
    except Tied as tied:
        assert tied.places <= contract.names
        digits = contract.digits and tuple(
            d._replace(name=None if d.place in tied.places else d.name) for d in contract.digits
        )
        check_exchange(step, replace(contract, digits=digits, names=contract.names - tied.places))


@pytest.mark.parametrize("seed", range(3))
def test_right_exchanges_are_accepted(seed: int):
    choose = random.Random(seed)
    for _ in range(40):
        source, target = random_pair(choose, "float32")
        if 0 in source.shape or source.mesh != target.mesh:
            continue
        plan = chain(source, target, [StepSpec("exchange", target)]) if source != target else None
        if plan is not None:
            check_with_sizes_tied(lower_plan(plan).instructions[0], contract_of(source, target))


def test_boxes_by_hand():
    """Device 1's 5 rows to device 2's columns 4 and 5, as in the docstring of the module."""
    step, _ = lowered("exchange", "f32[{x}5, 6]", "f32[15, {x}2]", Mesh(x=3))
    boxes = boxes_of(step)
    rows = zip(boxes.sender.tolist(), boxes.receiver.tolist(), boxes.src.tolist(), boxes.dst.tolist(), strict=True)
    (src, dst), *others = [(src, dst) for sender, receiver, src, dst in rows if (sender, receiver) == (1, 2)]
    assert not others and len(boxes.sender) == 9
    assert step.send.digits == (5, 6) and step.receive.digits == (15, 2)
    assert (src, dst) == ([[0, 5], [4, 2]], [[5, 5], [0, 2]])


EVEN = ("f32[{x}5, 6]", "f32[15, {x}2]", Mesh(x=3))
UNEVEN = ("f32[{x}3/10]", "f32[{y}5]", Mesh(x=4, y=2))


def first_transfer(change: Callable[[Any], Any]) -> Callable[[Exchange], Exchange]:
    def changed(step: Exchange) -> Exchange:
        first, *others = step.rounds[0]
        return replace(step, rounds=((*change(first), *others), *step.rounds[1:]))

    return changed


def moved(side: str) -> Callable[[Any], list]:
    """The first block without its first row, or one element further or nearer."""

    def change(transfer: Any) -> list:
        block = transfer.blocks[0]
        extent, *steps = block.axes[0]
        by = steps[0 if side == "src" else 1] if extent > 1 else 1 if getattr(block, side) == 0 else -1
        axes = (Axis(extent - 1 if extent > 1 else extent, *steps), *block.axes[1:])
        wrong = block._replace(**{side: getattr(block, side) + by}, axes=axes)
        return [transfer._replace(blocks=(wrong, *transfer.blocks[1:]))]

    return change


FAULTS = {
    "a transfer is missing": first_transfer(lambda t: []),
    "another receiver": first_transfer(lambda t: [t._replace(receiver=t.sender)]),
    "other elements are sent": first_transfer(moved("src")),
    "they are written elsewhere": first_transfer(moved("dst")),
    "no local copies": lambda step: replace(step, local=()),
    "a round is missing": lambda step: replace(step, rounds=step.rounds[1:]),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("pair", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_changed_lists_are_refused(pair: tuple, fault: str):
    step, contract = lowered("exchange", *pair)
    check_with_sizes_tied(step, contract)
    with pytest.raises(UndecidedError):
        check_with_sizes_tied(FAULTS[fault](step), contract)


def test_unstaged_messages_are_one_contiguous_box():
    """Whole rows are contiguous on both sides; columns are not."""
    step, contract = lowered("exchange", "f32[{x}5]", "f32[15]", Mesh(x=3))
    assert not step.staged
    check_exchange(step, contract)
    step, contract = lowered("exchange", *EVEN)
    assert step.staged
    with pytest.raises(UndecidedError, match="not contiguous in memory"):
        check_exchange(replace(step, staged=False), contract)


def test_unstaged_messages_of_several_boxes_are_refused():
    """The first message is cut into two boxes of the same elements: right if staged."""
    step, contract = lowered("exchange", "f32[{x}5]", "f32[15]", Mesh(x=3))
    first = step.rounds[0][0]
    halves = tuple(block_part(first.blocks[0], [span]) for span in ((0, 2), (2, 3)))
    cut = first_transfer(lambda t: [t._replace(blocks=halves)])(step)
    with pytest.raises(UndecidedError, match="several boxes"):
        check_exchange(cut, contract)


def test_chunks_tie_the_sizes_that_they_cut():
    """Messages of 10 elements, 5 by 2, in chunks of 4: the digit of 5 is cut, and that of 2 is not."""
    step, contract = lowered("exchange", *EVEN, chunk=4)
    with pytest.raises(Tied) as tied:
        check_exchange(step, contract)
    assert tied.value.places == {(0, 1)} < contract.names


def test_a_summand_stays_with_its_device():
    step, contract = lowered("exchange", "f32[{x}5, 6] + sum{y}", "f32[15, {x}2] + sum{y}", Mesh(x=3, y=2))
    check_exchange(step, contract)
    rounds = tuple(tuple(t._replace(sender=t.sender ^ 1) for t in transfers) for transfers in step.rounds)
    with pytest.raises(UndecidedError, match="a summand of another device"):
        check_exchange(replace(step, rounds=rounds), contract)


@pytest.mark.parametrize(
    ("source", "target", "mesh"),
    [
        ("f32[{x}{y}2]", "f32[{y}{x}2]", Mesh(x=3, y=2)),
        ("f32[{x}5, {y}7]", "f32[{y}5, {x}7]", Mesh(x=3, y=3)),
        ("f32[2{x}3{y}]", "f32[2{y}3{x}]", Mesh(x=5, y=5)),
        ("f32[{x}3/10]", "f32[{y}3/10]", Mesh(x=4, y=4)),
    ],
)
def test_permutes(source: str, target: str, mesh: Mesh):
    """Right pairs are accepted in any order; two swapped senders are not."""
    step, contract = lowered("permute", source, target, mesh)
    check_permute(replace(step, pairs=step.pairs[::-1]), contract)
    (a, b), (c, d), *others = step.pairs
    with pytest.raises(UndecidedError):
        check_permute(replace(step, pairs=((c, b), (a, d), *others)), contract)
    with pytest.raises(UndecidedError, match="each receiver once"):
        check_permute(replace(step, pairs=((a, b), (c, b), *others)), contract)


@pytest.mark.parametrize(
    ("pieces", "what"),
    [
        ([[(0, 3), (0, 2)], [(3, 2), (0, 2)]], None),
        ([[(0, 5), (0, 1)], [(0, 2), (1, 1)], [(2, 3), (1, 1)]], None),
        ([[(0, 3), (0, 2)], [(2, 2), (0, 2)]], "overlap"),  # as many elements as a share, but row 4 is missing
        ([[(0, 3), (0, 2)], [(3, 1), (0, 2)]], "not all of it"),
    ],
)
def test_the_pieces_of_a_share_tile_it(pieces: list, what: str | None):
    """A share of 5 by 2 elements, as (start, extent) along both digits."""
    if what is None:
        transfers._check_pieces(np.array(pieces), [5, 2])
    else:
        with pytest.raises(UndecidedError, match=what):
            transfers._check_pieces(np.array(pieces), [5, 2])


def test_too_many_pieces_are_not_compared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transfers, "MOST_PIECES", 1)
    step, contract = lowered("exchange", *EVEN, chunk=4)
    with pytest.raises(UndecidedError, match="too many to compare"):
        check_with_sizes_tied(step, contract)
    monkeypatch.setattr(transfers, "MOST_CELLS", 1)
    step, contract = lowered("exchange", *UNEVEN)
    with pytest.raises(UndecidedError, match="a grid of too many boxes"):
        check_exchange(step, contract)


def test_another_layout_of_the_same_tiles_is_refused():
    """The lists of one exchange do not fit a target that deals the elements out differently."""
    step, _ = lowered("exchange", *UNEVEN)
    other = [Layout.parse(text, Mesh(x=4, y=2)) for text in ("f32[{x}3/10]", "f32[5{y}]")]
    with pytest.raises(UndecidedError):
        check_exchange(step, contract_of(*other))
